"""The measuring process: `python -P -m fastload.load.measurer BLOCKS PLAN LIVE OUT` (file descriptors).

Loads uvloop, orjson and our extensions, nothing else: a library that starts threads or makes garbage would stand
between the kernel and a stamp. Commands come as JSON lines on stdin, where the key travels too; messages go to OUT.
Python runs a few times a request: it arms requests ahead, opens connections, and passes sealed blocks on.

Commands: hello, level, slice, cancel, end. Messages: ready, begun, sealed, free, level_done. The end of stdin ends the
process.
"""

import asyncio
import contextlib
import gc
import os
import resource
import signal
import sys
import traceback
from collections import deque
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any

import orjson
import uvloop

from fastload import _client, _timing
from fastload.load import connections, patience, shared, tls
from fastload.load.hiding import hide, protect

BATCH = 256  # events one drain takes
STALL_REST_S = 0.001
WARMUP_FAILURES = 3  # a server that takes no connection now is not waited for: nothing was measured yet
KEPT_WAIT_S = 0.3  # how long after the warm-up's answer a closing server is waited for
BRACKETS = 1024  # samples of the clock's offset that a level keeps: a day has 86 400 seconds
CONNECTS_AT_ONCE = 128  # listen queues are often that long


def main() -> None:
    """Run until stdin ends or `end` is said."""
    blocks, plan, live, out = (int(text) for text in sys.argv[1:5])
    # A signal may reach the whole process group; when to stop is the supervisor's to say, and its end is ours.
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    uvloop.run(_serve(blocks, plan, live, out))


