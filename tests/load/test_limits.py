"""Time limits of the engine: what each counts from, and what does not stretch it.

How long anything takes is asserted nowhere: a limit is set to the time that has passed since something was seen.
"""

import contextlib
import errno
import json
import socket
import threading
from collections.abc import Iterator

import pytest
from rig import NEVER, Rig
from scripted import DONE, LAST_CHUNK, Call, answer, chunk, event, head, quick, serve

from fastload import _timing as t

PING = chunk(b": ping\n\n")
NAMED_PING = chunk(b'event: ping\ndata: {"type": "ping"}\n\n')
EMPTY = chunk(b"data:\n\n")
ROLE = chunk(b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n')
HALF = b'2000\r\ndata: {"choices":[{"index":0,"delta":{"content":"xx'


class Steps:
    """A script that sends the next piece whenever the test says so."""

    def __init__(self, *pieces: bytes) -> None:
        self.pieces = pieces
        self.gates = [threading.Event() for _ in pieces]

    def __call__(self, call: Call) -> None:
        for piece, gate in zip(self.pieces, self.gates, strict=True):
            call.hold(gate)
            call.send(piece)
        call.stay()

    def take(self, rig: Rig) -> None:
        """Have the next piece sent, and read it."""
        reads = rig.count("reads")
        next(gate for gate in self.gates if not gate.is_set()).set()
        rig.until(lambda: rig.count("reads") > reads)


def expired(rig: Rig, **limits: int) -> bool:
    """Does the request end under these limits (ns)?"""
    never = {"connect_ns": NEVER, "first_byte_ns": NEVER, "idle_ns": NEVER, "total_ns": NEVER}
    rig.engine.expire(**(never | limits))
    return bool(rig.engine.busy == 0)


@pytest.mark.parametrize("warmer", [PING, NAMED_PING, EMPTY, chunk(b":\n\n"), chunk(b": half a com")])
def test_what_keeps_a_line_warm_is_no_life_in_it(warmer: bytes) -> None:
    steps = Steps(head() + chunk(event("a")), warmer, warmer)
    with serve(steps) as server:
        rig = Rig(1, server.port).open(0).begin(1, 1).arm(1)
        steps.take(rig)
        seen = t.now_ns()
        steps.take(rig)
        steps.take(rig)
        assert expired(rig, idle_ns=t.now_ns() - seen)
        assert rig.collect().rows[0]["end"] == t.END_TIMEOUT
        assert rig.error(0) == "silent for longer than --idle-timeout"


@pytest.mark.parametrize(
    "pieces",
    [
        (chunk(event("b")),),
        (chunk(event("")),),  # an event without text: a token held back, progress of a long prompt
        (HALF,),  # a piece of a long event
        (HALF, b"yyyyyyyy"),
        (chunk(b"data: 1\ndata: "), chunk(b"2")),  # of a data line behind another
    ],
)
def test_an_event_or_a_piece_of_one_is_life(pieces: tuple[bytes, ...]) -> None:
    steps = Steps(head() + chunk(event("a")), *pieces)
    with serve(steps) as server:
        rig = Rig(1, server.port).open(0).begin(1, 1).arm(1)
        for _ in pieces:
            steps.take(rig)
        before = t.now_ns()
        steps.take(rig)
        assert not expired(rig, idle_ns=t.now_ns() - before)


def test_a_drip_ends_by_the_limit_of_the_whole_request() -> None:
    steps = Steps(head() + chunk(event("a")) + b"1000\r\n", *(b"x" for _ in range(20)))
    with serve(steps) as server:
        rig = Rig(1, server.port).open(0).begin(1, 1).arm(1)
        for _ in steps.pieces[1:]:
            before = t.now_ns()
            steps.take(rig)
            assert not expired(rig, idle_ns=t.now_ns() - before)
        assert expired(rig, total_ns=1)
        assert rig.collect().error(0) == "the whole request took longer than --timeout"


@pytest.mark.parametrize(
    "begun",
    [
        (head(),),  # vLLM, at once; then the request queues
        (head() + ROLE,),  # transformers serve, before any compute
        (head() + ROLE, PING, PING),  # llama.cpp in a long prompt
        (head() + NAMED_PING, NAMED_PING),
        (head(), chunk(b'data: {"type":"response.created","response":{"id":"r"}}\n\n')),  # vLLM's responses API
    ],
)
def test_until_the_first_token_only_the_first_limit_counts(begun: tuple[bytes, ...]) -> None:
    steps = Steps(*begun)
    with serve(steps) as server:
        rig = Rig(1, server.port).open(0).begin(1, 1).arm(1)
        sent = t.now_ns()
        for _ in begun:
            steps.take(rig)
        assert not expired(rig, idle_ns=1)
        assert expired(rig, first_byte_ns=t.now_ns() - sent)
        assert rig.collect().rows[0]["end"] == t.END_TIMEOUT
        assert rig.error(0) == "no token within --first-byte-timeout"


DELTAS = [
    b'data: {"type":"response.output_text.delta","delta":"hi"}\n\n',
    b'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,"delta":{"text":"hi"}}\n\n',
    b'data: {"choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"function":{"arguments":"{"}}]}}]}\n\n',
    event("a"),
]


@pytest.mark.parametrize("delta", DELTAS)
def test_a_token_of_any_api_ends_the_first_limit(delta: bytes) -> None:
    steps = Steps(head() + ROLE + chunk(delta))
    with serve(steps) as server:
        rig = Rig(1, server.port).open(0).begin(1, 1).arm(1)
        steps.take(rig)
        assert not expired(rig, first_byte_ns=1)
        assert expired(rig, idle_ns=1)


def test_a_head_that_never_ends_has_no_life_of_its_own() -> None:
    steps = Steps(b"HTTP/1.1 200 OK\r\n", b"X: y\r\n")
    with serve(steps) as server:
        rig = Rig(1, server.port).open(0).begin(1, 1).arm(1)
        steps.take(rig)
        steps.take(rig)
        assert not expired(rig, idle_ns=1)
        assert expired(rig, first_byte_ns=1)


def test_a_body_that_is_no_stream_is_bounded_by_silence() -> None:
    steps = Steps(head(b"Content-Length: 100", 503) + b"{", b'"')
    with serve(steps) as server:
        rig = Rig(1, server.port).open(0).begin(1, 1).arm(1)
        steps.take(rig)
        before = t.now_ns()
        steps.take(rig)
        assert not expired(rig, first_byte_ns=1, idle_ns=t.now_ns() - before)
        assert expired(rig, idle_ns=1)
        assert rig.collect().rows[0]["http_status"] == 503


def test_a_server_that_reads_nothing() -> None:
    with serve(Call.stay, early=True) as server:
        rig = Rig(1, server.port).open(0).begin(1, 1).arm(1, size=64 << 20)
        assert server.wait_for(lambda: len(server.requests) == 1)
        assert not expired(rig, idle_ns=1)
        assert expired(rig, first_byte_ns=1)
        (row,) = rig.collect().rows
        assert (row["end"], row["sent_done_ns"]) == (t.END_TIMEOUT, -1)


# ---------------------------------------------------------------- dialling


@pytest.fixture
def full() -> Iterator[int]:
    """The port of a listener whose queue is full: it answers no SYN."""
    with contextlib.ExitStack() as held:
        listener = held.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            sock = held.enter_context(socket.socket())
            sock.setblocking(False)
            sock.connect_ex(listener.getsockname())
        yield int(listener.getsockname()[1])


def dialling(rig: Rig) -> Rig:
    """A rig whose only slot was answered elsewhere, on a connection that closed, and dials by itself now."""
    with serve(lambda call: call.finish(answer("one", close=True))) as closing:
        rig.address = ("127.0.0.1", closing.port)
        rig.open(0).begin(1, 2).arm(3)
        return rig.until(lambda: rig.count("done") == 1)


def test_a_dial_past_its_limit_is_told_with_its_errno(full: int) -> None:
    rig = dialling(Rig(1, full))
    assert not rig.engine.is_empty(0)
    rig.engine.expire(1, NEVER, NEVER, NEVER)
    assert rig.engine.take_lost() == [0] and rig.engine.is_empty(0)
    assert rig.engine.take_dial_error(0) == errno.ETIMEDOUT
    assert rig.engine.take_dial_error(0) == 0  # it is one row


def test_a_dial_that_is_refused_is_told_with_its_errno() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and does not listen
        rig = dialling(Rig(1, closed.getsockname()[1]))
        rig.until(lambda: rig.engine.is_empty(0))
    assert rig.engine.take_lost() == [0]
    assert rig.engine.take_dial_error(0) == errno.ECONNREFUSED


# ---------------------------------------------------------------- back-off


def failing(call: Call) -> None:
    """429 at once, on a connection that is kept."""
    said = json.dumps({"error": {"message": "slow down"}}).encode()
    call.finish(head(b"Retry-After: 3\r\nContent-Length: %d" % len(said), 429) + said)


def test_a_failure_alone_holds_nothing_and_the_second_holds_its_slot() -> None:
    with serve(failing) as server:
        rig = Rig(2, server.port).open(0).begin(2, 100).arm(50)
        rig.until(lambda: rig.engine.is_held(0))
        assert len(server.requests) == 2 and rig.engine.failures(0) == 2
        assert rig.engine.take_lost() == [0] and not rig.engine.is_empty(0)
        rig.open(1)  # another slot goes on
        rig.engine.pump()
        rig.until(lambda: rig.engine.is_held(1))
        assert len(server.requests) == 4 and server.accepts == 2
        rig.engine.release(0, 100)
        rig.engine.pump()
        rig.until(lambda: len(server.requests) == 5 and rig.engine.is_held(0))
        rig.collect()
        assert [row["backoff_ms"] for row in rig.rows if row["slot"] == 0] == [0, 0, 100]
        assert rig.count("failed_in_row") == 5 and rig.count("last_status") == 429


def test_a_success_makes_a_slot_as_good_as_new() -> None:
    def script(call: Call) -> None:
        (quick if call.number % 2 else failing)(call)

    with serve(script) as server:
        rig = Rig(1, server.port).open(0).begin(1, 10).arm(20).finish()
        assert len(rig.rows) == 10 and rig.engine.failures(0) == 0 and rig.count("failed") == 5
        assert {row["backoff_ms"] for row in rig.rows} == {0}


def test_a_refusal_holds_at_once_where_retry_after_is_respected() -> None:
    with serve(failing) as server:
        rig = Rig(1, server.port)
        rig.engine.respect_retry_after = True
        rig.open(0).begin(1, 100).arm(50)
        rig.until(lambda: rig.engine.is_held(0))
        assert len(server.requests) == 1
        status, raw = rig.engine.refusal(0)
        assert status == 429 and b"Retry-After: 3\r\n" in raw


def test_a_held_slot_whose_connection_closes_is_left_to_python() -> None:
    with serve(failing) as server:
        rig = Rig(1, server.port).open(0).begin(1, 100).arm(50)
        rig.until(lambda: rig.engine.is_held(0))
        assert rig.engine.take_lost() == [0]
        server.drop()
        rig.until(lambda: rig.engine.is_empty(0))
        assert rig.engine.take_lost() == [0] and server.accepts == 1
        rig.engine.release(0)  # nothing to let go
        rig.open(0).engine.pump()
        rig.until(lambda: rig.count("failed") == 3)


def test_the_next_level_begins_with_free_slots() -> None:
    with serve(failing) as server:
        rig = Rig(1, server.port).open(0).begin(1, 2).arm(2)
        rig.until(lambda: rig.engine.is_held(0))
        rig.begin(1, 1, level=1).arm(1)
        rig.until(lambda: rig.count("failed") == 1)
        assert server.accepts == 1


@pytest.mark.parametrize(
    ("said", "good"),
    [
        (answer("one"), True),
        (head() + chunk(event("a") + DONE) + LAST_CHUNK, True),
        (head() + chunk(b'data: {"error":{"message":"no"}}\n\n' + DONE) + LAST_CHUNK, False),
        (head() + chunk(event("a") + b'data: {"error":{"message":"no"}}\n\n') + LAST_CHUNK, False),
        (head() + chunk(b'event: error\ndata: {"m":1}\n\n') + LAST_CHUNK, False),
        (head() + LAST_CHUNK, False),
        (head() + chunk(event("a")) + LAST_CHUNK, False),
        (head() + chunk(DONE) + LAST_CHUNK, False),
        (head() + chunk(DELTAS[0] + b'data: {"type":"response.completed"}\n\n') + LAST_CHUNK, True),
        (head() + chunk(b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n') + LAST_CHUNK, True),
        (head(b"Content-Length: 2") + b"{}", False),
    ],
)
def test_what_counts_as_a_success_while_a_level_runs(said: bytes, good: bool) -> None:
    with serve(lambda call: call.finish(said)) as server:
        rig = Rig(1, server.port).open(0).begin(1, 1).arm(1).finish()
        assert (rig.count("done"), rig.count("failed_in_row")) == ((1, 0) if good else (0, 1))


def test_hope_is_a_request_on_the_wire_of_a_slot_that_did_not_fail() -> None:
    def script(call: Call) -> None:
        if call.number > 1:
            return failing(call)
        if call.number == 1:
            call.send(head() + chunk(event("a")))
        call.stay()

    with serve(script) as server:
        rig = Rig(3, server.port).open(0).begin(3, 100).arm(1)
        assert rig.engine.hopeful(waiting=True) and not rig.engine.hopeful(waiting=False)
        rig.open(1).arm(1).until(lambda: rig.count("text_events") == 1)
        assert rig.engine.hopeful(waiting=False)
        rig.open(2).arm(9).until(lambda: rig.engine.is_held(2))
        assert rig.engine.hopeful(waiting=False)
        rig.engine.cancel()
        assert not rig.engine.hopeful(waiting=True)
