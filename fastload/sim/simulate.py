"""Loads for the engine model in simulated time: what a client would see, without sockets or waiting. Pure.

The client here is ideal but for its turn-around: a slot's next request arrives `TURNAROUND_NS` after its last answer,
and two requests never in the same instant.
"""

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from fastload.sim.engine import Engine, Sequence
from fastload.sim.profiles import Profile

TURNAROUND_NS = 60_000
APART_NS = 15_000  # between two sends of one client


@dataclass(slots=True)
class Times:
    """One request as its client saw it; ns."""

    sequence: Sequence
    sent_ns: int
    first_ns: int = -1
    last_ns: int = -1
    first_tokens: int = 0
    events: int = 0
    measured: bool = True

    @property
    def done(self) -> bool:
        return self.sequence.given == self.sequence.limit

    @property
    def ttft_ms(self) -> float:
        return (self.first_ns - self.sent_ns) / 1e6

    @property
    def latency_s(self) -> float:
        return (self.last_ns - self.sent_ns) / 1e9

    @property
    def itl_ms(self) -> float | None:
        """METRICS.md section 3, the counts of tokens being known; None with nothing after the first event."""
        rest = self.sequence.limit - self.first_tokens
        return (self.last_ns - self.first_ns) / rest / 1e6 if rest else None

    @property
    def tps(self) -> float:
        return self.sequence.limit / self.latency_s


Ask = Callable[[], Sequence]


def closed_loop(engine: Engine, ask: Ask, concurrency: int, measured: int, start_ns: int = 0) -> list[Times]:
    """Keep `concurrency` requests in flight until `measured` of them, the first ones sent, are done.

    As fastload does: when the measured ones are all out, others keep the load up, are awaited, and are not returned.
    """
    sent: list[Times] = []
    arrivals = [start_ns + slot * APART_NS for slot in range(concurrency)]
    left = measured

    def done(times: Times, now_ns: int) -> int | None:
        nonlocal left
        left -= times.measured
        return now_ns + TURNAROUND_NS if left else None

    def send(at_ns: int) -> Times:
        times = Times(ask(), at_ns, measured=len(sent) < measured)
        sent.append(times)
        return times

    _run(engine, arrivals, send, done)
    return [times for times in sent if times.measured]


def open_loop(engine: Engine, ask: Ask, due_ns: Iterable[int]) -> list[Times]:
    """Requests at these times, whatever became of those before them; in the order they were sent."""
    sent: list[Times] = []

    def send(at_ns: int) -> Times:
        sent.append(Times(ask(), at_ns))
        return sent[-1]

    _run(engine, list(due_ns), send, lambda times, now_ns: None)
    return sent


def _run(
    engine: Engine,
    arrivals: list[int],
    send: Callable[[int], Times],
    done: Callable[[Times, int], int | None],
) -> None:
    """Until nobody is left: send what is due, let the engine go on, and ask `done` when the next is to follow."""
    heapq.heapify(arrivals)
    flying: dict[Sequence, Times] = {}
    last_sent_ns = -APART_NS
    while True:
        next_ns = engine.next_ns()
        if arrivals and (next_ns is None or arrivals[0] <= next_ns):
            at_ns = max(heapq.heappop(arrivals), last_sent_ns + APART_NS)
            if next_ns is not None and at_ns > next_ns:
                heapq.heappush(arrivals, at_ns)
            else:
                last_sent_ns = at_ns
                times = send(at_ns)
                flying[times.sequence] = times
                engine.admit(times.sequence, at_ns)
                continue
        if next_ns is None:
            return
        for sequence, tokens in engine.advance(next_ns):
            times = flying[sequence]
            times.last_ns = next_ns
            times.events += 1
            if times.events == 1:
                times.first_ns = next_ns
                times.first_tokens = tokens
            if sequence.given == sequence.limit:
                del flying[sequence]
                follow_ns = done(times, next_ns)
                if follow_ns is not None:
                    heapq.heappush(arrivals, follow_ns)


def sweep(
    profile: Profile, levels: Iterable[int], rounds: int = 10, tokens: tuple[int, int] = (128, 128), seed: int = 0
) -> dict[int, list[Times]]:
    """Closed-loop levels one after the other on one engine, as `fastload sweep --rounds N --min-requests 0` has them.

    tokens: of each prompt and answer. One warm-up request opens the run. Requests share no prefix.
    """
    engine = Engine(profile, seed)

    def ask() -> Sequence:
        return Sequence(*tokens)

    closed_loop(engine, ask, 1, 1)
    found = {}
    now_ns = 0
    for level in levels:
        now_ns = now_ns + 1_000_000_000
        found[level] = closed_loop(engine, ask, level, rounds * level, now_ns)
        now_ns = max(times.last_ns for times in found[level]) + 60_000_000_000
    return found
