"""The table of CordatusAI/llm-benchmark: `<model>-table.csv` of the archive it offers for download, one row a level.

Figures are rounded to two decimals there, latency too (0.01 s). Its "Throughput (RPS)" is requests over the sum of
their latencies, which is one stream's rate and not the system's. How many requests there were, and how many failed, it
does not say.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from fastload.trace.formats.told import Told, ToldLevel, bad, number, read_rows, whole

TOOL: Final = "cordatus"
ENDING: Final = "-table.csv"
LEVEL: Final = "Concurrency"

# Its name of a distribution, its unit, and our name.
_DISTRIBUTIONS: Final = (
    ("TTFT", "ms", "ttft_ms"),
    ("ITL", "ms", "itl_ms"),
    ("TPS", "tokens/s", "tps"),
    ("Latency", "s", "latency_s"),
)
_STATISTICS: Final = (("Mean", "mean"), ("p50", "p50"), ("p90", "p90"))
_RPS: Final = "Throughput (RPS)"


def recognises(heading: Mapping[str, Any]) -> bool:
    """Say whether a heading is that of its table."""
    return {LEVEL, "TTFT (Mean, ms)", _RPS} <= heading.keys()


def read(file: Path) -> Told:
    """Read the table. PlanError, naming file and field, for one that is not what it should be."""
    rows = read_rows(file)
    if not recognises(rows[0]):
        raise bad(file, f"is no table of the Cordatus tool: it lacks {LEVEL!r}, 'TTFT (Mean, ms)' or {_RPS!r}")
    levels = [_level(file, at, row) for at, row in enumerate(rows, 2)]
    if len({level.level for level in levels}) < len(levels):
        raise bad(file, f"column {LEVEL!r} has a value twice")
    named = file.name.endswith(ENDING) and len(file.name) > len(ENDING)
    return Told(
        tool=TOOL,
        file=file.name,
        model=file.name.removesuffix(ENDING) if named else None,
        levels=tuple(sorted(levels, key=lambda level: level.level)),
        facts={"rounded_to": 0.01},
    )


def _level(file: Path, line: int, row: Mapping[str, str | None]) -> ToldLevel:
    def of(column: str) -> float | None:
        return number(file, f"line {line}: {column}", row.get(column))

    figures: dict[str, Any] = {"stream_rps": of(_RPS)}
    for theirs, unit, ours in _DISTRIBUTIONS:
        figures[ours] = {name: of(f"{theirs} ({written}, {unit})") for written, name in _STATISTICS}
    return ToldLevel(whole(file, f"line {line}: {LEVEL}", row.get(LEVEL), needed=True, lowest=1) or 1, figures)
