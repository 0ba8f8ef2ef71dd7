"""What a request may ask of the simulated engine beyond the protocol: other channels, and faults.

A body field `sim`, or the header `X-Fastload-Sim` with the same JSON object:

    {"reasoning_tokens": 20, "tool_call": true, "fault": "truncate", "after_tokens": 5, "seconds": 2, "share": 0.1}
"""

from dataclasses import dataclass, fields
from typing import Any

from fastload.sim.speculation import GOLDEN, spread_point

HEADER = "x-fastload-sim"
FAULTS = {
    "reset": "the connection is reset in the stream",
    "truncate": "the connection is closed in the stream, without the rest",
    "stall": "silence in the stream, then it goes on",
    "error": "an error event in the stream, then its end",
    "429": "HTTP 429 with Retry-After",
    "slow_head": "nothing at all for a while",
    "late_usage": "the usage event comes late",
}


@dataclass(frozen=True, slots=True)
class Wishes:
    """reasoning_tokens: so many tokens first, in the reasoning channel. tool_call: the rest is a tool call.

    A fault hits after `after_tokens` tokens, or lasts `seconds`; of the requests that ask for it, the `share` is hit.
    """

    reasoning_tokens: int = 0
    tool_call: bool = False
    fault: str | None = None
    after_tokens: int = 1
    seconds: float = 1.0
    share: float = 1.0

    def fault_of(self, number: int) -> str | None:
        """The fault that hits the request of that number."""
        hit = self.share >= 1 or spread_point(number, 0, GOLDEN) < self.share
        return self.fault if hit else None


def read_wishes(said: object) -> Wishes:
    """The wishes in a JSON value. ValueError names the one that makes no sense."""
    if said is None:
        return Wishes()
    if not isinstance(said, dict):
        raise ValueError("sim must be a JSON object")
    known = {one.name for one in fields(Wishes)}
    for name in said:
        if name not in known:
            raise ValueError(f"sim.{name}: not known; known are {', '.join(sorted(known))}")
    wishes = Wishes(**said)
    _must(type(wishes.reasoning_tokens) is int and wishes.reasoning_tokens >= 0, said, "reasoning_tokens")
    _must(isinstance(wishes.tool_call, bool), said, "tool_call")
    _must(wishes.fault is None or wishes.fault in FAULTS, said, "fault")
    _must(type(wishes.after_tokens) is int and wishes.after_tokens >= 0, said, "after_tokens")
    _must(_is_number(wishes.seconds) and 0 <= wishes.seconds <= 3600, said, "seconds")
    _must(_is_number(wishes.share) and 0 <= wishes.share <= 1, said, "share")
    return wishes


def _must(right: bool, said: dict[str, Any], name: str) -> None:
    if not right:
        hint = f"; give {', '.join(FAULTS)}" if name == "fault" else ""
        raise ValueError(f"sim.{name} {said.get(name)!r} makes no sense{hint}")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
