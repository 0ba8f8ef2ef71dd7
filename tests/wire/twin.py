"""The twin of the byte machine: the same answer in plain Python, slow and obvious. The oracle of these tests.

Goals    HTTP/1.1 as RFC 9112 has it, event streams as the WHATWG page has them, JSON by `json.loads`.
Plan     All bytes at once: head -> body (each byte knows where it lay on the wire) -> lines -> events. A stamp is
         looked up afterwards, from the place of a byte and the read which brought that place.
Warning  Where we leave the specifications on purpose, the rule stands in the docstring of its function.
"""

import json
import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from fastload import _timing as t

HEAD_LIMIT = 65536
SIZE_DIGITS = 15
STRAY_KEPT = 4096
# How the APIs that have no [DONE] say that an answer is over, and what their pieces of text are called.
END_MARKERS = ("message_stop", "response.completed", "response.incomplete", "response.failed")
PLAIN_MARKER = re.compile(rb'"type"[ \t\n]*:[ \t\n]*"(message_stop|response\.(completed|incomplete|failed))"')
DELTAS = {
    "response.output_text.delta": t.CH_CONTENT,
    "response.reasoning_text.delta": t.CH_REASONING,
    "response.reasoning_summary_text.delta": t.CH_REASONING,
    "response.function_call_arguments.delta": t.CH_TOOL,
    "response.refusal.delta": t.CH_REFUSAL,
}
BLOCKS = {"text": t.CH_CONTENT, "thinking": t.CH_REASONING, "partial_json": t.CH_TOOL}
FOLD = re.compile(rb"\r?\n(?=[ \t])")  # a header line that goes on in the next (RFC 9112 5.2)


@dataclass(slots=True)
class Event:
    """One event: what the columns say of it, and its payload (data lines joined by LF)."""

    stamp: int
    channel: int
    bytes: int
    tokens: int
    flags: int
    payload: bytes | None = None


@dataclass(slots=True)
class Answer:
    """All that one exchange came to. `code` is that of the last feed or eof; `used` bytes were the message's.

    `why` is the machine's alone: what was malformed.
    """

    code: int = 0
    why: str | None = None
    used: int = 0
    status: int = -1
    framing: int = 0
    sse: bool = False
    done: bool = False
    keepalive: bool = False
    encoded: bool = False
    first_byte_ns: int = -1
    head_ns: int = -1
    done_ns: int = -1
    framing_end_ns: int = -1
    head: bytes = b""
    body: bytes = b""
    events: list[Event] = field(default_factory=list)


class Ended(Exception):
    """The bytes ran out, or the message is broken: `code` says which."""

    def __init__(self, code: int, place: int) -> None:
        super().__init__(code)
        self.code = code
        self.place = place


def read_answer(reads: Sequence[bytes], stamps: Sequence[int], eof_ns: int | None = None) -> Answer:
    """What an answer says that came in these reads, at these stamps; `eof_ns`: when the peer closed, if it did."""
    wire = b"".join(reads)
    ends = list(accumulate(len(read) for read in reads))
    answer = Answer(first_byte_ns=stamps[0] if wire else -1)
    message = _Message(wire)
    try:
        message.read(answer)
        answer.code, answer.used = 1, message.at
    except Ended as ended:
        answer.code, answer.used = ended.code, ended.place

    def read_of(place: int) -> int:
        return bisect_right(ends, place)

    answer.keepalive = answer.keepalive and answer.head != b""
    if answer.head:
        answer.head_ns = stamps[read_of(message.head_end - 1)]
    end_ns = stamps[read_of(answer.used - 1)] if answer.code == 1 else -1
    closed = answer.code == 0 and eof_ns is not None
    if closed:
        end_ns = eof_ns
        answer.code = 1 if answer.framing == 3 else -5
    if not answer.sse:
        answer.body = bytes(b for b, _ in message.body) if not answer.encoded else b""
    else:
        over = answer.code == 1 or closed
        for found in events_of(lines_of(message.body, over), over):
            payload = found.data.strip(b" \t\n")
            if not payload:
                continue  # relays keep a connection warm with empty data: no event of ours
            flags = 0
            if found.data_place is None:  # only the end of the message ended its line
                stamp = end_ns
                flags = t.FL_READ if closed else 0
            else:
                read = read_of(found.data_place)
                stamp = stamps[read]
                flags = t.FL_COALESCED if ends[read] > message.own_end(found.end) else 0
            event = carries(payload)
            if found.error and event.channel != t.CH_DONE:  # a parser reads it, and its name says what it is
                event.channel = t.CH_ODD
            event.stamp = stamp
            event.flags |= flags
            answer.events.append(event)
            if payload == b"[DONE]":
                answer.done = True
            if payload == b"[DONE]" or ends_answer(payload):
                answer.done_ns = stamp if answer.done_ns < 0 else answer.done_ns
        if not answer.events:  # perhaps no stream at all: what its lines say that are none of a stream
            for line in lines_of(message.body, over):
                name = line.text.partition(b":")[0]
                if line.text and name not in (b"", b"data", b"event", b"id", b"retry"):
                    room = max(0, STRAY_KEPT - len(answer.body))
                    answer.body += line.text[:room] + b"\n" * (room > 0)
    if answer.code == 1:
        answer.framing_end_ns = end_ns
        answer.done_ns = end_ns if answer.done_ns < 0 else answer.done_ns
    return answer


