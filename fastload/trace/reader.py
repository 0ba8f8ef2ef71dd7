"""A run opened for reading: its manifest, its tables, and what a crash left, put in order and said.

A run whose supervisor lives is only looked at. One that says `running` and whose supervisor is gone is
finished: its temporary files are removed, levels without an end are marked incomplete, its status becomes
`crashed`. What was done stands in `notes` and in run.log. A directory that cannot be written to is read all
the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from fastload import _timing
from fastload.errors import TraceError
from fastload.trace.schema import SCHEMA_VERSION, requests_schema, tokens_schema, version_of
from fastload.trace.writer import TEMPORARY, own_process, process_start, utc_text, write_json

_KINDS: Final = ("requests", "tokens")


@dataclass(frozen=True, slots=True)
class Run:
    """A run on disk. manifest: as in manifest.json. notes: one line for each thing that was not in order."""

    path: Path
    manifest: dict[str, object]
    notes: tuple[str, ...]

    @property
    def run_id(self) -> str:
        """The name of the run."""
        return str(self.manifest.get("run_id") or self.path.name)

    def level_dirs(self) -> tuple[str, ...]:
        """Names of the level directories that have rows: the warm-up, then the levels in order."""
        return tuple(name for name in _level_dirs(self.path) if _parts(self.path, name))

    def requests(self, level_dir: str | None = None) -> pa.Table:
        """The rows of one level or of all (see `role`); columns of schema.requests_schema."""
        return self._table("requests", level_dir)

    def tokens(self, level_dir: str | None = None) -> pa.Table:
        """The events of one level's requests, or of all; columns as in schema.tokens_schema."""
        return self._table("tokens", level_dir)

    def _table(self, kind: str, level_dir: str | None) -> pa.Table:
        """TraceError if a part is corrupt, missing or newer, or if the run has no such level."""
        if level_dir is not None and level_dir not in _level_dirs(self.path):
            known = ", ".join(_level_dirs(self.path)) or "none"
            raise TraceError(f"{self.path} has no level {level_dir}; it has: {known}")
        names = _level_dirs(self.path) if level_dir is None else (level_dir,)
        schema = requests_schema() if kind == "requests" else tokens_schema()
        tables = [
            _read_part(self.path / kind / name / part, schema)
            for name in names
            for part in _parts(self.path, name)
        ]
        return pa.concat_tables(tables) if tables else schema.empty_table()


def open_run(path: Path | str, *, repair: bool = True) -> Run:
    """Open a run, finishing what a crash left if `repair`. TraceError if it is none or newer."""
    directory = Path(path)
    manifest = _read_manifest(directory)
    notes: list[str] = []
    if manifest.get("status") == "running":
        note = _still_written(manifest.get("supervisor"))
        if note:
            return Run(directory, manifest, (note,))
        manifest, notes = _finish_crashed(directory, manifest)
    leftovers = sorted(directory.rglob(f"*{TEMPORARY}"))
    notes += [
        f"half-written file left by a crash, ignored: {one.relative_to(directory)}" for one in leftovers
    ]
    for name in _level_dirs(directory):
        orphans = _part_names(directory / "tokens" / name) - _part_names(directory / "requests" / name)
        notes += [f"tokens without their requests, ignored: tokens/{name}/{part}" for part in sorted(orphans)]
    if repair and notes:
        try:
            _repair(directory, manifest, leftovers, notes)
        except (OSError, TraceError) as error:
            notes.append(f"the run directory could not be put in order: {error}")
    return Run(directory, manifest, tuple(notes))


def _read_manifest(directory: Path) -> dict[str, object]:
    path = directory / "manifest.json"
    if not directory.is_dir():
        what = "is a file" if directory.exists() else "does not exist"
        raise TraceError(f"{directory} {what}; give the directory of a run (with manifest.json in it)")
    try:
        manifest = orjson.loads(path.read_bytes())
    except FileNotFoundError:
        raise TraceError(f"{directory} is not a run: it has no manifest.json") from None
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror}") from error
    except orjson.JSONDecodeError as error:
        raise TraceError(f"{path} is corrupt: {error}") from error
    if not isinstance(manifest, dict) or not isinstance(manifest.get("schema"), int):
        raise TraceError(f"{path} is not the manifest of a run: it has no schema version")
    if manifest["schema"] > SCHEMA_VERSION:
        raise TraceError(_newer(path, manifest["schema"]))
    return manifest


