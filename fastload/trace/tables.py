"""All columns of both tables for a batch of finished requests, computed for all of them at once.

METRICS sections 1 to 3 are here: the stamps from the events, the counts, the derived figures and when they
are null.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from fastload._timing import (
    CH_CONTENT,
    CH_DONE,
    CH_NONE,
    CH_ODD,
    CH_REASONING,
    CH_REFUSAL,
    CH_SENT,
    CH_TOOL,
    END_COMPLETE,
    FL_CHOICES,
    FL_CLAMPED,
    FL_COALESCED,
    FL_FINISH,
    FL_NAMED_ERROR,
    FL_READ,
    FL_USAGE,
    RF_DONE,
    RF_DUE_LATE,
    RF_FRAMING_BROKEN,
    RF_RETRIED,
    ROW_FIELDS,
)
from fastload.load import answer_head
from fastload.trace import answers, dialects, faults
from fastload.trace.schema import REQUESTS_COLUMNS, TOKENS_COLUMNS, requests_schema, tokens_schema
from fastload.trace.spread import Bools, Ints, Spread, first_and_last, spread

Blob = tuple[int, int, bytes]  # ordinal, kind, bytes

ROLES: Final = ("warmup", "measured", "fill")
STAMP_SOURCES: Final = ("read", "kernel")
# finish_reasons with which the model itself ended: it sampled an end token, which has no text.
_STOPPED: Final = frozenset({"stop", "end_turn", "completed", "eos", "eos_token"})
AT: Final = {name: i for i, name in enumerate(ROW_FIELDS)}  # column of a row record


@dataclass(frozen=True, slots=True)
class RowContext:
    """What every row of a level shares. `planned`: a request's prompt tokens as planned."""

    run_id: str
    target: str
    level: int
    max_tokens: int
    utc_offset_ns: int  # CLOCK_REALTIME - CLOCK_MONOTONIC
    planned: Callable[[int], int | None] = lambda request: None
    load_kind: str = "concurrency"
    worker: int = 0
    save_text: bool = False


@dataclass(frozen=True, slots=True)
class Batch:
    """Finished requests, in the order of their numbers.

    events_missing: events the measurer counted and we never got.
    """

    requests: pa.Table
    tokens: pa.Table
    events_missing: int


@dataclass(slots=True)
class _Events:
    """The events of finished requests without CH_SENT, sorted by request, then arrival; one length each."""

    group: Ints
    start: Ints  # per request
    size: Ints  # per request
    stamp: Ints
    delay: Ints
    bytes: Ints
    told: Ints  # cumulative completion tokens told in the event, -1 unknown
    token_ids: Ints  # tokens the event lists, -1 unknown
    logprobs: Ints
    channel: npt.NDArray[np.uint8]
    flags: npt.NDArray[np.uint8]


def build(
    context: RowContext,
    rows: Ints,
    group: Ints,
    columns: dict[str, npt.NDArray[np.generic]],
    blobs: list[list[Blob]],
) -> Batch:
    """All columns of both tables.

    rows: records of ROW_FIELDS, sorted by request. columns: their events as in EVENT_COLUMNS, sorted by
    `group`, the index of their row. blobs: the raw pieces of each row.
    """
    n = len(rows)
    marker = columns["channel"] == CH_SENT
    _, last_marker = first_and_last(group, n, marker)
    marked = np.where(last_marker >= 0, _at(columns["stamp_ns"].astype(np.int64), last_marker), -1)
    sent = np.where(rows[:, AT["sent_ns"]] >= 0, rows[:, AT["sent_ns"]], marked)
    events = _sorted_events(n, group[~marker], {name: column[~marker] for name, column in columns.items()})
    named: dict[int, set[int]] = {}
    for i in np.flatnonzero(events.flags & FL_NAMED_ERROR).tolist():
        of = int(events.group[i])
        named.setdefault(of, set()).add(i - int(events.start[of]))
    answer = [
        answers.read(pieces, named.get(i, ())) if pieces else answers.Answer() for i, pieces in enumerate(blobs)
    ]
    for i, one in enumerate(answer):
        if one.events:
            _apply(one, events, int(events.start[i]), int(events.size[i]))
    # Odd, and its payload was lost to a full arena: nothing is known of it.
    events.channel[events.channel == CH_ODD] = CH_NONE

    is_text = (events.channel >= CH_CONTENT) & (events.channel <= CH_REFUSAL)
    text_events = np.bincount(events.group[is_text], minlength=n)
    finish = _any(events.group, n, events.flags & FL_FINISH != 0)
    counts = _counts(events, n, is_text, text_events, answer)
    stopped = np.array([_finish_reason(one) in _STOPPED for one in answer], np.bool_)
    shares = spread(
        events.group,
        n,
        is_text,
        events.bytes,
        counts.told,
        events.flags & FL_FINISH != 0,
        counts.total,
        counts.by_told,
        counts.source == "events",
        stopped,
    )
    flags = np.where(_any(events.group, n, events.channel == CH_DONE), RF_DONE, 0) | rows[:, AT["row_flags"]]
    facts = (rows[:, AT["end"]], rows[:, AT["http_status"]], flags, events.size, text_events, finish)
    outcome = [
        answers.classify(one, *told)
        for one, *told in zip(answer, *(column.tolist() for column in facts), strict=True)
    ]
    for i in np.flatnonzero(rows[:, AT["role"]] < 0).tolist():  # its row never came
        outcome[i] = ("cancelled", "the run ended before this request did")
    table = _requests_table(context, rows, sent, flags, events, is_text, answer, outcome, counts, shares)
    tokens = _tokens_table(context, rows, sent, events, is_text, text_events, answer, shares)
    missing = np.maximum(rows[:, AT["events"]] - events.size, 0)
    return Batch(table, tokens, int(missing.sum()))


