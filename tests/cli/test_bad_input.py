"""Every mistake is one clear line on stderr and the right code, without a traceback and with nothing left
on disk.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

MISTAKES = [
    # words after `fastload`, and what the line must name: the flag, the value, what would be right
    (["sweep", "--levels", "0"], ["--levels 0", "whole numbers from 1"]),
    (["sweep", "--levels", "a,b"], ["--levels a,b", "'a'", "whole numbers from 1"]),
    (["sweep", "--levels", "8,,9"], ["--levels 8,,9", "empty", "such as 1,2,4,8"]),
    (["sweep", "--levels", ""], ["--levels", "empty"]),
    (["sweep", "--concurrency", "4,4"], ["--levels 4,4", "twice"]),
    (["sweep", "--levels", "99999999"], ["--levels 99999999", "65535"]),
    (["sweep", "--levels", "-1"], ["--levels -1", "whole number"]),
    (["sweep", "--url", "localhost:8000"], ["--url localhost:8000", "http://localhost:8000"]),
    (["sweep", "--url", ""], ["--url", "empty", "http://"]),
    (["sweep", "--url", "http://"], ["--url http://", "no host"]),
    (["sweep", "--url", "ftp://host"], ["--url ftp://host", "ftp"]),
    (["sweep", "--url", "http://host:99999"], ["--url http://host:99999", "65535"]),
    (["sweep", "--url", "http://h", "--target", "sim:lockstep"], ["--url and --target", "give one"]),
    (["sweep", "--target", "sim:warp"], ["--target 'sim:warp'", "sim:lockstep"]),
    (["sweep", "--target", "http://h:1"], ["--target", "--url"]),
    (["sweep", "--endpoint", "talk"], ["--endpoint 'talk'", "chat or completions or responses or messages"]),
    (["sweep", "--header", "X-Team"], ["--header 'X-Team'", "NAME=VALUE"]),
    (["sweep", "--header", "X-Team: search"], ["--header 'X-Team...'", "NAME=VALUE"]),
    (["sweep", "--header", "Content-Length=3"], ["--header 'Content-Length'", "leave it out"]),
    (["sweep", "--label", "gpu"], ["--label 'gpu'", "K=V"]),
    (["sweep", "--extra-body", "{"], ["--extra-body '{'", "not JSON"]),
    (["sweep", "--extra-body", "[1]"], ["--extra-body '[1]'", "JSON object"]),
    (["sweep", "--extra-body", '{"stream": false}'], ["--extra-body 'stream'", "every request streams"]),
    (["sweep", "--extra-body", '{"max_tokens": 5}'], ["--extra-body 'max_tokens'", "--osl"]),
    (["sweep", "--top-k", "5", "--extra-body", '{"top_k": 3}'], ["--extra-body 'top_k'", "--top-k", "once"]),
    (["sweep", "--rounds", "ten"], ["--rounds 'ten'", "whole number from 0"]),
    (["sweep", "--rounds", "0", "--min-requests", "0"], ["--rounds 0", "no request"]),
    (["sweep", "--num-prompts", "0"], ["--num-requests 0", "whole number from 1"]),
    (["sweep", "--isl", "0"], ["--isl 0", "whole number from 1"]),
    (["sweep", "--random-output-len", "1.5"], ["--osl '1.5'", "whole number from 1"]),
    (["sweep", "--temperature", "hot"], ["--temperature 'hot'", "a number from 0"]),
    (["sweep", "--top-p", "2"], ["--top-p 2", "from 0 to 1"]),
    (["sweep", "--duration", "soon"], ["--duration soon", "90s, 10m or 2h"]),
    (["sweep", "--wait-ready", "0"], ["--wait-ready 0", "90s, 10m or 2h"]),
    (["sweep", "--idle-timeout", "-1"], ["--idle-timeout -1", "90s, 10m or 2h"]),
    (["sweep", "--seed", "-1"], ["--seed -1", "whole number from 0"]),
    (["sweep", "--cpu", "4096"], ["--cpu 4096", "choose one of"]),
    (["sweep", "--name", "a/b"], ["--name 'a/b'", "letters, digits"]),
    (["sweep", "--api-key", "two words"], ["--api-key", "without spaces"]),
    (["sweep", "--api-key", "a", "--api-key-file", "b"], ["--api-key and --api-key-file", "give one"]),
    (["sweep", "--api-key-file", "none"], ["--api-key-file none", "No such file"]),
    (["sweep", "--api-key", "k", "--header", "authorization=x"], ["--header Authorization", "give one"]),
    (["sweep", "--roundz", "3"], ["--roundz", "no such flag", "--rounds"]),
    (["sweep", "--levels"], ["--levels", "requires an argument"]),
    (["sweep", "stray"], ["stray", "fastload sweep --help"]),
    (["swep"], ["'swep'", "the commands are sweep,"]),
    (["--frobnicate"], ["--frobnicate", "no such flag"]),
    (["models"], ["--url", "needed"]),
    (["models", "--url", "nonsense"], ["--url nonsense", "http://nonsense"]),
    (["serve-sim", "--port", "99999"], ["--port 99999", "from 0 to 65535"]),
    (["serve-sim", "--step-ms", "fast"], ["--step-ms 'fast'", "a number from 0"]),
    (["serve-sim", "--tokens-per-event", "0"], ["--tokens-per-event 0", "from 1 to 1024"]),
    (["serve-sim", "--host", "0.0.0.0"], ["--host 0.0.0.0", "--allow-remote"]),
]


def only_line(err: str) -> str:
    """The one line of an error, checked to be one and no traceback."""
    lines = err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("fastload: "), err
    return lines[0]


@pytest.mark.parametrize(("words", "says"), MISTAKES, ids=[" ".join(words) for words, _ in MISTAKES])
def test_a_mistake_is_one_line_and_code_2(
    words: list[str], says: list[str], run: Any, tmp_path: Path
) -> None:
    ended = run(*words)
    line = only_line("".join(one for one in ended.err.splitlines(True) if "warning" not in one))
    assert ended.code == 2 and ended.out == ""
    assert [part for part in says if part not in line] == [], line
    assert list(tmp_path.iterdir()) == []


def test_an_output_that_cannot_be_written_is_found_before_anything_is_sent(run: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    ended = run("sweep", "--url", "http://127.0.0.1:9", "--output", "file/deeper")
    assert ended.code == 2 and "--output 'file/deeper': " in only_line(ended.err)
    assert [one.name for one in tmp_path.iterdir()] == ["file"]
    if Path("/proc").is_dir():
        ended = run("sweep", "--output", "/proc/results")
        assert ended.code == 2 and "--output '/proc/results': cannot be written to" in only_line(ended.err)


@pytest.mark.parametrize("command", ["sweep", "models"])
def test_nobody_listens(command: str, run: Any, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    ended = run(command, "--url", f"http://127.0.0.1:{port}")
    line = only_line(ended.err)
    assert ended.code == 1 and f"127.0.0.1:{port}" in line and "nothing listens" in line
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_does_not_resolve(run: Any, tmp_path: Path) -> None:
    ended = run("sweep", "--url", "http://no-such-host.invalid:8000")
    line = only_line(ended.err)
    assert ended.code == 1 and "no-such-host.invalid" in line and "does not resolve" in line
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_model(half_server: str, run: Any, tmp_path: Path) -> None:
    ended = run("sweep", "--url", half_server, "--model", "whole")
    line = only_line(ended.err)
    assert ended.code == 2 and "--model whole" in line and "it has half" in line
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_fails_the_first_request_leaves_no_run(
    half_server: str, run: Any, tmp_path: Path
) -> None:
    words = ["sweep", "--url", half_server, "--levels", "1", "--isl", "40", "--osl", "4", "--quiet"]
    ended = run(*words)
    line = only_line(ended.err)
    assert ended.code == 1 and "warm-up request failed" in line and "http_status" in line
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mine").mkdir()
    assert run(*words, "--output", "mine").code == 1
    assert run(*words, "--output", "mine/a/b").code == 1
    assert list((tmp_path / "mine").iterdir()) == []
