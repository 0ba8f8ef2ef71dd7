"""Speculation and anomalies: pairs, ratios with intervals, crossings, and each fact on a table made for it."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from fastload.analysis.anomalies import KINDS, Fact, anomalies
from fastload.analysis.configuration import Configuration, Level
from fastload.analysis.conventions import FASTLOAD, KIMI_REPORT
from fastload.analysis.imported import level_figures
from fastload.analysis.slo import Slo
from fastload.analysis.speculation import crossings, nearest_level, pairs, ratio_interval, speculation, unpaired
from fastload.trace.formats.told import ToldLevel


def level(c: int, speeds: Sequence[float] = (), **figures: Any) -> Level:
    """A level of what is given; means of distributions as plain numbers."""
    told: dict[str, Any] = {}
    for name, value in figures.items():
        told[name] = value if isinstance(value, dict) or name == "completion_tokens_mean" else {"mean": value}
    if speeds:
        told["tps"] = {"mean": float(np.mean(speeds)), "n": len(speeds)}
    more = {"aggregate_tok_s": figures["aggregate"]} if "aggregate" in figures else {}
    told.pop("aggregate", None)
    return Level(
        level_figures(ToldLevel(c, told | more)), {"tps": np.sort(np.asarray(speeds, float))} if speeds else {}
    )


def made(name: str, levels: Sequence[Level], served: str = "m", **labels: str) -> Configuration:
    summary = {"run_id": name, "name": name, "simulated": False, "target": {"labels": labels, "model": served}}
    return Configuration(summary, {}, {each.level: each for each in levels}, None, name)


def test_twins_differ_in_their_speculation_alone() -> None:
    runs = [
        made("direct", [], engine="vllm"),
        made("spec", [], engine="vllm", speculation="eagle", draft_model="d"),
        made("other engine", [], engine="sglang", speculation="eagle"),
        made("other model", [], served="n", engine="vllm", speculation="eagle"),
        made("flagged", [], **{"engine": "vllm", "Speculation": "ngram", "max-num-seqs": "32"}),
    ]
    assert [(one.name, other.name) for one, other in pairs(runs)] == [("direct", "spec"), ("direct", "flagged")]
    assert unpaired(runs) == ["other engine", "other model"]
    assert unpaired(runs[1:]) == []  # then there is nothing to set any against
    served = [
        made(name, [], served=name, **{"model": "K3", **more})
        for name, more in (("a", {}), ("b", {"speculation": "x"}))
    ]
    assert [(one.name, other.name) for one, other in pairs(served)] == [("a", "b")]  # a label says what a name hides


def test_ratio_and_interval() -> None:
    random = np.random.default_rng(0)
    slow, fast = random.normal(50, 5, 200).tolist(), random.normal(75, 5, 200).tolist()
    one, other = level(1, slow), level(1, fast)
    low, high = ratio_interval(one, other) or (0.0, 0.0)
    truth = np.mean(fast) / np.mean(slow)
    # the delta method: relative errors 0.1 / sqrt(200) and 0.0667 / sqrt(200) add in squares
    error = 1.96 * truth * np.sqrt((np.std(slow) / np.mean(slow)) ** 2 + (np.std(fast) / np.mean(fast)) ** 2) / 200**0.5
    assert (low, high) == (pytest.approx(truth - error, abs=0.004), pytest.approx(truth + error, abs=0.004))
    assert ratio_interval(one, other) == [low, high]  # seeded
    assert ratio_interval(Level(one.figures), other) is None  # a table has no requests to draw from
    assert ratio_interval(level(1, [5.0]), other) is None


def test_crossings_over_log2_of_the_load() -> None:
    assert crossings([(1, 2.0), (4, 0.5)]) == [pytest.approx(2 ** (2 * 1 / 1.5))]
    assert crossings([(1, 1.5), (2, 0.5)]) == [pytest.approx(2**0.5)]
    assert crossings([(1, 0.5), (2, 1.5), (4, 0.9)]) == [pytest.approx(2**0.5), pytest.approx(2 ** (1 + 0.5 / 0.6))]
    assert crossings([(1, 1.5), (2, 1.2)]) == []
    assert crossings([(1, 2.0), (2, 1.0), (4, 0.5)]) == [pytest.approx(2.0)]
    assert nearest_level([(1, 1.86), (16, 0.99), (32, 0.66)]) == 16
    assert nearest_level([(1, 1.5), (2, 1.3)]) is None  # it never comes near
    assert nearest_level([(1, 1.5), (2, 1.04)]) == 2
    assert nearest_level([]) is None


def test_the_convention_says_which_break_even() -> None:
    direct = made("d", [level(1, [10.0, 10.0]), level(2, [10.0, 10.0]), level(4, [10.0, 10.0])])
    spec = made("s", [level(1, [15.0, 15.0]), level(2, [5.0, 5.0]), level(8, [1.0, 1.0])], speculation="x")
    (ours,), (theirs,) = (speculation([direct, spec], rules) for rules in (FASTLOAD, KIMI_REPORT))
    assert [each["level"] for each in ours["levels"]] == [1, 2]  # only what both have
    assert ours["break_even"] == pytest.approx(2**0.5)
    assert theirs["break_even"] == theirs["nearest_level"] == 1
    assert ours["levels"][0]["interval"] == [1.5, 1.5]


def of(levels: Sequence[Level], **labels: str) -> list[Fact]:
    return [fact for fact in anomalies([made("x", levels, **labels)], Slo()) if fact.kind != "peak"]


def test_nothing_is_found_where_nothing_is() -> None:
    calm = [
        level(c, ttft_ms=100.0 + 3 * c, itl_ms=10.0, latency_s=(100 + 3 * c + 99 * 10) / 1e3,
              completion_tokens_mean=100.0, aggregate=100.0 * c, tps={"mean": 90.0, "p90": 95.0})
        for c in (1, 2, 4, 8)
    ]  # fmt: skip
    assert of(calm) == []


def test_jumps() -> None:
    assert of([level(1, ttft_ms=100.0), level(2, ttft_ms=300.0)]) == []
    (up,) = of([level(1, ttft_ms=100.0), level(2, ttft_ms=301.0)])
    assert (up.kind, up.levels) == ("jump", (1, 2))
    assert up.figures == {"metric": "ttft_ms", "from": 100.0, "to": 301.0, "ratio": 3.01}
    (down,) = of([level(1, latency_s=90.0), level(2, latency_s=29.0)])
    assert (down.figures["metric"], down.figures["ratio"]) == ("latency_s", 29 / 90)
    # levels a factor of 4 apart may differ by 3 x 3
    assert of([level(1, itl_ms=10.0), level(4, itl_ms=89.0)]) == []
    assert [fact.kind for fact in of([level(1, itl_ms=10.0), level(4, itl_ms=91.0)])] == ["jump"]


def test_aggregate_that_falls() -> None:
    assert of([level(8, aggregate=100.0), level(12, aggregate=90.0)]) == []  # the load has not doubled
    (fact,) = of([level(8, aggregate=100.0), level(16, aggregate=90.0)])
    assert (fact.kind, fact.levels, fact.figures["ratio"]) == ("aggregate_falls", (8, 16), 0.9)
    assert fact.figures["aggregate"] == "aggregate_tok_s"


def test_mean_above_p90() -> None:
    (fact,) = of([level(1, latency_s={"mean": 2.0, "p90": 1.0, "n": 10})])
    assert (fact.kind, fact.figures["largest_at_least"]) == ("mean_above_p90", 11.0)  # 10 x 2 - 9 x 1
    (fact,) = of([level(1, latency_s={"mean": 2.0, "p90": 1.0})])
    assert fact.figures["largest_at_least"] is None


def test_a_table_that_breaks() -> None:
    # 100 + 99 x 10 = 1090 ms, told 1.5 s
    (fact,) = of([level(1, ttft_ms=100.0, itl_ms=10.0, latency_s=1.5, completion_tokens_mean=100.0)])
    assert (fact.kind, fact.figures["error"]) == ("table_breaks", pytest.approx(1.09 / 1.5 - 1))


def test_a_cap_and_a_flag() -> None:
    # decoding at once: c (L - TTFT) / L: 8 x 0.9 = 7.2, 16 x 0.5 = 8, 32 x 0.25 = 8
    levels = [level(c, ttft_ms=ttft, latency_s=1.0) for c, ttft in ((8, 100.0), (16, 500.0), (32, 750.0))]
    caps = [fact for fact in of(levels) if fact.kind == "admission_cap"]
    assert [fact.levels for fact in caps] == [(16, 32)]
    assert caps[0].figures == {"decoding": {"16": 8.0, "32": 8.0}, "cap": 8.0}

    def flagged(flag: str) -> list[tuple[str, tuple[int, ...]]]:
        return [(fact.kind, fact.levels) for fact in of(levels, max_num_seqs=flag) if fact.kind.startswith("flag")]

    assert flagged("4") == [("flag_not_in_force", (each,)) for each in (8, 16, 32)]
    assert flagged("8") == []
    assert flagged("256") == [("flag_never_reached", (16,))]
    assert flagged("many") == flagged("0") == []


def test_every_kind_is_explained() -> None:
    assert all("figures: " in said or kind == "peak" for kind, said in KINDS.items())
    assert set(KINDS) >= {fact.kind for fact in of([level(1, ttft_ms=1.0), level(2, ttft_ms=9.0)])}
