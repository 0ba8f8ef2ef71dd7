"""The live display on a real pseudo-terminal."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import struct
import termios
from collections.abc import Iterator
from typing import Any

import pytest

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[()][A-Z0-9]")


@contextlib.contextmanager
def terminal(columns: int, rows: int = 24) -> Iterator[tuple[int, int]]:
    """(our end, the program's end) of a terminal of that size."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    try:
        yield ours, theirs
    finally:
        os.close(ours)
        with contextlib.suppress(OSError):
            os.close(theirs)


def said(ours: int) -> str:
    """Everything until the program has closed its end."""
    pieces = []
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # EIO: how a terminal says that nobody is there any more
            piece = b""
        if not piece:
            return b"".join(pieces).decode()
        pieces.append(piece)


@pytest.mark.parametrize("columns", [60, 120])
def test_a_sweep_on_a_terminal(columns: int, start: Any, sim_url: Any) -> None:
    url = sim_url(ttft_ms=10, step_ms=10)
    with terminal(columns) as (ours, theirs):
        words = ["--levels", "1,2", "--duration", "0.7s", "--osl", "16"]
        process = start(
            "sweep", "--url", url, *words, env={"TERM": "xterm-256color"}, stdout=theirs, stderr=theirs
        )
        os.close(theirs)
        raw = said(ours)
        assert process.wait(20) in (0, 1)  # 1: a busy machine may spoil the load
    text = ESCAPE.sub("", raw)
    assert "Traceback" not in text
    parts = ["fastload sweep  SIMULATED", "level 1/2", "level 2/2", "concurrency 2", "in flight 2", "TTFT p50", "ETA"]
    assert [part for part in parts if part not in text] == []
    assert raw.rindex("\x1b[?25h") > raw.rindex("\x1b[?25l")  # the cursor is back
    # The table comes after it, as wide as the terminal and no wider.
    result = [line.rstrip("\r") for line in text[text.index("verdict:") :].split("\n")]
    assert max(len(line) for line in result if "results/" not in line) <= columns
    assert "SIMULATED" in text[text.index("verdict:") :]


def test_ctrl_c_on_a_terminal_gives_the_cursor_back(start: Any, sim_url: Any, until: Any, interrupt: Any) -> None:
    url = sim_url(ttft_ms=10, step_ms=10)
    with terminal(80) as (ours, theirs):
        words = ["--levels", "2", "--osl", "8", "--duration", "30s"]
        process = start("sweep", "--url", url, *words, env={"TERM": "xterm"}, stdout=theirs, stderr=theirs)
        os.close(theirs)
        begun = b""
        while b"level 1/1" not in begun:
            begun += os.read(ours, 65536)
        interrupt(process)
        raw = begun.decode() + said(ours)
        assert process.wait(10) == 130
    assert raw.rindex("\x1b[?25h") > raw.rindex("\x1b[?25l")
    assert "stopped by SIGINT" in raw and "Traceback" not in raw
