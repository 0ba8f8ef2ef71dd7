"""One input of the fuzzers: an answer, how it is cut, and what must hold of it. Used by bench/fuzz.py and by tests.

An input is three bytes of choices and then the wire. Choices: what head stands before it, whether all payloads are
kept, whether the peer closes; then two sizes of reads, in turn.
"""

import ctypes
import json
import lzma
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

from machine import STEP_NS, cut, differences, run, stamps_of, story
from twin import read_answer

CORPUS = Path(__file__).parent / "data" / "corpus.json.xz"
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
HEADS = (b"", STREAM + b"\r\n", STREAM + b"Transfer-Encoding: chunked\r\n\r\n", b"HTTP/1.1 200 OK\r\n")
KEPT, CLOSES = 4, 8


def check(data: bytes, exact: bool = False) -> None:
    """The machine must tell the twin's story of this input, and the same of the whole and of the cut answer.

    exact: each read lies in memory of its own size, for a sanitizer to see a byte too many. AssertionError if not.
    """
    if len(data) < 4:
        return
    choices, wire = data[0], HEADS[data[0] & 3] + data[3:]
    reads = cut(wire, (1 + data[1] % 16, 1 + data[2]))
    eof_ns = stamps_of(reads)[-1] + STEP_NS if choices & CLOSES else None
    save_text = bool(choices & KEPT)
    places = exactly if exact else nullcontext
    with places(reads) as lying:
        found = run(lying, eof_ns, save_text=save_text)
    with places([wire]) as lying:
        whole = run(lying, eof_ns, save_text=save_text)
    wrong = differences(found, read_answer(reads, stamps_of(reads), eof_ns))
    assert wrong == [], wrong
    assert story(found) == story(whole), (story(found), story(whole))


@contextmanager
def exactly(reads: Sequence[bytes]) -> Iterator[list[memoryview]]:
    """The reads, each in a malloc of its own size: behind a bytes object stands a NUL, which would hide an overread."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes, libc.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]
    places = []
    try:
        for read in reads:
            places.append(libc.malloc(len(read)))
            ctypes.memmove(places[-1], read, len(read))
        yield [
            memoryview((ctypes.c_ubyte * len(read)).from_address(at)).cast("B")
            for read, at in zip(reads, places, strict=True)
        ]
    finally:
        for at in places:
            libc.free(at)


def read_corpus() -> list[bytes]:
    """The inputs the coverage-guided fuzz found worth keeping."""
    return [b64decode(text) for text in json.loads(lzma.decompress(CORPUS.read_bytes()))]


def write_corpus(inputs: Iterable[bytes]) -> int:
    """Keep these inputs, in an order of their own; the bytes of the file."""
    texts = [b64encode(data).decode() for data in sorted(set(inputs))]
    CORPUS.write_bytes(lzma.compress(json.dumps(texts, indent=0).encode(), preset=9 | lzma.PRESET_EXTREME))
    return CORPUS.stat().st_size
