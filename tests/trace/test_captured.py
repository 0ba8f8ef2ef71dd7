"""The row of every whole captured stream, against a plain reading of its bytes."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from fastload import _timing as t
from fastload.trace.rows import LevelRows
from fastload.trace.tables import AT, RowContext

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "real"))

from recorder import Heard, agrees, heard_of, streams_of  # noqa: E402

DATA = HERE.parent / "wire" / "data"
CAPTURES = [json.loads(line) for line in (DATA / "captures.jsonl").read_text().splitlines()]
SENT_NS, STEP_NS = 10**9, 10**6
# Failures have tests of their own; with several choices or prompts one answer is not the sum of its events; llama.cpp's
# own API is none of ours.
OTHERS = ("_n2", "batch", "fault_", "crash", "native", "rate_limit", "ctx_trunc", "pipelined", "http10")
SIZES = (EVENTS, ROWS, ARENA) = 20480, 64, 2 << 20


def whole_streams() -> list[Any]:
    """(capture, its answer): those with one answer, an event stream that came to its end."""
    found = []
    for capture in CAPTURES:
        raw = (DATA / "captures" / f"{capture['name']}.raw").read_bytes()
        chunked = [one["framing"] for one in capture["responses"] if one["status"] == 200] == ["chunked"]
        if chunked and capture["end"] == ["framing-complete"] and not any(name in capture["name"] for name in OTHERS):
            if streams := list(streams_of(raw[raw.index(b"HTTP/1.1 200") :])):
                found.append(pytest.param(capture, heard_of(streams[0])[1], id=capture["name"]))
    return found


def row_of(capture: dict[str, Any], context: RowContext, save_text: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """The row and the events of a capture whose reads came a millisecond apart."""
    memory = bytearray(2 * t.block_bytes(*SIZES))
    recorder = t.Recorder(memory, 2, *SIZES)
    recorder.save_text = save_text
    parser = t.Parser(recorder)
    parser.begin(0, SENT_NS)
    raw, at, stamp = (DATA / "captures" / f"{capture['name']}.raw").read_bytes(), 0, SENT_NS
    for size in capture["reads"]:
        stamp += STEP_NS
        code, _ = parser.feed(raw[at : at + size], stamp)
        at += size
        if code:
            break
    assert code == 1
    parser.finish()
    recorder.seal()
    level = LevelRows(dataclasses.replace(context, save_text=save_text))
    for index in recorder.take_sealed():
        block = t.read_block(memory, index, *SIZES)
        assert block is not None
        rows = bytearray(block.rows)
        if block.n_rows:  # the engine's part of the row
            rows[AT["role"] * 8 : AT["role"] * 8 + 8] = t.ROLE_MEASURED.to_bytes(8, "little")
        level.add(block._replace(rows=bytes(rows)))
    batch = level.take()
    assert batch is not None
    return batch.requests.to_pylist()[0], batch.tokens.to_pylist()[0]


@pytest.mark.parametrize(("capture", "heard"), whole_streams())
def test_a_row_says_what_the_bytes_say(capture: dict[str, Any], heard: Heard, context: RowContext) -> None:
    row, events = row_of(capture, context, save_text=True)
    agrees(row, events, heard)
    # where the scan decided and nothing was kept for the parser, the same is said
    texts = ("text", "reasoning_text", "tool_text")
    short_row, short_events = row_of(capture, context, save_text=False)
    assert short_row == row
    assert short_events == events | dict.fromkeys(texts)


def test_most_captures_take_part() -> None:
    assert len(whole_streams()) >= 90
