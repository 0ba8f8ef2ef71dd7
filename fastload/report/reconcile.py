"""A reconciliation as plain text: the figures by every definition, the steps between, the gap to another file."""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fastload.report.tables import SIMULATED, number, printable

WIDTH = 120

FIGURES = {
    "ttft_ms": ("TTFT ms", "TTFT"),
    "itl_ms": ("per token ms (ITL, TPOT)", "per token"),
    "icl_ms": ("chunk gap ms (ICL)", "ICL"),
    "named_itl_ms": ('what it calls "ITL", ms', '"ITL"'),
    "latency_s": ("latency s", "latency"),
    "tps": ("TPS of a user, tok/s", "TPS"),
    "decode_tps": ("1 / ITL, tok/s", "1 / ITL"),
    "aggregate_tok_s": ("output tok/s", "output tok/s"),
    "system_rps": ("requests/s", "requests/s"),
}
"""Title and short name of each figure, in the order of printing."""

SMALLEST_SHOWN = 1e-4
"""A step is printed from this share of the figure on; all are in --json."""

RULES = (
    "every column is computed from this run's own stamps by that tool's definition: the errors of its client are not"
    " in it",
    "steps are taken in the order printed, each measured with those before it taken: they add up to the difference",
    f"steps below {SMALLEST_SHOWN:.2%} of a figure are left out here; --json has all",
)


def plain(result: Mapping[str, Any], width: int = WIDTH) -> str:
    """Return the reconciliation of a run, ending in a newline."""
    lines = [printable(f"{result['run_id']}: {result['model'] or 'model unknown'}, as other tools would compute it")]
    if result["simulated"]:
        lines += textwrap.wrap(SIMULATED, width)
    asked = {level["beside"]["tool"] for level in result["levels"] if level.get("beside")} or set(result["tools"])
    explained = {key: tool for key, tool in result["tools"].items() if key in asked}
    for level in result["levels"]:
        lines += ["", f"c={level['level']}, {level['n']} successful requests"]
        lines += _table(level["figures"], result["tools"])
        for key, tool in explained.items():
            lines += _steps(key, tool, level["figures"], width)
        if level.get("beside"):
            lines += _beside(level["beside"], result, width)
    lines.append("")
    lines += [line for rule in RULES for line in textwrap.wrap(rule, width, subsequent_indent="    ")]
    for tool in explained.values():
        for remark in tool["remarks"]:
            lines += textwrap.wrap(f"not in its column, {tool['title']}: {remark}", width, subsequent_indent="    ")
    return "\n".join(lines) + "\n"


def _table(figures: Mapping[str, Any], tools: Mapping[str, Any]) -> list[str]:
    """Return one line for each figure and statistic, a column for us and each tool."""
    grid = [["", "", "fastload", *tools]]
    for figure, (title, _) in FIGURES.items():
        for at, statistic in enumerate(figures[figure]):
            entry = figures[figure][statistic]
            cells = [number(entry["fastload"])]
            cells += [number(entry[key]["value"]) if key in entry else "" for key in tools]
            grid.append([title if at == 0 else "", "" if statistic == "value" else statistic, *cells])
    return _aligned(grid)


def _steps(key: str, tool: Mapping[str, Any], figures: Mapping[str, Any], width: int) -> Iterator[str]:
    """Yield the steps of one tool, each with what it does to the mean and the P90 of every figure."""
    sizes: dict[str, list[str]] = {says: [] for says in tool["steps"]}
    for figure, (_, short) in FIGURES.items():
        for statistic, entry in figures[figure].items():
            if statistic in ("p50", "p99") or key not in entry:
                continue
            name = short if statistic == "value" else f"{short} {statistic}"
            for step in entry[key]["steps"]:
                scale = max(abs(entry["fastload"] or 0.0), abs(entry[key]["value"] or 0.0))
                if step["change"] is None or abs(step["change"]) >= SMALLEST_SHOWN * scale:
                    sizes[step["says"]].append(f"{name} {_signed(step['change'])}")
    shown = {says: changes for says, changes in sizes.items() if changes}
    yield ""
    yield f"from fastload to {tool['title']}:" + ("" if shown else " nothing that shows in these figures")
    for says, changes in shown.items():
        text = f"{says}: {'; '.join(changes)}"
        yield from textwrap.wrap(text, width, initial_indent="  ", subsequent_indent="      ", break_long_words=False)


def _signed(change: float | None) -> str:
    if change is None:
        return "appears or vanishes"
    if change == 0:
        return "0"
    return ("+" if change > 0 else "-") + number(abs(change))


def _beside(beside: Mapping[str, Any], result: Mapping[str, Any], width: int) -> Iterator[str]:
    """Yield the other tool's figures against ours, and what of the gap its definitions explain."""
    title = result["tools"][beside["tool"]]["title"]
    yield ""
    n = "n not told" if beside["n"] is None else f"n={beside['n']}"
    yield printable(f"beside {beside['file']} ({title}, {n}):")
    head = ("its name", "statistic", "ours", "by its rule", "it says", "gap", "explained", "rest", "rest %", "chance")
    cells: list[tuple[str, ...]] = [head]
    for row in beside["rows"]:
        share = "-" if row["rest_share"] is None else f"{100 * row['rest_share']:+.2f}"
        chance = {True: "within", False: "beyond", None: "-"}[row["by_chance"]]
        unit = row["figure"].rpartition("_")[2] if row["figure"].endswith(("_ms", "latency_s")) else ""
        sizes: list[str] = [_signed(row[name]) for name in ("gap", "explained", "rest")]
        values = [number(row[name]) for name in ("ours", "by_definition", "theirs")]
        name = f"{row['name']} {unit}".rstrip()
        cells.append((name, "" if row["statistic"] == "value" else row["statistic"], *values, *sizes, share, chance))
    yield from _aligned(cells)
    for remark in beside["remarks"]:
        yield from textwrap.wrap(f"WARNING: {remark}", width, subsequent_indent="    ")
    yield from textwrap.wrap(
        "gap = it says - ours = explained (by its definitions) + rest; the rest is its client's error or another run's"
        " luck. chance: whether what it says lies in the 95 % bootstrap interval of our column, if independent",
        width,
        subsequent_indent="    ",
    )


def _aligned(grid: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a grid: two columns of words, then figures to the right."""
    widths = [max(map(len, column)) for column in zip(*grid, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if at < 2 else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in grid
    ]
