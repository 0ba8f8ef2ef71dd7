"""The analysis of ten million tokens: the summary of a run, and everything `fastload report` computes of it.

The run is the made-up one of trace.py. Each figure is taken in a process of its own, which opens the run, computes and
says how long that took and how much memory it needed at most. Writing the run is not timed.
"""

import resource
import subprocess
import sys
import tempfile
import time
import trace
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import rig

from fastload import _timing
from fastload.analysis import capacity, overview, summary
from fastload.analysis.configuration import configuration, configurations
from fastload.analysis.slo import Slo
from fastload.trace.reader import open_run

GRID = 50  # limits of TTFT, and as many of TPS
COLUMNS = ("what", "value", "unit")


def summarise(path: Path) -> int:
    """What `fastload sweep` does at its end."""
    return int(summary.summarise(open_run(path))["levels"][0]["ok"])


def report(path: Path) -> int:
    """What `fastload report` does before it prints."""
    found = overview.overview(configurations([open_run(path)]), Slo())
    return int(found["configurations"][0]["levels"][0]["ok"])


def surface(path: Path) -> int:
    """Goodput and compliance over a grid of limits, once the run is read; says the time of the grid alone."""
    (level,) = configuration(open_run(path)).levels.values()
    began = _timing.now_ns()
    found = capacity.surface(level, Slo(), np.linspace(1, 100, GRID).tolist(), np.linspace(1, 100, GRID).tolist())
    print((_timing.now_ns() - began) / 1e9)
    assert found.goodput is not None
    return int(level.figures["ok"])


WORK: Mapping[str, Callable[[Path], int]] = {"summary": summarise, "report": report, "surface": surface}


def main() -> None:
    """Write the run, then each work as often as asked."""
    if len(sys.argv) == 4:
        return alone(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
    given = rig.order(
        __doc__ or "",
        lambda words: words.add_argument("--tokens", type=int, default=trace.TOKENS, help="of the trace [%(default)s]"),
    )
    waves = max(1, given.tokens // (trace.OSL * trace.STREAMS))
    requests = waves * trace.STREAMS
    runs: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory(prefix="fastload-bench-") as folder:
        path, _ = trace.write(Path(folder), waves)
        for _ in range(given.runs):
            run = {}
            for name in WORK:
                *more, took, cpu, peak = _told(name, path, requests)
                run[name] = more[0] if more else took
                if not more:
                    run[f"{name}, CPU"] = cpu
                run[f"{name}, peak memory"] = peak
            runs.append(run)
    units = ["MB" if name.endswith("memory") else "s" for name in runs[0]]
    rows = [[name, rig.middle([run[name] for run in runs]), unit] for name, unit in zip(runs[0], units, strict=True)]
    rig.answer(
        given, "analysis", f"The analysis of {requests * trace.OSL:,} tokens ({requests:,} requests)",
        "CLOCK_MONOTONIC", COLUMNS, rows, packages=rig.versions("pyarrow", "numpy"), data=runs,
        notes=(
            "summary: the opened run to the figures of summary.json; report: to those of fastload report; surface: "
            f"{GRID} x {GRID} limits over the requests already read; peak memory of the whole process; CPU beside the "
            "time, for a machine that others use too",
        ),
    )  # fmt: skip


def _told(name: str, path: Path, requests: int) -> list[float]:
    words = [sys.executable, __file__, name, str(path), str(requests)]
    return list(map(float, subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout.split()))


def alone(name: str, path: Path, requests: int) -> None:
    """Do one work; print its seconds, those of CPU, and the MB of memory it peaked at."""
    rig.pin(rig.CLIENT_CPU)
    began, spent = _timing.now_ns(), time.process_time()
    ok = WORK[name](path)
    took, cpu = (_timing.now_ns() - began) / 1e9, time.process_time() - spent
    if ok != requests:
        raise SystemExit(f"{ok} of {requests} requests are ok in the {name}")
    print(took, cpu, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


if __name__ == "__main__":
    main()
