"""One engine in the test's own process, with small blocks, and what came out of it as dicts."""

import asyncio
import mmap
import os
import select
import socket
import ssl
import struct
import time
from collections.abc import Callable
from typing import Any, Self

from scripted import WAIT_S, body_of

from fastload import _client, _timing
from fastload.load import connections

EVENTS, ROWS, ARENA = 32768, 256, 1 << 20  # of a block: the least that holds more than one read
NEVER = 1 << 60  # ns


class Taken:
    """What blocks held: `rows`, `events` per request (in order, CH_SENT included), `blobs`, and their sequences."""

    def __init__(self) -> None:
        self.rows: list[dict[str, int]] = []
        self.events: dict[int, list[dict[str, int]]] = {}
        self.blobs: list[tuple[int, int, int, bytes]] = []
        self.sequences: list[int] = []

    def add_block(self, block: _timing.Block) -> None:
        """Take a block's columns as dicts."""
        self.sequences.append(block.sequence)
        fields = _timing.ROW_FIELDS
        for values in struct.iter_unpack(f"<{len(fields)}q", block.rows):
            self.rows.append(dict(zip(fields, values, strict=True)))
        codes = {"<i8": "q", "<i4": "i", "u1": "B"}
        columns: dict[str, Any] = {
            name: struct.unpack(f"<{block.n_events}{codes[kind]}", block.events[name])
            for name, kind in _timing.EVENT_COLUMNS
        }
        for i in range(block.n_events):
            one = {name: values[i] for name, values in columns.items()}
            self.events.setdefault(one["request"], []).append(one)
        self.blobs += block.blobs

    def stream(self, request: int) -> list[dict[str, int]]:
        """The request's events without the marker of its sending."""
        return [one for one in self.events.get(request, []) if one["channel"] != _timing.CH_SENT]

    def error(self, request: int) -> str:
        """What the measurer said of the request."""
        said = [raw for number, _, kind, raw in self.blobs if (number, kind) == (request, _timing.BLOB_ERROR)]
        return said[0].decode() if said else ""


class Rig(Taken):
    """An engine of `slots` slots for the loopback port `port`; what `collect` took out of its sealed blocks.

    `dial=False`: the engine does not connect by itself. With `context` it speaks TLS to "localhost".
    """

    def __init__(
        self,
        slots: int,
        port: int,
        *,
        family: int = socket.AF_INET,
        dial: bool = True,
        stamp: str = "kernel",
        blocks: int = 4,
        rows: int = ROWS,
        context: ssl.SSLContext | None = None,
    ) -> None:
        super().__init__()
        self.sizes = (EVENTS, rows, ARENA)
        self.memory = mmap.mmap(-1, blocks * _timing.block_bytes(*self.sizes))
        self.recorder = _timing.Recorder(self.memory, blocks, *self.sizes)
        self.engine = _client.Engine(self.recorder, slots, bytearray(_client.MEMORY_BYTES), stamp)
        self.engine.low_water = slots
        self.family = family
        self.address = ("::1" if family == socket.AF_INET6 else "127.0.0.1", port)
        if dial and context is None:
            self.engine.dial_to(family, connections.pack(family, self.address))
        self.route = connections.Route(family, self.address, None, context, "localhost")
        self.next_request = 0

    def open(self, *slots: int, connect_ns: int = -1) -> Self:
        """Connect these slots from Python."""
        for slot in slots:
            if self.route.is_bare:
                self.engine.attach(slot, self.socket(), connect_ns)
            else:
                made = self.connect()
                self.engine.attach(slot, made.fd, connect_ns, tls=made.tls, tls_ns=made.tls_ns)
        return self

    def connect(self) -> connections.Connection:
        """A connection as the measurer makes it, TLS and all."""
        return asyncio.run(connections.connect(self.route, WAIT_S, self.engine.tls_session()))

    def socket(self) -> int:
        """A connected socket's descriptor, as `attach` wants it."""
        sock = socket.create_connection(self.address)
        sock.setblocking(False)
        return sock.detach()

    def begin(self, streams: int, measured: int, warmup: int = 0, level: int = 0) -> Self:
        """Begin a level."""
        self.engine.begin_level(level, streams, warmup, measured)
        return self

    def arm(self, count: int, size: int = 0, due_ns: int = -1) -> Self:
        """Arm the next `count` requests, and send what can be sent."""
        for _ in range(count):
            body = body_of(self.next_request, size)
            request = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
            self.engine.arm(self.next_request, request, due_ns)
            self.next_request += 1
        self.engine.pump()
        return self

    def turn(self, wait_s: float = 0.02) -> bool:
        """What the loop would do once: wait until the engine's descriptor is readable, and drain."""
        readable, _, _ = select.select([self.engine.fileno()], [], [], wait_s)
        return bool(readable) and self.engine.drain()

    def until(self, condition: Callable[[], bool], each: Callable[[], object] = lambda: None) -> Self:
        """Turn until `condition()`, calling `each` between turns; the test fails after 20 s."""
        give_up = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < give_up, f"nothing more came; {self.engine.counters()}"
            self.turn()
            each()
            self.collect(seal=False)
        return self

    def over(self) -> bool:
        """Has the level no request on the wire, and wants no more?"""
        return not self.engine.wants() and self.engine.busy == 0

    def finish(self, more: int = 0) -> Self:
        """Turn until the level is over, connecting what was lost and arming `more` requests whenever fewer than that
        are; then take everything.
        """

        def attend() -> None:
            self.reconnect()
            if self.engine.armed < more and self.engine.wants():
                self.arm(more)

        self.until(self.over, attend)
        return self.collect()

    def reconnect(self) -> None:
        """Connect the slots the engine left to Python, and let go on who is held, as long as the level wants them."""
        for slot in self.engine.take_lost():
            if self.engine.is_held(slot):
                self.engine.release(slot)
            elif not self.over():
                self.open(slot)
        self.engine.pump()

    def collect(self, seal: bool = True) -> Self:
        """Take and release the sealed blocks."""
        if seal:
            self.recorder.seal()
        for index in self.recorder.take_sealed():
            block = _timing.read_block(self.memory, index, *self.sizes)
            assert block is not None
            _timing.release_block(self.memory, index, *self.sizes)
            self.add_block(block)
        return self

    def count(self, name: str) -> int:
        """A counter of the level."""
        return self.engine.counters()[name]


def descriptors() -> int:
    """How many this process has open."""
    return len(os.listdir("/proc/self/fd"))
