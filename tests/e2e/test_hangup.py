"""A terminal that goes away, a reader that leaves: the run goes on, and all of it is on disk."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import signal
import subprocess
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

TERMINAL = {"TERM": "xterm-256color"}


@pytest.fixture
def words(sim_url: Any) -> list[str]:
    """A sweep of about three seconds: a terminal can go before its end."""
    url = sim_url(ttft_ms=20, step_ms=10)
    return ["sweep", "--url", url, "--levels", "1,2", "--duration", "1.5s", "--osl", "8"]


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    """(our end, the program's end), both still open after the test or closed by it."""
    ours, theirs = pty.openpty()
    yield ours, theirs
    for fd in (ours, theirs):
        try:
            os.close(fd)
        except OSError:
            pass


def controlled(theirs: int, **more: Any) -> dict[str, Any]:
    """How to start a process whose controlling terminal is `theirs`."""
    control = {"preexec_fn": lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0)}
    return {"stdin": theirs, "stdout": theirs, "stderr": theirs, "start_new_session": True} | control | more


def begun(output: Path, until: Any) -> Path:
    """The run's directory, once its first level measures."""
    until(lambda: list(output.glob("*/requests/00-c1")))
    (path,) = output.iterdir()
    until(lambda: (path / "progress.json").exists())
    return path


def check_whole(path: Path) -> None:
    """Both levels are there, the files say how it ended, and the log that the terminal went."""
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["status"] == "complete"
    assert [entry["complete"] for entry in manifest["levels"]] == [True, True, True]
    summary = json.loads((path / "summary.json").read_text())
    assert [level["level"] for level in summary["levels"]] == [1, 2]
    progress = json.loads((path / "progress.json").read_text())
    assert progress["status"] == "complete" and progress["verdict"] == summary["verdict"]
    log = (path / "run.log").read_text()
    assert "level 2/2 ended" in log and "verdict: " in log
    assert log.splitlines()[-1].partition(" ")[2].startswith("complete")
    assert not list(path.rglob("*.tmp"))


@pytest.mark.parametrize("under_a_shell", [False, True], ids=["alone", "under a shell"])
def test_a_terminal_that_is_closed(
    under_a_shell: bool, words: list[str], terminal: Any, command: Any, tmp_path: Path, until: Any, gone: Any
) -> None:
    """As when an ssh line drops: SIGHUP from the kernel, and EIO for whatever is written from then on."""
    ours, theirs = terminal
    argv = [*command, *words]
    if under_a_shell:
        argv = ["sh", "-c", '"$@"; exit $?', "sh", *argv]  # the shell leads the session, and dies with it
    process = subprocess.Popen(argv, cwd=tmp_path, env=os.environ | TERMINAL, **controlled(theirs))
    try:
        os.close(theirs)
        path = begun(tmp_path / "results", until)
        assert b"fastload sweep" in os.read(ours, 1 << 20)  # the panel was drawn
        os.close(ours)
        code = process.wait(30)
        supervisor = json.loads((path / "manifest.json").read_text())["supervisor"]
        assert gone([supervisor["pid"]], 30)
    finally:
        process.kill()
        process.wait()
    check_whole(path)
    assert "SIGHUP: the terminal is gone, the run goes on" in (path / "run.log").read_text()
    if under_a_shell:
        assert code == -signal.SIGHUP
    else:
        # that of the run: nobody is there to read, but a script may look at it
        assert code == json.loads((path / "progress.json").read_text())["exit_code"]


def test_a_hangup_while_the_server_is_waited_for(command: Any, tmp_path: Path) -> None:
    """Nothing has begun, and still somebody wants that run."""
    waiting = ["sweep", "--url", "http://127.0.0.1:9", "--wait-ready", "1h"]
    process = subprocess.Popen(
        [*command, *waiting], cwd=tmp_path, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    with process:
        assert "waiting" in process.stderr.readline()
        process.send_signal(signal.SIGHUP)
        time.sleep(0.5)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 128 + signal.SIGTERM


def test_readers_that_leave(words: list[str], start: Any, tmp_path: Path, until: Any) -> None:
    """stdout and stderr are pipes, and whoever read them is gone before the result."""
    process = start(*words)
    path = begun(tmp_path / "results", until)
    process.stdout.close()
    process.stderr.close()
    assert process.wait(30) == 1
    check_whole(path)


def test_head_takes_one_line(words: list[str], command: Any, tmp_path: Path, the_run: Any) -> None:
    line = subprocess.run(
        ["sh", "-c", '"$@" 2>errors | head -1', "sh", *command, *words],
        cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=40,
    )  # fmt: skip
    assert len(line.stdout.splitlines()) == 1
    check_whole(the_run(tmp_path / "results").path)
    assert "Traceback" not in (tmp_path / "errors").read_text()


@pytest.mark.parametrize("how", ["a full device", "a closed pipe"])
def test_json_that_cannot_be_written(how: str, words: list[str], start: Any, tmp_path: Path, until: Any) -> None:
    with open("/dev/full", "w") as full:
        out = full if how == "a full device" else subprocess.PIPE
        process = start(*words, "--json", "--quiet", stdout=out)
        path = begun(tmp_path / "results", until)
        if process.stdout is not None:
            process.stdout.close()
            process.stdout = None
        _, err = process.communicate(timeout=30)
    assert process.returncode == 1
    (line,) = err.splitlines()
    assert line.startswith("fastload: the result cannot be printed: ") and path.name in line
    check_whole(path)
