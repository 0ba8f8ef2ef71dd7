"""What every bench stands on: one order, one table, one line about the machine, and the ground-truth server.

A program here times one claim. It pins the server to core 0 and the client to core 1, runs three times, interleaved
where it compares, and prints medians. Times are CLOCK_MONOTONIC; the truth is the server's own log of each send.
"""

import argparse
import json
import os
import platform
import resource
import shlex
import socket
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

import fastload
from fastload import _timing
from fastload import plan as plans
from fastload.analysis import calibration
from fastload.load import supervisor
from fastload.load.target import Address, Target
from fastload.load.tls import TlsOptions
from fastload.sim import _emit, truth
from fastload.trace.reader import open_run
from fastload.trace.writer import RunWriter, create_run

SERVER_CPU, CLIENT_CPU = 0, 1
MODEL = "fastload-truth"


# ---------------------------------------------------------------- an order and its answer


def order(text: str, *add: Callable[[argparse.ArgumentParser], object]) -> argparse.Namespace:
    """The command line of a bench: `--json`, `--save DIR`, `--runs N`, and what `add` adds."""
    words = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--json", action="store_true", help="print JSON on stdout and no table")
    words.add_argument("--save", type=Path, metavar="DIR", help="also write NAME.json, with machine and command, there")
    words.add_argument("--runs", type=int, default=3, metavar="N", help="runs, of which the median is shown [3]")
    for one in add:
        one(words)
    given = words.parse_args()
    if given.runs < 1:
        words.error("--runs: at least 1")
    raise_descriptors()
    return given


