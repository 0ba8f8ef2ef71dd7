"""What the raw payload of one SSE event carries. Pure, and it never raises.

The measurer keeps raw only what its scan could not decide or what names the end (finish, usage); here it gets its
meaning. Servers differ in every corner, so each rule below takes whatever has the right shape and ignores the rest: a
wrong type is as good as a missing key. Only text that is no JSON at all is `malformed`.

To read another dialect, add a function that fills `_Found` from its object and call it in `read_event`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from fastload._timing import CH_CONTENT, CH_DONE, CH_NONE, CH_REASONING, CH_REFUSAL, CH_TOOL
from fastload.trace.faults import cut, parse_json, read_error, read_named_error

# Where several channels are in one event, the first of these names it: what the user reads comes first.
_PRECEDENCE: Final = (CH_CONTENT, CH_REASONING, CH_TOOL, CH_REFUSAL)
_COUNT_LIMIT: Final = 2**31  # a count beyond this is nonsense, and would not fit its column
# With these a choice ends because the server failed or gave it up: no error object, but no answer either.
_FAILED_FINISH: Final = ("error", "abort")


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts a server told; None where it did not."""

    prompt: int | None = None
    completion: int | None = None
    reasoning: int | None = None
    cached: int | None = None

    def over(self, earlier: Usage | None, grows: bool) -> Usage:
        """This one, with what only an `earlier` one told; a prompt that `grows` was told in pieces: the most."""
        if earlier is None:
            return self
        prompt = earlier.prompt if self.prompt is None else self.prompt
        if grows and prompt is not None:
            prompt = max(prompt, earlier.prompt or 0)
        return Usage(
            prompt,
            earlier.completion if self.completion is None else self.completion,
            earlier.reasoning if self.reasoning is None else self.reasoning,
            earlier.cached if self.cached is None else self.cached,
        )


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
    usage_grows: bool = False  # told in pieces: the prompt at the start, the answer at the end
    error: str | None = None
    answer_id: str | None = None
    token_ids: int | None = None  # how many the event lists
    logprobs: int | None = None  # how many the event lists
    ends: bool = False  # the end marker of a dialect that has no [DONE]
    malformed: bool = False


_NOTHING: Final = Payload()
_MALFORMED: Final = Payload(malformed=True)
_DONE: Final = Payload(channel=CH_DONE)


def read_event(raw: bytes, named_error: bool = False) -> Payload:
    """What the payload of one event (its data lines joined by LF) carries; broken JSON gives `malformed`.

    named_error: the event has the name `error`; then it is one, whatever it holds.
    """
    stripped = raw.strip()
    if not stripped:
        return _NOTHING
    if stripped == b"[DONE]":
        return _DONE
    if named_error:
        return Payload(error=read_named_error(stripped))
    try:
        value = parse_json(stripped)
    except ValueError:
        return _MALFORMED
    found = _Found()
    error = read_error(value)
    if error is not None:
        found.error = cut(error)
    if isinstance(value, dict):  # `data: null` is a whole event of llama.cpp
        kind = value.get("type")
        if "choices" in value or not isinstance(kind, str):
            _read_openai(value, found)
        elif kind.startswith("response."):
            _read_responses(kind.removeprefix("response."), value, found)
        else:
            _read_messages(kind, value, found)
    return found.payload()


def read_usage(usage: object) -> Usage | None:
    """The counts of a usage object, under OpenAI's names or Anthropic's; None if it is none."""
    if not isinstance(usage, dict):
        return None
    prompt_details = _either(usage, "prompt_tokens_details", "input_tokens_details")
    details = _either(usage, "completion_tokens_details", "output_tokens_details")
    cached = prompt_details.get("cached_tokens") if isinstance(prompt_details, dict) else usage.get("cached_tokens")
    reasoning = details.get("reasoning_tokens") if isinstance(details, dict) else usage.get("reasoning_tokens")
    prompt = _count(usage.get("prompt_tokens"))
    if prompt is None:
        prompt = _count(usage.get("input_tokens"))
        # Anthropic counts only what was not in the cache as input.
        for name in ("cache_read_input_tokens", "cache_creation_input_tokens"):
            more = _count(usage.get(name))
            if more is not None:
                prompt = (prompt or 0) + more
    if cached is None:
        cached = _either(usage, "cache_read_input_tokens", "prompt_cache_hit_tokens")  # the latter is DeepSeek's
    completion = _count(_either(usage, "completion_tokens", "output_tokens"))
    return Usage(prompt, completion, _count(reasoning), _count(cached))


