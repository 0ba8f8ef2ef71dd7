"""A proxy's answer to CONNECT, as both processes read it."""

from fastload.load.hiding import hide_start

TUNNEL_HEAD = 65_536  # the longest head that is read
NO_ANSWER = "the proxy gave no answer to CONNECT that is HTTP"


def tunnel_refusal(head: bytes) -> str | None:
    """Why there is no tunnel, from the head of the proxy's answer; None when there is one (any 2xx, RFC 9110 9.3.6)."""
    line = head.partition(b"\r\n")[0].decode("latin-1")
    version, _, status = line.partition(" ")
    if version.startswith("HTTP/1.") and status.startswith("2"):
        return None
    shown = "".join(c if c.isprintable() else "?" for c in hide_start(status or line, 100))
    return f"the proxy refuses the tunnel ({shown})"
