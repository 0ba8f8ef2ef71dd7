"""The HTTP/1.1 layer against llhttp, Node's parser, by httptools: status, body, end of message, keep-alive, errors.

An answer is drawn in parts and written twice: in an odd but lawful form for us, in plain form for llhttp, and both must
read the same from it. llhttp must also read the odd form so, or refuse it with words that TAKEN explains. Then answers
with a few bytes changed, where each may refuse what REFUSED or TAKEN explains. Where both read one, and not alike, it
is for a reason in DIFFERENT. Nothing else is let pass.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import httptools
import pytest
from answers import cuts
from hypothesis import example, given, settings
from hypothesis import strategies as st
from machine import STEP_NS, cut, run, slices, stamps_of, story

RFC_LF = "RFC 9112 2.2: a recipient may take a lone LF for a line's end; small servers send it"
NO_FIELD = "a line that is no field: RFC 9112 5 has no rule for answers, and what we do not need is not judged"
EXTENSION = "RFC 9112 7.1.1: extensions nobody knows are ignored, so their form is not judged"
FOLDED = "RFC 9112 5.2: a user agent must read a folded line as one"
TRAILERS = "RFC 9112 7.1.2: a recipient may discard trailers, so their form is not judged"

# What llhttp refuses and we take, by llhttp's words.
TAKEN = {
    "Missing expected CR after header value": RFC_LF,
    "Missing expected CR after response line": RFC_LF,
    "Invalid response status": RFC_LF + "; here behind the status",
    "Missing expected CR after chunk size": RFC_LF,
    "Missing expected CR after chunk data": RFC_LF,
    "Missing expected CR after chunk extension name": RFC_LF,
    "Missing expected CR after chunk extension value": RFC_LF,
    "Invalid header token": NO_FIELD,
    "Invalid header field char": NO_FIELD,
    "Invalid header value char": "RFC 9110 5.5: such a byte may stand in a field that only shows it",
    "Expected LF after CR": "RFC 9112 2.2: a bare CR may be read as a blank",
    "Missing expected LF after header value": "RFC 9112 2.2: a bare CR may be read as a blank",
    "Unexpected whitespace after header value": FOLDED,
    "Unexpected space after start line": "RFC 9112 2.2: may be read over; so we do",
    "Invalid character in chunk size": "blanks behind the size: some servers pad it",
    "Invalid character in chunk extensions": EXTENSION,
    "Invalid character in chunk extensions name": EXTENSION,
    "Invalid character in chunk extensions value": EXTENSION,
    "Invalid character in chunk extensions quoted value": EXTENSION,
    "Invalid character in chunk extensions quote value": EXTENSION,
    "Invalid quoted-pair in chunk extensions quoted value": EXTENSION,
    "Expected LF after chunk size": EXTENSION + "; here a bare CR in it",
    "Expected LF after headers": TRAILERS,
    "Content-Length can't be present with Transfer-Encoding": "`identity` is no coding (RFC 2616); or it is a trailer",
    "Transfer-Encoding can't be present with Content-Length": "`identity` is no coding (RFC 2616)",
    "Empty Transfer-Encoding": "RFC 9110 5.6.1: an empty list has no elements, so there is no coding",
    "Duplicate Content-Length": "RFC 9110 8.6: equal lengths may be read as one",
    "Invalid HTTP version": "RFC 9110 2.5: a higher minor version is read as the highest one known",
    "Pause on CONNECT/Upgrade": "101 is read over as any interim answer: no upgrade was asked for",
}
# What we refuse and llhttp takes, by our words.
REFUSED = {
    "the answer is not HTTP/1.x": "RFC 9110 2.5: another major version is another protocol; so are ICE and RTSP",
    "the status line has no three-digit status": "RFC 9112 4: 100 to 999",
    "a content-length that is no single number": "of more than 17 digits, beyond any answer",
    "a chunk size of more than 15 hex digits": "a named limit, leading zeros included",
}


@dataclass(slots=True)
class Reading:
    """What a parser made of the bytes up to the end of the connection."""

    end: str = "cut"  # complete, cut, error
    status: int = -1
    body: bytes = b""
    keepalive: bool = False
    used: int = 0
    why: str = ""
    version: str = ""
    body_kept: bool = True
    fields: list[tuple[str, str]] = field(default_factory=list)

    def values(self, name: str) -> list[str]:
        return [value for known, value in self.fields if known == name]


# Both read it, and not alike: (fields by their names, version) -> is it so, and what may differ.
DIFFERENT: dict[str, tuple[Callable[[Reading], bool], tuple[str, ...]]] = {
    "RFC 9112 C.2.2: Proxy-Connection means nothing; llhttp reads it as Connection": (
        lambda read: bool(read.values("proxy-connection")),
        ("keepalive",),
    ),
    "RFC 9112 6.1: an answer of HTTP/1.0 with a coding ends its connection; llhttp keeps it": (
        lambda read: read.version == "1.0" and bool(read.values("transfer-encoding")),
        ("keepalive",),
    ),
    "RFC 9112 9.3: `close` ends it whatever else is said; llhttp lets HTTP/1.0 with `keep-alive` go on": (
        lambda read: read.version == "1.0" and "close" in ",".join(read.values("connection")).lower(),
        ("keepalive",),
    ),
    "llhttp takes `chunked` for another coding when an empty element or a tab follows": (
        lambda read: any(re.search("chunked *[,\t][ ,\t]*$", v, re.I) for v in read.values("transfer-encoding")),
        ("end", "body", "keepalive", "used"),
    ),
}


class _Listener:
    """Notes llhttp's first answer that is not interim."""

    def __init__(self) -> None:
        self.read = Reading()
        self.parser = httptools.HttpResponseParser(self)
        self.head = False

    def on_message_begin(self) -> None:
        if not self.head:
            self.read = Reading()

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.head:
            self.read.fields.append((name.decode("latin-1").lower(), value.decode("latin-1")))

    def on_headers_complete(self) -> None:
        status = self.parser.get_status_code()
        if status >= 200 or status < 100:
            self.head = True
            self.read.status = status
            self.read.version = self.parser.get_http_version()
            self.read.keepalive = self.parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        self.read.body += body

    def on_message_complete(self) -> None:
        if self.head:
            self.read.end = "complete"


