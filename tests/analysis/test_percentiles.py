"""Nearest rank, its mirror and its interval, against definitions and hand-made answers."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastload.analysis.percentiles import (
    distribution,
    interval_ranks,
    is_low_n,
    linear,
    lower,
    lower_with_failures,
    rank,
    upper,
    upper_with_failures,
)

PERCENTS = st.integers(1, 99)


@pytest.mark.parametrize(
    ("n", "percent", "expected"),
    [
        (10, 90, 9),
        (1, 90, 1),
        (11, 90, 10),
        (29, 90, 27),
        (640, 90, 576),
        (100, 99, 99),
        (101, 99, 100),
        (2, 50, 1),
    ],
)
def test_rank(n: int, percent: int, expected: int) -> None:
    assert rank(n, percent) == expected


def test_source_report_p90_is_the_ninth_of_ten() -> None:
    # 10 samples at c=1: "its P90 is the 9th of 10 values"
    assert upper(np.arange(1.0, 11.0), 90) == 9.0


def test_floating_point_never_decides_a_rank() -> None:
    # 0.9 * 10 * k is above the integer for some k in floating point; ceil would then be one too high.
    assert all(rank(10 * k, 90) == 9 * k for k in range(1, 20_000))
    assert rank(10**18, 90) == 9 * 10**17


@given(st.integers(1, 5000), PERCENTS)
def test_rank_is_the_smallest_that_covers_the_share(n: int, percent: int) -> None:
    at = rank(n, percent)
    assert Fraction(at, n) >= Fraction(percent, 100) > Fraction(at - 1, n)


@given(st.lists(st.floats(-1e9, 1e9), min_size=1), PERCENTS)
def test_low_tail_is_the_mirror_of_the_high_one(values: list[float], percent: int) -> None:
    ordered = np.sort(np.array(values))
    mirrored = upper(np.sort(-ordered), 100 - percent)
    assert mirrored is not None and lower(ordered, percent) == -mirrored


@given(st.lists(st.floats(0, 1e9), min_size=1))
def test_p10_is_what_nine_in_ten_have_at_least(values: list[float]) -> None:
    ordered = np.sort(np.array(values))
    p10 = lower(ordered, 10)
    assert (ordered >= p10).sum() * 10 >= 9 * len(ordered)


def test_m31_low_tail_of_speeds() -> None:
    speeds = np.arange(1.0, 101.0)
    assert lower(speeds, 1) == 2.0  # of 100 users 99 get at least 2 tok/s
    assert linear(speeds, 1) == pytest.approx(1.99)
    assert upper(speeds, 99) == 99.0
    assert linear(speeds, 99) == pytest.approx(99.01)
    assert lower(speeds, 10) == 11.0


def test_m33_few_requests() -> None:
    latencies = np.arange(1.0, 11.0)
    assert [upper(latencies, percent) for percent in (90, 95, 99)] == [9.0, 10.0, 10.0]
    assert [linear(latencies, percent) for percent in (90, 95, 99)] == pytest.approx([9.1, 9.55, 9.91])
    assert distribution(latencies)["n"] == 10
    assert is_low_n(10, 90)


def test_m37_failures_count_as_the_worst() -> None:
    latencies = np.ones(90)
    assert upper_with_failures(latencies, 10, 95) == math.inf
    assert upper_with_failures(latencies, 10, 90) == 1.0
    assert upper_with_failures(latencies, 11, 90) == math.inf
    assert upper_with_failures(latencies, 0, 95) == 1.0
    speeds = np.full(90, 20.0)
    assert lower_with_failures(speeds, 10, 5) == 0.0
    assert lower_with_failures(speeds, 10, 10) == 20.0
    assert lower_with_failures(speeds, 11, 10) == 0.0
    assert upper_with_failures(np.zeros(0), 3, 90) == math.inf
    assert lower_with_failures(np.zeros(0), 3, 10) == 0.0
    assert upper_with_failures(np.zeros(0), 0, 90) is None
    assert lower_with_failures(np.zeros(0), 0, 10) is None


def test_no_values_give_nulls() -> None:
    assert distribution(np.zeros(0)) == {
        "mean": None,
        "p10": None,
        "p50": None,
        "p90": None,
        "p99": None,
        "n": 0,
        "p90_ci95": None,
        "p10_ci95": None,
        "p50_ci95": None,
        "p99_ci95": None,
    }
    assert distribution(np.zeros(0), "linear")["p90"] is None


def test_distribution_by_hand() -> None:
    values = np.array([5.0, 1.0, 4.0, 2.0, 3.0])
    described = distribution(values)
    assert (described["mean"], described["p10"], described["p50"], described["p90"]) == (3.0, 1.0, 3.0, 5.0)
    assert distribution(values, "linear")["p90"] == pytest.approx(4.6)
    assert values.tolist() == [5.0, 1.0, 4.0, 2.0, 3.0]  # the caller's array stays as it was


@pytest.mark.parametrize(("percent", "least"), [(90, 29), (99, 299), (50, 6)])
def test_low_n_rule(percent: int, least: int) -> None:
    assert is_low_n(least - 1, percent) and not is_low_n(least, percent)
    assert interval_ranks(least - 1, percent) is None and interval_ranks(least, percent) is not None
    assert is_low_n(0, percent)


def coverage(n: int, percent: int, low: int, high: int) -> Fraction:
    """P(low <= B <= high - 1) for B binomial (n, percent / 100), exactly."""
    p = Fraction(percent, 100)
    return sum((math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(low, high)), Fraction(0))


@given(st.integers(2, 120), PERCENTS)
def test_interval_covers_and_none_shorter_does(n: int, percent: int) -> None:
    ranks = interval_ranks(n, percent)
    if ranks is None:
        assert coverage(n, percent, 1, n) < Fraction(95, 100)
        return
    low, high = ranks
    assert 1 <= low <= rank(n, percent) <= high <= n
    assert coverage(n, percent, low, high) >= Fraction(95, 100)
    shorter = high - low - 1
    assert all(
        coverage(n, percent, start, start + shorter) < Fraction(95, 100)
        for start in range(1, n - shorter + 1)
    )


def test_interval_of_ten_million_values() -> None:
    n = 10_000_000
    ranks = interval_ranks(n, 90)
    assert ranks is not None
    low, high = ranks
    half = 1.959964 * math.sqrt(n * 0.9 * 0.1)  # the normal law is as good as exact here
    assert low == pytest.approx(0.9 * n - half, abs=3)
    assert high == pytest.approx(0.9 * n + half, abs=3)


def test_interval_of_p10_is_the_mirror_of_that_of_p90() -> None:
    values = np.arange(1.0, 101.0)
    described = distribution(values)
    low, high = described["p90_ci95"]
    assert described["p10_ci95"] == [101 - high, 101 - low]
    assert low <= described["p90"] <= high
