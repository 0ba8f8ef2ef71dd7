"""The one window of a level and what was in flight inside it (METRICS.md, 4). Stamps: int64 ns, monotonic."""

from dataclasses import dataclass

import numpy as np

from fastload.analysis.rows import NULL, Bools, Floats, Ints


@dataclass(frozen=True, slots=True)
class Window:
    """A half-open interval (start_ns, end_ns]: what happens at the very start belongs to the time before."""

    start_ns: int
    end_ns: int

    @property
    def seconds(self) -> float:
        """Its length in seconds, above 0."""
        return (self.end_ns - self.start_ns) / 1e9

    def contains(self, stamps: Ints) -> Bools:
        """Say for each stamp whether it lies inside; null (-1) does not."""
        inside: Bools = (stamps != NULL) & (stamps > self.start_ns) & (stamps <= self.end_ns)
        return inside


def closed_loop(slot: Ints, sent: Ints, end: Ints, measured: Bools) -> Window | None:
    """Return the window of a closed loop: from all slots having a request out to the last measured end.

    None when nothing was sent or measured, or when the last measured request was over before the last slot
    began (fewer requests than slots, say): there is no steady part to take a rate of.
    """
    out = sent != NULL
    last = end[measured & out]
    if not len(last):
        return None
    order = np.lexsort((sent[out], slot[out]))
    slots, times = slot[out][order], sent[out][order]
    first_of_slot = np.concatenate(([True], slots[1:] != slots[:-1]))
    start, stop = int(times[first_of_slot].max()), int(last.max())
    return Window(start, stop) if stop > start else None


def in_flight_mean(sent: Ints, end: Ints, window: Window) -> float:
    """Return the time-weighted mean number of requests in flight inside the window."""
    out = sent != NULL
    inside = np.minimum(end[out], window.end_ns) - np.maximum(sent[out], window.start_ns)
    return float(np.maximum(inside, 0).sum()) / (window.end_ns - window.start_ns)


def in_flight_steps(sent: Ints, end: Ints) -> tuple[int, float]:
    """Walk the level from empty to empty; return the most in flight at once and the integral (request s).

    Where one request ends in the nanosecond in which the next is sent, the end comes first.
    """
    out = sent != NULL
    times = np.concatenate((end[out], sent[out]))
    steps = np.concatenate((np.full(int(out.sum()), -1), np.full(int(out.sum()), 1)))
    if not len(times):
        return 0, 0.0
    order = np.argsort(times, kind="stable")
    times, level = times[order], np.cumsum(steps[order])
    # Integers to the end: seconds since boot times thousands of requests would not fit a double to the
    # nanosecond.
    return int(level.max()), float((level[:-1] * np.diff(times)).sum()) / 1e9


def bookkeeping_error(sent: Ints, end: Ints, latency_s: Floats) -> float | None:
    """Return how far the integral of in-flight is from the sum of latencies, as a share of that sum.

    `latency_s` is the column as written (NaN where the request failed: then end - sent counts), so a row
    whose latency does not belong to its stamps shows here. None when nothing took any time.
    """
    _, integral = in_flight_steps(sent, end)
    taken = np.where(np.isnan(latency_s), np.where(sent != NULL, (end - sent) / 1e9, 0.0), latency_s).sum()
    return float(abs(integral - taken) / taken) if taken > 0 else None


def turnarounds(slot: Ints, sent: Ints, over: Ints, setup_ns: Ints, counted: Bools) -> Floats:
    """Return how long slots stood free between two requests, in seconds, less `setup_ns` (connecting).

    `over` is when the slot's exchange was over on the wire. Only gaps before a row that is `counted` are
    returned.
    """
    out = sent != NULL
    order = np.lexsort((sent[out], slot[out]))
    slots, times, free = slot[out][order], sent[out][order], over[out][order]
    setup, wanted = setup_ns[out][order], counted[out][order]
    follows = (slots[1:] == slots[:-1]) & wanted[1:]
    seconds: Floats = np.maximum((times[1:] - free[:-1] - setup[1:])[follows], 0) / 1e9
    return seconds
