"""What the client adds: what it reported of a level, joined token by token with the server's own log.

Pure: tables and arrays in, figures out. The log is the ground-truth server's (`sim/_emit.pyx`): the time just before
each send, the kernel's stamp of each request's last byte, the end of each answer. The answer's id carries the log's
request number, so nothing is guessed in the join: event k of an answer is token k of that request.

Two clients are judged from one run: the one with kernel stamps, as fastload reports it, and the one with read stamps
(stamp + the client's own delay), as it would have reported without them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from fastload import _timing
from fastload.analysis import rows
from fastload.analysis.percentiles import upper
from fastload.analysis.rows import Bools, Floats, Ints

# the ground-truth server's log; sim/_emit.pyx writes it, and a test keeps the two alike
RECORD = np.dtype([("ns", "<i8"), ("request", "<u4"), ("token", "<u4")])
RECEIVED = 0xFFFFFFFF
ENDED = 0xFFFFFFFE

ERROR_LIMIT = 0.01  # of TTFT and of ITL
COALESCED_LIMIT = 0.01  # of tokens
IN_FLIGHT_LIMIT = 0.01  # of the level
CPU_LIMIT = 0.80  # of one core
WAIT_LIMIT = 0.01  # of an ITL, mean of the wake-ups
# Of the client's core, used by others. A sleeper mostly gets its core at once even so, and the mean wait hides the
# rest: now and then it waits a scheduler's slice, milliseconds, and by luck no token of the run may show it.
OTHERS_LIMIT = 0.10

CLOSE = 2.0  # a figure within this factor of its limit may fall on the other side next time
REPEATS = 2

BACKWARDS_NS = 1_000_000  # a stamp this much before its send belongs to another token, whatever the clocks say

SOURCES = ("kernel", "read")
Figures: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Arrivals:
    """The text events of a level, grouped by request and within one in order of arrival; columns of equal length.

    `stamp_ns` is what fastload reports, `read_ns` when the read returned; `at` is the event's place in its answer.
    """

    request: Ints
    at: Ints
    stamp_ns: Ints
    read_ns: Ints
    coalesced: Bools


@dataclass(frozen=True, slots=True)
class Spent:
    """What a level cost: CPU of both client processes, and how long the measurer waited for its core."""

    measurer_cpu_ns: int
    supervisor_cpu_ns: int
    wall_ns: int
    events: int  # all SSE events, with role, usage and [DONE]
    wait_ns: int | None = None  # runnable, but not running; None where the kernel does not tell
    wakes: int = 0  # times it was given the core
    others_share: float | None = None  # of the measurer's core, used by others or stolen by the host of a VM


def arrivals(blocks: Sequence[_timing.Block]) -> Arrivals:
    """Return the text events in the measurer's blocks of one level."""
    columns = {
        name: np.concatenate([np.frombuffer(block.events[name], kind) for block in blocks] or [np.empty(0, kind)])
        for name, kind in _timing.EVENT_COLUMNS
    }
    text = np.flatnonzero((columns["channel"] >= _timing.CH_CONTENT) & (columns["channel"] < _timing.CH_ODD))
    text = text[np.argsort(columns["request"][text], kind="stable")]
    request = columns["request"][text].astype(np.int64)
    stamp = columns["stamp_ns"][text].astype(np.int64)
    delay = columns["delay_ns"][text].astype(np.int64)
    return Arrivals(
        request=request,
        at=_place_in_group(request),
        stamp_ns=stamp,
        read_ns=stamp + np.maximum(delay, 0),
        coalesced=(columns["flags"][text] & _timing.FL_COALESCED) != 0,
    )


