"""The verdict on a run (METRICS.md, section 6): what the instrument found out about itself, with figures.

`invalid`: the figures do not stand. `suspect`: one of the causes named in `_doubts` makes them doubtful. Else `valid`.
Works on the entries of summary.json's `levels` alone, so it can be made again from a summary.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fastload.analysis.levels import LevelFigures
from fastload.analysis.percentiles import is_low_n

IN_FLIGHT_INVALID = 0.05
IN_FLIGHT_SUSPECT = 0.01
LENGTHS_SUSPECT = 0.02
STAMP_ERROR_SUSPECT = 0.01  # of TTFT or ITL
TURNAROUND_SUSPECT = 0.01  # of the latency
DELAY_SUSPECT = 0.5  # of an ITL: the client then falls behind the stream it reads
CPU_SUSPECT = 0.80
STALL_SUSPECT = 0.01  # of the level
PAUSE_SUSPECT_MS = 1000.0  # of the measuring process at once; shorter ones show in turn-around and load
SUSPENDED_MS = 10.0  # of the machine; less is the reading of two clocks one after the other
BOOKKEEPING_LIMIT = 0.001
BURST_EVENTS = 4  # in one read, on average: servers put two or three together at an answer's ends
UNUSABLE_STAMPS_LIMIT = 0.01  # of the successful rows


def verdict(
    levels: Sequence[LevelFigures], status: str = "complete", calibration: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Judge a run: {"status": valid | suspect | invalid, "reasons": [sentences], "notes": [sentences]}.

    `status` is the manifest's, `calibration` too: the error of this host's stamps as `fastload calibrate` found it,
    {"levels": [{"concurrency": c, "kernel": P99 in us | None, "read": ..}, ..], "negligible": {"kernel": c, ..}}. None
    if it never was measured: then nothing is assumed, and a note says so.
    """
    broken = [f"c={level['level']}: {text}" for level in levels for text in _broken(level)]
    if not any(level["measured"] for level in levels):
        broken.insert(0, "no measured request finished")
    doubts = [f"c={level['level']}: {text}" for level in levels for text in _doubts(level, calibration or {})]
    name = "invalid" if broken else "suspect" if doubts else "valid"
    return {"status": name, "reasons": broken + doubts, "notes": _notes(levels, status, calibration)}


def _broken(level: LevelFigures) -> list[str]:
    """Return why the level's figures do not stand: rows lost, load not held, stamps unusable, all failed."""
    found: list[str] = []
    measured, ok, checks = level["measured"], level["ok"], level["checks"]
    if measured > level["errors"].get("cancelled", 0) and not ok:
        found.append(f"all {measured} measured requests failed ({_counted(level['errors'])})")

    lost = (
        level["instrument"]["lost_events"] or 0,
        "events were lost between the measuring process and the trace",
    )
    done, planned = level["measured_done"], level["measured_planned"]
    # A request that never got a connection is a row but does not use up the plan.
    used = measured - level["errors"].get("connect", 0) - level["errors"].get("client_ports", 0)
    for count, what in (
        lost,
        (checks["repeated_requests"], "requests were sent in more than one row"),
        (checks["rows_without_events"], "rows have no entry in tokens"),
        (checks["events_without_row"], "entries of tokens have no row in requests"),
        ((done or 0) - measured, "measured requests finished but have no row"),
        ((planned or 0) - used if level["complete"] else 0, "planned measured requests have no row"),
    ):
        if count > 0:
            found.append(f"{count} {what}")
    if (checks["bookkeeping_error"] or 0) > BOOKKEEPING_LIMIT:
        off_by = _percent(checks["bookkeeping_error"])
        found.append(f"the integral of in-flight and the sum of latencies differ by {off_by}")

    off = _in_flight_off(level)
    if off is not None and abs(off) > IN_FLIGHT_INVALID:
        found.append(_in_flight_text(level, off))
    if ok and level["complete"] and level["window_s"] is None:
        found.append("all slots were never busy at once: no rates")

    for name, what in _NO_CONNECTION.items():
        count = level["errors"].get(name, 0)
        if count >= (level["level"] if name == "connect" else 1):
            found.append(f"{count} {what}: the load was not held")

    for count, what in (
        (checks["rows_out_of_order"], "have stamps that run backwards"),
        (checks["ok_without_ttft"], "have no first token"),
    ):
        if ok and count / ok > UNUSABLE_STAMPS_LIMIT:
            found.append(f"{count} of {ok} successful requests {what}")
    return found


