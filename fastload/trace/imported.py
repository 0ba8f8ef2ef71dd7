"""Figures of another tool kept as a run: a run directory without rows of ours, whose source is `figures.json`.

The manifest says so under `imported`: {"format", "file", "lacks", "facts"}. figures.json holds what the tool's file
told, in our names, and is not derived: {"schema", "levels": [{"level", "figures", "samples"}]}. Everything that reads
runs reads these too; what the format lacks is null there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import orjson

from fastload.errors import TraceError
from fastload.trace.formats.told import Told, ToldLevel
from fastload.trace.reader import Run
from fastload.trace.writer import create_run, write_json

FIGURES: Final = "figures.json"
FIGURES_SCHEMA: Final = 1


def write_imported(
    output: Path, name: str, told: Told, labels: Mapping[str, str], command: list[str] | None = None
) -> Path:
    """Make a run of what a file told; return its directory. PlanError or TraceError as `create_run`."""
    simulated = bool(told.simulated)
    writer = create_run(
        output,
        name,
        {
            "command": command,
            "target": {"url": None, "model": told.model, "simulated": simulated, "facts": {}, "labels": dict(labels)},
            "simulated": simulated,
            "imported": {"format": told.tool, "file": told.file, "lacks": list(told.lacks), "facts": dict(told.facts)},
        },
    )
    levels = [dataclasses.asdict(level) for level in told.levels]
    try:
        write_json(writer.path / FIGURES, {"schema": FIGURES_SCHEMA, "levels": levels})
        writer.close("complete")
    except TraceError:
        writer.discard()  # the file it came from still holds all of it
        raise
    return writer.path


def imported(run: Run) -> Mapping[str, Any] | None:
    """Return what the manifest says of the import; None for a run that was measured here."""
    found = run.manifest.get("imported")
    return found if isinstance(found, dict) else None


def read_imported(run: Run) -> tuple[ToldLevel, ...]:
    """Return the levels of an imported run, lowest first. TraceError if figures.json is missing or damaged."""
    path = run.path / FIGURES
    try:
        content = orjson.loads(path.read_bytes())
        if content["schema"] > FIGURES_SCHEMA:
            raise TraceError(f"{path} was written by a newer fastload: update fastload")
        levels = [ToldLevel(int(one["level"]), dict(one["figures"]), dict(one["samples"])) for one in content["levels"]]
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, TypeError, KeyError) as error:
        raise TraceError(f"{path} is corrupt: {' '.join(str(error).split())[:200]}") from error
    return tuple(sorted(levels, key=lambda level: level.level))
