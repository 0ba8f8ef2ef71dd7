"""compare, check, reconcile and export at the door: a mistake costs one line and code 2, a run that is none code 1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fastload.trace.formats import known
from fastload.trace.imported import write_imported

COMMANDS = ("compare", "check", "reconcile", "export")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("compare", "a"), "RUN: 1 given; give two or more run directories"),
        (("check",), "RUN is needed (see fastload check --help)"),
        (("check", "a", "--assert", "ttft.p95<=1"), "--assert 'ttft.p95<=1': ttft has no statistic 'p95'"),
        (("check", "a", "--max-regression", "5%"), "--max-regression: there is nothing to compare with"),
        (("check", "a", "--baseline", "b", "--max-regression", "0.05"), "--max-regression '0.05': not a share;"),
        (("check", "a", "--baseline", "b", "--max-regression", "x%"), "--max-regression 'x%': not a share;"),
        (("reconcile", "a", "--level", "0"), "--level 0: out of range"),
        (("export", "a", "--format", "xlsx"), "--format 'xlsx': not known; give parquet, csv, arrow or vllm-json"),
        (("export", "a", "--format", "vllm-json", "--tokens"), "--tokens: vllm-json has the gaps"),
    ],
)
def test_a_mistake_is_one_line(run: Any, words: tuple[str, ...], says: str) -> None:
    ended = run(*words)
    assert ended.code == 2 and ended.out == ""
    assert ended.err.startswith(f"fastload: {says.split(':')[0].split(' (')[0]}") and says in ended.err
    assert ended.err.count("\n") == 1


@pytest.mark.parametrize("command", COMMANDS)
def test_what_is_no_run_is_said(run: Any, command: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    more = ("b",) if command == "compare" else ()
    for name, says in (
        ("none", "none does not exist; give the directory of a run"),
        ("file", "file is a file; give the directory of a run"),
        ("empty", "empty is empty: a run that was cut off there"),
    ):
        ended = run(command, name, *more)
        assert (ended.code, ended.out) == (1, "") and ended.err.startswith(f"fastload: {says}")


def test_an_imported_run_has_no_trace_but_can_be_checked_and_compared(run: Any, tmp_path: Path) -> None:
    told = known.read(Path(__file__).parents[1] / "trace" / "data" / "vllm-detailed.json")
    path = str(write_imported(tmp_path / "results", "told", told, {"engine": "vllm"}))
    for command in ("reconcile", "export"):
        ended = run(command, path)
        assert ended.code == 2 and "was imported from another tool's file and has no trace" in ended.err
        assert ended.err.count("\n") == 1
    ended = run("check", path, "--assert", "ttft.p90<=1000@4", "--baseline", path)
    assert ended.code == 0 and ended.out.splitlines()[-1] == "check: all kept"
    assert run("check", path, "--assert", "ttfa<=1000").code == 3  # not told, so not measured
    assert "engine vllm" in run("compare", path, path).out
