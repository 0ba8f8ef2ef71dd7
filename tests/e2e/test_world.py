"""The world around a run misbehaves: closed streams, a full device, a directory that vanishes, a server that goes."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

SHORT = ["--levels", "1,2", "--num-requests", "3", "--osl", "4"]


@pytest.mark.parametrize("closed", ["<&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_are_no_obstacle(
    closed: str, quick: str, tmp_path: Path, the_run: Any, command: Any
) -> None:
    """As under cron or a service manager: no descriptor of ours may come to stand in their place."""
    argv = [*command, "sweep", "--url", quick, *SHORT]
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {closed}', "sh", *argv], cwd=tmp_path, capture_output=True, text=True, timeout=40
    )
    assert done.returncode in (0, 1) and "Traceback" not in done.stderr, done.stderr
    assert the_run(tmp_path / "results").manifest["status"] == "complete"


def test_a_result_that_cannot_be_printed_is_on_disk(start: Any, quick: str, tmp_path: Path, the_run: Any) -> None:
    with open("/dev/full", "w") as full:
        process = start("sweep", "--url", quick, *SHORT, "--quiet", stdout=full)
        _, err = process.communicate(timeout=40)
    run = the_run(tmp_path / "results")
    assert process.returncode == 1 and len(err.splitlines()) == 1
    assert "No space left" in err and run.path.name in err
    assert json.loads((run.path / "summary.json").read_text())["status"] == "complete"


def test_a_directory_removed_in_the_middle(start: Any, quick: str, tmp_path: Path, until: Any, children: Any) -> None:
    process = start("sweep", "--url", quick, "--levels", "1,2", "--duration", "1s", "--osl", "8")
    until(lambda: list(tmp_path.glob("results/*/requests/00-c1")))
    below = children(process.pid)
    (tmp_path / "results").rename(tmp_path / "gone")  # in one step, or files would come to stand in it meanwhile
    shutil.rmtree(tmp_path / "gone")
    _, err = process.communicate(timeout=20)
    assert process.returncode == 1 and "Traceback" not in err
    assert err.splitlines()[-1].startswith("fastload: cannot write results/")
    assert not any(Path(f"/proc/{pid}").exists() for pid in below)
    assert list(tmp_path.iterdir()) == []


def test_a_number_and_a_time_whichever_comes_first(fastload: Any, quick: str, tmp_path: Path, the_run: Any) -> None:
    words = ["--levels", "1", "--num-requests", "100000", "--duration", "1s", "--osl", "4"]
    ended = fastload("sweep", "--url", quick, *words)
    assert ended.ran, ended.err
    (level,) = json.loads((the_run(tmp_path / "results").path / "summary.json").read_text())["levels"]
    assert level["complete"] and 5 < level["measured"] < 100_000


def test_a_warm_up_that_gets_no_connection(fastload: Any, quick: str, tmp_path: Path) -> None:
    """Said soon: there is nothing to keep yet, and no reason to try a hundred times."""
    words = ["--levels", "64", "--isl", "40", "--connect-timeout", "0.001ms"]  # a server that went, in effect
    ended = fastload("sweep", "--url", quick, *words, timeout_s=25)
    assert ended.code == 1, ended.err
    assert "the warm-up request failed (connect: " in ended.line and "nothing was measured" in ended.line
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_goes_in_the_middle(start: Any, tmp_path: Path, until: Any, the_run: Any) -> None:
    """The rows so far and the failures are there, and the run ends by itself."""
    engine = start("serve-sim", "--port", "0", "--ttft-ms", "10", "--step-ms", "4", "--json")
    url = json.loads(engine.stdout.readline())["url"]
    words = ["--levels", "2,4", "--num-requests", "100", "--osl", "16", "--max-failures", "4"]
    process = start("sweep", "--url", url, *words)
    until(lambda: list(tmp_path.glob("results/*/requests/00-c2")))
    until(lambda: '"done": 0' not in next(tmp_path.glob("results/*/progress.json")).read_text())
    engine.send_signal(signal.SIGKILL)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 1 and "Traceback" not in err
    assert "--max-failures 4" in err.splitlines()[-1] and "level 4 was not tried" in err.splitlines()[-1]
    run = the_run(tmp_path / "results")
    statuses = set(run.requests("00-c2")["status"].to_pylist())
    assert "ok" in statuses and statuses <= {"ok", "reset", "truncated", "connect", "cancelled"} and len(statuses) > 1
    assert run.manifest["status"] == "failed" and "[FAILED]" in out
