"""The live counters of the engine, which the display shows: each API's text counts as it comes."""

import json
import sys
from pathlib import Path

import pytest

from fastload import _client, _timing

sys.path.insert(0, str(Path(__file__).with_name("load")))

from rig import Rig  # noqa: E402
from scripted import DONE, LAST_CHUNK, Call, chunk, head, serve  # noqa: E402

TEXTS = ("one", " two", " three")


def named(kind: str, **fields: object) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()


def chat(**delta: object) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "delta": delta}]}).encode() + b"\n\n"


ANSWERS = {
    "chat": [*(chat(content=text) for text in TEXTS), DONE],
    "tool calls": [*(chat(tool_calls=[{"index": 0, "function": {"arguments": text}}]) for text in TEXTS), DONE],
    "responses": [
        named("response.created", response={"id": "r"}),
        *(named("response.output_text.delta", delta=text, sequence_number=i) for i, text in enumerate(TEXTS)),
        named("response.completed", response={"id": "r", "usage": {"output_tokens": 3}}),
    ],
    "messages": [
        named("message_start", message={"id": "m", "usage": {"input_tokens": 1}}),
        *(named("content_block_delta", index=0, delta={"type": "thinking_delta", "thinking": text}) for text in TEXTS),
        named("message_stop"),
    ],
}


@pytest.mark.parametrize("events", ANSWERS.values(), ids=ANSWERS)
def test_text_is_seen_as_it_comes(events: list[bytes]) -> None:
    def script(call: Call) -> None:
        call.send(head())
        for event in events[:-1]:
            call.send(chunk(event))
            call.sleep(0.002)
        call.finish(chunk(events[-1]) + LAST_CHUNK)

    gauges = bytearray(_client.MEMORY_BYTES)
    with serve(script) as server:
        rig = Rig(1, server.port)
        rig.engine = _client.Engine(rig.recorder, 1, gauges)
        rig.open(0).begin(1, 1).arm(1).finish()
    assert rig.count("text_events") == 3
    ttft, itl = (_timing.Histogram(gauges, 4096 + i * _timing.Histogram.SIZE) for i in (0, 1))
    assert (ttft.count, itl.count) == (1, 1)
    (row,) = rig.rows
    first = next(one for one in rig.stream(0) if one["bytes"])
    assert ttft.max_ns == first["stamp_ns"] - row["sent_ns"]
