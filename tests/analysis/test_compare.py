"""Two runs side by side: axes, differences with intervals, and what so few requests cannot say."""

from typing import Any

import numpy as np
import pytest

from fastload.analysis.compare import axes, compare, difference, differing_axes, manifest_differences
from fastload.analysis.configuration import Configuration, Level, samples
from fastload.analysis.figures import FIGURES
from fastload.analysis.summary import summarise_levels


@pytest.fixture
def run_of(make: Any) -> Any:
    """`run_of(name, {level: TTFTs in ms}, **target)`: a run whose every request gets 4 tokens, 10 ms apart."""

    def made(name: str, levels: dict[int, list[float]], **target: Any) -> Any:
        manifest = {"run_id": name, "target": target, "plan": {}, "levels": []}
        entries = []
        for c, ttfts in levels.items():
            free = [0.0] * c
            requests = []
            for at, ttft in enumerate(ttfts):
                slot = at % c
                events = [make.event(ttft + 10 * step) for step in range(4)]
                requests.append(make.request(free[slot], free[slot] + ttft + 31, events, slot))
                free[slot] += ttft + 31
            entries.append((make.facts(c), *make.tables(requests)))
        summary = summarise_levels(manifest, entries)
        sides = {
            figures["level"]: Level(figures, samples(table))
            for figures, (_, table, _) in zip(summary["levels"], entries, strict=True)
        }
        return Configuration(summary, manifest, sides)

    return made


def ttfts(mean: float, n: int, seed: int = 1) -> list[float]:
    return list(np.random.default_rng(seed).uniform(mean - 10, mean + 10, n).round(3))


def test_axes_come_from_labels_and_else_from_the_server(run_of: Any) -> None:
    run = run_of(
        "a", {}, labels={"Draft-Model": "d", "engine": "mine", "site": "x"}, model="m", facts={"owned_by": "vllm"}
    )
    assert axes(run) == {"engine": "mine", "model": "m", "draft_model": "d", "site": "x"}


def test_a_draft_model_belongs_to_the_speculation(run_of: Any) -> None:
    direct = run_of("direct", {}, labels={"engine": "vllm"})
    spec = run_of("spec", {}, labels={"engine": "vllm", "speculation": "dspark", "draft_model": "d"})
    other = run_of("other", {}, labels={"engine": "vllm", "speculation": "dspark", "draft_model": "e"})
    assert differing_axes(direct, spec) == {"speculation": [None, "dspark"]}
    assert differing_axes(spec, other) == {"draft_model": ["d", "e"]}


def test_more_than_one_axis_is_warned_of_and_a_better_pair_named(run_of: Any) -> None:
    vllm = run_of("vllm", {1: ttfts(50, 40)}, labels={"engine": "vllm"})
    sglang = run_of("sglang", {1: ttfts(50, 40)}, labels={"engine": "sglang"})
    spec = run_of("spec", {1: ttfts(50, 40)}, labels={"engine": "sglang", "speculation": "dspark"})
    first, second = compare([vllm, sglang, spec])["pairs"]
    assert first["axes"] == {"engine": ["vllm", "sglang"]} and first["warnings"] == []
    assert second["warnings"] == [
        "2 axes differ (engine, speculation): no difference below can be laid to one of them;"
        " sglang differs from spec in one only"
    ]
    (repetition,) = compare([vllm, vllm])["pairs"]
    assert [one.split(":")[0] for one in repetition["warnings"]] == ["no axis differs"]


def test_a_difference_has_an_interval_that_covers_it(run_of: Any) -> None:
    old, new = run_of("old", {4: ttfts(50, 200)}), run_of("new", {4: ttfts(60, 200, seed=2)})
    found = compare([old, new])["pairs"][0]["levels"][0]["figures"]
    for name in ("ttft.mean", "ttft.p50", "ttft.p90"):
        low, high = found[name]["interval"]
        assert low < found[name]["difference"] < high and found[name]["differs"] is True
        assert found[name]["method"] == "bootstrap" and found[name]["n"] == [200, 200]
        assert low < 10 < high  # the shift that was made
    assert found["ttft.p90"]["from"] == old.levels[4].figures["ttft_ms"]["p90"]
    assert found["itl.mean"]["difference"] == pytest.approx(0) and found["itl.mean"]["differs"] is False
    assert found["rps"]["method"] == "edge error" and found["icl.p90"]["interval"] is None
    assert found == compare([old, new])["pairs"][0]["levels"][0]["figures"]  # seeded


