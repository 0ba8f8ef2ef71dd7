"""Service levels and the capacity they leave (METRICS.md, section 5), from figures already chosen."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

FAILURE_LIMIT = 0.01
"""Largest share of failed requests a level may have and still pass."""

THINK_TIME_S = 45.0
"""Time a user reads and writes between two requests, as the source report takes it."""


@dataclass(frozen=True, slots=True)
class Slo:
    """What a level must reach.

    `ttft_ms` is an upper limit, `tps` (tok/s per user) a lower one. `percentile` is "p90" or "mean". With the
    convention "fastload" P90 of TPS is the tail that hurts (p10: what 90 % of users get at least);
    "kimi-report" takes the upper P90 as the source report did.
    """

    ttft_ms: float = 1000.0
    tps: float = 15.0
    percentile: str = "p90"
    convention: str = "fastload"


@dataclass(frozen=True, slots=True)
class Judgement:
    """Whether a level met its limits; None where there was no figure to judge."""

    ttft: bool | None
    tps: bool | None
    both: bool | None


def judge(
    slo: Slo, ttft_ms: float | None, tps: float | None, failed_share: float, complete: bool
) -> Judgement:
    """Judge one level by figures that have failures already counted in (TTFT may be inf, TPS 0).

    Each limit is judged on its own. `both` also asks that at most 1 % of the requests failed and the level is
    complete.
    """
    ttft = None if ttft_ms is None else ttft_ms <= slo.ttft_ms
    speed = None if tps is None else tps >= slo.tps
    if ttft is None or speed is None:
        return Judgement(ttft, speed, None)
    return Judgement(ttft, speed, ttft and speed and complete and failed_share <= FAILURE_LIMIT)


@dataclass(frozen=True, slots=True)
class Mark:
    """One level as capacity sees it: its concurrency, whether it passed and its MEAN latency in seconds."""

    level: int
    passed: bool | None
    latency_mean_s: float | None


@dataclass(frozen=True, slots=True)
class Capacity:
    """How many users fit: c_max x (1 + think time / mean latency at c_max). None where no level passed."""

    c_max: int | None
    l_mean_s: float | None
    users: int | None
    think_time_s: float


def capacity(marks: Iterable[Mark], think_time_s: float = THINK_TIME_S) -> Capacity:
    """Return the capacity at the highest level such that it and every lower level passed."""
    best: Mark | None = None
    for mark in sorted(marks, key=lambda m: m.level):
        if not mark.passed:
            break
        best = mark
    if best is None or not best.latency_mean_s:
        return Capacity(None, None, None, think_time_s)
    users = best.level * (1 + think_time_s / best.latency_mean_s)
    return Capacity(best.level, best.latency_mean_s, math.floor(users + 0.5), think_time_s)
