"""Limits, users and surfaces over configurations made by hand."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastload.analysis import slo
from fastload.analysis.capacity import (
    capacities,
    capacity,
    capacity_surface,
    judgements,
    low_n,
    matrix,
    sensitivity,
    surface,
)
from fastload.analysis.configuration import Configuration, Due, Level
from fastload.analysis.conventions import CONVENTIONS
from fastload.analysis.percentiles import distribution
from fastload.analysis.slo import Mark, Slo

SECONDS = 10.0


def level(c: int, ttft: Any, tps: Any, *, failed: int = 0, complete: bool = True, latency: float = 2.0) -> Level:
    """A level from its requests' TTFT and TPS; those that failed are due too."""
    ttft, tps = np.asarray(ttft, float), np.asarray(tps, float)
    figures = {
        "level": c,
        "measured": len(ttft) + failed,
        "ok": len(ttft),
        "failed": failed,
        "complete": complete,
        "ttft_ms": distribution(ttft),
        "tps": distribution(tps),
        "latency_s": distribution(np.full(len(ttft), latency)),
    }
    lost = np.full(failed, np.nan)
    due = Due(np.concatenate((ttft, lost)), np.concatenate((tps, lost)), SECONDS)
    return Level(figures, {"ttft_ms": np.sort(ttft), "tps": np.sort(tps)}, due)


def made(name: str, *levels: Level) -> Configuration:
    summary = {"run_id": name, "name": name, "simulated": False, "target": {"labels": {}, "model": None}}
    return Configuration(summary, {}, {each.level: each for each in levels}, None, name)


def test_all_four_states_by_name() -> None:
    one = made(
        "a",
        level(1, [500.0], [20.0]),
        level(2, [1500.0], [20.0]),
        level(4, [500.0], [10.0]),
        level(8, [1500.0], [10.0]),
    )
    found = matrix([one, made("b", level(2, [500.0], [20.0]))], Slo())
    assert found["levels"] == [1, 2, 4, 8]
    states = [[cell and cell["state"] for cell in row["cells"]] for row in found["rows"]]
    assert states == [["both", "tps_only", "ttft_only", "neither"], [None, "both", None, None]]


def test_any_limits_after_the_run() -> None:
    one = made("a", level(1, [400.0] * 9 + [900.0], [30.0] * 9 + [12.0]))
    # P90 of ten is the 9th: 400 ms; what 90 % get at least is the 2nd smallest: 30
    assert judgements(one, Slo(400.0, 30.0))[1].both is True
    assert judgements(one, Slo(399.0, 30.0))[1].state == slo.TPS_ONLY
    assert judgements(one, Slo(400.0, 31.0))[1].state == slo.TTFT_ONLY
    assert judgements(one, Slo(400.0, 30.0, "p99"))[1].state == slo.NEITHER  # the worst of ten: 900 ms and 12 tok/s
    assert judgements(one, Slo(450.0, 28.2, "mean"))[1].both is True  # means 450 and 28.2
    assert judgements(one, Slo(449.0, 28.2, "mean"))[1].ttft is False
    assert judgements(one, Slo(400.0, 30.0, "p50"))[1].both is True


@pytest.mark.parametrize(("failed", "passes"), [(0, True), (1, True), (2, False)])
def test_one_per_cent_may_fail(failed: int, passes: bool) -> None:
    n = 100 - failed
    one = made("a", level(1, [100.0] * n, [50.0] * n, failed=failed))
    assert judgements(one, Slo())[1].both is passes
    assert judgements(one, Slo())[1].obstacle == (None if passes else "failures")
    assert judgements(one, Slo(convention="kimi-report"))[1].both is True  # the source leaves failures out


def test_failures_reach_into_the_tail() -> None:
    one = made("a", level(1, [100.0] * 80, [50.0] * 80, failed=20))
    cell = matrix([one], Slo())["rows"][0]["cells"][0]
    assert (cell["ttft"], cell["tps"], cell["ttft_ms"], cell["tps_tok_s"]) == (False, False, None, 0.0)


def test_an_incomplete_level_ends_the_count() -> None:
    good = [100.0] * 40, [50.0] * 40
    one = made("a", level(1, *good), level(2, *good, complete=False), level(4, *good))
    found = capacity(one, Slo())
    assert (found.c_max, found.passed_above, found.judged) == (1, (4,), True)
    assert capacity(one, Slo(convention="cordatus")).c_max == 4  # the last that passes


