"""How far is a token's stamp from the moment the server sent it? Every token joined, kernel and read stamps.

    server (core 0) --lockstep: all streams in one burst a step--> client (core 1)
           [clock -> log, then send]                               [kernel stamp | clock after recvmsg]

The ground-truth server reads CLOCK_MONOTONIC just before each send(); the error holds the send call, the loopback and
the client. Both stamps come from the same run: the read stamp is the kernel stamp plus the client's own delay.
"""

import rig

LEVELS = ((1, 20), (64, 20), (256, 20), (1024, 30), (4096, 50))  # (streams, ms a step)
TOKENS = 128
COLUMNS = (
    "streams", "step ms", "kernel us P50", "P99", "max", "read us P50", "P99", "max", "coalesced %", "CPU us/event",
    "core %", "in flight", "late steps",
)


def main() -> None:
    """Interleaved: all levels once, then again."""
    given = rig.order(
        __doc__ or "",
        lambda words: words.add_argument("--levels", default=",".join(str(c) for c, _ in LEVELS), help="[%(default)s]"),
        lambda words: words.add_argument("--tokens", type=int, default=TOKENS, help="of an answer [%(default)s]"),
    )
    wanted = [int(word) for word in given.levels.split(",")]
    levels = [(c, dict(LEVELS).get(c, 20)) for c in wanted]
    runs: dict[int, list[dict[str, object]]] = {c: [] for c in wanted}
    for _ in range(given.runs):
        for c, step in levels:
            runs[c].append(rig.drive(c, max(4, 2 * c), given.tokens, 50, step))
    rows = []
    for c, step in levels:
        flat = [_flat(run) for run in runs[c]]
        rows.append([c, step, *rig.middles(flat, *_NAMES)])
    rig.answer(
        given, "stamps", "Stamp error against the server's send time, all tokens joined", "CLOCK_MONOTONIC, ns",
        COLUMNS, rows, packages=rig.versions("uvloop", "Cython"), data={str(c): runs[c] for c in wanted},
        notes=("late steps: bursts that took the server longer than a step, its fault and not the client's",),
    )


_NAMES = (
    "k50", "k99", "kmax", "r50", "r99", "rmax", "coalesced", "cpu", "core", "in_flight", "late_steps",
)


def _flat(level: dict[str, object]) -> dict[str, object]:
    """A level's figures under the names of the columns; None where there is no such stamp."""
    found: dict[str, object] = {}
    for letter, source in (("k", "kernel"), ("r", "read")):
        errors = (level[source] or {"stamp_us": {}})["stamp_us"]  # type: ignore[index]
        found |= {f"{letter}{end}": errors.get(name) for end, name in (("50", "p50"), ("99", "p99"), ("max", "max"))}
    return found | {
        "coalesced": 100 * level["coalesced_share"],  # type: ignore[operator]
        "cpu": level["cpu_us_per_event"]["measurer"],  # type: ignore[index]
        "core": 100 * level["cpu_share"],  # type: ignore[operator]
        "in_flight": level["in_flight"],
        "late_steps": level["late_steps"],
    }


if __name__ == "__main__":
    main()
