"""The grammar of assertions, what holds and what misses, and when worse figures are a regression."""

import re
from typing import Any

import numpy as np
import pytest

from fastload.analysis import check
from fastload.analysis.configuration import Configuration, Level
from fastload.errors import PlanError

KEYS = ("ttft_ms", "itl_ms", "tps", "latency_s")


def level(ttft: Any = None, **more: Any) -> Level:
    """A level of 200 requests whose TTFT is spread evenly over 90..110 % of `ttft`; all other figures are equal."""
    spread = np.linspace(0.9, 1.1, 200)
    values = {"ttft_ms": (100.0 if ttft is None else ttft) * spread, "itl_ms": 20 * spread, "tps": 30 * spread}
    samples = {name: np.sort(each) for name, each in (values | {"latency_s": 2 * spread}).items()}
    figures: dict[str, Any] = {
        name: {
            "n": len(each),
            "mean": float(each.mean()),
            "p10": float(each[21 - 1]),
            "p50": float(each[100 - 1]),
            "p90": float(each[180 - 1]),
            "p99": float(each[198 - 1]),
        }
        for name, each in samples.items()
    }
    rates = {"aggregate_tok_s": 1000.0, "system_rps": 8.0, "rate_edge_error": 0.1}
    return Level(figures | rates | {"measured": 200, "ok": 200, "failed": 0} | more, samples)


def subject(levels: dict[int, Level], status: str = "complete", verdict: str = "valid", **more: Any) -> Configuration:
    summary = {
        "run_id": "r",
        "status": status,
        "simulated": False,
        "verdict": {"status": verdict, "reasons": ["why"] if verdict != "valid" else [], "notes": []},
        "capacity": {"users": 427, "c_max": 32},
    }
    return Configuration(summary | more, {"target": {}, "plan": {}}, levels)


def missed(cases: list[check.Case]) -> list[str]:
    return [case.name for case in cases if not case.ok]


@pytest.mark.parametrize(
    ("text", "name", "statistic", "sign", "value", "at"),
    [
        ("ttft.p90<=1000@32", "ttft", "p90", "<=", 1000, 32),
        (" ttft_ms . p90 <= 1e3 @ 32 ".replace(" . ", "."), "ttft", "p90", "<=", 1000, 32),
        ("users>=400", "users", None, ">=", 400, None),
        ("itl<25", "itl", "mean", "<", 25, None),
        ("failure_rate==0", "failure_rate", None, "==", 0, None),
        ("tps.p10>15@8", "tps", "p10", ">", 15, 8),
        ("aggregate_tok_s>=-1.5", "aggregate", None, ">=", -1.5, None),
    ],
)
def test_assertions(text: str, name: str, statistic: str | None, sign: str, value: float, at: int | None) -> None:
    one = check.parse(text)
    assert (one.figure.name, one.statistic, one.operator, one.value, one.level) == (name, statistic, sign, value, at)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tfft.p90<=1", "there is no metric 'tfft'; there are ttft, ttfa, itl"),
        ("ttft.p95<=1", "ttft has no statistic 'p95'; it has mean, p10, p50, p90, p99"),
        ("users.p90>=1", "users is one figure and has no statistic 'p90'; write users>=1"),
        ("users>=1@8", "users is a figure of the whole run, not of a level; leave out @8"),
        ("ttft<=nan", "'nan' is not a number"),
        ("ttft<=inf", "'inf' is not a number"),
        ("ttft<=1s", "'1s' is not a number"),
        ("ttft<=1@c8", "'c8' is no level; give a concurrency, such as @32"),
        ("ttft=1", "not of the form METRIC[.STATISTIC] OPERATOR VALUE[@LEVEL]"),
        ("", "not of the form"),
        ("ttft.p90<=1000@32@8", "'32@8' is no level"),
    ],
)
def test_what_cannot_be_meant_is_said_in_one_line(text: str, says: str) -> None:
    with pytest.raises(PlanError) as raised:
        check.parse(text)
    assert str(raised.value).startswith(f"--assert {text!r}: ") and says in str(raised.value)
    assert "\n" not in str(raised.value)


def test_limits(make: Any) -> None:
    run = subject({1: level(), 2: level(200)})
    texts = ("ttft.mean<=100.5@1", "ttft<=250", "users>=427", "c_max>8")
    held = check.check(run, [check.parse(text) for text in texts])
    assert [case.name for case in held] == [
        "the run is valid", "ttft.mean<=100.5@1", "ttft<=250@1", "ttft<=250@2", "users>=427", "c_max>8",
    ]  # fmt: skip
    assert missed(held) == []
    over = check.check(run, [check.parse("ttft.p90<=150"), check.parse("users>427")])
    assert missed(over) == ["ttft.p90<=150@2", "users>427"]
    assert over[2].says == "ttft.p90 at c=2 is 215.980 ms; asked for <= 150 ms".replace("215.980", "215.98")
    assert over[3].says == "users is 427; asked for > 427"


