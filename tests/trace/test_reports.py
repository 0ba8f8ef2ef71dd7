"""Public fault reports of other tools (the M numbers) that one answer decides: its row, worked out by hand."""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path

import pytest

from fastload.trace.tables import RowContext

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from played import play  # noqa: E402

MS = 1_000_000
LINES = (HERE.parent / "wire" / "data" / "wire-cases.jsonl").read_text().splitlines()
CASES = {case["id"]: case for case in map(json.loads, LINES)}
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
DONE = b"data: [DONE]\n\n"


def segments_of(name: str) -> list[tuple[int, bytes]]:
    """The segments of a wire case at the times it was made for."""
    case, at_ms, found = CASES[name], 0, []
    for wait, data in zip(case["delays_ms"], case["response_chunks_b64"], strict=True):
        at_ms += wait
        found.append((at_ms * MS, base64.b64decode(data)))
    return found


def chunk(value: object) -> bytes:
    data = value if isinstance(value, bytes) else b"data: " + json.dumps(value).encode() + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(data), data)


def test_m05_both_spellings_of_reasoning_give_the_same_figures(context: RowContext) -> None:
    sent = segments_of("M03-delta-reasoning")
    body = b"".join(data for _, data in sent)
    assert b'"reasoning":' in body and b"reasoning_content" not in body

    def respelled(data: bytes) -> bytes:
        """Each chunk is a segment of its own, and gets its new size."""
        if b'"reasoning":' not in data:
            return data
        _, payload = data.split(b"\r\n", 1)
        payload = payload.removesuffix(b"\r\n").replace(b'"reasoning":', b'"reasoning_content":')
        return b"%x\r\n%s\r\n" % (len(payload), payload)

    row, events = play(sent, context)
    other_row, other_events = play([(at, respelled(data)) for at, data in sent], context)
    assert other_row | {"response_bytes": row["response_bytes"]} == row and other_events == events
    # and they are right: TTFT from the first thought, ITL over thoughts and answer
    assert (row["ttft_ms"], row["itl_ms"]) == (60.0, 50.0) and row["ttfa_ms"] > row["ttft_ms"]


def test_m12_a_flush_each_20_tokens_is_seen_as_20_tokens_an_event(context: RowContext) -> None:
    """ITL is then no second measurement: tokens per event stand beside it."""
    reads = [(MS, HEAD)]
    for number in range(1, 51):
        text = " ".join(["word"] * 20)
        reads.append((number * 200 * MS, chunk({"choices": [{"index": 0, "delta": {"content": text}}]})))
    finish = {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}
    last = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 1000}}
    reads.append((10_001 * MS, chunk(finish) + chunk(last) + chunk(DONE) + b"0\r\n\r\n"))
    row, events = play(reads, context)
    assert (row["completion_tokens"], row["text_events"], row["token_source"]) == (1000, 50, "usage")
    assert [tokens for tokens in events["tokens"] if tokens] == [20] * 50
    assert row["itl_ms"] == pytest.approx(49 * 200 / 999) and row["itl_estimated"] is True
    assert (row["ttft_ms"], row["n_first"]) == (200.0, 20)


def test_m17_and_m19_counts_that_grow_are_the_servers_and_not_added_up(context: RowContext) -> None:
    case = CASES["M17-continuous-usage"]
    row, events = play(segments_of("M17-continuous-usage"), context)
    usage = case["expect"]["usage"]
    assert (row["prompt_tokens"], row["completion_tokens"]) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert (row["prompt_tokens"], row["completion_tokens"]) == (100, 5)
    assert row["token_source"] == "continuous_usage" and sum(events["tokens"]) == 5
