"""Percentiles by nearest rank, their mirrored low tail, and an interval that assumes only independence.

Ranks are exact integers: P90 of n values is the value of rank ceil(90 n / 100), counted from 1 in ascending
order. No figure is interpolated, so every percentile printed was measured by some request. The low tail is
the mirror of the high one (what the best 90 % get at least), not the plain P10: rank n + 1 - ceil(90 n /
100).
"""

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Figures: TypeAlias = dict[str, Any]

CONFIDENCE = 0.95


def rank(n: int, percent: int) -> int:
    """Return the nearest rank (1..n) of the upper percentile `percent` (1..100) among `n` >= 1 values."""
    return -(-percent * n // 100)


def low_rank(n: int, percent: int) -> int:
    """Return the rank (1..n) of the low tail `percent` (0..99), the mirror of P(100 - percent)."""
    return n + 1 - rank(n, 100 - percent)


def upper(ordered: Floats, percent: int) -> float | None:
    """Return the nearest-rank percentile of ascending values; None when there are none."""
    return float(ordered[rank(len(ordered), percent) - 1]) if len(ordered) else None


def lower(ordered: Floats, percent: int) -> float | None:
    """Return the low tail of ascending values (p10: 90 % have at least this); None when there are none."""
    return float(ordered[low_rank(len(ordered), percent) - 1]) if len(ordered) else None


def linear(ordered: Floats, percent: int) -> float | None:
    """Return the interpolated percentile of ascending values (numpy's default), as other tools do."""
    return float(np.percentile(ordered, percent)) if len(ordered) else None


def upper_with_failures(ordered: Floats, failed: int, percent: int) -> float | None:
    """Return the percentile when `failed` more requests count as +inf (then maybe inf); None without any."""
    total = len(ordered) + failed
    if not total:
        return None
    at = rank(total, percent)
    return float(ordered[at - 1]) if at <= len(ordered) else math.inf


def lower_with_failures(ordered: Floats, failed: int, percent: int) -> float | None:
    """Return the low tail when `failed` more requests count as 0 (no speed at all); None without any."""
    total = len(ordered) + failed
    if not total:
        return None
    at = low_rank(total, percent) - failed
    return float(ordered[at - 1]) if at >= 1 else 0.0


def is_low_n(n: int, percent: int) -> bool:
    """Say whether `n` values are too few for a 95 % interval of this percentile.

    The rule: even the widest interval there is, from the smallest value to the largest, misses the percentile
    with probability p^n + (1 - p)^n. Where that is above 5 % (below 29 values for P90), the figure is marked
    "low n".
    """
    p = percent / 100
    return n < 1 or 1 - p**n - (1 - p) ** n < CONFIDENCE


def interval_ranks(n: int, percent: int) -> tuple[int, int] | None:
    """Return the ranks (1..n) of the shortest 95 % order-statistic interval; None for a low n.

    The number B of values below the true percentile is binomial (n, percent / 100), so [X(low), X(high)]
    covers it with probability P(low <= B <= high - 1): exact for any distribution, provided the values are
    independent.
    """
    if is_low_n(n, percent):
        return None
    first, mass = _binomial(n, percent / 100)
    counts = np.arange(first, first + len(mass))
    inside = (counts >= 1) & (counts <= n - 1)
    counts, mass = counts[inside], mass[inside]
    # One hump: the heaviest counts that make up 95 % are neighbours, so taking them in order of weight is the
    # shortest run.
    heaviest = np.argsort(-mass, kind="stable")
    needed = int(np.searchsorted(np.cumsum(mass[heaviest]), CONFIDENCE - 1e-12)) + 1
    chosen = counts[heaviest[:needed]]
    return int(chosen.min()), int(chosen.max()) + 1


def _binomial(n: int, p: float) -> tuple[int, Floats]:
    """Return (first count, probabilities from it on) of the binomial, out to 12 standard deviations.

    Built outwards from the mode by the ratio of neighbours, then scaled to sum 1: no factorials, so 10M
    values cost as little as 10, and what is left out is below 1e-30.
    """
    reach = math.ceil(12 * math.sqrt(n * p * (1 - p))) + 1
    mode = int((n + 1) * p)
    first, last = max(0, mode - reach), min(n, mode + reach)
    up = np.arange(mode, last, dtype=np.float64)
    down = np.arange(mode, first, -1, dtype=np.float64)
    rising = np.cumprod((n - up) / (up + 1) * (p / (1 - p)))
    falling = np.cumprod(down / (n - down + 1) * ((1 - p) / p))
    mass = np.concatenate((falling[::-1], [1.0], rising))
    return first, mass / mass.sum()


PERCENTILES: dict[
    str, tuple[Callable[[Floats, int], float | None], Callable[[Floats, int], float | None]]
] = {
    "nearest-rank": (lower, upper),
    "linear": (linear, linear),
}


def distribution(values: Floats, method: str = "nearest-rank") -> Figures:
    """Describe finite values: mean, p10 (low tail), p50, p90, p99, n and the 95 % intervals of the percentiles.

    Every figure is in the unit of the values and None where it does not exist (no values; for an interval, a
    low n). `method` is "nearest-rank" or "linear"; intervals are order statistics either way.
    """
    low, high = PERCENTILES[method]
    ordered = np.sort(values)
    n = len(ordered)
    return {
        "mean": float(ordered.mean()) if n else None,
        "p10": low(ordered, 10),
        "p50": high(ordered, 50),
        "p90": high(ordered, 90),
        "p99": high(ordered, 99),
        "n": n,
        "p90_ci95": _interval(ordered, 90),
        "p10_ci95": _interval(ordered, 90, mirrored=True),
        "p50_ci95": _interval(ordered, 50),
        "p99_ci95": _interval(ordered, 99),
    }


def _interval(ordered: Floats, percent: int, mirrored: bool = False) -> list[float] | None:
    """Return [low, high] of the interval of a percentile, or of its mirror image in the low tail."""
    n = len(ordered)
    ranks = interval_ranks(n, percent)
    if ranks is None:
        return None
    low, high = (n + 1 - ranks[1], n + 1 - ranks[0]) if mirrored else ranks
    return [float(ordered[low - 1]), float(ordered[high - 1])]
