"""A run opened for reading: its manifest, its tables, and what a crash left, put in order and said.

A run whose supervisor lives is only looked at. One that says `running` and whose supervisor is gone is
finished (see recovery.py). What was done stands in `notes`, in run.log and in the manifest. A directory that cannot be
written to is read all the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from fastload.errors import TraceError
from fastload.trace import recovery
from fastload.trace.layout import level_dirs, parts
from fastload.trace.schema import SCHEMA_VERSION, requests_schema, tokens_schema, version_of
from fastload.trace.writer import TEMPORARY


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
        return tuple(name for name in level_dirs(self.path) if parts(self.path, name))

    def requests(self, level_dir: str | None = None) -> pa.Table:
        """The rows of one level or of all (see `role`); columns of schema.requests_schema."""
        return self._table("requests", level_dir)

    def tokens(self, level_dir: str | None = None) -> pa.Table:
        """The events of one level's requests, or of all; columns as in schema.tokens_schema."""
        return self._table("tokens", level_dir)

    def pieces(self, kind: str, level_dir: str | None = None) -> Iterator[pa.Table]:
        """The rows of `requests` or `tokens` in their order, one row group at a time: memory holds a row group, however
        long the run was.

        TraceError as for the whole tables.
        """
        schema = requests_schema() if kind == "requests" else tokens_schema()
        for path in self._files(kind, level_dir):
            yield from _row_groups(path, schema)

    def _table(self, kind: str, level_dir: str | None) -> pa.Table:
        """TraceError if a part is corrupt, missing or newer, or if the run has no such level."""
        schema = requests_schema() if kind == "requests" else tokens_schema()
        tables = [piece for path in self._files(kind, level_dir) for piece in _row_groups(path, schema)]
        return pa.concat_tables(tables) if tables else schema.empty_table()

    def _files(self, kind: str, level_dir: str | None) -> list[Path]:
        if level_dir is not None and level_dir not in level_dirs(self.path):
            known = ", ".join(level_dirs(self.path)) or "none"
            raise TraceError(f"{self.path} has no level {level_dir}; it has: {known}")
        names = level_dirs(self.path) if level_dir is None else (level_dir,)
        return [self.path / kind / name / part for name in names for part in parts(self.path, name)]


def open_run(path: Path | str, *, repair: bool = True) -> Run:
    """Open a run, finishing what a crash left if `repair`. TraceError if it is none or newer."""
    directory = Path(path)
    manifest = _read_manifest(directory)
    if manifest.get("status") == "running":
        note = recovery.still_written(directory, manifest.get("supervisor"))
        if note:
            return Run(directory, manifest, (note,))
    if not repair:
        manifest, notes = recovery.look(directory, manifest)
        return Run(directory, manifest, tuple(notes))
    with recovery.alone(directory) as alone:
        manifest = _read_manifest(directory)  # another opener may have finished it meanwhile
        manifest, notes = (recovery.put_in_order if alone else recovery.look)(directory, manifest)
    return Run(directory, manifest, tuple(notes))


def _read_manifest(directory: Path) -> dict[str, object]:
    path = directory / "manifest.json"
    if not directory.is_dir():
        what = "is a file" if directory.exists() else "does not exist"
        raise TraceError(f"{directory} {what}; give the directory of a run (with manifest.json in it)")
    try:
        manifest = orjson.loads(path.read_bytes())
    except FileNotFoundError:
        if {one.name for one in directory.iterdir()} <= {path.name + TEMPORARY}:
            raise TraceError(
                f"{directory} is empty: a run that was cut off there had not begun, and nothing of it is to be had"
            ) from None
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


def _row_groups(path: Path, schema: pa.Schema) -> Iterator[pa.Table]:
    """The row groups of a part, in this version's columns: what an older file lacks is null."""
    try:
        with pq.ParquetFile(path) as file:
            version = version_of(file.schema_arrow)
            if version > SCHEMA_VERSION:
                raise TraceError(_newer(path, version))
            if version < 1:
                raise TraceError(f"{path} is not a trace of fastload: it has no schema version")
            for number in range(file.num_row_groups):
                yield _in_this_version(file.read_row_group(number), schema)
    except FileNotFoundError:
        raise TraceError(f"{path} is missing") from None
    except (OSError, pa.ArrowException) as error:
        raise TraceError(f"{path} is corrupt: {recovery.one_line(error)}") from error


def _in_this_version(table: pa.Table, schema: pa.Schema) -> pa.Table:
    arrays = [
        table[field.name].cast(field.type)
        if field.name in table.column_names
        else pa.chunked_array([pa.nulls(table.num_rows, field.type)])
        for field in schema
    ]
    return pa.Table.from_arrays(arrays, schema=schema)


def _newer(path: Path, version: int) -> str:
    return f"{path} was written by a newer fastload (schema {version}, not {SCHEMA_VERSION}): update fastload"

