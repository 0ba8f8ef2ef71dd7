"""What can be done with finished runs: check, compare, reconcile and export, as a user calls them."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from fastload import open_run, sim

pytestmark = pytest.mark.limit(180)  # two sweeps, on a machine that others use


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory: pytest.TempPathFactory, command: tuple[str, ...]) -> tuple[Path, Path]:
    """Sweeps of two simulated engines, one with five times the other's time to the first token and step: no load of
    this machine makes up for that.
    """
    cwd = tmp_path_factory.mktemp("two")
    made = []
    for name, ttft_ms, step_ms in (("quick", 20.0, 4.0), ("slow", 100.0, 20.0)):
        with sim.start(sim.Options(ttft_ms=ttft_ms, step_ms=step_ms), None) as url:
            words = ("--url", url, "--levels", "1,2", "--num-requests", "30", "--osl", "8", "--name", name, "--quiet")
            ended = subprocess.run(
                [*command, "sweep", *words, "--label", f"hardware={name}"], cwd=cwd, capture_output=True, text=True
            )
        assert "Traceback" not in ended.stderr, ended.stderr
        (path,) = (cwd / "results").glob(f"*-{name}")
        made.append(path)
    return made[0], made[1]


def missed(ended: Any) -> list[str]:
    """The cases that missed; a run that a busy machine made invalid says so itself, and is not what is asked here."""
    cases = json.loads(ended.out)["cases"]
    return [case["name"] for case in cases if not case["ok"] and case["kind"] != "run"]


def test_check_is_green_and_red(fastload: Any, two_runs: tuple[Path, Path], tmp_path: Path) -> None:
    quick, slow = map(str, two_runs)
    limits = ("--assert", "ttft.p90<=1000@2", "--assert", "users>=1")
    green = fastload("check", quick, "--baseline", slow, *limits, "--json")
    assert missed(green) == [] and green.code in (0, 3)
    assert green.code == 0 or "the run is valid" in green.out
    red = fastload(
        "check", slow, "--baseline", quick, "--max-regression", "5%", "--assert", "ttft.mean<=60@1", "--json",
        "--junit", "out.xml", "--markdown", "out.md",
    )  # fmt: skip
    assert red.code == 3
    assert set(missed(red)) >= {"ttft.mean<=60@1"} | {
        f"no regression of {figure}@{level}"
        for figure in ("ttft.mean", "ttft.p90", "itl.mean", "tps.mean", "latency.mean", "latency.p90")
        for level in (1, 2)
    }
    assert json.loads(red.out)["simulated"] is True
    suite = ElementTree.parse(tmp_path / "out.xml").getroot()[0]
    assert int(suite.get("failures", "0")) >= 13
    assert "**MISS**" in (tmp_path / "out.md").read_text() and "SIMULATED" in (tmp_path / "out.md").read_text()


def test_check_says_which_levels_there_are(fastload: Any, two_runs: tuple[Path, Path]) -> None:
    ended = fastload("check", str(two_runs[0]), "--assert", "ttft.p90<=1000@32")
    assert ended.code == 2
    assert ended.line == "fastload: --assert 'ttft.p90<=1000@32': the run has no level 32; it has 1, 2"


def test_compare_names_the_axis_and_the_difference(fastload: Any, two_runs: tuple[Path, Path]) -> None:
    ended = fastload("compare", *map(str, two_runs), "--json")
    (pair,) = json.loads(ended.out)["pairs"]
    assert ended.code == 0 and pair["axes"] == {"hardware": ["quick", "slow"]}
    for level in pair["levels"]:
        assert level["figures"]["ttft.mean"]["differs"] is True
        low, high = level["figures"]["ttft.mean"]["interval"]
        assert low < level["figures"]["ttft.mean"]["difference"] < high and low > 20  # 80 ms were made
    text = fastload("compare", *map(str, two_runs)).out
    assert "A -> B: hardware: quick -> slow" in text and "SIMULATED" in text
    assert "requests: plan.seed:" in text


def test_reconcile_and_a_file_of_vllms_shape_agree(fastload: Any, two_runs: tuple[Path, Path], tmp_path: Path) -> None:
    quick = str(two_runs[0])
    result = json.loads(fastload("reconcile", quick, "--level", "2", "--json").out)
    (level,) = result["levels"]
    assert fastload("export", quick, "--format", "vllm-json", "--level", "2", "--output", "v.json").code == 0
    written = json.loads((tmp_path / "v.json").read_text())
    for figure, name in (("ttft_ms", "ttft"), ("itl_ms", "tpot"), ("icl_ms", "itl")):
        for statistic in ("mean", "p50", "p90", "p99"):
            value = level["figures"][figure][statistic]["vllm"]["value"]
            assert written[f"{statistic}_{name}_ms"] == pytest.approx(value)
    assert written["output_throughput"] == level["figures"]["aggregate_tok_s"]["value"]["vllm"]["value"]
    assert written["completed"] == 30 == len(written["itls"]) and len(written["itls"][0]) == 8  # role, 8 tokens
    beside = json.loads(fastload("reconcile", quick, "--with", "v.json", "--json").out)["levels"]
    assert [level["level"] for level in beside] == [2] and len(beside[0]["beside"]["rows"]) == 18
    assert all(abs(row["rest"]) <= 1e-9 * row["theirs"] for row in beside[0]["beside"]["rows"])
    text = fastload("reconcile", quick).out
    assert "the role event is taken as the first token" in text and "SIMULATED" in text


def test_export_overwrites_nothing(fastload: Any, two_runs: tuple[Path, Path], tmp_path: Path) -> None:
    run = open_run(two_runs[0])
    assert fastload("export", str(run.path)).code == 0
    (path,) = tmp_path.glob("*-requests.parquet")
    assert pq.read_table(path).num_rows == run.requests().num_rows
    again = fastload("export", str(run.path))
    assert again.code == 2 and "is there already" in again.line
    assert fastload("export", str(run.path), "--force", "--tokens", "--format", "csv", "--anonymize").code == 0
    events = pyarrow.csv.read_csv(tmp_path / "run-events.csv")
    assert events.num_rows == sum(map(len, run.tokens()["event_ns"].to_pylist()))
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert "is a device or a pipe" in fastload("export", str(run.path), "--output", str(pipe), "--force").line
    assert pipe.is_fifo()
    missing = fastload("export", str(run.path), "--output", "no/such/x.csv", "--format", "csv")
    assert missing.code == 2 and "there is no directory" in missing.line
