"""What does a look at the clock cost, and how well is the distance between the two clocks known?

Kernel stamps are CLOCK_REALTIME, everything else CLOCK_MONOTONIC. The offset between them is bracketed: monotonic,
real, monotonic, and the narrowest of many such triples counts. It is wrong by at most half the bracket's width; its
spread over repeats says by how much in fact.
"""

import time

import rig

from fastload import _timing

CALLS = 200_000
REPEATS = 400
COLUMNS = ("what", "value", "unit")


def main() -> None:
    """Interleaved: everything once, then again."""
    given = rig.order(__doc__ or "")
    rig.pin(rig.CLIENT_CPU)
    runs: list[dict[str, float]] = []
    for _ in range(given.runs):
        run = {"an empty Python call": per_call(_nothing)}
        run["_timing.now_ns()"] = per_call(_timing.now_ns)
        run["time.monotonic_ns()"] = per_call(time.monotonic_ns)
        offsets, widths = [], []
        started = _timing.now_ns()
        for _ in range(REPEATS):
            offset, width = _timing.clock_offset(500)
            offsets.append(offset)
            widths.append(width)
        run["one offset of 500 brackets"] = (_timing.now_ns() - started) / REPEATS
        at = sorted(offsets)
        run["bracket width, median"] = sorted(widths)[REPEATS // 2]
        run["offset spread, P1 to P99"] = at[REPEATS * 99 // 100] - at[REPEATS // 100]
        run["offset spread, all"] = at[-1] - at[0]
        run["drift over the repeats"] = offsets[-1] - offsets[0]
        runs.append(run)
    rows = [[name, rig.middle([run[name] for run in runs]), "ns"] for name in runs[0]]
    rig.answer(
        given, "clock", "The clock, and the offset that makes kernel stamps monotonic", "CLOCK_MONOTONIC",
        COLUMNS, rows, packages=rig.versions("Cython"), data=runs,
        notes=("Python rows hold the call; the engine reads the clock natively",),
    )


def _nothing() -> None:
    pass


def per_call(call: object) -> float:
    """ns per call, the loop itself taken off."""
    steps = range(CALLS)
    start = _timing.now_ns()
    for _ in steps:
        pass
    empty = _timing.now_ns() - start
    start = _timing.now_ns()
    for _ in steps:
        call()  # type: ignore[operator]
    return (_timing.now_ns() - start - empty) / CALLS


if __name__ == "__main__":
    main()