# ---------------------------------------------------------------- HTTP/1.1: head and framing


class _Message:
    """Reads one HTTP message from `wire`; `body` gets each byte with its place, `at` is where it stands."""

    def __init__(self, wire: bytes) -> None:
        self.wire = wire
        self.at = 0
        self.head_end = 0
        self.body: list[tuple[int, int]] = []
        self.chunk_tails: dict[int, int] = {}  # where a chunk's data ends -> where its CRLF ends

    def read(self, answer: Answer) -> None:
        """Read all of it. Ended: code 0 for want of bytes, -5 malformed, -6 past a limit."""
        while True:
            status, headers = self._head(answer)
            if status >= 200:
                break  # else an interim answer: the real one follows
        coding = words(headers, "transfer-encoding")
        lengths = headers.get("content-length")
        options = words(headers, "connection")
        kind = headers.get("content-type", "").lower()
        answer.encoded = any(c != "identity" for c in words(headers, "content-encoding")) or any(
            c not in ("chunked", "identity") for c in coding
        )
        answer.sse = status == 200 and not answer.encoded
        answer.sse = answer.sse and "application/json" not in kind and "text/html" not in kind
        chunked = coding[-1:] == ["chunked"]
        coded = any(c != "identity" for c in coding)
        if coded and lengths is not None:
            raise Ended(-5, self.at)  # RFC 9112 6.3: an error to report, not one to guess about
        persistent = "close" not in options and (self.version > 0 or "keep-alive" in options)
        persistent = persistent and not (self.version == 0 and coded)  # RFC 9112 6.1
        delimited = chunked or lengths is not None or status in (204, 304)
        answer.keepalive = persistent and delimited
        if status in (204, 304):
            return
        if chunked:
            answer.framing = 1
            self._chunks()
        elif lengths is not None:
            answer.framing = 2
            self._take(int(lengths))
        else:
            answer.framing = 3
            self._take(len(self.wire) - self.at)
            raise Ended(0, self.at)  # only the peer's closing can end it

    def _line(self, limit: int | None = None) -> bytes:
        """One line without its LF or CRLF (RFC 9112 2.2 lets a lone LF end one)."""
        end = self.wire.find(b"\n", self.at)
        taken = (end + 1 if end >= 0 else len(self.wire)) - self.at
        if limit is not None and taken > limit:
            raise Ended(-6, self.at + taken)
        if end < 0:
            raise Ended(0, len(self.wire))
        line = self.wire[self.at : end].removesuffix(b"\r")
        self.at = end + 1
        return line

    def _head(self, answer: Answer) -> tuple[int, dict[str, str]]:
        start = self.at
        lines: list[bytes] = []
        while True:
            line = self._line(HEAD_LIMIT - (self.at - start))
            if not line and not lines:
                start = self.at  # RFC 9112 2.2: empty lines before a message are ignored
                continue
            if not line:
                break
            lines.append(line)
        head = FOLD.sub(lambda fold: b" " * len(fold[0]), self.wire[start : self.at])
        first, *lines = [line.removesuffix(b"\r") for line in head.split(b"\n")[:-2]]
        matched = re.fullmatch(rb"HTTP/1\.([0-9]) ([1-9][0-9][0-9])( .*|)", first, re.DOTALL)
        if not matched:
            raise Ended(-5, self.at)
        self.version = int(matched[1])
        status = int(matched[2])
        if status >= 200:
            answer.status = status
        headers: dict[str, str] = {}
        for line in lines:
            name, colon, value = line.decode("latin-1").partition(":")
            if colon and name.endswith((" ", "\t")):
                raise Ended(-5, self.at)
            name, value = name.lower(), value.lstrip(" \t").rstrip(" \t\r")
            if colon and name == "content-length":
                if not re.fullmatch("[0-9]{1,17}", value) or int(headers.get(name, value)) != int(value):
                    raise Ended(-5, self.at)
            elif name in headers:
                value = f"{headers[name]}, {value}"
            if colon:
                headers[name] = value
        if status >= 200:
            answer.head = head
            self.head_end = self.at
        return status, headers

    def _take(self, size: int) -> None:
        for place in range(self.at, min(self.at + size, len(self.wire))):
            self.body.append((self.wire[place], place))
        if self.at + size > len(self.wire):
            raise Ended(0, len(self.wire))
        self.at += size

    def _chunks(self) -> None:
        while True:
            size = self._chunk_size()
            if size == 0:
                break
            self._take(size)
            data_end = self.at
            self.chunk_tails[data_end] = data_end
            try:
                self._line_end()
            finally:
                self.chunk_tails[data_end] = self.at
        start = self.at
        while self._line(HEAD_LIMIT - (self.at - start)):
            pass  # trailers

    def _chunk_size(self) -> int:
        start = self.at
        while self.at < len(self.wire) and chr(self.wire[self.at]) in "0123456789abcdefABCDEF":
            self.at += 1
            if self.at - start > SIZE_DIGITS:
                raise Ended(-6, self.at)
        if self.at >= len(self.wire):
            raise Ended(0, self.at)
        size = self.wire[start : self.at]
        if not size:
            raise Ended(-5, self.at + 1)
        start = self.at
        while self.wire[self.at : self.at + 1] in (b" ", b"\t"):  # some servers pad the number
            self.at += 1
        if self.wire[self.at : self.at + 1] == b";":
            line_end = self.wire.find(b"\n", self.at)
            self.at = line_end if line_end >= 0 else len(self.wire)
        # the semicolon does not count
        if self.at - start - (b";" in self.wire[start : self.at]) > HEAD_LIMIT:
            raise Ended(-6, self.at)
        self._line_end()
        return int(size, 16)

    def _line_end(self) -> None:
        """LF or CRLF, and nothing else."""
        for byte in b"\r\n":
            if self.at >= len(self.wire):
                raise Ended(0, self.at)
            if self.wire[self.at] == byte:
                self.at += 1
            elif byte == 0x0A:
                raise Ended(-5, self.at + 1)

    def own_end(self, place: int) -> int:
        """Where an event that ends at `place` is over, with the CRLF of its chunk if it fills it to the end."""
        return self.chunk_tails.get(place, place)


