"""One pass over the events of a level: gaps between text events, tokens inside the window, coalesced stamps.

Works on pieces of about two million events, so that a trace of any length fits: only the gaps are kept.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fastload.analysis.rows import NULL, Bools, Floats, Ints, ints
from fastload.analysis.window import Window

PIECE_EVENTS = 2_000_000

FIRST_TEXT_CHANNEL, LAST_TEXT_CHANNEL = 1, 4
"""Channels that carry generated text: content, reasoning, tool call, refusal (trace/SCHEMA.md)."""

COALESCED, CLAMPED = 1, 2
"""Flags of an event whose stamp is an upper bound, or was forced into the possible range."""


@dataclass(frozen=True, slots=True)
class EventFigures:
    """What the events of one level say.

    gaps_ms: each gap between neighbouring text events of a counted request, pooled. text_events: text events
    of counted requests, of which coalesced and clamped carry these flags. window_tokens: tokens of the events
    of ALL roles inside the window, as the trace attributed them; None without a window. rows: rows of the
    tokens table; unknown: those of requests that have no row.
    """

    gaps_ms: Floats
    text_events: int
    coalesced: int
    clamped: int
    window_tokens: int | None
    rows: int
    unknown: int


def fold(
    requests: pa.Table, tokens: pa.Table | Iterable[pa.Table], counted: Bools, window: Window | None
) -> EventFigures:
    """Fold the `tokens` rows of one level, given whole or in pieces.

    `counted` says for each row of `requests` whether it enters the distributions (successful and measured).
    """
    sent, numbers = ints(requests, "sent_ns"), ints(requests, "request")
    # A number may have rows that never connected beside the one that was sent: that one owns the events.
    order = np.lexsort((sent == NULL, numbers))
    ordered = numbers[order]

    gaps: list[Floats] = []
    rows = unknown = text_events = coalesced = clamped = window_tokens = 0
    for piece in _pieces(tokens):
        rows += piece.num_rows
        wanted = ints(piece, "request")
        at = np.minimum(np.searchsorted(ordered, wanted), max(len(ordered) - 1, 0))
        known = ordered[at] == wanted if len(ordered) else np.zeros(len(wanted), dtype=np.bool_)
        unknown += int((~known).sum())
        if not known.any():
            continue
        piece, request = piece.filter(pa.array(known)), order[at[known]]  # request: its row in `requests`

        row = np.repeat(request, pc.fill_null(pc.list_value_length(piece.column("event_ns")), 0).to_numpy())
        event_ns, channel = _flat(piece, "event_ns"), _flat(piece, "channel")
        text = (channel >= FIRST_TEXT_CHANNEL) & (channel <= LAST_TEXT_CHANNEL) & counted[row]
        gaps.append(_gaps(row[text], event_ns[text]))
        flags = _flat(piece, "flags")[text]
        text_events += len(flags)
        coalesced += int(((flags & COALESCED) != 0).sum())
        clamped += int(((flags & CLAMPED) != 0).sum())
        if window is not None:
            inside = window.contains(np.where(sent[row] == NULL, NULL, sent[row] + event_ns))
            window_tokens += int(np.maximum(_flat(piece, "tokens")[inside], 0).sum(dtype=np.int64))

    return EventFigures(
        gaps_ms=np.concatenate(gaps) if gaps else np.zeros(0),
        text_events=text_events,
        coalesced=coalesced,
        clamped=clamped,
        window_tokens=None if window is None else window_tokens,
        rows=rows,
        unknown=unknown,
    )


def _pieces(tokens: pa.Table | Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Cut each table by rows into pieces of about PIECE_EVENTS events."""
    for table in (tokens,) if isinstance(tokens, pa.Table) else tokens:
        events = pc.sum(pc.list_value_length(table.column("event_ns"))).as_py() or 0
        step = max(1, PIECE_EVENTS * table.num_rows // max(events, 1))
        for start in range(0, table.num_rows, step):
            yield table.slice(start, step)


def _flat(piece: pa.Table, name: str) -> Ints:
    """Return a list column's values end to end, in their own integer type; null is 0."""
    values = pc.list_flatten(piece.column(name))
    flat: Ints = (pc.fill_null(values, 0) if values.null_count else values).to_numpy()
    return flat


def _gaps(row: Ints, event_ns: Ints) -> Floats:
    """Return the ms between neighbouring events of the same row; the way to a row's first event is no gap."""
    gaps: Floats = np.diff(event_ns)[row[1:] == row[:-1]] / 1e6
    return gaps
