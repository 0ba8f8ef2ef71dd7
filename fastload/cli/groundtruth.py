"""The measuring part of `fastload calibrate`: the real client against a server that logs when it sent what.

One server has one pace, so levels of one pace share a server and a run. At each level's end its trace is read back and
joined with the log; nothing of a level stays in memory but its figures.
"""

import contextlib
import dataclasses
import os
import resource
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from fastload import _timing, plan
from fastload.analysis import calibration
from fastload.analysis.calibration import ENDED, RECEIVED, RECORD, Spent
from fastload.cli import display
from fastload.errors import TargetError, TraceError
from fastload.load import supervisor
from fastload.load.supervisor import LevelFacts, Stop
from fastload.load.target import Address, Target
from fastload.plan import Level, Plan
from fastload.sim import _emit, truth
from fastload.trace import RunWriter, create_run, open_run
from fastload.trace.layout import level_dir

ROUNDS = 4
BIG_ROUNDS = 3  # from 1024 on
FEWEST_REQUESTS = 12
PROMPT_TOKENS = 32
SATURATE = (64, 2048, 3)  # concurrency, tokens an answer, rounds, without pace
LADDER_CONCURRENCY = 1024
LADDER_MS = (30.0, 20.0, 15.0, 10.0, 7.5, 5.0)
LADDER_ROUNDS = 2
LADDER_TOKENS = 64
PACE_LIMIT = 0.02  # how far the server's own pace may be off before it is the server that is measured
SETTLE_S = 1.0  # how long the log may lag behind the client: the end is noted after its send


def planned_levels(concurrencies: Sequence[int], rounds: int | None) -> tuple[Level, ...]:
    """Return the levels with their requests: so many rounds, or what a level needs for its figures."""
    made = []
    for at, one in enumerate(concurrencies):
        waves = rounds or (ROUNDS if one < 1024 else BIG_ROUNDS)
        (level,) = plan.levels((one,), waves, 0 if rounds else FEWEST_REQUESTS, None, None, 0)
        made.append(dataclasses.replace(level, index=at))
    return tuple(made)


@dataclass(slots=True)
class Bench:
    """Where and how a calibration runs, and what the self-test has found so far."""

    cpu: int
    server_cpu: int
    stamp: str
    selftest: bool
    shown: display.Display
    stop: Stop
    differences: list[str] = field(default_factory=list)
    tokens: int = 0
    requests: int = 0

    def measure(self, step_ms: float, levels: Sequence[Level], osl: int) -> list[dict[str, Any]]:
        """Run the levels against one server of this pace; the figures of each (analysis.calibration).

        TargetError when the server does not come up, the measurer dies or nothing succeeds any more. After a signal
        the levels that were finished.
        """
        if self.stop.signal is not None:
            return []
        with tempfile.TemporaryDirectory(prefix="fastload-calibrate-") as place:
            log = Path(place) / "sends"
            with truth.start(truth.Pace(step_ms=step_ms), log, self.server_cpu) as url:
                target = _target(url)
                lengths = plan.fit(_count, PROMPT_TOKENS, 1, exact=True)
                order = plan.build(levels, target.model, "chat", osl, lengths)
                writer = create_run(Path(place), "calibrate", {"target": {"url": url}, "simulated": True})
                sink = Joining(self, order, writer, log, step_ms)
                outcome = supervisor.run(
                    order,
                    target,
                    None,
                    {},
                    sink,
                    supervisor.LoadOptions(cpu=self.cpu, stamp=self.stamp),
                    self.shown.show,
                    self.stop,
                )
        if outcome.died or outcome.stopped:
            raise TargetError(f"calibrate: {outcome.died or outcome.stopped}")
        if outcome.unwritten:
            raise TraceError(f"calibrate: {outcome.unwritten}")
        return sink.levels


def _count(texts: Sequence[str]) -> list[int | None]:
    """Count words: the server reads no prompt."""
    return [len(text.split()) for text in texts]


def _target(url: str) -> Target:
    port = urlsplit(url).port or 0
    address = Address("127.0.0.1", port, socket.AF_INET, ("127.0.0.1", port), "http")
    model = "fastload-truth"
    return Target(url, address, "/v1", f"127.0.0.1:{port}", model, True, (model,), {}, None, 0.0, None)


