"""The figures of one level: its rows and events in, an entry of summary.json's `levels` out (METRICS.md, 4).

Pure: no file, no clock. Every figure is a JSON value with its unit in its name, and None where it does not
exist.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from fastload.analysis import events, percentiles, rows, slo, window
from fastload.analysis.percentiles import distribution
from fastload.analysis.rows import NULL, Bools, Floats, Ints
from fastload.analysis.window import Window

LevelFigures: TypeAlias = dict[str, Any]
"""One entry of summary.json's `levels`."""

DISTRIBUTIONS = (
    "ttft_ms",
    "response_ttft_ms",
    "ttfa_ms",
    "itl_ms",
    "icl_ms",
    "tps",
    "decode_tps",
    "latency_s",
    "response_latency_s",
)
"""Keys of a level that hold a distribution, in their order."""

INSTRUMENT = (
    "cpu_share",
    "loop_lag_max_ms",
    "gc_pauses",
    "stalled_ms",
    "lost_events",
    "stray_bytes",
    "stale_retries",
    "events_per_read",
    "clock_steps",
    "rebracketed",
    "suspended_ms",
)
"""What the measuring process says of itself, passed on from the manifest."""


def level_figures(
    requests: pa.Table,
    tokens: pa.Table | Iterable[pa.Table],
    facts: Mapping[str, Any],
    limits: slo.Slo | None = None,
    method: str = "nearest-rank",
) -> LevelFigures:
    """Return the figures of one level.

    `requests` and `tokens` (one table or pieces of it) hold the rows of this level only, of all roles. `facts` is its
    entry in the manifest's `levels`; of a level that never ended `concurrency` is enough. `method` names the
    percentiles ("nearest-rank" or "linear").
    """
    concurrency = int(facts["concurrency"])
    measured = rows.equals(requests, "role", "measured")
    succeeded = rows.equals(requests, "status", "ok")
    ok = measured & succeeded
    failed = int((measured & ~succeeded).sum())
    complete = bool(facts.get("complete", False))
    sent, end, slot = rows.ints(requests, "sent_ns"), rows.ends(requests), rows.ints(requests, "slot")
    span = window.closed_loop(slot, sent, end, measured)
    folded = events.fold(requests, tokens, ok, span)

    values = _values(requests, ok, folded.gaps_ms)
    described = {name: distribution(values[name], method) for name in DISTRIBUTIONS}
    limits = limits or slo.Slo()

    figures: LevelFigures = {
        "level": concurrency,
        "load": {"kind": "concurrency", "value": concurrency},
        "measured": int(measured.sum()),
        "ok": int(ok.sum()),
        "failed": failed,
        "errors": rows.counts(requests.filter(pa.array(measured & ~succeeded)), "status"),
        "complete": complete,
        "gave_up": facts.get("gave_up"),
        "measured_planned": facts.get("measured_planned"),
        "measured_done": facts.get("measured_done"),
        "others": _others(requests, measured, succeeded),
        **described,
        **_rates(requests, values, succeeded, span, folded.window_tokens, concurrency),
        **_goodput(requests, measured, ok, span, limits),
        **_occupancy(sent, end, span),
        **_lengths(requests, ok, folded.text_events),
        **_instrument(requests, ok, facts.get("instrument") or {}, folded),
        **_turnaround(requests, measured, sent, slot),
        "checks": _checks(requests, ok, described, folded, sent, end),
    }
    samples = {name: np.sort(values[name]) for name in ("ttft_ms", "tps")}
    judged = slo.judge_level(limits, figures, samples)
    return figures | {"slo_ttft": judged.ttft, "slo_tps": judged.tps, "slo": judged.both}


def table_consistency(ttft_ms: float, itl_ms: float, n: float, latency_s: float) -> float:
    """Return how far TTFT + (n - 1) x ITL is from the latency, as a signed share of it."""
    return (ttft_ms + (n - 1) * itl_ms) / 1e3 / latency_s - 1


def tokens_after_first(requests: pa.Table, ok: Bools) -> float | None:
    """Return the mean divisor of ITL: the tokens that came after an answer's first event.

    It is n - 1 where each token has an event of its own, and less where the first brings several.
    """
    first, last = rows.ints(requests, "first_token_ns"), rows.ints(requests, "last_token_ns")
    itl = rows.floats(requests, "itl_ms")
    with np.errstate(invalid="ignore"):
        there = ok & (first != NULL) & (last != NULL) & (itl > 0)
    return rows.mean((last - first)[there] / 1e6 / itl[there])