def level_figures(
    requests: pa.Table, found: Arrivals, log: np.ndarray[Any, Any], concurrency: int, stamps: str, spent: Spent
) -> Figures:
    """Return the figures of one level: JSON values, unit in the name, None where a figure does not exist.

    `requests` are the level's rows of the trace (all roles), `log` its records in the order written (RECORD), `stamps`
    the source in use, "kernel" or "read". TTFT and ITL are over the successful measured rows, stamps over all tokens.
    """
    joined = _join(requests, found, log)
    ids = rows.ints(requests, "request")
    measured = rows.equals(requests, "role", "measured") & rows.equals(requests, "status", "ok")
    tokens = log[log["token"] < ENDED]
    received = _by_serial(log[log["token"] == RECEIVED])
    ended = _by_serial(log[log["token"] == ENDED])
    last_done = rows.ints(requests, "done_ns")[measured]

    # per request: true and reported times of its first and last token
    pair = joined.matched
    owner = np.searchsorted(ids, found.request[pair]) if pair.any() else np.empty(0, np.int64)
    first = found.at[pair] == 0
    last = found.at[pair] == joined.tokens_of[pair] - 1
    truth = _ends_of(len(ids), owner, first, last, joined.send_ns[pair])
    asked = np.full(len(ids), -1, np.int64)
    known = (joined.serial >= 0) & (joined.serial < len(received))
    asked[known] = received[joined.serial[known]]
    whole = measured & (truth[0] >= 0) & (truth[1] >= 0) & (asked >= 0)
    gaps = np.maximum(_counts(ids, found.request) - 1, 1)
    true_ttft, true_itl = (truth[0] - asked)[whole] / 1e3, ((truth[1] - truth[0]) / gaps)[whole] / 1e3

    reads = _ends_of(len(ids), owner, first, last, found.read_ns[pair])
    sent = rows.ints(requests, "sent_ns")
    reported = {
        stamps: (rows.floats(requests, "ttft_ms")[whole] * 1e3, rows.floats(requests, "itl_ms")[whole] * 1e3),
    }
    reported.setdefault("read", ((reads[0] - sent)[whole] / 1e3, ((reads[1] - reads[0]) / gaps)[whole] / 1e3))
    errors = {stamps: found.stamp_ns[pair] - joined.send_ns[pair]}
    errors.setdefault("read", found.read_ns[pair] - joined.send_ns[pair])

    inside = pair & (found.at != joined.tokens_of - 1)
    window = _window(received, concurrency, last_done)
    in_flight = _in_flight(received, ended, window)
    sends = tokens["ns"]
    return {
        "concurrency": concurrency,
        "requests": len(ids),
        "measured": int(measured.sum()),
        "failed": int((~rows.equals(requests, "status", "ok")).sum()),
        "tokens": len(tokens),
        "unmatched": int((~pair).sum()) + len(tokens) - int(pair.sum()),
        "events_per_s": _rate(sends, window),
        "true_ttft_ms": {"mean": _milli(rows.mean(true_ttft)), "p90": _milli(_p(true_ttft, 90))},
        "true_itl_ms": _milli(rows.mean(true_itl)),
        **{
            name: _source(np.abs(errors[name]) / 1e3, reported[name], (true_ttft, true_itl)) if name in errors else None
            for name in SOURCES
        },
        "stamp_source": stamps,
        "coalesced_share": float(found.coalesced[inside].mean()) if inside.any() else None,
        "coalesced_with_end_share": float(found.coalesced[pair].mean()) if pair.any() else None,
        "in_flight": in_flight,
        "in_flight_off": None if in_flight is None else in_flight / concurrency - 1,
        "cpu_us_per_event": {
            "measurer": spent.measurer_cpu_ns / 1e3 / spent.events if spent.events else None,
            "tree": (spent.measurer_cpu_ns + spent.supervisor_cpu_ns) / 1e3 / spent.events if spent.events else None,
        },
        "cpu_share": spent.measurer_cpu_ns / spent.wall_ns if spent.wall_ns else None,
        "others_share": spent.others_share,
        "wait_us_per_wake": spent.wait_ns / 1e3 / spent.wakes if spent.wait_ns is not None and spent.wakes else None,
    }


