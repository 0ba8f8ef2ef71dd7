"""Runs side by side as plain text: every level's figures, then pair by pair what differs and whether it may be said."""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fastload.report.tables import SIMULATED, number, printable

WIDTH = 120
SHOWN = (
    ("ttft_ms", "mean", "TTFT mean ms"),
    ("ttft_ms", "p90", "TTFT P90 ms"),
    ("itl_ms", "mean", "ITL mean ms"),
    ("tps", "mean", "TPS mean tok/s"),
    ("tps", "p10", "TPS p10 tok/s"),
    ("latency_s", "mean", "latency mean s"),
    ("aggregate_tok_s", None, "output tok/s"),
    ("system_rps", None, "requests/s"),
    ("failed", None, "failed"),
)
"""What stands side by side, in this order: key in a level, statistic, title."""


def plain(result: Mapping[str, Any], width: int = WIDTH) -> str:
    """Return the comparison, ending in a newline."""
    runs = result["runs"]
    lines: list[str] = []
    for at, run in enumerate(runs):
        said = ", ".join(f"{name} {value}" for name, value in run["axes"].items()) or "nothing labelled"
        mark = "" if run["verdict"] == "valid" else f" [{run['verdict'].upper()}]"
        simulated = " [SIMULATED]" if run["simulated"] else ""
        lines += _wrapped(f"{_letter(at)}  {run['run_id']}{mark}{simulated}: {said}", width)
    if any(run["simulated"] for run in runs):
        lines += _wrapped(SIMULATED, width)
    lines += ["", *_matrix(runs)]
    for at, pair in enumerate(result["pairs"], 1):
        lines += _pair(pair, _letter(0), _letter(at), width)
    lines.append("")
    for rule in result["rules"]:
        lines += _wrapped(rule, width)
    return "\n".join(lines) + "\n"


def _letter(at: int) -> str:
    """Return A, B, .. Z, then R27, R28, ..."""
    return chr(ord("A") + at) if at < 26 else f"R{at + 1}"


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(printable(text), width, subsequent_indent="    ", break_long_words=False)


def _matrix(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line for each level of each figure, a column for each run."""
    levels = sorted({level["level"] for run in runs for level in run["levels"]})
    by_level = [{level["level"]: level for level in run["levels"]} for run in runs]
    grid = [["", "c", *(_letter(at) for at in range(len(runs)))]]
    for key, statistic, title in SHOWN:
        for at, level in enumerate(levels):
            values = [_value(entries.get(level), key, statistic) for entries in by_level]
            grid.append([title if at == 0 else "", str(level), *map(number, values)])
    users = [run["capacity"]["users"] for run in runs]
    if any(value is not None for value in users):
        grid.append(["users (capacity)", "", *map(number, users)])
    return _aligned(grid)


def _value(level: Mapping[str, Any] | None, key: str, statistic: str | None) -> float | None:
    found = None if level is None else level.get(key)
    return found if statistic is None or found is None else found[statistic]


def _pair(pair: Mapping[str, Any], a: str, b: str, width: int) -> Iterator[str]:
    yield ""
    differing = "; ".join(f"{name}: {_said(old)} -> {_said(new)}" for name, (old, new) in pair["axes"].items())
    yield from _wrapped(f"{a} -> {b}: {differing or 'no axis differs'}", width)
    for warning in pair["warnings"]:
        yield from _wrapped(f"WARNING: {warning}", width)
    grid = [["", "c", a, b, "change", "%", "95 % interval of the change", ""]]
    for level in pair["levels"]:
        for name, found in level["figures"].items():
            if found["from"] is None and found["to"] is None:
                continue
            grid.append([name, str(level["level"]), *_cells(found)])
    yield from _aligned(grid)
    if pair["levels_of_one"]:
        yield f"levels of one run only: {', '.join(map(str, pair['levels_of_one']))}"
    if pair["manifest"]:
        yield f"what the manifests say differently ({a} -> {b}):"
    for one in pair["manifest"]:
        yield from _wrapped(f"  {one['group']}: {one['key']}: {_said(one['from'])} -> {_said(one['to'])}", width)


def _cells(found: Mapping[str, Any]) -> list[str]:
    change, ratio, interval = found["difference"], found["ratio"], found["interval"]
    bounds = "" if interval is None else f"{_signed(interval[0])} to {_signed(interval[1])}"
    if found["low_n"]:
        says = f"low n ({' and '.join('not told' if n is None else str(n) for n in found['n'])})"
    else:
        says = {None: "", True: "differs", False: "may be chance"}[found["differs"]]
    return [
        number(found["from"]),
        number(found["to"]),
        "-" if change is None else _signed(change),
        "-" if ratio is None else f"{100 * (ratio - 1):+.1f}",
        bounds,
        says,
    ]


def _signed(change: float) -> str:
    return "0" if change == 0 else ("+" if change > 0 else "-") + number(abs(change))


def _said(value: object) -> str:
    return "not said" if value is None else str(value)


def _aligned(grid: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a grid: the first column of words, the others to the right, the last one to the left."""
    widths = [max(map(len, column)) for column in zip(*grid, strict=True)]
    last = len(widths) - 1
    wordy = last if last > 6 else -1
    return [
        "  ".join(
            cell.ljust(width) if at in (0, wordy) else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in grid
    ]