class _Found:
    """What has been found in an event so far; one dialect function fills it."""

    __slots__ = (
        "answer_id",
        "choices",
        "ends",
        "error",
        "finish",
        "has_choices",
        "logprobs",
        "text",
        "token_ids",
        "usage",
        "usage_grows",
    )

    def __init__(self) -> None:
        self.text: dict[int, str] = {}
        self.choices: list[int] = []
        self.has_choices = False
        self.finish: dict[int, str] = {}
        self.usage: Usage | None = None
        self.usage_grows = False
        self.error: str | None = None
        self.answer_id: str | None = None
        self.token_ids: int | None = None
        self.logprobs: int | None = None
        self.ends = False

    def add_text(self, channel: int, text: object) -> None:
        """Append generated text; an empty string or anything that is no string is no token."""
        if isinstance(text, str) and text:
            self.text[channel] = self.text.get(channel, "") + text

    def add_id(self, answer_id: object) -> None:
        if isinstance(answer_id, str) and answer_id:
            self.answer_id = cut(answer_id)

    def be_only_choice(self) -> None:
        """The event belongs to the answer, which dialects without choices have one of."""
        self.has_choices = True
        self.choices = [0]

    def end_choice(self, index: int, reason: str) -> None:
        self.finish[index] = cut(reason)
        if reason in _FAILED_FINISH and self.error is None:
            self.error = f"the server ended the answer with finish_reason {reason}"

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
            usage_grows=self.usage_grows,
            error=self.error,
            answer_id=self.answer_id,
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            ends=self.ends,
        )


# ---- /v1/chat/completions and /v1/completions


def _read_openai(value: dict[str, object], found: _Found) -> None:
    """chat.completion.chunk and text_completion, as all OpenAI-compatible servers write them."""
    found.add_id(value.get("id"))
    found.usage = read_usage(value.get("usage"))
    choices = value.get("choices")
    if isinstance(choices, list):
        found.has_choices = bool(choices)
        for position, choice in enumerate(choices):
            if isinstance(choice, dict):
                _read_choice(position, choice, found)
    if found.usage is None:
        groq = value.get("x_groq")
        found.usage = read_usage(groq.get("usage")) if isinstance(groq, dict) else None
    timings = value.get("timings")
    if found.usage is None and isinstance(timings, dict):
        found.usage = _usage_of_timings(timings)


def _read_choice(position: int, choice: dict[str, object], found: _Found) -> None:
    index = _count(choice.get("index"))
    index = position if index is None else index
    found.choices.append(index)
    error = read_error({"error": choice.get("error")})
    if error is not None and found.error is None:
        found.error = cut(error)
    reason = choice.get("finish_reason")
    if isinstance(reason, dict):  # SGLang's own form
        reason = reason.get("type")
    if isinstance(reason, str) and reason:
        found.end_choice(index, reason)
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
    if found.usage is None:
        found.usage = read_usage(choice.get("usage"))  # Moonshot's place for it


