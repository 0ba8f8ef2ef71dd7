"""The report of runs as a user leaves them: finished, interrupted, cut off, and two that speculate and do not."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from fastload import open_run, sim
from fastload.analysis.configuration import configuration

pytestmark = pytest.mark.limit(180)


def test_a_finished_run(fastload: Any, sim_run: Any) -> None:
    ended = fastload("report", str(sim_run.path))
    assert (ended.code, ended.err) == (0, "")
    assert "[SIMULATED]" in ended.out.splitlines()[0] and "SIMULATED: the target was" in ended.out
    found = json.loads(fastload("report", str(sim_run.path), "--json").out)
    summary = json.loads((sim_run.path / "summary.json").read_text())
    (one,) = found["configurations"]
    assert one["levels"] == summary["levels"]
    (row,) = found["capacity"]["rows"]
    assert {key: row[key] for key in summary["capacity"]} == summary["capacity"]
    assert found["simulated"] is True


def test_the_books_of_simulated_and_real_runs_balance(sim_run: Any, fastload: Any, llama_server: str) -> None:
    ended = fastload("sweep", "--url", llama_server, "--levels", "1,4", "--osl", "8", "--num-requests", "12", "--quiet")
    assert ended.ran, ended.err
    (path,) = (ended.cwd / "results").iterdir()
    for run in (sim_run.run, open_run(path)):
        levels = configuration(run).levels
        assert len(levels) >= 2
        for level in levels.values():
            assert level.figures["checks"]["bookkeeping_error"] < 1e-3


def test_a_run_that_was_cut_off(fastload: Any, sim_run: Any, tmp_path: Path) -> None:
    """As a crash leaves it: no end of its last level, no summary, status running, and nobody who writes it."""
    path = tmp_path / "cut"
    shutil.copytree(sim_run.path, path)
    for name in ("summary.json", "summary.csv"):
        (path / name).unlink()
    manifest = json.loads((path / "manifest.json").read_text())
    last = manifest["levels"][-1]
    manifest["levels"][-1] = {key: last[key] for key in ("index", "concurrency", "dir")} | {"complete": False}
    manifest |= {"status": "running", "verdict": None}
    manifest["supervisor"] |= {"pid": 2**22 - 3, "start": 1}
    (path / "manifest.json").write_text(json.dumps(manifest))
    ended = fastload("report", str(path))
    assert ended.code == 0, ended.err
    assert "[CRASHED]" in ended.out.splitlines()[0]
    assert "* incomplete" in ended.out
    found = json.loads(fastload("report", str(path), "--json").out)
    assert [cell["obstacle"] for cell in found["slo"]["rows"][0]["cells"]] == [None, None, "incomplete"]
    assert found["capacity"]["rows"][0]["c_max"] == 2


def test_an_interrupted_run(fastload: Any, start: Any, interrupt: Any, until: Any, tmp_path: Path) -> None:
    process = start("sweep", "--levels", "1,2", "--num-requests", "2000", "--osl", "4", "--quiet")
    until(lambda: list((tmp_path / "results").glob("*/requests/00-c1")))
    interrupt(process)
    process.communicate(timeout=60)
    assert process.returncode == 130
    (path,) = (tmp_path / "results").iterdir()
    ended = fastload("report", str(path))
    assert ended.code == 0, ended.err
    assert "[INTERRUPTED]" in ended.out.splitlines()[0]


def test_speculation_of_two_runs_has_an_interval(fastload: Any, command: tuple[str, ...], tmp_path: Path) -> None:
    """Two tokens an event at the same step: about twice as fast, which no load of this machine turns around."""
    paths = []
    for name, tokens in (("direct", 1), ("spec", 4)):
        labels = ("--label", "engine=sim", *(("--label", "speculation=draft") if tokens > 1 else ()))
        with sim.start(sim.Options(ttft_ms=5.0, step_ms=10.0, tokens_per_event=tokens), None) as url:
            words = ("--url", url, "--levels", "1,2", "--num-requests", "30", "--osl", "32", "--name", name, "--quiet")
            subprocess.run([*command, "sweep", *words, *labels], cwd=tmp_path, capture_output=True, timeout=120)
        paths += map(str, (tmp_path / "results").glob(f"*-{name}"))
    found = json.loads(fastload("report", *paths, "--json").out)
    (pair,) = found["speculation"]
    assert (pair["direct"], pair["spec"], pair["simulated"]) == ("direct", "spec", True)
    for level in pair["levels"]:
        low, high = level["interval"]
        assert 1 < low <= level["ratio"] <= high
        assert level["tokens_per_event"] == pytest.approx(4.0, rel=0.05)
        assert level["n"] == [30, 30]
    text = fastload("report", *paths).out
    assert "speculation: TPS of spec / direct [SIMULATED]" in text
