"""The engine against real sockets: stamps, the closed loop, sends, stale connections, limits, the ends of a level.

Nothing here asserts how long anything takes; a wait is bounded (20 s) only where a hang would be the failure.
"""

import errno
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from fastload import _timing as t

sys.path.insert(0, str(Path(__file__).with_name("load")))

from rig import NEVER, Rig, descriptors  # noqa: E402
from scripted import DONE, LAST_CHUNK, Call, answer, chunk, event, head, serve, usage  # noqa: E402

FAMILIES = [pytest.param(socket.AF_INET, id="IPv4"), pytest.param(socket.AF_INET6, id="IPv6")]
DRIFT_NS = 20_000  # how far a clock that is being slewed may go between the offset's sample and the stamp


def quick(call: Call) -> None:
    """Answer at once."""
    call.finish(answer("one"))


# ---------------------------------------------------------------- stamps


@pytest.mark.parametrize("family", FAMILIES)
def test_a_stamp_lies_between_the_servers_send_and_the_read(family: int) -> None:
    def script(call: Call) -> None:
        call.send(head())
        for text in "abc":
            call.sleep(0.003)
            call.send(chunk(event(text)))
        call.sleep(0.003)
        call.finish(chunk(DONE) + LAST_CHUNK)

    with serve(script, family=family) as server:
        rig = Rig(1, server.port, family=family).open(0).begin(1, 1).arm(1).finish()
        sends = [at for at, _ in server.requests[0].sends]
        (row,) = rig.rows
        events = rig.stream(0)
        assert [one["channel"] for one in events] == [t.CH_CONTENT] * 3 + [t.CH_DONE]
        for sent, one in zip(sends[1:], events, strict=True):
            assert one["delay_ns"] >= 0 and not one["flags"] & (t.FL_READ | t.FL_CLAMPED)
            assert sent - DRIFT_NS <= one["stamp_ns"]
            assert one["stamp_ns"] + one["delay_ns"] <= t.now_ns()
        assert row["stamp_source"] == 1 and row["clamped"] == 0
        assert row["sent_ns"] <= row["sent_done_ns"]
        assert row["sent_ns"] <= row["first_byte_ns"] <= row["head_ns"] <= events[0]["stamp_ns"]
        assert row["done_ns"] == events[-1]["stamp_ns"] <= row["framing_end_ns"]


@pytest.mark.parametrize("family", FAMILIES)
def test_three_sends_and_one_read(family: int) -> None:
    gate = threading.Event()

    def script(call: Call) -> None:
        call.send(head())
        call.hold(gate)
        call.send(*(chunk(event(text)) for text in "abc"))
        call.account(False)
        call.stay()

    with serve(script, family=family) as server:
        rig = Rig(1, server.port, family=family).open(0).begin(1, 1).arm(1)
        rig.until(lambda: rig.count("reads") == 1)
        gate.set()
        assert server.wait_for(lambda: server.in_flight == 0)
        while rig.count("reads") < 2:
            rig.turn()
        assert rig.count("reads") == 2
        rig.engine.cancel()
        events = rig.collect().stream(0)
        assert len({one["stamp_ns"] for one in events}) == 1 and len(events) == 3
        assert [bool(one["flags"] & t.FL_COALESCED) for one in events] == [True, True, False]
        assert rig.rows[0]["coalesced"] == 2
        sends = [at for at, _ in server.requests[0].sends]
        assert events[0]["stamp_ns"] >= sends[3] - DRIFT_NS  # the stamp of the last of them


def test_the_last_token_and_the_usage_in_one_read() -> None:
    def script(call: Call) -> None:
        call.send(head() + chunk(event("a")))
        call.sleep(0.003)
        call.finish(chunk(event("b")) + chunk(usage(2)) + chunk(DONE) + LAST_CHUNK)

    with serve(script) as server:
        rig = Rig(1, server.port).open(0).begin(1, 1).arm(1).finish()
        flagged = [(one["channel"], bool(one["flags"] & t.FL_COALESCED)) for one in rig.stream(0)]
        assert flagged == [
            (t.CH_CONTENT, False),
            (t.CH_CONTENT, True),
            (t.CH_NONE, True),
            (t.CH_DONE, True),
        ]
        assert rig.stream(0)[2]["tokens"] == 2