# Of connections refused as many count as a level has streams: then each stood without one, once on average.
_NO_CONNECTION = {
    "connect": "connections could not be had, the server was away",
    "client_ports": "connections found no local port or file descriptor free on this host",
}


def _doubts(level: LevelFigures, calibration: Mapping[str, Any]) -> list[str]:
    """Return the named causes that make the level's figures doubtful."""
    found: list[str] = []
    ttft_us, itl_us = _us(level["ttft_ms"]["mean"]), _us(level["itl_ms"]["mean"])
    latency_us = (level["latency_s"]["mean"] or 0.0) * 1e6

    error_us = stamp_error_us(level, calibration)
    for name, figure_us in (("TTFT", ttft_us), ("ITL", itl_us)):
        if figure_us and error_us / figure_us > STAMP_ERROR_SUSPECT:
            found.append(f"stamp error {_plain(error_us)} us is {_percent(error_us / figure_us)} of {name}")
    delay_us = level["client_delay_us"]["p99"] or 0.0
    if itl_us and delay_us > DELAY_SUSPECT * itl_us:
        found.append(f"client delay P99 {_plain(delay_us)} us is {_percent(delay_us / itl_us)} of an ITL")

    off = _in_flight_off(level)
    if off is not None and IN_FLIGHT_SUSPECT < abs(off) <= IN_FLIGHT_INVALID:
        found.append(_in_flight_text(level, off))
    free_us = level["turnaround_us"]["mean"] or 0.0
    if latency_us and free_us / latency_us > TURNAROUND_SUSPECT:
        found.append(
            f"slots stood free {_plain(free_us)} us between requests, {_percent(free_us / latency_us)} of latency"
        )

    for name, actual, planned in (
        ("prompts", level["prompt_tokens_mean"], level["prompt_tokens_planned_mean"]),
        ("outputs", level["completion_tokens_mean"], level["max_tokens_mean"]),
    ):
        if actual is not None and planned and abs(actual / planned - 1) > LENGTHS_SUSPECT:
            early = f" ({level['early_stops']} of {level['ok']} stopped early)" if name == "outputs" else ""
            found.append(f"{name} have {actual:.4g} tokens on average, {planned:.4g} were asked for{early}")

    stalled_s, wall_s = (level["instrument"]["stalled_ms"] or 0.0) / 1e3, level["wall_s"]
    if wall_s and stalled_s / wall_s > STALL_SUSPECT:
        found.append(
            f"the measuring process stood still for {_plain(stalled_s * 1e3)} ms, {_percent(stalled_s / wall_s)} of"
            " the level: events came faster than the trace could be written"
        )
    pause_ms, asleep_ms = level["instrument"]["loop_lag_max_ms"] or 0.0, level["instrument"]["suspended_ms"] or 0.0
    if pause_ms > PAUSE_SUSPECT_MS:
        found.append(f"the measuring process was held up for {_plain(pause_ms)} ms at once: stopped, or without a CPU")
    if asleep_ms > SUSPENDED_MS:
        found.append(f"the machine was suspended for {_plain(asleep_ms)} ms, which no stamp counts")
    cpu = level["instrument"]["cpu_share"]
    if cpu is not None and cpu > CPU_SUSPECT:
        found.append(f"the measuring process used {_percent(cpu)} of its CPU")
    return found


def stamp_error_us(level: LevelFigures, calibration: Mapping[str, Any]) -> float:
    """Return the error of the level's stamps in us, as far as it is known.

    The calibrated error of the stamp used (its P99), plus what its events say: a coalesced stamp is late by less than
    the client was (the delay's P99 stands for it), a clamped one may be off by a whole ITL.
    """
    found = _calibrated(level, calibration)
    known = found[0] if found else 0.0
    late = (level["coalesced_share"] or 0.0) * (level["client_delay_us"]["p99"] or 0.0)
    return known + late + (level["clamped_share"] or 0.0) * _us(level["itl_ms"]["mean"])


