"""The plan of a run: everything that is sent, decided before the clock starts."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import orjson

from fastload.errors import PlanError
from fastload.plan.levels import Level
from fastload.plan.prompts import Lengths

ENDPOINTS = ("chat", "completions", "responses", "messages")
# What each calls the longest answer. OpenAI's newer chat models take max_completion_tokens alone: see `without`.
LIMIT_FIELDS = {
    "chat": "max_tokens",
    "completions": "max_tokens",
    "responses": "max_output_tokens",
    "messages": "max_tokens",
}


@dataclass(frozen=True, slots=True)
class Plan:
    """What is asked of the server, at which levels; the same plan gives the same bytes on every machine.

    `isl` and `osl` are tokens of input and output. `sampling` holds only fields the user gave; `extra_body`
    is merged last and may override anything.
    """

    levels: tuple[Level, ...]
    model: str
    endpoint: str  # one of ENDPOINTS
    isl: int
    osl: int
    ignore_eos: bool
    seed: int
    sampling: dict[str, object]
    extra_body: dict[str, object]
    lengths: Lengths
    include_usage: bool = True
    continuous_usage: bool = False  # asked for only where events hold several tokens: it costs the server something
    left_out: tuple[str, ...] = ()  # fields the server refused, in the order in which it did: see `without`

    @property
    def asks_usage(self) -> bool:
        """Whether `stream_options` is sent: responses and messages tell their usage unasked, and know no such field."""
        return self.include_usage and self.endpoint in ("chat", "completions")

    def body(self, request: int) -> bytes:
        """JSON of request number `request` (0 .. over the whole run); deterministic, distinct for each."""
        return encode(self, self.lengths.prompt(request))

    def prompt(self, request: int) -> str:
        """The prompt in that body."""
        return self.lengths.prompt(request)

    def prompt_tokens_planned(self, request: int) -> int | None:
        """Tokens of that prompt as the server will count them; None where it tells no counts."""
        del request  # one length for all in this version of the plan
        return self.lengths.planned

    def describe(self) -> dict[str, object]:
        """The plan for the manifest: plain JSON values, no prompts."""
        learned = self.lengths
        return {
            "load_kind": "concurrency",
            "levels": [
                {
                    "index": level.index,
                    "concurrency": level.concurrency,
                    "measured": level.measured,
                    "duration_s": level.duration_s,
                    "warmup": level.warmup,
                }
                for level in self.levels
            ],
            "model": self.model,
            "endpoint": self.endpoint,
            "isl": self.isl,
            "osl": self.osl,
            "ignore_eos": self.ignore_eos,
            "seed": self.seed,
            "sampling": dict(self.sampling) or "server default",
            "extra_body": dict(self.extra_body),
            "include_usage": self.include_usage,
            "continuous_usage_stats": self.continuous_usage,
            "left_out": list(self.left_out),
            "prompts": {
                "source": "fastload texts",
                "tokens_planned": learned.planned,
                "lengths_by": learned.method,
                "template_tokens": learned.overhead,
                "texts_counted": learned.probes,
                "additive": learned.additive,
                "corrected": len(learned.corrections),
                "notice": learned.notice,
            },
        }


def question(endpoint: str, prompt: str) -> dict[str, object]:
    """The body fields that hold the prompt."""
    if endpoint == "completions":
        return {"prompt": prompt}
    if endpoint == "responses":
        return {"input": prompt}
    return {"messages": [{"role": "user", "content": prompt}]}


def encode(plan: Plan, prompt: str, max_tokens: int | None = None) -> bytes:
    """The request body for `prompt`; `max_tokens` in place of the plan's for warm-up requests."""
    fields: dict[str, object] = {"model": plan.model, **question(plan.endpoint, prompt)}
    fields[limit_field(plan)] = plan.osl if max_tokens is None else max_tokens
    fields["stream"] = True
    if plan.asks_usage:
        fields["stream_options"] = {"include_usage": True}
        if plan.continuous_usage:
            fields["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    if plan.ignore_eos:
        fields["ignore_eos"] = True
    if plan.sampling:
        fields.update(plan.sampling)
        if plan.endpoint == "messages" and "stop" in fields:
            fields["stop_sequences"] = fields.pop("stop")
    if plan.extra_body:
        fields.update(plan.extra_body)
    if plan.left_out:
        for name in plan.left_out:
            fields.pop(name, None)
    return orjson.dumps(fields)


def limit_field(plan: Plan) -> str:
    """The name under which the longest answer is sent."""
    name = LIMIT_FIELDS[plan.endpoint]
    return "max_completion_tokens" if name in plan.left_out else name


# ---- fields a server refuses

# Asked for by fastload or for the sake of equal lengths: without them a run is still a run, and what came is counted.
_DISPENSABLE = ("continuous_usage_stats", "stream_options", "ignore_eos", "min_tokens", "max_completion_tokens")
_NAMED = re.compile(rf"(?<![A-Za-z0-9_])({'|'.join((*_DISPENSABLE, 'max_tokens'))})(?![A-Za-z0-9_])")
_OLDER = re.compile(r"(?<![A-Za-z0-9_])max_tokens(?![A-Za-z0-9_])")
_REFUSES = re.compile(
    r"unsupported|not supported|n[o']t support|unknown|unrecogni[sz]ed|not recogni[sz]ed|unexpected|not permitted"
    r"|not allowed|only allowed|forbidden|\bextra\b|extra_|additional|not accept|no such|not available|not a valid"
    r"|invalid (field|param|arg|key|request arg)|has no (field|attribute|param)|deprecated|can ?not be (used|set)",
    re.IGNORECASE,
)
# The field is known then, and its value is at fault: to leave it out would hide that.
_VALUE_AT_FAULT = re.compile(
    r"too (large|long|big|high|many|small|low)|maximum|context (length|window|size)|greater than|less than|at least"
    r"|at most|exceed|out of range|minimum|must be (a|an|in|between|positive|>|<|=)",
    re.IGNORECASE,
)


def refused_field(error: str) -> str | None:
    """The field that a server's message of a 4xx refuses to know, of those a run can do without; else None."""
    found = _NAMED.search(error)
    if found is None or not _REFUSES.search(error) or _VALUE_AT_FAULT.search(error):
        return None
    # A run sends max_completion_tokens only after max_tokens was refused, so beside it that one is just the hint.
    return "max_tokens" if found[1] == "max_completion_tokens" and _OLDER.search(error) else found[1]


def without(plan: Plan, field: str) -> Plan:
    """The plan that no longer sends `field`; the very same plan where nothing can be left out (any more).

    `max_tokens` and `max_completion_tokens` stand in for each other on chat, each at most once.
    """
    if field in plan.left_out:
        return plan
    fewer = replace(plan, left_out=(*plan.left_out, field))
    match field:
        case "continuous_usage_stats":
            return replace(fewer, continuous_usage=False) if plan.continuous_usage else plan
        case "stream_options":
            return replace(fewer, include_usage=False, continuous_usage=False) if plan.include_usage else plan
        case "ignore_eos":
            return replace(fewer, ignore_eos=False) if plan.ignore_eos or field in plan.extra_body else plan
        case "min_tokens":
            return fewer if field in plan.extra_body else plan
        case "max_tokens":
            return fewer if plan.endpoint == "chat" and "max_completion_tokens" not in plan.left_out else plan
    return plan


def build(
    levels: Sequence[Level],
    model: str,
    endpoint: str,
    osl: int,
    lengths: Lengths,
    *,
    ignore_eos: bool = False,
    sampling: Mapping[str, object] | None = None,
    extra_body: Mapping[str, object] | None = None,
    include_usage: bool = True,
    max_model_len: int | None = None,
) -> Plan:
    """Check the parts against each other and put them together; `isl` and `seed` are those of `lengths`.

    `max_model_len`: tokens of prompt and answer together that the model takes, where the server says so.
    Raises PlanError naming the flag at fault.
    """
    if endpoint not in ENDPOINTS:
        raise PlanError(f"--endpoint {endpoint}: give one of {', '.join(ENDPOINTS)}")
    if osl < 1:
        raise PlanError(f"--osl {osl}: an answer has at least 1 token")
    check_room(lengths.isl, osl, max_model_len)
    plan = Plan(
        levels=tuple(levels),
        model=model,
        endpoint=endpoint,
        isl=lengths.isl,
        osl=osl,
        ignore_eos=ignore_eos,
        seed=lengths.seed,
        sampling=_json_fields("a sampling flag", sampling),
        extra_body=_json_fields("--extra-body", extra_body),
        lengths=lengths,
        include_usage=include_usage,
    )
    planned = sum((level.measured or 0) + level.warmup + level.concurrency for level in plan.levels)
    if planned > lengths.distinct:
        raise PlanError(
            f"--isl {lengths.isl} leaves room for {lengths.distinct} different prompts and {planned} are "
            "planned; give a larger --isl or fewer requests"
        )
    return plan


def check_room(isl: int, osl: int, max_model_len: int | None) -> None:
    """PlanError where prompt and answer together are longer than the model takes (None: it does not say).

    To be asked before `fit`, which would send prompts that the server refuses.
    """
    if max_model_len is not None and isl + osl > max_model_len:
        raise PlanError(
            f"--isl {isl} and --osl {osl} make {isl + osl} tokens, more than the {max_model_len} that this "
            "server's model takes"
        )


def _json_fields(flag: str, fields: Mapping[str, object] | None) -> dict[str, object]:
    """A copy, after a look that JSON can hold it (orjson would turn NaN into null without a word)."""
    copied = dict(fields or {})
    for name, value in copied.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise PlanError(f"{flag} {name}={value}: not a number that JSON can hold")
    try:
        orjson.dumps(copied)
    except (TypeError, ValueError) as error:
        raise PlanError(f"{flag}: not JSON: {error}") from None
    return copied