def words(headers: dict[str, str], name: str) -> list[str]:
    """The elements of a header that is a list, in lower case; empty ones are none (RFC 9110 5.6.1)."""
    return [word for part in headers.get(name, "").lower().split(",") if (word := part.strip(" \t"))]


# ---------------------------------------------------------------- event streams


@dataclass(slots=True)
class Line:
    """A line of the body: its bytes, the place of the first byte that ended it, where it is over."""

    text: bytes
    start: int
    ended_at: int | None
    end: int


@dataclass(slots=True)
class Found:
    """An event before it is understood."""

    data: bytes
    data_place: int | None  # the wire byte that ended the last data line; None: the end of the message did
    end: int
    error: bool


def lines_of(body: list[tuple[int, int]], over: bool) -> list[Line]:
    """Split at CRLF, LF or CR; nothing else ends a line. A byte-order mark before the first one is dropped.

    A CR ends its line at once. Exception of ours: when the body is `over`, what stands after the last line
    end is a line too.
    """
    if bytes(b for b, _ in body[:3]) == b"\xef\xbb\xbf":
        body = body[3:]
    elif b"\xef\xbb\xbf".startswith(bytes(b for b, _ in body)):
        return []
    lines = []
    start = i = 0
    while i < len(body):
        byte, place = body[i]
        i += 1
        if byte not in b"\r\n":
            continue
        text = bytes(b for b, _ in body[start : i - 1])
        end = place + 1
        if byte == 0x0D and i < len(body) and body[i][0] == 0x0A:
            end = place + 2 if body[i][1] == place + 1 else end  # else a chunk's border lies between
            i += 1
        lines.append(Line(text, body[start][1], place, end))
        start = i
    if over and start < len(body):
        lines.append(Line(bytes(b for b, _ in body[start:]), body[start][1], None, body[-1][1] + 1))
    return lines


