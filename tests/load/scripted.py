"""A small TCP server that does what a test says: given bytes in given pieces, waits, closes, resets, holds.

    def script(call: Call) -> None:
        call.send(HEAD + event("one"), event("two"))     # one segment each
        call.hold(gate)                                  # until the test opens it
        call.finish(LAST)

    with serve(script) as server:
        ... server.port, server.accepts, server.requests, server.most_in_flight

One thread accepts and one serves each connection. A script is called once a request, on its connection's thread, when
all of the request has come (`early=True`: when its head has). Stamps are CLOCK_MONOTONIC in ns, as the engine's.
"""

import contextlib
import json
import re
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

WAIT_S = 20.0  # no test waits longer: past it, it has failed
LINGER = struct.pack("ii", 1, 0)

FINISH = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"length"}]}\n\n'
DONE = b"data: [DONE]\n\n"


class LeaveError(Exception):
    """Ends a connection's thread: the peer is gone, or the script said so."""


def head(framing: bytes = b"Transfer-Encoding: chunked", status: int = 200, close: bool = False) -> bytes:
    """An answer's head for an event stream."""
    kind = b"text/event-stream" if status == 200 else b"application/json"
    lines = [b"HTTP/1.1 %d X" % status, b"Content-Type: " + kind, framing, b"Connection: close" if close else b""]
    return b"\r\n".join(line for line in lines if line) + b"\r\n\r\n"


def event(text: str, **more: object) -> bytes:
    """One text event of the chat endpoint, unframed."""
    payload = {"choices": [{"index": 0, "delta": {"content": text}}], **more}
    return b"data: " + json.dumps(payload, separators=(",", ":")).encode() + b"\n\n"


def usage(tokens: int, prompt: int = 7) -> bytes:
    """The last event with the counts."""
    counts = {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}
    return b"data: " + json.dumps({"choices": [], "usage": counts}).encode() + b"\n\n"


def chunk(data: bytes) -> bytes:
    """One HTTP chunk."""
    return b"%x\r\n%s\r\n" % (len(data), data)


LAST_CHUNK = b"0\r\n\r\n"


def answer(*texts: str, close: bool = False) -> bytes:
    """A whole chunked answer: a text event for each of `texts`, finish, usage, [DONE]."""
    events = [*(event(text) for text in texts), FINISH, usage(len(texts)), DONE]
    return head(close=close) + b"".join(chunk(data) for data in events) + LAST_CHUNK


@dataclass(slots=True)
class Seen:
    """A request the server took: connection and place in it from 0, its body, and when it was complete."""

    connection: int
    ordinal: int
    head: bytes
    body: bytes
    taken_ns: int
    sends: list[tuple[int, int]] = field(default_factory=list)  # (ns before the send, bytes) of the answer


