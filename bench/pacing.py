"""Does the engine send when it was told to? Open loop, thousands of requests a second at absolute due times.

    this process (core 1): Engine.arm(..., due_ns) ahead of time --> server (core 0) answers one token at once

The engine is driven directly, as the measurer does. Lateness = sent_ns - due_ns of every row: the engine reads the
clock just before send(2). Arrivals are evenly spaced, and drawn (exponential gaps) for the last rows.
"""

import gc
import mmap
import os
import select
import socket
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import rig

from fastload import _client, _timing

RATES = (1000, 5000, 10_000)
SECONDS = 4.0
STREAMS = 64
ARENA = 16 << 20
BLOCKS = 40
AHEAD = 512
LEAD_NS = 200_000_000
COLUMNS = (
    "requests/s", "arrivals", "achieved/s", "off %", "late us P50", "P99", "P99.9", "max", "core %",
    "read after us P50", "P99",
)
REQUEST = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n%s"
)
BODY = b'{"model":"fastload-truth","messages":[{"role":"user","content":"hello"}],"max_tokens":1,"stream":true}'


def main() -> None:
    """Interleaved: every rate once, then again."""
    given = rig.order(
        __doc__ or "",
        lambda words: words.add_argument("--seconds", type=float, default=SECONDS, help="of each [%(default)s]"),
    )
    rig.pin(rig.CLIENT_CPU)
    cases = [(rate, shape) for shape in ("even", "drawn") for rate in RATES]
    runs: dict[tuple[int, str], list[dict[str, float]]] = {case: [] for case in cases}
    for number in range(given.runs):
        for rate, shape in cases:
            runs[rate, shape].append(one(rate, shape, given.seconds, number))
    names = ("achieved", "off", "p50", "p99", "p999", "max", "core", "read50", "read99")
    rig.answer(
        given, "pacing", f"Open loop: send lateness, {STREAMS} connections, {given.seconds:g} s each",
        "CLOCK_MONOTONIC, read just before send(2)", COLUMNS,
        [[rate, shape, *rig.middles(runs[rate, shape], *names)] for rate, shape in cases],
        packages=rig.versions("Cython"), data={f"{rate} {shape}": runs[rate, shape] for rate, shape in cases},
        notes=("read after: from the kernel's stamp of an answer to its read: reading must not wait for pacing",),
    )


def one(rate: int, shape: str, seconds: float, seed: int) -> dict[str, float]:
    """One rate."""
    requests = int(rate * seconds)
    gaps = np.full(requests, 1.0) if shape == "even" else np.random.default_rng(seed).exponential(1.0, requests)
    offsets = (np.cumsum(gaps) * 1e9 / rate).astype("i8").tolist()
    with tempfile.TemporaryDirectory(prefix="fastload-bench-") as folder:
        log = Path(folder) / "log"
        with rig.truth.start(rig.truth.Pace(0, 0), log, rig.core(rig.SERVER_CPU)) as url:
            rows, delays, share = load(url, offsets)
    field = {name: i for i, name in enumerate(_timing.ROW_FIELDS)}
    ok = rows[rows[:, field["http_status"]] == 200]
    if len(ok) != requests:
        raise SystemExit(f"{requests - len(ok)} of {requests} requests failed: no figures")
    sent, due = ok[:, field["sent_ns"]], ok[:, field["due_ns"]]
    late = rig.quantiles((sent - due) / 1e3, 50, 99, 99.9, 100)
    asked = (requests - 1) / ((due.max() - due.min()) / 1e9)
    achieved = (requests - 1) / ((sent.max() - sent.min()) / 1e9)
    return {
        "achieved": achieved, "off": 100 * (achieved / asked - 1), "p50": late[0], "p99": late[1], "p999": late[2],
        "max": late[3], "core": 100 * share, "read50": delays[0], "read99": delays[1],
    }


def load(url: str, offsets: list[int]) -> tuple[np.ndarray, list[float], float]:
    """Rows, P50 and P99 of the answers' read time minus kernel stamp (us), and the share of the core that was used."""
    at = urlsplit(url)
    memory = mmap.mmap(-1, BLOCKS * _timing.block_bytes(arena=ARENA))
    recorder = _timing.Recorder(memory, BLOCKS, arena=ARENA)
    engine = _client.Engine(recorder, STREAMS, bytearray(_client.MEMORY_BYTES), "kernel")
    engine.low_water = AHEAD
    for slot in range(STREAMS):
        connection = socket.create_connection((at.hostname, at.port))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setblocking(False)
        engine.attach(slot, connection.detach())
    request = REQUEST % (len(BODY), BODY)
    poll = select.epoll()
    poll.register(engine.fileno(), select.EPOLLIN)
    gc.collect()
    gc.disable()
    engine.begin_level(0, STREAMS, 0, len(offsets))
    origin = _timing.now_ns() + LEAD_NS
    used, began = os.times(), _timing.now_ns()
    armed = 0

    def refill() -> None:
        nonlocal armed
        while armed < len(offsets) and engine.armed < 2 * AHEAD:
            engine.arm(armed, request, origin + offsets[armed])
            armed += 1
        engine.pump()

    refill()
    while engine.wants() or engine.busy:
        poll.poll(0.1)
        if engine.drain():
            refill()
    ended, spent = _timing.now_ns(), os.times()
    gc.enable()
    recorder.seal()
    blocks = [_timing.read_block(memory, index, arena=ARENA) for index in recorder.take_sealed()]
    there = [block for block in blocks if block is not None]
    rows = np.concatenate([np.frombuffer(block.rows, "<i8").reshape(-1, len(_timing.ROW_FIELDS)) for block in there])
    share = (sum(spent[:2]) - sum(used[:2])) / ((ended - began) / 1e9)
    delay = np.concatenate([np.frombuffer(block.events["delay_ns"], "<i4") for block in there])
    text = np.concatenate([np.frombuffer(block.events["channel"], "u1") for block in there]) == _timing.CH_CONTENT
    return rows, rig.quantiles(delay[text] / 1e3, 50, 99), share


if __name__ == "__main__":
    main()
