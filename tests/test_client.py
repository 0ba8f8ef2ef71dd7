"""The engine against real sockets: stamps, the closed loop, sends, due times, blocks.

Nothing here asserts how long anything takes; a wait is bounded (20 s) only where a hang would be the failure.
"""

import errno
import gc
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from fastload import _timing as t

sys.path.insert(0, str(Path(__file__).with_name("load")))

from rig import Rig, descriptors  # noqa: E402
from scripted import DONE, LAST_CHUNK, Call, answer, chunk, event, head, one_by_one, quick, serve, usage  # noqa: E402

FAMILIES = [pytest.param(socket.AF_INET, id="IPv4"), pytest.param(socket.AF_INET6, id="IPv6")]
DRIFT_NS = 20_000  # how far a clock that is being slewed may go between the offset's sample and the stamp


# ---------------------------------------------------------------- stamps


@pytest.mark.parametrize("family", FAMILIES)
def test_a_stamp_lies_between_the_servers_send_and_the_read(family: int) -> None:
    with serve(one_by_one, family=family) as server:
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
            rig.begin(streams, 3 * streams, level=level).finish(more=2 * streams)
            unsent = rig.engine.disarm()
            assert unsent in (-1, len(rig.rows))  # -1: all that was armed has left
            rig.next_request = len(rig.rows)
        assert server.accepts == 64
        in_order = sorted(rig.rows, key=lambda row: row["sent_ns"])
        assert [row["request"] for row in in_order] == list(range(len(in_order)))
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
        assert large["sent_ns"] < opened < large["sent_done_ns"]
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
        gc.collect()  # engines of earlier tests may still be held by a cycle
        before = descriptors()
        rig.open(*range(8)).begin(8, 2000).finish(more=100)
        rig.engine.close_idle()
        # the server's own are among them: it may be a moment behind
        assert server.wait_for(lambda: descriptors() == before), descriptors() - before
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
