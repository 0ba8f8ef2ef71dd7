"""`fastload report`: what finished runs say, in tables on the terminal."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fastload.errors import PlanError

if TYPE_CHECKING:
    from fastload.analysis.slo import Slo

CONVENTIONS = ("fastload", "kimi-report", "cordatus")
PERCENTILES = ("p50", "p90", "p99", "mean")
"""The names analysis knows, here so that --help loads none of it (a test compares them)."""

_LIMIT = re.compile(r"(ttft|tps):(.*)", re.DOTALL)


@click.command("report")
@click.argument("runs", metavar="RUN...", nargs=-1)
@click.option(
    "--slo",
    "limits",
    multiple=True,
    metavar="ttft:MS tps:TOK/S",
    help="What a user must get at least.  [default: ttft:1000 tps:15]",
)
@click.option(
    "--percentile", type=click.Choice(PERCENTILES), default="p90", show_default=True, help="Of the limits above."
)
@click.option(
    "--percentile-method",
    type=click.Choice(("nearest-rank", "linear")),
    default="nearest-rank",
    show_default=True,
    help="Of the figures shown; limits are judged by nearest rank.",
)
@click.option("--think-time", metavar="SECONDS", default="45", show_default=True, help="Between a user's requests.")
@click.option(
    "--convention",
    type=click.Choice(CONVENTIONS),
    default="fastload",
    show_default=True,
    help="Rules for tails, c_max, users and aggregates: ours, or those of a source to compare with.",
)
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON on stdout and nothing else.")
def report(
    runs: tuple[str, ...],
    limits: tuple[str, ...],
    percentile: str,
    percentile_method: str,
    think_time: str,
    convention: str,
    as_json: bool,
) -> None:
    """Show finished runs, measured or imported: figures, limits met, users, speculation, anomalies.

    Each run is a configuration. A run that was interrupted or crashed is shown with what it has.
    """
    # `--slo ttft:1000 tps:15` leaves its second word among the runs.
    loose = [word for word in runs if _LIMIT.fullmatch(word) and not Path(word).exists()]
    paths = [Path(word) for word in runs if word not in loose]
    if not paths:
        raise PlanError("RUN: none given; give one or more run directories")
    twice = next((path for at, path in enumerate(paths) if path.absolute() in _absolute(paths[:at])), None)
    if twice is not None:
        raise PlanError(f"RUN {twice}: is given twice")
    asked = _limits([*limits, *loose], percentile, convention)
    seconds = _number("--think-time", think_time, lowest=0)
    from fastload.analysis.configuration import configurations
    from fastload.analysis.overview import overview
    from fastload.trace import open_run

    found = configurations([open_run(path) for path in paths], asked, percentile_method)
    result = overview(found, asked, seconds)
    if as_json:
        click.echo(json.dumps(result, indent=2, ensure_ascii=False, allow_nan=False))
    else:
        _print(result)


def _absolute(paths: Sequence[Path]) -> list[Path]:
    return [path.absolute() for path in paths]


def _limits(words: Sequence[str], percentile: str, convention: str) -> Slo:
    """Return the limits of --slo: ttft:MS and tps:TOK/S, in one word with a comma or space, or in several."""
    from fastload.analysis.slo import Slo

    found: dict[str, float] = {}
    for word in (part for text in words for part in text.replace(",", " ").split() or [text]):
        match = _LIMIT.fullmatch(word)
        if match is None:
            raise PlanError(f"--slo {word!r}: give ttft:MS, tps:TOK/S or both, such as --slo ttft:1000 tps:15")
        name, value = match.groups()
        if name in found:
            raise PlanError(f"--slo {word}: {name} is given twice")
        found[name] = _number(f"--slo {name}", value, lowest=None)
    base = Slo()
    return Slo(found.get("ttft", base.ttft_ms), found.get("tps", base.tps), percentile, convention)


def _number(flag: str, text: str, lowest: float | None) -> float:
    """Return a finite number above 0, or from `lowest` on."""
    right = "give a number above 0" if lowest is None else f"give a number from {lowest:g} on"
    try:
        value = float(text)
    except ValueError:
        raise PlanError(f"{flag} {text!r}: is not a number; {right}") from None
    if not 0 <= value < float("inf") or (lowest is None and value == 0):
        raise PlanError(f"{flag} {text}: {right}")
    return value


def _print(result: dict[str, Any]) -> None:
    """Print the tables: in colour and as wide as the terminal, or as plain text."""
    from fastload.report import overview as tables

    if sys.stdout is None:
        return
    signs = tables.DRAWN if _can_hold(tables.DRAWN.met + tables.DRAWN.missed) else tables.ASCII
    if not sys.stdout.isatty():
        click.echo(tables.plain(result, signs=signs), nl=False)
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    for line, style in tables.lines(result, console.width, signs):
        console.print(Text(line, style=style), soft_wrap=True)


def _can_hold(text: str) -> bool:
    """Say whether stdout's encoding has these characters."""
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