def _calibrated(level: LevelFigures, calibration: Mapping[str, Any]) -> tuple[float, int] | None:
    """Return the P99 error in us of the level's stamps, and the calibrated level it is from.

    That is the nearest one at or above the level; beyond the highest, the highest. None where there is none.
    """
    source = str(level["stamp_source"])
    known = sorted((each["concurrency"], each[source]) for each in calibration.get("levels", ()) if each.get(source))
    if not known:
        return None
    at, error_us = next((pair for pair in known if pair[0] >= level["level"]), known[-1])
    return float(error_us), int(at)


def _calibration_note(levels: Sequence[LevelFigures], calibration: Mapping[str, Any] | None) -> str:
    """Say what is known of the stamps' error on this host, at the worst level of the run."""
    sources = sorted({str(level["stamp_source"]) for level in levels})
    found = [pair for level in levels if (pair := _calibrated(level, calibration or {}))]
    if not found or calibration is None:
        return f"stamps: {', '.join(sources)} (stamp error not calibrated on this host)"
    error_us, at = max(found)
    limits = [(calibration.get("negligible") or {}).get(source) or 0 for source in sources]
    upto = f"up to c={min(limits)}" if min(limits) else "at no level"
    highest = max(level["level"] for level in levels)
    beyond = f"; c={highest} is beyond what was calibrated" if highest > max(each[1] for each in found) else ""
    return (
        f"stamps: {', '.join(sources)} (calibrated on this host: stamp error P99 {_plain(error_us)} us at c={at};"
        f" calibrate: client negligible {upto}, against a simulated server on loopback{beyond})"
    )


def _notes(levels: Sequence[LevelFigures], status: str, calibration: Mapping[str, Any] | None) -> list[str]:
    """Return one line on each thing the reader should know in any case; of levels, the worst is named."""
    notes: list[str] = []
    if status != "complete":
        notes.append(f"the run is {status}: these are its rows so far")
    for level in levels:
        if not level["complete"]:
            planned = level["measured_planned"]
            of = f" of {planned}" if planned else ""
            why = f"; {level['gave_up']}" if level["gave_up"] else ""
            notes.append(f"c={level['level']} is incomplete: {level['measured']}{of} measured requests{why}")
    some = [level for level in levels if level["ok"]]
    if not some:
        return notes

    notes.append(_calibration_note(some, calibration))
    for line in (
        _delay_note,
        _turnaround_note,
        _coalesced_note,
        _burst_note,
        _clock_notes,
        _process_note,
        _rtt_note,
        _in_flight_note,
        _edge_note,
    ):
        notes.extend(line(some))
    notes.extend(_length_notes(some))
    notes.extend(_counting_notes(some))
    low = [f"c={level['level']}" for level in some if is_low_n(level["ok"], 90)]
    if low:
        notes.append(
            f"low n: P90 of {', '.join(low)} rests on fewer than 29 requests (no 95 % interval exists)"
        )
    return notes


def _delay_note(levels: Sequence[LevelFigures]) -> list[str]:
    level = _worst(levels, lambda each: each["client_delay_us"]["p99"] or each["client_delay_us"]["max"])
    if level is None:
        return ["client delay: not known"]
    delay = level["client_delay_us"]
    figures = ", ".join(f"{name} {_plain(delay[key])}" for name, key in _DELAYS if delay[key] is not None)
    return [f"client delay (read time - kernel stamp), us: {figures} (worst level, c={level['level']})"]


_DELAYS = (("P50", "p50"), ("P99", "p99"), ("max", "max"))


def _turnaround_note(levels: Sequence[LevelFigures]) -> list[str]:
    level = _worst(levels, lambda each: each["turnaround_us"]["mean"] if each["latency_s"]["mean"] else None)
    if level is None:
        return []
    free = level["turnaround_us"]
    share = free["mean"] / 1e6 / level["latency_s"]["mean"]
    return [
        f"slot turn-around (free to next send): mean {_plain(free['mean'])}, P99 {_plain(free['p99'])} us,"
        f" {_percent(share)} of latency (worst level, c={level['level']})"
    ]


def _coalesced_note(levels: Sequence[LevelFigures]) -> list[str]:
    coalesced = _worst(levels, lambda each: each["coalesced_share"])
    clamped = _worst(levels, lambda each: each["clamped_share"])
    if coalesced is None or clamped is None:
        return []
    return [
        f"coalesced stamps (upper bounds): {_percent(coalesced['coalesced_share'])} of text events"
        f" (worst level, c={coalesced['level']}); clamped: {_percent(clamped['clamped_share'])}"
    ]