def llhttp_reads(wire: bytes) -> Reading:
    """Byte by byte, for the place where it is complete."""
    listener = _Listener()
    used = 0
    try:
        for byte in wire:
            listener.parser.feed_data(bytes([byte]))
            used += 1
            if listener.read.end == "complete":
                break
    except httptools.HttpParserUpgrade:
        listener.read.end, listener.read.why = "error", "Pause on CONNECT/Upgrade"
    except httptools.HttpParserError as error:
        listener.read.end, listener.read.why = "error", str(error)
    read = listener.read
    read.used = used
    if read.end == "cut" and listener.head:
        # httptools cannot tell llhttp that the connection ended: is it an end that this answer allows?
        codings = [c.strip(" ") for value in read.values("transfer-encoding") for c in value.lower().split(",")]
        if codings[-1:] != ["chunked"] and not read.values("content-length"):
            read.end = "complete"
    return read


def we_read(wire: bytes, sizes: Sequence[int]) -> Reading:
    """The same by the machine; cutting it otherwise must tell the same story."""
    reads = [cut(wire, sizes), [wire], slices(wire, 1)]
    found, whole, bytewise = (run(each, stamps_of(each)[-1] + STEP_NS) for each in reads)
    assert story(found) == story(whole) == story(bytewise)
    end = {1: "complete", -5: "error", -6: "error"}[found.code]
    if found.why is None and found.code == -5:
        end = "cut"
    kept = not found.encoded and not found.sse  # else nobody needs the bytes
    return Reading(end, found.status, found.body, found.keepalive, found.used, found.why or "", body_kept=kept)


def compare(ours: Reading, theirs: Reading) -> None:
    """Both read it: they must agree."""
    names = ["end", "status"]
    if ours.end == theirs.end == "complete":
        names += ["used", "keepalive"]
    if ours.body_kept:
        names += ["body"]
    names = [name for name in names if name not in may_differ(theirs)]
    assert [getattr(ours, name) for name in names] == [getattr(theirs, name) for name in names]


def may_differ(theirs: Reading) -> set[str]:
    return {name for rule, names in DIFFERENT.values() if rule(theirs) for name in names}


def judge(wire: bytes, sizes: Sequence[int]) -> None:
    """One wire for both; each may refuse for its reasons."""
    ours, theirs = we_read(wire, sizes), llhttp_reads(wire)
    if theirs.end == "error" and ours.end == "error":
        return
    if theirs.end == "error":
        # we look at a head when it is whole, so one that is cut may be wrong before we know
        assert theirs.why in TAKEN or (ours.end == "cut" and ours.status < 0)
    elif ours.end == "error":
        assert ours.why in REFUSED or "end" in may_differ(theirs)
    else:
        compare(ours, theirs)


