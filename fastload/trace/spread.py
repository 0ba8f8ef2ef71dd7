"""How many tokens each event brought, and the divisor of ITL. Pure numpy over the events of many requests at
once.

A server tells counts for the whole answer (`usage`) and sometimes as it goes (continuous usage, token ids).
Each told count closes a *segment* of events whose tokens are then known exactly; inside a segment they are
spread:

* every text event gets one token first, where there are enough, since an event with text came from at least
  one step;
* the rest goes by bytes of text, by largest remainder (the earlier event wins a tie), so that it sums
  exactly;
* fewer tokens than text events (a server that sends characters): all of it goes by bytes;
* tokens without any text event are given to the event that told of them, else to the one with the
  finish_reason.

With `usage` alone the answer is one segment, and the end token of a `stop`, which has no text of its own,
stands at the event with the finish_reason (METRICS section 3: n - 2).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Spread:
    """Tokens per event, and per request what METRICS section 3 needs; arrays are int64 or bool.

    events: tokens of each event, shape of the input. divisor: tokens after the first text event, < 1 = no
    ITL. first: tokens in the first text event, -1 without one. exact: the divisor is known, not estimated.
    """

    events: Ints
    divisor: Ints
    first: Ints
    exact: Bools


def spread(
    group: Ints,
    n_groups: int,
    is_text: Bools,
    text_bytes: Ints,
    told: Ints,
    is_finish: Bools,
    total: Ints,
    by_told: Bools,
    estimated: Bools,
    stopped: Bools,
) -> Spread:
    """Spread each request's tokens over its events.

    Per event, sorted by request and then arrival: group (0..n_groups-1), is_text, text_bytes, told
    (cumulative count told in this event, -1 unknown), is_finish. Per request: total (n, -1 unknown), by_told
    (told counts are to be used), estimated (n is only a count of events), stopped (finish_reason is `stop`).
    """
    n = np.maximum(total, 0)
    text_events = np.bincount(group, weights=is_text, minlength=n_groups).astype(np.int64)
    start = np.searchsorted(group, np.arange(n_groups))
    size = np.bincount(group, minlength=n_groups)
    last = start + size - 1  # of groups with events
    first_text, last_text = first_and_last(group, n_groups, is_text)

    end_token = ~by_told & ~estimated & stopped & (text_events == n - 1) & (text_events > 0)
    _, last_finish = first_and_last(group, n_groups, is_finish)
    ended_at = np.where(last_finish >= 0, last_finish, last)  # where the answer ended

    # Cumulative counts, made monotonic and bounded by n so that a server that miscounts cannot break the sum.
    use_told = (told >= 0) & by_told[group]
    cumulative = _running_max(np.where(use_told, np.minimum(told, n[group]), 0), group, start)
    closes = use_told.copy()
    opens = np.ones(len(group), np.bool_)
    opens[1:] = (group[1:] != group[:-1]) | closes[:-1]
    segment = np.cumsum(opens) - 1
    n_segments = int(segment[-1]) + 1 if len(group) else 0

    segment_start = np.flatnonzero(opens)
    segment_end = np.append(segment_start[1:], len(group)) - 1 if n_segments else segment_start
    of_group = group[segment_start]
    opens_group = segment_start == start[of_group]
    before = np.where(opens_group, 0, cumulative[np.maximum(segment_start - 1, 0)])
    until = np.where(closes[segment_end], cumulative[segment_end], n[of_group] - end_token[of_group])
    tokens = _spread_segments(
        segment, n_segments, segment_end, until - before, closes[segment_end], is_text, text_bytes
    )

    # What no text event brought (the end token, an answer without text) stands where the answer ended.
    given = np.bincount(group, weights=tokens, minlength=n_groups).astype(np.int64)
    left = np.where(size > 0, n - given, 0)
    tokens[ended_at[left > 0]] += left[left > 0]

    has_text = text_events > 0
    at_first, at_last = np.where(has_text, first_text, 0), np.where(has_text, last_text, 0)
    if len(group):
        told_divisor = cumulative[at_last] - cumulative[at_first]
        n_first = np.where(has_text, tokens[at_first], -1)
    else:
        told_divisor, n_first = np.zeros(n_groups, np.int64), np.full(n_groups, -1, np.int64)
    divisor = np.where(by_told, told_divisor, n - 1 - end_token)
    divisor = np.where(text_events > 1, divisor, 0)
    exact = by_told | (~estimated & ((text_events == n) | end_token))
    return Spread(tokens, divisor, n_first, exact)


def first_and_last(group: Ints, n_groups: int, wanted: Bools) -> tuple[Ints, Ints]:
    """Per group the index of its first and last wanted event; -1 where it has none. `group` is sorted."""
    first = np.full(n_groups, -1, np.int64)
    last = np.full(n_groups, -1, np.int64)
    at = np.flatnonzero(wanted)
    groups = group[at]
    if len(at):
        changes = np.flatnonzero(groups[1:] != groups[:-1])
        begins, ends = np.append(0, changes + 1), np.append(changes, len(at) - 1)
        first[groups[begins]] = at[begins]
        last[groups[ends]] = at[ends]
    return first, last


def _running_max(values: Ints, group: Ints, start: Ints) -> Ints:
    """The running maximum inside each group; counts are < 2**31, the high bits hold the group."""
    shift = group << 32
    return np.asarray(np.maximum.accumulate(values + shift) - shift, dtype=np.int64) if len(start) else values


def _spread_segments(
    segment: Ints,
    n_segments: int,
    segment_end: Ints,
    total: Ints,
    closed: Bools,
    is_text: Bools,
    text_bytes: Ints,
) -> Ints:
    """Tokens per event; each segment sums to its total, an open one without text gets none."""
    tokens = np.zeros(len(segment), np.int64)
    if not n_segments:
        return tokens
    at = np.flatnonzero(is_text)
    of = segment[at]
    texts = np.bincount(of, minlength=n_segments)
    silent = (texts == 0) & closed
    tokens[segment_end[silent]] = total[silent]

    base = (total >= texts).astype(np.int64)
    rest = total - base * texts
    weight = np.maximum(text_bytes[at], 0)
    weights = np.bincount(of, weights=weight, minlength=n_segments).astype(np.int64)
    weight = np.where(weights[of] > 0, weight, 1)
    weights = np.where(weights > 0, weights, np.maximum(texts, 1))
    share, remainder = np.divmod(rest[of] * weight, weights[of])
    over = rest - np.bincount(of, weights=share, minlength=n_segments).astype(np.int64)
    if (uneven := over[of] > 0).any():
        # Rank the remainders inside their segments, largest first; the first `over` of them get one more.
        some = np.flatnonzero(uneven)
        order = some[np.lexsort((some, -remainder[some], of[some]))]
        segments = of[order]
        begins = np.append(True, segments[1:] != segments[:-1])
        rank = np.arange(len(order)) - np.flatnonzero(begins)[np.cumsum(begins) - 1]
        share[order] += rank < over[segments]
    tokens[at] = base[of] + share
    return tokens
