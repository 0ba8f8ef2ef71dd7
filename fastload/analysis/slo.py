"""Service levels and the capacity they leave (METRICS.md, section 5), from the figures of levels."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fastload.analysis import percentiles
from fastload.analysis.conventions import CONVENTIONS, Convention
from fastload.analysis.percentiles import Floats

FAILURE_LIMIT = 0.01
"""Largest share of failed requests a level may have and still pass."""

THINK_TIME_S = 45.0
"""Time a user reads and writes between two requests, as the source report takes it."""

PERCENTILES = ("p50", "p90", "p99", "mean")
"""What a limit can be asked of."""

BOTH, TTFT_ONLY, TPS_ONLY, NEITHER, UNKNOWN = "both", "ttft_only", "tps_only", "neither", "unknown"
"""What limits a level meets."""


@dataclass(frozen=True, slots=True)
class Slo:
    """What a level must reach.

    `ttft_ms` is an upper limit, `tps` (tok/s per user) a lower one. `percentile` is one of PERCENTILES: p90 asks that
    90 % of the users get that much. `convention` names the rules (conventions.py).
    """

    ttft_ms: float = 1000.0
    tps: float = 15.0
    percentile: str = "p90"
    convention: str = "fastload"

    @property
    def rules(self) -> Convention:
        """The convention it follows."""
        return CONVENTIONS[self.convention]


@dataclass(frozen=True, slots=True)
class Judgement:
    """Whether a level met its limits; None where there was no figure to judge.

    ttft_ms, tps: the figures judged (inf and 0 where failures reach into the tail). both: also that it is complete and
    few failed. obstacle: why a level that meets both limits does not pass: "incomplete", "failures", or None.
    """

    ttft: bool | None
    tps: bool | None
    both: bool | None
    ttft_ms: float | None = None
    tps_tok_s: float | None = None
    obstacle: str | None = None

    @property
    def state(self) -> str:
        """Which limits it met, by name: BOTH, TTFT_ONLY, TPS_ONLY, NEITHER, or UNKNOWN without a figure for one."""
        if self.ttft is None or self.tps is None:
            return UNKNOWN
        return (NEITHER, TPS_ONLY, TTFT_ONLY, BOTH)[2 * self.ttft + self.tps]


def judge(slo: Slo, ttft_ms: float | None, tps: float | None, failed_share: float, complete: bool) -> Judgement:
    """Judge one level by its figures (TTFT may be inf, TPS 0, if failures count).

    Each limit is judged on its own. `both` also asks that at most 1 % of the requests failed and the level is
    complete; one limit missed is enough to fail, also where the other has no figure.
    """
    ttft = None if ttft_ms is None else ttft_ms <= slo.ttft_ms
    speed = None if tps is None else tps >= slo.tps
    few = failed_share <= FAILURE_LIMIT or not slo.rules.failures_count
    obstacle = "incomplete" if not complete else None if few else "failures"
    missed = ttft is False or speed is False or obstacle is not None
    both = False if missed else None if ttft is None or speed is None else True
    return Judgement(ttft, speed, both, ttft_ms, tps, obstacle)


def judge_level(slo: Slo, figures: Mapping[str, Any], samples: Mapping[str, Floats] | None = None) -> Judgement:
    """Judge a level by its figures and, where there is a trace, the ascending values behind them (by distribution).

    How many failed may be unknown (null): then none is taken to have.
    """
    failed = figures["failed"] or 0
    share = failed / figures["measured"] if failed and figures["measured"] else 0.0
    ttft, tps = tails(slo, figures, samples or {}, failed)
    return judge(slo, ttft, tps, share, figures["complete"])


def tails(
    slo: Slo, figures: Mapping[str, Any], samples: Mapping[str, Floats], failed: int
) -> tuple[float | None, float | None]:
    """Return TTFT (ms) and TPS (tok/s) at the percentile asked for, None where there is none.

    Of the tails that hurt, with failed requests as the worst values (a mean cannot count them). Nearest rank; without
    samples what the table says.
    """
    told_ttft, told_tps = figures["ttft_ms"], figures["tps"]
    if slo.percentile == "mean":
        return told_ttft["mean"], told_tps["mean"]
    percent = int(slo.percentile.removeprefix("p"))
    low = slo.rules.tps_tail == "low"
    if "ttft_ms" not in samples or "tps" not in samples:
        # The median has no tail to choose.
        speed = f"p{100 - percent}" if low else f"p{percent}"
        return told_ttft.get(f"p{percent}"), told_tps.get(speed)
    worst = failed if slo.rules.failures_count else 0
    ttft = percentiles.upper_with_failures(samples["ttft_ms"], worst, percent)
    if low:
        return ttft, percentiles.lower_with_failures(samples["tps"], worst, 100 - percent)
    return ttft, percentiles.upper(samples["tps"], percent)


@dataclass(frozen=True, slots=True)
class Mark:
    """One level as capacity sees it: its concurrency, whether it passed, its mean and P90 latency in seconds."""

    level: int
    passed: bool | None
    latency_mean_s: float | None
    latency_p90_s: float | None = None


@dataclass(frozen=True, slots=True)
class Capacity:
    """How many users fit: c_max x (1 + think time / latency at c_max). None where no level passed.

    l_mean_s: mean latency at c_max. l_p90_s: P90 there, given only where the convention counts users by it.
    passed_above: levels that pass above a failing one: shown, not used (unless the convention takes the last).
    judged: False where c_max may be higher than found, because a level has no figure to judge.
    """

    c_max: int | None
    l_mean_s: float | None
    users: int | None
    think_time_s: float
    l_p90_s: float | None = None
    passed_above: tuple[int, ...] = ()
    judged: bool = True


def mark(figures: Mapping[str, Any], judgement: Judgement) -> Mark:
    """Return a level as capacity sees it."""
    return Mark(figures["level"], judgement.both, figures["latency_s"]["mean"], figures["latency_s"]["p90"])


def capacity(marks: Iterable[Mark], think_time_s: float = THINK_TIME_S, convention: str = "fastload") -> Capacity:
    """Return the capacity at c_max: by default the highest level such that it and every lower level passed."""
    rules = CONVENTIONS[convention]
    ordered = sorted(marks, key=lambda each: each.level)
    broken = next((at for at, each in enumerate(ordered) if not each.passed), len(ordered))
    above = tuple(each.level for each in ordered[broken:] if each.passed)
    judged = not any(each.passed is None for each in (ordered if rules.c_max == "last" else ordered[: broken + 1]))
    nothing = Capacity(None, None, None, think_time_s, passed_above=above, judged=judged)
    candidates = [each for each in ordered if each.passed] if rules.c_max == "last" else ordered[:broken]
    if not candidates:
        return nothing
    best = candidates[-1]
    by_p90 = rules.users_latency == "p90"
    found = replace(
        nothing, c_max=best.level, l_mean_s=best.latency_mean_s, l_p90_s=best.latency_p90_s if by_p90 else None
    )
    latency = best.latency_p90_s if by_p90 else best.latency_mean_s
    if not latency:
        return found
    users = best.level * (1 + think_time_s / latency)
    return replace(found, users=math.floor(users + 0.5) if rules.users_rounding == "nearest" else math.floor(users))