def test_conventions_differ_where_they_say() -> None:
    marks = [Mark(1, True, 1.0, 2.0), Mark(2, False, 1.0, 2.0), Mark(4, True, 1.0, 2.0)]
    assert [slo.capacity(marks, 44.6, name).c_max for name in CONVENTIONS] == [1, 1, 4]
    # 1 x (1 + 44.6 / 1) = 45.6 to nearest; 4 x (1 + 44.6 / 2) = 93.2, and 93.9 cut is 93
    assert [slo.capacity(marks, 44.6, name).users for name in CONVENTIONS] == [46, 46, 93]
    assert slo.capacity(marks, 44.95, "cordatus").users == 93
    unknown = [Mark(1, True, 1.0), Mark(2, None, 1.0)]
    assert (slo.capacity(unknown).c_max, slo.capacity(unknown).judged) == (1, False)


def test_sensitivity_and_relative_capacity() -> None:
    wide, narrow = (made(n, level(8, [100.0] * 40, [50.0] * 40, latency=each)) for n, each in (("a", 1.0), ("b", 5.0)))
    broken = made("c", level(8, [9000.0] * 40, [50.0] * 40))
    found = capacities([narrow, wide, broken], Slo(), 10.0)
    assert [row["users"] for row in found["rows"]] == [24, 88, None]  # 8 x (1 + 10 / 5), 8 x (1 + 10 / 1)
    assert found["relative"] == [{"of": "a", "to": "b", "ratio": 88 / 24}]
    assert sensitivity(broken, Slo(), 10.0)["percentile"] == dict.fromkeys(("p50", "p90", "p99", "mean"), 0)
    users = sensitivity(narrow, Slo(), 10.0)
    assert users["think_time"] == {"5": 16, "10": 24, "15": 32, "45": 80, "120": 200}
    assert users["percentile"] == dict.fromkeys(("p50", "p90", "p99", "mean"), 24)


@given(st.data())
def test_a_surface_is_what_counting_gives(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 60))
    numbers = st.lists(st.integers(1, 12).map(float), min_size=n, max_size=n)
    one = level(4, data.draw(numbers), data.draw(numbers), failed=data.draw(st.integers(0, 3)))
    firsts, speeds = data.draw(st.lists(st.integers(0, 13), min_size=1, max_size=5)), [1.0, 5.0, 5.5, 20.0]
    found = surface(one, Slo(), firsts, speeds)
    assert one.due is not None and found.goodput is not None and found.goodput_rps is not None
    everyone = list(zip(one.due.ttft_ms, one.due.tps, strict=True))
    for i, first in enumerate(found.ttft_ms):
        for j, speed in enumerate(found.tps):
            met = sum(ttft <= first and tps >= speed for ttft, tps in everyone)
            assert found.goodput[i, j] == met / len(everyone)
            assert found.goodput_rps[i, j] == met / SECONDS
            asked = Slo(float(first), float(speed))
            assert bool(found.passes[i, j]) == judgements(made("a", one), asked)[4].both


@pytest.mark.parametrize("convention", list(CONVENTIONS))
def test_a_surface_of_users_is_the_capacity_at_each_pair(convention: str) -> None:
    random = np.random.default_rng(3)
    levels = [
        level(c, random.normal(100.0 * c, 20.0, 50), random.normal(60.0 / c, 3.0, 50), latency=float(c))
        for c in (1, 2, 4, 8)
    ]
    one, firsts, speeds = made("a", *levels), [90.0, 200.0, 350.0, 500.0, 900.0], [5.0, 10.0, 25.0, 55.0]
    limits = Slo(convention=convention)
    c_max, users = capacity_surface(one, limits, firsts, speeds)
    for i, first in enumerate(firsts):
        for j, speed in enumerate(speeds):
            found = capacity(one, replace(limits, ttft_ms=first, tps=speed))
            assert (int(c_max[i, j]) or None) == found.c_max
            assert (None if np.isnan(users[i, j]) else int(users[i, j])) == found.users
    assert len(set(c_max.ravel())) > 2  # the grid told levels apart


def test_a_surface_of_a_table_has_no_goodput() -> None:
    told = level(1, [100.0] * 3, [50.0] * 3)
    found = surface(Level(told.figures), Slo(), [50.0, 100.0], [20.0])
    assert found.goodput is None and found.passes.tolist() == [[False], [True]]


def test_low_n_by_percentile() -> None:
    figures = level(1, [1.0] * 28, [1.0] * 28).figures
    assert [low_n(figures, "ttft_ms", each) for each in ("p50", "p90", "p10", "p99", "mean")] == [
        False,
        True,
        True,
        True,
        False,
    ]
    assert low_n({"ttft_ms": {"n": None}}, "ttft_ms", "p90") is False
