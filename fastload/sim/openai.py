"""Answers in OpenAI's protocol, in vLLM's manner: chat and completions. No sockets.

Skeleton of a stream (R role, c text, F finish_reason, u usage, 0 empty choices, D [DONE]):
chat `R c.. cF u0 D`, completions `c.. cF u0 D`; u0 only with `include_usage`.
"""

import orjson

from fastload.sim.asks import Ask
from fastload.sim.options import OWNED_BY, Options

DONE = b"data: [DONE]\n\n"


class Stream:
    """The events of one streamed answer, as bytes. `cached` tokens of the prompt: None where there is no cache."""

    def __init__(self, ask: Ask, answer_id: str, created_s: int, model: str) -> None:
        self._ask = ask
        self._chat = ask.api == "chat"
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        top = orjson.dumps({"id": answer_id, "object": kind, "created": created_s, "model": model})
        # Put together from pieces made once: a step serves all streams, the last one waits for the others.
        self._open = b"data: " + top[:-1] + b',"choices":['
        self._plain = not (ask.wishes.reasoning_tokens or ask.wishes.tool_call) or not self._chat
        start = b'"delta":{"content":"' if self._chat else b'"text":"'
        self._before = [self._open + b'{"index":%d,' % index + start for index in range(ask.n)]
        self._after = b'"}' if self._chat else b'"'
        self._finish = b'"%b"' % ask.finish.encode()

    def opening(self, index: int, cached: int | None) -> list[bytes]:
        """Before a choice's first token: in chat, the event that names the role and carries no text."""
        if not self._chat:
            return []
        delta = b'"delta":{"role":"assistant","content":""}'
        event = self._open + b'{"index":%d,' % index + delta + b',"logprobs":null,"finish_reason":null}]'
        return [self._close(event, 0, self._ask.continuous_usage)]

    def tokens(self, index: int, start: int, tokens: int) -> list[bytes]:
        """The events with the tokens `start` to `start + tokens`; the last one carries the finish reason."""
        ask = self._ask
        if self._plain:
            return [self._event(self._before[index] + ask.text(start, tokens).encode() + self._after, start + tokens)]
        events = []
        reasoning = min(max(ask.wishes.reasoning_tokens - start, 0), tokens)
        if reasoning:
            text = ask.text(start, reasoning).encode()
            events.append(self._delta(index, b'{"reasoning":"%b"}' % text, start + reasoning))
            start, tokens = start + reasoning, tokens - reasoning
        if tokens:
            text = ask.text(start, tokens).encode()
            if not ask.wishes.tool_call:
                delta = b'{"content":"%b"}' % text
            elif start == ask.wishes.reasoning_tokens:
                function = b'{"name":"look_up","arguments":"%b"}' % text
                call = b'{"id":"call_%d","type":"function","index":0,"function":%b}' % (index, function)
                delta = b'{"tool_calls":[%b]}' % call
            else:
                delta = b'{"tool_calls":[{"index":0,"function":{"arguments":"%b"}}]}' % text
            events.append(self._delta(index, delta, start + tokens))
        return events

    def closing(self, cached: int | None) -> list[bytes]:
        """After the last choice's text: the event with the usage and empty choices, if asked for, and the end."""
        if not self._ask.include_usage:
            return [DONE]
        total = self._ask.limit * self._ask.n
        usage = orjson.dumps(usage_of(self._ask, total, cached))
        return [self._open + b'],"usage":' + usage + b"}\n\n", DONE]

    def error(self, message: str) -> list[bytes]:
        """What vLLM sends when its engine fails in a stream."""
        return [b"data: " + error_body(500, message, "InternalServerError", None) + b"\n\n", DONE]

    def _delta(self, index: int, delta: bytes, tokens: int) -> bytes:
        return self._event(self._open + b'{"index":%d,"delta":' % index + delta, tokens)

    def _event(self, event: bytes, tokens: int) -> bytes:
        reason = self._finish if tokens == self._ask.limit else b"null"
        event += b',"logprobs":null,"finish_reason":' + reason + b"}]"
        return self._close(event, tokens, self._ask.continuous_usage)

    def _close(self, event: bytes, tokens: int, usage: bool) -> bytes:
        if not usage:
            return event + b"}\n\n"
        prompt = self._ask.prompt_tokens
        return event + b',"usage":{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d}}\n\n' % (
            prompt,
            prompt + tokens,
            tokens,
        )


def whole(ask: Ask, answer_id: str, created_s: int, model: str, cached: int | None) -> bytes:
    """The body of an answer that is not streamed."""
    chat = ask.api == "chat"
    choices: list[dict[str, object]] = []
    for index in range(ask.n):
        choice: dict[str, object] = {"index": index, "logprobs": None, "finish_reason": ask.finish}
        if chat:
            choice["message"] = _message(ask, index)
        else:
            choice["text"] = ask.text(0, ask.limit)
        choices.append(choice)
    return orjson.dumps(
        {
            "id": answer_id,
            "object": "chat.completion" if chat else "text_completion",
            "created": created_s,
            "model": model,
            "choices": choices,
            "usage": usage_of(ask, ask.limit * ask.n, cached),
        }
    )


def _message(ask: Ask, index: int) -> dict[str, object]:
    thought = min(ask.wishes.reasoning_tokens, ask.limit)
    rest = ask.text(thought, ask.limit - thought) if thought < ask.limit else ""
    message: dict[str, object] = {"role": "assistant", "content": rest}
    if thought:
        message["reasoning"] = ask.text(0, thought)
    if ask.wishes.tool_call:
        message["content"] = None
        function = {"name": "look_up", "arguments": rest}
        message["tool_calls"] = [{"id": f"call_{index}", "type": "function", "function": function}]
    return message


def usage_of(ask: Ask, completion: int, cached: int | None) -> dict[str, object]:
    """OpenAI's usage object."""
    usage: dict[str, object] = {
        "prompt_tokens": ask.prompt_tokens,
        "total_tokens": ask.prompt_tokens + completion,
        "completion_tokens": completion,
    }
    if cached is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": cached}
    if ask.wishes.reasoning_tokens:
        thought = min(ask.wishes.reasoning_tokens, ask.limit) * ask.n
        usage["completion_tokens_details"] = {"reasoning_tokens": thought}
    return usage


def models(options: Options, created_s: int) -> bytes:
    """The body of /v1/models."""
    model = {
        "id": options.model,
        "object": "model",
        "created": created_s,
        "owned_by": OWNED_BY,
        "root": options.model,
        "parent": None,
        "max_model_len": options.max_model_len,
    }
    return orjson.dumps({"object": "list", "data": [model]})


def error_body(status: int, message: str, kind: str, param: str | None) -> bytes:
    """An error as vLLM words it."""
    return orjson.dumps({"error": {"message": message, "type": kind, "param": param, "code": status}})