def machine() -> dict[str, object]:
    """The host in a few words: figures of another one are other figures."""
    return {
        "cpu": _first("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_average": os.getloadavg()[0],
        "governor": _text("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        "clocksource": _text("/sys/devices/system/clocksource/clocksource0/current_clocksource"),
        "hypervisor": "hypervisor" in (_first("/proc/cpuinfo", "flags") or "").split(),
    }


def versions(*names: str) -> dict[str, str | None]:
    """Installed version of each distribution, None where there is none; fastload's own comes first."""
    found: dict[str, str | None] = {"fastload": fastload.__version__}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def answer(
    given: argparse.Namespace,
    name: str,
    claim: str,
    clock: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    packages: dict[str, str | None],
    notes: Sequence[str] = (),
    data: object = None,
) -> None:
    """Print one table (or JSON), and save both the figures and where they come from."""
    host = machine()
    whole = {
        "bench": name,
        "claim": claim,
        "clock": clock,
        "utc_ns": _timing.realtime_ns(),
        "command": shlex.join([f"bench/{name}.py", *sys.argv[1:]]),
        "runs": given.runs,
        "machine": host,
        "packages": packages,
        "notes": list(notes),
        "columns": list(columns),
        "rows": [list(row) for row in rows],
        "data": data,
    }
    if given.json:
        print(json.dumps(whole, default=_plain))
    else:
        print(f"{claim}\nclock: {clock}; {_runs(given.runs)}")
        print(f"machine: {_line(host)}")
        print("versions: " + ", ".join(f"{key} {value or 'not installed'}" for key, value in packages.items()))
        print(_table(columns, rows))
        for note in notes:
            print(f"* {note}")
    if given.save is not None:
        given.save.mkdir(parents=True, exist_ok=True)
        (given.save / f"{name}.json").write_text(json.dumps(whole, default=_plain, indent=1) + "\n")


def _runs(runs: int) -> str:
    return "one run" if runs == 1 else f"medians of {runs} runs"


def _line(host: dict[str, object]) -> str:
    virtual = "virtual machine" if host["hypervisor"] else "bare metal"
    return (
        f"{host['cpu']}, {host['cores']} cores, {virtual}, Linux {host['kernel']}, Python {host['python']}, "
        f"governor {host['governor'] or 'not told'}, load average {host['load_average']:.2f}"
    )


def _table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    cells = [list(columns), *([_cell(value) for value in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    first, *rest = (
        "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in cells
    )
    return "\n".join([first, "-" * len(first), *rest])


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        size = abs(value)
        return f"{value:,.0f}" if size >= 1000 else f"{value:.1f}" if size >= 10 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _plain(value: Any) -> object:
    return value.item() if isinstance(value, np.generic) else value.tolist() if isinstance(value, np.ndarray) else str(
        value
    )


def _text(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


def _first(path: str, key: str) -> str | None:
    for line in (_text(path) or "").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return None


# ---------------------------------------------------------------- core and descriptors


def core(wanted: int) -> int | None:
    """The core a side is pinned to; None when this host has not two for us."""
    allowed = sorted(os.sched_getaffinity(0)) if not _ALLOWED else _ALLOWED
    return allowed[wanted] if len(allowed) > 1 else None


def pin(wanted: int) -> None:
    """Keep this process on core number `wanted` of those it may use."""
    one = core(wanted)
    if one is not None:
        os.sched_setaffinity(0, {one})


_ALLOWED = sorted(os.sched_getaffinity(0))


def raise_descriptors() -> None:
    """Thousands of streams need as many descriptors, at both ends."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def middle(values: Sequence[float | None]) -> float | None:
    """The median of what there is; None of nothing."""
    there = [value for value in values if value is not None]
    return float(statistics.median(there)) if there else None


def middles(runs: Sequence[dict[str, Any]], *names: str) -> list[float | None]:
    """For each name the median over the runs."""
    return [middle([run.get(name) for run in runs]) for name in names]


# ---------------------------------------------------------------- the ground truth


@dataclass(frozen=True, slots=True)
class Truth:
    """The server's log, by request in order of arrival, all times in ns.

    received: stamp of each request's last byte; ended: its answer's end, -1 if it never came; sends: (requests x
    tokens) the time before each token's send, -1 where none was.
    """

    received: np.ndarray
    ended: np.ndarray
    sends: np.ndarray
    steps: int
    late_steps: int
    dropped: int

    def true_ttft(self, requests: np.ndarray) -> np.ndarray:
        """ns from a request's last byte to the send of its first token."""
        return self.sends[requests, 0] - self.received[requests]

    def in_flight(self, requests: np.ndarray) -> float:
        """Requests at the server, mean over the time from the first to the last arrival among `requests`."""
        begin, end = self.received[requests].min(), self.received[requests].max()
        if end == begin:
            return float(len(requests))
        ended = np.where(self.ended < 0, end, self.ended)
        inside = np.minimum(ended, end) - np.maximum(self.received, begin)
        return float(np.clip(inside, 0, None).sum() / (end - begin))

    def span(self, requests: np.ndarray) -> tuple[int, int]:
        """(first arrival, last end) among `requests`."""
        return int(self.received[requests].min()), int(self.ended[requests].max())

    def sent_between(self, begin: int, end: int) -> int:
        """Tokens sent to anyone in that time."""
        return int(((self.sends >= begin) & (self.sends <= end)).sum())


def read_truth(path: Path) -> Truth:
    """Read a log written by `fastload.sim.truth`."""
    written, dropped, steps, late = np.fromfile(path, "<i8", 4)
    log = np.fromfile(path, calibration.RECORD, offset=_emit.HEADER_BYTES)[:written]
    requests = int(log["request"].max()) + 1 if len(log) else 0
    received, ended = np.full(requests, -1), np.full(requests, -1)
    is_received, is_ended = log["token"] == _emit.RECEIVED, log["token"] == _emit.ENDED
    received[log["request"][is_received]] = log["ns"][is_received]
    ended[log["request"][is_ended]] = log["ns"][is_ended]
    tokens = log[~(is_received | is_ended)]
    sends = np.full((requests, int(tokens["token"].max()) + 1 if len(tokens) else 1), -1)
    sends[tokens["request"], tokens["token"]] = tokens["ns"]
    return Truth(received, ended, sends, int(steps), int(late), int(dropped))


def quantiles(values: np.ndarray, *points: float) -> list[float]:
    """Percentiles by nearest rank."""
    return [float(value) for value in np.percentile(values, points, method="inverted_cdf")]


# ---------------------------------------------------------------- fastload's own client against it


class _Tee:
    """The trace's writer, and the blocks beside it: the join wants every event's own read time."""

    def __init__(self, writer: RunWriter) -> None:
        self.writer = writer
        self.blocks: list[_timing.Block] = []
        self.begin_level, self.end_level, self.finished = writer.begin_level, writer.end_level, writer.finished

    def add_block(self, block: _timing.Block) -> None:
        """Keep it and pass it on."""
        self.blocks.append(block)
        self.writer.add_block(block)


Server = Callable[[truth.Pace, Path, int | None], AbstractContextManager[str]]


def drive(
    concurrency: int,
    requests: int,
    tokens: int,
    ttft_ms: float,
    step_ms: float,
    stamp: str = "kernel",
    server: Server = truth.start,
    tls: TlsOptions | None = None,
) -> dict[str, Any]:
    """Run the real client (supervisor beside the server, measurer on its core) at one level.

    `server` yields its URL and leaves a log as the ground-truth server does; `tls` for an https one.
    Gives `calibration.level_figures` (every token joined with its send), and the server's `late_steps`, `dropped`.
    """
    pin(SERVER_CPU)
    with tempfile.TemporaryDirectory(prefix="fastload-bench-") as folder:
        log = Path(folder) / "log"
        writer = create_run(folder, "bench", {})
        tee = _Tee(writer)
        with server(truth.Pace(ttft_ms, step_ms), log, core(SERVER_CPU)) as url:
            at = urlsplit(url)
            assert at.hostname and at.port
            where = (at.hostname, at.port)
            address = Address(*where, socket.AF_INET, where, at.scheme, tls=tls, server_name=at.hostname)
            target = Target(url, address, "/v1", at.netloc, MODEL, True, (MODEL,), {}, None, 0.0, None)
            lengths = plans.fit(lambda texts: [len(text.split()) + 4 for text in texts], 32, 1, True)
            levels = plans.levels((concurrency,), 1, 0, requests, None, 0)
            plan = plans.build(levels, MODEL, "chat", tokens, lengths)
            options = supervisor.LoadOptions(cpu=core(CLIENT_CPU), stamp=stamp)
            before = os.times()
            outcome = supervisor.run(plan, target, None, {}, tee, options, lambda _: None, supervisor.Stop())
            after = os.times()
        writer.close("complete")
        if outcome.died or outcome.stopped or not outcome.levels:
            raise SystemExit(f"the run against the ground-truth server failed: {outcome.died or outcome.stopped}")
        facts = outcome.levels[0]
        whole = read_truth(log)
        records = np.fromfile(log, calibration.RECORD, offset=_emit.HEADER_BYTES)
        rows = open_run(writer.path).requests(f"00-c{concurrency}")
    own = sum(after[:2]) - sum(before[:2])
    seen = facts.instrument
    spent = calibration.Spent(
        measurer_cpu_ns=int(str(seen["cpu_ns"])),
        supervisor_cpu_ns=round(own * 1e9),
        wall_ns=facts.ended_ns - facts.started_ns,
        events=int(str(seen["events"])),
    )
    found = calibration.arrivals([block for block in tee.blocks if block.level == facts.index])
    # the first request the server saw is the run's warm-up
    level = calibration.level_figures(
        rows, found, records[records["request"] > 0], concurrency, str(seen["stamps"]), spent
    )
    if level["unmatched"] or level["failed"]:
        raise SystemExit(f"{level['unmatched']} tokens unmatched, {level['failed']} requests failed: no figures")
    return {**level, "late_steps": whole.late_steps, "steps": whole.steps, "dropped": whole.dropped}
