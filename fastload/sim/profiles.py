"""What a profile says of an engine, read from TOML: its scheduler, and its times as knots. Pure.

A knot is a time at a batch. Between two knots the time is linear in log2(batch); beyond the last it grows in proportion
to the batch as between the last two, and never falls.
"""

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from fastload.errors import PlanError


@dataclass(frozen=True, slots=True)
class Knots:
    """Milliseconds by batch; the batches rise."""

    batch: tuple[int, ...]
    ms: tuple[float, ...]

    def at(self, batch: int) -> float:
        """The time of a batch, in ms."""
        sizes, times = self.batch, self.ms
        if batch <= sizes[0]:
            return times[0]
        for right in range(1, len(sizes)):
            if batch <= sizes[right]:
                left = right - 1
                share = math.log2(batch / sizes[left]) / math.log2(sizes[right] / sizes[left])
                return times[left] + share * (times[right] - times[left])
        if len(sizes) == 1:
            return times[0]
        slope = (times[-1] - times[-2]) / (sizes[-1] - sizes[-2])
        return times[-1] + max(slope, 0.0) * (batch - sizes[-1])


@dataclass(frozen=True, slots=True)
class Scheduler:
    """How requests get into the batch.

    max_num_seqs: sequences that run at once, at most. max_batched_tokens: prompt tokens of one step, at most; a longer
    prompt is cut if `chunked`, else it has a step of its own. mixed: running sequences decode in a step that prefills
    too (vLLM); else they wait for it (SGLang). late_results: what a step made leaves when the next one has been
    launched, and launching a prefill takes as long as the prefill (SGLang's overlap scheduler; not if mixed).
    front_ms: what the front end takes for a request, one after the other, before the engine knows it. refill: a batch
    that was full takes new sequences only when so many places are free. prefill_gap_ms: while others
    decode, so long from one prefill to the next.
    """

    max_num_seqs: int = 1024
    max_batched_tokens: int = 8192
    chunked: bool = True
    mixed: bool = True
    late_results: bool = False
    front_ms: float = 0.0
    refill: int = 1
    prefill_gap_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Prefill:
    """A step that prefills takes `knots` at the number of sequences in it (those that decode or wait meanwhile too),
    and `token_us` for each prompt token that is not in the cache. `jitter` is the deviation of its logarithm."""

    knots: Knots
    token_us: float = 0.0
    jitter: float = 0.0


@dataclass(frozen=True, slots=True)
class Decode:
    """A decode step takes `knots` at the number of sequences that decode."""

    knots: Knots
    jitter: float = 0.0


@dataclass(frozen=True, slots=True)
class Speculation:
    """Drafted tokens a step, and how many are taken.

    acceptance: chance of each position, given that those before it were taken. spread: deviation, over requests, of the
    logit of that chance. knots: what drafting and verifying add to a decode step. single_events: accepted tokens leave
    one by one in a burst (llama.cpp), else all in one event (vLLM, SGLang).
    """

    acceptance: tuple[float, ...]
    knots: Knots
    spread: float = 0.0
    single_events: bool = False

    @property
    def draft_tokens(self) -> int:
        return len(self.acceptance)


@dataclass(frozen=True, slots=True)
class Memory:
    """KV memory in blocks; `prefix`: blocks of prompts are kept and found again."""

    blocks: int = 1 << 20
    block_tokens: int = 16
    prefix: bool = True


@dataclass(frozen=True, slots=True)
class Profile:
    """One engine. `source` says where its figures are from."""

    name: str
    source: str
    prefill: Prefill
    decode: Decode
    scheduler: Scheduler = field(default_factory=Scheduler)
    speculation: Speculation | None = None
    memory: Memory = field(default_factory=Memory)
    stream_interval: int = 1


def names() -> tuple[str, ...]:
    """Profiles that come with the package."""
    return tuple(sorted(path.name[:-5] for path in _folder().iterdir() if path.name.endswith(".toml")))