def _source(errors_us: Floats, reported: tuple[Floats, Floats], true: tuple[Floats, Floats]) -> Figures:
    """Return how far one kind of stamp is from the truth; all arrays in us."""
    ttft_mean, ttft_p90 = rows.mean(true[0]), _p(true[0], 90)
    off_mean, off_p90 = rows.mean(reported[0] - true[0]), None
    if ttft_p90 is not None:
        off_p90 = (_p(reported[0], 90) or 0.0) - ttft_p90
    itl_off, itl_mean = np.abs(reported[1] - true[1]), rows.mean(true[1])
    return {
        "stamp_us": {"p50": _p(errors_us, 50), "p99": _p(errors_us, 99), "max": _p(errors_us, 100)},
        "ttft_error_us": {"mean": off_mean, "p90": off_p90},
        "ttft_error_share": {"mean": _share(off_mean, ttft_mean), "p90": _share(off_p90, ttft_p90)},
        "itl_error_us": {"mean": rows.mean(itl_off), "p90": _p(itl_off, 90)},
        "itl_error_share": {"mean": _share(rows.mean(itl_off), itl_mean), "p90": _share(_p(itl_off, 90), itl_mean)},
    }


# --- the verdict ------------------------------------------------------------------------------------------------------


def judge(levels: Sequence[Figures]) -> Figures:
    """Return, per kind of stamp, up to where the client is negligible, and why not beyond.

    {"kernel": {"concurrency": 256 | None, "events_per_s": ..., "reasons": [sentences]} | None, "read": {...}}: the
    highest level that passes with every lower one. None in place of an entry: no such stamp on this host.
    """
    ordered = sorted(levels, key=lambda level: int(level["concurrency"]))
    return {name: _judged(name, ordered) for name in SOURCES}


def _judged(name: str, ordered: Sequence[Figures]) -> Figures | None:
    if not any(level[name] for level in ordered):
        return None
    passed: Figures | None = None
    sentences: list[str] = []
    for level in ordered:
        why = shortcomings(level, name)
        if not why and not sentences:
            passed = level
        sentences += [f"c={level['concurrency']}: {text}" for text in why]
    return {
        "concurrency": passed["concurrency"] if passed else None,
        "events_per_s": passed["events_per_s"] if passed else None,
        "reasons": sentences,
    }


def shortcomings(level: Figures, name: str) -> list[str]:
    """Return why the client is not negligible at a level with this kind of stamp; empty if it is."""
    own = level[name]
    if own is None:
        return [f"no {name} stamps"]
    found: list[str] = []
    if level["unmatched"]:
        found.append(f"{level['unmatched']} tokens of the log and the client have no counterpart")
    if level["failed"]:
        found.append(f"{level['failed']} requests failed")
    for title, key in (("TTFT", "ttft_error_share"), ("ITL", "itl_error_share")):
        for figure in ("mean", "p90"):
            share = own[key][figure]
            if share is None or abs(share) >= ERROR_LIMIT:
                found.append(f"{title} error ({_TITLES[figure]}) {_percent(share)} of the truth")
                break
    for key, limit, text in (
        ("coalesced_share", COALESCED_LIMIT, "of the tokens were read together with a later one"),
        ("in_flight_off", IN_FLIGHT_LIMIT, "off the load asked for, counted at the server"),
        ("cpu_share", CPU_LIMIT, "of a core used by the measuring process"),
    ):
        share = level[key]
        if share is None or abs(share) >= limit:
            found.append(f"{_percent(share)} {text}")
    others = level["others_share"]
    if others is not None and others >= OTHERS_LIMIT:
        found.append(f"something else used {_percent(others)} of the client's core")
    wait, itl_ms = level["wait_us_per_wake"], level["true_itl_ms"]
    if wait is not None and itl_ms and wait / 1e3 / itl_ms >= WAIT_LIMIT:
        found.append(
            f"waited {wait:.0f} us for its core at each wake-up, {_percent(wait / 1e3 / itl_ms)} of an ITL"
        )
    return found


_TITLES = {"mean": "mean", "p90": "P90"}


def undecided(levels: Sequence[Figures]) -> list[int]:
    """Return the levels (concurrency) to be measured again before a verdict: where it turns, if it turns narrowly.

    Per kind of stamp these are the highest level that passes and the one above it, each only if one of its figures is
    near a limit.
    """
    ordered = sorted(levels, key=lambda level: int(level["concurrency"]))
    found: set[int] = set()
    for name in SOURCES:
        passed = 0
        while passed < len(ordered) and not shortcomings(ordered[passed], name):
            passed += 1
        if passed < len(ordered):
            turn = ordered[max(0, passed - 1) : passed + 1]
            found |= {int(level["concurrency"]) for level in turn if _is_close(level, name)}
    return sorted(found)