# ---------------------------------------------------------------- answers, drawn in parts


@dataclass(slots=True)
class Writer:
    """Writes each piece twice: as drawn, and plain."""

    odd: bytes = b""
    plain: bytes = b""

    def add(self, odd: bytes, plain: bytes | None = None) -> None:
        self.odd += odd
        self.plain += odd if plain is None else plain


names = st.sampled_from([bytes.lower, bytes.upper, bytes.title, bytes.swapcase])
blanks = st.sampled_from([b"", b" ", b" ", b" ", b"\t", b"  \t "])
extra = st.sampled_from(
    [
        (b"Server", b"x"),
        (b"Date", b"Tue, 01 Dec 2026 00:00:00 GMT"),
        (b"Keep-Alive", b"timeout=5, max=100"),
        (b"Connection", b"close"),
        (b"Connection", b"keep-alive"),
        (b"Connection", b"Keep-Alive, Close"),
        (b"Connection", b"x-close, close-notify"),
        (b"Connection", b" ,,  close"),
        (b"X-Empty", b""),
        (b"X-Latin", b"\xe9\xff"),
        (b"X-Colons", b"a:b: c"),
        (b"X-Content-Length", b"7"),
        (b"Content-Lengths", b"7"),
        (b"Content-Encoding", b"identity"),
        (b"Proxy-Connection", b"close"),
        (b"Trailer", b"X-Took"),
    ]
)
bodies = st.one_of(st.binary(max_size=60), st.sampled_from([b"", b"\r\n", b"0\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n"]))


@st.composite
def answers_written(draw: st.DrawFn) -> Writer:
    """An answer that is lawful, or as small servers write it; what llhttp refuses is plain in `plain`."""
    out = Writer()
    lf = draw(st.integers(0, 5)) == 0
    newline = b"\n" if lf else b"\r\n"

    def line(odd: bytes, plain: bytes | None = None) -> None:
        out.add(odd + newline, (odd if plain is None else plain) + b"\r\n")

    def fields(drawn: list[tuple[bytes, bytes]]) -> None:
        for name, value in drawn:
            before, after = draw(blanks), draw(blanks)
            cased = draw(names)(name) + b":"
            plain = cased + before + value + (b"" if b"\t" in after else after)
            if draw(st.integers(0, 19)) == 0:
                line(b"no field at all", b"X: y")
            if draw(st.integers(0, 9)) == 0:
                fold = newline + b" " if value else b""
                line(cased + before + fold + value + after, plain)
            else:
                line(cased + before + value + after, plain)

    out.add(draw(st.sampled_from([b"", b"", b"", b"\r\n", b"\n"])))
    for interim in draw(st.lists(st.sampled_from([b"100 Continue", b"102 Processing", b"103"]), max_size=2)):
        line(b"HTTP/1.1 " + interim)
        fields(draw(st.lists(st.sampled_from([(b"Link", b"</x>"), (b"Content-Length", b"9")]), max_size=1)))
        line(b"")
    version = draw(st.sampled_from([b"1.1", b"1.1", b"1.1", b"1.0"]))
    status = draw(st.sampled_from([b"200", b"200", b"200", b"204", b"304", b"301", b"404", b"503", b"299", b"999"]))
    line(b"HTTP/" + version + b" " + status + draw(st.sampled_from([b" OK", b"", b" ", b" Not  \xe9 found"])))
    body = draw(bodies)
    kind = draw(st.sampled_from(["length", "chunked", "chunked", "close"]))
    framing = {
        "length": [(b"Content-Length", b"%d" % len(body))],
        "chunked": [(b"Transfer-Encoding", draw(st.sampled_from([b"chunked", b"Chunked", b"CHUNKED", b",chunked"])))],
        "close": [],
    }[kind]
    if kind == "length" and draw(st.integers(0, 5)) == 0:
        framing = [(b"Content-Length", b"%03d" % len(body))]
    if kind != "length" and draw(st.integers(0, 5)) == 0:
        framing = [(b"Transfer-Encoding", draw(st.sampled_from([b"gzip", b"identity", b"xchunked"]))), *framing]
    shown = [(b"Content-Type", b"application/json"), *draw(st.lists(extra, max_size=3))]
    at = draw(st.integers(0, len(shown)))
    fields([*shown[:at], *framing, *shown[at:]])  # the last coding decides: their order is no accident
    line(b"")
    if status in (b"204", b"304"):
        return out
    if kind != "chunked":
        out.add(body)
        return out
    at = 0
    while at < len(body):
        piece = body[at : at + draw(st.integers(1, 30))]
        at += len(piece)
        chunk_size(draw, len(piece), line)
        line(piece)
    chunk_size(draw, 0, line)
    fields(draw(st.lists(st.sampled_from([(b"X-Took", b"1"), (b"Server-Timing", b"a;b=1")]), max_size=2)))
    line(b"")
    return out


