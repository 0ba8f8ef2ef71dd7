"""The Kimi report's tables: ways to write them, and damaged ones, which cost one line."""

import json
from pathlib import Path

import pytest

from fastload.errors import PlanError
from fastload.trace.formats import kimi
from fastload.trace.formats.readers import read

HEADING = "c,TTFT Mean,TTFT P90,ITL Mean,ITL P90,TPS Mean,TPS P90,Lat Mean,Lat P90,RPS"
ROW = "1,66.5,70.5,9.46,9.47,100.84,101.30,1.27,1.27,0.79"


def test_text_pasted_from_the_report_reads_as_the_csv(tmp_path: Path) -> None:
    csv, text = tmp_path / "a.csv", tmp_path / "a.txt"
    csv.write_text(f"A.2 vLLM + Spec (DSpark)\n{HEADING}\n{ROW}\n")
    text.write_text(f"A.2 vLLM + Spec (DSpark)\n\n{HEADING.replace(',', ' ')}\n{ROW.replace(',', ' ')}\n")
    found = [read(file) for file in (csv, text)]
    assert found[0][0].told.levels == found[1][0].told.levels
    assert {(each[0].name, each[0].labels["speculation"]) for each in found} == {("vllm-spec", "DSpark")}
    (level,) = found[0][0].told.levels
    assert level.figures["ttft_ms"] == {"mean": 66.5, "p90": 70.5, "n": 10}
    assert (level.figures["stream_rps"], level.figures["completion_tokens_mean"]) == (0.79, 128.0)
    assert {"ttft_ms.p50", "failed", "aggregate_tok_s", "tps.p10"} <= set(found[0][0].told.lacks)


def test_a_column_may_name_the_configuration(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text(f"config,{HEADING}\nx,{ROW}\ny,{ROW}\nx,2{ROW[1:]}\n")
    assert [(each.name, len(each.told.levels)) for each in read(file)] == [("x", 2), ("y", 1)]


def test_a_table_without_a_title_is_named_as_its_file(tmp_path: Path) -> None:
    file = tmp_path / "My Table.csv"
    file.write_text(f"\ufeff{HEADING}\n{ROW}\n")
    assert [(each.name, each.labels) for each in read(file, "kimi-report")] == [("my-table", {})]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (f"{HEADING}\n1,2,3\n", "line 2: 3 cells"),
        (f"{HEADING}\n{ROW.replace('66.5', 'x')}\n", "'x'"),
        (f"{HEADING}\n{ROW}\n{ROW}\n", "stands there twice"),
        (f"{HEADING}\n1.5{ROW[1:]}\n", "not a whole number"),
        (f"{HEADING}\n", "has no table"),
        (f"{HEADING}\n\xff".encode("latin-1"), "not a text in UTF-8"),
        ('{"a": {}}', "a: is no table"),
        ('{"a": {"1": 5}}', "level 1 is no row"),
        ('{"a": {"1": {"c": 1, "ttft_mean": 5}}}', "'a: rps' is missing"),
        ('{"a": {"1": {"c": 0}}}', "'a: c' is 0"),
    ],
)
def test_damaged_tables_cost_one_line(tmp_path: Path, content: str | bytes, says: str) -> None:
    file = tmp_path / "a"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(PlanError) as error:
        kimi.read(file)
    assert says in str(error.value) and str(file) in str(error.value) and "\n" not in str(error.value)


def test_a_file_of_nobody_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"x": 1}))
    with pytest.raises(PlanError, match="no result file we know"):
        read(tmp_path / "a.json")
