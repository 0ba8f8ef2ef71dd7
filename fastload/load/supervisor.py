"""The supervisor's side of a run: starts the measurer, feeds it the plan, takes its blocks, and keeps the account.

Everything slow happens here, in the process that holds no socket of the load: making bodies, reading blocks, writing
Parquet (through the sink), drawing. The measurer is told what to do by JSON lines and answers the same way.
"""

import base64
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from fastload import _timing
from fastload.errors import TargetError, TraceError
from fastload.load import shared
from fastload.load.hiding import protected
from fastload.load.process import END_S, DiedError, Process
from fastload.load.progress import Meter, Progress
from fastload.load.secrets import Secret
from fastload.load.target import Target
from fastload.load.target_client import api_headers
from fastload.plan import Level, Plan, refused_field, without

WATCH_S = 0.5
TICK_S = 0.1
START_S = 30.0
SLICE_REQUESTS = 256
SLICE_BYTES_GOAL = 4 << 20
REFUSALS = (400, 422, 500)  # how servers answer to a field they do not know; 500 where they pass it on as an argument


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How to load: limits in seconds, `stamp` "kernel" or "read", `max_failures` in a row (None: see load.patience)."""

    cpu: int | None = None
    connect_timeout_s: float = 10.0
    first_byte_timeout_s: float = 600.0
    idle_timeout_s: float = 60.0
    timeout_s: float = 3600.0
    max_failures: int | None = None
    respect_retry_after: bool = False
    save_text: bool = False
    stamp: str = "kernel"


@dataclass(frozen=True, slots=True)
class LevelFacts:
    """What the load knows of a finished level and the rows do not; stamps monotonic, in ns. `gave_up`: why, if so."""

    index: int
    concurrency: int
    complete: bool
    started_ns: int
    ended_ns: int
    measured_planned: int | None
    measured_done: int
    instrument: dict[str, object]
    gave_up: str | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended. `plan` as it was sent after the warm-up; `clock`: anchors and offsets; `interrupted`: the
    signal; `died`, `stopped`, `unwritten` (the trace could not be): sentences."""

    levels: tuple[LevelFacts, ...]
    plan: Plan
    clock: dict[str, object]
    interrupted: int | None
    died: str | None
    stopped: str | None
    unwritten: str | None


@dataclass(slots=True)
class Stop:
    """Set by a signal handler, looked at by the run."""

    signal: int | None = None
    at_once: bool = False

    def request(self, number: int) -> None:
        """Ask the run to stop because of signal `number`: what the measurer has is awaited."""
        self.signal = number

    def hurry(self) -> None:
        """Ask it to wait for nobody any more, and only to keep what is sealed."""
        self.at_once = True


class Sink(Protocol):
    """Where blocks go: the trace room's writer. What raises TraceError has kept what it was given, in memory."""

    def begin_level(
        self, index: int, concurrency: int, planned: Callable[[int], int | None], max_tokens: int
    ) -> None:
        """Rows that come belong to this level; `planned` gives a request's planned prompt tokens."""

    def add_block(self, block: _timing.Block) -> None:
        """Take a sealed block."""

    def end_level(self, facts: LevelFacts) -> None:
        """The level is over: write its part."""

    def finished(self, level_index: int) -> list[dict[str, object]]:
        """Rows of the level so far, as in `requests`."""


def run(
    plan: Plan,
    target: Target,
    key: Secret | None,
    headers: Mapping[str, str],
    sink: Sink,
    options: LoadOptions,
    watch: Callable[[Progress], None],
    stop: Stop,
) -> Outcome:
    """Run the plan's levels against the target, after one warm-up request that is awaited.

    Raises TargetError when the warm-up request fails: there is then nothing to measure. Whatever happens later is in
    the Outcome and in the rows. A sink that raises TraceError ends the run in order.
    """
    anchors = [_anchor()]
    session = _Session(plan, target, key, headers, sink, options, watch, stop)
    stopped = unwritten = None
    try:
        session.start()
        session.warm_up()
        stopped = _run_levels(session)
    except DiedError as error:
        session.died = str(error)
    except TraceError as error:
        unwritten = str(error)
    finally:
        session.process.end()
    anchors.append(_anchor())
    return Outcome(
        levels=tuple(session.facts),
        plan=session.plan,
        clock={"anchors": anchors, "offsets": session.brackets},
        interrupted=stop.signal,
        died=session.died,
        stopped=stopped,
        unwritten=unwritten,
    )


