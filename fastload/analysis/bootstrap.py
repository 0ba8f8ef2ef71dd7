"""What chance does to a figure: the figure of many samples drawn anew, with replacement, from the values at hand.

Seeded, so that the same values give the same interval on every machine. It takes the requests for independent, which
those of a lockstep engine are not quite: intervals are labelled so.
"""

from typing import TypeAlias

import numpy as np

from fastload.analysis.percentiles import Floats, low_rank, rank

SEED = 20261130
RESAMPLES = 2000
NORMAL_FROM = 5000
"""From so many values on the mean of a resample is drawn from its normal limit: the same to four digits, and cheap."""

Draws: TypeAlias = Floats
"""The figure in each of RESAMPLES resamples; in no order."""

Seed: TypeAlias = int | tuple[int, ...]


def means(values: Floats, seed: Seed = SEED) -> Draws:
    """Return the mean of each resample of `values` (at least one)."""
    random, n = np.random.default_rng(seed), len(values)
    if n >= NORMAL_FROM:
        return np.asarray(random.normal(values.mean(), values.std() / n**0.5, RESAMPLES), dtype=np.float64)
    drawn = random.integers(0, n, (RESAMPLES, n), dtype=np.int32)
    return np.asarray(values[drawn].mean(axis=1), dtype=np.float64)


def percentiles(ordered: Floats, percent: int, *, low: bool = False, seed: Seed = SEED) -> Draws:
    """Return the nearest-rank percentile (or, if `low`, the mirrored low tail) of each resample of ascending values.

    Exact without resampling: the k-th smallest of n draws has the index floor(n U), U the k-th smallest of n uniform
    numbers, whose distribution is Beta(k, n + 1 - k).
    """
    n = len(ordered)
    k = low_rank(n, percent) if low else rank(n, percent)
    at = np.random.default_rng(seed).beta(k, n + 1 - k, RESAMPLES) * n
    return ordered[np.minimum(at.astype(np.int64), n - 1)]


def interval(draws: Draws) -> tuple[float, float]:
    """Return the middle 95 % of the resamples."""
    low, high = np.percentile(draws, [2.5, 97.5])
    return float(low), float(high)