class Call:
    """One request in a script's hands."""

    def __init__(self, server: "Server", sock: socket.socket, seen: Seen, missing: int) -> None:
        self.server, self.sock, self.seen = server, sock, seen
        self.missing = missing  # bytes of the body not read yet
        self.open = False

    @property
    def number(self) -> int:
        """The number the body carries (see `body_of`); -1 when it carries none."""
        found = re.match(rb'\{"n":(\d+)', self.seen.body)
        return int(found[1]) if found else -1

    def send(self, *pieces: bytes) -> None:
        """Each piece in a send of its own, so (NODELAY) in a segment of its own."""
        for piece in pieces:
            self.seen.sends.append((time.monotonic_ns(), len(piece)))
            try:
                self.sock.sendall(piece)
            except OSError:
                raise LeaveError from None

    def finish(self, piece: bytes) -> None:
        """Send the last piece. The request leaves the server's account just before, as its slot may be quick."""
        self.account(False)
        self.send(piece)

    def finish_when(self, condition: Callable[[], bool], piece: bytes) -> None:
        """`finish` as soon as `condition()`: no other request comes or goes between the two."""
        with self.server.lock:
            while not condition():
                self.server.lock.wait(0.02)
                if self.server.closing.is_set():
                    raise LeaveError
            self.account(False)
        self.send(piece)

    def account(self, open: bool) -> None:
        """Count the request in or out."""
        if open != self.open:
            self.open = open
            self.server.count(self, open)

    def sleep(self, seconds: float) -> None:
        """Wait; the end of the test ends it too."""
        if self.server.closing.wait(seconds):
            raise LeaveError

    def hold(self, gate: threading.Event) -> None:
        """Wait until the test sets `gate`, or ends."""
        while not gate.wait(0.02):
            self.sleep(0)

    def stay(self) -> None:
        """Say and read nothing more, until the client closes or the test ends."""
        gone = select.poll()
        gone.register(self.sock, select.POLLRDHUP)
        while not gone.poll(20):
            self.sleep(0)
        raise LeaveError

    def read(self, most: int) -> bytes:
        """More of a body that has not all come, up to `most` bytes; empty when all has."""
        if not self.missing:
            return b""
        try:
            data = self.sock.recv(min(most, self.missing))
        except OSError:
            raise LeaveError from None
        if not data:
            raise LeaveError
        self.missing -= len(data)
        return data

    def close(self) -> None:
        """Close in order (FIN)."""
        raise LeaveError

    def reset(self) -> None:
        """Close with a reset (RST)."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER)
        raise LeaveError


class SealedSocket:
    """TLS over `plain` by hand: what it sends can be had as bytes first, and cut anywhere."""

    def __init__(self, plain: socket.socket, context: ssl.SSLContext) -> None:
        self.plain = plain
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.session = context.wrap_bio(self.incoming, self.outgoing, server_side=True)
        self._until_done(self.session.do_handshake)
        self.setsockopt, self.fileno = plain.setsockopt, plain.fileno

    def _until_done(self, step: Callable[[], Any]) -> Any:
        while True:
            try:
                done = step()
            except ssl.SSLWantReadError:
                self._flush()
                data = self.plain.recv(65536)
                if not data:
                    raise LeaveError from None
                self.incoming.write(data)
            except ssl.SSLError:
                self._flush()
                raise LeaveError from None
            else:
                self._flush()
                return done

    def _flush(self) -> None:
        if self.outgoing.pending:
            self.plain.sendall(self.outgoing.read())

    def seal(self, data: bytes) -> bytes:
        """The records that carry `data`, not sent."""
        while data:
            data = data[self.session.write(data) :]
        return self.outgoing.read()

    def end(self) -> bytes:
        """The record that says nothing follows, not sent."""
        with contextlib.suppress(ssl.SSLWantReadError):
            self.session.unwrap()
        return self.outgoing.read()

    def sendall(self, data: bytes) -> None:
        self.plain.sendall(self.seal(data))

    def recv(self, most: int) -> bytes:
        try:
            return bytes(self._until_done(lambda: self.session.read(most)))
        except ssl.SSLZeroReturnError:
            return b""

    def shutdown(self, how: int) -> None:
        self.plain.shutdown(how)

    def close(self) -> None:
        self.plain.close()


Script = Callable[[Call], None]


def one_by_one(call: Call) -> None:
    """A script: head, three tokens and the end, each in a segment of its own and none in the read of another."""
    call.send(head())
    for text in "abc":
        call.sleep(0.003)
        call.send(chunk(event(text)))
    call.sleep(0.003)
    call.finish(chunk(DONE) + LAST_CHUNK)


class Server:
    """What a test sees of a running server. Counters are whole at any time."""

    def __init__(
        self,
        listener: socket.socket,
        script: Script,
        early: bool,
        accept: Callable[[int], bool],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.listener, self.script, self.early, self.accept, self.tls = listener, script, early, accept, tls
        self.port = int(listener.getsockname()[1])
        self.lock = threading.Condition()  # its lock is reentrant
        self.accepts = 0
        self.requests: list[Seen] = []
        self.calls: list[Call] = []  # in flight, the oldest first
        self.most_in_flight = 0
        self.faults: list[BaseException] = []
        self._socks: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self.closing = threading.Event()

    def count(self, call: Call, open: bool) -> None:
        """A request begins or ends."""
        with self.lock:
            if open:
                self.calls.append(call)
            else:
                self.calls.remove(call)
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
            self.lock.notify_all()

    @property
    def in_flight(self) -> int:
        """Requests taken and not answered."""
        return len(self.calls)

    def wait_for(self, condition: Callable[[], bool]) -> bool:
        """Wait until `condition()`; False when it does not come true within 20 s."""
        with self.lock:
            return self.lock.wait_for(condition, WAIT_S)

    @property
    def connections(self) -> int:
        """Connections open now."""
        with self.lock:
            return len(self._socks)

    def drop(self, reset: bool = False) -> None:
        """Close every connection from here."""
        with self.lock:
            socks = list(self._socks)
        for sock in socks:
            with contextlib.suppress(OSError):
                if reset:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER)
                sock.shutdown(socket.SHUT_RDWR)

    def run(self) -> None:
        """Accept until closed."""
        while True:
            try:
                sock, _ = self.listener.accept()
            except OSError:
                return
            with self.lock:
                number = self.accepts
                self.accepts += 1
                self._socks.add(sock)
                self.lock.notify_all()
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self.accept(number):
                thread = threading.Thread(target=self._serve, args=(sock, number), daemon=True)
                self._threads.append(thread)
                thread.start()
            else:
                self._gone(sock)

    def _serve(self, sock: socket.socket, number: int) -> None:
        kept = b""
        try:
            if self.tls is not None:
                # a socket in all that scripts and this server use of one
                sock = cast(socket.socket, SealedSocket(sock, self.tls))
            for ordinal in range(1 << 30):
                kept = self._one(sock, number, ordinal, kept)
        except (LeaveError, OSError):
            pass
        except BaseException as fault:
            self.faults.append(fault)
        finally:
            self._gone(sock)

    def _one(self, sock: socket.socket, number: int, ordinal: int, kept: bytes) -> bytes:
        while b"\r\n\r\n" not in kept:
            data = sock.recv(65536)
            if not data:
                raise LeaveError
            kept += data
        top, _, body = kept.partition(b"\r\n\r\n")
        length = re.search(rb"(?i)content-length: *(\d+)", top)
        missing = int(length[1]) - len(body) if length else 0
        while missing > 0 and not self.early:
            data = sock.recv(min(missing, 1 << 20))
            if not data:
                raise LeaveError
            body += data
            missing -= len(data)
        size = len(body) + min(0, missing)
        seen = Seen(number, ordinal, top, body[:size], time.monotonic_ns())
        call = Call(self, sock, seen, max(0, missing))
        with self.lock:
            self.requests.append(seen)
        call.account(True)
        try:
            self.script(call)
        finally:
            call.account(False)
        return body[size:]

    def _gone(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError):
            sock.close()
        with self.lock:
            self._socks.discard(getattr(sock, "plain", sock))
            self.lock.notify_all()

    def close(self) -> None:
        """Stop listening and close everything."""
        self.closing.set()
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.drop()


@contextlib.contextmanager
def serve(
    script: Script,
    *,
    family: int = socket.AF_INET,
    port: int = 0,
    early: bool = False,
    accept: Callable[[int], bool] = lambda number: True,
    tls: ssl.SSLContext | None = None,
    backlog: int = 512,
) -> Iterator[Server]:
    """A server on a loopback port (a free one). `accept(number of the connection)` False: closed at once. With `tls`
    a call's `sock` is a SealedSocket.

    A fault inside a script fails the test that used the server.
    """
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("::1" if family == socket.AF_INET6 else "127.0.0.1", port))
    listener.listen(backlog)
    server = Server(listener, script, early, accept, tls)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.close()
        thread.join(WAIT_S)
        for each in server._threads:
            each.join(WAIT_S)
    if server.faults:
        raise server.faults[0]


def body_of(request: int, size: int = 0) -> bytes:
    """A request body that carries its number, padded to at least `size` bytes."""
    return b'{"n":%d,"p":"%s"}' % (request, b"x" * max(0, size - 16))


def quick(call: Call) -> None:
    """A script: answer at once."""
    call.finish(answer("one"))
