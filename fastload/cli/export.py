"""`fastload export`: a run's rows as one flat file, or a level as a result file of vllm bench serve."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fastload.cli import inputs
from fastload.errors import PlanError

if TYPE_CHECKING:
    from fastload.trace import Run

FORMATS = ("parquet", "csv", "arrow", "vllm-json")


@click.command("export")
@click.argument("run", metavar="RUN")
@click.option("--format", "form", default="parquet", show_default=True, metavar="NAME", help=f"{', '.join(FORMATS)}.")
@click.option("--output", metavar="FILE", help="Where to.  [default: RUN-requests.FORMAT in this directory]")
@click.option("--tokens", is_flag=True, help="One row an event, instead of one a request.")
@click.option("--level", **inputs.whole(1), help="Only this level.  [default: all; vllm-json takes one]")
@click.option(
    "--anonymize",
    is_flag=True,
    help="Leave out host, URL, paths, user, run, model, messages of errors and the server's ids. Texts of prompts and "
    "answers are in no export.",
)
@click.option("--force", is_flag=True, help="Replace FILE if it is there.")
@click.option("--quiet", is_flag=True, help="Say nothing but errors.")
def export(
    run: str,
    form: str,
    output: str | None,
    tokens: bool,
    level: int | None,
    anonymize: bool,
    force: bool,
    quiet: bool,
) -> None:
    """Write a run's requests as one file for other programs.

    parquet, csv and arrow hold one row a request (or, with --tokens, an event). In a csv, text that begins with
    = + - @, a tab or a carriage return gets an apostrophe before it, since a spreadsheet would take it for a formula.
    vllm-json is one level as `vllm bench serve --save-detailed` writes it, every figure by vllm's definition.
    """
    if form not in FORMATS:
        raise PlanError(f"--format {form!r}: not known; give {', '.join(FORMATS[:-1])} or {FORMATS[-1]}")
    if form == "vllm-json" and tokens:
        raise PlanError("--tokens: vllm-json has the gaps of every request anyway; leave out --tokens")
    from fastload.analysis.reconcile import levels_asked
    from fastload.trace import open_run
    from fastload.trace.export import write

    opened = open_run(Path(run))
    asked = levels_asked(opened, level)
    path = _free(output, opened.run_id if not anonymize else "run", form, tokens, force)
    if form == "vllm-json":
        rows = _vllm(opened, asked, path, anonymize)
    else:
        names = None if level is None else tuple(directory for _, directory in asked)
        rows = write(opened, path, form, events=tokens, level_dirs=names, anonymize=anonymize)
    if not quiet:
        simulated = "SIMULATED " if opened.manifest.get("simulated") else ""
        click.echo(f"{rows} {simulated}{'events' if tokens else 'requests'} in {path}")


def _free(output: str | None, name: str, form: str, tokens: bool, force: bool) -> Path:
    """Return where to write. PlanError when something is there already, or nothing can be."""
    ending = ".json" if form == "vllm-json" else f".{form}"
    what = "vllm" if form == "vllm-json" else "events" if tokens else "requests"
    path = Path(output if output is not None else f"{name}-{what}{ending}")
    shown = f"--output {str(path)!r}"
    if "\0" in str(path):
        raise PlanError("--output: a path cannot hold a NUL character")
    if path.is_dir():
        raise PlanError(f"{shown}: is a directory; name a file in it")
    if path.exists() and not path.is_file():  # it would be replaced by a file, and be gone
        raise PlanError(f"{shown}: is a device or a pipe; name a file")
    if os.path.lexists(path) and not force:
        raise PlanError(f"{shown}: is there already; name another file, or give --force to replace it")
    inputs.writable("--output", path.parent)
    if not path.parent.is_dir():
        raise PlanError(f"{shown}: there is no directory {str(path.parent)!r}; make it first")
    return path


def _vllm(run: Run, asked: Sequence[tuple[int, str]], path: Path, anonymize: bool) -> int:
    from fastload.analysis import reconcile, vllm_result
    from fastload.trace.export import into_place

    if len(asked) != 1:
        known = ", ".join(str(value) for value, _ in asked) or "none"
        raise PlanError(f"--format vllm-json: holds one level; choose it with --level; the run has {known}")
    ((concurrency, directory),) = asked
    requests = run.requests(directory)
    level = reconcile.read_level(requests, run.pieces("tokens", directory))

    def fill(temporary: Path) -> int:
        with temporary.open("w", encoding="utf-8") as file:
            file.writelines(
                vllm_result.write_json(level, requests, run.manifest, concurrency, anonymize=anonymize)
            )
        return len(level.sent)

    return into_place(path, fill)
