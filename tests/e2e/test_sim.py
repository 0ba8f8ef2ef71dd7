"""The main job on the simulated engine: what comes out, whether it agrees with itself, and that it says SIMULATED."""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import polars as pl
import pyarrow.parquet as pq
import pytest

ORDER = (
    *("sent_ns", "first_byte_ns", "head_ns", "first_event_ns", "first_token_ns", "last_token_ns", "done_ns"),
    "framing_end_ns",
)
MEASURED = {1: 4, 2: 6, 4: 12}  # max(3 rounds x level, 4)


def no_constant(name: str) -> float:
    raise AssertionError(f"{name} is no JSON")


def strict(text: str) -> Any:
    """JSON as the standard has it: no NaN, no Infinity."""
    return json.loads(text, parse_constant=no_constant)


def table_of(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(path.read_text())))


def rows_of(sim_run: Any) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = sim_run.run.requests().to_pylist()
    return rows


def test_the_table_is_on_stdout_and_the_progress_on_stderr(sim_run: Any) -> None:
    out, err = sim_run.ended.out, sim_run.ended.err
    assert str(sim_run.path.name) in out and "verdict" in out and "TTFT" in out
    lines = [line.split() for line in out.splitlines()]
    for level, measured in MEASURED.items():
        (row,) = [words for words in lines if words[:1] == [str(level)]]
        assert row[-2:] == [str(measured), "0"]
    assert "level 3/3" in err and "TTFT Mean" not in err


def test_everything_says_simulated(sim_run: Any) -> None:
    assert sim_run.ended.out.count("SIMULATED") >= 2
    progress = [line for line in sim_run.ended.err.splitlines() if not line.startswith("fastload: ")]
    assert progress and all("SIMULATED" in line for line in progress)
    assert strict((sim_run.path / "summary.json").read_text())["simulated"] is True
    assert strict((sim_run.path / "manifest.json").read_text())["simulated"] is True
    for row in table_of(sim_run.path / "summary.csv"):
        assert row["simulated"] == "true"


def test_the_requests_are_those_of_the_plan(sim_run: Any) -> None:
    rows = rows_of(sim_run)
    counts = Counter((row["level"], row["role"]) for row in rows)
    assert {level: counts[level, "measured"] for level in MEASURED} == MEASURED
    assert counts[0, "warmup"] == 1 and sum(n for (_, role), n in counts.items() if role == "warmup") == 1
    for level in MEASURED:  # a fill keeps the load up while the last measured ones end: fewer than a wave
        assert counts[level, "fill"] < level or level == 1 and counts[level, "fill"] == 0
    numbers = sorted(row["request"] for row in rows)
    assert numbers == list(range(len(rows)))  # none twice, none left out
    assert {row["status"] for row in rows} == {"ok"}
    assert {row["max_tokens"] for row in rows} == {row["completion_tokens"] for row in rows} == {8}
    assert {row["prompt_tokens"] for row in rows} == {row["prompt_tokens_planned"] for row in rows} == {128}
    assert {row["token_source"] for row in rows} == {"usage"}


def test_stamps_are_in_order(sim_run: Any) -> None:
    for row in rows_of(sim_run):
        stamps = [row[name] for name in ORDER]
        assert None not in stamps and stamps == sorted(stamps), row
        assert row["due_ns"] <= row["sent_ns"] <= row["sent_done_ns"]


def test_a_slot_sends_one_request_after_the_other(sim_run: Any) -> None:
    slots: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for row in sorted(rows_of(sim_run), key=lambda row: row["sent_ns"]):
        slots.setdefault((row["level"], row["slot"]), []).append(row)
    assert Counter(level for level, _ in slots) == {0: 1, 1: 1, 2: 2, 4: 4}
    for sent in slots.values():
        for before, after in zip(sent, sent[1:], strict=False):
            assert after["sent_ns"] >= before["done_ns"] == after["due_ns"]


def test_derived_columns_are_what_the_stamps_give(sim_run: Any) -> None:
    for row in rows_of(sim_run):
        n = row["completion_tokens"]
        assert row["ttft_ms"] == pytest.approx((row["first_token_ns"] - row["sent_ns"]) / 1e6, rel=1e-12)
        assert row["ttfa_ms"] == pytest.approx((row["first_answer_ns"] - row["sent_ns"]) / 1e6, rel=1e-12)
        assert row["response_ttft_ms"] == pytest.approx((row["first_token_ns"] - row["due_ns"]) / 1e6, rel=1e-12)
        assert row["itl_ms"] == pytest.approx((row["last_token_ns"] - row["first_token_ns"]) / 1e6 / (n - 1), rel=1e-12)
        assert row["latency_s"] == pytest.approx((row["done_ns"] - row["sent_ns"]) / 1e9, rel=1e-12)
        assert row["response_latency_s"] == pytest.approx((row["done_ns"] - row["due_ns"]) / 1e9, rel=1e-12)
        assert row["tps"] == pytest.approx(n / row["latency_s"], rel=1e-12)


