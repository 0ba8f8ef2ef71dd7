"""What in a table of levels asks for an explanation, found by rule: facts with their figures, no sentences."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from fastload.analysis import percentiles
from fastload.analysis.configuration import Configuration, Level
from fastload.analysis.slo import Slo
from fastload.analysis.speculation import decoding_at_once, labels

JUMP = 3.0
"""A metric that changes by more than this between levels a factor of 2 apart (or less) jumps."""

ABOVE = 0.002
"""A mean may be so far above P90, as a share: in lockstep all values are the same but for a few microseconds."""

INCONSISTENT = 0.02
"""TTFT + (n - 1) x ITL may be so far from the latency, as a share (rounding and spread make up to 1.4 %)."""

OVERSTATED = 0.10
"""Mean TPS x concurrency may be so far above tokens / time before it is said."""

FLAT, CAPPED = 1.1, 0.75
"""A cap: decoding streams grow by less than the first while the load grows by half or more, and make up less than the
second of the load."""

OVER_FLAG = 1.05
"""More streams than --max-num-seqs times this cannot be the spread of the means."""

_JUMPING = (("ttft_ms", "mean"), ("itl_ms", "mean"), ("tps", "mean"), ("latency_s", "mean"))
_UPPER = ("ttft_ms", "itl_ms", "latency_s")


@dataclass(frozen=True, slots=True)
class Fact:
    """One thing found. kind: a key of KINDS. levels: where, ascending. figures: the numbers it rests on, by name."""

    kind: str
    configuration: str
    levels: tuple[int, ...]
    figures: Mapping[str, Any]


KINDS: Mapping[str, str] = {
    "peak": "level of the highest aggregate output; figures: aggregate (its key), tok_s",
    "jump": "a metric changes more than 3 x between neighbours; figures: metric, from, to, ratio",
    "aggregate_falls": "aggregate output falls while the load at least doubles; figures: aggregate, from, to, ratio",
    "mean_above_p90": "a few requests outweigh all others; figures: metric, mean, p90, n, largest_at_least",
    "table_breaks": "TTFT + tokens_after_first (n - 1) x ITL is not the latency; figures: these, latency_s, error",
    "admission_cap": "decoding streams stop growing while the load grows; figures: decoding (per level), cap",
    "flag_not_in_force": "more streams decode than --max-num-seqs lets in; figures: max_num_seqs, decoding",
    "flag_never_reached": "the load never came near --max-num-seqs; figures: max_num_seqs, decoding",
    "aggregate_overstated": "mean TPS x c above c x n / L; figures: kimi_report_tok_s, tok_s, ratio",
    "upper_tail_passes": "the upper P90 of TPS meets a limit that the mean misses; figures: p90, mean, limit",
}
"""Kind -> what it means and which figures it has."""


def anomalies(configurations: Sequence[Configuration], limits: Slo) -> list[Fact]:
    """Return what is found in each configuration, in the order of KINDS."""
    return [fact for one in configurations for fact in _of(one, limits)]


def _of(one: Configuration, limits: Slo) -> Iterator[Fact]:
    levels = list(one.levels.values())
    name = one.short_name
    yield from _aggregate(name, levels, limits)
    for low, high in pairwise(levels):
        yield from _jumps(name, low, high)
    for level in levels:
        yield from _tail(name, level)
        yield from _consistency(name, level)
    yield from _admission(one, levels)
    for level in levels:
        yield from _overstated(name, level)
        yield from _upper_tail(name, level, limits)


def _aggregate(name: str, levels: Sequence[Level], limits: Slo) -> Iterator[Fact]:
    """Peak and falls, of the aggregate the convention means; of a table that has only the source's, of that."""
    key = limits.rules.aggregate
    if all(level.figures[key] is None for level in levels):
        key = "aggregate_tok_s_kimi_report"
    known = [(level.level, level.figures[key]) for level in levels if level.figures[key] is not None]
    if len(known) < 2:
        return
    peak, highest = max(known, key=lambda pair: pair[1])
    yield Fact("peak", name, (peak,), {"aggregate": key, "tok_s": highest})
    for (a, before), (b, after) in pairwise(known):
        if after < before and b >= 2 * a:
            figures = {"aggregate": key, "from": before, "to": after, "ratio": after / before}
            yield Fact("aggregate_falls", name, (a, b), figures)