def test_a_level_that_is_not_there_and_a_figure_that_was_not_measured() -> None:
    run = subject({1: level(ttfa_ms=None)}, capacity={"users": None, "c_max": None})
    with pytest.raises(PlanError, match="the run has no level 3; it has 1$"):
        check.check(run, [check.parse("ttft<=1@3")])
    cases = check.check(run, [check.parse(text) for text in ("ttfa.p90<=1e9", "users>=0", "goodput>=0@1", "ok>=200")])
    assert missed(cases) == ["ttfa.p90<=1e9@1", "users>=0", "goodput>=0@1"]
    assert all("was not measured" in case.says for case in cases if not case.ok)
    assert missed(check.check(subject({}), [check.parse("ttft<=1")])) == ["ttft<=1"]


def test_a_run_that_is_not_whole_or_not_valid_misses() -> None:
    assert missed(check.check(subject({}, verdict="invalid"), [])) == ["the run is valid"]
    assert missed(check.check(subject({}, status="interrupted"), [])) == ["the run is valid"]
    assert missed(check.check(subject({}, verdict="suspect"), [])) == []
    assert missed(check.check(subject({}, verdict="suspect"), [], strict=True)) == ["the run is valid"]
    assert missed(check.check(subject({}, verdict="unknown"), [])) == []  # imported: no trace to judge it by
    assert missed(check.check(subject({}, verdict="unknown"), [], strict=True)) == ["the run is valid"]
    baseline = subject({1: level()}, verdict="invalid")
    assert missed(check.check(subject({1: level()}), [], baseline)) == ["the baseline is valid"]


def test_a_regression_is_large_and_its_intervals_lie_apart() -> None:
    old = subject({8: level(100)})
    worse = check.check(subject({8: level(108)}), [], old, 0.05)
    assert missed(worse) == ["no regression of ttft.mean@8", "no regression of ttft.p90@8"]
    assert any("+8.00 % (+ is worse); 5 allowed; 95 % intervals" in case.says for case in worse)
    assert missed(check.check(subject({8: level(108)}), [], old, 0.10)) == []  # apart, but not that large
    assert missed(check.check(subject({8: level(92)}), [], old, 0.05)) == []  # better


def test_a_large_effect_that_may_be_chance_is_none() -> None:
    few = {name: np.sort(np.random.default_rng(1).exponential(100, 40)) for name in KEYS}
    many = {name: 1.2 * values for name, values in few.items()}
    counts = {"measured": 40, "ok": 40, "failed": 0}
    sides = [
        Level(counts | {"ttft_ms": {"mean": float(each["ttft_ms"].mean()), "n": 40}}, each) for each in (few, many)
    ]
    (case,) = [
        one for one in check.check(subject({1: sides[1]}), [], subject({1: sides[0]})) if "ttft.mean" in one.name
    ]
    assert case.ok and "+20.00 %" in case.says and "overlap: not counted as a regression" in case.says


def test_directions_and_failures() -> None:
    old = subject({1: level()})
    slower = {"aggregate_tok_s": 700.0, "system_rps": 7.9}
    found = check.check(subject({1: level(failed=40, **slower)}), [], old, 0.05)
    assert missed(found) == ["no regression of aggregate@1", "no regression of failure_rate@1"]
    (failures,) = [case for case in found if "failure_rate" in case.name]
    assert "0 -> 0.2, +20.00 points (+ is worse)" in failures.says
    assert missed(check.check(subject({1: level(aggregate_tok_s=2000.0)}), [], old)) == []


def test_a_figure_that_vanished_is_a_miss_and_one_that_is_new_is_not() -> None:
    old, new = subject({1: level()}), subject({1: level(system_rps=None)})
    assert missed(check.check(new, [], old)) == ["no regression of rps@1"]
    assert missed(check.check(old, [], new)) == []


def test_runs_without_a_level_in_common() -> None:
    with pytest.raises(PlanError, match=re.escape("--baseline: no level in common; the run has 1, the baseline 2")):
        check.check(subject({1: level()}), [], subject({2: level()}))


def test_wilson_knows_that_no_failure_in_few_requests_is_no_proof() -> None:
    assert check.interval(level(failed=0, measured=30), check.FIGURES["failure_rate"], None) == pytest.approx(
        (0, 0.1135), abs=2e-4
    )  # Wilson 1927: z2 / (n + z2)


def test_what_an_imported_file_does_not_tell_is_no_regression_but_keeps_no_limit() -> None:
    told = level(system_rps=None, failed=None)
    run = Configuration(subject({}).summary, {"imported": {"lacks": ["system_rps", "failed", "tps.p10"]}}, {1: told})
    cases = check.check(run, [check.parse("rps>=1")], subject({1: level()}))
    assert missed(cases) == ["rps>=1@1"]
    silent = [case.name for case in cases if "not told" in case.says]
    assert silent == [f"no regression of {name}@1" for name in ("tps.p10", "rps", "failure_rate")]


def test_remarks_name_what_cannot_be_compared() -> None:
    old = subject({1: level(completion_tokens_mean=128.0)})
    new = subject({1: level(completion_tokens_mean=100.0)}, simulated=True, verdict="suspect")
    old.manifest["plan"]["osl"], new.manifest["plan"]["osl"] = 128, 256
    new.manifest["target"]["model"] = "m"
    assert check.remarks(new, old) == [
        "the run is suspect; its figures are doubtful",
        "one of run and baseline is simulated, the other does not say so",
        "run and baseline differ in model (not said -> m)",
        "run and baseline differ in osl: 128 -> 256",
        "answers at c=1 had 100 tokens on average, 128 in the baseline",
    ]
