"""`fastload reconcile`: one run as other load generators would compute it, and why the figures differ."""

from __future__ import annotations

import json
from pathlib import Path

import click

from fastload.cli import inputs


@click.command("reconcile")
@click.argument("run", metavar="RUN")
@click.option("--with", "file", metavar="FILE", help="Another tool's result file, to set beside this run.")
@click.option("--level", **inputs.whole(1), help="Only this level.  [default: all]")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON on stdout and nothing else.")
def reconcile(run: str, file: str | None, level: int | None, as_json: bool) -> None:
    """Compute a run's figures as other load generators define them.

    One trace as vllm bench serve, SGLang's bench_serving, AIPerf, guidellm and the Cordatus tool
    would compute it, and each step of the difference with its size. With a result file of one of
    them (--with): which part of the gap its definitions explain, and which they do not.
    """
    from fastload.analysis import reconcile as reconciling
    from fastload.report import reconcile as report
    from fastload.trace import open_run
    from fastload.trace.formats.known import read

    opened = open_run(Path(run))
    told = None if file is None else read(Path(file))
    result = reconciling.reconcile(opened, level, told)
    click.echo(
        json.dumps(result, indent=2, ensure_ascii=False, allow_nan=False) if as_json else report.plain(result),
        nl=as_json,
    )
