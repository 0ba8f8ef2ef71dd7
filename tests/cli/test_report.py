"""import and report at the door: what they print of the Kimi tables, and what a mistake costs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fastload.analysis.conventions import CONVENTIONS
from fastload.analysis.slo import PERCENTILES
from fastload.cli import imports, report
from fastload.trace.formats.readers import READERS

DATA = Path(__file__).parents[1] / "analysis" / "data"
TABLES = str(DATA / "kimi-k3-b300.json")


@pytest.fixture
def kimi(run: Any, tmp_path: Path) -> list[str]:
    """The four runs of the tables, in the order of the file."""
    ended = run("import", TABLES, "--label", "vllm-spec:max_num_seqs=32", "--label", "hardware=DGX-B300")
    assert ended.code == 0, ended.err
    return [line.rpartition(" in ")[2] for line in ended.out.splitlines()]


def test_the_names_in_help_are_those_that_are_known() -> None:
    assert set(report.CONVENTIONS) == set(CONVENTIONS)
    assert report.PERCENTILES == PERCENTILES
    assert set(imports.FORMATS) == set(READERS)


def test_import_says_what_it_made_and_what_is_lacking(run: Any, kimi: list[str], tmp_path: Path) -> None:
    assert [path.rpartition("Z-")[2] for path in kimi] == ["vllm-direct", "vllm-spec", "sglang-direct", "sglang-spec"]
    manifests = [json.loads((tmp_path / path / "manifest.json").read_text()) for path in kimi]
    assert [each["imported"]["format"] for each in manifests] == ["kimi-report"] * 4
    labels = [each["target"]["labels"] for each in manifests]
    assert labels[0] == {"engine": "vllm", "speculation": "none", "hardware": "DGX-B300"}
    assert labels[1] == {"engine": "vllm", "speculation": "spec", "hardware": "DGX-B300", "max_num_seqs": "32"}
    ended = run("import", TABLES, "--name", "k3", "--output", "again")
    assert "again/" in ended.out and "-k3-vllm-direct" in ended.out
    assert "not told by this format: ttft_ms.p10" in ended.err
    assert run("import", str(DATA / "kimi-k3-appendix-a.csv"), "--format", "kimi-report").code == 0


def test_the_formats_of_other_tools_are_guessed(run: Any) -> None:
    told = Path(__file__).parents[1] / "trace" / "data"
    for file, name in (
        ("vllm-detailed.json", "vllm"),
        ("aiperf/profile_export_aiperf.json", "aiperf"),
        ("fastload-sim-lockstep-table.csv", "cordatus"),
    ):
        for form in ((), ("--format", name)):
            ended = run("import", str(told / file), *form, "--name", "x")
            assert ended.code == 0, ended.err
            path = ended.out.strip().rpartition(" in ")[2]
            assert f"({name})" in run("report", path).out


def test_the_report_by_the_convention_of_its_source(run: Any, kimi: list[str]) -> None:
    ended = run("report", *kimi, "--convention", "kimi-report")
    assert (ended.code, ended.err) == (0, "")
    lines = [" ".join(line.split()) for line in ended.out.splitlines()]
    assert "vllm-direct ✓✓ ✓✓ ✓✓ ✓✓ ✓✓ ✓✓ ✗✓" in lines
    assert "sglang-spec ✓✓ ✓✓ ✗✓ ✗✓ ✗✓ ✗✓ ✗✓" in lines
    assert "✓✓ both ✗✓ only TPS ✓✗ only TTFT ✗✗ neither" in lines
    for row in (
        "vllm-direct 32 3.65 427",
        "vllm-spec 32 6.15 266",
        "sglang-direct 16 2.94 261",
        "sglang-spec 2 1.58 59",
    ):
        assert lines[lines.index(row) + 1] == "for relative comparison"  # under every number of users
    assert "vllm-direct: 1.6 x the users of vllm-spec" in lines
    assert "vllm-direct 76 164 427 1084" in lines  # at 5, 15, 45, 120 s
    assert "vllm-direct ? 427 ? 682" in lines  # P50, P90, P99, mean
    assert "16 0.99 - 43.60 43.95 -" in lines
    assert "break-even: the ratio crosses 1 at c=15.37; level nearest to 1: c=16" in lines
    assert any(
        line.startswith("flag_not_in_force: vllm-spec at c=64: max_num_seqs 32, decoding 58.98") for line in lines
    )
    assert max(map(len, ended.out.splitlines())) <= 120
    assert "SIMULATED" not in ended.out


def test_limits_percentile_and_think_time(run: Any, kimi: list[str]) -> None:
    asked = ("--convention", "kimi-report", "--percentile", "mean", "--think-time", "10", "--json")
    found = json.loads(run("report", kimi[0], *asked, "--slo", "ttft:600", "tps:40").out)
    assert found["limits"] == {"ttft_ms": 600.0, "tps": 40.0, "percentile": "mean", "convention": "kimi-report"}
    (row,) = found["capacity"]["rows"]
    # TTFT 543.8 and TPS 43.95 at 16; 608.1 at 32: 16 x (1 + 10 / 2.92) = 70.8
    assert (row["c_max"], row["users"]) == (16, 71)
    for words in (("--slo", "ttft:600 tps:40"), ("--slo", "ttft:600,tps:40"), ("--slo=ttft:600", "--slo=tps:40")):
        assert json.loads(run("report", kimi[0], *asked, *words).out)["limits"] == found["limits"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("report",), "RUN: none given"),
        (("report", "tps:15"), "RUN: none given"),
        (("report", "a", "a"), "RUN a: is given twice"),
        (("report", "a", "--slo", "itl:5"), "--slo 'itl:5': give ttft:MS, tps:TOK/S or both"),
        (("report", "a", "--slo", ""), "--slo '': give"),
        (("report", "a", "--slo", "ttft:0"), "--slo ttft 0: give a number above 0"),
        (("report", "a", "--slo", "ttft:nan"), "--slo ttft nan: give a number above 0"),
        (("report", "a", "--slo", "ttft:x"), "--slo ttft 'x': is not a number"),
        (("report", "a", "--slo", "ttft:1", "ttft:2"), "--slo ttft:2: ttft is given twice"),
        (("report", "a", "--think-time", "-1"), "--think-time -1: give a number from 0 on"),
        (("report", "a", "--convention", "mine"), "--convention"),
        (("report", "a", "--percentile", "p95"), "--percentile"),
        (("import",), "FILE is needed"),
        (("import", "none.json"), "none.json: cannot be read"),
        (("import", TABLES, "--format", "xls"), "--format"),
        (("import", TABLES, "--label", "x"), "--label 'x': give KEY=VALUE"),
        (("import", TABLES, "--label", "vllm:a=b"), "--label 'vllm:a=b': the file has no 'vllm'; it has sglang-direct"),
        (("import", TABLES, "--name", "a/b"), "--name"),
    ],
)
def test_a_mistake_is_one_line(run: Any, words: tuple[str, ...], says: str) -> None:
    ended = run(*words)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("fastload: ") and says in ended.err and ended.err.count("\n") == 1


def test_what_is_no_run_is_said(run: Any) -> None:
    ended = run("report", "nowhere")
    assert ended.code == 1 and ended.err.startswith("fastload: nowhere does not exist")


def test_runs_of_one_name_are_told_apart(run: Any, kimi: list[str]) -> None:
    ended = run("import", TABLES, "--output", "other")
    twin = ended.out.splitlines()[0].rpartition(" in ")[2]
    found = json.loads(run("report", kimi[0], twin, kimi[1], "--json").out)
    names = [one["name"] for one in found["configurations"]]
    assert names == [Path(kimi[0]).name, Path(twin).name, "vllm-spec"]
