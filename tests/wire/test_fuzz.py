"""The machine against its twin on answers nobody wrote by hand; and rubbish, limits and large events."""

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from answers import cuts, half_pairs, rubbish, streams
from hypothesis import given, settings
from machine import STEP_NS, cut, differences, run, slices, stamps_of, story
from twin import read_answer

from fastload import _timing as t

STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
CODES = (0, 1, -5, -6)


def compare(reads: list[bytes], save_text: bool = False) -> None:
    eof_ns = stamps_of(reads)[-1] + STEP_NS
    found = run(reads, eof_ns, save_text=save_text)
    assert differences(found, read_answer(reads, stamps_of(reads), eof_ns)) == []
    assert found.code == 1


@settings(deadline=None, max_examples=200)
@given(wire=streams(plain=False), sizes=cuts)
def test_machine_equals_twin(wire: bytes, sizes: list[int]) -> None:
    compare([wire])
    compare(cut(wire, sizes))
    compare(cut(wire, sizes), save_text=True)


@settings(deadline=None, max_examples=150)
@given(wire=streams(plain=True), sizes=cuts)
def test_everyday_events_need_no_parser(wire: bytes, sizes: list[int]) -> None:
    compare(cut(wire, sizes))
    found = run([wire], 10**6)
    assert all(e.channel != t.CH_ODD for e in found.events)


@settings(deadline=None, max_examples=100)
@given(wire=streams(plain=False), sizes=cuts)
def test_slicing_changes_nothing(wire: bytes, sizes: list[int]) -> None:
    whole = story(run([wire], 10**6, save_text=True))
    assert story(run(cut(wire, sizes), 10**6, save_text=True)) == whole
    assert story(run(slices(wire, 1), 10**6, save_text=True)) == whole


@settings(deadline=None, max_examples=100)
@given(wire=streams(plain=False), sizes=cuts, text=rubbish)
def test_cut_and_disturbed_answers(wire: bytes, sizes: list[int], text: bytes) -> None:
    """Cut anywhere, and with rubbish in the middle: the same story in every slicing, and a known end."""
    middle = len(wire) // 2
    for broken in (wire[:middle], wire[:middle] + text + wire[middle:]):
        whole = run([broken], 10**6, save_text=True)
        assert whole.code in CODES
        assert story(run(cut(broken, sizes), 10**6, save_text=True)) == story(whole)
    if middle:
        reads = cut(wire[:middle], sizes)
        eof_ns = stamps_of(reads)[-1] + STEP_NS
        assert differences(run(reads, eof_ns), read_answer(reads, stamps_of(reads), eof_ns)) == []


@settings(deadline=None, max_examples=200)
@given(wire=rubbish, sizes=cuts)
def test_rubbish(wire: bytes, sizes: list[int]) -> None:
    for head in (b"", STREAM + b"\r\n", STREAM + b"Transfer-Encoding: chunked\r\n\r\n"):
        whole = run([head + wire], save_text=True)
        assert whole.code in CODES
        assert story(run(cut(head + wire, sizes), save_text=True)) == story(whole)


@settings(deadline=None, max_examples=20)
@given(text=half_pairs)
def test_half_a_surrogate_pair(text: str) -> None:
    """An emoji cut between two tokens: each half stands for two of its four bytes."""
    body = b'data: {"choices":[{"index":0,"delta":{"content":%s}}]}\n\n' % json.dumps(text).encode()
    compare([STREAM + b"\r\n" + body])
    compare([STREAM + b"\r\n" + body * 3])  # the second and third by the fast path


