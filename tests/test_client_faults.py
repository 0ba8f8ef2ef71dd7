"""The engine when the other side fails: stale connections, refusals, limits, and the end by order.

Nothing here asserts how long anything takes; a wait is bounded (20 s) only where a hang would be the failure.
"""

import errno
import os
import sys
import time
from pathlib import Path

import pytest

from fastload import _timing as t

sys.path.insert(0, str(Path(__file__).with_name("load")))

from rig import NEVER, Rig  # noqa: E402
from scripted import DONE, Call, answer, chunk, event, head, quick, serve  # noqa: E402

# ---------------------------------------------------------------- stale connections


@pytest.mark.parametrize("reset", [False, True])
def test_a_stale_connection_costs_one_retry(reset: bool) -> None:
    def script(call: Call) -> None:
        if call.seen.connection == 0 and call.seen.ordinal == 1:
            call.reset() if reset else call.close()
        quick(call)

    with serve(script) as server:
        rig = Rig(1, server.port).open(0).begin(1, 3).arm(3).finish()
        assert [(row["request"], row["attempt"], row["conn_reused"]) for row in rig.rows] == [
            (0, 1, 0),
            (1, 2, 0),
            (2, 1, 1),
        ]
        assert [bool(row["row_flags"] & t.RF_RETRIED) for row in rig.rows] == [False, True, False]
        assert all(row["end"] == t.END_COMPLETE for row in rig.rows)
        assert rig.rows[1]["connect_ns"] > 0
        assert rig.count("stale_retries") == 1 and rig.count("failed") == 0
        # both sends are marked, and the last one counts
        marks = [one["stamp_ns"] for one in rig.events[1] if one["channel"] == t.CH_SENT]
        assert len(marks) == 2 and marks[1] == rig.rows[1]["sent_ns"]


def test_a_connection_closed_while_idle_and_not_noticed() -> None:
    with serve(quick) as server:
        rig = Rig(1, server.port).open(0).begin(1, 2).arm(1)
        rig.until(lambda: rig.count("done") == 1)
        server.drop()
        assert server.wait_for(lambda: server.connections == 0)
        rig.arm(1).finish()  # pump sends before any drain could see the close
        assert [(row["end"], row["attempt"]) for row in rig.rows] == [(t.END_COMPLETE, 1), (t.END_COMPLETE, 2)]
        assert rig.count("stale_retries") == 1 and rig.count("idle_closed") == 0


def test_a_connection_closed_while_idle_and_noticed() -> None:
    with serve(quick) as server:
        rig = Rig(1, server.port).open(0).begin(1, 2).arm(1)
        rig.until(lambda: rig.count("done") == 1)
        server.drop()
        rig.until(lambda: rig.count("idle_closed") == 1)
        assert rig.engine.take_lost() == [0] and rig.engine.is_empty(0)
        rig.open(0).arm(1).finish()
        assert [row["attempt"] for row in rig.rows] == [1, 1] and rig.count("stale_retries") == 0


@pytest.mark.parametrize("reset", [False, True])
def test_a_retry_that_fails_too_is_a_failure(reset: bool) -> None:
    def script(call: Call) -> None:
        if call.number == 1:
            call.reset() if reset else call.close()
        quick(call)

    with serve(script) as server:
        rig = Rig(1, server.port).open(0).begin(1, 3).arm(3)
        rig.finish()
        ends = [(row["request"], row["end"], row["attempt"]) for row in rig.rows]
        failed = t.END_RESET if reset else t.END_EOF
        assert ends == [(0, t.END_COMPLETE, 1), (1, failed, 2), (2, t.END_COMPLETE, 1)]
        assert rig.count("stale_retries") == 1 and rig.count("measured_failed") == 1


def test_a_server_that_accepts_and_closes_is_not_dialled_in_a_storm() -> None:
    with serve(quick, accept=lambda number: False) as server:
        # a request that is sent at once, and one that waits for its time: idle connections closed again and again
        for due in (-1, t.now_ns() + 10**12):
            rig = Rig(1, server.port).open(0).begin(1, 100).arm(50, due_ns=due)
            before = server.accepts
            give_up = time.monotonic() + 0.3
            while time.monotonic() < give_up:
                rig.turn()
            # Python is told, backs off and connects: this Python does not
            assert server.accepts - before <= 3
            assert rig.engine.take_lost() == [0]
            rig.collect()
            assert [row["attempt"] for row in rig.rows] == ([2] if due < 0 else [])


def test_a_retry_is_recorded_when_its_connection_comes_right_after_a_sealing() -> None:
    def script(call: Call) -> None:
        if call.seen.connection == 0:
            call.close()
        quick(call)

    with serve(script) as server:
        rig = Rig(1, server.port, dial=False).open(0).begin(1, 1).arm(1)
        rig.until(lambda: rig.engine.must_retry(0))
        rig.recorder.seal()
        assert rig.engine.take_lost() == [0]
        rig.open(0).finish()
        assert [one["channel"] for one in rig.events[0]].count(t.CH_SENT) == 2
        assert rig.rows[0]["attempt"] == 2


