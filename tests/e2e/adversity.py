"""Everything a server or what stands before it may do to an answer, and what a sweep makes of it."""

import socket
import time
from dataclasses import dataclass

from scripted import DONE, FINISH, LAST_CHUNK, Call, Script, answer, chunk, event, head

ERROR = b'data: {"error":{"message":"CUDA out of memory","type":"server_error","code":500}}\n\n'
WHOLE = answer("one", "two", "three")
TEXT = chunk(event("one"))


@dataclass(frozen=True)
class Fault:
    """What the server does, and what is expected: the class of the row (`ok` if it is none), words of its error,
    columns; `flags` for a sweep in which it does not take long."""

    script: Script
    status: str
    error: str = ""
    columns: tuple[tuple[str, object], ...] = ()
    flags: tuple[str, ...] = ()


def says(*pieces: bytes) -> Script:
    """Send these and close in order."""
    return lambda call: (call.send(*pieces), call.close())  # type: ignore[func-returns-value]


def resets(*pieces: bytes) -> Script:
    """Send these and reset."""

    def script(call: Call) -> None:
        call.send(*pieces)
        call.sleep(0.005)  # a reset overtakes what was not read yet
        call.reset()

    return script


def stays(*pieces: bytes) -> Script:
    """Send these and say no more."""
    return lambda call: (call.send(*pieces), call.stay())  # type: ignore[func-returns-value]


def repeats(first: bytes, again: bytes) -> Script:
    """Send `first`, and from then on `again`, twenty times a second, until the client goes."""

    def script(call: Call) -> None:
        call.send(first)
        give_up = time.monotonic() + 20
        while time.monotonic() < give_up:
            call.sleep(0.05)
            call.send(again)

    return script


def half_closes(*pieces: bytes) -> Script:
    """Send these, say that nothing follows, and go on reading."""

    def script(call: Call) -> None:
        call.send(*pieces)
        call.sock.shutdown(socket.SHUT_WR)
        call.stay()

    return script


def refusal(status: int, *lines: bytes, body: bytes = b'{"error":{"message":"not now"}}') -> bytes:
    """A whole answer that is no stream."""
    return head(b"\r\n".join([b"Content-Length: %d" % len(body), *lines]), status) + body


BROKEN = (("framing_broken", True),)
AGAIN = (("attempt", 2),)  # nothing came on a kept connection: it may have been stale, so it was sent once more
FIRST_BYTE = ("--first-byte-timeout", "300ms")
IDLE = ("--idle-timeout", "300ms")

FAULTS = {
    # resets
    "reset before the head": Fault(resets(), "reset", "reset before the answer", AGAIN),
    "reset in the head": Fault(resets(b"HTTP/1.1 200 OK\r\nX"), "reset"),
    "reset in the body": Fault(resets(head() + TEXT), "reset", columns=(("text_events", 1),)),
    "reset in an event": Fault(resets(head() + TEXT + b"30\r\ndata: {"), "reset", columns=(("text_events", 1),)),
    "reset after finish_reason": Fault(resets(head() + TEXT + chunk(FINISH)), "ok", columns=BROKEN),
    "reset after [DONE]": Fault(resets(head() + TEXT + chunk(FINISH + DONE)), "ok", columns=BROKEN),
    # closed in order
    "closed before the head": Fault(says(), "truncated", "closed before the answer", AGAIN),
    "closed in the head": Fault(says(b"HTTP/1.1 200 OK\r\nX"), "truncated"),
    "closed in the body": Fault(says(head() + TEXT), "truncated", columns=(("text_events", 1),)),
    "closed after finish_reason": Fault(says(head() + TEXT + chunk(FINISH)), "ok", columns=BROKEN),
    "half closed in the body": Fault(half_closes(head() + TEXT), "truncated"),
    "half closed behind the answer": Fault(half_closes(WHOLE), "ok", columns=(("framing_broken", False),)),
    # silence
    "no byte": Fault(stays(), "timeout", "no byte of an answer within --first-byte-timeout", flags=FIRST_BYTE),
    "a head and no token": Fault(stays(head()), "timeout", "no token within --first-byte-timeout", flags=FIRST_BYTE),
    "a stalled stream": Fault(stays(head() + TEXT), "timeout", "silent for longer than --idle-timeout", flags=IDLE),
    "a stream of pings": Fault(
        repeats(head() + TEXT, chunk(b": ping\n\n")), "timeout", "silent for longer than --idle-timeout", flags=IDLE
    ),
    "a drip": Fault(
        repeats(head() + TEXT + b"5000\r\ndata: ", b"x"),
        "timeout",
        "the whole request took longer than --timeout",
        flags=("--timeout", "800ms", *IDLE),
    ),
    # refusals
    "429": Fault(
        says(refusal(429, b"Retry-After: 7", b"Connection: close")),
        "http_status",
        "not now",
        (("http_status", 429), ("retry_after_s", 7.0)),
    ),
    "503 on a kept connection": Fault(
        lambda call: call.finish(refusal(503, body=b"<html>busy</html>")), "http_status", "<html>busy</html>"
    ),
    "a redirect": Fault(
        lambda call: call.finish(refusal(307, b"Location: http://elsewhere/")), "redirect", "elsewhere"
    ),
    # answers that are none
    "an error in the stream": Fault(
        lambda call: call.finish(head() + TEXT + chunk(ERROR + DONE) + LAST_CHUNK), "stream_error", "CUDA out of memory"
    ),
    "an event that is no JSON": Fault(
        lambda call: call.finish(head() + TEXT + chunk(b"data: {]}\n\n" + FINISH + DONE) + LAST_CHUNK),
        "malformed_event",
    ),
    "no HTTP": Fault(says(b"\x16\x03\x01 what?\r\n\r\n"), "malformed_event"),
    "a chunk size that is none": Fault(says(head() + b"zz\r\n"), "malformed_event", "chunk size"),
    "two lengths": Fault(
        says(head(b"Transfer-Encoding: chunked\r\nContent-Length: 9") + TEXT), "malformed_event", "content-length"
    ),
    "a head without end": Fault(says(b"HTTP/1.1 200 OK\r\nX: " + b"x" * 70_000), "malformed_event", "64 KB"),
    "a compressed answer": Fault(
        lambda call: call.finish(head(b"Content-Encoding: gzip\r\nContent-Length: 4") + b"\x1f\x8b\x08\x00"),
        "unsupported_encoding",
    ),
    "JSON in one piece": Fault(
        lambda call: call.finish(
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 14\r\n\r\n" + b'{"choices":[]}'
        ),
        "not_streaming",
    ),
    "an end and nothing before": Fault(lambda call: call.finish(head() + LAST_CHUNK), "empty"),
    "[DONE] and nothing before": Fault(lambda call: call.finish(head() + chunk(DONE) + LAST_CHUNK), "empty"),
    "text and no end": Fault(lambda call: call.finish(head() + TEXT + LAST_CHUNK), "incomplete"),
}
