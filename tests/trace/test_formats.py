"""Result files of other tools: real ones (against the simulated engine), and damaged ones, which cost one line."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fastload.errors import PlanError
from fastload.trace.formats import known

DATA = Path(__file__).parent / "data"
VLLM, DETAILED = DATA / "vllm-plain.json", DATA / "vllm-detailed.json"
AIPERF, RECORDS = DATA / "aiperf" / "profile_export_aiperf.json", DATA / "aiperf" / "profile_export.jsonl"
CORDATUS = DATA / "fastload-sim-lockstep-table.csv"


def test_vllm_plain() -> None:
    told = known.read(VLLM)
    (level,) = told.levels
    assert (told.tool, told.model, level.level) == ("vllm", "fastload-sim-lockstep", 8)
    assert (level.figures["ok"], level.figures["failed"], level.figures["measured"]) == (40, 0, 40)
    raw = json.loads(VLLM.read_text())
    assert level.figures["ttft_ms"]["mean"] == raw["mean_ttft_ms"]
    assert level.figures["ttft_ms"]["p50"] == raw["median_ttft_ms"]
    assert level.figures["itl_ms"]["p90"] == raw["p90_tpot_ms"]  # its TPOT is our ITL, its ITL our ICL
    assert level.figures["icl_ms"]["mean"] == raw["mean_itl_ms"] and level.figures["icl_ms"]["n"] is None
    assert level.figures["latency_s"]["p99"] == pytest.approx(raw["p99_e2el_ms"] / 1000)
    assert level.figures["aggregate_tok_s"] == raw["output_throughput"]
    assert level.figures["completion_tokens_mean"] == 32
    assert {"ttfa_ms", "tps", "decode_tps", "in_flight_mean", "ttft_ms.p10", "icl_ms.n"} <= set(told.lacks)
    assert set(level.samples) == {"latency_s"}  # even a plain file lists latencies


def test_vllm_detailed_has_values_per_request() -> None:
    told = known.read(DETAILED)
    (level,) = told.levels
    assert not {name for name in told.lacks if name.startswith(("ttft", "itl", "tps", "latency"))}
    raw = json.loads(DETAILED.read_text())
    assert sorted(level.samples) == ["itl_ms", "latency_s", "tps", "ttft_ms"]
    assert {len(values) for values in level.samples.values()} == {12}
    for name in ("ttft_ms", "itl_ms", "latency_s"):  # what it lists is what it summed up
        values = level.samples[name]
        assert sum(values) / len(values) == pytest.approx(level.figures[name]["mean"])
    assert level.samples["tps"][0] == pytest.approx(raw["output_lens"][0] / raw["latencies"][0])


def test_vllm_appended_is_a_level_a_line(tmp_path: Path) -> None:
    lines = VLLM.read_text().strip() + "\n" + DETAILED.read_text().strip()
    (tmp_path / "a.json").write_text(lines)
    told = known.read(tmp_path / "a.json")
    assert [level.level for level in told.levels] == [4, 8]
    (tmp_path / "a.json").write_text(VLLM.read_text() + VLLM.read_text())
    with pytest.raises(PlanError, match="two results of one concurrency"):
        known.read(tmp_path / "a.json")


def test_vllm_as_it_writes_by_default(tmp_path: Path) -> None:
    """Only mean, median, std and P99, and no latency unless asked for."""
    raw = json.loads(VLLM.read_text())
    short = {key: value for key, value in raw.items() if "e2el" not in key and "p90" not in key and key != "latencies"}
    (tmp_path / "a.json").write_text(json.dumps(short | {"max_concurrency": None}))
    (level,) = known.read(tmp_path / "a.json").levels
    assert level.figures["latency_s"] is None and level.figures["ttft_ms"]["p90"] is None
    assert level.level == 40  # all at once


def test_vllm_failed_requests_are_in_no_sample(tmp_path: Path) -> None:
    raw = json.loads(DETAILED.read_text())
    raw["latencies"][3] = raw["ttfts"][3] = 0.0
    (tmp_path / "a.json").write_text(json.dumps(raw))
    (level,) = known.read(tmp_path / "a.json").levels
    assert {len(values) for values in level.samples.values()} == {11}


def test_aiperf() -> None:
    told, raw = known.read(AIPERF), json.loads(AIPERF.read_text())
    (level,) = told.levels
    assert (told.tool, told.model, level.level) == ("aiperf", "fastload-sim-lockstep", 4)
    assert (level.figures["ok"], level.figures["failed"]) == (12, 0)
    assert level.figures["ttft_ms"]["mean"] == raw["time_to_first_token"]["avg"]
    assert level.figures["latency_s"]["p90"] == pytest.approx(raw["request_latency"]["p90"] / 1000)
    assert level.figures["decode_tps"]["p50"] == raw["output_token_throughput_per_user"]["p50"]
    assert level.figures["system_rps"] == raw["request_throughput"]["avg"]
    assert "http" not in json.dumps(dict(told.facts)) and told.facts["aiperf_version"] == "0.13.0"


def test_aiperf_records_give_the_values_per_request() -> None:
    told = known.read(RECORDS)
    (level,) = told.levels
    assert (told, level.samples) == (known.read(AIPERF), level.samples)
    for name, values in level.samples.items():
        assert len(values) == 12 and sum(values) / 12 == pytest.approx(level.figures[name]["mean"])


def test_aiperf_without_its_records_or_its_summary(tmp_path: Path) -> None:
    shutil.copy(AIPERF, tmp_path / AIPERF.name)
    assert known.read(tmp_path / AIPERF.name).levels[0].samples == {}
    (tmp_path / "alone").mkdir()
    shutil.copy(RECORDS, tmp_path / "alone" / RECORDS.name)
    with pytest.raises(PlanError, match="does not tell the concurrency: profile_export_aiperf.json must stand"):
        known.read(tmp_path / "alone" / RECORDS.name)


def test_cordatus() -> None:
    told = known.read(CORDATUS)
    assert (told.tool, told.model, [level.level for level in told.levels]) == (
        "cordatus", "fastload-sim-lockstep", [1, 4, 8],
    )  # fmt: skip
    first = told.levels[0].figures
    assert first["ttft_ms"] == {"mean": 58.72, "p50": 59.74, "p90": 60.03}
    assert first["stream_rps"] == 0.38 and "system_rps" in told.lacks  # its RPS is one stream's
    assert {"ok", "failed", "icl_ms", "aggregate_tok_s", "ttft_ms.n", "ttft_ms.p99"} <= set(told.lacks)


def test_a_table_saved_by_a_spreadsheet(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbf" + CORDATUS.read_bytes().replace(b"\n", b"\r\n"))
    told = known.read(tmp_path / "a.csv")
    assert told.levels == known.read(CORDATUS).levels and told.model is None


def edited(source: Path, **fields: Any) -> bytes:
    raw = json.loads(source.read_text()) | fields
    return json.dumps({key: value for key, value in raw.items() if value != "gone"}).encode()


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.json", lambda: b"", "is empty"),
        ("a.json", lambda: b"{}", "is no result file we know"),
        ("a.json", lambda: b"[1]", "is no result file we know"),
        ("a.json", lambda: VLLM.read_bytes()[:200], "is not JSON: "),
        ("a.json", lambda: edited(VLLM, mean_ttft_ms="fast"), "field 'mean_ttft_ms' is 'fast': not a number from 0 on"),
        ("a.json", lambda: edited(VLLM, mean_ttft_ms=-1), "field 'mean_ttft_ms' is -1: not a number from 0 on"),
        ("a.json", lambda: edited(VLLM, completed=1.5), "field 'completed' is 1.5: not a whole number"),
        ("a.json", lambda: edited(VLLM, completed=True), "field 'completed' is True: not a number"),
        ("a.json", lambda: edited(VLLM, completed=None), "field 'completed' is missing"),
        ("a.json", lambda: edited(VLLM, max_concurrency=0), "field 'max_concurrency' is 0: not a number from 1 on"),
        ("a.json", lambda: edited(VLLM, max_concurrency=None, request_rate=5), "the load was a rate (5 requests/s)"),
        ("a.json", lambda: edited(DETAILED, ttfts=[1.0]), "'latencies', 'ttfts' and 'output_lens' have 12, 1 and 12"),
        ("a.json", lambda: edited(DETAILED, ttfts="x"), "field 'ttfts' is not a list"),
        ("a.json", lambda: edited(DETAILED, ttfts=[None] * 12), "field 'ttfts[0]' is missing"),
        ("a.json", lambda: edited(AIPERF, request_latency=5), "field 'request_latency' is not an object in ms"),
        ("a.json", lambda: edited(AIPERF, request_latency={"unit": "s"}), "'request_latency' is not an object in ms"),
        ("a.json", lambda: edited(AIPERF, input_config="gone"), "field 'input_config' tells no concurrency"),
        ("a.json", lambda: edited(AIPERF, request_throughput={"avg": "x"}), "field 'request_throughput.avg' is 'x'"),
        ("a.csv", lambda: b"a,b\n1,2\n", "is no result file we know"),
        ("a.csv", lambda: b"Concurrency,TTFT\n1,2\n", "is no table of the Cordatus tool: it lacks"),
        ("a.csv", lambda: CORDATUS.read_bytes().splitlines()[0], "has a heading and no row"),
        ("a.csv", lambda: CORDATUS.read_bytes().replace(b"58.72", b"n/a"), "field 'line 2: TTFT (Mean, ms)' is 'n/a'"),
        ("a.csv", lambda: CORDATUS.read_bytes().replace(b"\n4,", b"\n1,"), "column 'Concurrency' has a value twice"),
        ("a.csv", lambda: CORDATUS.read_bytes() + b"\xff\xfe", "is not a text in UTF-8"),
    ],
)
def test_a_damaged_file_is_one_line_that_names_it(
    name: str, content: Callable[[], bytes], says: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content())
    with pytest.raises(PlanError) as raised:
        known.read(tmp_path / name)
    assert str(raised.value).startswith(f"{tmp_path / name}: ") and says in str(raised.value)
    assert "\n" not in str(raised.value)


def test_damaged_records_name_their_line(tmp_path: Path) -> None:
    shutil.copy(AIPERF, tmp_path / AIPERF.name)
    lines = RECORDS.read_bytes().splitlines(keepends=True)
    for broken, says in (
        (b"{\n", "line 2: is not JSON"),
        (b"{}\n", "line 2: lacks 'metadata' or 'metrics'"),
        (lines[1].replace(b'"request_latency":{"value"', b'"request_latency":{"x"'), "request_latency.value' is miss"),
    ):
        (tmp_path / RECORDS.name).write_bytes(lines[0] + broken + b"".join(lines[2:]))
        with pytest.raises(PlanError, match=says):
            known.read(tmp_path / RECORDS.name)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="none.json: cannot be read: No such file or directory"):
        known.read(tmp_path / "none.json")
    with pytest.raises(PlanError, match="cannot be read: Is a directory"):
        known.read(tmp_path)
