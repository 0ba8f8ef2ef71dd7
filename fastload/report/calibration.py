"""The table of a calibration as plain text, and its verdict as a sentence. Nothing is computed here."""

import textwrap
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from fastload.report.tables import Column, Level, number, printable, table_lines

WIDTH = 120

LOOPBACK = (
    "loopback only: across a network the card adds its interrupt delay and the merging of segments (GRO) to every "
    "stamp, typically tens of us; that was not measured here"
)
LEGEND = (
    "stamp: |stamp - time just before the server's send|, all tokens; kernel: as fastload reports; read: as it would "
    "without kernel stamps",
    "TTFT, ITL: reported against the server's log, us (TTFT: difference of means and of P90; ITL: mean over requests "
    "of the difference); %: the worse of mean and P90, in per cent of the truth",
    "coal: tokens read together with a later one, without the last of an answer, which the server sends with its end",
    "in flight: time-weighted, from the server's log; off: against the level",
    "CPU us/ev: per SSE event, getrusage: meas the measuring process; tree it and the supervisor writing the trace, "
    "without the server",
    "others: of the client's core, used by something else or stolen by a VM's host, without interrupts (/proc/stat)",
    "wait: mean time the measuring process was ready to run and had no core, at each wake-up (schedstat)",
)


def _at(*path: str, scale: float = 1.0) -> Callable[[Level], str]:
    """Return a cell that walks down into a level; what is not there is "-"."""

    def cell(level: Level) -> str:
        value: Any = level
        for name in path:
            value = None if value is None else value[name]
        return number(None if value is None else value * scale)

    return cell


def _worst(source: str, key: str) -> Callable[[Level], str]:
    """Return a cell with the worse of the mean's and the P90's share, in %."""

    def cell(level: Level) -> str:
        shares = [] if level[source] is None else [one for one in level[source][key].values() if one is not None]
        return number(100 * max(shares, key=abs)) if shares else "-"

    return cell


def _stamps(source: str) -> tuple[Column, ...]:
    return (
        Column((source, "P50"), _at(source, "stamp_us", "p50"), opens=True),
        Column(("stamp", "P99"), _at(source, "stamp_us", "p99")),
        Column(("us", "max"), _at(source, "stamp_us", "max")),
    )


def _errors(source: str) -> tuple[Column, ...]:
    return (
        Column((source, "mean"), _at(source, "ttft_error_us", "mean"), opens=True),
        Column(("TTFT", "P90"), _at(source, "ttft_error_us", "p90")),
        Column(("", "%"), _worst(source, "ttft_error_share")),
        Column(("ITL", "us"), _at(source, "itl_error_us", "mean")),
        Column(("", "%"), _worst(source, "itl_error_share")),
    )


C = Column(("", "c"), lambda level: str(level["concurrency"]))
LOAD = (
    Column(("ITL", "ms"), _at("true_itl_ms"), opens=True),
    Column(("events", "/s"), _at("events_per_s")),
)
OWN = (
    Column(("coal", "%"), _at("coalesced_share", scale=100), opens=True),
    Column(("in", "flight"), _at("in_flight"), opens=True),
    Column(("off", "%"), _at("in_flight_off", scale=100)),
    Column(("CPU us/ev", "meas"), _at("cpu_us_per_event", "measurer"), opens=True),
    Column(("", "tree"), _at("cpu_us_per_event", "tree")),
    Column(("CPU", "%"), _at("cpu_share", scale=100)),
    Column(("core", "others%"), _at("others_share", scale=100), opens=True),
    Column(("wait", "us"), _at("wait_us_per_wake")),
)
GROUPS = ((*LOAD, *_stamps("kernel"), *_stamps("read")), OWN, _errors("kernel"), _errors("read"))


def plain(result: Mapping[str, Any], width: int = WIDTH) -> str:
    """Return the calibration as text, at most `width` columns (80 can be had), ending in a newline."""
    host = result["host"]
    head = f"calibration of {host['cpu_model'] or 'this host'}, {host['cores']} cores, kernel {host['kernel']}"
    lines = [*_wrapped(head, width), *_wrapped(result["target"], width)]
    for columns in _layout(result["levels"], width):
        lines += ["", *table_lines(result["levels"], columns)]
    lines.append("")
    for line in footer(result):
        lines += _wrapped(line, width)
    return printable_lines(lines)


