"""Every hand-made answer of wire-cases.jsonl, in every slicing, against its stated facts and against the twin."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from machine import STEP_NS, differences, run, slices, stamps_of, story
from twin import Answer, read_answer

from fastload import _timing as t

CASES = [json.loads(line) for line in (Path(__file__).parent / "data" / "wire-cases.jsonl").read_text().splitlines()]
SIZES = (1, 2, 3, 7, 64, 300)
# The machine hands compressed bodies on as not readable: `expect_alt` of the case allows that.
COMPRESSED = "W48-gzip"


def segments(case: dict[str, Any]) -> list[bytes]:
    return [base64.b64decode(chunk) for chunk in case["response_chunks_b64"]]


def slicings(case: dict[str, Any]) -> list[list[bytes]]:
    """As sent, whole, and in pieces of every size; single bytes of the 160 KB case only in its small slices."""
    whole = b"".join(segments(case))
    sizes = SIZES if len(whole) < 20_000 else SIZES[3:]
    return [segments(case), [whole]] + [slices(whole, size) for size in sizes]


def play(case: dict[str, Any], reads: list[bytes], save_text: bool = False) -> Answer:
    return run(reads, closed_at(case, reads), save_text=save_text)


def closed_at(case: dict[str, Any], reads: list[bytes]) -> int | None:
    return stamps_of(reads)[-1] + STEP_NS if case["end"] == "close" else None


each_case = pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])


@each_case
def test_every_slicing_equals_the_twin(case: dict[str, Any]) -> None:
    for reads in slicings(case):
        wanted = read_answer(reads, stamps_of(reads), closed_at(case, reads))
        for save_text in (False, True):
            assert differences(play(case, reads, save_text), wanted) == []


@each_case
def test_no_slicing_tells_another_story(case: dict[str, Any]) -> None:
    whole = story(play(case, [b"".join(segments(case))], save_text=True))
    for reads in slicings(case):
        assert story(play(case, reads, save_text=True)) == whole


@each_case
def test_facts(case: dict[str, Any]) -> None:
    expect = case["expect"]
    answer = play(case, segments(case), save_text=True)
    assert answer.status == expect["status"]
    assert answer.code == (1 if expect["http_framing_complete"] else 0 if case["end"] == "rst" else -5)
    if case["id"] == COMPRESSED:
        assert answer.encoded and not answer.sse and answer.events == []
        return
    if answer.status != 200:
        assert answer.events == [] and not answer.sse
        return
    content = [e for e in answer.events if e.channel == t.CH_CONTENT]
    reasoning = [e for e in answer.events if e.channel == t.CH_REASONING]
    assert len(content) == expect["n_content_chunks"]
    assert sum(e.bytes for e in content) == len(expect["content_tokens_text"].encode())
    assert len(reasoning) == expect["n_reasoning_chunks"]
    assert sum(e.bytes for e in reasoning) == len(expect["reasoning_text"].encode())
    told = [e for e in answer.events if e.flags & t.FL_USAGE]
    assert bool(told) == (expect["usage"] is not None)
    if told:
        assert told[-1].tokens == expect["usage"]["completion_tokens"]
        assert told[-1].payload is not None
        assert json.loads(told[-1].payload)["usage"]["total_tokens"] == expect["usage"]["total_tokens"]
    reasons = [e for e in answer.events if e.flags & t.FL_FINISH]
    assert bool(reasons) == (expect["finish_reason"] is not None)
    if reasons:
        assert reasons[-1].payload is not None
        assert json.loads(reasons[-1].payload)["choices"][0]["finish_reason"] == expect["finish_reason"]
    if expect["error"] == "stream_error":
        assert answer.events[-1].channel == t.CH_ODD or answer.events[-2].channel == t.CH_ODD
    whole = b"".join(segments(case))
    assert answer.done == (b"[DONE]" in whole)


@each_case
def test_times(case: dict[str, Any]) -> None:
    """Stamps are those of the segments: the gaps between text events are the delays the case was sent with."""
    expect = case["expect"].get("timing_ms")
    if expect is None or case["id"] == COMPRESSED:
        return
    reads = segments(case)
    answer = play(case, reads)
    at_ms, clock = {}, 0
    for stamp, delay in zip(stamps_of(reads), case["delays_ms"], strict=True):
        clock += delay
        at_ms[stamp] = clock
    kinds = (t.CH_CONTENT, t.CH_REASONING, t.CH_TOOL)
    texts = [at_ms[e.stamp] for e in answer.events if e.channel in kinds]
    if expect["ttft"] is None:
        assert texts == []
        return
    assert texts[0] == expect["ttft"]
    assert texts[-1] == expect["last_token"]
    assert [b - a for a, b in zip(texts, texts[1:], strict=False)] == expect["event_gaps"]


@each_case
def test_a_second_answer_on_the_connection(case: dict[str, Any]) -> None:
    if "followup" not in case:
        return
    first = play(case, segments(case))
    assert first.code == 1 and first.keepalive and first.used == len(b"".join(segments(case)))
    second = play(case | case["followup"], segments(case["followup"]))
    assert second.code == 1 and second.done
    wanted = case["followup"]["expect"]
    assert sum(e.channel == t.CH_CONTENT for e in second.events) == wanted["n_content_chunks"]


def test_first_tokens() -> None:
    """The role's event is none; the event of the first text is, in whatever channel."""
    by_name = {case["id"]: case for case in CASES}
    first = {}
    for name in ("M01-role-chunk", "M03-delta-reasoning", "M13-completions-api", "W09-bom", "W66-empty-choices"):
        events = play(by_name[name], segments(by_name[name])).events
        first[name] = next(i for i, e in enumerate(events) if e.bytes)
    assert first == {
        "M01-role-chunk": 1,
        "M03-delta-reasoning": 1,
        "M13-completions-api": 0,
        "W09-bom": 0,
        "W66-empty-choices": 1,
    }
