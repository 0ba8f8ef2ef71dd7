"""A bad start is one clear line, the right code, and an empty directory, seen from outside the process."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

MISTAKES = [
    (["--url", "127.0.0.1:8000"], 2, ["--url", "http://127.0.0.1:8000"]),
    (["--levels", "0"], 2, ["--levels 0", "whole numbers from 1"]),
    (["--levels", "a,b"], 2, ["--levels a,b", "'a'"]),
    (["--levels", "8,,9"], 2, ["--levels 8,,9", "empty"]),
    (["--url", "http://no-such-host.invalid:8000"], 1, ["no-such-host.invalid", "does not resolve"]),
]


@pytest.mark.parametrize(("words", "code", "says"), MISTAKES, ids=[" ".join(words) for words, _, _ in MISTAKES])
def test_a_mistake(words: list[str], code: int, says: list[str], fastload: Any, tmp_path: Path) -> None:
    ended = fastload("sweep", *words)
    assert (ended.code, ended.out) == (code, "")
    assert ended.err.splitlines() == [ended.line]
    assert [part for part in says if part not in ended.line] == []
    assert list(tmp_path.iterdir()) == []


def test_nobody_listens(fastload: Any, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    ended = fastload("sweep", "--url", f"http://127.0.0.1:{port}", "--output", "a/b")
    assert ended.code == 1 and "nothing listens" in ended.line and len(ended.err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_model(fastload: Any, quick: str, tmp_path: Path) -> None:
    ended = fastload("sweep", "--url", quick, "--model", "gpt-9")
    assert ended.code == 2 and "--model gpt-9" in ended.line and "fastload-sim-lockstep" in ended.line
    assert list(tmp_path.iterdir()) == []


def test_an_output_that_cannot_be_written(fastload: Any, quick: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    ended = fastload("sweep", "--url", quick, "--output", "file/deeper")
    assert ended.code == 2 and "--output" in ended.line
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_key_that_is_missing_or_wrong(fastload: Any, llama_factory: Any, tmp_path: Path) -> None:
    url = llama_factory(api_key="sk-right")
    ended = fastload("sweep", "--url", url)
    assert ended.code == 1 and "401" in ended.line and "FASTLOAD_API_KEY" in ended.line
    ended = fastload("sweep", "--url", url, env={"FASTLOAD_API_KEY": "sk-wrong"})
    assert ended.code == 1 and "refuses the API key" in ended.line and "sk-wrong" not in ended.err
    assert list(tmp_path.iterdir()) == []