def _burst_note(levels: Sequence[LevelFigures]) -> list[str]:
    """Warn of events that come many at a time though the client reads in time: a gateway collects them."""
    worst = _worst(levels, _events_a_burst)
    if worst is None:
        return []
    return [
        f"WARNING: events come in bursts, {_plain(_events_a_burst(worst) or 0.0)} at a time (c={worst['level']}):"
        " something before the client collects them; TTFT and ITL are those of the bursts"
    ]


def _events_a_burst(level: LevelFigures) -> float | None:
    """Return the events of a read where most share one and the client's own delay does not explain it."""
    together, gap_us = level["instrument"]["events_per_read"], _us(level["icl_ms"]["mean"])
    delay_us = level["client_delay_us"]["p50"]
    if together is None or delay_us is None or together < BURST_EVENTS or (level["coalesced_share"] or 0.0) < 0.5:
        return None
    return float(together) if delay_us < together * gap_us / 2 else None


def _clock_notes(levels: Sequence[LevelFigures]) -> list[str]:
    """Say where the wall clock, in which the kernel stamps, was set under a level. CLOCK_MONOTONIC has all figures."""
    notes: list[str] = []
    for level in levels:
        steps, stale = (int(level["instrument"][name] or 0) for name in ("clock_steps", "rebracketed"))
        if steps or stale:
            notes.append(
                f"WARNING: c={level['level']}: the system clock was set while it ran ({steps} times by notice, seen in"
                f" {stale} stamps): its offset was measured again, stamps that still did not fit are clamped"
            )
    return notes


def _process_note(levels: Sequence[LevelFigures]) -> list[str]:
    """Say how the measuring process fared over all levels; what it did not tell is left out."""
    told: list[str] = []
    busiest = _worst(levels, lambda each: each["instrument"]["cpu_share"])
    if busiest is not None:
        told.append(f"CPU {_percent(busiest['instrument']['cpu_share'])} (worst level, c={busiest['level']})")
    pauses = [
        level["instrument"]["gc_pauses"] for level in levels if level["instrument"]["gc_pauses"] is not None
    ]
    if pauses:
        told.append(f"{sum(pauses)} GC pauses")
    for key, text in (
        ("loop_lag_max_ms", "longest loop lag {} ms"),
        ("stalled_ms", "stalled {} ms"),
        ("events_per_read", "up to {} events a read"),
        ("stray_bytes", "{} stray bytes"),
        ("stale_retries", "{} retries on stale connections"),
    ):
        figures = [level["instrument"][key] for level in levels if level["instrument"][key]]
        if figures:
            told.append(text.format(_plain(max(figures))))
    return [f"measuring process: {', '.join(told)}"] if told else []


def _rtt_note(levels: Sequence[LevelFigures]) -> list[str]:
    times = [level["rtt_us"] for level in levels if level["rtt_us"] is not None]
    if not times:
        return []
    span = f"{min(times):.4g}" if min(times) == max(times) else f"{min(times):.4g} to {max(times):.4g}"
    again = sum(level["retransmits"] for level in levels)
    return [f"RTT (TCP_INFO): {span} us, part of TTFT and never subtracted; {again} segments retransmitted"]


def _in_flight_note(levels: Sequence[LevelFigures]) -> list[str]:
    level = _worst(
        levels, lambda each: None if _in_flight_off(each) is None else abs(_in_flight_off(each) or 0.0)
    )
    return (
        [_in_flight_text(level, _in_flight_off(level) or 0.0) + f" (worst level, c={level['level']})"]
        if level
        else []
    )


def _edge_note(levels: Sequence[LevelFigures]) -> list[str]:
    level = _worst(levels, lambda each: each["rate_edge_error"])
    if level is None:
        return []
    return [
        f"rates: edge error up to {_percent(level['rate_edge_error'])}, the window being"
        f" {1 / level['rate_edge_error']:.3g} waves long (worst level, c={level['level']})"
    ]


