"""The table of a sweep, on a terminal (rich) and as plain text: the same figures, the same columns.

One line a level, the columns of the source report's Appendix A plus P50, the low tail of TPS, the rates, n
and failures. Where the terminal is too narrow for one table the columns are dealt to two, stacked. Below it
stands what has to be known before the figures are believed: the verdict, the rules, the notes. Nothing is
computed here.
"""

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

Level: TypeAlias = Mapping[str, Any]

WIDTH = 120
WARNING = "WARNING"  # how a note begins that belongs right under the verdict

SIMULATED = (
    "SIMULATED: the target was fastload's own engine, no real server: the figures are of no real model."
)

RPS_RULE = "RPS all: requests the system completed a second; RPS 1/L: 1 / mean latency, one stream's rate"
TPS_RULE = "TPS: P90 is the upper tail; the one that hurts is p10, what 90 % of users get at least"


@dataclass(frozen=True, slots=True)
class Column:
    """One column: two lines of heading, the cell of a level, whether it opens a group (more space before)."""

    heading: tuple[str, str]
    cell: Callable[[Level], str]
    opens: bool = False


def _of(name: str, figure: str) -> Callable[[Level], str]:
    return lambda level: number(level[name][figure])


def _distribution(name: str, title: str, unit: str) -> tuple[Column, ...]:
    return (
        Column((title, "Mean"), _of(name, "mean"), opens=True),
        Column((unit, "P50"), _of(name, "p50")),
        Column(("", "P90"), _of(name, "p90")),
    )


def _level(level: Level) -> str:
    return f"{level['level']}{'' if level['complete'] else '*'}"


LEVEL = Column(("", "c"), _level)
TTFT = _distribution("ttft_ms", "TTFT", "ms")
ITL = _distribution("itl_ms", "ITL", "ms")
TPS = (*_distribution("tps", "TPS", "tok/s"), Column(("", "p10"), _of("tps", "p10")))
LATENCY = _distribution("latency_s", "Lat", "s")
RATES = (
    Column(("RPS", "all"), lambda level: number(level["system_rps"]), opens=True),
    Column(("RPS", "1/L"), lambda level: number(level["stream_rps"])),
    Column(("out", "tok/s"), lambda level: number(level["aggregate_tok_s"])),
    Column(("in", "flight"), lambda level: number(level["in_flight_mean"])),
)
COUNTS = (
    Column(("", "n"), lambda level: str(level["ok"]), opens=True),
    Column(("", "fail"), lambda level: str(level["failed"])),
)

Columns: TypeAlias = tuple[tuple[Column, ...], tuple[tuple[Column, ...], ...]]
"""The columns of the one wide table, and of the narrower tables they are dealt to where that does not fit."""


def with_counts(counts: tuple[Column, ...]) -> Columns:
    """Return the columns of a level's figures with other ones at the end than those of a sweep's table."""
    one = (LEVEL, *TTFT, *ITL, *TPS, *LATENCY, *RATES, *counts)
    return one, ((LEVEL, *TTFT, *ITL, *LATENCY), (LEVEL, *TPS, *RATES, *counts))


SWEEP: Columns = (
    (LEVEL, *TTFT, *ITL, *TPS, *LATENCY, *RATES, *COUNTS),
    ((LEVEL, *TTFT, *ITL, *LATENCY, *COUNTS), (LEVEL, *TPS, *RATES)),
)