def test_read_stamps_say_so() -> None:
    with serve(quick) as server:
        rig = Rig(1, server.port, stamp="read").open(0).begin(1, 3).arm(3)
        assert rig.engine.stamps == "read"
        rig.finish()
        assert [row["stamp_source"] for row in rig.rows] == [0, 0, 0]
        events = [one for request in range(3) for one in rig.stream(request)]
        assert events and all(one["flags"] & t.FL_READ and one["delay_ns"] == -1 for one in events)
        assert rig.count("unstamped") == rig.count("clamped") == 0


@pytest.mark.parametrize(
    ("real", "offset", "floor", "now", "stamp"),
    [
        (1000_500, 1000_000, 400, 600, 500),
        (1000_400, 1000_000, 400, 600, 400),
        (1000_600, 1000_000, 400, 600, 600),
        # two offsets differ by their brackets: up to 1 us below the last stamp is that stamp
        (1005_000, 1000_000, 5001, 9000, 5001),
        (1005_000, 1000_000, 6000, 9000, 6000),
        (1005_000, 1000_000, 6001, 9000, None),
        # later than now, by however little: somebody set the clock forward
        (1000_601, 1000_000, 400, 600, None),
        (10**18 + 500, 10**18 - 10**9, 400, 600, None),
        # set back
        (10**18 + 500, 10**18 + 10**9, 400, 600, None),
        (1764500000_123456789, 1764400000_000000000, 100000_000000000, 100000_200000000, 100000_123456789),
    ],
)
def test_a_kernel_stamp_is_converted_or_refused(
    real: int, offset: int, floor: int, now: int, stamp: int | None
) -> None:
    assert t.convert_stamp(real, offset, floor, now) == stamp


# ---------------------------------------------------------------- the closed loop


@pytest.mark.parametrize("close", [False, True], ids=["keep-alive", "closing"])
def test_the_closed_loop_keeps_its_level_to_the_last_measured_request(close: bool) -> None:
    streams, warmup, measured = 4, 3, 20
    draining = threading.Event()

    def script(call: Call) -> None:
        # the oldest, and only while the level is whole: a client that falls short waits for ever
        server = call.server
        call.finish_when(
            lambda: draining.is_set() or (server.in_flight == streams and server.calls[0] is call),
            answer("one", close=close),
        )
        if close:
            call.close()

    with serve(script) as server:
        rig = Rig(streams, server.port).open(*range(streams)).begin(streams, measured, warmup).arm(200)
        rig.until(rig.over, lambda: rig.engine.wants() or draining.set()).collect()
        rows = sorted(rig.rows, key=lambda row: row["sent_ns"])
        roles = [row["role"] for row in rows]
        fills = len(rows) - warmup - measured
        assert roles == [t.ROLE_WARMUP] * warmup + [t.ROLE_MEASURED] * measured + [t.ROLE_FILL] * fills
        assert fills >= streams - 1
        assert [row["request"] for row in rows] == list(range(len(rows)))
        assert all(row["end"] == t.END_COMPLETE and row["http_status"] == 200 for row in rows)
        assert server.most_in_flight == streams
        assert len(server.requests) == len(rows) == rig.count("sent") == rig.count("done")
        assert server.accepts == streams if not close else len(rows) <= server.accepts <= len(rows) + streams

        # handed over warm: a measured request left before the last warm-up one was answered
        assert rows[warmup]["sent_ns"] < max(row["done_ns"] for row in rows[:warmup])
        # nothing left after the last measured request
        assert rig.engine.measured_end_ns >= max(row["sent_ns"] for row in rows)
        # each was due when its slot's last answer was done
        due = dict.fromkeys(range(streams), rig.engine.level_start_ns)
        for row in rows:
            assert row["due_ns"] == due[row["slot"]] <= row["sent_ns"]
            due[row["slot"]] = row["done_ns"]


