"""The supervisor's side of a run: starts the measurer, feeds it the plan, takes its blocks, and keeps the account.

Everything slow happens here, in the process that holds no socket of the load: making bodies, reading blocks, writing
Parquet (through the sink), drawing. The measurer is told what to do by JSON lines and answers the same way.
"""

import base64
import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

import orjson

from fastload import _client, _timing
from fastload.errors import TargetError
from fastload.load import shared
from fastload.load.secrets import Secret
from fastload.load.target import Target
from fastload.load.target_client import api_headers
from fastload.plan import Level, Plan, refused_field, without

WATCH_S = 0.5
TICK_S = 0.1
RATE_NS = 3_000_000_000  # the live rate is of so many seconds
CANCEL_S = 1.2  # how long a measurer may take to hand over what it has
START_S = 30.0
SLICE_REQUESTS = 256
SLICE_BYTES_GOAL = 4 << 20
WARMUP_LEVEL = -1
REFUSALS = (400, 422, 500)  # how servers answer to a field they do not know; 500 where they pass it on as an argument


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How to load: limits in seconds, `stamp` "kernel" or "read", `max_failures` None for max(50, 3 x streams)."""

    cpu: int | None = None
    connect_timeout_s: float = 10.0
    first_byte_timeout_s: float = 600.0
    idle_timeout_s: float = 60.0
    timeout_s: float = 3600.0
    max_failures: int | None = None
    save_text: bool = False
    stamp: str = "kernel"


@dataclass(frozen=True, slots=True)
class Progress:
    """What a display shows of a running level. Times in s or ms as named; None where nothing was measured yet."""

    level: int
    concurrency: int
    levels: int
    phase: str  # "warm-up", "measuring" or "draining"
    done: int
    planned: int | None
    failed: int
    in_flight: int
    events: int
    tokens_per_s: float | None
    ttft_p50_ms: float | None
    ttft_p90_ms: float | None
    itl_p50_ms: float | None
    itl_p90_ms: float | None
    delay_p50_us: float | None
    delay_p99_us: float | None
    elapsed_s: float
    eta_s: float | None


@dataclass(frozen=True, slots=True)
class LevelFacts:
    """What the load knows of a finished level and the rows do not; stamps monotonic, in ns."""

    index: int
    concurrency: int
    complete: bool
    started_ns: int
    ended_ns: int
    measured_planned: int | None
    measured_done: int
    instrument: dict[str, object]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended. `plan` as it was sent after the warm-up; `clock`: anchors and offsets; `interrupted`: the
    signal; `died`, `stopped`: sentences."""

    levels: tuple[LevelFacts, ...]
    plan: Plan
    clock: dict[str, object]
    interrupted: int | None
    died: str | None
    stopped: str | None


@dataclass(slots=True)
class Stop:
    """Set by a signal handler, looked at by the run."""

    signal: int | None = None

    def request(self, number: int) -> None:
        """Ask the run to stop because of signal `number`."""
        self.signal = number


