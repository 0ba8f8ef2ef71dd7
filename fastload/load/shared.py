"""Memory both processes see: blocks out, plan slices in, live counters beside them.

Standard library and our extensions only, for the measurer imports it. Each region is a memfd: it has no name to clean
up, it outlives a killed measurer, and pages that are never touched cost nothing.
"""

import mmap
import os
import struct
from collections.abc import Iterator, Sequence

from fastload import _client, _timing

BLOCKS_BYTES = _timing.BLOCKS * _timing.block_bytes()
SLICES = 8
SLICE_BYTES = 128 << 20  # a prompt of tens of millions of tokens still fits; mostly untouched
_ENTRY = struct.Struct("<qq")  # request number, bytes of its body


def create(name: str, size: int) -> int:
    """A shared memory file of `size` bytes; its descriptor, to be passed to the measurer."""
    fd = os.memfd_create(f"fastload-{name}", os.MFD_CLOEXEC)
    os.ftruncate(fd, size)
    return fd


def attach(fd: int, size: int) -> mmap.mmap:
    """Map a region made by `create`."""
    return mmap.mmap(fd, size)


def put_slice(memory: mmap.mmap, index: int, bodies: Sequence[tuple[int, bytes]]) -> None:
    """Write (request number, body) pairs as slice `index`. ValueError when they do not fit."""
    at = index * SLICE_BYTES
    end = at + SLICE_BYTES
    for request, body in bodies:
        if at + _ENTRY.size + len(body) > end:
            raise ValueError(f"a slice of {SLICE_BYTES} bytes cannot hold these requests")
        _ENTRY.pack_into(memory, at, request, len(body))
        at += _ENTRY.size
        memory[at : at + len(body)] = body
        at += len(body)


def get_slice(memory: mmap.mmap, index: int, requests: int) -> Iterator[tuple[int, bytes]]:
    """The pairs `put_slice` wrote, one at a time."""
    at = index * SLICE_BYTES
    for _ in range(requests):
        request, size = _ENTRY.unpack_from(memory, at)
        at += _ENTRY.size
        yield request, memory[at : at + size]
        at += size


class Live:
    """The counters and histograms the engine writes, read from the supervisor at a glance."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        start, size = _client.GAUGE_BYTES, _timing.Histogram.SIZE
        self.ttft, self.itl, self.delay = (
            _timing.Histogram(memory, start + i * size) for i in range(3)
        )

    def counters(self) -> dict[str, int]:
        """Name -> count since the level began (`_client.GAUGES`)."""
        names = _client.GAUGES
        return dict(zip(names, struct.unpack_from(f"<{len(names)}q", self._memory), strict=True))