def _is_close(level: Figures, name: str) -> bool:
    own = level[name]
    if own is None or (level["others_share"] or 0.0) >= OTHERS_LIMIT:
        return False  # a core that is not the client's own decides it, not a narrow figure
    shares = [own[key][figure] for key in ("ttft_error_share", "itl_error_share") for figure in ("mean", "p90")]
    pairs = [(share, ERROR_LIMIT) for share in shares]
    pairs += [(level["coalesced_share"], COALESCED_LIMIT), (level["in_flight_off"], IN_FLIGHT_LIMIT)]
    return any(share is not None and limit / CLOSE < abs(share) < limit * CLOSE for share, limit in pairs)


def median(same: Sequence[Figures]) -> Figures:
    """Return one level measured several times as one: each figure's median, of faults the most."""
    merged: Figures = {}
    for key, value in same[0].items():
        each = [one[key] for one in same if one[key] is not None]
        if isinstance(value, Mapping):
            merged[key] = median(each)
        elif key in ("unmatched", "failed"):
            merged[key] = max(each)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            merged[key] = type(value)(np.median(each))
        else:
            merged[key] = value
    return merged


def stamps_hold(level: Figures) -> bool:
    """Say whether the P99 of the stamp in use is off by less than 1 % of an ITL, all tokens joined."""
    own, itl_ms = level[level["stamp_source"]], level["true_itl_ms"]
    p99 = own["stamp_us"]["p99"] if own else None
    return bool(p99 is not None and itl_ms and not level["unmatched"] and p99 / 1e3 < ERROR_LIMIT * itl_ms)


# --- the self-test ----------------------------------------------------------------------------------------------------


def differences(
    requests: pa.Table, found: Arrivals, log: np.ndarray[Any, Any], osl: int, body_bytes: Mapping[int, int]
) -> list[str]:
    """Return each difference between what the server did and what the client says, as a sentence; none is right.

    `osl`: tokens asked of each answer. `body_bytes`: by request, the length of its body, which this server's usage
    gives as prompt_tokens.
    """
    return [
        *_of_the_log(log, osl),
        *_of_the_rows(requests, log, osl, body_bytes),
        *_of_the_tokens(requests, found, log),
    ]


def _of_the_log(log: np.ndarray[Any, Any], osl: int) -> Iterator[str]:
    """Each request of the log: received, tokens 0 .. osl - 1 once each and in order, ended."""
    order = np.argsort(log["request"], kind="stable")
    numbers, starts = np.unique(log["request"][order], return_index=True)
    for serial, part in zip(numbers.tolist(), np.split(log[order], starts[1:]), strict=True):
        kinds = part["token"].tolist()
        tokens = [kind for kind in kinds if kind < ENDED]
        name = f"log, request {serial}"
        missing = sorted(set(range(osl)) - set(tokens))
        if missing:
            yield f"{name}: token {_some(missing)} missing"
        if doubled := _doubled(tokens):
            yield f"{name}: token {_some(doubled)} more than once"
        if beyond := sorted(one for one in set(tokens) if one >= osl):
            yield f"{name}: token {_some(beyond)} beyond the {osl} asked for"
        if sorted(tokens) != tokens or (np.diff(part["ns"]) < 0).any():
            yield f"{name}: records out of order"
        if kinds.count(RECEIVED) != 1 or kinds[0] != RECEIVED:
            yield f"{name}: does not begin with the one record of its arrival"
        if kinds.count(ENDED) != 1 or kinds[-1] != ENDED:
            yield f"{name}: does not close with the one record of its end"


