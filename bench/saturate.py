"""How many events a second can one core take, when the server does not wait? fastload against two libraries,
one of them twice (stock asyncio with json, uvloop with orjson).

    server (core 0) --unpaced: each of 64 streams gets its next event as soon as its turn comes--> client (core 1)

The rate is the client's: its events over the time from its first send to its last read. The server's sends would not
do: a whole answer fits into a socket, so it runs ahead of a slow client. A server that runs out first shows as a client
core below 100 %: the last column is then what the client could have taken, one core divided by its CPU per event.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import rig

STREAMS = 64
TOKENS = 512
# enough requests for a second or two of each
REQUESTS = {"fastload": 64 * 20, "aiohttp": 64 * 4, "aiohttp_uvloop_orjson": 64 * 6, "httpx": 64 * 2}
COLUMNS = ("client", "events/s", "ratio", "CPU us/event", "core %", "coalesced %", "events/s a core could take")


def main() -> None:
    """Interleaved: each client once, then again."""
    given = rig.order(__doc__ or "")
    rig.pin(rig.SERVER_CPU)
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in REQUESTS}
    for _ in range(given.runs):
        for name, requests in REQUESTS.items():
            runs[name].append(own(requests) if name == "fastload" else library(name, requests))
    best = rig.middle([run["rate"] for run in runs["fastload"]]) or 1.0
    rows = []
    for name in REQUESTS:
        rate, cpu, core, coalesced = rig.middles(runs[name], "rate", "cpu", "core", "coalesced")
        rows.append([name, rate, best / (rate or 1), cpu, core, coalesced, 1e6 / (cpu or 1)])
    rig.answer(
        given, "saturate", f"Unpaced events per second on one core, {STREAMS} streams", "CLOCK_MONOTONIC of the client",
        COLUMNS, rows, packages=rig.versions("uvloop", "aiohttp", "httpx", "orjson"), data=runs,
        notes=("ratio: fastload's rate / this one; CPU: of the process that reads, all of it",),
    )


def own(requests: int) -> dict[str, float]:
    """fastload's measurer."""
    level = rig.drive(STREAMS, requests, TOKENS, 0, 0)
    return {
        "rate": 1e6 * level["cpu_share"] / level["cpu_us_per_event"]["measurer"],  # events over the level's time
        "cpu": level["cpu_us_per_event"]["measurer"],
        "core": 100 * level["cpu_share"],
        "coalesced": 100 * level["coalesced_share"],
    }


def library(name: str, requests: int) -> dict[str, float]:
    """One of loops.py, over the same server."""
    with tempfile.TemporaryDirectory(prefix="fastload-bench-") as folder:
        log, out = Path(folder) / "log", Path(folder) / "out.npz"
        with rig.truth.start(rig.truth.Pace(0, 0), log, rig.core(rig.SERVER_CPU)) as url:
            loop = [sys.executable, "-P", str(Path(__file__).with_name("loops.py")), name, url]
            words = [*loop, str(STREAMS), str(requests), str(TOKENS), str(out)]
            subprocess.run(words, check=True, preexec_fn=lambda: rig.pin(rig.CLIENT_CPU))
        with np.load(out) as seen:
            cpu, seconds = int(seen["cpu_ns"]), (int(seen["stamps"].max()) - int(seen["sent"].min())) / 1e9
    return {
        "rate": requests * TOKENS / seconds,
        "cpu": cpu / 1e3 / (requests * TOKENS),
        "core": 100 * cpu / 1e9 / seconds,
    }


if __name__ == "__main__":
    main()
