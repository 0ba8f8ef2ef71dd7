"""The engine model on the process's clock: its time line, its steps' sends, and what /metrics counts.

    engine time = (clock - start) x speed

A step's tokens are known when it begins; their events are made then, and leave natively when it ends.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from fastload._timing import now_ns, realtime_ns
from fastload.sim import profiles
from fastload.sim._burst import send_all
from fastload.sim.answering import Answering, Choice
from fastload.sim.engine import Engine
from fastload.sim.lockstep import Lockstep
from fastload.sim.metrics import Metrics
from fastload.sim.options import Options
from fastload.sim.timer import Timer

_NS_PER_MS = 1_000_000


class Live:
    """One engine at work in this process."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.created_s = realtime_ns() // 1_000_000_000
        self.metrics = Metrics()
        self.requests = 0  # that came, refused ones not counted
        self.engine: Engine | Lockstep
        if options.profile is None:
            self.engine = Lockstep(
                round(options.ttft_ms * _NS_PER_MS), round(options.step_ms * _NS_PER_MS), options.tokens_per_event
            )
            self.block_tokens = 0
            self._single_events = False
        else:
            profile = profiles.load(options.profile)
            self.engine = Engine(profile, options.seed)
            self.block_tokens = profile.memory.block_tokens
            self._single_events = profile.speculation is not None and profile.speculation.single_events
        self._speed = options.speed
        self._origin_ns = now_ns()
        self._timer = Timer()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._timer.fd, self._fired)
        self._later: set[asyncio.TimerHandle] = set()

    def admit(self, answering: Answering) -> None:
        """Give the choices of a request to the engine."""
        answering.arrived_ns = now_ns()
        for choice in answering.choices:
            self.engine.admit(choice, self._engine_ns(answering.arrived_ns))
        self._arm()

    def drop(self, answering: Answering) -> None:
        """The client has gone, or was sent away: every place its choices had is free."""
        if self.give_up(answering):
            self.metrics.finished["abort"] += 1

    def give_up(self, answering: Answering) -> bool:
        """Take from the engine what is left of a request; was there anything?"""
        left = [choice for choice in answering.choices if choice.given < choice.limit and not choice.gone]
        for choice in left:
            self.engine.drop(choice)
        return bool(left)

    def later(self, seconds: float, call: Callable[..., None], *arguments: Any) -> None:
        """Call after so many seconds of the wall, unless the server ends first."""

        def run() -> None:
            self._later.discard(handle)
            call(*arguments)

        handle = self._loop.call_later(seconds, run)
        self._later.add(handle)

    def metrics_page(self) -> bytes:
        engine = self.engine
        return self.metrics.text(
            self.options.model, engine.counters, engine.running, engine.waiting, engine.memory_share
        )

    def close(self) -> None:
        for handle in self._later:
            handle.cancel()
        self._loop.remove_reader(self._timer.fd)
        self._timer.close()

    def _engine_ns(self, wall_ns: int) -> int:
        return round((wall_ns - self._origin_ns) * self._speed)

    def _arm(self) -> None:
        next_ns = self.engine.next_ns()
        if next_ns is None:
            self._timer.arm(None)
        else:
            self._timer.arm(self._origin_ns + -int(-next_ns // self._speed))

    def _fired(self) -> None:
        """The timer went off: a step is over, its tokens leave."""
        if self._timer.fired() is None:
            return
        wall_ns = now_ns()
        given = self.engine.advance(self._engine_ns(wall_ns))
        if given:
            self._send(given, wall_ns)
        self._arm()
        for choice, tokens in self.engine.in_making:
            assert isinstance(choice, Choice)
            if not choice.made and not self._single_events:
                choice.answering.make(choice, tokens)

    def _send(self, given: list[Any], wall_ns: int) -> None:
        fds: list[int] = []
        payloads: list[bytes] = []
        senders = []
        for choice, tokens in given:
            if choice.gone:  # with another choice of its request, in this very step
                continue
            connection = choice.answering.connection
            for piece in self._pieces(choice, tokens):
                if connection.fd < 0:
                    break
                if connection.clear:
                    fds.append(connection.fd)
                    payloads.append(piece)
                    senders.append(connection)
                else:
                    connection.write(piece)
        for place, sent in send_all(fds, payloads):
            senders[place].send_rest(payloads[place], sent)
        for choice, tokens in given:  # after the sends: the last stream waits for what comes before
            if not choice.gone:
                self._count(choice, tokens, wall_ns)

    def _pieces(self, choice: Choice, tokens: int) -> list[bytes]:
        if not self._single_events or tokens == 1:
            return choice.answering.give(choice, tokens)
        # As llama.cpp: a draft's tokens one by one, without waiting between them.
        pieces: list[bytes] = []
        given = choice.given
        for token in range(tokens):
            choice.given = given - tokens + 1 + token
            pieces += choice.answering.give(choice, 1)
        return pieces

    def _count(self, choice: Choice, tokens: int, wall_ns: int) -> None:
        metrics = self.metrics
        metrics.generation_tokens += tokens
        if choice.first_ns < 0:
            choice.first_ns = wall_ns
            arrived_ns = choice.answering.arrived_ns
            metrics.prompt_tokens += choice.prompt_tokens
            metrics.first_token.observe((wall_ns - arrived_ns) / 1e9)
            waited_ns = max(choice.scheduled_ns - choice.arrived_ns, 0)
            metrics.queue.observe(waited_ns / self._speed / 1e9)
        else:
            metrics.between.observe((wall_ns - choice.last_ns) / 1e9)
        choice.last_ns = wall_ns
        if choice.given == choice.limit:
            ask = choice.answering.ask
            metrics.finished["stop" if ask.finish == "stop" else "length"] += 1
            metrics.latency.observe((wall_ns - choice.answering.arrived_ns) / 1e9)
            metrics.prompt.observe(choice.prompt_tokens)
            metrics.generation.observe(choice.limit)
            if choice.limit > 1:
                metrics.per_token.observe((wall_ns - choice.first_ns) / (choice.limit - 1) / 1e9)
