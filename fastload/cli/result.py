"""The end of a run: its trace closed, its summary made from that, and both told to whoever waits for them."""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fastload.cli import display
from fastload.errors import TraceError

if TYPE_CHECKING:
    import pyarrow as pa

    from fastload.load.supervisor import Outcome
    from fastload.trace import Run, RunWriter


@dataclass(frozen=True, slots=True)
class End:
    """How a run ended. status: the manifest's. summary: None if it was not waited for. faults: sentences on why it is
    not as ordered, or not all on disk.
    """

    status: str
    summary: Mapping[str, Any] | None
    faults: tuple[str, ...]

    @property
    def verdict(self) -> Mapping[str, Any] | None:
        """The verdict on the run, where there is a summary."""
        return None if self.summary is None else self.summary["verdict"]

    def why(self, strict: bool) -> tuple[str, ...]:
        """Why the run did not go well, in sentences: its faults, or that it is invalid (with `strict`: suspect)."""
        if self.faults or self.verdict is None:
            return self.faults
        name = self.verdict["status"]
        bad = name == "invalid" or (strict and name == "suspect")
        return (f"the run is {name}: {'; '.join(self.verdict['reasons'])}",) if bad else ()


def conclude(writer: RunWriter, outcome: Outcome) -> End:
    """Close the trace and make summary.json and summary.csv from it; the manifest says last how the run ended.

    What the disk does not take is among the faults. TraceError if no figures can be had either.
    """
    from fastload.analysis.summary import summarise_levels, write_summary
    from fastload.load.hiding import hidden
    from fastload.trace import Run

    lost = writer.settle()
    faults = _faults(outcome)
    status = "failed" if lost else _status(outcome)
    plan = outcome.plan.describe()
    run = Run(writer.path, writer.manifest | {"status": status, "plan": plan}, ())
    listed = run.manifest["levels"]
    assert isinstance(listed, list)
    levels = sorted((one for one in listed if one["index"] >= 0), key=lambda one: one["index"])
    try:
        tables = ((facts, *_tables(run, writer, facts["dir"])) for facts in levels)
        summary = hidden(summarise_levels(run.manifest, tables))
    except TraceError as error:
        raise TraceError("; ".join([*faults, *(lost or [str(error)])])) from error
    on_disk: list[str] = []
    try:
        write_summary(run, summary)
    except TraceError as error:
        status, on_disk = "failed", [str(error)]
    try:
        writer.close(status, clock=outcome.clock, plan=plan, verdict=summary["verdict"])
    except TraceError as error:
        # Rows that are nowhere matter more than what can be made again.
        status, on_disk = "failed", [str(error)] if lost else [*on_disk, str(error)]
    if outcome.unwritten is not None and not on_disk:
        faults.append(f"{outcome.unwritten}; there is room again, but later levels were not tried")
    return End(status, summary, (*faults, *dict.fromkeys(on_disk)))


def at_once(writer: RunWriter, outcome: Outcome) -> End:
    """Close the trace of a run that was told twice to end: the summary can be made again from it."""
    writer.close("interrupted", clock=outcome.clock, plan=outcome.plan.describe())
    return End("interrupted", None, tuple(_faults(outcome)))


def _tables(run: Run, writer: RunWriter, directory: str) -> tuple[pa.Table, pa.Table]:
    """The rows of a level, those that are not on disk included."""
    import pyarrow as pa

    on_disk = run.requests(directory), run.tokens(directory)
    requests, tokens = (
        pa.concat_tables([table, *(one.cast(table.schema) for one in waiting)])
        for table, waiting in zip(on_disk, writer.waiting(directory), strict=True)
    )
    return requests, tokens


def _status(outcome: Outcome) -> str:
    if outcome.interrupted is not None:
        return "interrupted"
    if outcome.died is not None:
        return "crashed"
    return "complete" if outcome.stopped is None and outcome.unwritten is None else "failed"


def _faults(outcome: Outcome) -> list[str]:
    """Why the run did not go as ordered, but for the disk: what that does not take, who tried last says."""
    if outcome.interrupted is not None:
        return [f"stopped by {signal.Signals(outcome.interrupted).name}"]
    return [why for why in (outcome.died, outcome.stopped) if why is not None]


def show(end: End, path: Path, *, as_json: bool, quiet: bool, strict: bool) -> None:
    """Put the result on stdout and say where the run lies; on stderr, in one line, why it is not whole."""
    if end.summary is not None:
        _print(end.summary, as_json)
        mark = "SIMULATED run" if end.summary["simulated"] else "run"
        if not as_json:
            click.echo(f"{mark} in {path}")
        elif not quiet:
            click.echo(f"{mark} in {path}", err=True)
    why = display.one_line("; ".join(end.why(strict)))
    if not why:
        return
    rest = f"; finished levels and rows so far are in {path}" if end.faults else ""
    click.echo(f"fastload: {why}{rest}", err=True)


def _print(summary: Mapping[str, Any], as_json: bool) -> None:
    """JSON alone, or the table (for a terminal of its width, else plain)."""
    if as_json:
        from fastload.analysis import summary as summaries

        click.echo(summaries.as_json(summary), nl=False)
        return
    from fastload.report import tables

    if sys.stdout is not None and sys.stdout.isatty():
        from rich.console import Console

        Console().print(tables.sweep_table(summary))
    else:
        click.echo(tables.plain(summary), nl=False)
