"""What a raw payload carries: one SSE event's JSON, an answer's head, an error body. Pure, and it never
raises.

The measurer keeps raw only what its scan could not decide or what names the end (finish, usage); here it gets
its meaning. Servers differ in every corner, so each rule below takes whatever has the right shape and ignores
the rest: a wrong type is as good as a missing key. Only text that is no JSON at all is `malformed`.

To read another dialect, add a function that fills `_Found` from its object and call it in `read_event`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Final

import orjson

from fastload._timing import CH_CONTENT, CH_DONE, CH_NONE, CH_REASONING, CH_REFUSAL, CH_TOOL

ERROR_CHARACTERS: Final = 500
# Where several channels are in one event, the first of these names it: what the user reads comes first.
_PRECEDENCE: Final = (CH_CONTENT, CH_REASONING, CH_TOOL, CH_REFUSAL)
_COUNT_LIMIT: Final = 2**31  # a count beyond this is nonsense, and would not fit its column


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts a server told; None where it did not."""

    prompt: int | None = None
    completion: int | None = None
    reasoning: int | None = None
    cached: int | None = None


@dataclass(frozen=True, slots=True)
class Payload:
    """What one event carries. `text` is by channel, `bytes` its UTF-8 length over all channels."""

    channel: int = CH_NONE
    bytes: int = 0
    text: dict[int, str] = field(default_factory=dict)
    has_choices: bool = False
    choices: tuple[int, ...] = ()
    finish: dict[int, str] = field(default_factory=dict)  # choice index -> finish_reason
    usage: Usage | None = None
    error: str | None = None
    answer_id: str | None = None
    token_ids: int | None = None  # how many the event lists
    logprobs: int | None = None  # how many the event lists
    malformed: bool = False


_NOTHING: Final = Payload()
_MALFORMED: Final = Payload(malformed=True)
_DONE: Final = Payload(channel=CH_DONE)


def read_event(raw: bytes) -> Payload:
    """What the payload of one event (its data lines joined by LF) carries; broken JSON gives `malformed`."""
    stripped = raw.strip()
    if not stripped:
        return _NOTHING
    if stripped == b"[DONE]":
        return _DONE
    try:
        value = parse_json(stripped)
    except ValueError:
        return _MALFORMED
    if not isinstance(value, dict):  # `data: null` is a whole event of llama.cpp
        return _NOTHING
    found = _Found()
    _read_openai(value, found)
    return found.payload()


def read_error(value: object) -> str | None:
    """The message of an error in any form seen (object, string, `detail`, flat); None if none."""
    if not isinstance(value, dict):
        return None
    error = value.get("error")
    if error:
        return _message(error)
    if value.get("choices"):
        return None
    if value.get("object") == "error" or value.get("type") == "error":
        return _message(value)
    if value.get("detail"):
        return _message(value["detail"])
    return None


def read_error_body(body: bytes) -> str | None:
    """The message of a body that is no stream, as JSON in any form or as plain text; None if it is empty."""
    try:
        value = parse_json(body)
    except ValueError:
        value = None
    message = read_error(value)
    if message is None and isinstance(value, dict) and isinstance(value.get("message"), str):
        message = value["message"]
    return cut(message if message is not None else body.decode("utf-8", "replace").strip()) or None


def read_head(raw: bytes) -> dict[str, str]:
    """The header fields of a raw answer head, names in lower case; the last of a repeated name, "" for the
    status line.

    A head with 1xx answers before it is read from its last status line.
    """
    headers: dict[str, str] = {}
    for line in raw.decode("latin-1").splitlines():
        if line.startswith("HTTP/"):
            headers = {"": line}
            continue
        name, colon, value = line.partition(":")
        if colon:
            headers[name.strip().lower()] = value.strip()
    return headers


def read_retry_after_s(headers: dict[str, str]) -> float | None:
    """Seconds to wait: `retry-after-ms`, `retry-after` as seconds, or its date less the head's."""
    for name, scale in (("retry-after-ms", 1000.0), ("retry-after", 1.0)):
        text = headers.get(name, "")
        if text.replace(".", "", 1).isdecimal() and len(text) < 20:
            return float(text) / scale
    try:
        wait = parsedate_to_datetime(headers["retry-after"]) - parsedate_to_datetime(headers["date"])
        return max(0.0, wait.total_seconds())
    except (KeyError, ValueError, TypeError):  # TypeError: one date with a zone, the other without
        return None


def parse_json(raw: bytes) -> object:
    """The value of a JSON text. Takes what real servers write and orjson refuses; ValueError if it is none.

    Python's `json` on the server's side writes NaN (in logprobs) and lone surrogates (an emoji cut between
    two tokens); bytes that are not UTF-8 are replaced, as the SSE specification says.
    """
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError:
        pass
    try:
        return json.loads(raw.decode("utf-8", "replace"))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def cut(text: str) -> str:
    """`text` as it may stand in a column: without lone surrogates, at most 500 characters."""
    return clean(text[:ERROR_CHARACTERS])


