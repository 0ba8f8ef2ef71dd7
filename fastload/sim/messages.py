"""Answers in the form of Anthropic's Messages API. No sockets.

A stream is message_start, for each block its start, deltas and stop, then message_delta (why it ended, how many tokens)
and message_stop; each event has its name, and there is no [DONE].
"""

import orjson

from fastload.sim.asks import Ask

_BLOCKS: dict[str, dict[str, object]] = {
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
    "text": {"type": "text", "text": ""},
    "tool_use": {"type": "tool_use", "id": "toolu_0", "name": "look_up", "input": {}},
}
_DELTAS = {
    "thinking": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "tool_use": ("input_json_delta", "partial_json"),
}
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class Stream:
    """The events of one streamed answer, as bytes."""

    def __init__(self, ask: Ask, answer_id: str, created_s: int, model: str) -> None:
        self._ask = ask
        self._id = answer_id
        self._model = model
        self._block = -1
        self._kind = ""

    def opening(self, index: int, cached: int | None) -> list[bytes]:
        message = _message(self._ask, self._id, self._model, [], None, 0, cached)
        return [_event("message_start", message=message)]

    def tokens(self, index: int, start: int, tokens: int) -> list[bytes]:
        events = []
        for kind, first, count in _parts(self._ask, start, tokens):
            if kind != self._kind:
                if self._kind:
                    events.append(_event("content_block_stop", index=self._block))
                self._block += 1
                self._kind = kind
                events.append(_event("content_block_start", index=self._block, content_block=_BLOCKS[kind]))
            delta_type, field = _DELTAS[kind]
            delta = {"type": delta_type, field: self._ask.text(first, count)}
            events.append(_event("content_block_delta", index=self._block, delta=delta))
        return events

    def closing(self, cached: int | None) -> list[bytes]:
        delta = {"stop_reason": _REASONS[self._ask.finish], "stop_sequence": None}
        usage = _usage(self._ask, self._ask.limit, cached)
        return [
            _event("content_block_stop", index=self._block),
            _event("message_delta", delta=delta, usage=usage),
            _event("message_stop"),
        ]

    def error(self, message: str) -> list[bytes]:
        return [_event("error", error={"type": "api_error", "message": message})]


def whole(ask: Ask, answer_id: str, created_s: int, model: str, cached: int | None) -> bytes:
    """The body of an answer that is not streamed."""
    blocks = []
    for kind, first, count in _parts(ask, 0, ask.limit):
        text = ask.text(first, count)
        filled: object = {"text": text} if kind == "tool_use" else text
        blocks.append(_BLOCKS[kind] | {"input" if kind == "tool_use" else kind: filled})
    return orjson.dumps(_message(ask, answer_id, model, blocks, _REASONS[ask.finish], ask.limit, cached))


def _parts(ask: Ask, start: int, tokens: int) -> list[tuple[str, int, int]]:
    """(kind of block, first token, tokens) of what an event holds."""
    thought = min(max(ask.wishes.reasoning_tokens - start, 0), tokens)
    parts = [("thinking", start, thought)] if thought else []
    if tokens > thought:
        parts.append(("tool_use" if ask.wishes.tool_call else "text", start + thought, tokens - thought))
    return parts


def _message(
    ask: Ask,
    answer_id: str,
    model: str,
    blocks: list[dict[str, object]],
    reason: str | None,
    tokens: int,
    cached: int | None,
) -> dict[str, object]:
    return {
        "id": answer_id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": blocks,
        "stop_reason": reason,
        "stop_sequence": None,
        "usage": _usage(ask, tokens, cached),
    }


def _usage(ask: Ask, tokens: int, cached: int | None) -> dict[str, object]:
    """Anthropic counts as input only what was not in the cache."""
    usage: dict[str, object] = {"input_tokens": ask.prompt_tokens - (cached or 0), "output_tokens": tokens}
    return usage if cached is None else usage | {"cache_read_input_tokens": cached}


def _event(event_type: str, /, **fields: object) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event_type.encode(), orjson.dumps({"type": event_type, **fields}))
