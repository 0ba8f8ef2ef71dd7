"""The source report's own figures from its own tables, by its conventions; and its known faults, found by rule."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fastload.analysis.configuration import Configuration, configurations
from fastload.analysis.overview import overview
from fastload.analysis.slo import Slo
from fastload.trace import open_run
from fastload.trace.formats.readers import READERS, read
from fastload.trace.imported import write_imported

DATA = Path(__file__).parent / "data"
TABLES, APPENDIX = DATA / "kimi-k3-b300.json", DATA / "kimi-k3-appendix-a.csv"
DERIVED: dict[str, Any] = json.loads((DATA / "kimi-k3-derived.json").read_text())
CONFIGS: list[str] = DERIVED["configs"]


def imported(file: Path, at: Path, limits: Slo) -> tuple[Configuration, ...]:
    """The file's configurations as runs on disk, read back; vLLM + Spec with the flag it was started with."""
    flags = {"vllm-spec": {"max_num_seqs": "32"}}
    runs = [
        open_run(write_imported(at, each.name, each.told, {**each.labels, **flags.get(each.name, {})}))
        for each in read(file)
    ]
    return configurations(runs, limits)


@pytest.fixture(scope="module", params=[TABLES, APPENDIX], ids=["json", "csv"])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The report of the source's tables by the source's convention, from either of its formats."""
    limits = Slo(convention="kimi-report")
    return overview(imported(request.param, tmp_path_factory.mktemp("kimi"), limits), limits)


def by_name(rows: list[dict[str, Any]], key: str = "name") -> dict[str, dict[str, Any]]:
    return {row[key]: row for row in rows}


def test_every_aggregate(source: dict[str, Any]) -> None:
    found = by_name(source["configurations"])
    assert list(found) == CONFIGS
    for level, figures in DERIVED["aggregate_tok_s"].items():
        for name, expected in zip(CONFIGS, figures, strict=True):
            entry = by_name(found[name]["levels"], "level")[int(level)]
            # the source rounds 740.48 to 740 and 1125.76 to 1126
            assert round(entry[source["convention"]["aggregate"]]) == expected, (name, level)


def test_every_ratio_and_break_even(source: dict[str, Any]) -> None:
    pairs = by_name(source["speculation"], "spec")
    for engine, ratios in DERIVED["spec_over_direct"].items():
        pair = pairs[f"{engine}-spec"]
        assert pair["direct"] == f"{engine}-direct"
        assert {str(each["level"]): round(each["ratio"], 2) for each in pair["levels"]} == ratios
        assert pair["break_even"] == DERIVED["break_even_level"][engine]
        assert all(each["interval"] is None for each in pair["levels"])  # no requests to draw from


def test_break_even_by_interpolation(source: dict[str, Any]) -> None:
    # vLLM 1.1297 at 8, 0.9920 at 16: 8 x 2^(0.1297 / 0.1377); SGLang 1.3642 at 2, 0.9594 at 4: 2 x 2^(0.3642 / 0.4048)
    crossed = {pair["spec"]: pair["crossings"] for pair in source["speculation"]}
    assert crossed["vllm-spec"] == [pytest.approx(15.37, abs=0.01)]
    assert crossed["sglang-spec"] == [pytest.approx(3.73, abs=0.01)]


def test_every_sign_of_the_matrix(source: dict[str, Any]) -> None:
    expected = DERIVED["slo_matrix_p90"]
    assert source["slo"]["levels"] == expected["levels"]
    for row in source["slo"]["rows"]:
        signs = ["YN"[not cell["ttft"]] + "YN"[not cell["tps"]] for cell in row["cells"]]
        assert signs == expected[row["name"]]
        states = {"YY": "both", "NY": "tps_only", "YN": "ttft_only", "NN": "neither"}
        assert [cell["state"] for cell in row["cells"]] == [states[sign] for sign in signs]


@pytest.mark.parametrize(
    ("percentile", "convention", "users"),
    [
        ("p90", "kimi-report", (427, 266, 261, 59)),
        ("mean", "kimi-report", (682, 266, 717, 187)),
        ("p90", "cordatus", (396, 208, 251, 43)),
    ],
)
def test_every_number_of_users(
    tmp_path: Path, percentile: str, convention: str, users: tuple[int, int, int, int]
) -> None:
    limits = Slo(percentile=percentile, convention=convention)
    found = by_name(overview(imported(TABLES, tmp_path, limits), limits)["capacity"]["rows"])
    assert tuple(found[name]["users"] for name in CONFIGS) == users
    if convention == "kimi-report":
        for name, expected in DERIVED[f"capacity_{percentile}"].items():
            assert {key: found[name][key] for key in expected} == expected
    # the summary of each run says the same as the report
    for one in imported(TABLES, tmp_path / "again", limits):
        assert one.summary["capacity"]["users"] == found[one.short_name]["users"]


def test_relative_capacity_and_sensitivity(source: dict[str, Any]) -> None:
    ratios = {(each["of"], each["to"]): each["ratio"] for each in source["capacity"]["relative"]}
    assert ratios["vllm-direct", "vllm-spec"] == 427 / 266  # "1.6 x more users"
    found = by_name(source["capacity"]["rows"])["vllm-direct"]["sensitivity"]
    # 32 x (1 + T / 3.65)
    assert found["think_time"] == {"5": 76, "15": 164, "45": 427, "120": 1084}
    assert (found["percentile"]["p90"], found["percentile"]["mean"]) == (427, 682)
    assert (found["percentile"]["p50"], found["percentile"]["p99"]) == (None, None)  # not in the tables
    assert source["capacity"]["note"] == "for relative comparison"


def facts(source: Mapping[str, Any], kind: str) -> dict[tuple[str, int], dict[str, Any]]:
    """The facts of a kind by configuration and last level."""
    return {
        (fact["configuration"], fact["levels"][-1]): fact["figures"]
        for fact in source["anomalies"]
        if fact["kind"] == kind
    }


def test_its_known_faults_are_found_by_rule(source: dict[str, Any]) -> None:
    peaks = {name: (level, round(each["tok_s"])) for (name, level), each in facts(source, "peak").items()}
    assert peaks == {
        "vllm-direct": (64, 1759),
        "vllm-spec": (32, 740),  # the source says 16
        "sglang-direct": (64, 1863),
        "sglang-spec": (64, 931),  # the source says 32
    }

    jumps = facts(source, "jump")
    assert set(jumps) == {("sglang-spec", 64)}
    assert jumps["sglang-spec", 64] == {"metric": "ttft_ms", "from": 776.9, "to": 4752.6, "ratio": 4752.6 / 776.9}

    falls = facts(source, "aggregate_falls")
    assert set(falls) == {("vllm-spec", 64)}
    assert (round(falls["vllm-spec", 64]["from"]), round(falls["vllm-spec", 64]["to"])) == (740, 717)

    caps = facts(source, "admission_cap")
    assert set(caps) == {("sglang-spec", 64)}
    decoding = caps["sglang-spec", 64]["decoding"]
    assert {level: round(streams, 1) for level, streams in decoding.items()} == {"32": 29.3, "64": 30.7}

    flags = facts(source, "flag_not_in_force")
    assert set(flags) == {("vllm-spec", 64)}
    assert (flags["vllm-spec", 64]["max_num_seqs"], round(flags["vllm-spec", 64]["decoding"])) == (32, 59)

    outliers = facts(source, "mean_above_p90")
    assert set(outliers) == {("sglang-direct", 1)}
    outlier = outliers["sglang-direct", 1]
    assert (outlier["metric"], outlier["mean"], outlier["p90"], outlier["n"]) == ("ttft_ms", 399.5, 397.2, 10)
    assert outlier["largest_at_least"] == pytest.approx(10 * 399.5 - 9 * 397.2)

    overstated = facts(source, "aggregate_overstated")
    assert set(overstated) == {("sglang-spec", 16), ("sglang-spec", 32), ("vllm-spec", 32), ("vllm-spec", 64)}
    assert round(overstated["sglang-spec", 16]["kimi_report_tok_s"]) == 355
    assert round(overstated["sglang-spec", 16]["tok_s"]) == 240
    assert round(overstated["vllm-spec", 64]["tok_s"]) == 623

    upper = facts(source, "upper_tail_passes")
    assert upper["vllm-spec", 64] == {"p90": 16.51, "mean": 11.21, "limit": 15.0}

    # all 28 rows agree with themselves, also the one that the source calls an anomaly
    assert not facts(source, "table_breaks")
    errors = [level["checks"]["consistency_error"] for one in source["configurations"] for level in one["levels"]]
    assert len(errors) == 28 and max(map(abs, errors)) < 0.014


def test_ten_requests_are_a_low_n(source: dict[str, Any]) -> None:
    assert {one["name"]: one["low_n"] for one in source["configurations"]} == dict.fromkeys(CONFIGS, [1, 2])


def test_our_own_convention_asks_for_a_tail_the_tables_lack(tmp_path: Path) -> None:
    found = overview(imported(TABLES, tmp_path, Slo()), Slo())
    for row in found["slo"]["rows"]:
        assert {cell["state"] for cell in row["cells"]} == {"unknown"}
        assert {cell["tps"] for cell in row["cells"]} == {None}
        # a missed TTFT is a missed level all the same
        assert [cell["passes"] for cell in row["cells"]] == [None if cell["ttft"] else False for cell in row["cells"]]
    for row in found["capacity"]["rows"]:
        assert (row["c_max"], row["users"], row["judged"]) == (None, None, False)


def test_both_formats_tell_the_same() -> None:
    one, other = ({each.name: each.told.levels for each in read(file)} for file in (TABLES, APPENDIX))
    assert one == other
    assert [each.labels["engine"] for each in read(APPENDIX)] == ["vllm", "vllm", "sglang", "sglang"]
    assert [each.labels["speculation"] for each in read(APPENDIX)] == ["none", "DSpark", "none", "DSpark"]
    assert READERS["kimi-report"](TABLES) == read(TABLES)
