"""compare, check, reconcile and export at the door: a mistake costs one line and code 2, a run that is none code 1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

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
        ("empty", "empty is not a run: it has no manifest.json"),
    ):
        ended = run(command, name, *more)
        assert (ended.code, ended.out) == (1, "") and ended.err.startswith(f"fastload: {says}")
