"""Request bodies of the four APIs, checked, as one kind of order. No sockets."""

import zlib
from dataclasses import dataclass
from typing import Any

import orjson

from fastload.sim.cache import chain
from fastload.sim.options import Options
from fastload.sim.tokenizer import chat_ids, chat_pieces, pieces, text_ids
from fastload.sim.wishes import Wishes, read_wishes

# Without max_tokens a real engine runs to the end of its context; this one only as far as a person waits.
DEFAULT_MAX_TOKENS = 512
MOST_CHOICES = 128

# The answer's words, each one token of `tokenizer.pieces` with the space before it.
WORDS = (
    "harbour lantern copper meadow signal winter ladder timber velvet window canyon button marble needle "
    "orchard pocket quarry ribbon saddle tunnel valley walnut yellow anchor basket candle dragon engine "
    "feather garden hammer island jacket kettle lemon mirror napkin oyster pepper rocket"
).split()


class Rejected(Exception):
    """A request answered with an error in OpenAI's form."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "BadRequestError",
        param: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class Ask:
    """One request, checked. Each of its `n` answers gets `limit` tokens, the end token one of them if `ends_itself`."""

    api: str  # chat, completions, responses, messages
    prompt_tokens: int
    hashes: tuple[int, ...]  # of the prompt's blocks
    limit: int
    ends_itself: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool
    first_word: int
    n: int
    wishes: Wishes

    @property
    def finish(self) -> str:
        """OpenAI's word for how it ends."""
        if self.wishes.tool_call:
            return "tool_calls"
        return "stop" if self.ends_itself else "length"

    def text(self, start: int, tokens: int) -> str:
        """The text of `tokens` tokens from the one numbered `start`: one word a token, the end token none."""
        if self.ends_itself and start + tokens == self.limit:
            tokens -= 1
        first = self.first_word + start
        return "".join([_SPACED[i % len(_SPACED)] for i in range(first, first + tokens)])


_SPACED = [f" {word}" for word in WORDS]
_PROMPT = {"chat": "messages", "completions": "prompt", "responses": "input", "messages": "messages"}


def read_ask(body: bytes, api: str, options: Options, block_tokens: int, header: str | None = None) -> Ask:
    """The request in `body`; `header` is what X-Fastload-Sim said. Raises `Rejected`."""
    fields = read_object(body)
    check_model(fields, options)
    parts, seed = _prompt(fields) if api == "completions" else _conversation(fields, api)
    temperature = fields.get("temperature")
    if temperature is not None and (not isinstance(temperature, (int, float)) or temperature < 0):
        raise Rejected(
            400, f"temperature must be a number not below 0, got {temperature!r}.", param="temperature"
        )
    n = _whole(fields, "n", 1) or 1
    if n > MOST_CHOICES:
        raise Rejected(400, f"n must be at most {MOST_CHOICES}, got {n}.", param="n")
    if n > 1 and temperature == 0:
        raise Rejected(400, f"n must be 1 when using greedy sampling, got {n}.", param="n")
    room = options.max_model_len - len(parts)
    sizes = f"the prompt has {len(parts)} tokens, the context {options.max_model_len}."
    if room < 1:
        raise Rejected(400, f"There is no room for an answer: {sizes}", param=_PROMPT[api])
    asked = _max_tokens(fields, api)
    if asked is not None and asked > room:
        raise Rejected(400, f"max_tokens {asked} is too large: {sizes}", param="max_tokens")
    limit = min(DEFAULT_MAX_TOKENS, room) if asked is None else asked
    least = _whole(fields, "min_tokens", 0) or 0
    if least > limit:
        raise Rejected(400, f"min_tokens {least} is more than max_tokens {limit}.", param="min_tokens")
    own_end = options.answer_tokens
    if own_end is not None:
        own_end = max(own_end, least)  # an engine does not sample the end token before
    ends_itself = own_end is not None and own_end <= limit and fields.get("ignore_eos") is not True
    stream = fields.get("stream") is True
    usage = fields.get("stream_options")
    if usage is not None and (not stream or not isinstance(usage, dict)):
        raise Rejected(400, "stream_options is an object and needs stream: true.", param="stream_options")
    usage = usage or {}
    return Ask(
        api=api,
        prompt_tokens=len(parts),
        hashes=chain(parts, block_tokens) if block_tokens else (),
        limit=own_end if ends_itself and own_end is not None else limit,
        ends_itself=ends_itself,
        stream=stream,
        include_usage=usage.get("include_usage") is True,
        continuous_usage=usage.get("continuous_usage_stats") is True,
        first_word=zlib.crc32(seed.encode()) % len(WORDS),
        n=n,
        wishes=_wishes(fields, header),
    )


