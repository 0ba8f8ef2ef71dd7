"""Speculative decoding: how many drafted tokens a step takes. Pure.

Everything that varies is drawn from low-discrepancy sequences (multiples of an irrational, modulo 1), by the number of
the request and of the step. Ten requests then already show the spread that a thousand have: a level of a short sweep
is not decided by luck, and the same load gives the same answers again.
"""

from itertools import accumulate
from math import exp, log
from operator import mul
from statistics import NormalDist

from fastload.sim.profiles import Speculation

GOLDEN = 0.6180339887498949  # the golden ratio's fraction
SQUARE_ROOT_2 = 0.41421356237309515
SQUARE_ROOT_3 = 0.7320508075688772

_NORMAL = NormalDist()


def spread_point(number: int, seed: int, irrational: float) -> float:
    """The point in (0, 1) of that number."""
    return min(max((0.5 + (number + 97 * seed) * irrational) % 1.0, 1e-9), 1 - 1e-9)


def normal(number: int, seed: int, irrational: float) -> float:
    """The same, as a deviate of the standard normal distribution."""
    return _NORMAL.inv_cdf(spread_point(number, seed, irrational))


def survival(speculation: Speculation, quality: float) -> tuple[float, ...]:
    """Chance that at least 1, 2, ... drafts are taken, for a request `quality` deviations above the usual."""
    shift = speculation.spread * quality
    each = (1 / (1 + exp(-log(chance / (1 - chance)) - shift)) for chance in speculation.acceptance)
    return tuple(accumulate(each, mul))


def accepted(chances: tuple[float, ...], point: float) -> int:
    """Drafts taken when `point` of (0, 1) is drawn."""
    count = 0
    for chance in chances:
        if point >= chance:
            break
        count += 1
    return count


def mean_tokens(speculation: Speculation, quality: float = 0.0) -> float:
    """Tokens a step gives on average: one, and the chance of each draft."""
    return 1 + sum(survival(speculation, quality))
