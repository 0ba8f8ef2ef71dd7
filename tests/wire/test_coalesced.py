"""Which stamps are upper bounds: the kernel keeps one stamp a read, that of its last segment."""

import pytest
from machine import differences, run, stamps_of
from twin import read_answer

from fastload import _timing as t

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
CLOSE = HEAD + b"\r\n"
A, B, C = (b'data: {"choices":[{"index":0,"delta":{"content":"%s"}}]}\n\n' % text for text in (b"a", b"b", b"c"))
USAGE = b'data: {"choices":[],"usage":{"completion_tokens":3}}\n\n'
DONE = b"data: [DONE]\n\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def flagged(*reads: bytes) -> list[tuple[int, bool]]:
    """(index of the read whose stamp it has, coalesced?) of each event; the twin must agree."""
    stamps = stamps_of(reads)
    answer = run(reads)
    assert differences(answer, read_answer(reads, stamps)) == []
    return [(stamps.index(e.stamp), bool(e.flags & t.FL_COALESCED)) for e in answer.events]


def test_stamps_by_read() -> None:
    assert flagged(CHUNKED, chunk(A), chunk(B), chunk(C)) == [(1, False), (2, False), (3, False)]


def test_three_events_in_one_read() -> None:
    assert flagged(CHUNKED, chunk(A) + chunk(B) + chunk(C)) == [(1, True), (1, True), (1, False)]
    assert flagged(CHUNKED, chunk(A + B + C)) == [(1, True), (1, True), (1, False)]
    assert flagged(CLOSE, A + B + C) == [(1, True), (1, True), (1, False)]


def test_the_head_in_front_is_no_coalescing() -> None:
    assert flagged(CHUNKED + chunk(A)) == [(0, False)]


def test_last_token_and_usage_in_one_read() -> None:
    assert flagged(CHUNKED, chunk(A), chunk(B) + chunk(USAGE), chunk(DONE)) == [
        (1, False),
        (2, True),
        (2, False),
        (3, False),
    ]


def test_the_end_of_its_own_chunk_is_no_coalescing() -> None:
    whole = chunk(A)
    for kept in (0, 1, 2):  # how much of CRLF comes with the event
        cut = len(whole) - 2 + kept
        assert flagged(CHUNKED, whole[:cut], whole[cut:] + chunk(B)) == [(1, False), (2, False)]


def test_the_next_chunk_is() -> None:
    """One byte of the next chunk's size line came later than the event, and so did the last chunk."""
    for more in (chunk(B)[:1], chunk(B)[:4], chunk(B)[:6]):
        rest = chunk(B)[len(more) :]
        assert flagged(CHUNKED, chunk(A) + more, rest) == [(1, True), (2, False)]
    assert flagged(CHUNKED, chunk(A), chunk(DONE) + b"0\r\n\r\n") == [(1, False), (2, True)]


@pytest.mark.parametrize("more", [b"d", b"da", b"data: {"])
def test_the_next_event_in_the_same_chunk_is(more: bytes) -> None:
    """Also one byte or two of it: they are not the CRLF of a chunk."""
    first, rest = chunk(A + B).split(A)
    assert flagged(CHUNKED, first + A + more, rest[len(more) :]) == [(1, True), (2, False)]
    assert flagged(CLOSE, A + more, B[len(more) :]) == [(1, True), (2, False)]


@pytest.mark.parametrize("ping", [b": ping\n\n", b"event: x\nid: 1\n\n", b"data:\n\n"])
def test_a_comment_behind_it_is(ping: bytes) -> None:
    assert flagged(CLOSE, A + ping, B) == [(1, True), (2, False)]
    assert flagged(CHUNKED, chunk(A) + chunk(ping), chunk(B)) == [(1, True), (2, False)]


def test_more_blank_lines_are_not() -> None:
    assert flagged(CLOSE, A + b"\n\r\n\n", B) == [(1, False), (2, False)]


def test_a_blank_line_that_comes_later() -> None:
    """The stamp is that of the data; what comes with the late blank line does not touch it."""
    assert flagged(CLOSE, A[:-1], b"\n" + B + C[:-1], b"\n") == [(1, False), (2, True), (2, False)]
    assert flagged(CHUNKED, chunk(A[:-1]), chunk(b"\n") + chunk(B)) == [(1, False), (2, False)]


def test_data_in_two_reads() -> None:
    """The stamp is that of the read which ended the last data line."""
    assert flagged(CLOSE, A[:20], A[20:]) == [(2, False)]
    assert flagged(CLOSE, b'data: {"choices":\n', b"data: []}\n", b"\n") == [(2, False)]


def test_servers_that_leave_out_the_blank_line() -> None:
    """The next data line ends the event: it came behind it in the same read, or it did not."""
    a, b, c = A[:-1], B[:-1], C[:-1]
    assert flagged(CLOSE, a, b, c, b"\n") == [(1, False), (2, False), (3, False)]
    assert flagged(CLOSE, a + b, c, b"\n") == [(1, True), (1, False), (2, False)]
    assert flagged(CLOSE, a + b[:9], b[9:], b"\n") == [(1, True), (2, False)]
    assert flagged(CHUNKED, chunk(a) + chunk(b), chunk(c) + chunk(b"\n")) == [(1, True), (1, False), (2, False)]


def test_the_end_of_the_message_behind_an_open_event() -> None:
    assert flagged(CHUNKED, chunk(A[:-1]) + b"0\r\n\r\n") == [(1, True)]
    assert flagged(CHUNKED, chunk(A[:-1]), b"0\r\n\r\n") == [(1, False)]
    assert flagged(HEAD + b"Content-Length: %d\r\n\r\n" % len(A[:-1]), A[:-1]) == [(1, False)]


def test_an_end_that_only_the_close_told() -> None:
    """A last line without its end has the close's stamp, and says that nobody stamped it in the kernel."""
    reads = [CLOSE, A[:-2]]
    answer = run(reads, 9000)
    assert differences(answer, read_answer(reads, stamps_of(reads), 9000)) == []
    assert [(e.stamp, e.flags & t.FL_READ) for e in answer.events] == [(9000, t.FL_READ)]
