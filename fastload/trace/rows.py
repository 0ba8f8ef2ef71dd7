"""From the measurer's blocks to the rows of a trace: which events belong to which finished request.

A block holds events of many requests in arrival order, and a row for each request that ended in it. Here they
meet: the events are grouped by request with one stable sort, and `tables` makes the columns. A request that
has not ended stays in memory for a later batch. Python runs once a request and once a kept payload, never
once a token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from fastload._timing import END_CANCELLED, EVENT_COLUMNS, ROW_FIELDS
from fastload.trace.spread import Ints
from fastload.trace.tables import AT, Batch, Blob, RowContext, build

if TYPE_CHECKING:
    from fastload._timing import Block

_ROW_DTYPE: Final = np.dtype("<i8")


class LevelRows:
    """The open and the finished requests of one level; `add` blocks as they come, `take` what is finished."""

    def __init__(self, context: RowContext) -> None:
        self.context = context
        self.events_pending = 0
        self.rows_pending = 0
        self.raw_pending = 0  # bytes of payloads kept raw
        self._events: list[dict[str, npt.NDArray[np.generic]]] = []
        self._rows: list[Ints] = []
        self._blobs: dict[int, list[Blob]] = {}
        self._closed: set[int] = set()

    def add(self, block: Block) -> None:
        """Copy a block's events, rows and blobs; the block may be reused afterwards."""
        if block.n_events:
            events: dict[str, npt.NDArray[np.generic]] = {
                name: np.frombuffer(block.events[name], dtype=kind, count=block.n_events).copy()
                for name, kind in EVENT_COLUMNS
            }
            self._events.append(events)
            self.events_pending += block.n_events
        if block.n_rows:
            rows = np.frombuffer(block.rows, dtype=_ROW_DTYPE, count=block.n_rows * len(ROW_FIELDS))
            self._rows.append(rows.reshape(block.n_rows, len(ROW_FIELDS)).copy())
            self.rows_pending += block.n_rows
        for request, ordinal, kind, raw in block.blobs:
            self._blobs.setdefault(request, []).append((ordinal, kind, bytes(raw)))
            self.raw_pending += len(raw)

    def take(self, close: bool = False) -> Batch | None:
        """The finished requests since the last take, None if there are none.

        With `close` the open ones are given up as `cancelled` too; what still comes of them later is dropped.
        Nothing is kept of what is taken, so the caller keeps the batch until it is on disk.
        """
        events = {
            name: np.concatenate([part[name] for part in self._events])
            if self._events
            else np.empty(0, np.dtype(kind))
            for name, kind in EVENT_COLUMNS
        }
        rows = np.concatenate(self._rows) if self._rows else np.empty((0, len(ROW_FIELDS)), np.int64)
        if self._closed:
            late = np.fromiter(self._closed, np.int64)
            kept = ~np.isin(events["request"], late)
            events = {name: column[kept] for name, column in events.items()}
            rows = rows[~np.isin(rows[:, AT["request"]], late)]
        if close:
            rows = np.concatenate([rows, self._give_up(events["request"], rows)])
        rows = rows[np.lexsort((rows[:, AT["attempt"]], rows[:, AT["request"]]))]

        ids, last = _last_of_each(rows[:, AT["request"]])
        request = events["request"].astype(np.int64)
        at = np.minimum(np.searchsorted(ids, request), max(len(ids) - 1, 0))
        done = ids[at] == request if len(ids) else np.zeros(len(request), np.bool_)
        self._events = [{name: column[~done] for name, column in events.items()}] if not done.all() else []
        self._rows = []
        self.events_pending = int(len(done) - done.sum())
        self.rows_pending = 0
        if not len(rows):
            return None
        group = last[at[done]] if len(ids) else np.empty(0, np.int64)
        order = np.argsort(group, kind="stable")
        finished = {name: column[done][order] for name, column in events.items()}
        blobs = [self._blobs.pop(number, []) for number in rows[:, AT["request"]].tolist()]
        self.raw_pending -= sum(len(raw) for pieces in blobs for _, _, raw in pieces)
        return build(self.context, rows, group[order], finished, blobs)

    def _give_up(self, event_requests: npt.NDArray[np.generic], rows: Ints) -> Ints:
        """Rows for the requests that have events or blobs but no row: cancelled, and all else unknown."""
        known = np.unique(
            np.concatenate([event_requests.astype(np.int64), np.fromiter(self._blobs, np.int64)])
        )
        open_ = np.setdiff1d(known, rows[:, AT["request"]])
        self._closed.update(open_.tolist())
        given_up = np.full((len(open_), len(ROW_FIELDS)), -1, np.int64)
        given_up[:, AT["request"]] = open_
        given_up[:, AT["end"]] = END_CANCELLED
        given_up[:, AT["row_flags"]] = 0
        return given_up


def _last_of_each(sorted_values: Ints) -> tuple[Ints, Ints]:
    """The distinct values and the index of the last of each (a doubled number has its events there)."""
    last = np.flatnonzero(np.append(sorted_values[1:] != sorted_values[:-1], True)[: len(sorted_values)])
    return sorted_values[last], last
