"""Public fault reports of other tools that only a whole run can show: what reaches the server, what is summed up."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fastload import cli, open_run

sys.path.insert(0, str(Path(__file__).parent.with_name("load")))

from api import api, good  # noqa: E402
from scripted import DONE, LAST_CHUNK, Call, chunk, event, head, quick, serve, usage  # noqa: E402

Sweep = Callable[..., Any]
EOS_ONLY = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sweep:
    """`sweep("--url", ...)` runs one in this process and opens its run."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> Any:
        with pytest.raises(SystemExit):
            cli.main(["sweep", "--osl", "3", "--isl", "12", "--min-requests", "0", "--quiet", *words])
        (path,) = (tmp_path / "results").iterdir()
        return open_run(path)

    return run


def level_of(run: Any) -> dict[str, Any]:
    (level,) = json.loads((run.path / "summary.json").read_text())["levels"]
    assert isinstance(level, dict)
    return level


@pytest.mark.parametrize("status", [503, 307, 429])
def test_w54_and_w56_what_fails_is_asked_once_and_nobody_else_is_told_the_key(status: int, sweep: Sweep) -> None:
    streamed: list[bytes] = []

    with serve(quick) as other:
        place = b"Location: http://127.0.0.1:%d/v1/chat/completions\r\nRetry-After: 1\r\n" % other.port

        def refuse(call: Call) -> None:
            call.finish(b"HTTP/1.1 %d X\r\nContent-Length: 0\r\n%s\r\n" % (status, place))

        def failing(call: Call, number: int) -> bool:
            streamed.append(call.seen.body)
            return number % 2 == 1

        with serve(api(refuse, failing)) as server:
            words = ["--levels", "1", "--num-requests", "6", "--api-key", "sk-secret"]
            run = sweep("--url", f"http://127.0.0.1:{server.port}", *words)
        assert (other.accepts, len(other.requests)) == (0, 0)
    rows = run.requests().to_pylist()  # the warm-up's among them
    assert len(rows) == len(streamed) == len(set(streamed))
    failed = [row for row in rows if row["status"] != "ok"]
    assert len(failed) == 3
    assert {row["status"] for row in failed} == {"redirect" if status == 307 else "http_status"}
    assert {(row["http_status"], row["attempt"], row["retried"]) for row in failed} == {(status, 1, False)}
    if status == 307:
        assert all(f"127.0.0.1:{other.port}" in row["error"] for row in failed)
    assert level_of(run)["failed"] == 3


def test_m24_answers_without_a_token_pull_no_median_down(sweep: Sweep) -> None:
    """Half of 20 answers end at once: TTFT is of the ten others, and that is said."""

    def late(call: Call) -> None:
        call.sleep(0.02)
        good(call)

    def at_once(call: Call) -> None:
        call.finish(head() + chunk(EOS_ONLY) + chunk(usage(1)) + chunk(DONE) + LAST_CHUNK)

    with serve(api(at_once, lambda call, number: number % 2 == 1, late)) as server:
        run = sweep("--url", f"http://127.0.0.1:{server.port}", "--levels", "1", "--num-requests", "20")
    level = level_of(run)
    assert (level["measured"], level["ok"], level["ttft_ms"]["n"], level["latency_s"]["n"]) == (20, 20, 10, 20)
    measured = [row for row in run.requests().to_pylist() if row["role"] == "measured"]
    found = sorted(row["ttft_ms"] for row in measured if row["ttft_ms"] is not None)
    assert len(found) == 10 and found[0] >= 20
    assert level["ttft_ms"]["p50"] == found[4]
    assert any("10 of 20" in said and "no first token" in said for said in told(run)), told(run)


def test_m47_every_metric_is_of_the_same_requests(sweep: Sweep) -> None:
    """A quarter of warm-up, in which the server is slow: no metric has them, and the rows say which they are."""

    def slow(call: Call) -> None:
        call.sleep(0.1)
        good(call)

    with serve(api(slow, lambda call, number: 0 < number <= 10)) as server:
        words = ["--levels", "2", "--num-requests", "30", "--warmup", "10"]
        run = sweep("--url", f"http://127.0.0.1:{server.port}", *words)
    level = level_of(run)
    measured = [row for row in run.requests().to_pylist() if row["role"] == "measured"]
    assert len(measured) == level["measured"] == 30
    for name in ("ttft_ms", "tps", "latency_s", "response_latency_s"):
        assert level[name]["n"] == 30, name
        mean = sum(row[name] for row in measured) / 30
        assert level[name]["mean"] == pytest.approx(mean), name
    assert {row["role"] for row in run.requests().to_pylist()} == {"warmup", "measured", "fill"}


def test_c11_a_name_is_looked_up_once_for_the_whole_run(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only this process can look the name up: a run that succeeds has asked nowhere else."""
    really, asked = socket.getaddrinfo, []

    def resolve(host: str, port: int, *more: Any, **named: Any) -> list[Any]:
        if host == "slow.test":
            asked.append(host)
            host = "127.0.0.1"
        return list(really(host, port, *more, **named))

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with serve(api(good, lambda call, number: False)) as server:
        run = sweep("--url", f"http://slow.test:{server.port}", "--levels", "4,8", "--rounds", "3")
        hosts = {seen.head.partition(b"Host: ")[2].partition(b"\r\n")[0] for seen in server.requests[-5:]}
    assert asked == ["slow.test"]
    assert {row["status"] for row in run.requests().to_pylist()} == {"ok"}
    assert hosts == {b"slow.test:%d" % server.port}


def told(run: Any) -> list[str]:
    verdict = run.manifest["verdict"]
    return [*verdict["reasons"], *verdict["notes"]]


def test_the_events_of_a_failed_answer_are_kept(sweep: Sweep) -> None:
    """W31, W39: the partial answer of a failure stays in the trace, and in no figure of the successes."""

    def breaks(call: Call) -> None:
        call.send(head() + chunk(event("one")), chunk(event("two")))
        call.sleep(0.05)
        call.reset()

    with serve(api(breaks, lambda call, number: number == 2)) as server:
        run = sweep("--url", f"http://127.0.0.1:{server.port}", "--levels", "1", "--num-requests", "3")
    (failed,) = [row for row in run.requests().to_pylist() if row["status"] != "ok"]
    assert (failed["status"], failed["text_events"], failed["ttft_ms"]) == ("reset", 2, None)
    level = level_of(run)
    assert (level["ok"], level["failed"], level["ttft_ms"]["n"]) == (2, 1, 2)
