"""The clock, the histogram and the recorder: the instrument without its wires."""

import json
import math
import random
import time
from array import array
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastload import _timing as t

T = TypeVar("T")

TOP = 2**43  # ns; from here on a duration is counted as overflow
EVENTS, ROWS, ARENA = 17_000, 64, 1 << 20
BYTES = t.block_bytes(EVENTS, ROWS, ARENA)

durations = st.one_of(st.integers(0, 2000), st.integers(0, TOP - 1), st.integers(0, 43).map(lambda k: 2**k - 1))


def filled(values: list[int]) -> t.Histogram:
    histogram = t.Histogram()
    for value in values:
        histogram.record(value)
    return histogram


def nearest_rank(values: list[int], percent: int) -> int:
    """The value of rank ceil(p n / 100), by integers."""
    ordered = sorted(values)
    return ordered[max(-(-percent * len(ordered) // 100), 1) - 1]


# ---------------------------------------------------------------- clock


def test_one_clock() -> None:
    before, ours, after = time.monotonic_ns(), t.now_ns(), time.monotonic_ns()
    assert before <= ours <= after


def test_clock_offset() -> None:
    offset, width = t.clock_offset()
    assert 0 <= width < 1_000_000
    assert abs(offset - (t.realtime_ns() - t.now_ns())) < 50_000_000
    again, _ = t.clock_offset(2000)
    assert abs(again - offset) < 10_000_000
    with pytest.raises(ValueError, match="samples=0"):
        t.clock_offset(0)


# ---------------------------------------------------------------- histogram


@given(st.integers(0, TOP - 1))
def test_any_value_within_its_error(value: int) -> None:
    """Measured between two others, so that no clamp to the extremes helps."""
    middle = filled([0, value, TOP - 1]).quantile(0.5)
    assert middle is not None
    assert abs(middle - value) <= 0.004 * value
    assert value >= 256 or middle == value


@given(st.lists(durations, min_size=1, max_size=300), st.integers(0, 100))
def test_nearest_rank(values: list[int], percent: int) -> None:
    found, wanted = filled(values).quantile(percent / 100), nearest_rank(values, percent)
    assert found is not None and abs(found - wanted) <= 0.004 * wanted
    assert min(values) <= found <= max(values)


@pytest.mark.parametrize("n", [1, 2, 9, 10, 11, 99, 100, 101, 1000])
def test_ranks_are_exact(n: int) -> None:
    values = list(range(n)) if n <= 256 else [k % 256 for k in range(n)]
    histogram = filled(values)
    for percent in (0, 1, 10, 29, 50, 57, 90, 95, 99, 100):
        assert histogram.quantile(percent / 100) == nearest_rank(values, percent)


@given(st.lists(durations, max_size=100), st.lists(durations, max_size=100))
def test_merge_equals_union(left: list[int], right: list[int]) -> None:
    merged = filled(left)
    merged.merge(filled(right))
    assert merged.to_bytes() == filled(left + right).to_bytes()
    assert merged.count == len(left) + len(right)
    assert merged.max_ns == max(left + right, default=None)


@given(st.lists(st.integers(-10, TOP + 10), max_size=100))
def test_bytes_and_back(values: list[int]) -> None:
    histogram = filled(values)
    back = t.Histogram.from_bytes(histogram.to_bytes())
    assert back.to_bytes() == histogram.to_bytes()
    assert (back.count, back.overflow, back.max_ns) == (histogram.count, histogram.overflow, histogram.max_ns)
    assert [back.quantile(q / 8) for q in range(9)] == [histogram.quantile(q / 8) for q in range(9)]


def test_overflow_is_counted_and_never_clamped() -> None:
    histogram = t.Histogram()
    assert [histogram.record(v) for v in (-1, TOP, 2**62, TOP - 1, 0)] == [False, False, False, True, True]
    assert (histogram.count, histogram.overflow, histogram.max_ns) == (2, 3, TOP - 1)


def test_empty_and_cleared() -> None:
    histogram = t.Histogram()
    assert (histogram.count, histogram.quantile(0.5), histogram.max_ns) == (0, None, None)
    histogram.record(5)
    histogram.clear()
    assert (histogram.count, histogram.quantile(0.5), histogram.max_ns) == (0, None, None)
    assert histogram.to_bytes() == t.Histogram().to_bytes()


@pytest.mark.parametrize("q", [-0.01, 1.01, math.nan, math.inf])
def test_a_quantile_lies_between_0_and_1(q: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        t.Histogram().quantile(q)


@pytest.mark.parametrize("data", [b"", b"FLH1", b"FLH0" + bytes(32), b"FLH1" + bytes(33), b"FLH1" + bytes(40)])
def test_bytes_that_are_no_histogram(data: bytes) -> None:
    with pytest.raises(ValueError, match="FLH1"):
        t.Histogram.from_bytes(data)


def test_a_bucket_that_does_not_exist() -> None:
    beyond = b"FLH1" + array("q", [1, 0, 0, 0, 4736, 1]).tobytes()
    with pytest.raises(ValueError, match="bucket 4736"):
        t.Histogram.from_bytes(beyond)


def test_counts_of_another_process() -> None:
    memory = bytearray(2 * t.Histogram.SIZE + 8)
    writer, reader = t.Histogram(memory, 8), t.Histogram(memory, 8)
    writer.record(1000)
    assert (reader.count, reader.max_ns) == (1, 1000)
    for offset in (-8, t.Histogram.SIZE + 16):
        with pytest.raises(ValueError, match="offset="):
            t.Histogram(memory, offset)


# ---------------------------------------------------------------- recorder

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"


def token(text: str) -> bytes:
    return b'data: {"choices":[{"index":0,"delta":{"content":%s}}]}\n\n' % json.dumps(text).encode()


def read(memory: bytearray, index: int) -> t.Block | None:
    return t.read_block(memory, index, EVENTS, ROWS, ARENA)


def drain(recorder: t.Recorder, memory: bytearray) -> Iterator[t.Block]:
    for index in recorder.take_sealed():
        block = read(memory, index)
        assert block is not None
        yield block
        t.release_block(memory, index, EVENTS, ROWS, ARENA)


def column(block: t.Block, name: str) -> list[int]:
    codes = {"<i8": "q", "<i4": "i", "u1": "B"}
    return array(codes[dict(t.EVENT_COLUMNS)[name]], block.events[name]).tolist()


def make(blocks: int) -> tuple[bytearray, t.Recorder]:
    memory = bytearray(blocks * BYTES)
    return memory, t.Recorder(memory, blocks, EVENTS, ROWS, ARENA)


def test_seal_read_release() -> None:
    memory, recorder = make(2)
    recorder.begin_level(3)
    parser = t.Parser(recorder)
    assert [read(memory, i) for i in (0, 1)] == [None, None]
    recorder.seal()  # nothing is open
    assert recorder.take_sealed() == []
    parser.begin(5, 100)
    assert [read(memory, i) for i in (0, 1)] == [None, None]  # open is not sealed
    parser.feed(HEAD + token("ab"), 200, 7)
    recorder.seal()
    assert recorder.take_sealed() == [0]
    assert recorder.take_sealed() == []
    block = read(memory, 0)
    assert block is not None and read(memory, 0) == block  # until it is released
    assert (block.level, block.n_events, block.n_rows, block.sequence) == (3, 2, 0, 0)
    assert column(block, "stamp_ns") == [100, 200]
    assert column(block, "request") == [5, 5]
    assert column(block, "delay_ns") == [-1, 7]
    assert column(block, "bytes") == [0, 2]
    assert column(block, "tokens") == [-1, -1]
    assert column(block, "channel") == [t.CH_SENT, t.CH_CONTENT]
    assert column(block, "flags") == [0, t.FL_CHOICES]
    assert block.blobs == [(5, 0, t.BLOB_HEAD, HEAD), (5, 0, t.BLOB_EVENT, token("ab")[6:-2])]
    t.release_block(memory, 0, EVENTS, ROWS, ARENA)
    assert read(memory, 0) is None
    assert parser.eof(300) == 1
    row = parser.finish()
    recorder.seal()
    assert recorder.take_sealed() == [1]
    rest = read(memory, 1)
    assert rest is not None and (rest.n_events, rest.n_rows, rest.sequence) == (0, 1, 1)
    assert array("q", rest.rows).tolist() == [row[name] for name in t.ROW_FIELDS]
    assert row["request"] == 5 and row["sent_ns"] == 100 and row["done_ns"] == 300 and row["events"] == 1


def test_a_block_belongs_to_one_level() -> None:
    memory, recorder = make(3)
    parser = t.Parser(recorder)
    levels = []
    for level in (0, 1, 2, 3):
        recorder.begin_level(level)
        recorder.begin_level(level)  # an empty block is not lost by it
        for request in range(2):
            parser.begin(request, 1)
            parser.finish()
        recorder.seal()
        levels += [(block.level, block.n_rows, block.sequence) for block in drain(recorder, memory)]
    assert levels == [(0, 2, 0), (1, 2, 1), (2, 2, 2), (3, 2, 3)]


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 2**32), st.booleans())
def test_nothing_is_lost_over_many_blocks(seed: int, save_text: bool) -> None:
    """Answers of many requests, a small block at a time, read late and in order, often with no block free."""
    rng = random.Random(seed)
    memory, recorder = make(3)
    recorder.save_text = save_text
    assert recorder.save_text == save_text
    parsers = [t.Parser(recorder) for _ in range(4)]
    sent: dict[int, list[tuple[int, int]]] = {}
    texts: dict[int, list[bytes]] = {}
    blocks: list[t.Block] = []
    clock, request, waits = 0, 0, 0

    def insist(call: Callable[[], T]) -> T:
        nonlocal waits
        try:
            return call()
        except BufferError:
            waits += 1
            blocks.extend(drain(recorder, memory))
            return call()

    for _ in range(40):
        for parser in parsers:
            clock += 1
            insist(partial(parser.begin, request, clock))
            insist(partial(parser.feed, HEAD, clock))
            sent[request] = [(clock, -1)]
            texts[request] = []
            for _ in range(rng.randrange(4)):
                many = [token("x" * rng.randrange(1, 9)) for _ in range(rng.choice([1, 2, 600]))]
                clock += 1
                assert insist(partial(parser.feed, b"".join(many), clock))[0] == 0
                sent[request] += [(clock, len(event) - len(token(""))) for event in many]
                texts[request] += [event[6:-2] for event in many]
            assert insist(partial(parser.eof, clock)) == 1
            insist(parser.finish)
            request += 1
            if rng.randrange(9) == 0:
                blocks += drain(recorder, memory)
    assert waits
    recorder.seal()
    blocks += drain(recorder, memory)
    assert [block.sequence for block in blocks] == list(range(len(blocks)))
    assert all(block.n_events <= EVENTS and block.n_rows <= ROWS for block in blocks)
    found: dict[int, list[tuple[int, int]]] = {}
    kept: dict[int, list[bytes]] = {}
    rows: list[int] = []
    for block in blocks:
        for number, stamp, size, channel in zip(
            *(column(block, name) for name in ("request", "stamp_ns", "bytes", "channel")), strict=True
        ):
            found.setdefault(number, []).append((stamp, -1 if channel == t.CH_SENT else size))
        for number, ordinal, kind, data in block.blobs:
            if kind == t.BLOB_EVENT:
                assert ordinal == len(kept.setdefault(number, []))
                kept[number].append(data)
        values = array("q", block.rows).tolist()
        ended = values[:: len(t.ROW_FIELDS)]
        assert all(number in found for number in ended)  # a row comes with or after its events
        assert all(len(found[number]) == len(sent[number]) for number in ended)
        rows += ended
    assert found == sent
    assert rows == list(range(request))
    for number, payloads in texts.items():
        assert kept.get(number, []) == (payloads if save_text else payloads[:1])


def test_no_free_block() -> None:
    """Nothing is dropped and nothing overwritten: whoever records is told to wait, and may go on later."""
    memory, recorder = make(1)
    parser = t.Parser(recorder)
    parser.begin(1, 10)
    assert parser.feed(HEAD + token("a"), 20)[0] == 0
    recorder.seal()
    for refused in (
        lambda: parser.feed(token("b"), 30),
        lambda: parser.begin(2, 30),
        lambda: parser.eof(30),
        lambda: parser.finish(),
    ):
        with pytest.raises(BufferError, match="no free block"):
            refused()
    (block,) = drain(recorder, memory)
    assert column(block, "bytes") == [0, 1]
    assert parser.feed(token("b"), 40) == (0, len(token("b")))
    assert parser.eof(50) == 1
    assert parser.finish()["events"] == 2
    recorder.seal()
    (block,) = drain(recorder, memory)
    assert column(block, "stamp_ns") == [40] and block.n_rows == 1


def test_the_densest_read_fits() -> None:
    """The most events one read of 128 KB can end, into a block with just the room `ready` asks for."""
    smallest = next(n for n in range(16_000, 20_000) if _accepts(n))
    memory = bytearray(2 * t.block_bytes(smallest, ROWS, ARENA))
    recorder = t.Recorder(memory, 2, smallest, ROWS, ARENA)
    parser = t.Parser(recorder)
    parser.begin(9, 1)
    body = b"data:{}\ndata:{}"  # two wait for the read, one more ends with the message
    dense = b"\n\n" + b"data:{}\n" * 16383 + b"data:{"
    assert len(dense) == 131072
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (len(body) + len(dense))
    assert parser.feed(head + body, 2)[0] == 0
    assert parser.feed(dense, 3) == (1, len(dense))
    assert parser.finish()["events"] == 16386
    recorder.seal()
    requests, delays, count = [], [], 0
    for index in recorder.take_sealed():
        block = t.read_block(memory, index, smallest, ROWS, ARENA)
        assert block is not None and block.n_events <= smallest
        count += block.n_events
        requests += column(block, "request")
        delays += column(block, "delay_ns")
    assert count == 16387
    assert set(requests) == {9}
    assert delays == [-1] + [0] * 16386


def _accepts(events: int) -> bool:
    try:
        t.Recorder(bytearray(t.block_bytes(events, ROWS, ARENA)), 1, events, ROWS, ARENA)
    except ValueError:
        return False
    return True


def test_a_payload_cut_at_the_end_of_the_arena_is_said() -> None:
    memory, recorder = make(2)
    parser = t.Parser(recorder)
    parser.begin(1, 1)
    whole = token("x" * (ARENA + 5000))
    wire = HEAD + whole
    for at in range(0, len(wire), 65536):
        assert parser.feed(wire[at : at + 65536], 2)[0] == 0
    row = parser.finish()
    assert row["row_flags"] & t.RF_BLOB_CUT
    recorder.seal()
    block, _ = drain(recorder, memory)
    assert column(block, "bytes") == [0, ARENA + 5000]  # the count does not suffer
    (*_, (_, _, kind, data)) = block.blobs
    assert kind == t.BLOB_EVENT and whole[6:].startswith(data) and len(data) > ARENA // 2


def test_a_body_that_is_no_stream_is_kept() -> None:
    memory, recorder = make(1)
    parser = t.Parser(recorder)
    parser.begin(1, 1)
    body = b'{"error": "no"}'
    for piece in (b"HTTP/1.1 503 No\r\nContent-Length: 15\r\n\r\n", body[:4], body[4:]):
        code, _ = parser.feed(piece, 2)
    assert code == 1
    assert parser.finish(t.END_COMPLETE)["http_status"] == 503
    recorder.seal()
    (block,) = drain(recorder, memory)
    assert b"".join(data for _, _, kind, data in block.blobs if kind == t.BLOB_BODY) == body
    assert column(block, "channel") == [t.CH_SENT]


@pytest.mark.parametrize(
    ("blocks", "events", "rows", "arena", "match"),
    [
        (3, EVENTS, ROWS, ARENA, "3 blocks need"),
        (0, EVENTS, ROWS, ARENA, "0 blocks need"),
        (1, 16_384, ROWS, ARENA, "events=16384"),
        (1, EVENTS, 63, ARENA, "rows=63"),
        (1, EVENTS, ROWS, 1000, "arena=1000"),
    ],
)
def test_memory_that_does_not_do(blocks: int, events: int, rows: int, arena: int, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        t.Recorder(bytearray(2 * BYTES), blocks, events, rows, arena)


@pytest.mark.parametrize("index", [-1, 2, 1 << 20])
def test_a_block_that_does_not_exist(index: int) -> None:
    memory, _ = make(2)
    with pytest.raises(IndexError, match=f"index={index}"):
        read(memory, index)
    with pytest.raises(IndexError, match=f"index={index}"):
        t.release_block(memory, index, EVENTS, ROWS, ARENA)


def test_feeding_before_begin() -> None:
    _, recorder = make(1)
    with pytest.raises(ValueError, match="begin"):
        t.Parser(recorder).feed(b"x", 1)