def chunk_size(draw: st.DrawFn, size: int, line: Callable[[bytes, bytes], None]) -> None:
    number = draw(st.sampled_from([b"%x", b"%X", b"0%x", b"%08X"])) % size
    lawful = draw(st.sampled_from([b"", b"", b"", b";a", b";a=b", b';a="b; \\" c";d=e']))
    odd = draw(st.sampled_from([b"", b"", b"", b"", b" ", b"\t  ", b";", b"; a", b" ; a = b", b";=\x80"]))
    line(number + odd + lawful, number + lawful)


# ---------------------------------------------------------------- tests


@settings(max_examples=300)
@given(written=answers_written(), more=bodies, sizes=cuts)
def test_lawful_answers(written: Writer, more: bytes, sizes: list[int]) -> None:
    """Odd for us and plain for llhttp: the same, with other bytes behind it too."""
    ours, theirs = we_read(written.odd, sizes), llhttp_reads(written.plain)
    assert ours.end == theirs.end == "complete"
    used, theirs.used = ours.used, ours.used
    compare(ours, theirs)
    judge(written.odd, sizes)
    if theirs.keepalive:  # so its end does not depend on what follows
        assert we_read(written.odd + more, sizes).used == used
    judge(written.odd + more, sizes)


@settings(max_examples=200)
@given(written=answers_written(), share=st.floats(0, 1), sizes=cuts)
def test_cut_answers(written: Writer, share: float, sizes: list[int]) -> None:
    judge(written.odd[: int(len(written.odd) * share)] or b"H", sizes)


edits = st.lists(
    st.tuples(
        st.floats(0, 1),
        st.integers(0, 2),
        st.one_of(
            st.binary(min_size=1, max_size=2),
            st.sampled_from([b"\r", b"\n", b"\r\n", b":", b";", b",", b" ", b"\t", b"\x00", b"0", b'"', b"close"]),
        ),
    ),
    min_size=1,
    max_size=3,
)


