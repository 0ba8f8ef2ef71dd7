"""The lockstep engine: all running answers get their next event in the same instant. No sockets here.

    arrival ------ ttft ----->|ready
    tick      tick      tick      tick      tick
     |  step   |         |         |         |
     +---------+---------+---------+---------+-->
                                   first     second event

A request is ready `ttft` after it arrived and joins the batch at the next tick, where it has its first event:
its TTFT is `ttft` plus what was left of the step. The grid is absolute (origin + k * step) and never drifts.
A tick that comes late does not make up for the ones it missed: like a slow decode step it gives one event to
everyone.

That burst, every stream's event at once, is what a continuous-batching engine does to its clients. Not
modelled here: a queue, a batch limit, prefill that grows with the prompt, a step that grows with the batch.
All requests wait the same `ttft`.
"""

import ctypes
import os
import struct
from typing import Protocol


class Answer(Protocol):
    """What the engine drives: one request being answered."""

    left: int  # tokens not given yet, at least 1

    def emit(self, tokens: int) -> None:
        """Give out so many more tokens now; with `left` of them the answer is complete."""


class Lockstep:
    """Who waits, who runs, and when the next tick is due. All times int64 ns of the monotonic clock."""

    def __init__(self, ttft_ns: int, step_ns: int, tokens_per_event: int, origin_ns: int) -> None:
        self._ttft_ns = ttft_ns
        self._step_ns = step_ns
        self._tokens_per_event = tokens_per_event
        self._origin_ns = origin_ns
        # Dicts as ordered sets: arrivals get ready in the order they came, and an aborted one leaves without
        # a search.
        self._waiting: dict[Answer, int] = {}
        self._running: dict[Answer, None] = {}

    def admit(self, answer: Answer, arrived_ns: int) -> None:
        """A request has arrived."""
        self._waiting[answer] = arrived_ns + self._ttft_ns

    def drop(self, answer: Answer) -> None:
        """The client has gone: its place is free at once."""
        self._waiting.pop(answer, None)
        self._running.pop(answer, None)

    @property
    def in_flight(self) -> int:
        """Requests that wait or run."""
        return len(self._waiting) + len(self._running)

    def next_tick_ns(self, now_ns: int) -> int | None:
        """The first tick after `now_ns` at which somebody gets an event; None while nobody is here."""
        if self._running:
            return self._grid(now_ns + 1)
        if self._waiting:
            return self._grid(max(now_ns + 1, next(iter(self._waiting.values()))))
        return None

    def tick(self, tick_ns: int) -> None:
        """Give every running answer its next event; who is ready by `tick_ns` runs now too."""
        while self._waiting:
            answer, ready_ns = next(iter(self._waiting.items()))
            if ready_ns > tick_ns:
                break
            del self._waiting[answer]
            self._running[answer] = None
        for answer in list(self._running):
            if answer in self._running:  # a failing send may have dropped it meanwhile
                tokens = min(self._tokens_per_event, answer.left)
                if tokens == answer.left:
                    del self._running[answer]
                answer.emit(tokens)

    def _grid(self, at_ns: int) -> int:
        """The first grid point not before `at_ns`."""
        return at_ns + (self._origin_ns - at_ns) % self._step_ns


class GridTimer:
    """A timer of the kernel, armed at absolute monotonic times; readable by an event loop through `fd`.

    Loop timers will not do: uvloop rounds them to whole milliseconds, and so does epoll's timeout.
    """

    _CLOCK_MONOTONIC = 1
    _ABSOLUTE = 1

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.fd: int = self._libc.timerfd_create(self._CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self.fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create failed")
        self.armed_ns: int | None = None

    def arm(self, at_ns: int | None) -> None:
        """Fire once at `at_ns` (at once if that has passed); None: not at all."""
        if at_ns == self.armed_ns:
            return
        seconds, nanoseconds = divmod(at_ns or 0, 1_000_000_000)  # all zero disarms
        spec = struct.pack("@4l", 0, 0, seconds, nanoseconds)  # struct itimerspec: interval, then value
        if self._libc.timerfd_settime(self.fd, self._ABSOLUTE, spec, None) < 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime failed")
        self.armed_ns = at_ns

    def fired(self) -> int | None:
        """The time it was armed for, if it has gone off; it is disarmed then."""
        try:
            os.read(self.fd, 8)
        except BlockingIOError:
            return None
        at_ns, self.armed_ns = self.armed_ns, None
        return at_ns

    def close(self) -> None:
        os.close(self.fd)
