"""What another tool's result file tells, in our names: only what stands in it, never a figure it does not have.

A field that is no number, or no list of them, is a PlanError that names the file and the field.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import orjson

from fastload.errors import PlanError

DISTRIBUTIONS: Final = ("ttft_ms", "ttfa_ms", "itl_ms", "icl_ms", "tps", "decode_tps", "latency_s")
STATISTICS: Final = ("mean", "p10", "p50", "p90", "p99", "n")
SCALARS: Final = (
    "aggregate_tok_s",
    "system_rps",
    "stream_rps",
    "window_s",
    "measured",
    "ok",
    "failed",
    "prompt_tokens_mean",
    "completion_tokens_mean",
    "in_flight_mean",
)

_LARGEST_BYTES: Final = 2 * 10**9


@dataclass(frozen=True, slots=True)
class ToldLevel:
    """One level as told. level: its concurrency. figures: of a distribution {statistic: value}, of others the value.

    samples: values per request behind a distribution, where the file has them.
    """

    level: int
    figures: Mapping[str, Any]
    samples: Mapping[str, Sequence[float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Told:
    """One result file. tool: a key of the definitions its figures are by. facts: what it says of itself, plain values.

    lacks: figures of DISTRIBUTIONS and SCALARS that no level has, with those statistics of others that none has. What
    values per request are listed of lacks nothing.
    simulated: None where it does not say.
    """

    tool: str
    file: str
    model: str | None
    levels: tuple[ToldLevel, ...]
    facts: Mapping[str, Any]
    simulated: bool | None = None

    @property
    def lacks(self) -> tuple[str, ...]:
        """Names of what the file does not tell."""
        missing: list[str] = []
        for name in DISTRIBUTIONS:
            there = {one for level in self.levels for one in known(level.figures.get(name))}
            if any(level.samples.get(name) for level in self.levels):
                continue
            if not there:
                missing.append(name)
            missing += [f"{name}.{one}" for one in STATISTICS if there and one not in there]
        missing += [name for name in SCALARS if all(level.figures.get(name) is None for level in self.levels)]
        return tuple(missing)


def known(distribution: Mapping[str, Any] | None) -> set[str]:
    """Return the statistics of a distribution that are there."""
    return {name for name, value in (distribution or {}).items() if value is not None}


def bad(file: Path, what: str) -> PlanError:
    """Return the error of a file that is not what it should be."""
    return PlanError(f"{file}: {what}")


def read_bytes(file: Path) -> bytes:
    """Return the content of a file. PlanError names it when it cannot be read, is empty or absurdly large."""
    try:
        if file.stat().st_size > _LARGEST_BYTES:
            raise bad(file, f"is larger than {_LARGEST_BYTES // 10**9} GB: not a result file")
        content = file.read_bytes()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise bad(file, f"cannot be read: {reason}") from None
    if not content.strip():
        raise bad(file, "is empty")
    return content


def read_object(file: Path, text: bytes, where: str = "") -> dict[str, Any]:
    """Return JSON text as an object; `where` names the line."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise bad(file, f"{where}is not JSON: {error.msg} (line {error.lineno}, column {error.colno})") from None
    if not isinstance(value, dict):
        raise bad(file, f"{where}is JSON, but no object")
    return value


def read_rows(file: Path) -> list[dict[str, str | None]]:
    """Return a CSV with a heading as rows."""
    try:
        text = read_bytes(file).decode("utf-8-sig")
        rows: list[dict[str, Any]] = list(csv.DictReader(text.splitlines(), strict=True))
    except UnicodeDecodeError:
        raise bad(file, "is not a text in UTF-8") from None
    except csv.Error as error:
        raise bad(file, f"is not a CSV: {error}") from None
    if not rows:
        raise bad(file, "has a heading and no row")
    return rows


def number(file: Path, name: str, value: object, *, needed: bool = False, lowest: float = 0.0) -> float | None:
    """Return a field as a finite number from `lowest` on; None (only unless `needed`) for null or nothing."""
    if value is None or value == "":
        if needed:
            raise bad(file, f"field {name!r} is missing")
        return None
    found = math.nan
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            found = float(value)
        except ValueError:
            found = math.nan
    if not math.isfinite(found) or found < lowest:
        shown = repr(value) if len(repr(value)) <= 60 else repr(value)[:57] + "..."
        raise bad(file, f"field {name!r} is {shown}: not a number from {lowest:g} on")
    return found


def whole(file: Path, name: str, value: object, *, needed: bool = False, lowest: int = 0) -> int | None:
    """Return a field as a whole number from `lowest` on."""
    found = number(file, name, value, needed=needed, lowest=lowest)
    if found is not None and found != int(found):
        raise bad(file, f"field {name!r} is {found:g}: not a whole number")
    return None if found is None else int(found)


def numbers(file: Path, name: str, value: object) -> list[float] | None:
    """Return a field as a list of finite numbers; None where it is not there."""
    if value is None:
        return None
    if not isinstance(value, list):
        raise bad(file, f"field {name!r} is not a list")
    found = [number(file, f"{name}[{at}]", each, needed=True) for at, each in enumerate(value)]
    return [each for each in found if each is not None]
