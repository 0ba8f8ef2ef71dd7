"""How a request that did not complete its answer is called (METRICS section 4), as far as the wire alone tells.

What a complete answer says in its text (an error event, an empty answer), the trace finds out.
"""

from typing import Final

from fastload import _timing

# A malformed HTTP message or a passed limit has no class of its own in METRICS: the bytes could not be read, as with a
# malformed event.
CLASS_OF_END: Final = {
    _timing.END_CONNECT: "connect",
    _timing.END_PORTS: "client_ports",
    _timing.END_EOF: "truncated",
    _timing.END_RESET: "reset",
    _timing.END_TIMEOUT: "timeout",
    _timing.END_HTTP: "malformed_event",
    _timing.END_LIMIT: "malformed_event",
    _timing.END_CANCELLED: "cancelled",
}


def failure_on_wire(end: int, http_status: int) -> str:
    """The class of a row that failed, from how its exchange ended (END_*) and its status code (-1 without one)."""
    if end not in (_timing.END_CONNECT, _timing.END_PORTS) and http_status >= 300:
        return "redirect" if http_status < 400 else "http_status"
    return CLASS_OF_END.get(end, "http_status")