def _run_levels(session: "_Session") -> str | None:
    """Run every level in turn; why some were not, None if all were.

    A level that gave up, or in which nothing succeeded, proves that so many streams are too many: levels with as many
    or more are left out. Before one with fewer a request alone must succeed, else the server is gone.
    """
    failed: Level | None = None
    why, left_out = "", []
    for level in session.plan.levels:
        if session.stop.signal is not None:
            return why or None
        if failed is not None and (level.concurrency >= failed.concurrency or not session.is_there()):
            left_out.append(str(level.concurrency))
            continue
        end = session.level(level, reuse=session.kept, learn=False)
        said = end["gave_up"] or end["failed"]
        if said:
            failed = level
            why = f"level {level.concurrency}: {said}"
    if len(left_out) == 1:
        return f"{why}; level {left_out[0]} was not tried"
    return f"{why}; levels {', '.join(left_out)} were not tried" if left_out else why or None


def _anchor() -> dict[str, int]:
    return {"utc_ns": _timing.realtime_ns(), "mono_ns": _timing.now_ns()}


@dataclass(slots=True)
class _Level:
    """A level while it runs: where the supply of requests stands, and its end message."""

    level: Level
    meter: Meter
    started_ns: int
    free: list[int]  # slices the measurer does not hold
    next_request: int
    end: dict[str, Any] | None = None
    unwritten: TraceError | None = None  # the sink can keep no more
    asleep_ns: int = field(default_factory=lambda: _asleep_ns())  # of the machine, before the level


