"""Levels and durations: what is taken, and the line a mistake gets."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastload.errors import PlanError
from fastload.plan import LARGEST_LEVEL, Level, levels, parse_duration, parse_levels


@given(st.lists(st.integers(1, LARGEST_LEVEL), min_size=1, max_size=20, unique=True))
def test_levels_round_trip(wanted: list[int]) -> None:
    assert parse_levels(",".join(map(str, wanted))) == tuple(wanted)
    assert parse_levels(" , ".join(f"0{level}" for level in wanted)) == tuple(wanted)


@given(st.text(max_size=30))
def test_any_text_gives_levels_or_one_line(text: str) -> None:
    try:
        parsed = parse_levels(text)
    except PlanError as error:
        assert str(error).startswith("--levels ") and "\n" not in str(error)
    else:
        assert parsed and all(1 <= level <= LARGEST_LEVEL for level in parsed)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("0", "level of 0"),
        ("a,b", "'a'"),
        ("8,,9", "empty entry"),
        ("", "empty entry"),
        ("1,2,", "empty entry"),
        ("-4", "'-4'"),
        ("+4", "'+4'"),
        ("1.5", "'1.5'"),
        ("1e3", "'1e3'"),
        ("４", "whole number"),
        ("4,8,4", "4 is given twice"),
        ("65536", "largest level is 65535"),
        ("9" * 5000, "largest level is 65535"),
        ("1 2", "'1 2'"),
    ],
)
def test_bad_levels_name_what_is_wrong(text: str, word: str) -> None:
    with pytest.raises(PlanError, match="^--levels ") as caught:
        parse_levels(text)
    assert word in str(caught.value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 250


def test_requests_are_rounds_times_level_but_not_fewer_than_the_minimum() -> None:
    made = levels((1, 2, 4, 8), 10, 30, None, None, 0)
    assert [level.measured for level in made] == [30, 30, 40, 80]
    assert [level.dir_name for level in made] == ["00-c1", "01-c2", "02-c4", "03-c8"]
    assert sum(level.measured or 0 for level in levels((1, 2, 4, 8, 16, 32, 64), 3, 0, None, None, 0)) == 381


def test_number_and_duration_override_rounds() -> None:
    assert levels((8,), 10, 30, 5, None, 2) == (Level(0, 8, 5, None, 2),)
    assert levels((8,), 10, 30, None, 60.0, 0) == (Level(0, 8, None, 60.0, 0),)
    assert levels((8,), 10, 30, 500, 60.0, 0) == (Level(0, 8, 500, 60.0, 0),)


@pytest.mark.parametrize(
    ("arguments", "flag"),
    [
        (((1,), -1, 0, None, None, 0), "--rounds"),
        (((1,), 1, -1, None, None, 0), "--min-requests"),
        (((1,), 0, 0, None, None, 0), "--rounds"),
        (((1,), 1, 0, 0, None, 0), "--num-requests"),
        (((1,), 1, 0, None, 0.0, 0), "--duration"),
        (((1,), 1, 0, None, float("nan"), 0), "--duration"),
        (((1,), 1, 0, None, None, -1), "--warmup"),
        (((), 1, 0, None, None, 0), "--levels"),
    ],
)
def test_numbers_out_of_range_name_their_flag(arguments: tuple[object, ...], flag: str) -> None:
    with pytest.raises(PlanError, match=flag):
        levels(*arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("2h", 7200), ("90s", 90), ("10m", 600), ("500ms", 0.5), ("30", 30), ("1.5", 1.5), ("1h30m", 5400)],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text", ["", "h", "2x", "-3s", "30m1h", "1h30", "0", "nan", "1..2s", "2 h", "inf", "9e9"]
)
def test_bad_durations_name_the_flag(text: str) -> None:
    with pytest.raises(PlanError, match="^--wait-ready "):
        parse_duration(text, "--wait-ready")


@given(st.text(max_size=12))
def test_any_text_gives_seconds_or_one_line(text: str) -> None:
    try:
        assert parse_duration(text) > 0
    except PlanError as error:
        assert "\n" not in str(error)