@dataclass(frozen=True, slots=True)
class SweepTable:
    """A summary that rich can print: as wide as the console allows, one table or two, then the footer."""

    summary: Mapping[str, Any]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield title, tables and footer. Server text is never read as markup."""
        yield Text(title(self.summary), style="bold")
        if self.summary["simulated"]:
            yield Text(SIMULATED, style="bold yellow")
        for columns in layout(self.summary["levels"], options.max_width, SWEEP):
            yield Text("")
            yield _rich(self.summary["levels"], columns)
        yield Text("")
        for line in footer(self.summary):
            yield Text(line, style=_style(line))


def sweep_table(summary: Mapping[str, Any]) -> SweepTable:
    """Return the table of a summary for `console.print`."""
    return SweepTable(summary)


def plain(summary: Mapping[str, Any], width: int = WIDTH) -> str:
    """Return the same as text, at most `width` columns where that can be (80 can), ending in a newline."""
    lines = [title(summary)]
    if summary["simulated"]:
        lines += textwrap.wrap(SIMULATED, width)
    for columns in layout(summary["levels"], width, SWEEP):
        lines += ["", *table_lines(summary["levels"], columns)]
    lines.append("")
    for line in footer(summary):
        lines += textwrap.wrap(line, width, subsequent_indent="    ", break_long_words=False)
    return "\n".join(lines) + "\n"


def title(summary: Mapping[str, Any]) -> str:
    """Return one line: the run, the model and where it was measured."""
    target = summary["target"]
    text = f"{summary['run_id']}: {target['model'] or 'model unknown'} at {target['url']}"
    return printable(text + ("" if summary["status"] == "complete" else f" [{summary['status'].upper()}]"))


def footer(summary: Mapping[str, Any]) -> list[str]:
    """Return what stands below the table, one entry a line: verdict, marks, capacity, rules, notes."""
    verdict = summary["verdict"]
    lines = [f"verdict: {verdict['status'].upper()}"]
    lines += [f"  - {reason}" for reason in verdict["reasons"]]
    if any(not level["complete"] for level in summary["levels"]):
        lines.append("* incomplete level: not to be compared with the others")
    if summary["levels_not_run"]:
        lines.append(f"not run: c={', '.join(map(str, summary['levels_not_run']))}")
    for level in summary["levels"]:
        if level["failed"]:
            lines.append(f"failed at c={level['level']}: {failures(level)}")
    warnings = [note for note in verdict["notes"] if note.startswith(WARNING)]
    lines += warnings
    lines += _service_lines(summary)
    if summary["levels"]:
        lines += (RPS_RULE, TPS_RULE, *summary["rules"].values())
    lines += [f"note: {note}" for note in verdict["notes"] if note not in warnings]
    lines.append(f"definitions: version {summary['definitions']} (METRICS)")
    if summary["simulated"]:
        lines.append(SIMULATED)
    return [printable(line) for line in lines]


def failures(level: Level) -> str:
    """Return the failure rate and its classes; failed requests are in no percentile."""
    classes = ", ".join(f"{name} {count}" for name, count in level["errors"].items())
    share = 100 * level["failed"] / level["measured"]
    return f"{level['failed']} of {level['measured']} ({share:.3g} %): {classes}"


def _service_lines(summary: Mapping[str, Any]) -> Iterator[str]:
    """Yield which levels met the limits and the users that makes."""
    limits, room = summary["slo"], summary["capacity"]
    tail = "mean" if limits["percentile"] == "mean" else "P90, hurting tail"
    if limits["convention"] == "kimi-report" and limits["percentile"] != "mean":
        tail = "P90, upper tail also for TPS (kimi-report)"
    judged = [level for level in summary["levels"] if level["slo"] is not None]
    if not judged:
        return
    passed = ", ".join(str(level["level"]) for level in judged if level["slo"]) or "none"
    limit = f"TTFT <= {limits['ttft_ms']:g} ms and TPS >= {limits['tps']:g} tok/s"
    yield f"SLO {limit} ({tail}) met at c: {passed}"
    if room["users"] is not None:
        yield (
            f"capacity: c_max {room['c_max']}, {room['users']} users at {room['think_time_s']:g} s think time"
            f" (mean latency {number(room['l_mean_s'])} s); for relative comparison"
        )


def number(value: float | None) -> str:
    """Return a figure in about four digits, at most 5 characters from 0.001 to 99999; null is "-"."""
    if value is None:
        return "-"
    size = abs(value)
    if size >= 999.95:
        return f"{value:.0f}"
    if size >= 99.995:
        return f"{value:.1f}"
    if size >= 0.9995 or value == 0:
        return f"{value:.2f}"
    return f"{value:.3f}" if size >= 0.01 else f"{value:.2g}"


def printable(text: str) -> str:
    """Return the text without control characters: a server chooses some of it, and it goes to a terminal."""
    return "".join(character if character.isprintable() else "?" for character in text)


def layout(levels: Sequence[Level], width: int, columns: Columns) -> tuple[tuple[Column, ...], ...]:
    """Return the columns of each table: one table if it fits the width, else those; none without levels."""
    if not levels:
        return ()
    one, several = columns
    return (one,) if max(map(len, table_lines(levels, one)), default=0) <= width else several


def table_lines(levels: Sequence[Level], columns: Sequence[Column]) -> list[str]:
    """Return the lines of one table: two of heading, one a level; right-aligned."""
    grid = [
        [column.heading[0], column.heading[1], *(column.cell(level) for level in levels)]
        for column in columns
    ]
    padded = [
        [cell.rjust(max(map(len, cells)) + (1 if column.opens else 0)) for cell in cells]
        for column, cells in zip(columns, grid, strict=True)
    ]
    return [" ".join(line).rstrip() for line in zip(*padded, strict=True)]


def _rich(levels: Sequence[Level], columns: Sequence[Column]) -> Table:
    """Return one table for rich, with the widths of the plain one."""
    table = Table(box=None, padding=0, pad_edge=False, collapse_padding=True, header_style="bold")
    for at, column in enumerate(columns):
        space = ("" if at == 0 else " ") + (" " if column.opens else "")
        heading = Text("\n".join(space + line for line in column.heading))
        table.add_column(heading, justify="right", no_wrap=True)
    for level in levels:
        cells = [
            ("" if at == 0 else "  " if column.opens else " ") + column.cell(level)
            for at, column in enumerate(columns)
        ]
        table.add_row(*map(Text, cells), style=_row_style(level))
    return table


def _row_style(level: Level) -> str:
    return "red" if level["failed"] else "dim" if not level["complete"] else ""


_VERDICT_STYLE = {"VALID": "bold green", "SUSPECT": "bold yellow", "INVALID": "bold red"}


def _style(line: str) -> str:
    """Return the style of a footer line: what asks for attention stands out, the rest steps back."""
    if line.startswith("verdict"):
        return _VERDICT_STYLE[line.removeprefix("verdict: ")]
    if line.startswith(("  - ", "failed", "not run", "* ", WARNING)):
        return "yellow"
    return "bold yellow" if line == SIMULATED else "dim"
