"""What the raw pieces of one exchange say together, and whether it was a success (METRICS section 4)."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

from fastload._timing import (
    BLOB_BODY,
    BLOB_ERROR,
    BLOB_EVENT,
    BLOB_HEAD,
    END_COMPLETE,
    END_CONNECT,
    END_PORTS,
    RF_BLOB_CUT,
    RF_DONE,
    RF_ENCODED,
    RF_SSE,
)
from fastload.load import answer_head
from fastload.load.failures import CLASS_OF_END
from fastload.trace import dialects, faults
from fastload.trace.dialects import Payload

OK: Final = "ok"

_SENTENCE_OF_CLASS: Final = {
    "connect": "no connection could be made",
    "client_ports": "no free local port or file descriptor on this host",
    "timeout": "the answer did not come in time",
    "reset": "the connection was reset before the answer was complete",
    "truncated": "the connection was closed before the answer was complete",
    "incomplete": "the stream ended without finish_reason and without [DONE]",
    "empty": "the answer had no text and no finish_reason",
    "malformed_event": "what the server sent cannot be read",
    "redirect": "the server redirects; redirects are not followed",
    "unsupported_encoding": "the answer is compressed although identity was asked for",
    "not_streaming": "the answer is not an event stream",
    "cancelled": "stopped before the answer was complete",
}


class Answer:
    """What the kept raw pieces of one request say; filled by `read`.

    events: (ordinal, Payload) of every event kept raw, in order. finish: choice index -> finish_reason. choices: those
    seen. ended: ordinal of the end marker of a dialect without [DONE].
    """

    __slots__ = (
        "answer_id",
        "body",
        "choices",
        "ended",
        "error",
        "events",
        "finish",
        "head",
        "malformed",
        "note",
        "usage",
    )

    def __init__(self) -> None:
        self.events: list[tuple[int, Payload]] = []
        self.choices: set[int] = set()
        self.finish: dict[int, str] = {}
        self.usage: dialects.Usage | None = None  # the last told
        self.error: str | None = None  # of an error event
        self.ended: int | None = None
        self.malformed: int | None = None  # ordinal of the first event that is no JSON
        self.answer_id: str | None = None
        self.head: dict[str, str] = {}
        self.body = b""  # of an answer that is no stream
        self.note: str | None = None  # BLOB_ERROR: what the measurer says


def read(blobs: Iterable[tuple[int, int, bytes]], named_errors: Collection[int] = ()) -> Answer:
    """Read the (ordinal, kind, bytes) pieces of one request, in the order in which they were kept.

    named_errors: ordinals of the events that came under the name `error`.
    """
    answer = Answer()
    usage_at = -1
    for ordinal, kind, raw in blobs:
        if kind == BLOB_EVENT:
            payload = dialects.read_event(raw, ordinal in named_errors)
            answer.events.append((ordinal, payload))
            answer.choices.update(payload.choices)
            answer.finish.update(payload.finish)
            if payload.usage is not None and ordinal >= usage_at:  # the last usage is kept out of order
                answer.usage, usage_at = payload.usage.over(answer.usage, payload.usage_grows), ordinal
            if payload.ends and answer.ended is None:
                answer.ended = ordinal
            if payload.malformed and answer.malformed is None:
                answer.malformed = ordinal
            answer.error = answer.error or payload.error
            answer.answer_id = answer.answer_id or payload.answer_id
        elif kind == BLOB_HEAD:
            answer.head = answer_head.read_head(raw)
        elif kind == BLOB_BODY:
            answer.body += raw
        elif kind == BLOB_ERROR:
            answer.note = faults.cut(raw.decode("utf-8", "replace"))
    return answer


def classify(
    answer: Answer, end: int, http_status: int, flags: int, events: int, text_events: int, finish_flag: bool
) -> tuple[str, str | None]:
    """The status of a request, `ok` or the class of its failure, and the message of a failure.

    end and flags are the measurer's (END_*, RF_*), http_status is -1 if no head came, events and text_events
    are counts, finish_flag: the scan saw a finish_reason (its raw payload may have been lost to a full
    arena).
    """
    status = _status(answer, end, http_status, flags, events, text_events, finish_flag)
    return status, None if status == OK else _error_text(status, answer, http_status)


def is_complete(answer: Answer, flags: int, finish_flag: bool) -> bool:
    """Whether the stream said that it is over: an end marker, or a finish_reason for each choice seen."""
    if flags & RF_DONE or answer.ended is not None:
        return True
    if answer.finish:
        return answer.choices <= answer.finish.keys()
    return finish_flag


def _status(
    answer: Answer, end: int, http_status: int, flags: int, events: int, text_events: int, finish_flag: bool
) -> str:
    if end in (END_CONNECT, END_PORTS):
        return CLASS_OF_END[end]
    if 300 <= http_status < 400:
        return "redirect"
    if http_status >= 400:
        return "http_status"
    if answer.error is not None:  # also when [DONE] follows
        return "stream_error"
    broken_off = end != END_COMPLETE
    if flags & RF_ENCODED:
        return "unsupported_encoding"
    kind = answer.head.get("content-type", "text/event-stream")  # one that names none may well be a stream
    streams = flags & RF_SSE and "event-stream" in kind.lower() and not answer.body
    if events == 0 and not streams:
        return CLASS_OF_END[end] if broken_off else "not_streaming"
    # An event cut off by the end of the connection is no JSON either: then the end is the fault, not the
    # event. And a payload that our own arena cut says nothing about the server.
    if (
        answer.malformed is not None
        and not flags & RF_BLOB_CUT
        and not (broken_off and answer.malformed >= events - 1)
    ):
        return "malformed_event"
    has_finish = bool(answer.finish) or finish_flag
    if is_complete(answer, flags, finish_flag):
        counted = answer.usage is not None and bool(answer.usage.completion)
        return OK if text_events or has_finish or counted else "empty"
    if broken_off:
        return CLASS_OF_END[end]
    return "incomplete" if events else "empty"


def _error_text(status: str, answer: Answer, http_status: int) -> str:
    """The message of a failure: the server's words, else the measurer's, else a sentence of ours."""
    if status == "stream_error" and answer.error:
        return answer.error
    if status in ("http_status", "not_streaming", "redirect"):
        said = faults.read_error_body(answer.body)
        if status == "redirect":
            where = faults.read_location(answer.head)
            said = f"redirects to {where}" if where else said
        if said:
            return faults.cut(said)
    if answer.note:
        return answer.note
    if status == "http_status":
        reason = answer.head.get("", "").partition(" ")[2]
        return faults.cut(f"HTTP {reason or http_status}")
    return _SENTENCE_OF_CLASS[status]