def test_each_event_is_there_and_agrees_with_its_request(sim_run: Any) -> None:
    rows = {row["request"]: row for row in rows_of(sim_run)}
    tokens = sim_run.run.tokens().to_pylist()
    assert sorted(row["request"] for row in tokens) == sorted(rows)
    for row in tokens:
        request = rows[row["request"]]
        at, text = row["event_ns"], [1 <= channel <= 4 for channel in row["channel"]]
        assert len({len(row[name]) for name in ("event_ns", "tokens", "bytes", "channel", "flags")}) == 1
        assert at == sorted(at) and len(at) == request["events"] and sum(text) == request["text_events"] == 8
        assert row["tokens"] == [int(is_text) for is_text in text]
        shown = [moment for moment, is_text in zip(at, text, strict=True) if is_text]
        assert request["sent_ns"] + shown[0] == request["first_token_ns"]
        assert request["sent_ns"] + shown[-1] == request["last_token_ns"]


def test_the_summary_is_what_the_rows_give(sim_run: Any) -> None:
    summary = strict((sim_run.path / "summary.json").read_text())
    assert summary["status"] == "complete" and summary["interrupted"] is False
    assert [level["level"] for level in summary["levels"]] == [1, 2, 4]
    for level in summary["levels"]:
        rows = [r for r in rows_of(sim_run) if r["level"] == level["level"] and r["role"] == "measured"]
        n = len(rows)
        assert (level["measured"], level["ok"], level["failed"], level["complete"]) == (n, n, 0, True)
        for name in ("ttft_ms", "itl_ms", "latency_s", "tps"):
            ranked = sorted(row[name] for row in rows)
            assert level[name]["mean"] == pytest.approx(sum(ranked) / n)
            for q in (50, 90, 99):
                assert level[name][f"p{q}"] == ranked[-(-q * n // 100) - 1]
            assert level[name]["p10"] == ranked[n - -(-90 * n // 100)]
        assert level["in_flight_mean"] == pytest.approx(level["level"], rel=0.2)


def test_json_on_stdout_is_the_summary_alone(fastload: Any, quick: str, tmp_path: Path, the_run: Any) -> None:
    ended = fastload("sweep", "--url", quick, "--levels", "1,2", "--osl", "4", "--num-requests", "4", "--json")
    assert ended.ran, ended.err
    run = the_run(tmp_path / "results")
    assert ended.out == (run.path / "summary.json").read_text()
    assert strict(ended.out)["simulated"] is True
    assert all("SIMULATED" in line for line in ended.err.splitlines() if not line.startswith("fastload: "))


def test_the_csv_has_a_row_a_level_with_the_same_figures(sim_run: Any) -> None:
    lines = table_of(sim_run.path / "summary.csv")
    levels = strict((sim_run.path / "summary.json").read_text())["levels"]
    assert len(lines) == len(levels) == 3
    for line, level in zip(lines, levels, strict=True):
        assert None not in line and None not in line.values()
        assert int(line["level"]) == level["level"]
        for name in ("ttft_ms", "itl_ms", "tps", "latency_s"):
            assert float(line[f"{name}_p90"]) == level[name]["p90"]


def test_the_trace_opens_everywhere_to_the_nanosecond(sim_run: Any) -> None:
    glob = f"{sim_run.path}/requests/*/*.parquet"
    rows = {row["request"]: row for row in rows_of(sim_run)}
    sent = {request: row["sent_ns"] for request, row in rows.items()}
    assert dict(duckdb.sql(f"select request, sent_ns from '{glob}'").fetchall()) == sent
    assert dict(pl.read_parquet(glob).select("request", "sent_ns").rows()) == sent
    parts = sorted(sim_run.path.glob("requests/*/*.parquet"))
    frame = pd.concat([pd.read_parquet(part) for part in parts])
    assert str(frame["sent_ns"].dtype) == "int64"
    assert dict(zip(frame["request"], frame["sent_ns"], strict=True)) == sent
    for part in parts:
        table = pq.read_table(part)
        assert table.schema.metadata[b"run_id"].decode() == sim_run.path.name
        assert str(table.schema.field("sent_utc").type) == "timestamp[us, tz=UTC]"


def test_a_run_of_two_tokens_an_event(fastload: Any, start: Any, tmp_path: Path, the_run: Any) -> None:
    engine = start("serve-sim", "--port", "0", "--tokens-per-event", "2", "--step-ms", "8", "--ttft-ms", "8", "--json")
    url = strict(engine.stdout.readline())["url"]
    ended = fastload("sweep", "--url", url, "--levels", "2", "--osl", "64", "--num-requests", "4")
    assert ended.ran, ended.err
    run = the_run(tmp_path / "results")
    rows = run.requests().to_pylist()
    assert {row["completion_tokens"] for row in rows} == {64} and {row["text_events"] for row in rows} == {32}
    assert {row["n_first"] for row in rows} == {2}
    for row in run.tokens().to_pylist():
        assert [tokens for tokens in row["tokens"] if tokens] == [2] * 32
    assert {row["token_source"] for row in rows if row["role"] == "measured"} == {"continuous_usage"}
    for level in strict((run.path / "summary.json").read_text())["levels"]:
        assert level["tokens_per_event"] == 2 and level["completion_tokens_mean"] == 64
        assert level["itl_ms"]["mean"] / level["icl_ms"]["mean"] == pytest.approx(0.5, rel=1e-6)
        assert level["itl_estimated"] == 0
    assert "events hold 2 tokens" in ended.out
    # Nobody said it was a simulation; the server did.
    assert run.manifest["simulated"] is True and "SIMULATED" in ended.out
