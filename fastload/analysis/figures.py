"""The figures of a summary by the names people give them: where each stands, its unit, and which way is better."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastload.analysis.levels import LevelFigures

STATISTICS = ("mean", "p10", "p50", "p90", "p99")
"""Of a distribution; p10 is the mirrored low tail (percentiles.py)."""

LOWER, HIGHER, NEITHER = "lower", "higher", "neither"


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure. key: in summary.json (a level's, or capacity's if `of_run`). better: "lower", "higher" or "neither".

    share: it is a part of a whole, so that changes are counted in points, not in per cent of the figure.
    """

    name: str
    key: str
    unit: str
    better: str
    distribution: bool = False
    of_run: bool = False
    share: bool = False


FIGURES: Mapping[str, Figure] = {
    figure.name: figure
    for figure in (
        Figure("ttft", "ttft_ms", "ms", LOWER, distribution=True),
        Figure("ttfa", "ttfa_ms", "ms", LOWER, distribution=True),
        Figure("itl", "itl_ms", "ms", LOWER, distribution=True),
        Figure("icl", "icl_ms", "ms", LOWER, distribution=True),
        Figure("tps", "tps", "tok/s", HIGHER, distribution=True),
        Figure("decode_tps", "decode_tps", "tok/s", HIGHER, distribution=True),
        Figure("latency", "latency_s", "s", LOWER, distribution=True),
        Figure("response_latency", "response_latency_s", "s", LOWER, distribution=True),
        Figure("aggregate", "aggregate_tok_s", "tok/s", HIGHER),
        Figure("rps", "system_rps", "requests/s", HIGHER),
        Figure("stream_rps", "stream_rps", "requests/s", HIGHER),
        Figure("goodput", "goodput", "", HIGHER, share=True),
        Figure("goodput_rps", "goodput_rps", "requests/s", HIGHER),
        Figure("failure_rate", "failure_rate", "", LOWER, share=True),
        Figure("failed", "failed", "requests", LOWER),
        Figure("ok", "ok", "requests", NEITHER),
        Figure("in_flight", "in_flight_mean", "requests", NEITHER),
        Figure("tokens_per_event", "tokens_per_event", "tokens", NEITHER),
        Figure("completion_tokens", "completion_tokens_mean", "tokens", NEITHER),
        Figure("users", "users", "users", HIGHER, of_run=True),
        Figure("c_max", "c_max", "", HIGHER, of_run=True),
    )
}


def by_name(name: str) -> Figure | None:
    """Return the figure of this name or summary key; None without one."""
    return FIGURES.get(name) or next((one for one in FIGURES.values() if one.key == name), None)


def of_level(level: LevelFigures, figure: Figure, statistic: str | None) -> float | None:
    """Return the value of a level's figure; None where it was not measured."""
    if figure.key == "failure_rate":
        return level["failed"] / level["measured"] if level.get("measured") and level["failed"] is not None else None
    value: Any = level.get(figure.key)
    if figure.distribution:
        value = (value or {}).get(statistic)
    return None if value is None else float(value)