def _jumps(name: str, low: Level, high: Level) -> Iterator[Fact]:
    allowed = JUMP ** max(1.0, math.log2(high.level / low.level))
    for metric, statistic in _JUMPING:
        a, b = low.figures[metric][statistic], high.figures[metric][statistic]
        if not a or not b or max(a / b, b / a) <= allowed:
            continue
        yield Fact("jump", name, (low.level, high.level), {"metric": metric, "from": a, "to": b, "ratio": b / a})


def _tail(name: str, level: Level) -> Iterator[Fact]:
    for metric in _UPPER:
        told = level.figures[metric]
        mean, p90, n = told["mean"], told["p90"], told["n"]
        if mean is None or p90 is None or mean <= p90 * (1 + ABOVE):
            continue
        figures = {"metric": metric, "mean": mean, "p90": p90, "n": n, "largest_at_least": _largest(mean, p90, n)}
        yield Fact("mean_above_p90", name, (level.level,), figures)


def _largest(mean: float, p90: float, n: int | None) -> float | None:
    """Return the least the largest value can be: up to the rank of P90 none is above P90, the rest share the sum."""
    if not n or (rest := n - percentiles.rank(n, 90)) < 1:
        return None
    return (n * mean - (n - rest) * p90) / rest


def _consistency(name: str, level: Level) -> Iterator[Fact]:
    error = level.figures["checks"]["consistency_error"]
    if error is None or abs(error) <= INCONSISTENT:
        return
    figures = {key: level.figures[key]["mean"] for key in ("ttft_ms", "itl_ms", "latency_s")}
    after = level.figures["checks"]["tokens_after_first"]
    yield Fact("table_breaks", name, (level.level,), {**figures, "tokens_after_first": after, "error": error})


def _admission(one: Configuration, levels: Sequence[Level]) -> Iterator[Fact]:
    decoding = {level.level: at_once for level in levels if (at_once := decoding_at_once(level)) is not None}
    for (a, before), (b, after) in pairwise(decoding.items()):
        if b >= 1.5 * a and after < FLAT * before and after < CAPPED * b:
            found = {str(a): before, str(b): after}
            yield Fact("admission_cap", one.short_name, (a, b), {"decoding": found, "cap": max(before, after)})
    flag = max_num_seqs(one)
    if flag is None or not decoding:
        return
    over = {level: at_once for level, at_once in decoding.items() if at_once > OVER_FLAG * flag}
    for level, at_once in over.items():
        yield Fact("flag_not_in_force", one.short_name, (level,), {"max_num_seqs": flag, "decoding": at_once})
    highest, most = max(decoding.items(), key=lambda pair: pair[1])
    if not over and max(decoding) < flag:
        yield Fact("flag_never_reached", one.short_name, (highest,), {"max_num_seqs": flag, "decoding": most})


def max_num_seqs(one: Configuration) -> int | None:
    """Return the --max-num-seqs a configuration is labelled with; None without one that is a whole number."""
    text = labels(one).get("max_num_seqs", "")
    return int(text) if text.isdecimal() and int(text) > 0 else None


def _overstated(name: str, level: Level) -> Iterator[Fact]:
    """Set the source's aggregate beside c x n / L, which holds for any mix of requests (Little's law)."""
    theirs, latency = level.figures["aggregate_tok_s_kimi_report"], level.figures["latency_s"]["mean"]
    n = level.figures["completion_tokens_mean"]
    if theirs is None or not latency or not n:
        return
    ours = level.level * n / latency
    if theirs > (1 + OVERSTATED) * ours:
        figures = {"kimi_report_tok_s": theirs, "tok_s": ours, "ratio": theirs / ours}
        yield Fact("aggregate_overstated", name, (level.level,), figures)


def _upper_tail(name: str, level: Level, limits: Slo) -> Iterator[Fact]:
    told = level.figures["tps"]
    if told["p90"] is None or told["mean"] is None or not told["mean"] < limits.tps <= told["p90"]:
        return
    figures = {"p90": told["p90"], "mean": told["mean"], "limit": limits.tps}
    yield Fact("upper_tail_passes", name, (level.level,), figures)