def _sorted_events(n: int, group: Ints, columns: dict[str, npt.NDArray[np.generic]]) -> _Events:
    unknown = np.full(len(group), -1, np.int64)
    return _Events(
        group=group,
        start=np.searchsorted(group, np.arange(n)),
        size=np.bincount(group, minlength=n),
        stamp=columns["stamp_ns"].astype(np.int64),
        delay=columns["delay_ns"].astype(np.int64),
        bytes=columns["bytes"].astype(np.int64),
        told=columns["tokens"].astype(np.int64),
        token_ids=unknown,
        logprobs=unknown.copy(),
        channel=columns["channel"].astype(np.uint8),
        flags=columns["flags"].astype(np.uint8),
    )


def _apply(answer: answers.Answer, events: _Events, start: int, size: int) -> None:
    """Write what the raw payloads say into the event columns; where the scan decided, that stands.

    The scan decides only about events of choice 0: one with choices whose payload was not kept is of that choice.
    """
    kept = np.zeros(size, np.bool_)
    kept[[ordinal for ordinal, _ in answer.events if 0 <= ordinal < size]] = True
    if answer.choices and (~kept & (events.flags[start : start + size] & FL_CHOICES != 0)).any():
        answer.choices.add(0)
    for ordinal, payload in answer.events:
        if not 0 <= ordinal < size:
            continue
        i = start + ordinal
        if events.channel[i] == CH_ODD:
            events.channel[i] = payload.channel
            events.bytes[i] = min(payload.bytes, 2**31 - 1)
            bits = (FL_CHOICES * payload.has_choices) | (FL_FINISH * bool(payload.finish))
            events.flags[i] |= bits | (FL_USAGE * (payload.usage is not None))
        if events.told[i] < 0 and payload.usage is not None and payload.usage.completion is not None:
            events.told[i] = payload.usage.completion
        if payload.token_ids is not None:
            events.token_ids[i] = payload.token_ids
        if payload.logprobs is not None:
            events.logprobs[i] = payload.logprobs


@dataclass(frozen=True, slots=True)
class _Counts:
    """Per request n (-1 unknown), its source, and whether counts told per event are used."""

    total: Ints
    source: npt.NDArray[np.str_]
    by_told: Bools
    told: Ints


