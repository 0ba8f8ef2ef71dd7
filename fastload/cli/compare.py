"""`fastload compare`: runs side by side in the terminal."""

from __future__ import annotations

import json
from pathlib import Path

import click

from fastload.errors import PlanError


@click.command("compare")
@click.argument("runs", metavar="RUN...", nargs=-1)
@click.option("--json", "as_json", is_flag=True, help="Print the comparison as JSON on stdout and nothing else.")
def compare(runs: tuple[str, ...], as_json: bool) -> None:
    """Set runs side by side; the first is compared with each other one.

    Says on which axis they differ (labels engine, model, hardware, speculation, draft_model and any other: --label at
    the sweep), how much at each level with 95 % intervals, and what their manifests say differently.
    """
    if len(runs) < 2:
        raise PlanError(f"RUN: {len(runs)} given; give two or more run directories")
    from fastload.analysis.compare import compare as compared
    from fastload.analysis.configuration import configurations
    from fastload.report import compare as report
    from fastload.trace import open_run

    result = compared(configurations([open_run(Path(path)) for path in runs]))
    click.echo(
        json.dumps(result, indent=2, ensure_ascii=False, allow_nan=False) if as_json else report.plain(result),
        nl=as_json,
    )