def test_a_retry_waits_for_a_free_block() -> None:
    def script(call: Call) -> None:
        if call.seen.connection == 0:
            call.close()
        quick(call)

    with serve(script) as server:
        rig = Rig(1, server.port, dial=False, blocks=1).open(0).begin(1, 1).arm(1)
        while not rig.engine.must_retry(0):
            rig.turn()
        rig.recorder.seal()  # and nobody takes it
        fd = rig.socket()
        assert rig.engine.attach(0, fd) is False and rig.engine.is_empty(0)
        rig.collect()
        assert rig.engine.attach(0, fd) is True
        rig.finish()
        assert [one["channel"] for one in rig.events[0]].count(t.CH_SENT) == 2


def test_an_event_of_a_connection_that_is_gone_reaches_nobody() -> None:
    with serve(quick) as server:
        rig = Rig(1, server.port, dial=False)
        fd = rig.socket()
        twin = os.dup(fd)  # keeps the old connection in the epoll set after the engine closed its descriptor
        try:
            rig.engine.attach(0, fd)
            rig.engine.close_idle()
            rig.open(0)
            assert server.wait_for(lambda: server.connections == 2)
            os.write(twin, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")  # and has an answer coming
            assert server.wait_for(lambda: len(server.requests) == 1 and server.in_flight == 0)
            rig.begin(1, 1).arm(1).finish()
        finally:
            os.close(twin)
        (row,) = rig.rows
        assert (row["end"], row["attempt"], row["events"]) == (t.END_COMPLETE, 1, 4)
        assert rig.count("stale_events") > 0 and rig.count("stray_bytes") == 0


def test_bytes_nobody_asked_for_close_the_connection() -> None:
    def script(call: Call) -> None:
        call.finish(answer("one") + (b"HTTP/1.1 200 OK\r\n" if call.number == 0 else b""))

    with serve(script) as server:
        rig = Rig(1, server.port).open(0).begin(1, 2).arm(2).finish()
        assert [row["conn_reused"] for row in rig.rows] == [0, 0]
        assert rig.count("stray_bytes") == 17 and server.accepts == 2


def test_a_connection_opened_in_the_level_before_was_not_waited_for() -> None:
    with serve(quick) as server:
        rig = Rig(1, server.port).open(0, connect_ns=5000).begin(1, 1).arm(1).finish()
        assert rig.rows[0]["connect_ns"] == -1


# ---------------------------------------------------------------- limits


def test_connections_that_cannot_be_had_are_rows_and_use_nothing_up() -> None:
    with serve(quick) as server:
        rig = Rig(1, server.port).begin(1, 2).arm(10)
        for i in range(3):
            assert rig.engine.refuse(0, t.END_CONNECT, errno.ECONNREFUSED, "connect: refused", 100 * i)
        assert rig.engine.measured_left == 2
        rig.open(0).arm(0).finish()
        refused, sent = rig.rows[:3], rig.rows[3:]
        assert [row["request"] for row in rig.rows] == [0, 1, 2, 3, 4]
        assert [(row["end"], row["errno"], row["sent_ns"]) for row in refused] == [
            (t.END_CONNECT, errno.ECONNREFUSED, -1)
        ] * 3
        assert [row["backoff_ms"] for row in refused] == [0, 100, 200]
        assert [row["role"] for row in sent] == [t.ROLE_MEASURED] * 2
        assert rig.error(0) == "connect: refused"
        assert rig.engine.refuse(0, t.END_CONNECT, 0, "no request waits", 0) is False


LIMITS = [
    ("first_byte_ns", 0, "no byte of an answer within --first-byte-timeout"),
    ("idle_ns", 1, "silent for longer than --idle-timeout"),
    ("total_ns", 1, "the whole request took longer than --timeout"),
]


@pytest.mark.parametrize(("limit", "events", "words"), LIMITS, ids=[name for name, *_ in LIMITS])
def test_a_limit_ends_one_exchange_and_no_other(limit: str, events: int, words: str) -> None:
    limits = {"connect_ns": NEVER, "first_byte_ns": NEVER, "idle_ns": NEVER, "total_ns": NEVER}

    def script(call: Call) -> None:
        if call.number == 0:
            if events:
                call.send(head() + chunk(event("a")))
            call.stay()
        quick(call)

    with serve(script) as server:
        rig = Rig(2, server.port).open(0, 1).begin(2, 2).arm(1)
        rig.until(lambda: rig.count("text_events") == events and len(server.requests) == 1)
        rig.engine.expire(**limits)
        assert rig.engine.busy == 1
        rig.arm(1).until(lambda: rig.count("done") == 1)
        rig.engine.expire(**{**limits, limit: 1})
        rig.collect()
        assert {row["request"]: row["end"] for row in rig.rows} == {0: t.END_TIMEOUT, 1: t.END_COMPLETE}
        assert rig.error(0) == words
        assert len(rig.stream(0)) == events
        assert rig.over()


def test_framing_that_does_not_end_after_done_is_awaited_for_a_second() -> None:
    def script(call: Call) -> None:
        call.send(head() + chunk(event("a")) + chunk(DONE))
        call.stay()

    with serve(script) as server:
        rig = Rig(1, server.port).open(0).begin(1, 1).arm(1)
        rig.until(lambda: rig.count("text_events") == 1)
        rig.engine.expire(NEVER, 1, 1, 1)  # no other limit holds any more
        assert rig.engine.busy == 1
        done = t.now_ns()
        rig.until(rig.over, lambda: rig.engine.expire(NEVER, NEVER, NEVER, NEVER)).collect()
        (row,) = rig.rows
        assert (row["end"], row["framing_end_ns"]) == (t.END_COMPLETE, -1)
        assert row["row_flags"] & t.RF_DONE and row["done_ns"] < done
        assert t.now_ns() - row["done_ns"] >= 10**9


# ---------------------------------------------------------------- cancel


def test_cancel_writes_a_row_for_everything_on_the_wire() -> None:
    def script(call: Call) -> None:
        if call.number == 1:
            call.close()  # this one waits for a fresh connection when the end comes
        call.send(head() + chunk(event("a")))
        call.stay()

    with serve(script) as server:
        rig = Rig(4, server.port, dial=False).open(0, 1, 2, 3)
        rig.begin(4, 100).arm(50)
        rig.until(lambda: rig.count("text_events") == 3 and rig.count("stale_retries") == 1)
        accepts = server.accepts
        assert rig.engine.cancel() is True
        rig.collect()
        assert sorted(row["request"] for row in rig.rows) == [0, 1, 2, 3]
        assert all(row["end"] == t.END_CANCELLED for row in rig.rows)
        assert rig.engine.busy == rig.engine.armed == 0
        assert not rig.engine.wants() and rig.over()
        assert server.wait_for(lambda: server.connections == 0)
        # nothing is sent any more, whatever Python was about to do
        rig.open(0).arm(3)
        for _ in range(5):
            rig.turn(0.005)
        assert rig.engine.busy == 0 and len(server.requests) == 4 and server.accepts == accepts + 1
        # until another level begins
        rig.begin(1, 1)
        assert rig.engine.wants()


def test_cancel_behind_the_end_marker_takes_nothing_away() -> None:
    """[DONE] came, the end of the framing did not: an answer like any other, with a flag."""

    def script(call: Call) -> None:
        call.send(head() + chunk(event("a")) + chunk(DONE) * (call.number == 0))
        call.stay()

    with serve(script) as server:
        rig = Rig(2, server.port).open(0, 1).begin(2, 2).arm(2)
        rig.until(lambda: rig.count("text_events") == 2)
        assert rig.engine.cancel() is True
        rig.collect()
        whole, cut = sorted(rig.rows, key=lambda row: row["request"])
        assert (whole["end"], cut["end"]) == (t.END_COMPLETE, t.END_CANCELLED)
        assert whole["row_flags"] & t.RF_FRAMING_BROKEN and not cut["row_flags"] & t.RF_FRAMING_BROKEN
        assert whole["framing_end_ns"] == -1 and whole["done_ns"] == rig.stream(0)[-1]["stamp_ns"]
        assert rig.error(0) == "" and rig.error(1) == "the run was stopped"
        assert (rig.count("done"), rig.count("failed")) == (1, 1)


def test_cancel_does_not_dial() -> None:
    with serve(Call.stay) as server:
        rig = Rig(4, server.port).open(0, 1, 2, 3).begin(4, 100).arm(50)
        assert server.wait_for(lambda: len(server.requests) == 4)
        rig.engine.cancel()
        assert server.wait_for(lambda: server.connections == 0)
        assert server.accepts == 4


def test_cancel_without_a_free_block_loses_nothing() -> None:
    with serve(Call.stay) as server:
        rig = Rig(4, server.port, blocks=1).open(0, 1, 2, 3).begin(4, 100).arm(50)
        assert server.wait_for(lambda: len(server.requests) == 4)
        rig.recorder.seal()
        assert rig.engine.cancel() is False
        assert not rig.engine.wants()
        rig.collect()
        assert rig.engine.cancel() is True
        rig.collect()
        assert sorted(row["request"] for row in rig.rows) == [0, 1, 2, 3]
