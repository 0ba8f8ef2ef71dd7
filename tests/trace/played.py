"""An answer through the byte machine and the trace, without a socket: its row and its events."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from fastload import _timing as t
from fastload.trace.rows import LevelRows
from fastload.trace.tables import AT, RowContext

SENT_NS = 10**9
SIZES = (EVENTS, ROWS, ARENA) = 20480, 64, 2 << 20


def play(
    reads: Iterable[tuple[int, bytes]], context: RowContext, save_text: bool = True
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The row and the events of an answer that came in these reads, each so many ns after the request was sent."""
    memory = bytearray(2 * t.block_bytes(*SIZES))
    recorder = t.Recorder(memory, 2, *SIZES)
    recorder.save_text = save_text
    parser = t.Parser(recorder)
    parser.begin(0, SENT_NS)
    code = 0
    for after_ns, data in reads:
        code, _ = parser.feed(data, SENT_NS + after_ns)
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
