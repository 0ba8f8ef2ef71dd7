"""The tables of the report "Kimi K3 on DGX-B300" (July 2026): Appendix A as JSON or CSV, a configuration a table.

JSON: {configuration: {level: {"c", "ttft_mean", "ttft_p90", .. "rps"}}}. CSV, or text pasted from the report: the ten
columns `c,TTFT Mean,TTFT P90,ITL Mean,ITL P90,TPS Mean,TPS P90,Lat Mean,Lat P90,RPS`, each table below a line with its
title, or with a column `config` before them.

The report fixes answers at 128 tokens and takes 10 requests for each of c streams (its section 2.5): these are read as
told. Its RPS is 1 / mean latency, one stream's rate. Its P90 of TPS is the upper tail. Which requests failed it does
not say.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from fastload.trace.formats.told import Told, ToldLevel, bad, number, read_bytes, read_object, whole

TOOL: Final = "kimi-report"
MODEL: Final = "Kimi K3"
OUTPUT_TOKENS: Final = 128.0
REQUESTS_PER_STREAM: Final = 10

COLUMNS: Final = (
    "c",
    "ttft_mean",
    "ttft_p90",
    "itl_mean",
    "itl_p90",
    "tps_mean",
    "tps_p90",
    "lat_mean",
    "lat_p90",
    "rps",
)
_DISTRIBUTIONS: Final = (("ttft", "ttft_ms"), ("itl", "itl_ms"), ("tps", "tps"), ("lat", "latency_s"))
_TITLE: Final = re.compile(
    r"(?:A\.\d+\s+)?(?P<engine>\w+)[\s+-]*\(?(?P<kind>direct|spec)\w*\)?(?:\s*\((?P<draft>.+)\))?", re.I
)


def recognises(content: bytes) -> bool:
    """Say whether a file is one of these tables, by its first names."""
    head = content[:4096].decode("utf-8", "replace")
    return "ttft_mean" in head or any(_is_heading(_cells(line)) for line in head.splitlines())


def read(file: Path) -> dict[str, Told]:
    """Return the table of each configuration by its name. PlanError, naming file and field, for what is none."""
    content = read_bytes(file)
    found = _json(file, content) if content.lstrip()[:1] == b"{" else _csv(file, content)
    if not found:
        raise bad(file, "has no table: a heading c, TTFT Mean, .. RPS with rows below")
    return {name: _told(file, name, rows) for name, rows in found.items()}


def labels(title: str) -> dict[str, str]:
    """Return what the name of a configuration says of it: its engine, and whether it speculates."""
    found = _TITLE.fullmatch(title.strip())
    if found is None:
        return {}
    direct = found["kind"].lower() == "direct"
    return {"engine": found["engine"].lower(), "speculation": "none" if direct else found["draft"] or "spec"}


def short(title: str) -> str:
    """Return a title as a name: "A.2 vLLM + Spec (DSpark)" is vllm-spec."""
    found = _TITLE.fullmatch(title.strip())
    if found is not None:
        return f"{found['engine']}-{found['kind']}".lower()
    return re.sub(r"[^a-z0-9.]+", "-", title.strip().lower()).strip("-.") or "table"


def _told(file: Path, title: str, rows: Sequence[Mapping[str, object]]) -> Told:
    levels = [_level(file, title, row) for row in rows]
    if len({level.level for level in levels}) < len(levels):
        raise bad(file, f"{title}: a level (c) stands there twice")
    return Told(
        tool=TOOL,
        file=file.name,
        model=MODEL,
        levels=tuple(sorted(levels, key=lambda level: level.level)),
        facts={"table": title, "rounded_to": 0.01},
    )


def _level(file: Path, title: str, row: Mapping[str, object]) -> ToldLevel:
    def of(column: str) -> float | None:
        return number(file, f"{title}: {column}", row.get(column), needed=True)

    level = whole(file, f"{title}: c", row.get("c"), needed=True, lowest=1) or 1
    n = REQUESTS_PER_STREAM * level
    figures: dict[str, Any] = {
        "measured": n,
        "completion_tokens_mean": OUTPUT_TOKENS,
        "stream_rps": of("rps"),
    }
    for theirs, ours in _DISTRIBUTIONS:
        figures[ours] = {"mean": of(f"{theirs}_mean"), "p90": of(f"{theirs}_p90"), "n": n}
    return ToldLevel(level, figures)


def _json(file: Path, content: bytes) -> dict[str, list[Mapping[str, object]]]:
    found: dict[str, list[Mapping[str, object]]] = {}
    for name, table in read_object(file, content).items():
        if not isinstance(table, dict) or not table:
            raise bad(file, f"{name}: is no table of levels")
        for level, row in table.items():
            if not isinstance(row, dict):
                raise bad(file, f"{name}: level {level} is no row of figures")
            found.setdefault(name, []).append(row)
    return found


def _csv(file: Path, content: bytes) -> dict[str, list[Mapping[str, object]]]:
    """Return the rows below each title (or of each value of the column `config`)."""
    try:
        lines = content.decode("utf-8-sig").splitlines()
    except UnicodeDecodeError:
        raise bad(file, "is not a text in UTF-8") from None
    found: dict[str, list[Mapping[str, object]]] = {}
    title, headed = file.stem, False
    for at, line in enumerate(lines, 1):
        cells = _cells(line)
        if not cells:
            continue
        if _is_heading(cells):
            headed = True
        elif headed and len(cells) in (len(COLUMNS), len(COLUMNS) + 1) and _is_number(cells[-1]):
            name = cells[0] if len(cells) > len(COLUMNS) else title
            found.setdefault(name, []).append(dict(zip(COLUMNS, cells[-len(COLUMNS) :], strict=True)))
        elif _is_number(cells[0]):
            raise bad(file, f"line {at}: {len(cells)} cells, not {len(COLUMNS)} below a heading of as many")
        else:
            title, headed = " ".join(cells), False
    return found


def _cells(line: str) -> list[str]:
    """Return a line's cells: of a CSV, or of text whose columns spaces part."""
    if "," in line:
        return [cell.strip() for cell in next(csv.reader([line]), []) if cell.strip()]
    return line.split()


def _is_heading(cells: Sequence[str]) -> bool:
    words = " ".join(cells).lower().replace("_", " ").removeprefix("config ")
    return words == " ".join(COLUMNS).replace("_", " ")


def _is_number(cell: str) -> bool:
    return re.fullmatch(r"-?\d+(\.\d*)?", cell) is not None