def test_the_next_send_needs_no_python() -> None:
    for close in (False, True):
        with serve(lambda call, close=close: call.finish(answer("one", close=close))) as server:
            rig = Rig(1, server.port).open(0).begin(1, 10).arm(10)
            while rig.count("done") < 10:
                rig.engine.drain()
            assert len(server.requests) == 10
            assert len(rig.collect().rows) == 10


def test_levels_one_after_the_other_close_the_slots_they_do_not_use() -> None:
    with serve(quick) as server:
        rig = Rig(64, server.port)
        for level, streams in enumerate((1, 64, 2)):
            rig.engine.trim(streams)
            rig.open(*(slot for slot in range(streams) if rig.engine.is_empty(slot)))
            assert server.wait_for(lambda streams=streams: server.connections == streams)
            rig.begin(streams, 3 * streams, level=level).arm(5 * streams).finish()
            unsent = rig.engine.disarm()
            assert unsent == len(rig.rows)
            rig.next_request = unsent
        assert server.accepts == 64 + 0
        assert [row["request"] for row in sorted(rig.rows, key=lambda row: row["sent_ns"])] == list(range(len(rig.rows)))
        for level, streams in enumerate((1, 64, 2)):
            rows = [row for row in rig.rows if row["level"] == level]
            assert sum(row["role"] == t.ROLE_MEASURED for row in rows) == 3 * streams
            assert {row["slot"] for row in rows} <= set(range(streams))


def test_a_level_of_a_duration_ends_by_the_clock_and_awaits_what_is_out() -> None:
    gate = threading.Event()
    with serve(lambda call: (call.hold(gate), call.finish(answer("one")))[1]) as server:
        rig = Rig(2, server.port).open(0, 1)
        rig.engine.begin_level(0, 2, 0, 1 << 60, t.now_ns() + 50_000_000)
        rig.arm(100)
        assert rig.engine.wants()
        time.sleep(0.06)
        assert rig.engine.wants() and rig.engine.busy == 2  # fills, as long as measured ones are out
        gate.set()
        rig.finish()
        assert [row["role"] for row in rig.rows][:2].count(t.ROLE_MEASURED) >= 1
        assert not any(row["role"] == t.ROLE_MEASURED and row["sent_ns"] > rig.engine.until_ns for row in rig.rows)


# ---------------------------------------------------------------- sends that take long


def test_a_large_body_is_sent_in_parts() -> None:
    size, gate, read = 20 << 20, threading.Event(), []

    def script(call: Call) -> None:
        call.hold(gate)
        read.append(len(call.seen.body))
        while data := call.read(1 << 18):
            read.append(len(data))
        call.finish(answer("one"))

    with serve(script, early=True) as server:
        rig = Rig(1, server.port).open(0).begin(1, 2).arm(1, size)
        for _ in range(20):
            rig.turn(0.005)
        opened = t.now_ns()
        gate.set()
        rig.until(lambda: rig.count("done") == 1).arm(1).finish()
        large, small = rig.rows
        assert sum(read[:-1]) + read[-1] >= size  # every byte, and the small one behind it
        assert large["end"] == small["end"] == t.END_COMPLETE
        assert large["sent_ns"] < opened < large["sent_done_ns"] <= large["first_byte_ns"]
        assert large["request_bytes"] > size and small["conn_reused"] == 1
        assert server.accepts == 1


