"""Limits set against many configurations at once: the matrix, the users that fit, and surfaces over all limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastload.analysis import percentiles, slo
from fastload.analysis.configuration import Configuration, Level
from fastload.analysis.percentiles import Floats
from fastload.analysis.slo import Capacity, Judgement, Slo

THINK_TIMES_S = (5.0, 15.0, 45.0, 120.0)
"""What the capacity is shown at beside the time asked for: a quick exchange to deep work."""


def judgements(one: Configuration, limits: Slo) -> dict[int, Judgement]:
    """Judge each level of a configuration, by concurrency, ascending."""
    return {level: slo.judge_level(limits, at.figures, at.samples) for level, at in one.levels.items()}


def capacity(one: Configuration, limits: Slo, think_time_s: float = slo.THINK_TIME_S) -> Capacity:
    """Return how many users a configuration holds at these limits."""
    judged = judgements(one, limits)
    marks = [slo.mark(at.figures, judged[level]) for level, at in one.levels.items()]
    return slo.capacity(marks, think_time_s, limits.convention)


def matrix(configurations: Sequence[Configuration], limits: Slo) -> dict[str, Any]:
    """Return the limits against every configuration and level, as JSON values.

    {"levels": [..], "rows": [{"name", "cells": [{"level", "state", "ttft", "tps", "passes", "obstacle", "ttft_ms",
    "tps_tok_s"} or None where there is no such level]}]}; a TTFT that failures make infinite is null.
    """
    levels = sorted({level for one in configurations for level in one.levels})
    return {
        "levels": levels,
        "rows": [
            {"name": one.short_name, "cells": [_cell(judged, level) for level in levels]}
            for one in configurations
            for judged in (judgements(one, limits),)
        ],
    }


def _cell(judged: Mapping[int, Judgement], level: int) -> dict[str, Any] | None:
    found = judged.get(level)
    if found is None:
        return None
    infinite = found.ttft_ms is not None and not np.isfinite(found.ttft_ms)
    return {
        "level": level,
        "state": found.state,
        "ttft": found.ttft,
        "tps": found.tps,
        "passes": found.both,
        "obstacle": found.obstacle,
        "ttft_ms": None if infinite else found.ttft_ms,
        "tps_tok_s": found.tps_tok_s,
    }


def capacities(
    configurations: Sequence[Configuration], limits: Slo, think_time_s: float = slo.THINK_TIME_S
) -> dict[str, Any]:
    """Return the capacity of each configuration, what it is beside the others, and how it moves.

    {"rows": [{"name", .. of Capacity, "sensitivity": {"think_time": {"5": users}, "percentile": {"mean": users}}}],
    "relative": [{"of", "to", "ratio"}] for each pair, the larger first}.
    """
    found = [(one, capacity(one, limits, think_time_s)) for one in configurations]
    return {
        "rows": [
            {
                "name": one.short_name,
                **asdict(each),
                "passed_above": list(each.passed_above),
                "sensitivity": sensitivity(one, limits, think_time_s),
            }
            for one, each in found
        ],
        "relative": _relative([(one.short_name, each.users) for one, each in found]),
    }


def sensitivity(one: Configuration, limits: Slo, think_time_s: float) -> dict[str, dict[str, int | None]]:
    """Return the users at other think times, and with the limits asked of another percentile.

    0 where every level fails, None where there is no figure to judge or count by.
    """
    return {
        "think_time": {
            f"{time:g}": _users(capacity(one, limits, time)) for time in sorted({*THINK_TIMES_S, think_time_s})
        },
        "percentile": {
            name: _users(capacity(one, replace(limits, percentile=name), think_time_s)) for name in slo.PERCENTILES
        },
    }


def _users(found: Capacity) -> int | None:
    return 0 if found.c_max is None and found.judged else found.users


def _relative(users: Sequence[tuple[str, int | None]]) -> list[dict[str, Any]]:
    known = sorted(((name, n) for name, n in users if n), key=lambda pair: -pair[1])
    return [{"of": more, "to": fewer, "ratio": a / b} for (more, a), (fewer, b) in combinations(known, 2)]


@dataclass(frozen=True, slots=True)
class Surface:
    """One level over a grid of limits; arrays are indexed [TTFT limit, TPS limit].

    ttft_ms, tps: the limits, ascending. goodput: share of the measured requests due in the window that met both
    (goodput_rps: per second), None without a trace. passes: whether the level does, at the percentile asked for.
    """

    level: int
    ttft_ms: Floats
    tps: Floats
    goodput: Floats | None
    goodput_rps: Floats | None
    passes: NDArray[np.bool_]


def surface(level: Level, limits: Slo, ttft_ms: Sequence[float], tps: Sequence[float]) -> Surface:
    """Return a level's goodput and whether it passes over a grid of limits, in one pass over its requests.

    `limits` gives percentile and convention; its own two limits are not looked at. A level with no figure to judge,
    one that is incomplete or with too many failures passes nowhere.
    """
    firsts, speeds = np.sort(np.asarray(ttft_ms, np.float64)), np.sort(np.asarray(tps, np.float64))
    judged = slo.judge_level(limits, level.figures, level.samples)
    passes = np.zeros((len(firsts), len(speeds)), dtype=np.bool_)
    if judged.obstacle is None and judged.ttft_ms is not None and judged.tps_tok_s is not None:
        passes = np.outer(judged.ttft_ms <= firsts, judged.tps_tok_s >= speeds)
    if level.due is None or not len(level.due.ttft_ms):
        return Surface(level.level, firsts, speeds, None, None, passes)
    met = _met(level.due.ttft_ms, level.due.tps, firsts, speeds)
    return Surface(level.level, firsts, speeds, met / len(level.due.ttft_ms), met / level.due.seconds, passes)


def _met(ttft: Floats, tps: Floats, firsts: Floats, speeds: Floats) -> Floats:
    """Count for each pair of limits the requests with ttft <= first and tps >= speed; NaN meets none."""
    there = ~(np.isnan(ttft) | np.isnan(tps))
    at = np.searchsorted(firsts, ttft[there], side="left")  # the first limit it meets
    upto = np.searchsorted(speeds, tps[there], side="right")  # how many limits it meets
    shape = (len(firsts) + 1, len(speeds) + 1)
    counts = np.bincount(at * shape[1] + upto, minlength=shape[0] * shape[1]).reshape(shape)
    below = np.cumsum(counts, axis=0)[: len(firsts)]
    met: Floats = np.cumsum(below[:, ::-1], axis=1)[:, ::-1][:, 1:].astype(np.float64)
    return met


def capacity_surface(
    one: Configuration, limits: Slo, ttft_ms: Sequence[float], tps: Sequence[float]
) -> tuple[NDArray[np.int64], Floats]:
    """Return c_max and the users over a grid of limits, [TTFT, TPS] ascending; 0 and NaN where no level passes."""
    grids = [surface(level, limits, ttft_ms, tps).passes for level in one.levels.values()]
    c_max = np.zeros((len(ttft_ms), len(tps)), dtype=np.int64)
    users = np.full(c_max.shape, np.nan)
    so_far = np.ones(c_max.shape, dtype=np.bool_)
    for level, passes in zip(one.levels.values(), grids, strict=True):
        so_far = passes if limits.rules.c_max == "last" else so_far & passes
        c_max[so_far] = level.level
        n = slo.capacity([slo.mark(level.figures, Judgement(True, True, True))], convention=limits.convention).users
        users[so_far] = np.nan if n is None else n
    return c_max, users


def low_n(figures: Mapping[str, Any], name: str, statistic: str) -> bool:
    """Say whether a percentile of a level rests on too few requests for an interval; False where n is not known."""
    n = (figures.get(name) or {}).get("n")
    if n is None or not statistic.startswith("p") or statistic not in ("p10", "p50", "p90", "p99"):
        return False
    return percentiles.is_low_n(int(n), int(statistic[1:]))