class Sink(Protocol):
    """Where blocks go: the trace room's writer."""

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
    the Outcome and in the rows.
    """
    anchors = [_anchor()]
    session = _Session(plan, target, key, headers, sink, options, watch, stop)
    died = stopped = None
    try:
        session.start()
        session.warm_up()
        for level in plan.levels:
            if stop.signal is not None:
                break
            end = session.level(level, reuse=session.kept, learn=False)
            if end["gave_up"]:
                stopped = f"level {level.concurrency}: {end['gave_up']}; later levels were not tried"
                break
    except _DiedError as error:
        died = str(error)
    finally:
        session.close()
    anchors.append(_anchor())
    return Outcome(
        levels=tuple(session.facts),
        plan=session.plan,
        clock={"anchors": anchors, "offsets": session.brackets},
        interrupted=stop.signal,
        died=died,
        stopped=stopped,
    )


class _DiedError(Exception):
    """The measurer ended without being told to."""


def _anchor() -> dict[str, int]:
    return {"utc_ns": _timing.realtime_ns(), "mono_ns": _timing.now_ns()}


@dataclass(slots=True)
class _Level:
    """A level while it runs: where the supply of requests stands, and its end message."""

    level: Level
    started_ns: int
    free: list[int]  # slices the measurer does not hold
    next_request: int
    end: dict[str, Any] | None = None
    history: list[tuple[int, int]] = field(default_factory=list)  # (ns, text events), for the rate


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
        self.kept = True
        self.facts: list[LevelFacts] = []
        self.brackets: list[dict[str, int]] = []
        self.ready: dict[str, Any] | None = None
        self.pending = b""
        self.now: _Level | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self.overdue = False  # it was told to stop and did not
        sizes = (shared.BLOCKS_BYTES, shared.SLICES * shared.SLICE_BYTES, _client.MEMORY_BYTES)
        self.fds = [
            shared.create(name, size) for name, size in zip(("blocks", "plan", "live"), sizes, strict=True)
        ]
        self.blocks, self.slices, live = (
            shared.attach(fd, size) for fd, size in zip(self.fds, sizes, strict=True)
        )
        self.live = shared.Live(live)
        self.out, self.out_writer = os.pipe()

    # ---- the process

    def start(self) -> None:
        """Spawn the measurer and wait until it is ready."""
        fds = [*self.fds, self.out_writer]
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "fastload.load.measurer", *map(str, fds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=fds,
            process_group=0,  # a Ctrl-C of the terminal is for us alone, from the measurer's first instruction on
        )
        os.close(self.out_writer)
        self.out_writer = -1
        address, options = self.target.address, self.options
        streams = max(level.concurrency for level in self.plan.levels)
        self.tell(
            do="hello",
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
            max_failures=max(50, 3 * streams) if options.max_failures is None else options.max_failures,
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
                raise _DiedError(f"the measuring process was not ready within {START_S:g} s")

    def close(self) -> None:
        """End the measurer, by pid, and take what it sealed."""
        process = self.process
        if process is not None:
            assert process.stdin is not None
            if process.poll() is None:
                self.tell(do="end")
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()  # writes what a dead measurer did not take
            try:
                process.wait(CANCEL_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for fd in (*self.fds, self.out, self.out_writer):
            if fd >= 0:
                os.close(fd)

    def tell(self, **command: object) -> None:
        """Send a command; a dead measurer is noticed by listen()."""
        assert self.process is not None and self.process.stdin is not None
        try:
            self.process.stdin.write(orjson.dumps(command) + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass

    def listen(self, wait_s: float) -> None:
        """Wait for messages up to `wait_s`, and handle them. Raises _DiedError when the measurer is gone."""
        readable, _, _ = select.select([self.out], [], [], wait_s)
        if not readable:
            return
        data = os.read(self.out, 1 << 20)
        if not data:
            assert self.process is not None
            code = self.process.wait()
            if self.overdue:
                raise _DiedError(f"the measuring process did not stop within {CANCEL_S:g} s and was killed")
            how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
            raise _DiedError(f"the measuring process ended {how}")
        *lines, self.pending = (self.pending + data).split(b"\n")
        for line in lines:
            self.on_message(orjson.loads(line))

    def on_message(self, message: dict[str, Any]) -> None:
        """One line from the measurer."""
        match message["do"]:
            case "ready":
                self.ready = message
            case "sealed":
                self.take_block(message["index"])
            case "free":
                assert self.now is not None
                self.now.free.append(message["index"])
            case "level_done":
                assert self.now is not None
                self.now.end = message

    def take_block(self, index: int) -> None:
        """Hand a sealed block to the sink and give it back."""
        block = _timing.read_block(self.blocks, index)
        if block is not None:
            self.sink.add_block(block)
            _timing.release_block(self.blocks, index)

    def take_abandoned(self) -> None:
        """After the measurer's death: the blocks it sealed and could not announce."""
        blocks = (_timing.read_block(self.blocks, index) for index in range(_timing.BLOCKS))
        for block in sorted((b for b in blocks if b is not None), key=lambda b: b.sequence):
            self.sink.add_block(block)

    # ---- levels

    def warm_up(self) -> None:
        """One request alone, and what it teaches: is the connection kept, does an event hold several tokens?

        If it does, a second one asks for continuous usage, so that tokens are counted event by event; where the server
        refuses or ignores that, it is not asked for. Fields that a run can do without and the server refuses are left
        out, one warm-up request each. Raises TargetError when the last of them fails.
        """
        index = WARMUP_LEVEL
        row = self.warm_up_once(index)
        while row is not None and row["http_status"] in REFUSALS:
            field = refused_field(str(row["error"]))
            fewer = self.plan if field is None else without(self.plan, field)
            if fewer is self.plan:
                break
            self.plan, index = fewer, index - 1
            row = self.warm_up_once(index)
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
            row = self.warm_up_once(index - 1)
            if row is None or row["status"] != "ok" or row["token_source"] != "continuous_usage":
                self.plan, self.kept = plain, kept

    def warm_up_once(self, index: int) -> dict[str, object] | None:
        """Send one warm-up request; its row, or None when the run was told to stop."""
        end = self.level(Level(index, 1, 0, None, 1), reuse=True, learn=True)
        rows = self.sink.finished(index)
        if self.stop.signal is not None:
            return None
        row = rows[0] if rows else {"status": "failed", "error": end["gave_up"], "http_status": None}
        if row["status"] != "ok":  # the measurer's first judgement knows the end of the answer, not what it said
            assert self.now is not None
            self.watch(replace(self.progress(self.now), done=0, failed=1))
        return row

    def level(self, level: Level, *, reuse: bool, learn: bool) -> dict[str, Any]:
        """Run one level to its end, an order to stop, or the measurer's death; its end message."""
        planned = level.measured
        self.sink.begin_level(level.index, level.concurrency, self.plan.prompt_tokens_planned, self.plan.osl)
        self.now = now = _Level(level, _timing.now_ns(), list(range(shared.SLICES)), self.next_request)
        self.tell(
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
                if self.stop.signal is not None and cancel_by is None:
                    self.tell(do="cancel")
                    cancel_by = clock + int(CANCEL_S * 1e9)
                if cancel_by is not None and clock > cancel_by:
                    assert self.process is not None
                    self.overdue = True
                    self.process.kill()
                if clock - seen_ns > WATCH_S * 1e9:
                    seen_ns = clock
                    self.watch(self.progress(now))
        except _DiedError:
            self.take_abandoned()
            self.end_level(now, died=True)
            raise
        self.watch(self.progress(now))
        self.kept = now.end["kept"]
        self.next_request = now.end["unsent"] if now.end["unsent"] >= 0 else now.next_request
        self.end_level(now, died=False)
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
            shared.put_slice(self.slices, index, bodies)
            self.tell(do="slice", level=now.level.index, index=index, requests=len(bodies))
            self.listen(0)

    def end_level(self, now: _Level, *, died: bool) -> None:
        """Close the level's account and its part of the trace."""
        counters, end = self.live.counters(), now.end or {}
        started = end.get("started_ns", now.started_ns)
        ended = end.get("ended_ns", _timing.now_ns())
        delay = self.live.delay
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
                **{
                    name: counters[name]
                    for name in ("reads", "events", "stray_bytes", "stale_retries", "idle_closed", "stale_events",
                                 "unstamped", "clamped", "rebracketed", "late_sends", "clock_steps")
                },
            },
        )
        if now.level.index >= 0:
            self.facts.append(facts)
        self.sink.end_level(facts)

    def progress(self, now: _Level) -> Progress:
        """A look at the live counters."""
        counters, clock, level = self.live.counters(), _timing.now_ns(), now.level
        elapsed_s = (clock - now.started_ns) / 1e9
        # a running level shows the rate of its last seconds, a finished one its mean
        recent = [(at, n) for at, n in now.history if clock - at < RATE_NS]
        since_ns, since = (now.started_ns, 0) if now.end is not None or not recent else recent[0]
        rate = None
        if clock > since_ns and counters["text_events"] > since:
            told = counters["told_tokens"] / counters["told_events"] if counters["told_events"] else 1.0
            rate = (counters["text_events"] - since) / ((clock - since_ns) / 1e9) * told
        now.history = [*recent, (clock, counters["text_events"])]
        done = counters["measured_done"]
        eta = None
        if level.duration_s is not None:
            eta = max(0.0, level.duration_s - elapsed_s)
        elif level.measured is not None and done:
            eta = elapsed_s / done * max(0, level.measured - done)
        phase = "warm-up" if level.index < 0 else "measuring"
        if phase == "measuring" and level.measured is not None and done >= level.measured:
            phase = "draining"
        ttft, itl, delay = self.live.ttft, self.live.itl, self.live.delay
        return Progress(
            level=level.index,
            concurrency=level.concurrency,
            levels=len(self.plan.levels),
            phase=phase,
            done=done,
            planned=level.measured,
            failed=counters["failed"],
            in_flight=counters["in_flight"],
            events=counters["text_events"],
            tokens_per_s=rate,
            ttft_p50_ms=_ms(ttft.quantile(0.5)),
            ttft_p90_ms=_ms(ttft.quantile(0.9)),
            itl_p50_ms=_ms(itl.quantile(0.5)),
            itl_p90_ms=_ms(itl.quantile(0.9)),
            delay_p50_us=_us(delay.quantile(0.5)),
            delay_p99_us=_us(delay.quantile(0.99)),
            elapsed_s=elapsed_s,
            eta_s=eta,
        )


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


def _ms(ns: int | None) -> float | None:
    return None if ns is None else ns / 1e6


def _us(ns: int | None) -> float | None:
    return None if ns is None else ns / 1e3