def test_the_same_distribution_is_rarely_said_to_differ(run_of: Any) -> None:
    """Of 60 pairs of samples of one distribution 3 are expected to be called different; 12 would be odd."""
    false_alarms = 0
    for seed in range(60):
        a, b = (
            Level({}, {"ttft_ms": np.sort(np.random.default_rng((seed, side)).exponential(50, 80))}) for side in (0, 1)
        )
        for side in (a, b):
            side.figures["ttft_ms"] = {"n": 80, "mean": float(side.samples["ttft_ms"].mean())}
        false_alarms += bool(difference(a, b, FIGURES["ttft"], "mean")["differs"])
    assert false_alarms <= 11


def test_few_requests_say_nothing_of_a_tail(run_of: Any) -> None:
    old, new = run_of("old", {1: ttfts(50, 28)}), run_of("new", {1: ttfts(500, 40)})
    found = compare([old, new])["pairs"][0]["levels"][0]["figures"]
    assert found["ttft.p90"]["low_n"] and found["ttft.p90"]["interval"] is None and found["ttft.p90"]["differs"] is None
    assert found["ttft.p50"]["differs"] is True and not found["ttft.p50"]["low_n"]
    assert found["icl.p99"]["low_n"]


def test_levels_of_one_run_only_and_invalid_runs_are_named(run_of: Any) -> None:
    old, new = run_of("old", {1: ttfts(50, 30), 2: ttfts(50, 30)}), run_of("new", {2: ttfts(50, 30), 4: ttfts(50, 1)})
    (pair,) = compare([old, new])["pairs"]
    assert [level["level"] for level in pair["levels"]] == [2] and pair["levels_of_one"] == [1, 4]
    assert any(warning.startswith("new is invalid: ") for warning in pair["warnings"])


def test_what_the_manifests_say_differently() -> None:
    old = {
        "fastload": "1",
        "target": {"url": "u", "facts": {"version": "0.31", "args": ["--a"]}},
        "plan": {"isl": 128, "osl": 128, "seed": 1, "levels": [1]},
        "host": {"kernel": "6", "load_average": [0.1]},
        "levels": [1],
        "run_id": "a",
    }
    new = {
        **old,
        "fastload": "2",
        "target": {"url": "u", "facts": {"version": "0.32", "args": ["--a"], "flag": True}},
        "plan": {"isl": 128, "osl": 256, "seed": 2, "levels": [2]},
        "host": {"kernel": "6", "load_average": [0.2]},
        "run_id": "b",
    }
    assert [(one["group"], one["key"], one["from"], one["to"]) for one in manifest_differences(old, new)] == [
        ("server", "target.facts.version", "0.31", "0.32"),
        ("server", "target.facts.flag", None, True),
        ("requests", "plan.osl", 128, 256),
        ("requests", "plan.seed", 1, 2),
        ("client", "fastload", "1", "2"),
    ]


def test_of_an_import_only_what_it_speaks_of_is_set_beside() -> None:
    run = {"fastload": "1", "plan": {"isl": 128}, "host": {"kernel": "6"}, "target": {"model": "m", "url": "u"}}
    told = {"fastload": "1", "plan": None, "imported": {"format": "vllm", "lacks": ["tps"]}, "target": {"model": "n"}}
    assert [(one["group"], one["key"]) for one in manifest_differences(run, told)] == [
        ("import", "imported.format"),
        ("server", "target.model"),
        ("server", "target.url"),
    ]


def test_figures_by_different_definitions_are_warned_of(run_of: Any) -> None:
    ours = run_of("ours", {1: ttfts(50, 40)})
    theirs = run_of("theirs", {1: ttfts(50, 40)})
    theirs.manifest["imported"] = {"format": "vllm"}
    (pair,) = compare([ours, theirs])["pairs"]
    says = "figures by different definitions, fastload's (ours) and vllm's (theirs)"
    assert any(one.startswith(says) for one in pair["warnings"])
