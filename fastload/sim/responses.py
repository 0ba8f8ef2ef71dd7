"""Answers in the form of OpenAI's Responses API. No sockets.

A stream names each event, numbers it, and says of every item that it begins, grows and is done; the last event holds
the whole answer with its usage, and there is no [DONE].
"""

import orjson

from fastload.sim.asks import Ask
from fastload.sim.openai import error_body

_DELTAS = {"reasoning": "reasoning_text", "message": "output_text", "function_call": "function_call_arguments"}


class Stream:
    """The events of one streamed answer, as bytes."""

    def __init__(self, ask: Ask, answer_id: str, created_s: int, model: str) -> None:
        self._ask = ask
        self._id = answer_id
        self._created_s = created_s
        self._model = model
        self._number = 0
        self._item = -1  # place of the item that is open
        self._kind = ""
        self._from = 0  # its first token

    def opening(self, index: int, cached: int | None) -> list[bytes]:
        answer = _answer(self._ask, self._id, self._created_s, self._model, "in_progress", [], None)
        return [self._event("response.created", response=answer), self._event("response.in_progress", response=answer)]

    def tokens(self, index: int, start: int, tokens: int) -> list[bytes]:
        events: list[bytes] = []
        for kind, first, count in _parts(self._ask, start, tokens):
            if kind != self._kind:
                events += self._end_item(first)
                events += self._begin_item(kind, first)
            text = self._ask.text(first, count)
            events.append(self._event(f"response.{_DELTAS[kind]}.delta", **self._place(), delta=text))
        return events

    def closing(self, cached: int | None) -> list[bytes]:
        ask = self._ask
        events = self._end_item(ask.limit)
        status = _status(ask)
        answer = _answer(ask, self._id, self._created_s, self._model, status, _items(ask, self._id), cached)
        return [*events, self._event(f"response.{status}", response=answer)]

    def error(self, message: str) -> list[bytes]:
        return [b"event: error\ndata: " + error_body(500, message, "InternalServerError", None) + b"\n\n"]

    def _place(self) -> dict[str, object]:
        place: dict[str, object] = {"item_id": _item_id(self._id, self._kind), "output_index": self._item}
        return place if self._kind == "function_call" else place | {"content_index": 0}

    def _begin_item(self, kind: str, first: int) -> list[bytes]:
        self._item += 1
        self._kind, self._from = kind, first
        item = _item(self._id, kind, "", "in_progress")
        events = [self._event("response.output_item.added", output_index=self._item, item=item)]
        if kind == "message":
            part = {"type": "output_text", "text": "", "annotations": []}
            events.append(self._event("response.content_part.added", **self._place(), part=part))
        return events

    def _end_item(self, end: int) -> list[bytes]:
        if not self._kind:
            return []
        kind, text = self._kind, self._ask.text(self._from, end - self._from)
        name = "arguments" if kind == "function_call" else "text"
        events = [self._event(f"response.{_DELTAS[kind]}.done", **self._place(), **{name: text})]
        if kind == "message":
            part = {"type": "output_text", "text": text, "annotations": []}
            events.append(self._event("response.content_part.done", **self._place(), part=part))
        item = _item(self._id, kind, text, "completed")
        events.append(self._event("response.output_item.done", output_index=self._item, item=item))
        return events

    def _event(self, event_type: str, /, **fields: object) -> bytes:
        data = orjson.dumps({"type": event_type, "sequence_number": self._number, **fields})
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (event_type.encode(), data)


def whole(ask: Ask, answer_id: str, created_s: int, model: str, cached: int | None) -> bytes:
    """The body of an answer that is not streamed."""
    return orjson.dumps(_answer(ask, answer_id, created_s, model, _status(ask), _items(ask, answer_id), cached))


def _parts(ask: Ask, start: int, tokens: int) -> list[tuple[str, int, int]]:
    """(kind of item, first token, tokens) of what an event holds."""
    thought = min(max(ask.wishes.reasoning_tokens - start, 0), tokens)
    parts = [("reasoning", start, thought)] if thought else []
    if tokens > thought:
        parts.append(("function_call" if ask.wishes.tool_call else "message", start + thought, tokens - thought))
    return parts


def _items(ask: Ask, answer_id: str) -> list[dict[str, object]]:
    parts = _parts(ask, 0, ask.limit)
    return [_item(answer_id, kind, ask.text(first, count), "completed") for kind, first, count in parts]


def _item_id(answer_id: str, kind: str) -> str:
    return f"{kind}-{answer_id}"


def _item(answer_id: str, kind: str, text: str, status: str) -> dict[str, object]:
    item: dict[str, object] = {"id": _item_id(answer_id, kind), "type": kind, "status": status}
    if kind == "function_call":
        return item | {"call_id": "call_0", "name": "look_up", "arguments": text}
    if kind == "reasoning":
        return item | {"summary": [], "content": [{"type": "reasoning_text", "text": text}] if text else []}
    content = [{"type": "output_text", "text": text, "annotations": []}] if text else []
    return item | {"role": "assistant", "content": content}


def _status(ask: Ask) -> str:
    return "incomplete" if ask.finish == "length" else "completed"


def _answer(
    ask: Ask,
    answer_id: str,
    created_s: int,
    model: str,
    status: str,
    items: list[dict[str, object]],
    cached: int | None,
) -> dict[str, object]:
    usage = None
    if status != "in_progress":
        usage = {
            "input_tokens": ask.prompt_tokens,
            "input_tokens_details": {"cached_tokens": cached or 0},
            "output_tokens": ask.limit,
            "output_tokens_details": {"reasoning_tokens": min(ask.wishes.reasoning_tokens, ask.limit)},
            "total_tokens": ask.prompt_tokens + ask.limit,
        }
    return {
        "id": answer_id,
        "object": "response",
        "created_at": created_s,
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "model": model,
        "output": items,
        "usage": usage,
    }