def _broken(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Our own fault: stop at once. A broken instrument must not go on measuring; sealed blocks are safe."""
    fault = context.get("exception")
    told = traceback.format_exception(fault) if isinstance(fault, BaseException) else []
    with contextlib.suppress(OSError, ValueError):  # a terminal that is gone
        sys.stderr.write(hide("".join([str(context.get("message")), "\n", *told])))
        sys.stderr.flush()
    os._exit(70)


async def _serve(blocks: int, plan: int, live: int, out: int) -> None:
    measurer = Measurer(
        shared.attach(blocks, shared.BLOCKS_BYTES),
        shared.attach(plan, shared.SLICES * shared.SLICE_BYTES),
        shared.attach(live, _client.MEMORY_BYTES),
        out,
    )
    await measurer.run()


class Measurer:
    """One engine, and the little Python around it."""

    def __init__(self, blocks: Any, plan: Any, live: Any, out: int) -> None:
        self.recorder = _timing.Recorder(blocks)
        self.plan = plan
        self.live = live
        self.out = out
        self.slices: deque[tuple[int, int]] = deque()  # (index, requests) not yet begun
        self.current: Iterator[tuple[int, bytes]] | None = None
        self.current_index = -1
        self.level: int | None = None
        self.running = False  # a level is on
        self.cancelled = False
        self.ended = asyncio.Event()
        self.over = asyncio.Event()
        self.tasks: set[asyncio.Task[None]] = set()
        self.opening: list[asyncio.Task[None]] = []
        self.turn = asyncio.Semaphore(CONNECTS_AT_ONCE)
        self.unopened: dict[int, OSError] = {}  # slots whose connection ahead of the level failed
        self.tended: set[int] = set()  # slots that a task sees through back-off or connecting
        self.failing_since = (0, 0.0)  # (successes then, loop time) since when nothing but failures came
        self.gave_up = ""
        self.most_failures: int | None = 0  # in a row that this level may have; None: while there is hope
        self.resting = False
        self.gc_pauses = 0
        self.brackets: list[tuple[int, int, int]] = []
        self.n_brackets, self.bracket_step = 0, 1
        self.lag_max_ns = 0
        self.tls_facts: dict[str, object] | None = None
        self.handshakes = self.resumed = 0

    async def run(self) -> None:
        """Serve commands until the end."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(_broken)
        os.set_blocking(0, False)
        self.pending = b""
        loop.add_reader(0, self.on_commands)
        await self.ended.wait()

    # ---- commands

    def on_commands(self) -> None:
        """Read what stdin has; a closed stdin means the supervisor is gone."""
        try:
            data = os.read(0, 1 << 20)
        except BlockingIOError:
            return
        if not data:
            self.ended.set()
            return
        *lines, self.pending = (self.pending + data).split(b"\n")
        for line in lines:
            command = orjson.loads(line)
            # a closed set: the five words of the module's first lines
            getattr(self, f"do_{command.pop('do')}")(**command)

    def do_hello(self, *, slots: int, head: str, family: int, sockaddr: list[Any], stamp: str, cpu: int | None,
                 save_text: bool, limits: dict[str, float], max_failures: int | None,
                 respect_retry_after: bool = False, tunnel: str | None = None,
                 tls_options: dict[str, Any] | None = None, server_name: str | None = None,
                 secrets: Sequence[str] = ()) -> None:
        """Set up: `head` is the request head up to the content-length, `tunnel` what a proxy is asked; secrets
        included, and named in `secrets`."""
        for secret in secrets:
            protect(secret)
        if cpu is not None:
            os.sched_setaffinity(0, {cpu})
        self.head = head.encode("latin-1")
        context = None if tls_options is None else tls.context(tls.TlsOptions(**tls_options))
        self.route = connections.Route(
            family, tuple(sockaddr), None if tunnel is None else tunnel.encode("latin-1"), context, server_name
        )
        self.limits = limits
        self.sweep_s = patience.sweep_s(limits)
        self.max_failures = max_failures
        self.recorder.save_text = save_text
        self.engine = _client.Engine(self.recorder, slots, self.live, stamp)
        self.engine.respect_retry_after = respect_retry_after
        if self.route.is_bare:
            self.engine.dial_to(family, connections.pack(family, self.route.sockaddr))
        self.slots = slots
        loop = asyncio.get_running_loop()
        loop.add_reader(self.engine.fileno(), self.on_wire)
        gc.callbacks.append(self.on_gc)
        self.next_sweep = self.next_second = loop.time()
        loop.call_at(self.next_sweep, self.on_sweep)
        self.say(do="ready", pid=os.getpid(), stamps=self.engine.stamps, modules=sorted(sys.modules))

    def do_level(self, **level: Any) -> None:
        """Begin a level; its slices follow, or an order to cancel that may be read in the same breath."""
        self.level = level["level"]
        self.cancelled = False
        self.spawn(self.run_level(**level))

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` beside; a fault in it stops the process."""
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.on_task_end)

    def on_task_end(self, task: asyncio.Task[None]) -> None:
        """Forget a finished task, but not its fault."""
        self.tasks.discard(task)
        fault = None if task.cancelled() else task.exception()
        if fault is not None:
            _broken(asyncio.get_running_loop(), {"message": "a task failed", "exception": fault})

    def do_slice(self, *, level: int, index: int, requests: int) -> None:
        """A slice of the plan is in shared memory; one that crossed its level's end on the way is void."""
        if level != self.level:
            return
        self.slices.append((index, requests))
        if self.running:
            self.refill()

    def do_cancel(self) -> None:
        """Stop the level now: what is on the wire becomes `cancelled` rows."""
        self.cancelled = True
        for task in self.opening:
            task.cancel()
        if self.running:
            self.stop_level()

    def stop_level(self) -> None:
        """End the level as soon as the blocks have room for the rows of what is on the wire."""
        done = self.engine.cancel()
        self.pass_sealed()
        if done:
            self.over.set()
        else:
            asyncio.get_running_loop().call_later(0.01, self.stop_level)

    def do_end(self) -> None:
        """Leave."""
        self.ended.set()

    # ---- a level

    async def run_level(self, *, level: int, concurrency: int, warmup: int, measured: int,
                        duration_s: float | None, reuse: bool, learn: bool) -> None:
        """One level from its first connection to its last row."""
        engine = self.engine
        self.gave_up = ""
        self.most_failures = WARMUP_FAILURES if learn else self.max_failures
        self.failing_since = (0, 0.0)
        self.unopened.clear()
        self.streams = concurrency
        self.over.clear()
        engine.reuse = reuse
        engine.low_water = concurrency
        self.handshakes = self.resumed = 0
        engine.trim(concurrency)
        if reuse and not self.cancelled:
            loop = asyncio.get_running_loop()
            empty = [slot for slot in range(concurrency) if engine.is_empty(slot)]
            self.opening = [loop.create_task(self.open_ahead(slot)) for slot in empty]
            for end in await asyncio.gather(*self.opening, return_exceptions=True):
                if isinstance(end, Exception):
                    raise end
            self.opening = []
        gc.collect()
        gc.freeze()
        gc.disable()
        self.gc_pauses = self.lag_max_ns = 0
        self.brackets, self.n_brackets, self.bracket_step = [], 0, 1
        usage = resource.getrusage(resource.RUSAGE_SELF)
        started = _timing.now_ns()
        until = -1 if duration_s is None else started + int(duration_s * 1e9)
        engine.begin_level(level, concurrency, warmup, measured, until)
        if not self.cancelled:
            self.running = True
            self.refill()
            for slot, error in self.unopened.items():
                self.refuse(slot, error, 0)
            for slot in range(concurrency):
                self.tend_soon(slot)
            self.say(do="begun")  # after the first sends, which it would delay
            await self.over.wait()
        self.running = False
        ended = _timing.now_ns()
        spent = resource.getrusage(resource.RUSAGE_SELF)
        gc.enable()
        gc.unfreeze()
        kept = await self.is_kept() if learn else reuse
        for task in [t for t in self.tasks if t is not asyncio.current_task()]:
            task.cancel()
        if not reuse:
            engine.close_idle()
        unsent = self.forget_slices()
        engine.sample_clock(500)
        self.recorder.begin_level(-1)
        self.pass_sealed()
        cpu_ns = int((spent.ru_utime + spent.ru_stime - usage.ru_utime - usage.ru_stime) * 1e9)
        self.say(
            do="level_done", level=level, started_ns=started, ended_ns=ended, kept=kept, unsent=unsent,
            cancelled=self.cancelled, gave_up=self.gave_up,
            failed="" if self.cancelled else patience.all_failed(engine.counters()),
            short=engine.measured_open > 0 or (engine.measured_left > 0 and until < 0),
            cpu_ns=cpu_ns, gc_pauses=self.gc_pauses, lag_max_ns=self.lag_max_ns, brackets=self.take_brackets(),
            tls=self.tls_facts and {**self.tls_facts, "handshakes": self.handshakes, "resumed": self.resumed},
        )

    async def open_ahead(self, slot: int) -> None:
        """Connect before the clock starts. A failure is left to the level, where it becomes a row; after one, who waits
        for his turn does not try: with thousands of streams that would take hours."""
        try:
            async with self.turn:
                if self.unopened:
                    return
                made = await self.connect()
        except OSError as error:
            self.unopened[slot] = error
            return
        self.engine.attach(slot, made.fd, tls=made.tls)

    async def connect(self) -> connections.Connection:
        """A connection to the server, with the last TLS session that a server gave; OSError."""
        made = await connections.connect(self.route, self.limits["connect_s"], self.engine.tls_session())
        if made.tls is not None:
            session = made.tls[0]
            self.handshakes += 1
            self.resumed += bool(session.session_reused)
            cipher = session.cipher()
            self.tls_facts = {"version": session.version(), "cipher": cipher and cipher[0]}
        return made

    async def is_kept(self) -> bool:
        """After the warm-up's answer: does the server keep the connection?"""
        deadline = asyncio.get_running_loop().time() + KEPT_WAIT_S
        while asyncio.get_running_loop().time() < deadline:
            if self.engine.is_empty(0):
                return False
            await asyncio.sleep(0.02)
        return True

    def forget_slices(self) -> int:
        """Drop what was not sent; the number of the first such request, or -1."""
        unsent: int = self.engine.disarm()
        if self.current is not None:
            if unsent < 0:
                unsent = next(self.current, (-1, b""))[0]
            self.say(do="free", index=self.current_index)
            self.current = None
        for index, requests in self.slices:
            if unsent < 0:
                unsent = next(shared.get_slice(self.plan, index, requests))[0]
            self.say(do="free", index=index)
        self.slices.clear()
        self.level = None
        return unsent

    # ---- while it runs

    def on_wire(self) -> None:
        """The engine's descriptor is readable. Mostly drain has nothing to say and this is all the Python there is."""
        if self.engine.drain():
            self.attend()
            if self.engine.stalled and not self.resting:
                self.rest()

    def rest(self) -> None:
        """No block is free: the descriptor stays readable, and asking again and again would take the core from the
        process that is to free one."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(self.engine.fileno())
        self.resting = True
        loop.call_later(STALL_REST_S, self.resume)

    def resume(self) -> None:
        """Look at the wire again."""
        self.resting = False
        asyncio.get_running_loop().add_reader(self.engine.fileno(), self.on_wire)

    def attend(self) -> None:
        """What drain left to Python: blocks, connections, requests, the level's end."""
        engine = self.engine
        self.pass_sealed()
        for slot in engine.take_lost():
            self.tend_soon(slot)
        if not self.running:
            return
        self.refill()
        self.check_failures()
        if not engine.wants() and engine.busy == 0:
            self.over.set()

    def refill(self) -> None:
        """Keep twice the level's streams armed ahead, as far as the plan's slices go."""
        engine = self.engine
        goal = 2 * engine.low_water + 8
        while engine.armed < goal and engine.wants():
            if self.current is None:
                if not self.slices:
                    break
                self.current_index, requests = self.slices.popleft()
                self.current = shared.get_slice(self.plan, self.current_index, requests)
            entry = next(self.current, None)
            if entry is None:
                self.current = None
                self.say(do="free", index=self.current_index)
                continue
            request, body = entry
            engine.arm(request, b"%sContent-Length: %d\r\n\r\n%s" % (self.head, len(body), body))
        engine.pump()

    def tend_soon(self, slot: int) -> None:
        """See to a slot that has no connection or is held after failures, if it is wanted."""
        if slot not in self.tended and self.wanted(slot):
            self.tended.add(slot)
            self.spawn(self.tend(slot))

    def wanted(self, slot: int) -> bool:
        """Can the slot not send by itself, and has it a request to send?"""
        engine = self.engine
        if not self.running:
            return False
        return engine.is_empty(slot) and engine.must_retry(slot) or engine.wants() and (
            engine.is_empty(slot) or engine.is_held(slot)
        )

    async def tend(self, slot: int) -> None:
        """Wait out the slot's back-off and connect it, until it can send or the level wants no more.

        A connection that cannot be had is a row, and doubles the wait.
        """
        try:
            await self.see_through(slot)
        finally:
            self.tended.discard(slot)
        self.attend()

    async def see_through(self, slot: int) -> None:
        """`tend` without its end."""
        engine = self.engine
        waited_ms = least_ms = 0
        while self.wanted(slot):
            error = engine.take_dial_error(slot)
            if error:
                self.refuse(slot, connections.dial_fault(error, self.limits["connect_s"]), waited_ms)
                self.attend()
                continue
            wait_ms = max(least_ms, self.wait_ms(slot))
            if wait_ms:
                await asyncio.sleep(wait_ms / 1000)
                waited_ms += wait_ms
                if not self.wanted(slot):
                    return
            if engine.is_held(slot):
                engine.release(slot, waited_ms)
                engine.pump()
                return
            least_ms = patience.BACKOFF_FIRST_MS  # also where no block is free to take a row
            try:
                async with self.turn:
                    made = await self.connect()
            except OSError as refusal:
                self.refuse(slot, refusal, waited_ms)
                self.attend()
                continue
            if not self.wanted(slot):
                os.close(made.fd)
            elif engine.attach(slot, made.fd, made.connect_ns, waited_ms, made.tls, made.tls_ns):
                engine.pump()
                return
            else:
                os.close(made.fd)  # no block is free: by the next attempt one should be

    def wait_ms(self, slot: int) -> int:
        """How long the slot must wait before it goes on."""
        engine = self.engine
        status, head = engine.refusal(slot) if engine.respect_retry_after else (-1, b"")
        return patience.wait_ms(engine.failures(slot), status, head)

    def refuse(self, slot: int, error: OSError, waited_ms: int) -> None:
        """A connection that could not be had: a row for the request that waited for it."""
        code = error.errno or 0
        end = _timing.END_PORTS if code in connections.OWN_LIMITS else _timing.END_CONNECT
        self.engine.refuse(slot, end, code, f"connect: {connections.why(error)}", waited_ms)

    def check_failures(self) -> None:
        """Give up a level in which nothing succeeds any more."""
        counters, now = self.engine.counters(), asyncio.get_running_loop().time()
        in_a_row = counters["failed_in_row"]
        if not in_a_row or counters["done"] != self.failing_since[0] or not self.failing_since[1]:
            self.failing_since = (counters["done"], now)
        if self.gave_up:
            return
        if self.most_failures is not None:
            self.gave_up = patience.too_many(counters, self.most_failures)
        else:
            why = patience.hopeless(counters, self.streams, now - self.failing_since[1])
            if why and not self.engine.hopeful(not patience.is_unreachable(counters)):
                self.gave_up = why
        if self.gave_up:
            self.stop_level()

    # ---- the clockwork beside it

    def on_sweep(self) -> None:
        """Ten times a second or more: time limits; once a second: the clock's offset, and the open block."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        late_s = now - self.next_sweep
        self.lag_max_ns = max(self.lag_max_ns, int(late_s * 1e9))
        if self.running:
            # first what has come: after a pause of the process it lies there, and is not late
            for _ in range(1 + (self.slots // BATCH if late_s > patience.SWEEP_S else 0)):
                self.on_wire()
            limits = self.limits
            self.engine.expire(
                *(int(limits[name] * 1e9) for name in ("connect_s", "first_byte_s", "idle_s", "total_s"))
            )
            if now >= self.next_second:
                self.next_second = now + 1.0
                self.engine.sample_clock(100)
                self.take_brackets()
                self.recorder.seal()
            self.attend()
        self.next_sweep = max(self.next_sweep + self.sweep_s, now)
        loop.call_at(self.next_sweep, self.on_sweep)

    def take_brackets(self) -> list[tuple[int, int, int]]:
        """The samples of the clock's offset in the level so far: all, in a long one every second, fourth, and so on."""
        taken = self.engine.take_brackets()
        self.brackets += [each for at, each in enumerate(taken, self.n_brackets) if at % self.bracket_step == 0]
        self.n_brackets += len(taken)
        if len(self.brackets) > BRACKETS:
            del self.brackets[1::2]
            self.bracket_step *= 2
        return self.brackets

    def on_gc(self, phase: str, info: dict[str, int]) -> None:
        """Count collections inside the window: there should be none."""
        if phase == "start" and self.running:
            self.gc_pauses += 1

    def pass_sealed(self) -> None:
        """Tell the supervisor which blocks are ready."""
        for index in self.recorder.take_sealed():
            self.say(do="sealed", index=index)

    def say(self, **message: object) -> None:
        """One message as a JSON line. Without a supervisor there is nobody to tell: leave, and without a word."""
        data = orjson.dumps(message) + b"\n"
        try:
            while data:
                data = data[os.write(self.out, data) :]
        except BrokenPipeError:
            os._exit(1)


if __name__ == "__main__":
    main()