def printable_lines(lines: list[str]) -> str:
    """Join the lines, without control characters."""
    return "\n".join(map(printable, lines)) + "\n"


def footer(result: Mapping[str, Any]) -> list[str]:
    """Return what stands below the table, one entry a line: verdict, reasons, checks, legend."""
    lines = [f"verdict: {sentence(result['verdict'])}"]
    lines += _reasons(result["verdict"])
    lines += _selftest(result["selftest"])
    lines += _saturation(result["saturate"])
    lines += [
        f"note: c={level['concurrency']} was close to a limit: the medians of {level['times']} measurements are shown"
        for level in result["levels"]
        if level["times"] > 1
    ]
    return [*lines, *(f"note: {text}" for text in (LOOPBACK, *result["notes"], *LEGEND))]


def sentence(verdict: Mapping[str, Any]) -> str:
    """Return the verdict in one line: up to where the client is negligible, for each kind of stamp."""
    told = []
    for name, found in verdict.items():
        if found is None:
            told.append(f"{name} stamps were not in use")
        elif found["concurrency"] is None:
            told.append(f"with {name} stamps the client is NOT negligible on this host")
        else:
            rate = f"{found['events_per_s']:.0f} events/s" if found["events_per_s"] else "unknown rate"
            told.append(f"with {name} stamps the client is negligible up to c={found['concurrency']} ({rate})")
    return "; ".join(told)


def _reasons(verdict: Mapping[str, Any]) -> Iterator[str]:
    """Yield why not beyond; what holds for every kind of stamp once."""
    why = {name: found["reasons"] for name, found in verdict.items() if found is not None}
    for name, reasons in why.items():
        for reason in reasons:
            shared = all(reason in others for others in why.values())
            if not shared:
                yield f"  - {name} stamps, {reason}"
            elif name == next(iter(why)):
                yield f"  - {reason}"


def _selftest(found: Mapping[str, Any] | None) -> Iterator[str]:
    if found is None:
        return
    if not found["differences"]:
        yield (
            f"self-test: passed: {found['tokens']} tokens of {found['requests']} requests, each received exactly once "
            "and in order; counts and usage right"
        )
        return
    yield f"self-test: FAILED, {len(found['differences'])} differences"
    yield from (f"  - {one}" for one in found["differences"])


def _saturation(found: Mapping[str, Any] | None) -> Iterator[str]:
    if found is None:
        return
    top = found["unpaced"]
    yield (
        f"saturated, c={top['concurrency']}, server without pace: {top['events_per_s'] or 0:.0f} events/s, "
        f"{number(top['cpu_us_per_event']['measurer'])} us of CPU per event, measuring process at "
        f"{100 * (top['cpu_share'] or 0):.0f} % of its core: {found['limited_by']} was the limit"
    )
    best, why = found["paced"], found["paced_end"]
    held = (
        f"P99 of the {best['stamp_source']} stamp below 1 % of the ITL up to {best['events_per_s'] or 0:.0f} events/s "
        f"(c={best['concurrency']}, {number(best['true_itl_ms'])} ms)"
        if best
        else "P99 of the stamp not below 1 % of the ITL at any rate tried"
    )
    yield f"paced: {held}; {why}"


def _layout(levels: list[Level], width: int) -> Iterator[tuple[Column, ...]]:
    """Deal the groups of columns to as few tables as fit the width, each beginning with the level."""
    table: tuple[Column, ...] = (C,)
    for group in GROUPS:
        wider = (*table, *group)
        if len(table) > 1 and max(map(len, table_lines(levels, wider)), default=0) > width:
            yield table
            wider = (C, *group)
        table = wider
    yield table


def _wrapped(line: str, width: int) -> list[str]:
    return textwrap.wrap(line, width, subsequent_indent="    ", break_long_words=False)
