"""A 200 without events: what it said is kept where it is no event stream, and nothing is where it is an empty one."""

import pytest
from machine import differences, run, slices, stamps_of, story
from twin import read_answer

JSON = b'{\n  "error": "no worker",\n\n  "data": {"id": 7}\n}'
PAGE = b"<html>\r\n<h1>502 Bad Gateway</h1>\r\n"


@pytest.mark.parametrize(
    ("body", "kept"),
    [
        (b"", b""),
        (b"upstream connect error", b"upstream connect error\n"),
        (JSON, JSON.replace(b"\n\n", b"\n") + b"\n"),
        (PAGE, PAGE.replace(b"\r\n", b"\n")),
        (b"x" * 9000, b"x" * 4096 + b"\n"),
        (b"x" * 4095 + b"\nyz\n", b"x" * 4095 + b"\n"),
        # an event stream, if an empty one
        (b": ping\n\n: ping\n\n", b""),
        (b"\xef\xbb\xbfretry: 10\nid\n\nevent: end\ndata\n\n", b""),
        # events: whatever else there is, it is a stream
        (b'stray\ndata: {"choices":[]}\n\n', b""),
    ],
)
@pytest.mark.parametrize("kind", [b"", b"Content-Type: text/plain\r\n", b"Content-Type: text/event-stream\r\n"])
def test_what_is_kept(body: bytes, kept: bytes, kind: bytes) -> None:
    wire = b"HTTP/1.1 200 OK\r\n%sContent-Length: %d\r\n\r\n%s" % (kind, len(body), body)
    whole = run([wire])
    assert (whole.code, whole.body) == (1, kept)
    for size in (1, 3, 64, 1000):
        reads = slices(wire, size)
        assert story(run(reads)) == story(whole)
        assert differences(run(reads), read_answer(reads, stamps_of(reads))) == []
