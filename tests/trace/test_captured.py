"""The row of every whole captured stream, against a plain reading of its bytes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fastload.trace.tables import RowContext

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "real")]

from played import play  # noqa: E402
from recorder import Heard, agrees, heard_of, streams_of  # noqa: E402

DATA = HERE.parent / "wire" / "data"
CAPTURES = [json.loads(line) for line in (DATA / "captures.jsonl").read_text().splitlines()]
# Failures have tests of their own; with several choices or prompts one answer is not the sum of its events; llama.cpp's
# own API is none of ours.
OTHERS = ("_n2", "batch", "fault_", "crash", "native", "rate_limit", "ctx_trunc", "pipelined", "http10")


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


def reads_of(capture: dict[str, Any]) -> Iterator[tuple[int, bytes]]:
    """Its reads, a millisecond apart."""
    raw, at = (DATA / "captures" / f"{capture['name']}.raw").read_bytes(), 0
    for number, size in enumerate(capture["reads"], 1):
        yield number * 1_000_000, raw[at : at + size]
        at += size


@pytest.mark.parametrize(("capture", "heard"), whole_streams())
def test_a_row_says_what_the_bytes_say(capture: dict[str, Any], heard: Heard, context: RowContext) -> None:
    row, events = play(reads_of(capture), context, save_text=True)
    agrees(row, events, heard)
    # where the scan decided and nothing was kept for the parser, the same is said
    texts = ("text", "reasoning_text", "tool_text")
    short_row, short_events = play(reads_of(capture), context, save_text=False)
    assert short_row == row
    assert short_events == events | dict.fromkeys(texts)


def test_most_captures_take_part() -> None:
    assert len(whole_streams()) >= 90