def _length_notes(levels: Sequence[LevelFigures]) -> list[str]:
    """Say what was planned and what came, in tokens, over all levels together."""
    notes: list[str] = []
    prompt, prompt_planned = (
        _weighted(levels, "prompt_tokens_mean"),
        _weighted(levels, "prompt_tokens_planned_mean"),
    )
    output, asked = _weighted(levels, "completion_tokens_mean"), _weighted(levels, "max_tokens_mean")
    notes.append(
        f"lengths in tokens, actual/planned: prompt {_figure(prompt)}/{_figure(prompt_planned)},"
        f" output {_figure(output)}/{_figure(asked)}"
    )
    early, ok = sum(level["early_stops"] for level in levels), sum(level["ok"] for level in levels)
    beyond = sum(level["overruns"] for level in levels)
    if beyond:
        notes.append(f"WARNING: {beyond} of {ok} answers went beyond the length asked for: the limit was ignored")
    if early:
        notes.append(
            f"WARNING: {early} of {ok} answers stopped early: {_figure(output)} of {_figure(asked)} tokens"
            " on average (--ignore-eos asks the server to go on)"
        )
    cached = _weighted(levels, "cached_tokens_mean")
    if cached is None:
        notes.append("prefix-cache hits: the server does not tell")
    else:
        share = f" ({_percent(cached / prompt)} of the prompt)" if prompt else ""
        notes.append(f"prefix-cache hits: {cached:.4g} tokens a request{share}")
    return notes


def _counting_notes(levels: Sequence[LevelFigures]) -> list[str]:
    """Say how tokens were counted, and whether the table agrees with itself."""
    sources: dict[str, int] = {}
    for level in levels:
        for name, count in level["token_sources"].items():
            sources[name] = sources.get(name, 0) + count
    notes = [f"tokens counted by: {_counted(sources)}"] if sources else []
    if "events" in sources:
        notes.append(
            "WARNING: token counts taken from events are ESTIMATES: an event may hold several tokens"
        )
    estimated = sum(level["itl_estimated"] for level in levels)
    if estimated:
        notes.append(
            f"ITL of {estimated} requests is estimated: their tokens at the first or last event are not known"
        )
    bundled = _worst(levels, lambda each: each["tokens_per_event"])
    if bundled is not None and bundled["tokens_per_event"] > 1.05:
        notes.append(
            f"events hold {bundled['tokens_per_event']:.3g} tokens (c={bundled['level']}):"
            " ITL is per token, ICL is the gap between events"
        )
    off = _worst(levels, lambda each: abs(each["checks"]["consistency_error"] or 0.0))
    if off is not None and off["checks"]["consistency_error"] is not None:
        notes.append(
            f"TTFT + (n - 1) x ITL = latency within {_percent(abs(off['checks']['consistency_error']))}"
            f" (worst level, c={off['level']})"
        )
    failed = sum(level["others"]["failed"] for level in levels)
    if failed:
        notes.append(f"{failed} warm-up or fill requests failed too")
    return notes


def _in_flight_off(level: LevelFigures) -> float | None:
    """Return how far the load was from the one asked for, as a signed share; None without a window."""
    mean = level["in_flight_mean"]
    return None if mean is None else float(mean) / level["level"] - 1


def _in_flight_text(level: LevelFigures, off: float) -> str:
    return f"in flight {level['in_flight_mean']:.4g} of {level['level']} ({100 * off:+.2g} %)"


def _worst(
    levels: Sequence[LevelFigures], figure: Callable[[LevelFigures], float | None]
) -> LevelFigures | None:
    """Return the level with the largest figure, leaving out levels that have none."""
    known = [(value, at) for at, level in enumerate(levels) if (value := figure(level)) is not None]
    return levels[max(known, key=lambda pair: (pair[0], pair[1]))[1]] if known else None


def _weighted(levels: Sequence[LevelFigures], name: str) -> float | None:
    """Return a mean over levels, each weighing as many requests as succeeded in it."""
    known = [(float(level[name]), int(level["ok"])) for level in levels if level[name] is not None]
    total = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / total if total else None


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _percent(share: float) -> str:
    """Return a share as a percentage of two digits; what is below a thousandth of a percent is none."""
    if abs(share) < 1e-5:
        return "0 %"
    return f"{100 * share:.2g} %" if share < 0.995 else f"{100 * share:.0f} %"


def _us(milliseconds: float | None) -> float:
    return (milliseconds or 0.0) * 1e3


def _plain(figure: float) -> str:
    """Three figures, and never an exponent: 0.0123, 4.57, 3,960."""
    return f"{figure:,.0f}" if abs(figure) >= 100 else f"{figure:.3g}"