class Joining:
    """The sink of a calibration: a real trace is written, and at a level's end it is joined with the server's log.

    One level is in memory at a time. `levels` has the figures of the finished ones.
    """

    def __init__(self, bench: Bench, plan: Plan, writer: RunWriter, log: Path, step_ms: float) -> None:
        self.bench, self.plan, self.writer, self.log, self.step_ms = bench, plan, writer, log, step_ms
        self.levels: list[dict[str, Any]] = []
        self._blocks: list[_timing.Block] = []
        self._read = 0
        self._before = (0, 0, 0)
        self._core_before: tuple[int, int] | None = None

    def begin_level(
        self, index: int, concurrency: int, planned: Callable[[int], int | None], max_tokens: int
    ) -> None:
        """Begin it in the trace; note what was spent until now."""
        self.writer.begin_level(index, concurrency, planned, max_tokens)
        self._blocks.clear()
        self._before, self._core_before = _spent_so_far(), _core_so_far(self.bench.cpu)

    def add_block(self, block: _timing.Block) -> None:
        """Keep the block for the join, and write it."""
        self._blocks.append(block)
        self.writer.add_block(block)

    def finished(self, level_index: int) -> list[dict[str, object]]:
        """The rows so far."""
        return self.writer.finished(level_index)

    def end_level(self, facts: LevelFacts) -> None:
        """Finish the level's trace, read it back and join it."""
        self.writer.end_level(facts)
        spent = self._spent(facts)
        log = self._new_records()
        if facts.index < 0 or not facts.complete:
            return
        directory = level_dir(facts.index, facts.concurrency)
        requests = open_run(self.writer.path, repair=False).requests(directory).sort_by("request")
        found = calibration.arrivals(self._blocks)
        self._blocks.clear()
        stamps = str(facts.instrument["stamps"])
        figures = calibration.level_figures(requests, found, log, facts.concurrency, stamps, spent)
        self.levels.append({"step_ms": self.step_ms} | figures)
        if self.bench.selftest:
            bodies = {number: len(self.plan.body(number)) for number in requests["request"].to_pylist()}
            wrong = calibration.differences(requests, found, log, self.plan.osl, bodies)
            self.bench.differences += [f"c={facts.concurrency}: {one}" for one in wrong]
            self.bench.tokens += figures["tokens"]
            self.bench.requests += figures["requests"]

    def _spent(self, facts: LevelFacts) -> Spent:
        (own, wait, wakes), core = _spent_so_far(), _core_so_far(self.bench.cpu)
        told = facts.instrument
        cpu, events = told["cpu_ns"], told["events"]
        assert isinstance(cpu, int | None) and isinstance(events, int)
        return Spent(
            measurer_cpu_ns=cpu or 0,
            supervisor_cpu_ns=own - self._before[0],
            wall_ns=facts.ended_ns - facts.started_ns,
            events=events,
            wait_ns=wait - self._before[1] if wakes else None,
            wakes=wakes - self._before[2],
            others_share=_others(self._core_before, core, cpu or 0),
        )

    def _new_records(self) -> Any:
        """Return the log's records since the last call, once every request in it has its end."""
        for _ in range(round(SETTLE_S / 0.02)):
            records = read_log(self.log, self._read)
            if (records["token"] == RECEIVED).sum() == (records["token"] == ENDED).sum():
                break
            time.sleep(0.02)
        self._read += len(records)
        return records


def read_log(path: Path, since: int = 0) -> Any:
    """Return the log's records (analysis.calibration.RECORD) from number `since` on; the server may still write.

    TargetError when the log was too small for what was sent.
    """
    written, dropped = np.fromfile(path, "<i8", 2).tolist()
    if dropped:
        raise TargetError(f"calibrate: the server's log was full, {dropped} sends are not in it; give a smaller --osl")
    return np.fromfile(path, RECORD, written - since, offset=_emit.HEADER_BYTES + since * RECORD.itemsize)


def _spent_so_far() -> tuple[int, int, int]:
    """Return our own CPU time, and of our measurer the time it waited for a core and how often it got one (ns, ns, n).

    The last two are 0 where the kernel does not tell.
    """
    usage = resource.getrusage(resource.RUSAGE_SELF)
    own = round((usage.ru_utime + usage.ru_stime) * 1e9)
    try:
        _, wait, wakes = (Path("/proc") / str(_measurer()) / "schedstat").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return own, 0, 0
    return own, int(wait), int(wakes)


def _core_so_far(cpu: int) -> tuple[int, int] | None:
    """Return (now, ns the core has worked for programs or was stolen from it), None where the kernel does not tell.

    Interrupts are left out: much of them is the network's work for us.
    """
    try:
        lines = Path("/proc/stat").read_text(encoding="ascii").splitlines()
        user, nice, system, _idle, _iowait, _irq, _softirq, steal = next(
            map(int, line.split()[1:9]) for line in lines if line.startswith(f"cpu{cpu} ")
        )
    except (OSError, ValueError, StopIteration):
        return None
    return _timing.now_ns(), (user + nice + system + steal) * 10**9 // os.sysconf("SC_CLK_TCK")


def _others(before: tuple[int, int] | None, after: tuple[int, int] | None, own_ns: int) -> float | None:
    """Return the share of a core that was used by others, of the time between two looks at it."""
    if before is None or after is None or after[0] <= before[0]:
        return None
    return max(0.0, (after[1] - before[1] - own_ns) / (after[0] - before[0]))


def _measurer() -> int:
    """Return the process id of the measurer: the child of ours that runs its module. OSError without one."""
    us = os.getpid()
    for place in Path("/proc").iterdir():
        if not place.name.isdigit():
            continue
        with contextlib.suppress(OSError, ValueError):
            parent = int((place / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
            if parent == us and b"fastload.load.measurer" in (place / "cmdline").read_bytes().split(b"\0"):
                return int(place.name)
    raise ProcessLookupError("no measurer")


def saturate(bench: Bench) -> dict[str, Any]:
    """Return the highest rate without pace, and the highest paced one at which stamps hold."""
    concurrency, tokens, rounds = SATURATE
    unpaced = bench.measure(0.0, planned_levels([concurrency], rounds), tokens)
    best, end = None, f"no faster pace than {LADDER_MS[-1]:g} ms was tried"
    for step in LADDER_MS:
        found = bench.measure(step, planned_levels([LADDER_CONCURRENCY], LADDER_ROUNDS), LADDER_TOKENS)
        if not found:
            break
        itl = found[0]["true_itl_ms"]
        if itl is None or abs(itl / step - 1) > PACE_LIMIT:
            end = f"at {step:g} ms the server did not keep its pace"
            break
        if not calibration.stamps_hold(found[0]):
            own = found[0][found[0]["stamp_source"]]
            end = f"at {step:g} ms the P99 was {own['stamp_us']['p99']:.0f} us"
            break
        best = found[0]
    busy = bool(unpaced) and (unpaced[0]["cpu_share"] or 0.0) > 0.9
    return {
        "unpaced": unpaced[0] if unpaced else None,
        "limited_by": "the client" if busy else "the server",
        "paced": best,
        "paced_end": end,
    }
