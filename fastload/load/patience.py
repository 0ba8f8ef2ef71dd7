"""How long things are borne while a level runs: limits, waits after failures, the end of the level. All of it pure.

Standard library and our extensions only, for the measurer imports it. `counters` are the engine's gauges by name.
"""

import os
from collections.abc import Mapping

from fastload import _timing
from fastload.load.answer_head import read_head, read_retry_after_s

SWEEP_S = 0.1  # how often time limits are looked at: four times within the shortest, but not without end
SHORTEST_SWEEP_S = 0.005
BACKOFF_FIRST_MS = 100
BACKOFF_LAST_MS = 2000
LONGEST_RETRY_AFTER_MS = 300_000  # a server may not stop a run for good
ASKS_TO_WAIT = (429, 503)
NO_CHANCE = 3  # failures in a row that are worth a word
HOPELESS_S = 30.0  # how long nothing but failures may come, unless --max-failures says
HOPELESS_FAILURES = 10  # fewer in that time prove nothing

_WORDS = {
    _timing.END_EOF: "closed by the server before the answer was complete",
    _timing.END_RESET: "reset by the server",
    _timing.END_TIMEOUT: "a time limit",
    _timing.END_HTTP: "an answer that cannot be read",
    _timing.END_LIMIT: "an answer beyond all limits",
}


def words(end: int, status: int, error: int) -> str:
    """Why a request failed, from its END_ code, HTTP status (-1: none) and errno (-1: none)."""
    why = os.strerror(error) if error > 0 else "no connection"
    if end == _timing.END_CONNECT:
        return f"connect: {why}"
    if end == _timing.END_PORTS:
        return f"client_ports: no local port or file descriptor was free on this host ({why})"
    if status >= 300:
        return f"HTTP {status}"
    return _WORDS.get(end, "an answer with an error, without text or without an end")


def sweep_s(limits: Mapping[str, float]) -> float:
    """How often time limits (in seconds) are looked at."""
    return min(SWEEP_S, max(SHORTEST_SWEEP_S, min(limits.values()) / 4))


def wait_ms(failed: int, status: int = -1, head: bytes = b"") -> int:
    """How long a slot that failed so often in a row waits: not at all after one failure, then 100 ms doubling to 2 s.

    With `status` and `head` of its last answer (where Retry-After is respected) at least as long as a 429 or 503 asks,
    and at most 5 minutes.
    """
    wait = min(BACKOFF_FIRST_MS << min(failed - 2, 16), BACKOFF_LAST_MS) if failed > 1 else 0
    if not failed or status not in ASKS_TO_WAIT:
        return wait
    asked_s = read_retry_after_s(read_head(head), _timing.realtime_ns() / 1e9)
    return wait if asked_s is None else max(wait, min(int(asked_s * 1000), LONGEST_RETRY_AFTER_MS))


def is_unreachable(counters: Mapping[str, int]) -> bool:
    """Did the last failure have no connection? Then what still waits for an answer gives no hope."""
    return counters["last_end"] in (_timing.END_CONNECT, _timing.END_PORTS)


def too_many(counters: Mapping[str, int], most: int) -> str:
    """Why to give up when --max-failures says `most`; empty if there is no reason yet."""
    if counters["failed_in_row"] < most:
        return ""
    return _sentence(counters, f"(--max-failures {most})")


def hopeless(counters: Mapping[str, int], streams: int, failing_s: float) -> str:
    """Why to give up a level of `streams` in which only failures came for `failing_s`; empty if there is hope."""
    if failing_s < HOPELESS_S or counters["failed_in_row"] < max(HOPELESS_FAILURES, streams):
        return ""
    return _sentence(counters, f"in {failing_s:.0f} s and none succeeded (--max-failures N bears N)")


def failing(counters: Mapping[str, int]) -> str | None:
    """What to say while a level runs and nothing succeeds; None as long as that may be chance."""
    return _sentence(counters, "so far") if counters["failed_in_row"] >= NO_CHANCE else None


def all_failed(counters: Mapping[str, int]) -> str:
    """What to say of a level in which measured requests failed and none succeeded; empty of any other."""
    if counters["measured_done"] or not counters["measured_failed"]:
        return ""
    last = words(counters["last_end"], counters["last_status"], counters["last_errno"])
    return f"all {counters['measured_failed']} measured requests failed; the last: {last}"


def _sentence(counters: Mapping[str, int], rule: str) -> str:
    last = words(counters["last_end"], counters["last_status"], counters["last_errno"])
    return f"{counters['failed_in_row']} requests failed in a row {rule}; the last: {last}"
