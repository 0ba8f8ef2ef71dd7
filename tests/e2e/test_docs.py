"""The examples of README.md and SCHEMA.md run as they stand there."""

from __future__ import annotations

import contextlib
import csv
import importlib
import io
import re
import shlex
from pathlib import Path
from typing import Any

import duckdb
import pytest

import fastload as package
from fastload.cli import COMMANDS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SCHEMA = (Path(package.__file__).parent / "trace" / "SCHEMA.md").read_text(encoding="utf-8")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(text: str, language: str) -> list[str]:
    return [body for name, body in FENCE.findall(text) if name == language]


@pytest.mark.parametrize("number", range(len(blocks(SCHEMA, "python"))))
def test_an_example_of_the_schema_runs(number: int, sim_run: Any) -> None:
    """One that makes `figures` must make those of the summary: its columns are named as in summary.csv."""
    out, names = io.StringIO(), dict[str, Any]()
    code = blocks(SCHEMA, "python")[number].replace("RUN", str(sim_run.path))
    with contextlib.redirect_stdout(out):
        exec(compile(code, f"SCHEMA.md, example {number}", "exec"), names)
    assert out.getvalue().strip()
    if "figures" not in names:
        return
    with (sim_run.path / "summary.csv").open(encoding="utf-8", newline="") as file:
        wanted = {row["level"]: row for row in csv.DictReader(file)}
    rows = rows_of(names["figures"])
    assert [str(row["level"]) for row in rows] == list(wanted)
    for row in rows:
        figures = {name: float(wanted[str(row["level"])][name]) for name in row}
        assert row == pytest.approx(figures, rel=1e-12)  # exact, but for the order in which a mean is summed


def test_five_questions_are_answered_in_both_languages() -> None:
    made = [body for body in blocks(SCHEMA, "python") if "figures = " in body]
    assert ["duckdb" if "duckdb" in body else "polars" for body in made] == ["duckdb", "polars"] * 5


def rows_of(figures: Any) -> list[dict[str, Any]]:
    """A DuckDB relation or a Polars frame as rows."""
    if isinstance(figures, duckdb.DuckDBPyRelation):
        return [dict(zip(figures.columns, row, strict=True)) for row in figures.fetchall()]
    found: list[dict[str, Any]] = figures.to_dicts()
    return found


def test_the_queries_of_the_readme_run(sim_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = blocks(README, "sql")
    monkeypatch.chdir(sim_run.path.parents[1])
    name = re.search(r"'results/([^/*]+)/", block)
    assert name is not None
    answers = [
        duckdb.sql(query).fetchall() for query in block.replace(name[1], sim_run.path.name).split(";") if query.strip()
    ]
    assert [row[:3] for row in answers[0]] == [(sim_run.path.name, 1, 4), (sim_run.path.name, 2, 6)] + [
        (sim_run.path.name, 4, 12)
    ]
    assert len(answers[1]) == 10 * 11  # of 8 tokens, the role, the usage and [DONE]


def test_the_readme_names_every_file_of_a_run(sim_run: Any) -> None:
    (drawing,) = [body for body in blocks(README, "") if "manifest.json" in body]
    for path in sim_run.path.rglob("*"):
        if path.is_file():
            assert path.name.replace("part-000", "part-000") in drawing, path
    named = set(re.findall(r"[\w-]+\.(?:json|csv|log)", drawing))
    assert {path.name for path in sim_run.path.iterdir() if path.is_file()} == named


def test_the_columns_of_the_schema_are_those_of_the_files(sim_run: Any) -> None:
    parts = SCHEMA.split("\n## ")
    for kind, table in (("requests", sim_run.run.requests()), ("tokens", sim_run.run.tokens())):
        (part,) = [part for part in parts if part.startswith(f"{kind}\n")]
        assert re.findall(r"^\| `(\w+)` \|", part, re.MULTILINE) == table.column_names


def test_the_commands_of_the_readme_have_flags_that_exist() -> None:
    known = {}
    for name, (module, attribute, _) in COMMANDS.items():
        command = getattr(importlib.import_module(module), attribute)
        known[name] = {flag for param in command.params for flag in param.opts}
    lines = [line for body in blocks(README, "") for line in body.splitlines() if line.startswith("fastload ")]
    assert {line.split()[1] for line in lines} >= {"sweep", "compare", "check", "reconcile", "export"}
    for line in lines:
        words = shlex.split(line, comments=True)
        assert {word for word in words if word.startswith("--")} <= known[words[1]], line
    assert set(re.findall(r"`(--[a-z-]+)", README)) <= set().union(*known.values())
