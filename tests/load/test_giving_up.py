"""Failures that repeat: how they are paced, when a level is given up, and which levels are run after it."""

import asyncio
import errno
import re
import resource
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest
from scripted import Call, answer, head, quick, serve
from test_measurer import measurer
from test_supervisor import Sink, bodies, later, level, load

from fastload import _client, _timing
from fastload.load import patience
from fastload.load.measurer import Measurer


def busy(call: Call, status: int = 429, more: bytes = b"") -> None:
    """Refuse at once, on a connection that is kept."""
    call.finish(head(more + b"Content-Length: 2", status) + b"{}")


def at_level(sink: Sink, failing: Callable[[Call], None]) -> Callable[[Call], None]:
    """A script that fails while the first level runs and answers before and after."""
    return lambda call: (failing if sink.begun[-1] == 0 else quick)(call)


def test_a_server_that_refuses_at_once_is_paced_and_its_refusals_use_up_the_plan() -> None:
    sink = Sink()
    with serve(at_level(sink, busy)) as server:
        outcome = load(server.port, bodies(level(0, 4, 24)), sink)
        assert server.accepts == 4  # and nothing is connected anew
    rows = sink.of(0)
    assert {row["http_status"] for row in rows} == {429}
    assert [row["role"] for row in rows].count(_timing.ROLE_MEASURED) == 24
    for slot in range(4):
        waits = [row["backoff_ms"] for row in rows if row["slot"] == slot]
        assert waits == [0, 0, 100, 200, 400, 800, 1600, 2000][: len(waits)]
    assert outcome.levels[0].complete  # its plan was carried out
    assert outcome.stopped == "level 4: all 24 measured requests failed; the last: HTTP 429"


def test_retry_after_is_respected_when_asked_for() -> None:
    told: dict[bool, list[int]] = {}
    for asked in (False, True):
        sink = Sink()

        def script(call: Call) -> None:
            if call.number == 3:
                return busy(call, 503, b"Retry-After-Ms: 350\r\n")
            quick(call)

        with serve(script) as server:
            load(server.port, bodies(level(0, 1, 5)), sink, respect_retry_after=asked)
        told[asked] = [row["backoff_ms"] for row in sink.of(0)]
        failed, after = (next(row for row in sink.of(0) if row["request"] == n) for n in (3, 4))
        if asked:
            assert after["sent_ns"] - failed["done_ns"] >= 350_000_000
        assert after["due_ns"] == failed["done_ns"]  # the wait is in what a user would have waited
    assert told[False] == [0] * len(told[False])
    assert sorted(told[True])[-2:] == [0, 350]


def test_more_streams_are_left_out_after_a_level_that_failed_and_fewer_are_tried() -> None:
    sink = Sink()
    with serve(at_level(sink, busy)) as server:
        outcome = load(server.port, bodies(level(0, 4, 12), level(1, 8, 20), level(2, 2, 6)), sink)
    assert sink.begun == [-1, 0, -2, 2]  # a request alone was asked before the last
    assert outcome.stopped == "level 4: all 12 measured requests failed; the last: HTTP 429; level 8 was not tried"
    assert [(facts.index, facts.complete) for facts in outcome.levels] == [(0, True), (2, True)]
    assert all(row["http_status"] == 200 for row in sink.of(2))


def test_a_level_that_is_given_up_says_why_and_is_incomplete() -> None:
    sink = Sink()
    with serve(at_level(sink, lambda call: busy(call, 500))) as server:
        outcome = load(server.port, bodies(level(0, 2, 100), level(1, 2, 10)), sink, max_failures=5)
    (facts,) = outcome.levels
    assert not facts.complete and facts.gave_up is not None
    # both streams may fail between two looks
    assert re.fullmatch(r"[56] requests failed in a row \(--max-failures 5\); the last: HTTP 500", facts.gave_up)
    assert outcome.stopped == f"level 2: {facts.gave_up}; level 2 was not tried"


def test_a_server_that_is_gone_ends_the_run() -> None:
    sink, gone = Sink(), threading.Event()

    def script(call: Call) -> None:
        if sink.begun[-1] == 0:
            gone.set()
            call.stay()
        quick(call)

    first = serve(script)
    server = first.__enter__()
    with later(gone.wait, lambda: first.__exit__(None, None, None)):
        plan = bodies(level(0, 4, 100), level(1, 8, 100), level(2, 1, 10))
        outcome = load(server.port, plan, sink, max_failures=12)
    assert outcome.stopped is not None and outcome.stopped.endswith(
        "(--max-failures 12); the last: connect: Connection refused; levels 8, 1 were not tried"
    )
    assert sink.begun == [-1, 0, -2]