def events_of(lines: list[Line], over: bool) -> list[Found]:
    """The events: data lines up to a blank line, joined by LF.

    Exceptions of ours: `}` at the end of a data line and `{` or `[` at the start of the next (or `]` and `{`) are
    two events, since some servers leave out the blank line; an event at the end of the body needs no blank line.
    An event's stamp is that of the byte that ended its last data line. It ends behind its blank line, and behind
    more of them that follow without a gap; without a blank line, behind its last data line.
    """
    found: list[Found] = []
    data: list[Line] = []
    texts: list[bytes] = []
    error = False

    def dispatch(end: int) -> None:
        if data:
            found.append(Found(b"\n".join(texts), data[-1].ended_at, end, error))
        data.clear()
        texts.clear()

    for line in lines:
        if not line.text:
            if data:
                dispatch(line.end)
            elif found and found[-1].end == line.start:
                found[-1].end = line.end
            error = False
            continue
        name, _, value = line.text.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"event":
            # the machine marks an open event, so that a parser looks at it
            error = value == b"error"
        elif name == b"data":
            joint = (b"\n".join(texts)[-1:], value[:1])
            if data and joint in ((b"}", b"{"), (b"}", b"["), (b"]", b"{")):
                dispatch(data[-1].end)
            data.append(line)
            texts.append(value)
    if over and data:
        dispatch(data[-1].end)
    return found


# ---------------------------------------------------------------- what an event carries


def carries(payload: bytes) -> Event:
    """Channel, bytes of text, tokens told and flags of one payload; CH_ODD where no rule of METRICS.md speaks."""
    event = Event(0, t.CH_NONE, 0, -1, 0, payload)
    if payload == b"[DONE]":
        event.channel = t.CH_DONE
        return event
    value = value_of(payload)
    if value is None:
        return event
    if not isinstance(value, dict):
        event.channel = t.CH_ODD
        return event
    usage = value.get("usage")
    if isinstance(usage, dict):
        event.flags |= t.FL_USAGE
        event.tokens = count_of(usage.get("completion_tokens"))
    texts: list[tuple[int, object]] = []
    delta = value.get("delta")
    if isinstance(value.get("choices"), list):
        for choice in value["choices"]:
            event.flags |= t.FL_CHOICES
            if isinstance(choice, dict):
                event.flags |= t.FL_FINISH if choice.get("finish_reason") else 0
                texts += texts_of_choice(choice)
    elif "choices" not in value and value.get("type") in tuple(DELTAS):
        event.flags |= t.FL_CHOICES
        texts = [(DELTAS[value["type"]], delta)]
    elif "choices" not in value and value.get("type") == "content_block_delta" and isinstance(delta, dict):
        event.flags |= t.FL_CHOICES
        texts = [(channel, delta.get(name)) for name, channel in BLOCKS.items()]
    else:
        event.channel = t.CH_ODD
        return event
    for channel, text in texts:
        if isinstance(text, str) and text:
            event.channel = event.channel or channel
            event.bytes += utf8_bytes(text)
    if value.get("error"):
        event.channel = t.CH_ODD
    return event


def texts_of_choice(choice: dict[str, Any]) -> list[tuple[int, object]]:
    """Where a choice of /v1/chat/completions or /v1/completions has text, each with its channel."""
    delta = dict_of(choice.get("delta"))
    calls = delta.get("tool_calls")
    functions = [dict_of(dict_of(call).get("function")) for call in calls] if isinstance(calls, list) else []
    return [
        (t.CH_CONTENT, delta.get("content")),
        (t.CH_CONTENT, choice.get("text")),
        (t.CH_REASONING, delta.get("reasoning_content")),
        (t.CH_REASONING, delta.get("reasoning")),
        *((t.CH_TOOL, function.get(name)) for function in functions for name in ("name", "arguments")),
        (t.CH_REFUSAL, delta.get("refusal")),
    ]


def ends_answer(payload: bytes) -> bool:
    """Whether the event is the end marker of an API that has no [DONE]: by the type of the whole, of no part of it.

    Exception of ours: one that is written with escapes is seen by the trace's parser only.
    """
    value = value_of(payload)
    marked = isinstance(value, dict) and "choices" not in value and value.get("type") in END_MARKERS
    return marked and PLAIN_MARKER.search(payload) is not None


def value_of(payload: bytes) -> Any:
    """The value of a JSON text; an Ellipsis, which no JSON text means, where it is none.

    Bytes that are no UTF-8 are replaced, as the page on event streams has it.
    """
    try:
        return json.loads(payload.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return ...


def dict_of(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def count_of(value: object) -> int:
    """A count of tokens; -1 where it is none: missing, negative, a string, absurd."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31 else -1


def utf8_bytes(text: str) -> int:
    """Bytes of UTF-8. Half a surrogate pair (an emoji cut between two tokens) stands for two of its four."""
    return sum(2 if 0xD800 <= ord(c) < 0xE000 else len(c.encode()) for c in text)