GUARDED = r"""
import ctypes, mmap, random, sys
sys.path.insert(0, sys.argv[1])
import test_cases
from fastload import _timing as t
from machine import ARENA, BLOCKS, EVENTS, ROWS

# The bytes of each read end where a page nobody may touch begins: one byte too far is a crash.
PAGE = mmap.PAGESIZE
memory = mmap.mmap(-1, 3 * PAGE)
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.mprotect(ctypes.c_void_p(address + 2 * PAGE), PAGE, 0) == 0
view = memoryview(memory)[: 2 * PAGE]
blocks = bytearray(BLOCKS * t.block_bytes(EVENTS, ROWS, ARENA))
rng = random.Random(1)
fed = 0
for case in test_cases.CASES:
    wire = b"".join(test_cases.segments(case))[:6000]
    for size in (1, 7, 64, 500, 6000):
        for edits in (0, 3):
            data = bytearray(wire)
            for _ in range(edits):
                data[rng.randrange(len(data))] = rng.choice(b'\r\n"{}[]\\0:a ')
            for i in range(BLOCKS):
                t.release_block(blocks, i, EVENTS, ROWS, ARENA)
            parser = t.Parser(t.Recorder(blocks, BLOCKS, EVENTS, ROWS, ARENA))
            parser.begin(0, 1)
            for at in range(0, len(data), size):
                piece = data[at : at + size]
                place = view[2 * PAGE - len(piece) :]
                place[:] = piece
                code, taken = parser.feed(place, at + 2)
                fed += taken
                assert code in (0, 1, -5, -6)
                if code:
                    break
print(fed)
"""


def test_no_byte_beyond_the_read_is_touched() -> None:
    here = str(Path(__file__).parent)
    done = subprocess.run(
        [sys.executable, "-P", "-c", GUARDED, here], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 100_000


# ---------------------------------------------------------------- limits


def code_of(wire: bytes) -> int:
    """The code, the same whole and in pieces."""
    code = run([wire], arena=4 << 20).code
    assert run(slices(wire, 1000), arena=4 << 20).code == code
    return code


def test_head_limit() -> None:
    def head(size: int) -> bytes:
        rest = b"\r\nContent-Length: 0\r\n\r\n"
        start = b"HTTP/1.1 200 OK\r\nX: "
        return start + b"x" * (size - len(start) - len(rest)) + rest

    assert code_of(head(65536)) == 1
    assert code_of(head(65537)) == -6
    assert code_of(b"x" * 65536) == 0
    assert code_of(b"x" * 65537) == -6


def test_trailer_limit() -> None:
    trailers = b"X: " + b"x" * 32762 + b"\r\nY: " + b"y" * 32762
    answer = STREAM + b"Transfer-Encoding: chunked\r\n\r\n0\r\n"
    assert code_of(answer + trailers + b"\r\n\r\n") == 1
    assert code_of(answer + trailers + b"y\r\n\r\n") == -6


@pytest.mark.parametrize("extension", [b";", b" "])
def test_chunk_extension_limit(extension: bytes) -> None:
    answer = STREAM + b"Transfer-Encoding: chunked\r\n\r\n0" + extension
    assert code_of(answer + b" " * 65535 + b"\n\n") == 1
    assert code_of(answer + b" " * 65537) == -6


@pytest.mark.parametrize(
    ("size", "code"),
    [
        (b"0" * 14 + b"1", 0),
        (b"f" * 15, 0),
        (b"0" * 15 + b"1", -6),
        (b"f" * 16, -6),
        (b"g", -5),
        (b"-1", -5),
        (b"0x1", -5),
        (b"", -5),
    ],
)
def test_chunk_size_limit(size: bytes, code: int) -> None:
    assert code_of(STREAM + b"Transfer-Encoding: chunked\r\n\r\n" + size + b"\r\n") == code


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        (b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n", -5),
        (b"Transfer-Encoding: chunked\r\nContent-Length: 0\r\n", -5),
        (b"Content-Length: 3\r\nContent-Length: 4\r\n", -5),
        (b"Content-Length: 3\r\nContent-Length: 3\r\n", 0),
        (b"Content-Length: -3\r\n", -5),
        (b"Content-Length: 3x\r\n", -5),
        (b"Content-Length:\r\n", -5),
        (b"Content-Length: 999999999999999999\r\n", -5),
        (b"Content-Length: 00\r\n", 1),
    ],
)
def test_lengths(headers: bytes, code: int) -> None:
    assert code_of(STREAM + headers + b"\r\n") == code


def test_line_ends_of_one_byte() -> None:
    """RFC 9112 lets a recipient take a lone LF for a line end."""
    wire = b"HTTP/1.1 200 OK\nTransfer-Encoding: chunked\n\n7\ndata: x\n2\n\n\n\n0\n\n"
    assert code_of(wire) == 1
    compare(slices(wire, 5))


def test_a_chunk_longer_than_its_size() -> None:
    answer = run([STREAM + b"Transfer-Encoding: chunked\r\n\r\n3\r\ndata\r\n"])
    assert answer.code == -5