def _values(requests: pa.Table, ok: Bools, gaps_ms: Floats) -> dict[str, Floats]:
    """Return the values behind each distribution: per request (null ones dropped), for `icl_ms` per gap."""
    values = {
        name: rows.present(rows.floats(requests, name)[ok])
        for name in ("ttft_ms", "response_ttft_ms", "ttfa_ms", "itl_ms", "tps", "latency_s", "response_latency_s")
    }
    values["icl_ms"] = gaps_ms
    itl = values["itl_ms"]
    values["decode_tps"] = 1000 / itl[itl > 0]
    return values


def _others(requests: pa.Table, measured: Bools, succeeded: Bools) -> dict[str, int]:
    """Count the rows that keep the load up but are not measured, and how many of them failed."""
    return {
        "warmup": int(rows.equals(requests, "role", "warmup").sum()),
        "fill": int(rows.equals(requests, "role", "fill").sum()),
        "failed": int((~measured & ~succeeded).sum()),
    }


def _rates(
    requests: pa.Table,
    values: dict[str, Floats],
    succeeded: Bools,
    span: Window | None,
    window_tokens: int | None,
    concurrency: int,
) -> LevelFigures:
    """Return the rates over the window, and the source report's two under names that say so."""
    tps, latency = rows.mean(values["tps"]), rows.mean(values["latency_s"])
    completed = int((span.contains(rows.ints(requests, "done_ns")) & succeeded).sum()) if span else 0
    return {
        "aggregate_tok_s": window_tokens / span.seconds if span and window_tokens is not None else None,
        "aggregate_tok_s_kimi_report": None if tps is None else tps * concurrency,
        "system_rps": completed / span.seconds if span else None,
        "stream_rps": 1 / latency if latency else None,
        # k waves of `concurrency` requests fit the window; where it cuts them makes a difference of up to one
        # wave in k.
        "rate_edge_error": concurrency / completed if completed else None,
        "window_s": span.seconds if span else None,
    }


def _goodput(
    requests: pa.Table, measured: Bools, ok: Bools, span: Window | None, limits: slo.Slo
) -> LevelFigures:
    """Return the share of measured requests due in the window that met all limits, how many a second, and of how many
    that is a share.
    """
    if span is None:
        return {"goodput": None, "goodput_rps": None, "goodput_due": None}
    due = span.contains(rows.ints(requests, "due_ns")) & measured
    with np.errstate(invalid="ignore"):
        good = (
            ok
            & (rows.floats(requests, "ttft_ms") <= limits.ttft_ms)
            & (rows.floats(requests, "tps") >= limits.tps)
        )
    wanted, met = int(due.sum()), int((due & good).sum())
    return {"goodput": met / wanted if wanted else None, "goodput_rps": met / span.seconds, "goodput_due": wanted}


def _occupancy(sent: Ints, end: Ints, span: Window | None) -> LevelFigures:
    """Return in-flight figures and the wall time from the first request sent to the last one over."""
    out = sent != NULL
    return {
        "in_flight_mean": window.in_flight_mean(sent, end, span) if span else None,
        "in_flight_max": window.in_flight_steps(sent, end)[0],
        "wall_s": float(end[out].max() - sent[out].min()) / 1e9 if out.any() else None,
    }


def _lengths(requests: pa.Table, ok: Bools, text_events: int) -> LevelFigures:
    """Return planned and actual lengths of the ok measured requests, in tokens, and how they were counted."""

    def of(name: str) -> Floats:
        values = rows.floats(requests, name)[ok]
        return values[values >= 0]

    asked, got = rows.floats(requests, "max_tokens")[ok], rows.floats(requests, "completion_tokens")[ok]
    with np.errstate(invalid="ignore"):
        early, beyond = int((got < asked).sum()), int((got > asked).sum())
    counted = float(np.nansum(got))
    return {
        "prompt_tokens_mean": rows.mean(of("prompt_tokens")),
        "prompt_tokens_planned_mean": rows.mean(of("prompt_tokens_planned")),
        "cached_tokens_mean": rows.mean(of("cached_tokens")),
        "completion_tokens_mean": rows.mean(of("completion_tokens")),
        "max_tokens_mean": rows.mean(of("max_tokens")),
        "early_stops": early,
        "overruns": beyond,
        "tokens_per_event": counted / text_events if text_events and counted else None,
        "token_sources": rows.counts(requests.filter(pa.array(ok)), "token_source"),
        "itl_estimated": int((rows.flags(requests, "itl_estimated") & ok).sum()),
    }