def _counts(
    events: _Events, n: int, is_text: Bools, text_events: Ints, answer: list[answers.Answer]
) -> _Counts:
    """The best source of token counts for each request: METRICS section 2, in its order."""
    usage = np.array([_or_null(one.usage.completion if one.usage else None) for one in answer], np.int64)
    first_text, last_text = first_and_last(events.group, n, is_text)
    has_told = events.told >= 0
    _, last_told = first_and_last(events.group, n, has_told)
    usage = np.where(usage >= 0, usage, _at(events.told, last_told))
    several = np.array([len(one.choices) > 1 for one in answer], np.bool_)
    for i in np.flatnonzero(several).tolist():
        start, size = int(events.start[i]), int(events.size[i])
        summed = _told_by_choice(answer[i], events.told[start : start + size], events.flags[start : start + size])
        usage[i] = usage[i] if summed is None else summed
    # A count in the only text event may be the final one of a short answer: continuous needs two.
    continuous = (_at(events.told, first_text) >= 0) & (_at(events.told, last_text) >= 0)
    # With several choices each event tells of its own.
    continuous &= (np.bincount(events.group[has_told], minlength=n) > 1) & ~several

    told = events.told.copy()
    source = np.select([continuous, usage >= 0, text_events > 0], ["continuous_usage", "usage", "events"], "")
    source = source.astype("<U16")
    by_told = continuous.copy()
    total = np.where(usage >= 0, usage, np.where(text_events > 0, text_events, -1))
    for name, listed in (("token_ids", events.token_ids), ("logprobs", events.logprobs)):
        known = (listed > 0) & is_text
        if not known.any():
            continue
        per_event = np.maximum(listed, 0)
        listed_total = np.bincount(events.group, weights=per_event, minlength=n).astype(np.int64)
        use = (np.bincount(events.group[known], minlength=n) == text_events) & (text_events > 0) & ~by_told
        use &= (usage < 0) | (listed_total <= usage)  # more than n: an echoed prompt is listed too
        running = np.cumsum(per_event)
        before = np.where(events.size > 0, _at(running - per_event, events.start), 0)
        in_use = use[events.group]
        told = np.where(in_use, np.where(listed >= 0, running - before[events.group], -1), told)
        total = np.where(use & (usage < 0), listed_total, total)
        source[use] = name
        by_told |= use
    return _Counts(total, source, by_told, told)


def _told_by_choice(answer: answers.Answer, told: Ints, flags: npt.NDArray[np.uint8]) -> int | None:
    """n of an answer of several choices, where each count told is of one choice only; None where they are not so.

    llama.cpp ends each choice with its usage, behind it (with empty choices) or in it; vLLM tells the sum at the end.
    """
    payloads = dict(answer.events)
    closing: list[int] = []  # told with empty choices, and behind something of a choice
    of_choice: dict[int, int] = {}
    behind_choice = False
    for ordinal in np.flatnonzero((flags & FL_CHOICES != 0) | (told >= 0)).tolist():
        count = int(told[ordinal])
        if flags[ordinal] & FL_CHOICES:
            behind_choice = True
            choices = payloads[ordinal].choices if ordinal in payloads else (0,)
            if count >= 0 and len(choices) == 1:
                of_choice[choices[0]] = count
        elif behind_choice:
            behind_choice = False
            closing.append(count)
    if len(closing) == len(answer.choices):
        return sum(closing)
    if not closing and of_choice.keys() >= answer.choices:
        return sum(of_choice.values())
    return None


def _done(answer: list[answers.Answer], events: _Events, rows: Ints, flags: Ints, ok: Bools) -> Ints:
    """done_ns: the measurer's, which knows [DONE] and the end of the framing.

    Where a success had neither, it is the end marker of its dialect, or else what came last of it.
    """
    done = rows[:, AT["done_ns"]].copy()
    broken_off = rows[:, AT["end"]] != END_COMPLETE
    for i in np.flatnonzero(ok & (flags & RF_DONE == 0) & (events.size > 0)).tolist():
        ended = answer[i].ended
        if ended is not None or broken_off[i]:
            last = int(events.size[i]) - 1
            done[i] = events.stamp[events.start[i] + (last if ended is None else min(ended, last))]
    return done