@pytest.mark.parametrize("start", [b"HTTP/2 200", b"HTTP/1.1 20", b"HTTP/1.1 abc", b"ICY 200 OK", b"HTTP/1.1 099"])
def test_no_http(start: bytes) -> None:
    assert code_of(start + b" OK\r\nX: y\r\n\r\n") == -5


@pytest.mark.parametrize(
    ("version", "options", "kept"),
    [
        (b"1", b"", True),
        (b"0", b"", False),
        (b"0", b"Connection: keep-alive\r\n", True),
        (b"1", b"Connection: close\r\n", False),
        (b"1", b"Connection: Keep-Alive, Close\r\n", False),
        (b"1", b"Connection: keep-alive\r\nConnection: close\r\n", False),
        (b"1", b"Keep-Alive: timeout=5\r\n", True),
    ],
)
def test_does_the_server_keep_the_connection(version: bytes, options: bytes, kept: bool) -> None:
    answer = run([b"HTTP/1." + version + b" 200 OK\r\n" + options + b"Content-Length: 0\r\n\r\n"])
    assert answer.code == 1 and answer.keepalive == kept


def test_feeding_on_after_the_end() -> None:
    """Bytes after the message are not taken, and the code stays that of the end."""
    for wire, code in ((STREAM + b"Content-Length: 0\r\n\r\n", 1), (b"rubbish\r\n\r\n", -5)):
        memory = bytearray(t.block_bytes(20480, 64, 1 << 20))
        parser = t.Parser(t.Recorder(memory, 1, 20480, 64, 1 << 20))
        parser.begin(0, 1)
        assert parser.feed(wire, 2) == (code, len(wire))
        assert parser.feed(b"HTTP/1.1 200 OK\r\n\r\n", 3) == (code, 0)


# ---------------------------------------------------------------- large events


@pytest.mark.parametrize("read", [1000, 65536, 131072])
def test_an_event_of_several_megabytes(read: int) -> None:
    text = "".join(random.Random(2).choices('aé"\\\n🌍', k=2_000_000))
    payload = json.dumps({"choices": [{"index": 0, "delta": {"content": text}}]}).encode()
    body = b"data: " + payload + b"\n\n" + b"data: [DONE]\n\n"
    wire = STREAM + b"Content-Length: %d\r\n\r\n" % len(body) + body
    answer = run(slices(wire, read), arena=24 << 20)
    assert answer.code == 1 and answer.done
    assert (answer.events[0].channel, answer.events[0].bytes) == (t.CH_CONTENT, len(text.encode()))
    assert answer.events[0].payload == payload


def test_many_data_lines() -> None:
    """No square of the number of lines: ten times as many take ten times as long, not a hundred."""

    def wire(count: int) -> tuple[list[str], bytes]:
        lines = ["{", *(f' "k{i}": {i},' for i in range(count)), ' "choices": []', "}"]
        return lines, "".join(f"data: {line}\n" for line in lines).encode() + b"\n"

    def took(body: bytes) -> int:
        before = time.monotonic_ns()
        run(slices(STREAM + b"\r\n" + body, 65536), 10**9, arena=16 << 20)
        return time.monotonic_ns() - before

    lines, body = wire(100_000)
    assert took(body) < 40 * min(took(wire(10_000)[1]) for _ in range(3))
    answer = run(slices(STREAM + b"\r\n" + body, 65536), 10**9, arena=16 << 20)
    assert [e.payload for e in answer.events] == ["\n".join(lines).encode()]


def test_event_limit() -> None:
    """64 MB, in one line and in many."""
    for piece in (b"x" * 65536, b"x" * 65000 + b"\ndata:"):
        memory = bytearray(t.block_bytes(20480, 64, 1 << 20))
        parser = t.Parser(t.Recorder(memory, 1, 20480, 64, 1 << 20))
        parser.begin(0, 1)
        assert parser.feed(STREAM + b"\r\ndata: ", 2)[0] == 0
        fed, code = 0, 0
        while code == 0 and fed < 70 << 20:
            code, taken = parser.feed(piece, 3)
            fed += taken
        assert code == -6 and parser.why is not None and "64 MB" in parser.why
        assert (64 << 20) - 70_000 < fed < (64 << 20) + 140_000
