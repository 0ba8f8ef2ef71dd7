"""One pass over the events of a level for several readings of what a chunk is.

Memory: a few numbers per request, 8 bytes per gap and reading (less where two readings agree), one piece of events.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fastload.analysis import rows
from fastload.analysis.reconcile_tools import Chunks
from fastload.analysis.rows import NULL, Bools, Floats, Ints
from fastload.analysis.window import Window

_CHOICES = 8
"""Flag of an event whose choices were not empty (trace/SCHEMA.md)."""


@dataclass(slots=True)
class Reading:
    """What one reading of chunks finds. Per row of `requests`: first, last (ns after sent, -1 without a chunk).

    Gaps between neighbouring chunks of a request, in ms, come in pieces with the row they belong to.
    """

    first: Ints
    last: Ints
    gaps: list[tuple[Ints, Floats]] = field(default_factory=list)

    def pooled(self, wanted: Bools) -> Floats:
        """Return the gaps, in ms, of the rows that are wanted."""
        kept = [gap[wanted[row]] for row, gap in self.gaps]
        return np.concatenate(kept) if kept else np.zeros(0)


@dataclass(frozen=True, slots=True)
class Events:
    """What one pass found: a reading per rule, the last event of each row (ns after sent, -1 without one), tokens of
    events of all roles inside each window, in the order given.
    """

    readings: dict[Chunks, Reading]
    last_event: Ints
    window_tokens: tuple[int, ...]


def read_events(
    requests: pa.Table,
    tokens: Iterable[pa.Table],
    counted: Bools,
    rules: Sequence[Chunks],
    windows: Sequence[Window],
) -> Events:
    """Pass over the `tokens` rows of one level, piece by piece.

    `counted` says for each row of `requests` whether its chunks are wanted; the tokens in windows are those of all.
    """
    sent, owners = rows.ints(requests, "sent_ns"), _Owners(requests)
    found = {rule: Reading(_nulls(sent), _nulls(sent)) for rule in rules}
    last_event = _nulls(sent)
    inside = [0] * len(windows)
    for piece in tokens:
        known, of = owners.find(rows.ints(piece, "request"))
        piece = piece.filter(pa.array(known))
        lengths = pc.fill_null(pc.list_value_length(piece.column("event_ns")), 0).to_numpy()
        row, event_ns = np.repeat(of, lengths), _flat(piece, "event_ns")
        got = _flat(piece, "tokens")
        for at, window in enumerate(windows):
            in_it = window.contains(np.where(sent[row] == NULL, NULL, sent[row] + event_ns))
            inside[at] += int(np.maximum(got[in_it], 0).sum(dtype=np.int64))

        wanted = counted[row]
        row, event_ns = row[wanted], event_ns[wanted]
        channel, flags = _flat(piece, "channel")[wanted], _flat(piece, "flags")[wanted]
        np.maximum.at(last_event, row, event_ns)
        _add_chunks(found, row, event_ns, channel, (flags & _CHOICES) != 0)
    return Events(found, last_event, tuple(inside))


def _add_chunks(found: dict[Chunks, Reading], row: Ints, event_ns: Ints, channel: Ints, choices: Bools) -> None:
    """Add one piece to every reading; readings that agree on it share its arrays."""
    seen: list[tuple[Bools, tuple[Ints, Floats]]] = []
    for rule, reading in found.items():
        chunk = _chunks(rule, row, channel, choices)
        of, at = row[chunk], event_ns[chunk]
        begins = np.flatnonzero(np.concatenate(([True], of[1:] != of[:-1]))) if len(of) else np.zeros(0, np.int64)
        reading.first[of[begins]] = at[begins]
        reading.last[of[begins]] = at[np.concatenate((begins[1:], [len(of)])) - 1] if len(of) else at[:0]
        gaps = next((gaps for mask, gaps in seen if np.array_equal(mask, chunk)), None)
        if gaps is None:
            inner = of[1:] == of[:-1]
            gaps = (of[1:][inner].astype(np.int32), np.diff(at)[inner] / 1e6)
            seen.append((chunk, gaps))
        reading.gaps.append(gaps)


def _chunks(rule: Chunks, row: Ints, channel: Ints, choices: Bools) -> Bools:
    """Say for each event whether it is a chunk. Events are in order; those of one request are neighbours."""
    text: Bools = (channel >= 1) & (channel <= rule.channels)
    if not (rule.before or rule.between or rule.after) or not len(row):
        return text
    begins = np.flatnonzero(np.concatenate(([True], row[1:] != row[:-1])))
    sizes = np.diff(np.append(begins, len(row)))
    so_far = np.cumsum(text)
    earlier: Ints = np.repeat(so_far[begins] - text[begins], sizes)  # text of the requests before it
    total = np.repeat(so_far[begins + sizes - 1], sizes) - earlier
    nth = so_far - earlier
    silent = choices & ~text
    extra: Bools = np.zeros(len(row), dtype=np.bool_)
    if rule.before:
        extra |= silent & (nth == 0)
    if rule.between:
        extra |= silent & (nth > 0) & (nth < total)
    if rule.after:
        extra |= silent & (nth > 0) & (nth == total)
    return text | extra


class _Owners:
    """From a request's number to its row: of several, the one that was sent owns the events."""

    def __init__(self, requests: pa.Table) -> None:
        numbers = rows.ints(requests, "request")
        self.order = np.lexsort((rows.ints(requests, "sent_ns") == NULL, numbers))
        self.numbers = numbers[self.order]

    def find(self, wanted: Ints) -> tuple[Bools, Ints]:
        """Say which of the numbers are known, and the rows of those."""
        if not len(self.numbers):
            return np.zeros(len(wanted), dtype=np.bool_), np.zeros(0, dtype=np.int64)
        at = np.minimum(np.searchsorted(self.numbers, wanted), len(self.numbers) - 1)
        known: Bools = self.numbers[at] == wanted
        return known, self.order[at[known]]


def _flat(piece: pa.Table, name: str) -> Ints:
    """Return a list column's values end to end; null is 0."""
    flat: Ints = pc.fill_null(pc.list_flatten(piece.column(name)), 0).to_numpy()
    return flat


def _nulls(like: Ints) -> Ints:
    return np.full(len(like), NULL, dtype=np.int64)
