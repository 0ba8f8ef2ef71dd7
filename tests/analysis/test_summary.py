"""summary.json and summary.csv: their shape, strictness, and how they are written."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from fastload.analysis.slo import Slo
from fastload.analysis.summary import as_csv, as_json, summarise, summarise_levels, write_summary
from fastload.errors import TraceError
from fastload.trace.reader import Run

MANIFEST: dict[str, Any] = {
    "schema": 1,
    "definitions": 1,
    "run_id": "20261130T221801Z-try",
    "name": "try",
    "status": "complete",
    "simulated": True,
    "target": {"url": "http://127.0.0.1:8000", "model": 'tiny [chain], "quoted"', "labels": {"gpu": "none"}},
    "plan": {
        "levels": [
            {"index": 0, "concurrency": 1},
            {"index": 1, "concurrency": 2},
            {"index": 2, "concurrency": 4},
        ]
    },
    "calibration": None,
}


@pytest.fixture
def run(make: Any, tmp_path: Path) -> Run:
    """A run on disk: a warm-up, a level at 1, one at 2 that was cut off, one at 4 that never began."""
    levels = {
        "warmup": make.tables(make.steady(0, 1, 0, role="warmup"), 0),
        "00-c1": make.tables(make.steady(0, 30, 40), 1),
        "01-c2": make.tables([*make.steady(0, 2, 1240), *make.steady(1, 2, 1240)], 31),
    }
    for name, (requests, tokens) in levels.items():
        for kind, table in (("requests", requests), ("tokens", tokens)):
            (tmp_path / kind / name).mkdir(parents=True)
            pq.write_table(table, tmp_path / kind / name / "part-000.parquet")
    entries = [
        make.facts(1, dir="warmup", index=-1),
        make.facts(2, dir="01-c2", index=1, complete=False),
        make.facts(1, dir="00-c1", measured_planned=30, measured_done=30),
        make.facts(4, dir="02-c4", index=2, complete=False),
    ]
    return Run(tmp_path, {**MANIFEST, "levels": entries, "status": "interrupted"}, ("a note of the reader",))


def test_shape(run: Run) -> None:
    summary = summarise(run)
    assert set(summary) >= {"schema", "run_id", "simulated", "target", "verdict", "slo", "levels", "capacity"}
    assert (summary["schema"], summary["simulated"], summary["status"], summary["interrupted"]) == (
        1,
        True,
        "interrupted",
        True,
    )
    assert summary["slo"] == {"ttft_ms": 1000.0, "tps": 15.0, "percentile": "p90", "convention": "fastload"}
    assert [(level["level"], level["complete"]) for level in summary["levels"]] == [(1, True), (2, False)]
    assert summary["levels_not_run"] == [4]
    assert summary["verdict"]["notes"][0] == "a note of the reader"
    assert "never measured" in summary["rules"]["warmup"]
    for name in ("mean", "p10", "p50", "p90", "p99", "n", "p90_ci95"):
        assert name in summary["levels"][0]["ttft_ms"]
    # ARCHITECTURE.md, section 4
    assert set(summary["levels"][0]) >= set(
        "level load measured ok failed errors complete ttft_ms ttfa_ms itl_ms icl_ms tps decode_tps latency_s"
        " response_latency_s aggregate_tok_s aggregate_tok_s_kimi_report system_rps stream_rps goodput"
        " in_flight_mean window_s wall_s prompt_tokens_mean completion_tokens_mean tokens_per_event"
        " client_delay_us stamp_source coalesced_share rtt_us slo_ttft slo_tps slo".split()
    )
    # 4 tokens in 40 ms; level 2 is incomplete and does not pass: users = 1 x (1 + 45 / 0.04)
    assert summary["capacity"] == {
        "c_max": 1,
        "l_mean_s": pytest.approx(0.04),
        "users": 1126,
        "think_time_s": 45.0,
        "l_p90_s": None,
        "passed_above": (),
        "judged": True,
    }


def test_json_is_strict(run: Run) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(name)

    assert (
        json.loads(as_json(summarise(run)), parse_constant=refuse)["levels"][1]["itl_ms"]["p90_ci95"] is None
    )
    with pytest.raises(ValueError, match="not JSON compliant"):
        as_json({"figure": float("nan")})


def test_csv_has_one_row_a_level(run: Run) -> None:
    lines = list(csv.DictReader(io.StringIO(as_csv(summarise(run)))))
    assert [line["level"] for line in lines] == ["1", "2"]
    first, second = lines
    assert first["model"] == 'tiny [chain], "quoted"'
    assert (first["ttft_ms_p90"], first["load_kind"]) == ("10.0", "concurrency")
    assert float(first["latency_s_mean"]) == pytest.approx(0.04)
    assert (first["complete"], first["errors"], first["ok"]) == ("true", "{}", "30")
    assert first["ttft_ms_p90_ci95_low"] == "10.0" and second["ttft_ms_p90_ci95_low"] == ""
    assert not [
        name for name in first if "{" in (first[name] or "") and name not in ("errors", "token_sources")
    ]


def test_csv_without_levels_has_a_heading() -> None:
    summary = summarise_levels(MANIFEST, [])
    assert as_csv(summary) == "run_id,model,simulated,status,verdict\n"
    assert summary["verdict"]["status"] == "invalid"
    assert summary["levels_not_run"] == [1, 2, 4]


def test_writing_replaces_whole_files(run: Run) -> None:
    (run.path / "summary.json").write_text("old")
    summary = summarise(run)
    write_summary(run, summary)
    assert json.loads((run.path / "summary.json").read_text()) == json.loads(as_json(summary))
    assert (run.path / "summary.csv").read_text() == as_csv(summary)
    assert sorted(path.name for path in run.path.iterdir()) == [
        "requests",
        "summary.csv",
        "summary.json",
        "tokens",
    ]


def test_a_summary_that_cannot_be_written_is_one_clear_line(run: Run) -> None:
    (run.path / "summary.json").mkdir()
    with pytest.raises(TraceError, match=r"cannot write the summary into .*: Is a directory"):
        write_summary(run, summarise(run))
    assert sorted(path.name for path in run.path.iterdir()) == ["requests", "summary.json", "tokens"]


def test_limits_and_method_can_be_chosen(run: Run) -> None:
    summary = summarise(run, Slo(ttft_ms=5, tps=15), "linear")
    assert summary["levels"][0]["slo_ttft"] is False
    assert summary["capacity"]["users"] is None
    assert "linear" in summary["rules"]["percentiles"]


def test_a_level_cut_off_before_its_first_row_is_listed_as_not_run(make: Any) -> None:
    level = (make.facts(2, complete=False), *make.tables([]))
    summary = summarise_levels(MANIFEST, [(make.facts(1), *make.tables(make.steady(0, 2, 0))), level])
    assert [each["level"] for each in summary["levels"]] == [1]
    assert summary["levels_not_run"] == [2, 4]
