"""`fastload check`: limits and regressions for CI. Exit code 3 says that something missed."""

from __future__ import annotations

import json
from pathlib import Path

import click

from fastload.errors import PlanError

EXIT_MISSED = 3


def _share(_ctx: click.Context, param: click.Parameter, text: str | None) -> float | None:
    """Read 5% as 0.05."""
    if text is None:
        return None
    number = text.strip().removesuffix("%")
    try:
        share = float(number) / 100 if text.strip().endswith("%") else -1.0
    except ValueError:
        share = -1.0
    if not 0 <= share < 100:
        raise PlanError(f"{param.opts[0]} {text!r}: not a share; give one in per cent, such as 5%")
    return share


@click.command("check")
@click.argument("run", metavar="RUN")
@click.option(
    "--assert",
    "assertions",
    multiple=True,
    metavar="TEXT",
    help="METRIC[.STATISTIC] OPERATOR VALUE[@LEVEL], such as 'ttft.p90<=1000@32' or 'users>=400'. Without a statistic "
    "the mean, without a level every level; repeatable.",
)
@click.option("--baseline", metavar="RUN", help="A run this one must not be worse than.")
@click.option(
    "--max-regression",
    callback=_share,
    metavar="SHARE",
    help="How much worse than the baseline a figure may be, if the 95 % intervals of both lie apart.  [default: 5%]",
)
@click.option("--strict", is_flag=True, help="A suspect run misses, too.")
@click.option("--junit", metavar="FILE", help="Write JUnit XML there as well.")
@click.option("--markdown", metavar="FILE", help="Write a Markdown table there as well.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON on stdout and nothing else.")
def check(
    run: str,
    assertions: tuple[str, ...],
    baseline: str | None,
    max_regression: float | None,
    strict: bool,
    junit: str | None,
    markdown: str | None,
    as_json: bool,
) -> int:
    """Check a run against limits and against another run; for CI.

    The run must be valid, every assertion must hold, and no watched figure may be worse than the
    baseline's by more than --max-regression with intervals that lie apart. A figure that was not
    measured holds no limit. Exit code 3 when something missed.
    """
    from fastload.analysis import check as checking

    asked = [checking.parse(text) for text in assertions]
    if max_regression is not None and baseline is None:
        raise PlanError("--max-regression: there is nothing to compare with; give --baseline RUN")

    from fastload.analysis.configuration import configurations
    from fastload.report import check as report
    from fastload.trace import open_run

    checked, *others = configurations([open_run(Path(path)) for path in (run, baseline) if path is not None])
    against = others[0] if others else None
    cases = checking.check(checked, asked, against, 0.05 if max_regression is None else max_regression, strict)
    result = checking.result(checked, against, cases)
    for flag, file, text in (("--junit", junit, report.junit), ("--markdown", markdown, report.markdown)):
        if file is not None:
            _write(flag, file, text(result))
    click.echo(json.dumps(result, indent=2, ensure_ascii=False) if as_json else report.plain(result), nl=as_json)
    return 0 if result["ok"] else EXIT_MISSED


def _write(flag: str, file: str, text: str) -> None:
    try:
        Path(file).write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise PlanError(f"{flag} {file!r}: cannot be written: {reason}; name a file that can be") from None