@settings(max_examples=600)
@given(written=answers_written(), edited=edits, sizes=cuts)
@example(Writer(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\rx\r\n0\r\n\r\n"), [(1.0, 0, b"")], [1])
@example(Writer(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n"), [(1.0, 0, b"")], [1])
def test_changed_answers(written: Writer, edited: list[tuple[float, int, bytes]], sizes: list[int]) -> None:
    wire = written.odd
    for share, removed, added in edited:
        at = int(len(wire) * share)
        wire = wire[:at] + added + wire[at + removed :]
    judge(wire or b"H", sizes)


OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("words", "wire"),
    [
        ("Missing expected CR after header value", OK + b"Content-Length: 0\n\n"),
        ("Missing expected CR after response line", b"HTTP/1.1 200 OK\nContent-Length: 0\n\n"),
        ("Invalid response status", b"HTTP/1.1 200\nContent-Length: 0\n\n"),
        ("Missing expected CR after chunk size", CHUNKED + b"0\n\n"),
        ("Missing expected CR after chunk data", CHUNKED + b"1\r\na\n0\r\n\r\n"),
        ("Invalid header token", OK + b"no field\r\nContent-Length: 0\r\n\r\n"),
        ("Invalid header value char", OK + b"X: \x00\r\nContent-Length: 0\r\n\r\n"),
        ("Expected LF after CR", b"HTTP/1.1 200 O\rK\r\nContent-Length: 0\r\n\r\n"),
        ("Missing expected LF after header value", OK + b"X: a\rb\r\nContent-Length: 0\r\n\r\n"),
        ("Unexpected whitespace after header value", OK + b"X: a\r\n b\r\nContent-Length: 0\r\n\r\n"),
        ("Unexpected space after start line", OK + b" X: y\r\nContent-Length: 0\r\n\r\n"),
        ("Invalid character in chunk size", CHUNKED + b"0 \t\r\n\r\n"),
        ("Invalid character in chunk extensions", CHUNKED + b"0;\r\n\r\n"),
        ("Invalid character in chunk extensions name", CHUNKED + b"0;\x01\r\n\r\n"),
        ("Expected LF after chunk size", CHUNKED + b"0;a\rb\r\n\r\n"),
        ("Expected LF after headers", CHUNKED + b"0\r\n\rX\r\n\r\n"),
        (
            "Content-Length can't be present with Transfer-Encoding",
            OK + b"Transfer-Encoding: identity\r\nContent-Length: 0\r\n\r\n",
        ),
        (
            "Transfer-Encoding can't be present with Content-Length",
            OK + b"Content-Length: 0\r\nTransfer-Encoding: identity\r\n\r\n",
        ),
        ("Empty Transfer-Encoding", OK + b"Transfer-Encoding:\r\nContent-Length: 0\r\n\r\n"),
        ("Duplicate Content-Length", OK + b"Content-Length: 0\r\nContent-Length: 0\r\n\r\n"),
        ("Invalid HTTP version", b"HTTP/1.2 200 OK\r\nContent-Length: 0\r\n\r\n"),
        ("Pause on CONNECT/Upgrade", b"HTTP/1.1 101 Go\r\n\r\n" + OK + b"Content-Length: 0\r\n\r\n"),
    ],
)
def test_what_only_we_take(words: str, wire: bytes) -> None:
    theirs, ours = llhttp_reads(wire), we_read(wire, [7])
    assert (theirs.end, theirs.why) == ("error", words)
    assert words in TAKEN
    assert (ours.end, ours.status, ours.used) == ("complete", 200, len(wire))


@pytest.mark.parametrize(
    ("why", "wire"),
    [
        ("the answer is not HTTP/1.x", b"HTTP/2.0 200 OK\r\nContent-Length: 0\r\n\r\n"),
        ("the answer is not HTTP/1.x", b"ICE/1.0 200 OK\r\nContent-Length: 0\r\n\r\n"),
        ("the status line has no three-digit status", b"HTTP/1.1 099 OK\r\nContent-Length: 0\r\n\r\n"),
        ("a content-length that is no single number", OK + b"Content-Length: " + b"0" * 18 + b"\r\n\r\n"),
        ("a chunk size of more than 15 hex digits", CHUNKED + b"0" * 16 + b"\r\n\r\n"),
    ],
)
def test_what_only_we_refuse(why: str, wire: bytes) -> None:
    theirs, ours = llhttp_reads(wire), we_read(wire, [7])
    assert theirs.end == "complete"
    assert (ours.end, ours.why) == ("error", why)
    assert why in REFUSED


@pytest.mark.parametrize(
    ("head", "kept", "framing"),
    [
        (b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nTransfer-Encoding: chunked\r\n\r\n", False, 1),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked, chunked\r\n\r\n", True, 1),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked ,\t\r\n\r\n", True, 1),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n", False, 3),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nConnection: xclose, close2\r\n\r\n", True, 1),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nConnection: x\r\n ,close\r\n\r\n", False, 1),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nProxy-Connection: close\r\n\r\n", True, 1),
    ],
)
def test_framing_and_connection(head: bytes, kept: bool, framing: int) -> None:
    answer = run([head + b"0\r\n\r\n"], 10**6)
    assert (answer.code, answer.keepalive, answer.framing) == (1, kept, framing)


@pytest.mark.parametrize(
    "wire",
    [
        OK + b"Transfer-Encoding: gzip\r\nContent-Length: 0\r\n\r\n",
        CHUNKED + b"1\rx\r\na\r\n0\r\n\r\n",
        CHUNKED + b"1 2\r\na\r\n0\r\n\r\n",
        CHUNKED + b"1\r\na\r\r\n0\r\n\r\n",
        b"HTTP/1.1 2000 OK\r\n\r\n",
        b"HTTP/1.1 200OK\r\n\r\n",
        b"HTTP/1.x 200 OK\r\n\r\n",
        b"HTTP/1.1 200\rOK\r\n\r\n",
    ],
)
def test_what_nobody_takes(wire: bytes) -> None:
    assert llhttp_reads(wire).end == we_read(wire, [7]).end == "error"