def _read_delta(delta: dict[str, object], found: _Found) -> None:
    content = delta.get("content")
    for part in content if isinstance(content, list) else ():  # Mistral's typed parts
        if isinstance(part, dict):
            _read_part(part, found)
    found.add_text(CH_CONTENT, content)
    # vLLM says `reasoning`, SGLang, llama.cpp and LiteLLM `reasoning_content`; a gateway that gives both
    # repeats itself.
    found.add_text(CH_REASONING, delta.get("reasoning_content") or delta.get("reasoning"))
    found.add_text(CH_REFUSAL, delta.get("refusal"))
    calls = delta.get("tool_calls")
    pieces = [call.get("function") for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    for function in (*pieces, delta.get("function_call")):
        if isinstance(function, dict):
            found.add_text(CH_TOOL, function.get("name"))
            found.add_text(CH_TOOL, function.get("arguments"))


def _read_part(part: dict[str, object], found: _Found) -> None:
    """A part of a content list: {"type": "text", "text": ..} or {"type": "thinking", "thinking": [parts]}."""
    thinking = part.get("thinking")
    for piece in thinking if isinstance(thinking, list) else (thinking,):
        found.add_text(CH_REASONING, piece.get("text") if isinstance(piece, dict) else piece)
    found.add_text(CH_REASONING if part.get("type") == "reasoning" else CH_CONTENT, part.get("text"))


def _usage_of_timings(timings: dict[str, object]) -> Usage | None:
    """llama.cpp counts in its `timings` too, also where no usage was asked for."""
    completion = _count(timings.get("predicted_n"))
    if completion is None:
        return None
    fresh, cached = _count(timings.get("prompt_n")), _count(timings.get("cache_n"))
    return Usage(None if fresh is None else fresh + (cached or 0), completion, None, cached)


# ---- /v1/responses

_RESPONSES_DELTAS: Final = {
    "output_text.delta": CH_CONTENT,
    "reasoning_text.delta": CH_REASONING,
    "reasoning_summary_text.delta": CH_REASONING,
    "reasoning.delta": CH_REASONING,
    "reasoning_summary.delta": CH_REASONING,
    "function_call_arguments.delta": CH_TOOL,
    "custom_tool_call_input.delta": CH_TOOL,
    "mcp_call_arguments.delta": CH_TOOL,
    "code_interpreter_call_code.delta": CH_TOOL,
    "refusal.delta": CH_REFUSAL,
}
_RESPONSES_ENDS: Final = ("completed", "incomplete", "failed", "cancelled")


def _read_responses(kind: str, value: dict[str, object], found: _Found) -> None:
    """An event of OpenAI's Responses API, `kind` without its `response.`.

    The `.done` events say again what the deltas said.
    """
    channel = _RESPONSES_DELTAS.get(kind)
    if channel is not None:
        found.be_only_choice()
        delta = value.get("delta")
        found.add_text(channel, delta.get("text") if isinstance(delta, dict) else delta)
        logprobs = value.get("logprobs")
        if isinstance(logprobs, list) and logprobs:  # [] where none were asked for
            found.logprobs = len(logprobs)
    elif kind == "output_item.added":
        found.be_only_choice()
        item = value.get("item")
        if isinstance(item, dict) and str(item.get("type")).endswith("_call"):
            found.add_text(CH_TOOL, item.get("name"))
    elif kind in ("content_part.added", "reasoning_part.added", "reasoning_summary_part.added"):
        found.be_only_choice()
        part = value.get("part")
        if isinstance(part, dict):
            found.add_text(CH_CONTENT if part.get("type") == "output_text" else CH_REASONING, part.get("text"))
    answer = value.get("response")
    if not isinstance(answer, dict):
        answer = {}
    found.add_id(answer.get("id"))
    found.usage = read_usage(answer.get("usage"))
    if kind not in _RESPONSES_ENDS:
        return
    found.ends = True
    status = answer.get("status")
    if found.error is None and (kind in ("failed", "cancelled") or status in ("failed", "cancelled")):
        found.error = cut(read_error({"error": answer.get("error")}) or f"the server ends with response.{kind}")
        return
    found.be_only_choice()
    details = answer.get("incomplete_details")
    reason = details.get("reason") if isinstance(details, dict) else None
    found.end_choice(0, reason if isinstance(reason, str) and reason else kind)


# ---- /v1/messages


def _read_messages(kind: str, value: dict[str, object], found: _Found) -> None:
    """An event of Anthropic's Messages API; `ping`, `content_block_stop` and unknown ones say nothing."""
    if kind == "message_start":
        found.be_only_choice()
        message = value.get("message")
        if isinstance(message, dict):
            found.add_id(message.get("id"))
            found.usage, found.usage_grows = read_usage(message.get("usage")), True
    elif kind == "content_block_start":
        found.be_only_choice()
        block = value.get("content_block")
        if isinstance(block, dict):
            _read_block(block, found)
            found.add_text(CH_TOOL, block.get("name"))
    elif kind == "content_block_delta":
        found.be_only_choice()
        delta = value.get("delta")
        if isinstance(delta, dict):
            _read_block(delta, found)
    elif kind == "message_delta":
        found.be_only_choice()
        found.usage, found.usage_grows = read_usage(value.get("usage")), True
        delta = value.get("delta")
        reason = delta.get("stop_reason") if isinstance(delta, dict) else None
        if isinstance(reason, str) and reason:
            found.end_choice(0, reason)
    elif kind == "message_stop":
        found.ends = True


def _read_block(block: dict[str, object], found: _Found) -> None:
    """Text of a content block or of a delta of one."""
    found.add_text(CH_CONTENT, block.get("text"))
    found.add_text(CH_REASONING, block.get("thinking"))
    found.add_text(CH_TOOL, block.get("partial_json"))


# ---- counts


def _logprobs(logprobs: object) -> int | None:
    """How many tokens a choice's logprobs list: chat's `content`, completions' `tokens`."""
    if not isinstance(logprobs, dict):
        return None
    for key in ("content", "tokens"):
        listed = logprobs.get(key)
        if isinstance(listed, list):
            return len(listed)
    return None


def _either(value: dict[str, object], *names: str) -> object:
    """The first of these that is there and not null."""
    return next((value[name] for name in names if value.get(name) is not None), None)


def _count(value: object) -> int | None:
    """A count as an int; None if it is none (missing, negative, a bool, a string, absurd)."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _COUNT_LIMIT:
        return None
    return value
