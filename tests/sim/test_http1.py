"""How the simulated engine reads requests: any cut of the bytes gives the same requests."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastload.sim.http1 import BODY_LIMIT, HEAD_LIMIT, MalformedRequest, Request, RequestReader

GET = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\n{...}"
CHUNKED = (
    b"POST /tokenize HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"3;note=x\r\nabc\r\nA\r\n0123456789\r\n0\r\nTrailer: t\r\n\r\n"
)


def read(reader: RequestReader) -> list[Request]:
    requests = []
    while (request := reader.next()) is not None:
        requests.append(request)
    return requests


@given(st.lists(st.integers(0, len(GET + POST + CHUNKED)), max_size=40))
def test_cuts_do_not_matter(cuts: list[int]) -> None:
    stream = GET + POST + b"\r\n" + CHUNKED + GET
    reader, requests, start = RequestReader(), [], 0
    for cut in [*sorted(cuts), len(stream)]:
        reader.feed(stream[start:cut])
        start = max(start, cut)
        requests += read(reader)
    assert [(request.method, request.path, request.body) for request in requests] == [
        ("GET", "/health", b""),
        ("POST", "/v1/completions", b"{...}"),
        ("POST", "/tokenize", b"abc0123456789"),
        ("GET", "/health", b""),
    ]


@pytest.mark.parametrize(
    ("head", "keep_alive"),
    [
        (b"GET /x?a=b HTTP/1.1\r\n\r\n", True),
        (b"GET /x HTTP/1.1\r\nconnection: Close\r\n\r\n", False),
        (b"GET /x HTTP/1.0\r\n\r\n", False),
        (b"GET /x HTTP/1.0\r\nConnection: keep-alive\r\n\r\n", True),
    ],
)
def test_keep_alive(head: bytes, keep_alive: bool) -> None:
    reader = RequestReader()
    reader.feed(head)
    (request,) = read(reader)
    assert (request.path, request.keep_alive) == ("/x", keep_alive)


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"hello\r\n\r\n", 400),
        (b"GET  / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/2\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nno colon\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost : a\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: gzip\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n", 400),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nabc", 400),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n" + b"0" * 300, 400),
        (b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % (BODY_LIMIT + 1), 413),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n" % (BODY_LIMIT + 1), 413),
        (b"GET / HTTP/1.1\r\nA: " + b"x" * HEAD_LIMIT, 431),
    ],
)
def test_malformed(data: bytes, status: int) -> None:
    reader = RequestReader()
    with pytest.raises(MalformedRequest) as raised:
        reader.feed(data)
        reader.next()
    assert raised.value.status == status


def test_expects_continue_until_the_body_begins() -> None:
    reader = RequestReader()
    reader.feed(b"POST / HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n")
    assert reader.next() is None
    assert reader.expects_continue
    reader.feed(b"{")
    assert reader.next() is None
    assert not reader.expects_continue