@pytest.mark.parametrize("reset", [False, True])
def test_an_answer_before_the_request_is_all_sent(reset: bool) -> None:
    said = b'{"error":"too large"}'

    def script(call: Call) -> None:
        if call.seen.ordinal == 0 and call.seen.connection == 0:
            call.finish(head(b"Content-Length: %d" % len(said), 413) + said)
            if reset:
                call.close()  # with bytes unread: the kernel makes it a reset
            call.stay()
        quick(call)

    with serve(script, early=True) as server:
        rig = Rig(1, server.port).open(0).begin(1, 2).arm(1, 20 << 20)
        rig.until(lambda: rig.engine.busy == 0)
        rig.arm(1).finish()
        early, after = rig.rows
        assert (early["end"], early["http_status"], early["sent_done_ns"]) == (t.END_COMPLETE, 413, -1)
        assert [raw for *_, kind, raw in rig.blobs if kind == t.BLOB_BODY] == [said]
        assert (after["end"], after["http_status"], after["conn_reused"]) == (t.END_COMPLETE, 200, 0)
        assert server.accepts == 2 and rig.count("stale_retries") == 0


def test_a_reset_while_sending_is_a_reset() -> None:
    gate = threading.Event()

    def script(call: Call) -> None:
        call.hold(gate)
        call.reset()

    with serve(script, early=True) as server:
        rig = Rig(1, server.port, dial=False).begin(1, 1).open(0, connect_ns=1000).arm(1, 20 << 20)
        gate.set()
        rig.finish()
        (row,) = rig.rows
        assert (row["end"], row["errno"], row["attempt"]) == (t.END_RESET, errno.ECONNRESET, 1)


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


# ---------------------------------------------------------------- due times


def test_due_requests_leave_in_time_and_never_early() -> None:
    with serve(quick) as server:
        rig = Rig(4, server.port).open(0, 1, 2, 3).begin(4, 8)
        start = t.now_ns() + 20_000_000
        for i in range(8):
            rig.arm(1, due_ns=start + i * 3_000_000)
        rig.finish()
        rows = sorted(rig.rows, key=lambda row: row["sent_ns"])
        assert [row["request"] for row in rows] == list(range(8))
        assert [row["due_ns"] for row in rows] == [start + i * 3_000_000 for i in range(8)]
        assert all(row["sent_ns"] >= row["due_ns"] for row in rows)


def test_a_backlog_leaves_at_once_and_says_so() -> None:
    with serve(quick) as server:
        rig = Rig(4, server.port).open(0, 1, 2, 3).begin(4, 8)
        start = t.now_ns() + 5_000_000
        for i in range(7):
            rig.arm(1, due_ns=start + i * 1_000_000)
        last = start + 200_000_000
        rig.arm(1, due_ns=last)
        time.sleep(0.04)  # the stall
        rig.finish()
        rows = sorted(rig.rows, key=lambda row: row["sent_ns"])
        assert [row["request"] for row in rows] == list(range(8))
        assert all(row["row_flags"] & t.RF_DUE_LATE for row in rows[:7])
        assert rig.count("late_sends") >= 7
        assert all(row["sent_ns"] < last for row in rows[:7]) and rows[7]["sent_ns"] >= last


def test_a_late_request_that_is_sent_again_stays_late() -> None:
    def script(call: Call) -> None:
        if call.seen.connection == 0:
            call.close()
        quick(call)

    with serve(script) as server:
        due = t.now_ns() - 5_000_000
        rig = Rig(1, server.port).open(0).begin(1, 1).arm(1, due_ns=due).finish()
        (row,) = rig.rows
        assert row["row_flags"] & t.RF_DUE_LATE and row["row_flags"] & t.RF_RETRIED
        assert (row["due_ns"], row["attempt"]) == (due, 2)


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


