"""What is said in OpenAI's protocol, in vLLM's manner: request bodies in, events and answers out. No sockets.

Skeleton of a stream (R role, c text, F finish_reason, u usage, 0 empty choices, D [DONE]):
chat `R c.. cF u0 D`, completions `c.. cF u0 D`; u0 only with `include_usage`.
"""

import zlib
from dataclasses import dataclass
from typing import Any

import orjson

from fastload.sim.options import OWNED_BY, Options
from fastload.sim.tokenizer import chat_ids, chat_tokens, pieces, text_ids

# Without max_tokens a real engine runs to the end of its context; this one only as far as a person waits.
DEFAULT_MAX_TOKENS = 512

# The answer's words, each one token of `tokenizer.pieces` with the space before it.
_WORDS = (
    "harbour lantern copper meadow signal winter ladder timber velvet window canyon button marble needle "
    "orchard pocket quarry ribbon saddle tunnel valley walnut yellow anchor basket candle dragon engine "
    "feather garden hammer island jacket kettle lemon mirror napkin oyster pepper rocket"
).split()

DONE = b"data: [DONE]\n\n"


class Rejected(Exception):
    """A request answered with an error in OpenAI's form."""

    def __init__(
        self, status: int, message: str, kind: str = "BadRequestError", param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param


@dataclass(frozen=True, slots=True)
class Ask:
    """One completion request, checked. It gets `limit` tokens, the end token one of them if `ends_itself`."""

    chat: bool
    prompt_tokens: int
    limit: int
    ends_itself: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool
    first_word: int


def read_ask(body: bytes, chat: bool, options: Options) -> Ask:
    """The request in `body`. Raises `Rejected`."""
    fields = read_object(body)
    _check_model(fields, options)
    if chat:
        contents = _contents(fields)
        prompt_tokens = chat_tokens(contents)
        seed = "\n".join(contents)
    else:
        prompt_tokens, seed = _prompt(fields)
    if fields.get("n") not in (None, 1):
        raise Rejected(400, "n: the simulated engine gives one answer a request", param="n")
    temperature = fields.get("temperature")
    if temperature is not None and (not isinstance(temperature, (int, float)) or temperature < 0):
        raise Rejected(
            400, f"temperature must be a number not below 0, got {temperature!r}.", param="temperature"
        )
    room = options.max_model_len - prompt_tokens
    sizes = f"the prompt has {prompt_tokens} tokens, the context {options.max_model_len}."
    if room < 1:
        raise Rejected(
            400, f"There is no room for an answer: {sizes}", param="messages" if chat else "prompt"
        )
    asked = _max_tokens(fields)
    if asked is not None and asked > room:
        raise Rejected(400, f"max_tokens {asked} is too large: {sizes}", param="max_tokens")
    limit = min(DEFAULT_MAX_TOKENS, room) if asked is None else asked
    own_end = options.answer_tokens
    ends_itself = own_end is not None and own_end <= limit and fields.get("ignore_eos") is not True
    stream = fields.get("stream") is True
    wishes = fields.get("stream_options")
    if wishes is not None and (not stream or not isinstance(wishes, dict)):
        raise Rejected(400, "stream_options is an object and needs stream: true.", param="stream_options")
    wishes = wishes or {}
    return Ask(
        chat=chat,
        prompt_tokens=prompt_tokens,
        limit=own_end if ends_itself and own_end is not None else limit,
        ends_itself=ends_itself,
        stream=stream,
        include_usage=wishes.get("include_usage") is True,
        continuous_usage=wishes.get("continuous_usage_stats") is True,
        first_word=zlib.crc32(seed.encode()) % len(_WORDS),
    )


def answer_text(ask: Ask, start: int, tokens: int) -> str:
    """The text of `tokens` tokens from the one numbered `start`: one word a token, the end token none."""
    if ask.ends_itself and start + tokens == ask.limit:
        tokens -= 1
    first = ask.first_word + start
    return "".join(f" {_WORDS[i % len(_WORDS)]}" for i in range(first, first + tokens))


class EventWriter:
    """The events of one streamed answer, as bytes."""

    def __init__(self, ask: Ask, answer_id: str, created_s: int, model: str) -> None:
        self._ask = ask
        kind = "chat.completion.chunk" if ask.chat else "text_completion"
        top = orjson.dumps({"id": answer_id, "object": kind, "created": created_s, "model": model})
        # Put together from pieces made once: a tick serves all streams, the last one waits for the others.
        self._open = b"data: " + top[:-1] + b',"choices":['
        self._before_text = (
            self._open + b'{"index":0,' + (b'"delta":{"content":"' if ask.chat else b'"text":"')
        )
        self._after_text = b'"}' if ask.chat else b'"'

    def role(self) -> bytes:
        """The first event of a chat answer: names the role, carries no text."""
        delta = b'"delta":{"role":"assistant","content":""}'
        event = self._open + b'{"index":0,' + delta + b',"logprobs":null,"finish_reason":null}]'
        return self._close(event, 0, self._ask.continuous_usage)

    def text(self, start: int, tokens: int) -> bytes:
        """The event with the tokens `start` to `start + tokens`; the last one carries the finish reason."""
        ask = self._ask
        text = answer_text(ask, start, tokens).encode()
        event = self._before_text + text + self._after_text + b',"logprobs":null,"finish_reason":'
        if start + tokens == ask.limit:
            event += b'"stop"' if ask.ends_itself else b'"length"'
        else:
            event += b"null"
        return self._close(event + b"}]", start + tokens, ask.continuous_usage)

    def usage(self) -> bytes:
        """The event after the text, with empty choices."""
        return self._close(self._open + b"]", self._ask.limit, True)

    def _close(self, event: bytes, tokens: int, usage: bool) -> bytes:
        if not usage:
            return event + b"}\n\n"
        prompt = self._ask.prompt_tokens
        return event + b',"usage":{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d}}\n\n' % (
            prompt,
            prompt + tokens,
            tokens,
        )


def whole_answer(ask: Ask, answer_id: str, created_s: int, model: str) -> bytes:
    """The body of an answer that is not streamed."""
    text = answer_text(ask, 0, ask.limit)
    choice: dict[str, object] = {
        "index": 0,
        "logprobs": None,
        "finish_reason": "stop" if ask.ends_itself else "length",
    }
    if ask.chat:
        choice["message"] = {"role": "assistant", "content": text}
    else:
        choice["text"] = text
    usage = {
        "prompt_tokens": ask.prompt_tokens,
        "total_tokens": ask.prompt_tokens + ask.limit,
        "completion_tokens": ask.limit,
    }
    kind = "chat.completion" if ask.chat else "text_completion"
    return orjson.dumps(
        {
            "id": answer_id,
            "object": kind,
            "created": created_s,
            "model": model,
            "choices": [choice],
            "usage": usage,
        }
    )


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


def tokenize(body: bytes, options: Options) -> bytes:
    """The answer of /tokenize in vLLM's form, to `messages` (counted with the template) or a `prompt`."""
    fields = read_object(body)
    _check_model(fields, options)
    if "messages" in fields:
        ids = chat_ids(_contents(fields), fields.get("add_generation_prompt") is not False)
    else:
        prompt = fields.get("prompt")
        if not isinstance(prompt, str):
            raise Rejected(400, "prompt (a string) or messages is needed.", param="prompt")
        ids = text_ids(prompt)
    return orjson.dumps(
        {"count": len(ids), "max_model_len": options.max_model_len, "tokens": ids, "token_strs": None}
    )


def error_body(status: int, message: str, kind: str, param: str | None) -> bytes:
    """An error as vLLM words it."""
    return orjson.dumps({"error": {"message": message, "type": kind, "param": param, "code": status}})


def read_object(body: bytes) -> dict[str, Any]:
    """`body` as a JSON object. Raises `Rejected`."""
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise Rejected(400, f"The body is no JSON: {error}") from None
    if not isinstance(fields, dict):
        raise Rejected(400, "The body must be a JSON object.")
    return fields


def _check_model(fields: dict[str, Any], options: Options) -> None:
    model = fields.get("model")
    if model is not None and model != options.model:
        message = f"The model `{model}` does not exist. Valid aliases: {options.model}."
        raise Rejected(404, message, kind="NotFoundError", param="model")


def _contents(fields: dict[str, Any]) -> list[str]:
    """The text of each message."""
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Rejected(400, "messages must be a list with at least one message.", param="messages")
    contents = []
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise Rejected(400, "each message must be an object with a role.", param="messages")
        contents.append(_content(message.get("content")))
    return contents


def _content(content: object) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
        for part in content
    ):
        return "".join(part["text"] for part in content)
    raise Rejected(400, "content must be a string or a list of text parts.", param="messages")


def _prompt(fields: dict[str, Any]) -> tuple[int, str]:
    """(tokens, what the answer's first word is picked by) of a completions prompt: a text, or token ids."""
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return len(pieces(prompt)), prompt
    if isinstance(prompt, list) and prompt and all(type(token) is int and token >= 0 for token in prompt):
        return len(prompt), repr(prompt)
    raise Rejected(400, "prompt must be one text or one list of token ids.", param="prompt")


def _max_tokens(fields: dict[str, Any]) -> int | None:
    for name in ("max_completion_tokens", "max_tokens"):
        value = fields.get(name)
        if value is not None:
            if type(value) is not int or value < 1:
                raise Rejected(400, f"{name} must be at least 1, got {value!r}.", param=name)
            return value
    return None
