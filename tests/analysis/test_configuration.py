"""A run as analysis sees it: the same keys for a trace, for another tool's table and for a list of its requests."""

from pathlib import Path
from typing import Any

import pytest

from fastload.analysis import imported as told_analysis
from fastload.analysis import levels
from fastload.analysis.configuration import configuration
from fastload.analysis.summary import as_csv, as_json, summarise
from fastload.errors import TraceError
from fastload.trace import open_run
from fastload.trace.formats.told import Told, ToldLevel
from fastload.trace.imported import FIGURES, write_imported

TABLE = Told(
    tool="kimi-report",
    file="table.json",
    model="K3",
    levels=(
        ToldLevel(1, {"ttft_ms": {"mean": 60.0, "p90": 70.0}, "tps": {"mean": 100.0, "p90": 110.0}}),
        ToldLevel(2, {"ttft_ms": {"mean": 90.0, "p90": 99.0}, "tps": {"mean": 80.0, "p90": 85.0}}),
    ),
    facts={"rounded_to": 0.01},
)


def test_an_imported_table_is_a_run_with_nulls(tmp_path: Path) -> None:
    run = open_run(write_imported(tmp_path, "vllm", TABLE, {"engine": "vllm"}))
    found = configuration(run)
    assert (found.short_name, found.labels, found.simulated) == ("vllm", {"engine": "vllm"}, False)
    assert list(found.levels) == [1, 2]
    assert found.levels[2].figures["ttft_ms"]["p90"] == 99.0
    assert found.levels[2].figures["ttft_ms"]["p50"] is None
    assert found.levels[2].figures["aggregate_tok_s"] is None  # never a figure the table does not have
    assert found.levels[2].figures["aggregate_tok_s_kimi_report"] == 160.0
    assert (found.levels[2].samples, found.levels[2].due) == ({}, None)
    assert {"itl_ms", "latency_s", "ttft_ms.p50", "failed"} <= set(found.lacks)
    assert found.summary["verdict"]["status"] == "unknown"
    assert any("ttft_ms.p50" in note for note in found.summary["verdict"]["notes"])
    assert summarise(run) == found.summary
    assert as_json(found.summary) and as_csv(found.summary)


def test_it_has_the_keys_of_a_measured_level(make: Any) -> None:
    measured = levels.level_figures(*make.tables(make.steady(0, 2, 0.0)), make.facts(1))
    told = told_analysis.level_figures(TABLE.levels[0])
    assert list(told) == list(measured)
    for name, value in measured.items():
        if isinstance(value, dict) and name not in ("errors", "token_sources"):
            assert set(told[name]) == set(value), name


def test_requests_of_a_file_are_samples_and_judged_by_the_tail_that_hurts(tmp_path: Path) -> None:
    values = [16.0] * 8 + [14.0] * 2  # p10 of ten: rank 10 + 1 - 9 = 2, so 14
    level = ToldLevel(1, {"failed": 0, "measured": 10}, {"ttft_ms": [5.0, 3.0] * 5, "tps": values})
    found = configuration(open_run(write_imported(tmp_path, "a", Told("vllm", "a.json", None, (level,), {}), {})))
    assert found.levels[1].samples["ttft_ms"].tolist() == [3.0] * 5 + [5.0] * 5
    assert (found.levels[1].figures["slo_ttft"], found.levels[1].figures["slo_tps"]) == (True, False)


def test_damaged_figures_are_named(tmp_path: Path) -> None:
    path = write_imported(tmp_path, "a", TABLE, {})
    for content in ("{", "[]", '{"schema": 1}', '{"schema": 1, "levels": [{"level": "x"}]}'):
        (path / FIGURES).write_text(content)
        with pytest.raises(TraceError, match=r"figures\.json is corrupt"):
            configuration(open_run(path))
    (path / FIGURES).write_text('{"schema": 99, "levels": []}')
    with pytest.raises(TraceError, match="newer fastload"):
        configuration(open_run(path))
    (path / FIGURES).unlink()
    with pytest.raises(TraceError, match="cannot read"):
        configuration(open_run(path))


def test_what_a_file_lists_but_does_not_sum_up_is_summed_up_here(tmp_path: Path) -> None:
    """Told figures stand as they are; the others are ours, of the values per request."""
    values = [float(at) for at in range(1, 31)]
    level = ToldLevel(1, {"ok": 30, "ttft_ms": {"mean": 99.0, "p90": None}}, {"ttft_ms": values, "tps": values})
    found = told_analysis.level_figures(level)
    assert (found["ttft_ms"]["mean"], found["ttft_ms"]["p90"], found["ttft_ms"]["p10"]) == (99.0, 27.0, 4.0)
    assert found["tps"]["mean"] == 15.5 and found["tps"]["n"] == 30 and found["tps"]["p90_ci95"] is not None