@cache
def load(name: str) -> Profile:
    """The profile of that name, or of the file `name` when it ends in .toml. Raises `PlanError`."""
    if name.endswith(".toml"):
        try:
            text = Path(name).read_text()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no text"
            raise PlanError(f"profile {name}: cannot be read: {reason}") from None
    elif name in names():
        text = (_folder() / f"{name}.toml").read_text()
    else:
        raise PlanError(f"profile {name!r}: not known; give {', '.join(names())}, or a .toml file")
    try:
        return parse(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise PlanError(f"profile {name}: no TOML: {error}") from None
    except PlanError as error:
        raise PlanError(f"profile {name}: {error}") from None


def parse(said: Mapping[str, Any]) -> Profile:
    """The profile in a TOML document. Raises `PlanError` that names the field."""
    if _table(said, "scheduler", {}).get("late_results") is True and said["scheduler"].get("mixed", True) is True:
        raise PlanError("scheduler.late_results: only with mixed = false")
    known = {"name", "source", "scheduler", "prefill", "decode", "speculation", "memory", "stream_interval"}
    _no_others(said, known, "")
    prefill, decode = _table(said, "prefill"), _table(said, "decode")
    _no_others(prefill, {"batch", "ms", "token_us", "jitter"}, "prefill.")
    _no_others(decode, {"batch", "ms", "jitter"}, "decode.")
    return Profile(
        name=_text(said, "name"),
        source=_text(said, "source"),
        prefill=Prefill(
            _knots(prefill, "prefill"), _number(prefill, "token_us", "prefill"), _number(prefill, "jitter", "prefill")
        ),
        decode=Decode(_knots(decode, "decode"), _number(decode, "jitter", "decode")),
        scheduler=_filled(Scheduler, _table(said, "scheduler", {}), "scheduler"),
        speculation=_speculation(said["speculation"]) if "speculation" in said else None,
        memory=_filled(Memory, _table(said, "memory", {}), "memory"),
        stream_interval=_whole(said.get("stream_interval", 1), "stream_interval"),
    )


def _speculation(said: Mapping[str, Any]) -> Speculation:
    _no_others(said, {"acceptance", "batch", "ms", "spread", "single_events"}, "speculation.")
    chances = said.get("acceptance")
    if not isinstance(chances, list) or not chances or not all(_is_number(one) and 0 < one < 1 for one in chances):
        raise PlanError(f"speculation.acceptance {chances!r}: must be a list of chances between 0 and 1")
    return Speculation(
        tuple(float(one) for one in chances),
        _knots(said, "speculation"),
        _number(said, "spread", "speculation"),
        said.get("single_events", False) is True,
    )


def _filled(kind: type[Any], said: Mapping[str, Any], where: str) -> Any:
    """A dataclass of counts, switches and times, filled from a table."""
    fields = {name: type(one.default) for name, one in kind.__dataclass_fields__.items()}
    _no_others(said, set(fields), f"{where}.")
    values: dict[str, object] = {}
    for name, value in said.items():
        if fields[name] is bool:
            if not isinstance(value, bool):
                raise PlanError(f"{where}.{name} {value!r}: must be true or false")
            values[name] = value
        elif fields[name] is int:
            values[name] = _whole(value, f"{where}.{name}")
        else:
            values[name] = _number(said, name, where)
    return kind(**values)


def _knots(said: Mapping[str, Any], where: str) -> Knots:
    sizes, times = said.get("batch"), said.get("ms")
    if not isinstance(sizes, list) or not sizes or not all(type(one) is int and one > 0 for one in sizes):
        raise PlanError(f"{where}.batch {sizes!r}: must be a list of whole numbers from 1")
    if sorted(set(sizes)) != sizes:
        raise PlanError(f"{where}.batch {sizes!r}: must rise")
    if not isinstance(times, list) or len(times) != len(sizes) or not all(_is_number(ms) and ms >= 0 for ms in times):
        raise PlanError(f"{where}.ms {times!r}: must be a list of milliseconds, one for each batch")
    return Knots(tuple(sizes), tuple(float(one) for one in times))


def _table(said: Mapping[str, Any], name: str, default: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
    table = said.get(name, default)
    if not isinstance(table, dict):
        raise PlanError(f"[{name}]: this table is needed")
    return table


def _text(said: Mapping[str, Any], name: str) -> str:
    value = said.get(name)
    if not isinstance(value, str) or not value:
        raise PlanError(f"{name}: a text is needed")
    return value


def _number(said: Mapping[str, Any], name: str, where: str) -> float:
    value = said.get(name, 0.0)
    if not _is_number(value) or value < 0:
        raise PlanError(f"{where}.{name} {value!r}: must be a number from 0")
    return float(value)


def _whole(value: object, where: str) -> int:
    if type(value) is not int or value < 1:
        raise PlanError(f"{where} {value!r}: must be a whole number from 1")
    return value


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _no_others(said: Mapping[str, Any], known: set[str], where: str) -> None:
    for name in said:
        if name not in known:
            raise PlanError(f"{where}{name}: not known; known are {', '.join(sorted(known))}")


def _folder() -> Any:
    return resources.files("fastload.sim") / "profiles"