def test_a_connection_that_cannot_be_had_ahead_of_a_level_is_one_row_of_it() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and does not listen
        with measurer(closed.getsockname()[1], slots=8, max_failures=8) as process:
            process.level(100, streams=8)
            end = process.await_message("level_done")
    assert end["gave_up"].startswith("8 requests failed in a row")
    # no slot tried twice before each was told of its first failure; those behind the first did not try ahead
    firsts = [row["slot"] for row in process.rows if row["backoff_ms"] == 0]
    assert len(firsts) == len(set(firsts))


def test_descriptors_that_run_out_are_the_clients_own_fault() -> None:
    with (
        serve(lambda call: call.finish(answer("one", close=True))) as server,
        measurer(server.port, slots=2, max_failures=6) as process,
    ):
        process.level(8, streams=2)
        process.await_message("level_done")
        resource.prlimit(process.process.pid, resource.RLIMIT_NOFILE, (4, 4))  # what is open stays open
        process.next_request = 500
        process.level(100, index=1, streams=2)
        end = process.await_message("level_done", 2)
    assert "client_ports: no local port or file descriptor" in end["gave_up"] and "Too many open" in end["gave_up"]
    # who had a connection from the level before used it
    failed = [row for row in process.rows if row["end"] != _timing.END_COMPLETE]
    assert {(row["end"], row["errno"]) for row in failed} == {(_timing.END_PORTS, errno.EMFILE)}
    assert 6 <= len(failed) <= 7


def test_thousands_of_refusals_are_paced_too() -> None:
    """As many connections a second as slots and their back-off allow, and each refusal is told of once."""
    with serve(lambda call: call.finish(answer("one", close=True))) as server, measurer(server.port) as process:
        process.level(8)
        process.await_message("level_done")
        server.close()
        process.next_request = 500
        process.level(1000, index=1, slices=8)
        while max((row["backoff_ms"] for row in process.rows), default=0) < patience.BACKOFF_LAST_MS:
            assert process.listen(0.1)
        process.tell(do="cancel")
        assert process.await_message("level_done", 2)["cancelled"]
    rows = [row for row in process.rows if row["level"] == 1]
    assert {row["end"] for row in rows} == {_timing.END_CONNECT}
    assert len({row["request"] for row in rows}) == len(rows)
    for slot in range(4):
        waits = [row["backoff_ms"] for row in rows if row["slot"] == slot]
        assert waits == [0, 100, 300, 700, 1500, 3100][: len(waits)]


class Gauges:
    """An engine as far as giving up looks at it."""

    def __init__(self) -> None:
        self.told: dict[str, int] = dict.fromkeys(_client.GAUGES, 0)
        self.hope = False
        self.asked: list[bool] = []

    def counters(self) -> dict[str, int]:
        return self.told

    def hopeful(self, waiting: bool) -> bool:
        self.asked.append(waiting)
        return self.hope


def test_without_a_number_a_level_is_given_up_after_a_time_without_success(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "HOPELESS_S", 0.05)
    gauges, stops = Gauges(), []
    it: Any = Measurer.__new__(Measurer)
    it.engine, it.streams, it.most_failures, it.failing_since, it.gave_up = gauges, 2, None, (0, 0.0), ""
    it.stop_level = lambda: stops.append(it.gave_up)

    async def look(wait_s: float, **told: int) -> bool:
        await asyncio.sleep(wait_s)
        gauges.told.update(told)
        it.check_failures()
        return bool(stops)

    async def level() -> None:
        assert not await look(0, failed_in_row=5, last_end=_timing.END_CONNECT)
        assert not await look(0.1, failed_in_row=9)  # long enough, and too few
        assert not await look(0, done=1, failed_in_row=20)  # one succeeded between: the time counts anew
        gauges.hope = True
        assert not await look(0.1, failed_in_row=40)
        assert not await look(0, last_end=_timing.END_RESET)
        assert gauges.asked == [False, True]  # who waits for an answer gives hope where the server can be reached
        gauges.hope = False
        assert await look(0, failed_in_row=41)

    asyncio.run(level())
    assert len(stops) == 1 and stops[0].startswith("41 requests failed in a row in 0 s and none succeeded")
