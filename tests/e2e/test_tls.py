"""A sweep over TLS and through a proxy, as a user runs it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.with_name("load")))

from authority import Authority  # noqa: E402
from relay import proxy, tls_front  # noqa: E402

SHORT = ["--levels", "1,4", "--num-requests", "8", "--isl", "32", "--osl", "16", "--temperature", "0", "--save-text"]


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


def test_the_real_server_over_tls_says_what_it_says_without(
    fastload: Any, llama_server: str, authority: Authority, the_run: Any, tmp_path: Path
) -> None:
    with tls_front(port_of(llama_server), authority.server()) as port:
        url = f"https://localhost:{port}"
        ended = fastload("sweep", "--url", url, "--ca-file", str(authority.ca_file), *SHORT, "--output", "tls")
    assert ended.ran, ended.err
    plain = fastload("sweep", "--url", llama_server, *SHORT, "--output", "plain")
    assert plain.ran, plain.err
    runs = [the_run(tmp_path / folder) for folder in ("tls", "plain")]
    rows, without = ([row for row in run.requests().to_pylist() if row["role"] == "measured"] for run in runs)
    assert len(rows) == len(without) == 16 and {row["status"] for row in rows} == {"ok"}
    for name in ("completion_tokens", "prompt_tokens", "text_events", "finish_reason", "stamp_source"):
        assert {row[name] for row in rows} == {row[name] for row in without}, name
    assert {row["stamp_source"] for row in rows} == {"kernel"}
    # llama.cpp closes after each answer: each request has its handshake, and takes up the session of the one before
    assert all(row["tls_ns"] > 0 for row in rows if row["connect_ns"] is not None)
    assert [row for row in rows if row["connect_ns"] is not None]
    manifest = runs[0].manifest
    assert manifest["target"]["tls"] == {"verified": True, "ca_file": str(authority.ca_file), "client_cert": None}
    seen = [level["instrument"]["tls"] for level in manifest["levels"] if level["index"] >= 0]
    assert all(one["version"] == "TLSv1.3" and 0 < one["resumed"] <= one["handshakes"] for one in seen)
    assert "note: TLS: TLSv1.3" in ended.out and "NOT verified" not in ended.out


def test_a_server_that_cannot_be_trusted_is_refused_in_one_line(
    fastload: Any, quick: str, authority: Authority, tmp_path: Path
) -> None:
    with tls_front(port_of(quick), authority.server()) as port:
        ended = fastload("sweep", "--url", f"https://localhost:{port}", *SHORT)
        assert ended.code == 1 and "certificate is not trusted" in ended.line and "--ca-file FILE" in ended.line
        assert len(ended.err.splitlines()) == 1 and not (tmp_path / "results").exists()
        ended = fastload("sweep", "--url", f"https://localhost:{port}", "--insecure", *SHORT)
        assert ended.ran, ended.err
    assert "note: TLS: the server's certificate was NOT verified (--insecure)" in ended.out


def test_through_a_proxy(
    fastload: Any, llama_server: str, the_run: Any, tmp_path: Path
) -> None:
    with proxy() as between:
        words = ["--url", llama_server, "--proxy", f"http://ann:open-sesame@127.0.0.1:{between.port}"]
        ended = fastload("sweep", *words, *SHORT, env={"HTTPS_PROXY": "http://bob:hush@127.0.0.1:9"})
    assert ended.ran, ended.err
    run = the_run(tmp_path / "results")
    rows = run.requests().to_pylist()
    assert len(between.heads) >= len(rows), "the server closes after each answer: a tunnel for each"
    assert {row["status"] for row in rows if row["role"] == "measured"} == {"ok"}
    assert run.manifest["target"]["proxy"] == f"http://127.0.0.1:{between.port}"
    assert "through the proxy http://127.0.0.1" in ended.out
    for path in (path for path in run.path.rglob("*") if path.is_file()):
        assert b"open-sesame" not in path.read_bytes(), path
    assert "open-sesame" not in ended.out + ended.err


def test_proxies_of_the_environment_are_named_and_not_used(fastload: Any, quick: str) -> None:
    env = {"HTTP_PROXY": "http://bob:hush@127.0.0.1:9", "no_proxy": "*"}
    ended = fastload("models", "--url", quick, env=env)
    assert ended.code == 0 and "HTTP_PROXY: set in the environment and not used" in ended.err
    assert "hush" not in ended.err + ended.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--url", "https://h", "--ca-file", "none"], "--ca-file none: cannot be read"),
        (["--url", "http://h", "--insecure"], "--insecure: is for https servers; --url is http://h"),
        (["--url", "https://h", "--insecure", "--ca-file", "x"], "--insecure: trusts any certificate"),
        (["--url", "https://h", "--client-key", "x"], "--client-key x: is of no use alone"),
        (["--url", "http://h", "--proxy", "nonsense"], "--proxy nonsense: not the address of an HTTP proxy"),
        (["--proxy", "http://h:1"], "--proxy: the simulated engine is on this machine"),
    ],
)
def test_flags_at_odds(fastload: Any, words: list[str], said: str) -> None:
    ended = fastload("sweep", *words)
    assert ended.code == 2 and said in ended.line and len(ended.err.splitlines()) == 1
