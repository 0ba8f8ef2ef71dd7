"""Service levels and capacity, with the source report's 28 rows as facts."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastload.analysis.levels import table_consistency
from fastload.analysis.slo import Mark, Slo, capacity, judge

CONFIGS = ("vllm-direct", "vllm-spec", "sglang-direct", "sglang-spec")


@pytest.mark.parametrize("config", CONFIGS)
def test_the_source_matrix_and_capacity_come_out_by_its_convention(kimi: dict[str, Any], config: str) -> None:
    limits = Slo(convention="kimi-report")
    rows = kimi["levels"][config]
    judged = [judge(limits, row["ttft_p90"], row["tps_p90"], 0.0, True) for row in rows]
    matrix = ["".join("Y" if met else "N" for met in (each.ttft, each.tps)) for each in judged]
    assert matrix == kimi["slo_matrix_p90"][config]
    marks = [Mark(row["c"], each.both, row["lat_mean"]) for row, each in zip(rows, judged, strict=True)]
    found = capacity(marks)
    expected = kimi["capacity_p90"][config]
    assert (found.c_max, found.l_mean_s, found.users) == (
        expected["c_max"],
        expected["l_mean_s"],
        expected["users"],
    )


@pytest.mark.parametrize("config", CONFIGS)
def test_the_source_capacity_by_means(kimi: dict[str, Any], config: str) -> None:
    marks = [
        Mark(row["c"], judge(Slo(), row["ttft_mean"], row["tps_mean"], 0.0, True).both, row["lat_mean"])
        for row in kimi["levels"][config]
    ]
    expected = kimi["capacity_mean"][config]
    assert (capacity(marks).c_max, capacity(marks).users) == (expected["c_max"], expected["users"])


def test_the_source_table_agrees_with_itself(kimi: dict[str, Any]) -> None:
    # The source calls sglang-spec c=64 an anomaly: 4752.6 ms + 127 x 34.40 ms = 9.12 s agrees with 9.13 s.
    errors = [
        table_consistency(row["ttft_mean"], row["itl_mean"], 128, row["lat_mean"])
        for rows in kimi["levels"].values()
        for row in rows
    ]
    assert len(errors) == 28
    assert max(map(abs, errors)) < 0.014
    assert table_consistency(4752.6, 34.40, 128, 9.13) == pytest.approx(0, abs=0.002)


def test_a_pass_above_a_failing_level_is_not_used() -> None:
    marks = [Mark(8, True, 3.0), Mark(1, True, 1.0), Mark(4, False, 2.0), Mark(2, True, 1.5)]
    assert capacity(marks).c_max == 2
    assert capacity(marks).users == 62  # 2 x (1 + 45 / 1.5)


@pytest.mark.parametrize("marks", [[], [Mark(1, False, 1.0), Mark(2, True, 1.0)], [Mark(1, None, None)]])
def test_no_capacity_without_a_pass(marks: list[Mark]) -> None:
    assert (capacity(marks).c_max, capacity(marks).users) == (None, None)


def test_limits_are_met_at_the_limit() -> None:
    met = judge(Slo(), 1000.0, 15.0, 0.01, True)
    assert (met.ttft, met.tps, met.both) == (True, True, True)
    assert judge(Slo(), 1000.1, 15.0, 0.0, True).both is False
    assert judge(Slo(), 1000.0, 14.9, 0.0, True).both is False
    assert judge(Slo(), 1000.0, 15.0, 0.011, True).both is False
    assert judge(Slo(), 1000.0, 15.0, 0.0, False).both is False
    assert judge(Slo(), math.inf, 0.0, 1.0, True).ttft is False
    assert judge(Slo(), None, 15.0, 0.0, True).both is None


@given(st.dictionaries(st.integers(1, 512), st.booleans(), max_size=8))
def test_every_level_up_to_c_max_passed(passes: dict[int, bool]) -> None:
    found = capacity(Mark(level, passed, 2.0) for level, passed in passes.items()).c_max
    below = [level for level, passed in passes.items() if not passed]
    expected = [level for level in passes if not below or level < min(below)]
    assert found == max(expected, default=None)