def clean(text: str) -> str:
    """`text` without lone surrogates, which no UTF-8 column can hold."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


class _Found:
    """What has been found in an event so far; one dialect function fills it."""

    __slots__ = (
        "answer_id",
        "choices",
        "error",
        "finish",
        "has_choices",
        "logprobs",
        "text",
        "token_ids",
        "usage",
    )

    def __init__(self) -> None:
        self.text: dict[int, str] = {}
        self.choices: list[int] = []
        self.has_choices = False
        self.finish: dict[int, str] = {}
        self.usage: Usage | None = None
        self.error: str | None = None
        self.answer_id: str | None = None
        self.token_ids: int | None = None
        self.logprobs: int | None = None

    def add_text(self, channel: int, text: object) -> None:
        """Append generated text; an empty string or anything that is no string is no token."""
        if isinstance(text, str) and text:
            self.text[channel] = self.text.get(channel, "") + text

    def payload(self) -> Payload:
        text = self.text
        channel = next((c for c in _PRECEDENCE if c in text), CH_NONE) if text else CH_NONE
        return Payload(
            channel=channel,
            bytes=sum(len(piece.encode("utf-8", "surrogatepass")) for piece in text.values()),
            text=text,
            has_choices=self.has_choices,
            choices=tuple(self.choices),
            finish=self.finish,
            usage=self.usage,
            error=self.error,
            answer_id=self.answer_id,
            token_ids=self.token_ids,
            logprobs=self.logprobs,
        )


def _read_openai(value: dict[str, object], found: _Found) -> None:
    """chat.completion.chunk and text_completion, as all OpenAI-compatible servers write them."""
    error = read_error(value)
    if error is not None:
        found.error = cut(error)
    answer_id = value.get("id")
    if isinstance(answer_id, str) and answer_id:
        found.answer_id = cut(answer_id)
    usage = value.get("usage")
    if isinstance(usage, dict):
        found.usage = _usage(usage)
    choices = value.get("choices")
    if isinstance(choices, list):
        found.has_choices = bool(choices)
        for position, choice in enumerate(choices):
            if isinstance(choice, dict):
                _read_choice(position, choice, found)


def _read_choice(position: int, choice: dict[str, object], found: _Found) -> None:
    index = _count(choice.get("index"))
    index = position if index is None else index
    found.choices.append(index)
    reason = choice.get("finish_reason")
    if isinstance(reason, str) and reason:
        found.finish[index] = cut(reason)
    found.add_text(CH_CONTENT, choice.get("text"))
    delta = choice.get("delta")
    if isinstance(delta, dict):
        _read_delta(delta, found)
    ids = choice.get("token_ids")
    if isinstance(ids, list):
        found.token_ids = (found.token_ids or 0) + len(ids)
    listed = _logprobs(choice.get("logprobs"))
    if listed is not None:
        found.logprobs = (found.logprobs or 0) + listed


def _read_delta(delta: dict[str, object], found: _Found) -> None:
    content = delta.get("content")
    for part in content if isinstance(content, list) else ():  # Mistral's typed parts
        if isinstance(part, dict):
            found.add_text(CH_CONTENT, part.get("text"))
    found.add_text(CH_CONTENT, content)
    # vLLM says `reasoning`, SGLang, llama.cpp and LiteLLM `reasoning_content`; a gateway that gives both
    # repeats itself.
    found.add_text(CH_REASONING, delta.get("reasoning_content") or delta.get("reasoning"))
    found.add_text(CH_REFUSAL, delta.get("refusal"))
    calls = delta.get("tool_calls")
    pieces = (
        [call.get("function") for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    )
    for function in (*pieces, delta.get("function_call")):
        if isinstance(function, dict):
            found.add_text(CH_TOOL, function.get("name"))
            found.add_text(CH_TOOL, function.get("arguments"))


def _usage(usage: dict[str, object]) -> Usage:
    details = usage.get("completion_tokens_details")
    prompt_details = usage.get("prompt_tokens_details")
    reasoning = (
        details.get("reasoning_tokens") if isinstance(details, dict) else usage.get("reasoning_tokens")
    )
    cached = (
        prompt_details.get("cached_tokens")
        if isinstance(prompt_details, dict)
        else usage.get("cached_tokens")
    )
    return Usage(
        _count(usage.get("prompt_tokens")),
        _count(usage.get("completion_tokens")),
        _count(reasoning),
        _count(cached),
    )


def _logprobs(logprobs: object) -> int | None:
    """How many tokens a choice's logprobs list: chat's `content`, completions' `tokens`."""
    if not isinstance(logprobs, dict):
        return None
    for key in ("content", "tokens"):
        listed = logprobs.get(key)
        if isinstance(listed, list):
            return len(listed)
    return None


def _count(value: object) -> int | None:
    """A count as an int; None if it is none (missing, negative, a bool, a string, absurd)."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _COUNT_LIMIT:
        return None
    return value


def _message(error: object) -> str:
    """The sentence in an error of any form; the JSON itself where no key says `message`."""
    if isinstance(error, str):
        return error
    if isinstance(error, dict):
        for key in ("message", "detail", "msg", "error"):
            if isinstance(error.get(key), str) and error[key]:
                return str(error[key])
    return json.dumps(error, ensure_ascii=False, default=str)