def _of_the_rows(
    requests: pa.Table, log: np.ndarray[Any, Any], osl: int, body_bytes: Mapping[int, int]
) -> Iterator[str]:
    """Each row: successful, its counts those of the server; each request of the log has one row."""
    serials = _serials(requests)
    logged = set(np.unique(log["request"]).tolist())
    told = [int(one) for one in serials if one >= 0]
    if doubled := _doubled(told):
        yield f"rows: answers {_some(doubled)} in more than one row"
    if doubled := _doubled(requests["request"].to_pylist()):
        yield f"rows: requests {_some(doubled)} in more than one row"
    if lost := sorted(logged - set(told)):
        yield f"rows: requests {_some(lost)} of the log have no row"
    names = ("request", "status", "error", "text_events", "completion_tokens", "prompt_tokens", "finish_reason")
    for serial, row in zip(serials.tolist(), requests.select(list(names)).to_pylist(), strict=True):
        name = f"request {row['request']}"
        if row["status"] != "ok":
            yield f"{name}: {row['status']} ({row['error']})"
            continue
        if serial not in logged:
            yield f"{name}: its answer is not in the log"
        for column, right in (
            ("text_events", osl),
            ("completion_tokens", osl),
            ("prompt_tokens", body_bytes.get(row["request"])),
            ("finish_reason", "length"),
        ):
            if row[column] != right:
                yield f"{name}: {column} is {row[column]}, the server's {right}"


def _of_the_tokens(requests: pa.Table, found: Arrivals, log: np.ndarray[Any, Any]) -> Iterator[str]:
    """Each token of the log was received once, in order and not before it was sent; the trace has the same stamps."""
    joined = _join(requests, found, log)
    tokens = int((log["token"] < ENDED).sum())
    for count, text in (
        (int((~joined.matched).sum()), "tokens were received that are not in the log"),
        (tokens - int(joined.matched.sum()), "tokens of the log were not received exactly once"),
    ):
        if count > 0:
            yield f"tokens: {count} {text}"
    early = joined.matched & (found.stamp_ns - joined.send_ns < -BACKWARDS_NS)
    if early.any():
        yield f"tokens: {int(early.sum())} are stamped before they were sent"
    same = found.request[1:] == found.request[:-1]
    backwards = same & (np.diff(found.stamp_ns) < 0)
    if backwards.any():
        yield f"tokens: the stamps of {len(np.unique(found.request[1:][backwards]))} requests run backwards"
    ids = rows.ints(requests, "request")
    for column, pick in (("first_token_ns", 0), ("last_token_ns", 1)):
        ends = _ends_of(
            len(ids),
            np.minimum(np.searchsorted(ids, found.request), max(len(ids) - 1, 0)),
            found.at == 0,
            np.append(~same, True)[: len(found.request)],
            found.stamp_ns,
        )[pick]
        wrong = (ends != rows.ints(requests, column)) & rows.equals(requests, "status", "ok")
        if wrong.any():
            yield f"trace: {column} of {int(wrong.sum())} requests is not the stamp that was taken"


# --- the join ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Joined:
    """`serial` per row of `requests` (-1: none); the rest per arrival: `send_ns` stands only where `matched`."""

    serial: Ints
    matched: Bools
    send_ns: Ints
    tokens_of: Ints  # tokens the log has of its request


def _join(requests: pa.Table, found: Arrivals, log: np.ndarray[Any, Any]) -> _Joined:
    """Find each arrival's record in the log: by the answer's id, and its place in the answer.

    `requests` come in the order of their number.
    """
    ids, serials = rows.ints(requests, "request"), _serials(requests)
    at = np.minimum(np.searchsorted(ids, found.request), max(len(ids) - 1, 0))
    own = np.where(ids[at] == found.request, serials[at], -1) if len(ids) else np.full(len(found.request), -1)
    tokens = log[log["token"] < ENDED]
    keys = tokens["request"].astype(np.int64) << 32 | tokens["token"]
    order = np.argsort(keys, kind="stable")
    wanted = own << 32 | found.at
    place = np.minimum(np.searchsorted(keys[order], wanted), max(len(keys) - 1, 0))
    matched = (keys[order][place] == wanted) & (own >= 0) if len(keys) else np.zeros(len(wanted), np.bool_)
    send = tokens["ns"][order][place] if len(keys) else np.zeros(len(wanted), np.int64)
    count = np.bincount(tokens["request"].astype(np.int64)) if len(tokens) else np.zeros(1, np.int64)
    tokens_of = np.where((own >= 0) & (own < len(count)), count[np.clip(own, 0, len(count) - 1)], 0)
    return _Joined(serials, matched, np.where(matched, send, -1), tokens_of)