def tokenize(body: bytes, options: Options) -> bytes:
    """The answer of /tokenize in vLLM's form, to `messages` (counted with the template) or a `prompt`."""
    fields = read_object(body)
    check_model(fields, options)
    if "messages" in fields:
        contents = _contents(fields.get("messages"), "messages")
        ids = chat_ids(contents, fields.get("add_generation_prompt") is not False)
    else:
        prompt = fields.get("prompt")
        if not isinstance(prompt, str):
            raise Rejected(400, "prompt (a string) or messages is needed.", param="prompt")
        ids = text_ids(prompt)
    return orjson.dumps(
        {"count": len(ids), "max_model_len": options.max_model_len, "tokens": ids, "token_strs": None}
    )


def read_object(body: bytes) -> dict[str, Any]:
    """`body` as a JSON object. Raises `Rejected`."""
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise Rejected(400, f"The body is no JSON: {error}") from None
    if not isinstance(fields, dict):
        raise Rejected(400, "The body must be a JSON object.")
    return fields


def check_model(fields: dict[str, Any], options: Options) -> None:
    """Raises `Rejected` for another model than the one served."""
    model = fields.get("model")
    if model is not None and model != options.model:
        message = f"The model `{model}` does not exist. Valid aliases: {options.model}."
        raise Rejected(404, message, kind="NotFoundError", param="model")


def _conversation(fields: dict[str, Any], api: str) -> tuple[list[str], str]:
    """(tokens, what the answer's first word is picked by) of a conversation."""
    contents: list[str] = []
    if api == "responses":
        if fields.get("instructions") is not None:
            contents.append(_content(fields["instructions"], "instructions"))
        said = fields.get("input")
        contents += [said] if isinstance(said, str) else _contents(said, "input")
    else:
        if api == "messages" and fields.get("system") is not None:
            contents.append(_content(fields["system"], "system"))
        contents += _contents(fields.get("messages"), "messages")
    return chat_pieces(contents), "\n".join(contents)


def _contents(messages: object, param: str) -> list[str]:
    """The text of each message."""
    if not isinstance(messages, list) or not messages:
        raise Rejected(400, f"{param} must be a list with at least one message.", param=param)
    contents = []
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise Rejected(400, "each message must be an object with a role.", param=param)
        contents.append(_content(message.get("content"), param))
    return contents


def _content(content: object, param: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(
        isinstance(part, dict)
        and part.get("type") in ("text", "input_text", "output_text")
        and isinstance(part.get("text"), str)
        for part in content
    ):
        return "".join(part["text"] for part in content)
    raise Rejected(400, "content must be a string or a list of text parts.", param=param)


def _prompt(fields: dict[str, Any]) -> tuple[list[str], str]:
    """(tokens, what the answer's first word is picked by) of a completions prompt: a text, or token ids."""
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return pieces(prompt), prompt
    if isinstance(prompt, list) and prompt and all(type(token) is int and token >= 0 for token in prompt):
        return [str(token) for token in prompt], repr(prompt)
    raise Rejected(400, "prompt must be one text or one list of token ids.", param="prompt")


def _max_tokens(fields: dict[str, Any], api: str) -> int | None:
    if api == "responses":
        return _whole(fields, "max_output_tokens", 1)
    if api == "messages":
        asked = _whole(fields, "max_tokens", 1)
        if asked is None:
            raise Rejected(400, "max_tokens: Field required", param="max_tokens")
        return asked
    asked = _whole(fields, "max_completion_tokens", 1)
    return _whole(fields, "max_tokens", 1) if asked is None else asked


def _whole(fields: dict[str, Any], name: str, least: int) -> int | None:
    value = fields.get(name)
    if value is not None and (type(value) is not int or value < least):
        raise Rejected(400, f"{name} must be at least {least}, got {value!r}.", param=name)
    return value


def _wishes(fields: dict[str, Any], header: str | None) -> Wishes:
    try:
        return read_wishes(fields.get("sim") if header is None else orjson.loads(header))
    except ValueError as error:  # orjson's is one
        raise Rejected(400, str(error), param="sim") from None