def _requests_table(
    context: RowContext,
    rows: Ints,
    sent: Ints,
    flags: Ints,
    events: _Events,
    is_text: Bools,
    answer: list[answers.Answer],
    outcome: list[tuple[str, str | None]],
    counts: _Counts,
    shares: Spread,
) -> pa.Table:
    n = len(rows)
    row = {name: rows[:, i] for name, i in AT.items()}
    ok = np.array([status == answers.OK for status, _ in outcome], np.bool_)
    group = events.group
    first_event, _ = first_and_last(group, n, events.flags & FL_CHOICES != 0)
    first_text, last_text = first_and_last(group, n, is_text)
    first_content, _ = first_and_last(group, n, events.channel == CH_CONTENT)
    first_token, last_token = _at(events.stamp, first_text), _at(events.stamp, last_text)
    first_answer = _at(events.stamp, first_content)
    delay_p50, delay_max = _delays(events, n)
    unknown_row = row["stamp_source"] < 0  # given up: what its events say
    by_read = _any(group, n, events.flags & FL_READ != 0)
    source = np.where(unknown_row & (events.size > 0), np.where(by_read, 0, 1), row["stamp_source"])
    due, total = row["due_ns"], counts.total
    done = _done(answer, events, rows, flags, ok)
    span = last_token - first_token
    has_itl = (shares.divisor >= 1) & (span > 0)  # all text in one read: no interval was seen, so no ITL
    latency = _between(done, sent, ok) / 1e9
    usage = [one.usage or dialects.Usage() for one in answer]
    heads = [
        one.head if status != answers.OK or one.answer_id is None else {}
        for one, (status, _) in zip(answer, outcome, strict=True)
    ]

    def count(bit: int, name: str) -> Ints:
        seen = np.bincount(group[events.flags & bit != 0], minlength=n)
        return np.where(row[name] >= 0, row[name], seen)

    values: dict[str, object] = {
        "run_id": [context.run_id] * n,
        "target": [context.target] * n,
        "level": np.full(n, context.level),
        "load_kind": [context.load_kind] * n,
        "worker": np.full(n, context.worker),
        "role": _names(ROLES, row["role"]),
        "sent_ns": sent,
        "first_event_ns": _at(events.stamp, first_event),
        "first_token_ns": first_token,
        "first_answer_ns": first_answer,
        "last_token_ns": last_token,
        "done_ns": done,
        "sent_utc": pa.array((sent + context.utc_offset_ns) // 1000, mask=sent < 0),
        "status": [status for status, _ in outcome],
        "errno": np.where(row["errno"] > 0, row["errno"], -1),
        "error": [error for _, error in outcome],
        "retry_after_s": [
            answer_head.read_retry_after_s(head, (head_ns + context.utc_offset_ns) / 1e9) if head else None
            for head, head_ns in zip(heads, row["head_ns"].tolist(), strict=True)
        ],
        "finish_reason": [_finish_reason(one) for one in answer],
        "max_tokens": np.full(n, context.max_tokens),
        "prompt_tokens_planned": [context.planned(int(request)) for request in row["request"]],
        "prompt_tokens": [one.prompt for one in usage],
        "completion_tokens": total,
        "reasoning_tokens": [one.reasoning for one in usage],
        "cached_tokens": [one.cached for one in usage],
        "token_source": [name or None for name in counts.source.tolist()],
        "itl_estimated": pa.array(~shares.exact, mask=shares.divisor < 1),
        "events": events.size,
        "text_events": np.bincount(group[is_text], minlength=n),
        "n_first": shares.first,
        "stamp_source": _names(STAMP_SOURCES, source),
        "coalesced": count(FL_COALESCED, "coalesced"),
        "clamped": count(FL_CLAMPED, "clamped"),
        "client_delay_p50_us": _floats(delay_p50 / 1e3),
        "client_delay_max_us": _floats(delay_max / 1e3),
        "conn_reused": pa.array(row["conn_reused"] > 0, mask=row["conn_reused"] < 0),
        "framing_broken": ok & ((row["row_flags"] & RF_FRAMING_BROKEN != 0) | (row["end"] != END_COMPLETE)),
        "retried": flags & RF_RETRIED != 0,
        "due_late": flags & RF_DUE_LATE != 0,
        "server_request_id": [
            one.answer_id or faults.cut(head.get("x-request-id", "")) or None
            for one, head in zip(answer, heads, strict=True)
        ],
        "ttft_ms": _floats(_between(first_token, sent, ok) / 1e6),
        "response_ttft_ms": _floats(_between(first_token, due, ok) / 1e6),
        "ttfa_ms": _floats(_between(first_answer, sent, ok) / 1e6),
        "itl_ms": _floats(np.where(ok & has_itl, span / 1e6 / np.maximum(shares.divisor, 1), np.nan)),
        "latency_s": _floats(latency),
        "response_latency_s": _floats(_between(done, due, ok) / 1e9),
        "tps": _floats(
            np.where((total >= 0) & (latency > 0), total / np.where(latency > 0, latency, 1), np.nan)
        ),
    }
    arrays = [_column(values.get(name, row.get(name)), kind, n) for name, kind, _, _ in REQUESTS_COLUMNS]
    return pa.Table.from_arrays(arrays, schema=requests_schema(_metadata(context)))


def _tokens_table(
    context: RowContext,
    rows: Ints,
    sent: Ints,
    events: _Events,
    is_text: Bools,
    text_events: Ints,
    answer: list[answers.Answer],
    shares: Spread,
) -> pa.Table:
    # Without a sent_ns (its marker was lost with a block) the offsets are from the request's first event.
    origin = np.where(sent >= 0, sent, _at(events.stamp, np.where(events.size > 0, events.start, -1)))
    offsets = pa.array(np.append(events.start, len(events.group)), pa.int32())
    lists = {
        "event_ns": events.stamp - origin[events.group],
        "tokens": shares.events,
        "bytes": np.where(is_text, events.bytes, 0),
        "channel": events.channel,
        "flags": events.flags,
    }
    texts = [
        _texts(one, int(texts), context.save_text) for one, texts in zip(answer, text_events, strict=True)
    ]
    values: dict[str, object] = {
        "request": rows[:, AT["request"]],
        "text": [text for text, _, _ in texts],
        "reasoning_text": [text for _, text, _ in texts],
        "tool_text": [text for _, _, text in texts],
    }
    arrays = [
        pa.ListArray.from_arrays(offsets, pa.array(lists[name], kind.value_type), type=kind)
        if name in lists
        else _column(values[name], kind, len(rows))
        for name, kind, _, _ in TOKENS_COLUMNS
    ]
    return pa.Table.from_arrays(arrays, schema=tokens_schema(_metadata(context)))


def _texts(
    answer: answers.Answer, text_events: int, save_text: bool
) -> tuple[str | None, str | None, str | None]:
    """Answer, reasoning and tool text; all None unless asked for and every text event was kept raw."""
    payloads = [payload for _, payload in answer.events if payload.text]
    if not save_text or len(payloads) < text_events:
        return None, None, None

    def joined(*channels: int) -> str | None:
        pieces = [payload.text[c] for payload in payloads for c in channels if c in payload.text]
        return faults.clean("".join(pieces)) if pieces else None

    return joined(CH_CONTENT, CH_REFUSAL), joined(CH_REASONING), joined(CH_TOOL)


def _delays(events: _Events, n: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Median (nearest rank) and maximum of the client's delay per request, ns; NaN without one."""
    known = events.delay >= 0
    group, delay = events.group[known], events.delay[known]
    size = np.bincount(group, minlength=n)
    p50, most = np.full(n, np.nan), np.full(n, np.nan)
    if len(group):
        delay = delay[np.lexsort((delay, group))]
        start = np.searchsorted(group, np.arange(n))
        has = size > 0
        p50[has] = delay[(start + (size - 1) // 2)[has]]
        most[has] = delay[(start + size - 1)[has]]
    return p50, most


def _metadata(context: RowContext) -> dict[str, str]:
    return {"run_id": context.run_id, "utc_offset_ns": str(context.utc_offset_ns)}


def _finish_reason(answer: answers.Answer) -> str | None:
    return answer.finish[min(answer.finish)] if answer.finish else None


def _column(value: object, kind: pa.DataType, n: int) -> pa.Array:
    """A column of n values: an int array with -1 = null, a list, an Arrow array; None is all null."""
    if value is None:
        return pa.nulls(n, kind)
    if isinstance(value, np.ndarray) and value.dtype.kind == "i":
        return pa.array(value, mask=value < 0).cast(kind)
    if isinstance(value, pa.Array):
        return value.cast(kind)
    return pa.array(value, kind)


def _at(values: Ints, index: Ints) -> Ints:
    """values[index], -1 where index is -1."""
    if not len(values):
        return np.full(len(index), -1, np.int64)
    return np.where(index >= 0, values[np.maximum(index, 0)], -1)


def _any(group: Ints, n: int, wanted: Bools) -> Bools:
    return np.bincount(group[wanted], minlength=n) > 0


def _between(end: Ints, begin: Ints, ok: Bools) -> npt.NDArray[np.float64]:
    """end - begin in ns, subtracted as integers; NaN where one is null or the row is no success."""
    return np.where(ok & (end >= 0) & (begin >= 0), (end - begin).astype(np.float64), np.nan)


def _floats(values: npt.NDArray[np.float64]) -> pa.Array:
    return pa.array(values, mask=np.isnan(values))


def _names(names: tuple[str, ...], index: Ints) -> list[str | None]:
    return [names[i] if 0 <= i < len(names) else None for i in index.tolist()]


def _or_null(value: int | None) -> int:
    return -1 if value is None else value
