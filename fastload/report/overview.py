"""The report of one run or several on a terminal: a table a configuration, then limits, users, speculation, anomalies.

Nothing is computed here: the lines are made from analysis.overview's values.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastload.report import tables
from fastload.report.tables import SIMULATED, Column, number, printable

WIDTH = 120


@dataclass(frozen=True, slots=True)
class Signs:
    """How met, missed and unknown are drawn."""

    met: str
    missed: str
    unknown: str = "?"


DRAWN, ASCII = Signs("\u2713", "\u2717"), Signs("Y", "n")
"""Check and cross, and what stands for them where the output cannot hold them."""

Line = tuple[str, str]
"""A line and its style for rich ("" for none)."""


def plain(report: Mapping[str, Any], width: int = WIDTH, signs: Signs = DRAWN) -> str:
    """Return the report as text, ending in a newline."""
    return "\n".join(line for line, _ in lines(report, width, signs)) + "\n"


def lines(report: Mapping[str, Any], width: int = WIDTH, signs: Signs = DRAWN) -> Iterator[Line]:
    """Yield the lines of the report, each with its style."""
    for one in report["configurations"]:
        yield from _configuration(one, width)
        yield "", ""
    yield from _slo(report, signs)
    yield from _capacity(report)
    for pair in report["speculation"]:
        yield from _speculation(pair)
    for name in report["speculation_unpaired"]:
        yield (
            printable(f"{name} speculates; no run without has its model and labels, so it is set against none"),
            "yellow",
        )
    if report["speculation_unpaired"]:
        yield "", ""
    yield from _decoding(report)
    yield from _anomalies(report, width)
    yield "definitions", "bold"
    for rule in _rules(report):
        yield from ((line, "dim") for line in _wrapped(rule, width))
    if report["simulated"]:
        yield from ((line, "bold yellow") for line in _wrapped(SIMULATED, width))


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(printable(text), width, subsequent_indent="    ", break_long_words=False)


def _rules(report: Mapping[str, Any]) -> Iterator[str]:
    yield from report["rules"].values()
    told = [rule for one in report["configurations"] for rule in one["rules"].values()]
    yield from dict.fromkeys(told)
    versions = sorted({str(one["definitions"]) for one in report["configurations"]})
    yield f"definitions: version {', '.join(versions)} (METRICS); convention {report['convention']['name']}"


# --- the figures of one configuration -------------------------------------------------------------------------------


def _configuration(one: Mapping[str, Any], width: int) -> Iterator[Line]:
    mark = " [SIMULATED]" if one["simulated"] else ""
    status = "" if one["status"] == "complete" else f" [{one['status'].upper()}]"
    labels = "".join(f", {name} {value}" for name, value in one["target"]["labels"].items())
    model = one["target"]["model"] or "model unknown"
    yield printable(f"{one['name']}{status}{mark}: {model}{labels} ({one['run_id']})"), "bold"
    if not one["levels"]:
        yield "no level has a row", "yellow"
    low = set(one["low_n"])
    columns = tables.with_counts(_counts(low))
    for table in tables.layout(one["levels"], width, columns):
        yield from ((line, "") for line in tables.table_lines(one["levels"], table))
    yield from ((line, "yellow") for line in _marks(one, low))
    verdict = one["verdict"]
    reasons = f": {'; '.join(verdict['reasons'])}" if verdict["reasons"] else ""
    yield from ((line, "") for line in _wrapped(f"verdict: {verdict['status'].upper()}{reasons}", width))
    for note in verdict["notes"]:
        yield from ((line, "dim") for line in _wrapped(f"note: {note}", width))


def _counts(low: set[int]) -> tuple[Column, ...]:
    def n(level: Mapping[str, Any]) -> str:
        told = level["ok"] if level["ok"] is not None else level["measured"]
        return f"{_count(told)}{'~' if level['level'] in low else ''}"

    return (
        Column(("TPSxc", "tok/s"), lambda level: number(level["aggregate_tok_s_kimi_report"])),
        Column(("", "n"), n, opens=True),
        Column(("", "fail"), lambda level: _count(level["failed"])),
    )


def _count(value: int | None) -> str:
    return "-" if value is None else str(value)


def _marks(one: Mapping[str, Any], low: set[int]) -> Iterator[str]:
    """Explain the signs beside figures, where there are any."""
    if low:
        yield "~ low n: fewer than 29 requests, no 95 % interval of P90"
    if any(not level["complete"] for level in one["levels"]):
        yield "* incomplete level: passes no limit, not to be compared with the others"
    if one["levels_not_run"]:
        yield f"not run: c={', '.join(map(str, one['levels_not_run']))}"
    for level in one["levels"]:
        if level["failed"]:
            yield printable(f"failed at c={level['level']}: {tables.failures(level)}")


# --- across configurations ------------------------------------------------------------------------------------------


def grid(cells: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield rows of text as aligned lines: the first column to the left, all others to the right."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        first, *rest = (
            cell.ljust(width) if at == 0 else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join((first, *rest)).rstrip()


def _slo(report: Mapping[str, Any], signs: Signs) -> Iterator[Line]:
    limits, matrix = report["limits"], report["slo"]
    ttft, tps = f"TTFT <= {limits['ttft_ms']:g} ms", f"TPS >= {limits['tps']:g} tok/s"
    at = "mean" if limits["percentile"] == "mean" else limits["percentile"].upper()
    yield f"SLO at {at}, first sign {ttft}, second {tps}", "bold"
    cells = [["", *(f"c={level}" for level in matrix["levels"])]]
    cells += [[row["name"], *(_signs(cell, signs) for cell in row["cells"])] for row in matrix["rows"]]
    yield from ((printable(line), "") for line in grid(cells))
    yes, no = signs.met, signs.missed
    used = {sign for row in cells[1:] for cell in row[1:] for sign in cell}
    legend = f"{yes}{yes} both  {no}{yes} only TPS  {yes}{no} only TTFT  {no}{no} neither"
    if signs.unknown in used:
        legend += f"  {signs.unknown} no such figure"
    if "*" in used:
        legend += "  * incomplete: does not pass"
    if "!" in used:
        legend += "  ! more than 1 % failed: does not pass"
    yield legend, "dim"
    unknown = [cell for row in matrix["rows"] for cell in row["cells"] if cell and cell["tps"] is None]
    if unknown and report["convention"]["tps_tail"] == "low":
        yield "an imported table may not tell the low tail of TPS: --convention kimi-report takes the upper", "dim"
    yield "", ""


def _signs(cell: Mapping[str, Any] | None, signs: Signs) -> str:
    if cell is None:
        return "-"
    mark = {"incomplete": "*", "failures": "!"}.get(cell["obstacle"] or "", "")
    both = ({True: signs.met, False: signs.missed}.get(cell[name], signs.unknown) for name in ("ttft", "tps"))
    return "".join(both) + mark


def _capacity(report: Mapping[str, Any]) -> Iterator[Line]:
    found, think = report["capacity"], report["think_time_s"]
    p90 = report["convention"]["users_latency"] == "p90"
    yield f"users at {think:g} s of think time", "bold"
    cells = [["", "c_max", "L P90 s" if p90 else "L mean s", "users"]]
    for row in found["rows"]:
        latency = row["l_p90_s"] if p90 else row["l_mean_s"]
        cells += [
            [row["name"], _users(row, row["c_max"]), number(latency), _users(row, row["users"])],
            ["", "", "", found["note"]],
        ]
    yield from ((printable(line), "") for line in grid(cells))
    for row in found["rows"]:
        if row["passed_above"] and report["convention"]["c_max"] == "unbroken":
            above = ", ".join(map(str, row["passed_above"]))
            yield printable(f"{row['name']} passes at c={above} too, above a level that fails: not used"), "yellow"
    for each in found["relative"]:
        yield printable(f"{each['of']}: {_times(each['ratio'])} x the users of {each['to']}"), ""
    yield "", ""
    for kind, title, shown in (
        ("think_time", "users at other think times", lambda name: f"{name} s"),
        ("percentile", "users with the limits at", lambda name: name if name == "mean" else name.upper()),
    ):
        names = list(found["rows"][0]["sensitivity"][kind]) if found["rows"] else []
        rows = [[row["name"], *(_known(row["sensitivity"][kind][name]) for name in names)] for row in found["rows"]]
        yield from ((printable(line), "") for line in grid([[title, *map(shown, names)], *rows]))
        yield found["note"], "dim"
        yield "", ""


def _users(row: Mapping[str, Any], value: int | None) -> str:
    """Return c_max or users: 0 where every level fails, "?" where there is no figure to judge or count by."""
    return "0" if row["c_max"] is None and row["judged"] else _known(value)


def _known(value: int | None) -> str:
    return "?" if value is None else str(value)


def _times(ratio: float) -> str:
    return f"{ratio:.1f}" if ratio < 99.95 else f"{ratio:.0f}"


def _speculation(pair: Mapping[str, Any]) -> Iterator[Line]:
    mark = " [SIMULATED]" if pair["simulated"] else ""
    yield printable(f"speculation: TPS of {pair['spec']} / {pair['direct']}{mark}"), "bold"
    cells = [["c", "ratio", "95 %", "with", "without", "tokens/event"]]
    for each in pair["levels"]:
        ratio = "-" if each["ratio"] is None else f"{each['ratio']:.2f}"
        interval = "-" if each["interval"] is None else "{:.2f}..{:.2f}".format(*each["interval"])
        speeds = number(each["spec_tps"]), number(each["direct_tps"])
        cells.append([str(each["level"]), ratio, interval, *speeds, number(each["tokens_per_event"])])
    yield from ((line, "") for line in grid(cells))
    crossed = " and ".join(f"at c={number(load)}" for load in pair["crossings"]) or "nowhere"
    nearest = "none" if pair["nearest_level"] is None else f"c={pair['nearest_level']}"
    yield f"break-even: the ratio crosses 1 {crossed}; level nearest to 1: {nearest}", ""
    yield "", ""


def _decoding(report: Mapping[str, Any]) -> Iterator[Line]:
    levels = report["slo"]["levels"]
    yield "streams decoding at once", "bold"
    rows = [
        [one["name"], *(number(one["decoding"].get(str(level))) for level in levels)]
        for one in report["configurations"]
    ]
    yield from ((printable(line), "") for line in grid([["", *(f"c={level}" for level in levels)], *rows]))
    yield "", ""


def _anomalies(report: Mapping[str, Any], width: int) -> Iterator[Line]:
    yield "peaks and anomalies, by rule", "bold"
    if not report["anomalies"]:
        yield "none", ""
    for fact in report["anomalies"]:
        where = ", ".join(map(str, fact["levels"]))
        figures = ", ".join(_figure(name, value) for name, value in fact["figures"].items() if value is not None)
        text = f"{fact['kind']}: {fact['configuration']} at c={where}: {figures}"
        yield from ((line, "") for line in _wrapped(text, width))
    yield "", ""


def _figure(name: str, value: object) -> str:
    if isinstance(value, Mapping):
        return f"{name} {', '.join(f'{number(each)} (c={key})' for key, each in value.items())}"
    shown = number(value) if isinstance(value, float) else value
    return f"{name} {shown}"