def _instrument(
    requests: pa.Table, ok: Bools, told: Mapping[str, Any], folded: events.EventFigures
) -> LevelFigures:
    """Return what the measuring process says of its own work on this level."""
    sources = rows.counts(requests.filter(pa.array(ok)), "stamp_source")
    events_of_text = folded.text_events
    retransmits = rows.ints(requests, "retransmits")
    return {
        "client_delay_us": _client_delay(requests, ok, told.get("client_delay_us")),
        "stamp_source": next(iter(sources), None) if len(sources) < 2 else "mixed",
        "coalesced_share": folded.coalesced / events_of_text if events_of_text else None,
        "clamped_share": folded.clamped / events_of_text if events_of_text else None,
        "rtt_us": rows.median(
            np.where(rows.ints(requests, "rtt_us") < 0, np.nan, rows.floats(requests, "rtt_us"))[ok]
        ),
        "retransmits": int(retransmits[retransmits > 0].sum()),
        "instrument": {name: _finite(told.get(name)) for name in INSTRUMENT},
    }


def _client_delay(requests: pa.Table, ok: Bools, told: object) -> dict[str, float | None]:
    """Return read time - kernel stamp over all events, us: as the measurer counted it, else from the rows."""
    if isinstance(told, Mapping):
        return {name: _finite(told.get(name)) for name in ("p50", "p99", "max")}
    longest = rows.present(rows.floats(requests, "client_delay_max_us")[ok])
    return {
        "p50": rows.median(rows.floats(requests, "client_delay_p50_us")[ok]),
        "p99": None,
        "max": float(longest.max()) if len(longest) else None,
    }


def _finite(value: object) -> float | None:
    """Return a number JSON can hold, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value


def _turnaround(requests: pa.Table, measured: Bools, sent: Ints, slot: Ints) -> LevelFigures:
    """Return how long slots stood free before a measured request, us; waits after failures are left out."""
    over = np.maximum(rows.ends(requests), rows.ints(requests, "framing_end_ns"))
    setup = np.maximum(rows.ints(requests, "connect_ns"), 0) + np.maximum(rows.ints(requests, "tls_ns"), 0)
    free = (
        np.sort(
            window.turnarounds(slot, sent, over, setup, measured & (rows.ints(requests, "backoff_ms") <= 0))
        )
        * 1e6
    )
    return {"turnaround_us": {"mean": rows.mean(free), "p99": percentiles.upper(free, 99)}}


def _checks(
    requests: pa.Table,
    ok: Bools,
    described: dict[str, percentiles.Figures],
    folded: events.EventFigures,
    sent: Ints,
    end: Ints,
) -> LevelFigures:
    """Return what must be zero, or near it, if the rows are whole: counts, and errors as shares."""
    ids = rows.ints(requests, "request")
    never = rows.equals(requests, "status", "connect") | rows.equals(requests, "status", "client_ports")
    ttft, itl, latency = (described[name]["mean"] for name in ("ttft_ms", "itl_ms", "latency_s"))
    after = tokens_after_first(requests, ok)
    known = None not in (ttft, itl, latency, after) and latency > 0
    return {
        "bookkeeping_error": window.bookkeeping_error(sent, end, rows.floats(requests, "latency_s")),
        "consistency_error": table_consistency(ttft, itl, (after or 0.0) + 1, latency) if known else None,
        "tokens_after_first": after,
        "repeated_requests": int((~never).sum()) - len(np.unique(ids[~never])),
        "rows_without_events": int((~never).sum()) - (folded.rows - folded.unknown),
        "events_without_row": folded.unknown,
        "rows_out_of_order": rows.disordered(requests.filter(pa.array(ok))),
        "ok_without_ttft": int(np.isnan(rows.floats(requests, "ttft_ms"))[ok].sum()),
    }
