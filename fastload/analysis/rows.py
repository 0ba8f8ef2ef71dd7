"""Columns of the `requests` table as numpy arrays: one value per request, in the table's order."""

from typing import TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

Ints: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]
Bools: TypeAlias = NDArray[np.bool_]

NULL = -1
"""Stands for null in integer columns: stamps, counts and sizes are never negative."""

STAMPS = ("sent_ns", "first_byte_ns", "first_event_ns", "first_token_ns", "last_token_ns", "done_ns")
"""Stamps of one successful request in the order in which they must lie."""


def ints(table: pa.Table, name: str) -> Ints:
    """Return an integer column as int64, nulls as -1. A column an older trace lacks is all null."""
    if name not in table.column_names:
        return np.full(table.num_rows, NULL, dtype=np.int64)
    filled = pc.fill_null(table.column(name).cast(pa.int64()), NULL)
    return np.asarray(filled.to_numpy(), dtype=np.int64)


def floats(table: pa.Table, name: str) -> Floats:
    """Return a numeric column as float64, nulls as NaN (to be dropped, never to be printed)."""
    if name not in table.column_names:
        return np.full(table.num_rows, np.nan)
    return np.asarray(
        pc.fill_null(table.column(name).cast(pa.float64()), np.nan).to_numpy(), dtype=np.float64
    )


def flags(table: pa.Table, name: str) -> Bools:
    """Return a boolean column, nulls as False."""
    if name not in table.column_names:
        return np.zeros(table.num_rows, dtype=np.bool_)
    return np.asarray(pc.fill_null(table.column(name).cast(pa.bool_()), False).to_numpy(), dtype=np.bool_)


def equals(table: pa.Table, name: str, value: str) -> Bools:
    """Say for each row whether a text column has this value; null is no value."""
    if name not in table.column_names:
        return np.zeros(table.num_rows, dtype=np.bool_)
    same = pc.equal(table.column(name).cast(pa.string()), value)
    return np.asarray(pc.fill_null(same, False).to_numpy(), dtype=np.bool_)


def counts(table: pa.Table, name: str) -> dict[str, int]:
    """Count the values of a text column, most frequent first (ties by name); nulls are left out."""
    if name not in table.column_names or not table.num_rows:
        return {}
    found = pc.value_counts(pc.drop_null(table.column(name).cast(pa.string()))).to_pylist()
    pairs = [(str(each["values"]), int(each["counts"])) for each in found]
    return dict(sorted(pairs, key=lambda pair: (-pair[1], pair[0])))


def ends(table: pa.Table) -> Ints:
    """Return when each exchange was over, int64 ns: `done_ns`, or the last stamp of one that was given up.

    -1 only for a request that was never sent.
    """
    end = ints(table, "done_ns")
    for name in ("last_token_ns", "first_event_ns", "head_ns", "first_byte_ns"):
        end = np.where(end == NULL, ints(table, name), end)
    return np.where(end == NULL, ints(table, "sent_ns"), end)


def disordered(table: pa.Table) -> int:
    """Count rows whose known stamps run backwards."""
    latest = np.full(table.num_rows, NULL, dtype=np.int64)
    wrong = np.zeros(table.num_rows, dtype=np.bool_)
    for name in STAMPS:
        stamp = ints(table, name)
        known = stamp != NULL
        wrong |= known & (stamp < latest)
        latest = np.where(known, np.maximum(stamp, latest), latest)
    return int(wrong.sum())


def present(values: Floats) -> Floats:
    """Drop what is null (NaN)."""
    return values[~np.isnan(values)]


def mean(values: Floats) -> float | None:
    """Return the mean of the values that are there; None without any."""
    there = present(values)
    return float(there.mean()) if len(there) else None


def median(values: Floats) -> float | None:
    """Return the median of the values that are there; None without any."""
    there = present(values)
    return float(np.median(there)) if len(there) else None
