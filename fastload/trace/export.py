"""A run's rows as one flat file for other programs: requests, or every event; Parquet, CSV or Arrow.

One piece of the run is in memory at a time. The file appears whole or not at all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

from fastload.errors import TraceError
from fastload.trace.reader import Run
from fastload.trace.schema import requests_schema
from fastload.trace.writer import TEMPORARY

FORMATS: Final = ("parquet", "csv", "arrow")

NAMELESS: Final = ("run_id", "target", "error", "server_request_id")
"""Columns that may name a host, a path, a user, a URL or a request of the server: null in an anonymous file. Texts of
prompts and answers are in no export."""

FORMULA: Final = r"^[=+\-@\t\r]"
"""How text begins that a spreadsheet would take for a formula: in a CSV it gets an apostrophe before it."""

_EVENT_COLUMNS: Final = (
    ("level", pa.int32()),
    ("role", pa.string()),
    ("status", pa.string()),
    ("request", pa.int64()),
    ("event", pa.int32()),
    ("event_ns", pa.int64()),
    ("tokens", pa.int32()),
    ("bytes", pa.int32()),
    ("channel", pa.uint8()),
    ("flags", pa.uint8()),
)
EVENTS_SCHEMA: Final = pa.schema([pa.field(name, kind) for name, kind in _EVENT_COLUMNS])
"""One row an event: `event` counts those of a request from 0, event_ns is its stamp - sent_ns."""


def write(
    run: Run,
    path: Path,
    form: str,
    *,
    events: bool = False,
    level_dirs: tuple[str, ...] | None = None,
    anonymize: bool = False,
) -> int:
    """Write a run's requests, or its events, to `path` (replaced if it is there); return the rows written.

    form: one of FORMATS. level_dirs: only these; all without. Requests have the columns of schema.requests_schema,
    events those of EVENTS_SCHEMA. TraceError, naming the path, for a run that cannot be read or a disk that fails.
    """
    schema = EVENTS_SCHEMA if events else requests_schema()
    metadata = {key: value for key, value in (requests_schema().metadata or {}).items()}
    if not anonymize:
        metadata[b"run_id"] = run.run_id.encode()
    schema = schema.with_metadata(metadata)
    names = run.level_dirs() if level_dirs is None else level_dirs
    pieces = _events(run, names) if events else _requests(run, names, anonymize)

    def fill(temporary: Path) -> int:
        rows = 0
        with temporary.open("wb") as file, _writer(form, file, schema) as writer:
            for piece in pieces:
                table = _without_formulas(piece) if form == "csv" else piece
                writer.write_table(table.replace_schema_metadata(metadata))
                rows += piece.num_rows
        return rows

    return into_place(path, fill)


def into_place(path: Path, fill: Callable[[Path], int]) -> int:
    """Let `fill` write a temporary file beside `path`, then give it that name; return what `fill` returns.

    TraceError, naming the path, if the disk fails; the temporary file is gone then.
    """
    temporary = path.with_name(path.name + TEMPORARY)
    try:
        found = fill(temporary)
        os.replace(temporary, path)
    except (OSError, pa.ArrowException) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else " ".join(str(error).split())[:200]
        raise TraceError(f"cannot write {path}: {reason}") from error
    finally:
        temporary.unlink(missing_ok=True)
    return found


def _writer(form: str, file: BinaryIO, schema: pa.Schema) -> Any:
    if form == "parquet":
        return pq.ParquetWriter(file, schema, compression="zstd")
    return pa.ipc.new_file(file, schema) if form == "arrow" else pyarrow.csv.CSVWriter(file, schema)


def _requests(run: Run, names: tuple[str, ...], anonymize: bool) -> Iterator[pa.Table]:
    for name in names:
        for piece in run.pieces("requests", name):
            yield _nameless(piece) if anonymize else piece


def _nameless(piece: pa.Table) -> pa.Table:
    for name in NAMELESS:
        at = piece.schema.get_field_index(name)
        piece = piece.set_column(at, piece.schema.field(at), pa.nulls(piece.num_rows, pa.string()))
    return piece


def _events(run: Run, names: tuple[str, ...]) -> Iterator[pa.Table]:
    """Yield the events of each piece, with level, role and status of their request (the row that was sent)."""
    told = ["request", "level", "role", "status", "sent_ns"]
    for name in names:
        requests = pa.concat_tables([piece.select(told) for piece in run.pieces("requests", name)])
        owners = requests.filter(pc.is_valid(requests["sent_ns"])).combine_chunks()
        for piece in run.pieces("tokens", name):
            owner = owners.take(pc.index_in(piece["request"], owners["request"]))
            lengths = pc.fill_null(pc.list_value_length(piece["event_ns"]), 0).to_numpy()
            row = np.repeat(np.arange(len(lengths)), lengths)
            first = np.repeat(np.cumsum(lengths) - lengths, lengths)
            columns = {one: owner[one].take(pa.array(row)) for one in ("level", "role", "status")}
            columns |= {"request": piece["request"].take(pa.array(row)), "event": pa.array(np.arange(len(row)) - first)}
            columns |= {one: pc.list_flatten(piece[one]) for one in ("event_ns", "tokens", "bytes", "channel", "flags")}
            yield pa.table([columns[one] for one in EVENTS_SCHEMA.names], EVENTS_SCHEMA.names).cast(EVENTS_SCHEMA)


def _without_formulas(piece: pa.Table) -> pa.Table:
    for at, field in enumerate(piece.schema):
        if pa.types.is_string(field.type):
            column = piece.column(at)
            risky = pc.fill_null(pc.match_substring_regex(column, FORMULA), False)
            if pc.any(risky).as_py():
                quoted = pc.binary_join_element_wise("'", column, "")
                piece = piece.set_column(at, field, pc.if_else(risky, quoted, column))
    return piece
