"""Figures another tool told, as an entry of summary.json's `levels`: what it did not tell is null."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from fastload.analysis.levels import DISTRIBUTIONS, INSTRUMENT, LevelFigures, table_consistency
from fastload.analysis.percentiles import Floats, distribution
from fastload.trace.formats.told import SCALARS, ToldLevel

STATISTICS = tuple(distribution(np.zeros(0)))


def level_figures(told: ToldLevel) -> LevelFigures:
    """Return the figures of one level, the keys of `levels.level_figures`; its SLO is not judged yet (null).

    A table that a tool finished is taken for complete; how many requests failed may be unknown (null).
    """
    figures = told.figures
    scalars = {name: figures.get(name) for name in SCALARS}
    values = samples(told)
    found = {name: _distribution(figures.get(name), values.get(name), scalars["ok"]) for name in DISTRIBUTIONS}
    tps = found["tps"]["mean"]
    return {
        "level": told.level,
        "load": {"kind": "concurrency", "value": told.level},
        "measured": scalars["measured"],
        "ok": scalars["ok"],
        "failed": scalars["failed"],
        "errors": {},
        "complete": True,
        "gave_up": None,
        "measured_planned": None,
        "measured_done": scalars["measured"],
        "others": {"warmup": None, "fill": None, "failed": None},
        **found,
        "aggregate_tok_s": scalars["aggregate_tok_s"],
        "aggregate_tok_s_kimi_report": None if tps is None else tps * told.level,
        "system_rps": scalars["system_rps"],
        "stream_rps": _stream_rps(scalars["stream_rps"], found["latency_s"]["mean"]),
        "rate_edge_error": None,
        "window_s": scalars["window_s"],
        "goodput": None,
        "goodput_rps": None,
        "goodput_due": None,
        "in_flight_mean": scalars["in_flight_mean"],
        "in_flight_max": None,
        "wall_s": None,
        "prompt_tokens_mean": scalars["prompt_tokens_mean"],
        "prompt_tokens_planned_mean": None,
        "cached_tokens_mean": None,
        "completion_tokens_mean": scalars["completion_tokens_mean"],
        "max_tokens_mean": None,
        "early_stops": None,
        "overruns": None,
        "tokens_per_event": None,
        "token_sources": {},
        "itl_estimated": None,
        "client_delay_us": {"p50": None, "p99": None, "max": None},
        "stamp_source": None,
        "coalesced_share": None,
        "clamped_share": None,
        "rtt_us": None,
        "retransmits": None,
        "instrument": dict.fromkeys(INSTRUMENT),
        "turnaround_us": {"mean": None, "p99": None},
        "checks": _checks(found, scalars["completion_tokens_mean"]),
        "slo_ttft": None,
        "slo_tps": None,
        "slo": None,
    }


def _distribution(told: Mapping[str, Any] | None, values: Floats | None, ok: int | None) -> dict[str, Any]:
    """Return a distribution with every statistic: as told, else from the values per request that the file lists, else
    null; n is that of the level if not told.
    """
    found: dict[str, Any] = dict.fromkeys(STATISTICS) if values is None else distribution(values)
    found |= {name: value for name, value in (told or {}).items() if value is not None}
    if found["n"] is None and found["mean"] is not None and "n" not in (told or {}):
        found["n"] = ok
    return found


def _stream_rps(told: float | None, latency_s: float | None) -> float | None:
    return told if told is not None else 1 / latency_s if latency_s else None


def _checks(found: Mapping[str, Mapping[str, Any]], n: float | None) -> dict[str, Any]:
    """Return the checks of a level; only the table's own consistency can be seen without rows."""
    ttft, itl, latency = (found[name]["mean"] for name in ("ttft_ms", "itl_ms", "latency_s"))
    known = None not in (ttft, itl, latency, n) and latency > 0 and math.isfinite(latency)
    return {
        "bookkeeping_error": None,
        "consistency_error": table_consistency(ttft, itl, n or 0.0, latency) if known else None,
        "tokens_after_first": None if n is None else n - 1,
        "repeated_requests": None,
        "rows_without_events": None,
        "events_without_row": None,
        "rows_out_of_order": None,
        "ok_without_ttft": None,
    }


def samples(told: ToldLevel) -> dict[str, Floats]:
    """Return the values per request that the file has, ascending, by the key of their distribution."""
    return {name: np.sort(np.asarray(values, np.float64)) for name, values in told.samples.items()}
