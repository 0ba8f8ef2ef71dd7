"""Ends that are not the plan's: Ctrl-C, SIGTERM, a killed measurer, a killed supervisor."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from fastload import open_run

GONE_S = 5.0  # the promise is 2 s; a busy machine gets the rest
# 64 requests each: one wave, then two, then 32 of them. So the third level is the long one, about 3 s.
LEVELS = ["--levels", "64,32,2", "--num-requests", "64", "--osl", "8"]


@pytest.fixture
def slow_third(start: Any, sim_url: Any, until: Any, tmp_path: Path) -> Any:
    """A sweep that stands in its third level, which is a long one: (process, run directory)."""
    url = sim_url(ttft_ms=20, step_ms=12)

    def go(*words: str, **options: Any) -> tuple[Any, Path]:
        process = start("sweep", "--url", url, *LEVELS, *words, **options)
        until(lambda: list(tmp_path.glob("results/*/requests/02-c2")) or process.poll() is not None)
        assert process.poll() is None, process.communicate()
        (path,) = (tmp_path / "results").iterdir()
        until(lambda: measured_events(path) > 0)
        return process, path

    return go


def measured_events(path: Path) -> int:
    """Events of the third level as the display last showed them."""
    state = json.loads((path / "progress.json").read_text())
    return int(state["events"]) if state["level"] == 2 else 0


def check_stopped(path: Path, status: str) -> dict[str, Any]:
    """Finished levels are whole, the third is not, and its rows so far are there; returns the summary."""
    summary: dict[str, Any] = json.loads((path / "summary.json").read_text())
    assert summary["status"] == status and summary["interrupted"] is (status == "interrupted")
    assert [(level["level"], level["complete"]) for level in summary["levels"]] == [(64, True), (32, True), (2, False)]
    assert [level["ok"] for level in summary["levels"][:2]] == [64, 64]
    run = open_run(path)
    assert run.notes == () and run.manifest["status"] == status
    rows = run.requests("02-c2").to_pylist()
    assert len({row["request"] for row in rows}) == len(rows) > 2
    assert not list(path.rglob("*.tmp"))
    return summary


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_in_the_third_level(
    signum: int, code: int, slow_third: Any, interrupt: Any, children: Any, gone: Any
) -> None:
    process, path = slow_third()
    below = children(process.pid)
    assert len(below) == 1 and "measurer" in "".join(below.values())
    begun = time.monotonic()
    if signum == signal.SIGINT:
        interrupt(process)  # a terminal sends it to the measurer too
    else:
        process.send_signal(signum)
    out, err = process.communicate(timeout=GONE_S)
    took = time.monotonic() - begun
    print(f"gone after {took:.2f} s")
    assert process.returncode == code and took < GONE_S
    assert gone(below)
    name = signal.Signals(signum).name
    assert err.splitlines()[-1].startswith(f"fastload: stopped by {name}") and str(path.name) in err.splitlines()[-1]
    assert "Traceback" not in err and "interrupted" in out
    check_stopped(path, "interrupted")
    states = Counter(row["status"] for row in open_run(path).requests("02-c2").to_pylist())
    assert states["cancelled"] > 0 and set(states) <= {"ok", "cancelled"}


def test_a_second_signal_waits_for_nobody_and_keeps_what_is_sealed(
    slow_third: Any, interrupt: Any, children: Any, gone: Any
) -> None:
    process, path = slow_third()
    below = children(process.pid)
    time.sleep(1.2)  # until blocks of more than a second are sealed
    os.kill(next(iter(below)), signal.SIGSTOP)  # a measurer that would let the first one wait
    interrupt(process)
    time.sleep(0.3)
    interrupt(process)
    out, err = process.communicate(timeout=GONE_S)
    assert process.returncode == 130 and out == ""
    assert gone(below)
    assert "Traceback" not in err
    assert err.splitlines()[-1].startswith("fastload: stopped by SIGINT") and path.name in err.splitlines()[-1]
    run = open_run(path)
    assert run.manifest["status"] == "interrupted" and run.notes == ()
    assert [entry["complete"] for entry in run.manifest["levels"]] == [True, True, True, False]  # the warm-up first
    statuses = Counter(run.requests("02-c2")["status"].to_pylist())
    assert statuses["ok"] > 0 and set(statuses) <= {"ok", "cancelled"}
    assert not (path / "summary.json").exists() and not list(path.rglob("*.tmp"))
    assert "interrupted: stopped by SIGINT" in (path / "run.log").read_text()


def test_a_killed_measurer(slow_third: Any, children: Any) -> None:
    process, path = slow_third()
    (measurer,) = children(process.pid)
    time.sleep(1.2)  # until blocks of more than a second are sealed
    os.kill(measurer, signal.SIGKILL)
    _, err = process.communicate(timeout=GONE_S + 5)
    assert process.returncode == 1 and "Traceback" not in err
    assert "the measuring process ended by SIGKILL" in err.splitlines()[-1]
    check_stopped(path, "crashed")
    rows = open_run(path).requests("02-c2").to_pylist()
    assert any(row["status"] == "ok" for row in rows)


def test_a_killed_supervisor(slow_third: Any, children: Any, gone: Any) -> None:
    process, path = slow_third()
    below = children(process.pid)
    process.kill()
    process.wait()
    assert gone(below)
    assert "Traceback" not in process.stderr.read()  # the measurer ends without a word
    assert json.loads((path / "manifest.json").read_text())["status"] == "running"
    run = open_run(path)
    assert any("cut off" in note for note in run.notes) and any("02-c2 has no end" in note for note in run.notes)
    assert run.manifest["status"] == "crashed"
    assert len(run.requests("00-c64")) >= 64 and len(run.requests("01-c32")) >= 64
    assert open_run(path).notes == run.notes
    assert (path / "run.log").read_text().count("cut off") == 1  # finished once, and in order from then on


def test_the_embedded_engine_goes_with_a_killed_supervisor(
    start: Any, children: Any, gone: Any, until: Any, tmp_path: Path
) -> None:
    process = start("sweep", "--levels", "2", "--osl", "8", "--duration", "30s")
    until(lambda: list(tmp_path.glob("results/*/requests/00-c2")))
    below = children(process.pid)
    assert len(below) == 2  # the engine and the measurer
    process.kill()
    process.wait()
    assert gone(below)


def test_ctrl_c_ends_the_embedded_engine_too(
    start: Any, children: Any, gone: Any, until: Any, interrupt: Any, tmp_path: Path
) -> None:
    process = start("sweep", "--levels", "2", "--osl", "8", "--duration", "30s", "--json", "--quiet")
    until(lambda: list(tmp_path.glob("results/*/requests/00-c2")))
    until(lambda: list(tmp_path.glob("results/*/progress.json")))
    below = children(process.pid)
    time.sleep(0.5)
    interrupt(process)
    out, err = process.communicate(timeout=GONE_S)
    assert process.returncode == 130 and gone(below)
    assert json.loads(out)["interrupted"] is True
    assert len(err.splitlines()) == 1 and "stopped by SIGINT" in err
