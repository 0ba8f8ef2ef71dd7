"""Connections of the measuring process: opened by uvloop, owned by the engine from then on.

The address was chosen once, before the clock; nothing is resolved here.
"""

import asyncio
import errno
import socket
import struct

from fastload import _timing

# Errors that say the client's own ports or descriptors ran out: the server is not to blame.
OWN_LIMITS = frozenset({errno.EADDRNOTAVAIL, errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


def pack(family: int, sockaddr: tuple[object, ...]) -> bytes:
    """The address as the C structure connect(2) takes, for the engine to dial again by itself."""
    host, port = str(sockaddr[0]), int(str(sockaddr[1]))
    start = struct.pack("=H", family) + struct.pack("!H", port)
    if family == socket.AF_INET:
        return start + socket.inet_pton(family, host) + bytes(8)
    flow, scope = (int(str(part)) for part in (*sockaddr[2:4], 0, 0)[:2])
    return start + struct.pack("!I", flow) + socket.inet_pton(family, host.partition("%")[0]) + struct.pack("=I", scope)


async def connect(family: int, sockaddr: tuple[object, ...], timeout_s: float) -> tuple[int, int]:
    """Open a connection: (file descriptor, ns it took). OSError when it cannot be had; TimeoutError is one."""
    started = _timing.now_ns()
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        # A request is one write: there is nothing to gather.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        loop = asyncio.get_running_loop()
        try:
            await asyncio.wait_for(loop.sock_connect(sock, sockaddr), timeout_s)
        except TimeoutError:
            raise TimeoutError(errno.ETIMEDOUT, f"no connection within {timeout_s:g} s") from None
        return sock.detach(), _timing.now_ns() - started
    except BaseException:
        sock.close()
        raise