class _Session:
    """One measurer and the account of what it was given and what it gave."""

    def __init__(
        self,
        plan: Plan,
        target: Target,
        key: Secret | None,
        headers: Mapping[str, str],
        sink: Sink,
        options: LoadOptions,
        watch: Callable[[Progress], None],
        stop: Stop,
    ) -> None:
        self.plan, self.target, self.sink, self.options = plan, target, sink, options
        self.watch, self.stop = watch, stop
        self.head = _request_head(target, plan.endpoint, key, headers)
        self.next_request = 0
        self.warm_ups = 0
        self.kept = True
        self.facts: list[LevelFacts] = []
        self.brackets: list[dict[str, int]] = []
        self.ready: dict[str, Any] | None = None
        self.now: _Level | None = None
        self.died: str | None = None
        self.process = Process()

    # ---- the process

    def start(self) -> None:
        """Spawn the measurer and wait until it is ready."""
        self.process.start()
        address, options = self.target.address, self.options
        streams = max(level.concurrency for level in self.plan.levels)
        self.process.tell(
            do="hello",
            secrets=protected(),
            slots=streams,
            head=self.head,
            family=int(address.family),
            sockaddr=list(address.sockaddr),
            tunnel=None if address.tunnel is None else address.tunnel.reveal(),
            tls_options=None if address.tls is None else asdict(address.tls),
            server_name=address.server_name,
            stamp=options.stamp,
            cpu=options.cpu,
            save_text=options.save_text,
            max_failures=options.max_failures,
            respect_retry_after=options.respect_retry_after,
            limits={
                "connect_s": options.connect_timeout_s,
                "first_byte_s": options.first_byte_timeout_s,
                "idle_s": options.idle_timeout_s,
                "total_s": options.timeout_s,
            },
        )
        deadline = _timing.now_ns() + int(START_S * 1e9)
        while self.ready is None:
            self.listen(TICK_S)
            if _timing.now_ns() > deadline:
                raise DiedError(f"the measuring process was not ready within {START_S:g} s")

    def listen(self, wait_s: float) -> None:
        """Wait for messages up to `wait_s`, and handle them. Raises DiedError when the measurer is gone."""
        if self.stop.at_once:
            self.process.kill("the measuring process was killed by a second signal")
        for message in self.process.hear(wait_s):
            self.on_message(message)

    def on_message(self, message: dict[str, Any]) -> None:
        """One line from the measurer."""
        match message["do"]:
            case "ready":
                self.ready = message
            case "begun":
                assert self.now is not None
                self.now.meter.begin()
            case "sealed":
                block = self.process.read(message["index"])
                if block is not None:
                    self.keep(block)
                    self.process.release(message["index"])
            case "free":
                assert self.now is not None
                self.now.free.append(message["index"])
            case "level_done":
                assert self.now is not None
                self.now.end = message

    def keep(self, block: _timing.Block) -> None:
        """Hand a block to the sink. If that cannot keep more, the level is ended for it."""
        assert self.now is not None
        self.now.meter.count(block)
        try:
            self.sink.add_block(block)
        except TraceError as error:
            self.now.unwritten = error

    # ---- levels

    def warm_up(self) -> None:
        """One request alone, and what it teaches: is the connection kept, does an event hold several tokens?

        If it does, a second one asks for continuous usage, so that tokens are counted event by event; where the server
        refuses or ignores that, it is not asked for. Fields that a run can do without and the server refuses are left
        out, one warm-up request each. Raises TargetError when the last of them fails.
        """
        row = self.warm_up_once()
        while row is not None and row["http_status"] in REFUSALS:
            field = refused_field(str(row["error"]))
            fewer = self.plan if field is None else without(self.plan, field)
            if fewer is self.plan:
                break
            self.plan = fewer
            row = self.warm_up_once()
        if row is None:
            return
        if row["status"] != "ok":
            said = row["error"] or row["http_status"]
            raise TargetError(
                f"--url {self.target.url}: the warm-up request failed ({row['status']}: {said}); nothing was measured"
            )
        tokens, events = row["completion_tokens"], row["text_events"]
        # the end token of a stop has no event of its own
        bundles = isinstance(tokens, int) and isinstance(events, int) and events + 1 < tokens
        if bundles and row["token_source"] == "usage" and self.plan.asks_usage:
            plain, kept = self.plan, self.kept
            self.plan = replace(plain, continuous_usage=True)
            row = self.warm_up_once()
            if row is None or row["status"] != "ok" or row["token_source"] != "continuous_usage":
                self.plan, self.kept = plain, kept

    def is_there(self) -> bool:
        """Does the server answer a request alone? It is a warm-up row."""
        row = self.warm_up_once()
        return row is not None and row["status"] == "ok"

    def warm_up_once(self) -> dict[str, object] | None:
        """Send one warm-up request; its row, or None when the run was told to stop."""
        self.warm_ups += 1
        index = -self.warm_ups
        end = self.level(Level(index, 1, 0, None, 1), reuse=True, learn=True)
        rows = self.sink.finished(index)
        if self.stop.signal is not None:
            return None
        row = rows[0] if rows else {"status": "failed", "error": end["gave_up"], "http_status": None}
        if row["status"] != "ok":  # the measurer's first judgement knows the end of the answer, not what it said
            assert self.now is not None
            self.watch(replace(self.now.meter.read(ended=True, stopping=True), done=0, failed=1))
        return row

    def level(self, level: Level, *, reuse: bool, learn: bool) -> dict[str, Any]:
        """Run one level to its end, an order to stop, or the measurer's death; its end message."""
        planned = level.measured
        self.sink.begin_level(level.index, level.concurrency, self.plan.prompt_tokens_planned, self.plan.osl)
        meter = Meter(level, len(self.plan.levels), self.process.live)
        self.now = now = _Level(level, meter, _timing.now_ns(), list(range(shared.SLICES)), self.next_request)
        self.process.tell(
            do="level",
            level=level.index,
            concurrency=level.concurrency,
            warmup=level.warmup,
            measured=planned if planned is not None else 1 << 60,
            duration_s=level.duration_s,
            reuse=reuse,
            learn=learn,
        )
        cancel_by: int | None = None
        seen_ns = 0
        try:
            while now.end is None:
                if cancel_by is None:
                    self.supply(now)
                self.listen(TICK_S)
                clock = _timing.now_ns()
                if (self.stop.signal is not None or now.unwritten is not None) and cancel_by is None:
                    self.process.tell(do="cancel")
                    cancel_by = clock + int(END_S * 1e9)
                if cancel_by is not None and clock > cancel_by:
                    self.process.kill(f"the measuring process did not stop within {END_S:g} s and was killed")
                if clock - seen_ns > WATCH_S * 1e9:
                    seen_ns = clock
                    self.watch(meter.read(ended=False, stopping=cancel_by is not None))
        except DiedError as error:
            self.died = str(error)
            for block in self.process.abandoned():
                self.keep(block)
            self.watch(meter.read(ended=True, stopping=True))
            self.end_level(now, died=True)
            raise
        self.watch(meter.read(ended=True, stopping=cancel_by is not None))
        self.kept = now.end["kept"]
        self.next_request = now.end["unsent"] if now.end["unsent"] >= 0 else now.next_request
        self.end_level(now, died=False)
        if now.unwritten is not None:
            raise now.unwritten
        return now.end

    def supply(self, now: _Level) -> None:
        """Keep the measurer's slices full: bodies are made here, ahead of their time."""
        most = min(SLICE_REQUESTS, max(16, now.level.concurrency))
        while now.free and now.end is None and self.stop.signal is None:
            bodies: list[tuple[int, bytes]] = []
            size = 0
            while len(bodies) < most and size < SLICE_BYTES_GOAL and self.stop.signal is None:
                body = self.plan.body(now.next_request)
                bodies.append((now.next_request, body))
                size += len(body)
                now.next_request += 1
            if not bodies:
                return
            index = now.free.pop(0)
            shared.put_slice(self.process.slices, index, bodies)
            self.process.tell(do="slice", level=now.level.index, index=index, requests=len(bodies))
            self.listen(0)

    def end_level(self, now: _Level, *, died: bool) -> None:
        """Close the level's account and its part of the trace."""
        counters, end = now.meter.counters(), now.end or {}
        started = end.get("started_ns", now.started_ns)
        ended = end.get("ended_ns", _timing.now_ns())
        delay = now.meter.delay
        for mono_ns, offset_ns, width_ns in end.get("brackets", []):
            self.brackets.append({"mono_ns": mono_ns, "offset_ns": offset_ns, "bracket_ns": width_ns})
        facts = LevelFacts(
            index=now.level.index,
            concurrency=now.level.concurrency,
            complete=not (died or end["cancelled"] or end["gave_up"] or end["short"]),
            started_ns=started,
            ended_ns=ended,
            # With a time limit too, the number is the most there may be and no promise.
            measured_planned=now.level.measured if now.level.duration_s is None else None,
            measured_done=counters["measured_done"],
            instrument={
                "client_delay_us": {
                    "p50": _us(delay.quantile(0.5)),
                    "p99": _us(delay.quantile(0.99)),
                    "max": _us(delay.max_ns),
                },
                "client_delay_histogram": base64.b64encode(delay.to_bytes()).decode(),
                "cpu_share": end["cpu_ns"] / max(1, ended - started) if end else None,
                "cpu_ns": end.get("cpu_ns"),
                "loop_lag_max_ms": end["lag_max_ns"] / 1e6 if end else None,
                "gc_pauses": end.get("gc_pauses"),
                "stamps": (self.ready or {}).get("stamps"),
                "events_per_read": counters["events"] / counters["reads"] if counters["reads"] else None,
                "connections_kept": self.kept,
                "tls": end.get("tls"),
                "stalled_ms": counters["stalled_ns"] / 1e6,
                "suspended_ms": max(0, _asleep_ns() - now.asleep_ns) / 1e6,
                **{
                    name: counters[name]
                    for name in ("reads", "events", "stray_bytes", "stale_retries", "idle_closed", "stale_events",
                                 "unstamped", "clamped", "rebracketed", "late_sends", "clock_steps")
                },
            },
            gave_up=end.get("gave_up") or None,
        )
        if now.level.index >= 0:
            self.facts.append(facts)
        self.sink.end_level(facts)


def _request_head(target: Target, endpoint: str, key: Secret | None, headers: Mapping[str, str]) -> str:
    """The head of every request but its content-length, which the measurer adds with the body."""
    from fastload import __version__

    fields = {
        "Host": target.host_header,
        "User-Agent": f"fastload/{__version__}",
        "Accept": "text/event-stream",
        "Accept-Encoding": "identity",
        "Content-Type": "application/json",
    }
    fields |= api_headers(endpoint, key)
    own = {name.lower(): name for name in fields}
    for name, value in headers.items():
        fields[own.get(name.lower(), name)] = value
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"POST {target.request_path(endpoint)} HTTP/1.1\r\n{lines}"


def _asleep_ns() -> int:
    """How long the machine has been suspended since it was booted: CLOCK_MONOTONIC does not count that."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) - time.clock_gettime_ns(time.CLOCK_MONOTONIC)


def _us(ns: int | None) -> float | None:
    return None if ns is None else ns / 1e3