def _still_written(supervisor: object) -> str | None:
    """A note if the run's supervisor lives, or if nobody can tell from here (another host or container)."""
    if not isinstance(supervisor, dict):
        return None
    own = own_process()
    if supervisor.get("host") != own["host"] or supervisor.get("namespace") != own["namespace"]:
        return (
            f"this run was being written on {supervisor.get('host')}: whether it still is cannot be told here"
        )
    pid, start = supervisor.get("pid"), supervisor.get("start")
    lives = supervisor.get("boot") == own["boot"] and isinstance(pid, int) and process_start(pid) == start
    return "this run is still being written" if lives and start is not None else None


def _finish_crashed(directory: Path, manifest: dict[str, object]) -> tuple[dict[str, object], list[str]]:
    """The manifest of a run that died, completed with what its files tell, and the notes on it."""
    notes = ["the run was cut off: its supervisor ended without closing it; status set to crashed"]
    listed = manifest.get("levels")
    levels = [dict(one) for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
    known = {one.get("dir"): one for one in levels}
    for name in _level_dirs(directory):
        entry = known.get(name)
        if entry is not None and entry.get("ended_ns") is not None:
            continue
        if entry is None:
            index, _, concurrency = name.partition("-c")
            entry = {"index": int(index) if index.isdigit() else -1, "dir": name, "complete": False}
            entry["concurrency"] = int(concurrency) if concurrency.isdigit() else 1
            levels.append(entry)
        rows, measured = 0, 0
        for part in _parts(directory, name):
            try:
                roles = pq.read_table(
                    directory / "requests" / name / part, columns=["role"], partitioning=None
                )
            except (OSError, pa.ArrowException) as error:
                notes.append(f"corrupt file: requests/{name}/{part}: {_one_line(error)}")
                continue
            rows += roles.num_rows
            measured += roles["role"].to_pylist().count("measured")
        entry["measured_done"] = measured
        notes.append(f"level {name} has no end: {rows} requests were saved of it")
    return {**manifest, "levels": levels, "status": "crashed"}, notes


def _repair(directory: Path, manifest: dict[str, object], leftovers: list[Path], notes: list[str]) -> None:
    for one in leftovers:
        one.unlink(missing_ok=True)
    write_json(directory / "manifest.json", manifest)
    with (directory / "run.log").open("a", encoding="utf-8") as log:
        log.writelines(f"{utc_text(_timing.realtime_ns())} opened: {note}\n" for note in notes)


def _level_dirs(directory: Path) -> tuple[str, ...]:
    """The warm-up first, then the levels by their number."""
    try:
        names = [one.name for one in (directory / "requests").iterdir() if one.is_dir()]
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise TraceError(f"cannot read {directory / 'requests'}: {error.strerror}") from error
    return tuple(sorted(names, key=lambda name: (name != "warmup", _number(name), name)))


def _number(name: str) -> int:
    """The number in `03-c8` or `part-012.parquet`, so that 100 comes after 99; -1 without one."""
    digits = "".join(
        c for c in name.partition(".")[0].removeprefix("part-").partition("-c")[0] if c.isdigit()
    )
    return int(digits) if digits else -1


def _parts(directory: Path, level: str) -> list[str]:
    """The parts of a level in order: those with requests, since these are renamed last."""
    return sorted(_part_names(directory / "requests" / level), key=lambda name: (_number(name), name))


def _part_names(folder: Path) -> set[str]:
    return {one.name for one in folder.glob("part-*.parquet")}


def _read_part(path: Path, schema: pa.Schema) -> pa.Table:
    """A part in this version's columns: what an older file lacks is null."""
    try:
        with pq.ParquetFile(path) as file:
            version = version_of(file.schema_arrow)
            if version > SCHEMA_VERSION:
                raise TraceError(_newer(path, version))
            if version < 1:
                raise TraceError(f"{path} is not a trace of fastload: it has no schema version")
            table = file.read()
    except FileNotFoundError:
        raise TraceError(f"{path} is missing") from None
    except (OSError, pa.ArrowException) as error:
        raise TraceError(f"{path} is corrupt: {_one_line(error)}") from error
    arrays = [
        table[field.name].cast(field.type)
        if field.name in table.column_names
        else pa.chunked_array([pa.nulls(table.num_rows, field.type)])
        for field in schema
    ]
    return pa.Table.from_arrays(arrays, schema=schema)


def _newer(path: Path, version: int) -> str:
    return f"{path} was written by a newer fastload (schema {version}, not {SCHEMA_VERSION}): update fastload"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