def _serials(requests: pa.Table) -> Ints:
    """Return the log's number of each row's request, from the answer's id (`truth-00000012`); -1 without one."""
    told = requests.column("server_request_id").to_pylist()
    tails = [str(one).removeprefix("truth-") if one is not None else "" for one in told]
    return np.array([int(tail) if tail.isdigit() else -1 for tail in tails], np.int64)


def _by_serial(records: np.ndarray[Any, Any]) -> Ints:
    """Return the time of each request's record, indexed by its number in the log; -1 where there is none."""
    times = np.full(int(records["request"].max()) + 1 if len(records) else 0, -1, np.int64)
    times[records["request"]] = records["ns"]
    return times


def _ends_of(count: int, owner: Ints, first: Bools, last: Bools, times: Ints) -> tuple[Ints, Ints]:
    """Return per row the time at its first and at its last event; -1 where it has none."""
    ends = (np.full(count, -1, np.int64), np.full(count, -1, np.int64))
    ends[0][owner[first]] = times[first]
    ends[1][owner[last]] = times[last]
    return ends


def _counts(ids: Ints, requests: Ints) -> Ints:
    """Return how many of `requests` (sorted) are each of `ids`."""
    return np.searchsorted(requests, ids, "right") - np.searchsorted(requests, ids, "left")


def _place_in_group(sorted_values: Ints) -> Ints:
    """Return 0, 1, 2 .. within each run of equal values."""
    starts = np.flatnonzero(np.append(True, sorted_values[1:] != sorted_values[:-1])[: len(sorted_values)])
    lengths = np.diff(np.append(starts, len(sorted_values)))
    return np.arange(len(sorted_values), dtype=np.int64) - np.repeat(starts, lengths)


def _window(received: Ints, concurrency: int, measured_done: Ints) -> tuple[int, int] | None:
    """Return from when all slots' requests had come to the server, to the end of the last measured one (ns)."""
    times = np.sort(received[received >= 0])
    if len(times) < concurrency or not len(measured_done):
        return None
    start, end = int(times[concurrency - 1]), int(measured_done.max())
    return (start, end) if end > start else None


def _in_flight(received: Ints, ended: Ints, window: tuple[int, int] | None) -> float | None:
    """Return the time-weighted mean of requests that the server had, over the window."""
    both = min(len(received), len(ended))
    known = (received[:both] >= 0) & (ended[:both] >= 0)
    if window is None or not known.any():
        return None
    inside = np.minimum(ended[:both][known], window[1]) - np.maximum(received[:both][known], window[0])
    return float(np.maximum(inside, 0).sum()) / (window[1] - window[0])


def _rate(times: Ints, window: tuple[int, int] | None) -> float | None:
    """Return the sends a second inside the window."""
    if window is None:
        return None
    return float(((times >= window[0]) & (times < window[1])).sum()) / (window[1] - window[0]) * 1e9


def _p(values: Floats, percent: int) -> float | None:
    return upper(np.sort(rows.present(values)), percent)


def _share(off: float | None, whole: float | None) -> float | None:
    return None if off is None or not whole else off / whole


def _milli(us: float | None) -> float | None:
    return None if us is None else us / 1e3


def _percent(share: float | None) -> str:
    return "an unknown share" if share is None else f"{100 * share:.2g} %" if abs(share) < 0.995 else f"{share:.0%}"


def _doubled(numbers: Sequence[int]) -> list[int]:
    """Return those that are there more than once, in order."""
    found, counts = np.unique(np.array(numbers, np.int64), return_counts=True)
    return [int(one) for one in found[counts > 1]]


def _some(numbers: Sequence[int]) -> str:
    """Return at most eight of them, and how many more there are."""
    text = ", ".join(map(str, numbers[:8]))
    return text if len(numbers) <= 8 else f"{text} and {len(numbers) - 8} more"
