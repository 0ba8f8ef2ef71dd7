"""What speculative decoding is worth: a configuration with it against the same without, level by level."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from fastload.analysis import bootstrap
from fastload.analysis.configuration import Configuration, Level
from fastload.analysis.conventions import Convention

ITS_OWN = ("speculation", "draft_model", "max_num_seqs")
"""Labels in which the two of a pair may differ."""

WITHOUT = frozenset({"", "none", "no", "off", "false", "direct", "0"})
"""Values of the label `speculation` that mean none."""

RULE = (
    "speculation: mean TPS with it / without it, at equal concurrency; 95 % intervals by bootstrap of the requests of"
    " both (seeded), if independent; break-even where the ratio falls through 1, interpolated over log2 of the load,"
    " and the level nearest to 1"
)


def labels(one: Configuration) -> dict[str, str]:
    """Return a configuration's labels by our spelling of their names: lower case, underscores."""
    return {key.lower().replace("-", "_"): value for key, value in one.labels.items()}


def speculates(one: Configuration) -> bool:
    """Say whether its label `speculation` names any."""
    return labels(one).get("speculation", "").strip().lower() not in WITHOUT


def pairs(configurations: Sequence[Configuration]) -> list[tuple[Configuration, Configuration]]:
    """Return (without, with) for each configuration that speculates and has a twin that does not.

    Twins have the same labels but for those of ITS_OWN, and the same model: that of the label `model`, else the one the
    server was asked for.
    """
    direct: dict[object, Configuration] = {}
    for one in configurations:
        if not speculates(one):
            direct.setdefault(_of_twins(one), one)
    return [(direct[_of_twins(one)], one) for one in configurations if speculates(one) and _of_twins(one) in direct]


def unpaired(configurations: Sequence[Configuration]) -> list[str]:
    """Return the names of those that speculate and have no twin, where another does not speculate at all."""
    if all(speculates(one) for one in configurations):
        return []
    paired = {other.name for _, other in pairs(configurations)}
    return [one.short_name for one in configurations if speculates(one) and one.name not in paired]


def _of_twins(one: Configuration) -> tuple[object, ...]:
    """What two twins have in common."""
    rest = {name: value for name, value in labels(one).items() if name not in ITS_OWN}
    return rest.pop("model", one.summary["target"]["model"]), tuple(sorted(rest.items()))


def speculation(configurations: Sequence[Configuration], rules: Convention) -> list[dict[str, Any]]:
    """Return each pair as JSON values.

    [{"direct", "spec", "levels": [{"level", "ratio", "interval": [low, high] or None, "direct_tps", "spec_tps", "n":
    [..], "tokens_per_event"}], "break_even": by the convention, "nearest_level", "crossings": [..]}]
    """
    return [_pair(direct, spec, rules) for direct, spec in pairs(configurations)]


def _pair(direct: Configuration, spec: Configuration, rules: Convention) -> dict[str, Any]:
    levels = [_level(direct.levels[level], spec.levels[level]) for level in direct.levels if level in spec.levels]
    ratios = [(each["level"], each["ratio"]) for each in levels if each["ratio"] is not None]
    crossed = crossings(ratios)
    nearest = nearest_level(ratios)
    return {
        "direct": direct.short_name,
        "spec": spec.short_name,
        "simulated": direct.simulated or spec.simulated,
        "levels": levels,
        "break_even": nearest if rules.break_even == "nearest" else next(iter(crossed), None),
        "nearest_level": nearest,
        "crossings": crossed,
    }


def _level(direct: Level, spec: Level) -> dict[str, Any]:
    a, b = direct.figures["tps"], spec.figures["tps"]
    return {
        "level": direct.level,
        "ratio": b["mean"] / a["mean"] if a["mean"] and b["mean"] is not None else None,
        "interval": ratio_interval(direct, spec),
        "direct_tps": a["mean"],
        "spec_tps": b["mean"],
        "n": [a["n"], b["n"]],
        "tokens_per_event": spec.figures["tokens_per_event"],
    }


def ratio_interval(direct: Level, spec: Level) -> list[float] | None:
    """Return the 95 % bootstrap interval of mean TPS with / without; None without two requests on either side."""
    both = [level.samples.get("tps") for level in (direct, spec)]
    if any(values is None or len(values) < 2 for values in both):
        return None
    without, with_it = (
        bootstrap.means(values, (bootstrap.SEED, at)) for at, values in enumerate(both) if values is not None
    )
    return list(bootstrap.interval(with_it / without))


def nearest_level(ratios: Sequence[tuple[int, float]]) -> int | None:
    """Return the level whose ratio is nearest to 1, the lower of two; None when every ratio lies on one side of it
    and none within 5 %: then there is no break-even among the levels.
    """
    if not ratios:
        return None
    level, ratio = min(ratios, key=lambda pair: (abs(pair[1] - 1), pair[0]))
    sides = {each >= 1 for _, each in ratios}
    return level if len(sides) == 2 or abs(ratio - 1) <= 0.05 else None


def crossings(ratios: Sequence[tuple[int, float]]) -> list[float]:
    """Return the loads at which the ratio passes 1, between neighbouring levels, linear over log2 of the load."""
    found = []
    for (low, a), (high, b) in zip(ratios, ratios[1:], strict=False):
        if (a >= 1) != (b >= 1):
            share = (a - 1) / (a - b)
            found.append(float(2 ** (math.log2(low) + share * (math.log2(high) - math.log2(low)))))
    return found


def decoding_at_once(level: Level) -> float | None:
    """Return how many streams of a level decode at once, c (L - TTFT) / L by its means; None without the figures."""
    ttft, latency = level.figures["ttft_ms"]["mean"], level.figures["latency_s"]["mean"]
    if ttft is None or not latency or not np.isfinite(latency):
        return None
    return float(level.level * max(latency - ttft / 1e3, 0.0) / latency)
