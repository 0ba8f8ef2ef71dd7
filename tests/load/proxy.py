"""A relay that does to the bytes on their way back what networks and gateways do: cuts, delays, repeats, resets.

    with meddling(port, lambda connection: cuts(5000) if connection == 3 else passes) as relay:
        ... relay.port, relay.connections

What goes to the server passes as it is. Each connection has a thread a direction.
"""

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator

from scripted import LINGER, WAIT_S


class Way:
    """The way back to one client: how far it is, and what can be done on it."""

    def __init__(self, client: socket.socket, closing: threading.Event) -> None:
        self.client, self.closing = client, closing
        self.passed = 0  # bytes
        self.kept = b""

    def send(self, data: bytes) -> None:
        """On to the client."""
        if data:
            self.client.sendall(data)
            self.passed += len(data)

    def sleep(self, seconds: float) -> None:
        """Hold everything up; the end of the test ends it too."""
        self.closing.wait(seconds)

    def close(self) -> None:
        """End both sides in order."""
        raise EOFError

    def reset(self) -> None:
        """End the client's side with a reset."""
        self.client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER)
        raise EOFError


Meddle = Callable[[Way, bytes], None]  # called for each piece that came; at the end for an empty one


def passes(way: Way, piece: bytes) -> None:
    """Nothing is done."""
    way.send(piece)


def once(condition: Callable[[], bool], meddle: Meddle) -> Meddle:
    """Nothing is done, and nothing counted, until the condition holds."""
    return lambda way, piece: meddle(way, piece) if condition() else way.client.sendall(piece)


def cuts(after: int, reset: bool = False) -> Meddle:
    """Pass so many bytes, and end there."""

    def meddle(way: Way, piece: bytes) -> None:
        way.send(piece[: max(0, after - way.passed)])
        if way.passed >= after:
            way.reset() if reset else way.close()

    return meddle


def delays(seconds: float) -> Meddle:
    """Hold each piece back for a while."""
    return lambda way, piece: (way.sleep(seconds), way.send(piece))  # type: ignore[func-returns-value]


def dribbles(size: int) -> Meddle:
    """Cut what comes into pieces of `size` bytes, each a segment."""

    def meddle(way: Way, piece: bytes) -> None:
        for at in range(0, len(piece), size):
            way.send(piece[at : at + size])

    return meddle


def repeats(what: Callable[[bytes], bytes], after: int) -> Meddle:
    """Once, behind so many bytes: send the piece, and then `what(piece)` of it again."""

    def meddle(way: Way, piece: bytes) -> None:
        again = what(piece) if way.passed >= after and way.kept == b"" else b""
        way.send(piece)
        if again:
            way.kept = again
            way.send(again)

    return meddle


def collects(size: int) -> Meddle:
    """Hold what comes back until `size` bytes are there, or the end of an answer is."""

    def meddle(way: Way, piece: bytes) -> None:
        way.kept += piece
        while len(way.kept) >= size:
            way.send(way.kept[:size])
            way.kept = way.kept[size:]
        if not piece or way.kept.endswith(b"\r\n0\r\n\r\n"):
            way.send(way.kept)
            way.kept = b""

    return meddle


class Relay:
    """A running one."""

    def __init__(self, listener: socket.socket, target: int, fate: Callable[[int], Meddle]) -> None:
        self.listener, self.target, self.fate = listener, target, fate
        self.port = int(listener.getsockname()[1])
        self.connections = 0
        self.closing = threading.Event()
        self.threads: list[threading.Thread] = []
        self.socks: set[socket.socket] = set()
        self.lock = threading.Lock()

    def run(self) -> None:
        """Accept until closed."""
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            number, self.connections = self.connections, self.connections + 1
            self.spawn(self.join, client, number)

    def spawn(self, work: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=work, args=args, daemon=True)
        self.threads.append(thread)
        thread.start()

    def join(self, client: socket.socket, number: int) -> None:
        """Serve one connection."""
        with contextlib.ExitStack() as held, contextlib.suppress(OSError, EOFError):
            held.callback(self.drop, client)
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            server = socket.create_connection(("127.0.0.1", self.target))
            held.callback(self.drop, server)
            server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self.lock:
                self.socks |= {client, server}
            self.spawn(self.forward, client, server)
            way, meddle = Way(client, self.closing), self.fate(number)
            while piece := server.recv(65536):
                meddle(way, piece)
            meddle(way, b"")

    def forward(self, client: socket.socket, server: socket.socket) -> None:
        """What goes to the server."""
        with contextlib.suppress(OSError):
            while data := client.recv(65536):
                server.sendall(data)
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)

    def drop(self, sock: socket.socket) -> None:
        with self.lock:
            self.socks.discard(sock)
        # wakes the other direction; behind a reset nothing is said any more
        with contextlib.suppress(OSError):
            reset = struct.unpack("ii", sock.getsockopt(socket.SOL_SOCKET, socket.SO_LINGER, 8))[0]
            sock.shutdown(socket.SHUT_RD if reset else socket.SHUT_RDWR)
        sock.close()

    def close(self) -> None:
        self.closing.set()
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        with self.lock:
            socks = list(self.socks)
        for sock in socks:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def meddling(target: int, fate: Callable[[int], Meddle]) -> Iterator[Relay]:
    """A relay to the loopback port `target`; `fate(number of the connection)` says what is done on it."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    relay = Relay(listener, target, fate)
    relay.spawn(relay.run)
    try:
        yield relay
    finally:
        relay.close()
        for thread in relay.threads:
            thread.join(WAIT_S)
