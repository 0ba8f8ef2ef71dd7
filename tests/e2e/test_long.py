"""What a run of hours would show: many levels, parts and requests, and no more memory or descriptors for them."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fastload import open_run
from fastload.cli.display import Narrator
from fastload.load.measurer import BRACKETS, Measurer
from fastload.load.progress import Progress

# A part every half second, as a level of half a day has them.
PROGRAM = (
    "import sys\nfrom fastload.trace import writer\nwriter.PART_INTERVAL_NS = 500_000_000\n"
    "from fastload.cli import main\nmain(sys.argv[1:])\n"
)


def memory_mb(pid: int) -> float:
    """Private memory of a process: the blocks it shares are counted with nobody."""
    told = Path(f"/proc/{pid}/status").read_text()
    (line,) = [line for line in told.splitlines() if line.startswith("RssAnon:")]
    return int(line.split()[1]) / 1024


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def level_now(path: Path) -> int:
    return int(json.loads((path / "progress.json").read_text())["level"])


@pytest.mark.limit(150)
def test_a_hundred_levels(start: Any, sim_url: Any, children: Any, until: Any, tmp_path: Path, the_run: Any) -> None:
    levels = ",".join(str(n) for n in range(1, 101))
    words = ["--levels", levels, "--num-requests", "8", "--rounds", "0", "--osl", "2", "--isl", "16", "--quiet"]
    process = start("sweep", "--url", sim_url(ttft_ms=2, step_ms=2), *words, "--max-failures", "100000")
    until(lambda: list(tmp_path.glob("results/*/progress.json")))
    (path,) = (tmp_path / "results").iterdir()
    seen: list[list[tuple[float, int]]] = []
    for at in (20, 90):
        until(lambda at=at: level_now(path) >= at, 120)
        seen.append([(memory_mb(pid), descriptors(pid)) for pid in (process.pid, *children(process.pid))])
    _, err = process.communicate(timeout=60)
    assert process.returncode in (0, 1) and "Traceback" not in err
    (supervisor, measurer), (supervisor_later, measurer_later) = seen
    print(seen)
    assert supervisor_later[1] <= supervisor[1] + 2  # a file that is just being written
    assert measurer_later[1] <= measurer[1] + 90  # a connection for each further stream, at most
    assert supervisor_later[0] < supervisor[0] + 15 and measurer_later[0] < measurer[0] + 15
    run = the_run(tmp_path / "results")
    assert run.manifest["status"] == "complete" and len(run.level_dirs()) == 101
    assert (path / "manifest.json").stat().st_size < 2_000_000


@pytest.mark.limit(150)
def test_a_long_level(sim_url: Any, children: Any, until: Any, tmp_path: Path) -> None:
    """Both processes need what they need after a third of it, though tens of thousands of answers come after."""
    url = sim_url(ttft_ms=4, step_ms=1)
    words = ["sweep", "--url", url, "--levels", "32", "--duration", "24s", "--osl", "4", "--isl", "16", "--quiet"]
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", PROGRAM, *words], cwd=tmp_path,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        until(lambda: list(tmp_path.glob("results/*/progress.json")))
        (path,) = (tmp_path / "results").iterdir()
        until(lambda: json.loads((path / "progress.json").read_text())["elapsed_s"] > 8 and level_now(path) == 0)
        pids = [process.pid, *children(process.pid)]
        before = [memory_mb(pid) for pid in pids]
        done = json.loads((path / "progress.json").read_text())["done"]
        until(lambda: json.loads((path / "progress.json").read_text())["elapsed_s"] > 22, 60)
        after = [memory_mb(pid) for pid in pids]
        more = json.loads((path / "progress.json").read_text())["done"] - done
        process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    print(f"after {done} answers {before} MB, {more} answers later {after} MB")
    assert more > 5000
    assert all(later < earlier + 20 for earlier, later in zip(before, after, strict=True))
    run = open_run(path)
    parts = list((path / "requests/00-c32").iterdir())
    assert len(parts) > 15
    requests = run.requests("00-c32")["request"].to_pylist()
    assert sorted(requests) == list(range(min(requests), max(requests) + 1))
    assert len((path / "run.log").read_text().splitlines()) < 60


def test_a_day_in_the_log() -> None:
    """Two states a second for 24 hours: the log has a line a minute."""
    lines: list[str] = []
    narrator = Narrator(lines.append)
    state = Progress(0, 8, 1, "measuring", 0, None, 0, 8, 0, 50.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 0.0, None)
    for half_seconds in range(2 * 86_400):
        narrator.take(dataclasses.replace(state, elapsed_s=half_seconds / 2))
    narrator.end()
    assert 1440 < len(lines) < 1440 + 100


def test_a_day_of_clock_samples() -> None:
    measurer = Measurer.__new__(Measurer)
    measurer.brackets, measurer.n_brackets, measurer.bracket_step = [], 0, 1
    samples = iter((second, second % 7, 30) for second in range(86_400))
    measurer.engine = SimpleNamespace(take_brackets=lambda: [next(samples)])
    for _ in range(86_400):
        kept = measurer.take_brackets()
        assert len(kept) <= BRACKETS
    seconds = [second for second, _, _ in kept]
    assert seconds[0] == 0 and seconds[-1] > 86_399 - 128 and len(seconds) > BRACKETS // 2
    assert {b - a for a, b in zip(seconds, seconds[1:], strict=False)} == {128}


def test_many_parts_are_read_one_after_the_other(tmp_path: Path, sim_run: Any) -> None:
    """A day has 1728; nothing of them is kept open."""
    path = tmp_path / sim_run.path.name
    (part,) = (sim_run.path / "requests/00-c1").iterdir()
    for kind in ("requests", "tokens"):
        (path / kind / "00-c1").mkdir(parents=True)
        for number in range(100):
            os.link(sim_run.path / kind / "00-c1" / part.name, path / kind / "00-c1" / f"part-{number:03d}.parquet")
    os.link(sim_run.path / "manifest.json", path / "manifest.json")
    before = descriptors(os.getpid())
    run = open_run(path)
    once = sim_run.run.requests("00-c1").num_rows
    assert run.requests("00-c1").num_rows == 100 * once
    assert descriptors(os.getpid()) == before
