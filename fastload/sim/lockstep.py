"""The lockstep engine: all running answers get their next event in the same instant. No sockets here.

    arrival ------ ttft ----->|ready
    tick      tick      tick      tick      tick
     |  step   |         |         |         |
     +---------+---------+---------+---------+-->
                                   first     second event

A request is ready `ttft` after it arrived and joins the batch at the next tick, where it has its first event:
its TTFT is `ttft` plus what was left of the step. The grid is absolute (k * step) and never drifts.
A tick that comes late does not make up for the ones it missed: like a slow decode step it gives one event to
everyone.

That burst, every stream's event at once, is what a continuous-batching engine does to its clients. What such an
engine does besides (queue, batch limit, prefill, steps that grow) is modelled in `engine.py`, behind the same calls.
"""

from fastload.sim.engine import Counters, Sequence


class Lockstep:
    """Who waits, who runs, and when the next tick is due. All times int64 ns of the caller's time line."""

    def __init__(self, ttft_ns: int, step_ns: int, tokens_per_event: int) -> None:
        self.counters = Counters()
        self._ttft_ns = ttft_ns
        self._step_ns = step_ns
        self._tokens_per_event = tokens_per_event
        # Dicts as ordered sets: arrivals get ready in the order they came, and an aborted one leaves without
        # a search.
        self._waiting: dict[Sequence, int] = {}
        self._running: dict[Sequence, None] = {}
        self._next_ns: int | None = None

    def fits(self, tokens: int) -> bool:
        """There is no memory to fill."""
        return True

    def admit(self, sequence: Sequence, now_ns: int) -> None:
        """A request has arrived."""
        sequence.arrived_ns = now_ns
        self._waiting[sequence] = now_ns + self._ttft_ns
        if self._next_ns is None:
            self._set_next(now_ns)

    def drop(self, sequence: Sequence) -> None:
        """The client has gone: its place is free at once."""
        sequence.gone = True
        self._waiting.pop(sequence, None)
        self._running.pop(sequence, None)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def memory_share(self) -> float:
        return 0.0

    def next_ns(self) -> int | None:
        """The tick at which somebody gets an event; None while nobody is here."""
        return self._next_ns

    @property
    def in_making(self) -> list[tuple[Sequence, int]]:
        """What those who run already will get at the next tick."""
        return [(one, min(self._tokens_per_event, one.limit - one.given)) for one in self._running]

    def advance(self, now_ns: int) -> list[tuple[Sequence, int]]:
        """The latest tick that has passed: who gets how many tokens. Who is ready by then runs now too."""
        if self._next_ns is None or self._next_ns > now_ns:
            return []
        tick_ns = now_ns - now_ns % self._step_ns
        while self._waiting:
            sequence, ready_ns = next(iter(self._waiting.items()))
            if ready_ns > tick_ns:
                break
            del self._waiting[sequence]
            sequence.scheduled_ns = tick_ns
            self._running[sequence] = None
        given = self.in_making
        for sequence, tokens in given:
            sequence.given += tokens
            if sequence.given == sequence.limit:
                del self._running[sequence]
        self._set_next(now_ns)
        return given

    def _set_next(self, now_ns: int) -> None:
        self._next_ns = None
        if self._running:
            self._next_ns = self._grid(now_ns + 1)
        elif self._waiting:
            self._next_ns = self._grid(max(now_ns + 1, next(iter(self._waiting.values()))))

    def _grid(self, at_ns: int) -> int:
        """The first grid point not before `at_ns`."""
        return at_ns + -at_ns % self._step_ns
