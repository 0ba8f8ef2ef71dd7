"""`fastload watch` beside real runs: the same picture, the same end, and not a byte of theirs touched."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from fastload import open_run

WORDS = ["--levels", "1,2", "--duration", "2s", "--osl", "8"]
HEAVY = ("numpy", "pyarrow", "httpx", "asyncio", "uvloop")


@pytest.fixture
def going(start: Any, sim_url: Any, until: Any, tmp_path: Path) -> Any:
    """A sweep that measures: (process, run directory)."""

    def go(*words: str) -> tuple[Any, Path]:
        process = start("sweep", "--url", sim_url(ttft_ms=20, step_ms=10), *(words or WORDS))
        until(lambda: list(tmp_path.glob("results/*/progress.json")) or process.poll() is not None)
        (path,) = (tmp_path / "results").iterdir()
        until(lambda: json.loads((path / "progress.json").read_text())["level"] >= 0)
        return process, path

    return go


def test_beside_a_run_to_its_end(going: Any, start: Any, tmp_path: Path) -> None:
    process, path = going()
    lines = start("watch", str(path), "--json")
    table = start("watch", "results")
    out, _ = process.communicate(timeout=40)
    told, err = lines.communicate(timeout=20)
    assert err == ""
    looks = [json.loads(line) for line in told.splitlines()]
    assert [look["status"] for look in looks] == ["running"] * (len(looks) - 1) + ["complete"]
    levels = [look["progress"]["level"] for look in looks]
    assert levels == sorted(levels) and set(levels) == {0, 1}
    first, final = (datetime.fromisoformat(looks[at]["progress"]["updated_utc"][:26] + "Z") for at in (0, -1))
    assert len(looks) <= 2 * (final - first).total_seconds() + 3  # at most twice a second
    last = looks[-1]
    assert last["summary"] == json.loads((path / "summary.json").read_text())
    assert last["progress"]["verdict"] == last["summary"]["verdict"]
    assert [level["level"] for level in last["progress"]["finished"]] == [0]
    assert [level["concurrency"] for level in last["progress"]["plan"]] == [1, 2]
    shown, said = table.communicate(timeout=20)
    assert re.sub(r"run in .*", "", shown) == re.sub(r"run in .*", "", out)  # the same table
    assert "[SIMULATED] level 1/2: concurrency 1" in said and "[SIMULATED] level 2/2 ended: " in said
    code = 1 if process.returncode else 0
    assert (lines.returncode, table.returncode) == (code, code)
    assert open_run(path).notes == ()


def test_a_run_that_goes_on_is_not_touched(going: Any, fastload: Any, command: Any, tmp_path: Path) -> None:
    process, path = going("--levels", "1", "--duration", "30s", "--osl", "8")
    leftover = path / "requests/00-c1/part-000.parquet.tmp"
    leftover.write_bytes(b"PAR1")
    ended = fastload("watch", str(path), "--once")
    assert ended.code == 0 and ended.err == ""
    (line,) = ended.out.splitlines()
    assert line.startswith("[SIMULATED] level 1/1 measuring: ") and "in flight " in line
    assert leftover.exists() and json.loads((path / "manifest.json").read_text())["status"] == "running"
    code = f"import sys\nfrom fastload.cli import main\ntry:\n    main(['watch', {str(path)!r}, '--once'])\nfinally:\n"
    code += f"    print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=30)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)


def test_leaving_does_not_end_the_run(going: Any, start: Any) -> None:
    process, path = going()
    watching = start("watch", str(path), "--json")
    assert json.loads(watching.stdout.readline())["status"] == "running"
    watching.send_signal(signal.SIGINT)
    _, err = watching.communicate(timeout=10)
    assert watching.returncode == 130 and "Traceback" not in err
    process.communicate(timeout=40)
    assert process.returncode in (0, 1) and open_run(path).manifest["status"] == "complete"


def test_a_run_that_is_killed_while_it_is_watched(going: Any, start: Any, fastload: Any, until: Any) -> None:
    process, path = going("--levels", "2,1", "--num-requests", "40", "--osl", "8")
    until(lambda: json.loads((path / "progress.json").read_text())["level"] == 1)
    watching = start("watch", str(path))
    until(lambda: watching.stderr.readline().startswith("[SIMULATED] level 2/2"))
    process.kill()
    process.wait()
    out, err = watching.communicate(timeout=20)
    assert watching.returncode == 1 and "Traceback" not in err
    assert re.search(r"^ *2 ", out, re.MULTILINE)  # the finished level
    assert "the run was cut off" in err.splitlines()[-1] and "no end" in out
    assert open_run(path).manifest["status"] == "crashed"
    again = fastload("watch", str(path))
    assert (again.code, again.out) == (1, out)
    assert not (path / "summary.json").exists()


def test_a_finished_run(sim_run: Any, fastload: Any) -> None:
    code = 1 if sim_run.ended.code else 0
    ended = fastload("watch", str(sim_run.path))
    assert ended.code == code
    assert re.sub(r"run in .*", "", ended.out) == re.sub(r"run in .*", "", sim_run.ended.out)
    ended = fastload("watch", str(sim_run.path), "--json")
    (line,) = ended.out.splitlines()
    look = json.loads(line)
    assert (look["status"], look["notes"], ended.code) == ("complete", [], code)
    assert look["summary"] == json.loads((sim_run.path / "summary.json").read_text())


def test_on_a_terminal(going: Any, start: Any, until: Any) -> None:
    ours, theirs = os.openpty()
    try:
        process, path = going()
        watching = start("watch", str(path), stdout=theirs, stderr=theirs, env={"TERM": "xterm", "COLUMNS": "100"})
        os.close(theirs)
        raw = b""
        while True:
            try:
                raw += os.read(ours, 65536)
            except OSError:
                break
        assert watching.wait(20) in (0, 1)
        process.communicate(timeout=20)
    finally:
        os.close(ours)
    text = raw.decode()
    assert "fastload sweep" in text and "level 2/2" in text and "client delay" in text and "Traceback" not in text
    assert raw.rindex(b"\x1b[?25h") > raw.rindex(b"\x1b[?25l")  # the cursor is back
    assert "verdict:" in text


def test_no_run(fastload: Any) -> None:
    ended = fastload("watch", "nowhere")
    assert ended.code == 2 and ended.line == (
        "fastload: RUN 'nowhere': does not exist; give a run's directory, or the one above it, such as results"
    )
