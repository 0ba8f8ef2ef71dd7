"""Drives the compiled byte machine, and gives what it found in the twin's words."""

from array import array
from collections.abc import Iterable, Sequence
from itertools import cycle

from twin import Answer, Event

from fastload import _timing as t

EVENTS, ROWS, ARENA, BLOCKS = 20480, 64, 2 << 20, 3
SENT_NS = 500
FIRST_NS = 1000
STEP_NS = 1000

_memory = bytearray(BLOCKS * t.block_bytes(EVENTS, ROWS, ARENA))


def stamps_of(reads: Sequence[bytes]) -> list[int]:
    """A stamp for each read, 1 us apart."""
    return [FIRST_NS + STEP_NS * i for i in range(len(reads))]


def slices(data: bytes, size: int) -> list[bytes]:
    """`data` in reads of `size` bytes."""
    return [data[i : i + size] for i in range(0, len(data), size)]


def cut(data: bytes, sizes: Iterable[int]) -> list[bytes]:
    """`data` in reads of these sizes, over and over."""
    reads, at = [], 0
    for size in cycle(sizes):
        if at >= len(data):
            return reads
        reads.append(data[at : at + size])
        at += size
    raise ValueError("no sizes")


def run(
    reads: Sequence[bytes],
    eof_ns: int | None = None,
    *,
    save_text: bool = False,
    arena: int = ARENA,
) -> Answer:
    """One exchange through the machine, its reads stamped by `stamps_of`. It stops where the message does."""
    memory = _memory if arena == ARENA else bytearray(BLOCKS * t.block_bytes(EVENTS, ROWS, arena))
    for i in range(BLOCKS):
        t.release_block(memory, i, EVENTS, ROWS, arena)
    recorder = t.Recorder(memory, BLOCKS, EVENTS, ROWS, arena)
    recorder.save_text = save_text
    parser = t.Parser(recorder)
    parser.begin(7, SENT_NS)
    blocks: list[t.Block] = []
    code = used = 0
    for data, stamp in zip(reads, stamps_of(reads), strict=True):
        code, taken = parser.feed(data, stamp)
        used += taken
        _drain(recorder, memory, arena, blocks)
        if code:
            break
        assert taken == len(data)
    assert (parser.why is None) == (code in (0, 1))
    if code == 0 and eof_ns is not None:
        code = parser.eof(eof_ns)
    row = parser.finish()
    recorder.seal()
    _drain(recorder, memory, arena, blocks)
    answer = _answer(code, used, row, blocks)
    answer.why = parser.why
    return answer


def _drain(recorder: t.Recorder, memory: bytearray, arena: int, blocks: list[t.Block]) -> None:
    for i in recorder.take_sealed():
        block = t.read_block(memory, i, EVENTS, ROWS, arena)
        assert block is not None
        blocks.append(block)
        t.release_block(memory, i, EVENTS, ROWS, arena)


def columns(block: t.Block) -> dict[str, list[int]]:
    """The event columns of a block as lists."""
    kinds = {"<i8": "q", "<i4": "i", "u1": "B"}
    return {name: array(kinds[kind], block.events[name]).tolist() for name, kind in t.EVENT_COLUMNS}


def _answer(code: int, used: int, row: dict[str, int], blocks: list[t.Block]) -> Answer:
    flags = row["row_flags"]
    answer = Answer(
        code=code,
        used=used,
        status=row["http_status"],
        framing=row["framing"],
        sse=bool(flags & t.RF_SSE),
        done=bool(flags & t.RF_DONE),
        keepalive=bool(flags & t.RF_KEEPALIVE),
        encoded=bool(flags & t.RF_ENCODED),
        first_byte_ns=row["first_byte_ns"],
        head_ns=row["head_ns"],
        done_ns=row["done_ns"],
        framing_end_ns=row["framing_end_ns"],
    )
    assert not flags & t.RF_BLOB_CUT
    kept: dict[int, bytes] = {}
    for block in blocks:
        for request, ordinal, kind, data in block.blobs:
            assert request == 7
            if kind == t.BLOB_HEAD:
                assert not answer.head
                answer.head = data
            elif kind == t.BLOB_BODY:
                answer.body += data
            else:
                assert kind == t.BLOB_EVENT and ordinal not in kept
                kept[ordinal] = data
        c = columns(block)
        for i in range(block.n_events):
            assert c["request"][i] == 7
            if c["channel"][i] == t.CH_SENT:
                assert c["stamp_ns"][i] == SENT_NS and not answer.events
                continue
            event = (c["stamp_ns"][i], c["channel"][i], c["bytes"][i], c["tokens"][i], c["flags"][i])
            answer.events.append(Event(*event))
    for ordinal, data in kept.items():
        answer.events[ordinal].payload = data
    assert row["events"] == len(answer.events)
    assert row["coalesced"] == sum(1 for e in answer.events if e.flags & t.FL_COALESCED)
    assert row["response_bytes"] == used
    return answer


def differences(found: Answer, wanted: Answer) -> list[str]:
    """Where the machine (`found`) and the twin (`wanted`) disagree; empty is good.

    What the machine leaves undecided (CH_ODD) must have its payload kept exactly, and nothing more.
    """
    names = ["code", "status", "framing", "sse", "done", "first_byte_ns", "done_ns", "framing_end_ns"]
    if wanted.code >= 0:
        names += ["used", "keepalive", "encoded", "head_ns", "head", "body"]
    wrong = [
        f"{name}: {getattr(found, name)!r}, the twin has {getattr(wanted, name)!r}"
        for name in names
        if getattr(found, name) != getattr(wanted, name)
    ]
    if len(found.events) != len(wanted.events):
        wrong.append(f"{len(found.events)} events, the twin has {len(wanted.events)}")
    usages = [i for i, e in enumerate(wanted.events) if e.flags & t.FL_USAGE]
    choices = [i for i, e in enumerate(wanted.events) if e.flags & t.FL_CHOICES]
    for i, (ours, theirs) in enumerate(zip(found.events, wanted.events, strict=False)):
        if ours.payload is None:
            if ours.channel == t.CH_ODD or ours.flags & t.FL_FINISH or i in usages[-1:] or i in choices[:1]:
                wrong.append(f"event {i} was not kept raw: {theirs}")
        elif ours.payload != theirs.payload:
            wrong.append(f"event {i}: kept {ours.payload!r}, the twin has {theirs.payload!r}")
        wire = t.FL_COALESCED | t.FL_CLAMPED | t.FL_READ
        here, there = (ours.stamp, ours.flags & wire), (theirs.stamp, theirs.flags & wire)
        if ours.channel != t.CH_ODD:
            here = (*here, ours.channel, ours.bytes, ours.tokens, ours.flags)
            there = (*there, theirs.channel, theirs.bytes, theirs.tokens, theirs.flags)
        if here != there:
            wrong.append(f"event {i}: {here}, the twin has {there} for {theirs.payload!r}")
    return wrong


def story(answer: Answer) -> tuple[object, ...]:
    """What must not depend on how the bytes were sliced: everything but stamps and coalescing."""
    events = [(e.channel, e.bytes, e.tokens, e.flags & ~t.FL_COALESCED, e.payload) for e in answer.events]
    facts = (answer.code, answer.status, answer.framing, answer.sse, answer.done, answer.keepalive)
    return (*facts, answer.encoded, answer.head, answer.body, events)
