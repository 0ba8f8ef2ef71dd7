"""Connections of the measuring process: opened by uvloop, owned by the engine from then on.

The address was chosen once, before the clock; nothing is resolved here. On the way to the server may stand a proxy,
asked for a tunnel, and around the bytes TLS, whose handshake is made here and whose records the engine opens.
"""

import asyncio
import errno
import os
import socket
import ssl
import struct
from dataclasses import dataclass

from fastload import _timing
from fastload.load import tls
from fastload.load.tunnel import NO_ANSWER, TUNNEL_HEAD, tunnel_refusal

# Errors that say the client's own ports or descriptors ran out: the server is not to blame.
OWN_LIMITS = frozenset({errno.EADDRNOTAVAIL, errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
READ_BYTES = 65_536


@dataclass(frozen=True, slots=True)
class Route:
    """The way to the server: a socket address (the proxy's if there is one), the head of the CONNECT request, and for
    TLS a context and the name the server's certificate must have."""

    family: int
    sockaddr: tuple[object, ...]
    tunnel: bytes | None = None
    context: ssl.SSLContext | None = None
    server_name: str | None = None

    @property
    def is_bare(self) -> bool:
        """Is a TCP connection all it takes? Then the engine can dial by itself."""
        return self.tunnel is None and self.context is None


@dataclass(frozen=True, slots=True)
class Connection:
    """An open connection: its descriptor, the ns it took (tunnel included), and of TLS the session over its two
    MemoryBIOs and the ns of its handshake (-1 without TLS)."""

    fd: int
    connect_ns: int
    tls: tuple[ssl.SSLObject, ssl.MemoryBIO, ssl.MemoryBIO] | None = None
    tls_ns: int = -1


class RefusedError(OSError):
    """The TCP connection came about, but the proxy or TLS did not let us through; `strerror` says why."""


def pack(family: int, sockaddr: tuple[object, ...]) -> bytes:
    """The address as the C structure connect(2) takes, for the engine to dial again by itself."""
    host, port = str(sockaddr[0]), int(str(sockaddr[1]))
    start = struct.pack("=H", family) + struct.pack("!H", port)
    if family == socket.AF_INET:
        return start + socket.inet_pton(family, host) + bytes(8)
    flow, scope = (int(str(part)) for part in (*sockaddr[2:4], 0, 0)[:2])
    return start + struct.pack("!I", flow) + socket.inet_pton(family, host.partition("%")[0]) + struct.pack("=I", scope)


async def connect(route: Route, timeout_s: float, session: ssl.SSLSession | None = None) -> Connection:
    """Open a connection along `route` within `timeout_s`, all its steps together.

    `session` is a TLS session to take up again. OSError when it cannot be had; TimeoutError and RefusedError are two.
    """
    sock = socket.socket(route.family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        # A request is one write: there is nothing to gather.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        async with asyncio.timeout(timeout_s):
            return await _open(sock, route, session)
    except TimeoutError:
        sock.close()
        raise TimeoutError(errno.ETIMEDOUT, f"no connection within {timeout_s:g} s") from None
    except BaseException:
        sock.close()
        raise


async def _open(sock: socket.socket, route: Route, session: ssl.SSLSession | None) -> Connection:
    started = _timing.now_ns()
    await asyncio.get_running_loop().sock_connect(sock, route.sockaddr)
    if route.tunnel is not None:
        await _ask_tunnel(sock, route.tunnel)
    connected = _timing.now_ns()
    if route.context is None:
        return Connection(sock.detach(), connected - started)
    parts = await _shake_hands(sock, route.context, route.server_name, session)
    return Connection(sock.detach(), connected - started, parts, _timing.now_ns() - connected)


async def _ask_tunnel(sock: socket.socket, request: bytes) -> None:
    """Have the proxy connect us through. It says nothing of its own behind its answer's head."""
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(sock, request)
    head = b""
    while b"\r\n\r\n" not in head:
        got = await loop.sock_recv(sock, READ_BYTES)
        head += got
        if not got or len(head) > TUNNEL_HEAD:
            raise RefusedError(errno.ECONNREFUSED, NO_ANSWER)
    refusal = tunnel_refusal(head)
    if refusal is not None:
        raise RefusedError(errno.ECONNREFUSED, refusal)


async def _shake_hands(
    sock: socket.socket, context: ssl.SSLContext, name: str | None, session: ssl.SSLSession | None
) -> tuple[ssl.SSLObject, ssl.MemoryBIO, ssl.MemoryBIO]:
    loop = asyncio.get_running_loop()
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    shaking = context.wrap_bio(incoming, outgoing, server_hostname=name, session=session)
    while True:
        try:
            shaking.do_handshake()
        except ssl.SSLWantReadError:
            if outgoing.pending:
                await loop.sock_sendall(sock, outgoing.read())
            got = await loop.sock_recv(sock, READ_BYTES)
            if not got:
                raise RefusedError(errno.ECONNRESET, "TLS: the server closed during the handshake") from None
            incoming.write(got)
        except ssl.SSLError as error:
            if outgoing.pending:  # the alert that tells the server why
                await loop.sock_sendall(sock, outgoing.read())
            raise RefusedError(errno.EPROTO, tls.fault(error) or str(error)) from None
        else:
            break
    if outgoing.pending:
        await loop.sock_sendall(sock, outgoing.read())
    return shaking, incoming, outgoing


def dial_fault(error: int, timeout_s: float) -> OSError:
    """What the engine's own dial met, from its errno."""
    if error == errno.ETIMEDOUT:
        return TimeoutError(error, f"no connection within {timeout_s:g} s")
    return OSError(error, os.strerror(error))


def why(error: OSError) -> str:
    """What happened, without the address and the tuple asyncio puts into it."""
    if isinstance(error, TimeoutError | RefusedError) or not error.errno:
        return error.strerror or str(error)
    return os.strerror(error.errno)