def test_a_dial_that_hangs_is_left_to_python() -> None:
    # a listener whose queue is full answers no SYN
    with socket.socket() as listener, serve(quick) as server:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        port = listener.getsockname()[1]
        crowd = [socket.socket() for _ in range(4)]
        for sock in crowd:
            sock.setblocking(False)
            sock.connect_ex(("127.0.0.1", port))
        rig = Rig(1, port).begin(1, 1)
        rig.address = ("127.0.0.1", server.port)
        # the first connection, elsewhere, closes after its answer, and the engine dials
        rig.engine.attach(0, rig.socket())
        with serve(lambda call: call.finish(answer("one", close=True))) as closing:
            rig.engine.close_idle()
            rig.address = ("127.0.0.1", closing.port)
            rig.open(0).begin(1, 2).arm(3)
            rig.until(lambda: rig.count("done") == 1)
        rig.engine.expire(NEVER, NEVER, NEVER, NEVER)
        assert rig.engine.take_lost() == [] and not rig.engine.is_empty(0)
        rig.engine.expire(1, NEVER, NEVER, NEVER)
        assert rig.engine.take_lost() == [0] and rig.engine.is_empty(0)
        for sock in crowd:
            sock.close()


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


# ---------------------------------------------------------------- blocks and descriptors


def test_a_full_block_does_not_hold_up_the_next_send() -> None:
    with serve(quick) as server:
        # 64 rows: a block is full after 32 answers; with one stream, no event comes to try again
        rig = Rig(1, server.port, rows=64, blocks=8).open(0).begin(1, 100).arm(100)
        give_up = time.monotonic() + 10
        while rig.count("done") < 100 and time.monotonic() < give_up:
            rig.turn(20.0)
            rig.collect(seal=False)
        rig.collect()
        assert [row["request"] for row in rig.rows] == list(range(100))
        assert rig.sequences == list(range(len(rig.sequences))) and len(rig.sequences) >= 4


def test_without_a_free_block_bytes_wait_in_the_kernel() -> None:
    events, gate = 300, threading.Event()

    def script(call: Call) -> None:
        call.send(head())
        call.hold(gate)
        for _ in range(events):
            call.send(chunk(event("a")))
        call.finish(chunk(DONE) + LAST_CHUNK)

    with serve(script) as server:
        rig = Rig(1, server.port, rows=64, blocks=1).open(0).begin(1, 1).arm(1)
        rig.turn()
        rig.recorder.seal()
        gate.set()
        assert server.wait_for(lambda: server.in_flight == 0)
        assert rig.turn() is True  # a sealed block waits to be passed on
        for _ in range(10):
            rig.turn()
        assert rig.count("text_events") == 0 and rig.engine.busy == 1
        rig.collect().finish()
        assert rig.count("stalled_ns") > 0
        assert len(rig.stream(0)) == events + 1 and rig.rows[0]["end"] == t.END_COMPLETE


def test_no_descriptor_is_lost_over_many_connections() -> None:
    def script(call: Call) -> None:
        if call.number % 7 == 3 and call.seen.ordinal == 0:
            call.reset()
        call.finish(answer("one", close=call.number % 2 == 0))
        if call.number % 5 == 0:
            call.close()

    with serve(script) as server:
        rig = Rig(8, server.port, blocks=8)
        before = descriptors()
        rig.open(*range(8)).begin(8, 2000).arm(2500)
        rig.finish()
        rig.engine.close_idle()
        assert server.wait_for(lambda: server.connections == 0)
        assert descriptors() == before
        assert server.accepts > 1000
        measured = [row["request"] for row in rig.rows if row["role"] == t.ROLE_MEASURED]
        assert len(measured) == len(set(measured)) == 2000


def test_an_engine_that_cannot_be_made_closes_nothing() -> None:
    code = """
import os
from fastload import _client, _timing
recorder = _timing.Recorder(bytearray(_timing.block_bytes(32768, 64, 1 << 17)), 1, 32768, 64, 1 << 17)
for gauges, stamp in ((bytearray(10), "kernel"), (bytearray(_client.MEMORY_BYTES), "soon")):
    try:
        _client.Engine(recorder, 1, gauges, stamp)
    except ValueError:
        os.fstat(0)
    else:
        raise SystemExit("made it")
"""
    subprocess.run([sys.executable, "-P", "-c", code], check=True, stdin=subprocess.DEVNULL)
