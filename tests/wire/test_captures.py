"""Answers of real servers, as they came over the wire, against the twin and against what was noted at capture.

`data/captures/<server>/<case>.raw` are the bytes of one connection; `data/captures.jsonl` has a line for each: the
reads they came in, status and framing of each answer, events and end as the capturing client saw them.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from machine import STEP_NS, differences, run, slices, stamps_of, story
from twin import Answer, read_answer

from fastload import _timing as t

DATA = Path(__file__).parent / "data"
CAPTURES = [json.loads(line) for line in (DATA / "captures.jsonl").read_text().splitlines()]
FRAMINGS = {"none": 0, "chunked": 1, "content-length": 2, "close-delimited": 3}
OTHER_PROTOCOLS = ("messages_anthropic", "responses_api", "native_completion", "llmock/anthropic")
NEEDS_A_PARSER = ("logprobs", "token_ids", "_n2", "batch", "echo_lp", "fault_malformed", "crash", *OTHER_PROTOCOLS)

each_capture = pytest.mark.parametrize("capture", CAPTURES, ids=[c["name"] for c in CAPTURES])


def bytes_of(capture: dict[str, Any]) -> bytes:
    return (DATA / "captures" / f"{capture['name']}.raw").read_bytes()


def answers(capture: dict[str, Any], save_text: bool = False) -> list[Answer]:
    """Each answer of the connection, in the reads it came in; the later ones of pipelined requests as one read."""
    left = bytes_of(capture)
    sizes = list(capture["reads"])
    found = []
    for end in capture["end"]:
        reads, at = [], 0
        while sizes and at < len(left):
            reads.append(left[at : at + sizes[0]])
            at += sizes.pop(0)
            answer = run(reads, save_text=save_text)
            if answer.code:
                break
        if not reads:
            reads = [left]
        eof_ns = stamps_of(reads)[-1] + STEP_NS if end == "peer-closed" else None
        answer = run(reads, eof_ns, save_text=save_text)
        assert differences(answer, read_answer(reads, stamps_of(reads), eof_ns)) == []
        found.append(answer)
        left = left[answer.used :]
    return found


@each_capture
@pytest.mark.parametrize("save_text", [False, True])
def test_as_captured(capture: dict[str, Any], save_text: bool) -> None:
    found = answers(capture, save_text)
    final = [noted for noted in capture["responses"] if noted["status"] != 100]
    for answer, end, noted in zip(found, capture["end"], final, strict=True):
        assert answer.status == noted["status"]
        assert answer.framing == FRAMINGS[noted["framing"]]
        complete = end == "framing-complete" or (end == "peer-closed" and answer.framing == 3)
        assert answer.code == (1 if complete else 0 if end == "client-abort" else -5)
        if answer.code == 1 and "kept open" in str(capture["after"]):
            assert answer.keepalive
    last = found[-1]
    if "llamacpp" not in capture["name"]:  # there, comments and bare blank lines were counted too
        assert len(last.events) == capture["events"]
    assert last.done == capture["done"]


@each_capture
def test_slicings(capture: dict[str, Any]) -> None:
    whole = bytes_of(capture)
    closed = capture["end"][0] == "peer-closed"
    wanted = None
    for size in (len(whole), 64, 7, 3) + (1, 2) * (len(whole) < 8000):
        reads = slices(whole, size)
        eof_ns = stamps_of(reads)[-1] + STEP_NS if closed else None
        found = run(reads, eof_ns)
        assert differences(found, read_answer(reads, stamps_of(reads), eof_ns)) == []
        wanted = wanted or story(found)
        assert story(found) == wanted


@each_capture
def test_counts_against_usage(capture: dict[str, Any]) -> None:
    """One event a token where the server sends so; and the count told is that of the last usage."""
    (answer, *_) = answers(capture, save_text=True)
    told = [e for e in answer.events if e.flags & t.FL_USAGE and e.channel != t.CH_ODD]
    if not told:
        return
    payload = told[-1].payload
    assert payload is not None
    n = json.loads(payload)["usage"]["completion_tokens"]
    assert told[-1].tokens == n
    counts = [e.tokens for e in told]
    assert counts == sorted(counts)
    texts = sum(e.channel in (t.CH_CONTENT, t.CH_REASONING) for e in answer.events)
    name = capture["name"]
    if any(word in name for word in (*NEEDS_A_PARSER, "tool", "spec", "interval4")):
        assert texts <= n
    elif not any(word in name for word in ("mock", "fakellm", "faulty", "utf8", "stop")):
        # mocks make counts up; the end token has no event of its own, and neither have tokens a reasoning
        # parser takes away
        assert n - 3 <= texts <= n


@each_capture
def test_ordinary_answers_need_no_parser(capture: dict[str, Any]) -> None:
    for answer in answers(capture):
        channels = Counter(e.channel for e in answer.events)
        if not any(name in capture["name"] for name in NEEDS_A_PARSER):
            assert channels[t.CH_ODD] == 0
        elif any(name in capture["name"] for name in OTHER_PROTOCOLS):
            # what is no text of theirs; and the API of llama.cpp's own, whose text too is for a parser
            assert set(channels) <= {t.CH_ODD, t.CH_CONTENT, t.CH_REASONING, t.CH_TOOL}


def test_few_payloads_are_kept() -> None:
    """The first event with choices, the finish and the last usage: nothing else of an ordinary answer."""
    for name in ("vllm/load8_0", "llamacpp/load8_0", "vllm_spec/spec_continuous", "litellm/vllm_continuous"):
        (answer,) = answers(next(c for c in CAPTURES if c["name"] == name))
        assert sum(e.payload is not None for e in answer.events) == 3
