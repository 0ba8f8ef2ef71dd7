"""What the scan decides by itself is what the trace's parser says of the same payload, whatever keys stand wherever."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from machine import run
from test_captures import CAPTURES, answers
from twin import Event, carries

from fastload import _timing as t
from fastload.trace.dialects import Usage, read_event

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"


def scanned(*payloads: bytes) -> list[Event]:
    """The events of an answer with these payloads, each on one line."""
    body = b"".join(b"data: %s\n\n" % payload for payload in payloads)
    return run([HEAD + body], 10**6, save_text=True).events


def contradiction(event: Event) -> str | None:
    """Where the scan's decision is another than the parser's; None where they agree or it left the event to it."""
    if event.channel in (t.CH_ODD, t.CH_DONE):
        return None
    assert event.payload is not None
    said = read_event(event.payload)
    told = -1 if said.usage is None or said.usage.completion is None else said.usage.completion
    if said.malformed or said.error:
        return f"decided on what is no ordinary event: {event.payload!r}"
    pairs = {
        "channel": (event.channel, said.channel),
        "bytes": (event.bytes, said.bytes),
        "choices": (bool(event.flags & t.FL_CHOICES), said.has_choices),
        "only choice 0": (True, set(said.choices) <= {0}),
        "finish": (bool(event.flags & t.FL_FINISH), bool(said.finish)),
        "usage": (True, bool(event.flags & t.FL_USAGE) or said.usage in (None, Usage())),
        "told": (event.tokens, told),
        "listed": ((None, None), (said.token_ids or None, said.logprobs or None)),
        "end": (False, said.ends),
    }
    wrong = [f"{name}: {ours!r}, the parser says {its!r}" for name, (ours, its) in pairs.items() if ours != its]
    return f"{'; '.join(wrong)} of {event.payload!r}" if wrong else None


@pytest.mark.parametrize("capture", CAPTURES, ids=[c["name"] for c in CAPTURES])
def test_real_answers(capture: dict[str, Any]) -> None:
    for answer in answers(capture, save_text=True):
        # llama.cpp's `timings` count too, and are read where they are kept: in its last events
        found = [contradiction(e) for e in answer.events if b'"timings"' not in (e.payload or b"")]
        assert [said for said in found if said] == []


def chat(delta: object, **choice: object) -> dict[str, object]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": None, **choice}]}


def call(**function: object) -> dict[str, object]:
    return {"tool_calls": [{"index": 3, "id": "c", "type": "function", "function": function}]}


def block(**delta: object) -> dict[str, object]:
    return {"type": "content_block_delta", "index": 2, "delta": delta}


TEXT, NO_TEXT, ODD = "text", "no text", "left to the parser"


@pytest.mark.parametrize(
    ("value", "verdict", "channel", "size"),
    [
        # text in its place, in every API
        (chat({"content": "abc"}), TEXT, t.CH_CONTENT, 3),
        (chat({"reasoning": "abc", "content": None}), TEXT, t.CH_REASONING, 3),
        (chat({"refusal": "no"}), TEXT, t.CH_REFUSAL, 2),
        (chat({"content": None} | call(name="get", arguments="")), TEXT, t.CH_TOOL, 3),
        (chat(call(arguments='{"content":"x"}')), TEXT, t.CH_TOOL, 15),
        (chat(call(name="get", arguments="{")), TEXT, t.CH_TOOL, 4),
        ({"choices": [{"index": 0, "text": "abc"}]}, TEXT, t.CH_CONTENT, 3),
        ({"type": "response.output_text.delta", "delta": "abc", "logprobs": []}, TEXT, t.CH_CONTENT, 3),
        ({"type": "response.reasoning_text.delta", "delta": "abc"}, TEXT, t.CH_REASONING, 3),
        ({"type": "response.reasoning_summary_text.delta", "delta": "abc"}, TEXT, t.CH_REASONING, 3),
        ({"type": "response.function_call_arguments.delta", "delta": "{"}, TEXT, t.CH_TOOL, 1),
        ({"type": "response.refusal.delta", "delta": "no"}, TEXT, t.CH_REFUSAL, 2),
        (block(type="text_delta", text="abc"), TEXT, t.CH_CONTENT, 3),
        (block(type="thinking_delta", thinking="abc"), TEXT, t.CH_REASONING, 3),
        (block(type="input_json_delta", partial_json='{"text":"x"}'), TEXT, t.CH_TOOL, 12),
        # the same keys where they are not the answer's text
        (chat({"content": ""}) | {"metadata": {"content": "xyz"}}, NO_TEXT, t.CH_NONE, 0),
        (chat({"content": "abc"}) | {"metadata": {"content": "xyz", "text": "u"}}, TEXT, t.CH_CONTENT, 3),
        (chat({"content": "abc"}, logprobs=None, extra={"content": "xyz"}), TEXT, t.CH_CONTENT, 3),
        (chat({"content": "abc", "extra": {"content": "xyz", "reasoning": "u"}}), TEXT, t.CH_CONTENT, 3),
        (chat({"role": "assistant"}, content="xyz", message={"content": "xyz"}), NO_TEXT, t.CH_NONE, 0),
        ({"content": "xyz", **chat({"content": "abc"})}, TEXT, t.CH_CONTENT, 3),
        ({"prompt_filter_results": [{"filter": {"text": "xyz"}}], **chat({"role": "a"})}, NO_TEXT, 0, 0),
        (chat({"content": "abc"}) | {"note": {"choices": [{"delta": {"content": "xyz"}}]}}, TEXT, t.CH_CONTENT, 3),
        (chat({"content": "abc", "tool_calls": [{"function": {"meta": {"name": "xyz"}}}]}), TEXT, t.CH_CONTENT, 3),
        (chat({"content": "abc"}) | {"info": {"error": "x", "finish_reason": "stop"}}, TEXT, t.CH_CONTENT, 3),
        (block(type="text_delta", text="abc") | {"meta": {"text": "xyz"}, "text": "xyz"}, TEXT, t.CH_CONTENT, 3),
        ({"type": "response.output_text.delta", "delta": "abc", "x": {"delta": "xyz"}}, TEXT, t.CH_CONTENT, 3),
        # what only a parser can tell
        (chat({"content": "abc"}, logprobs={"content": [{"token": "abc"}]}), ODD, 0, 0),
        (chat({"content": "abc", "reasoning": "u"}), ODD, 0, 0),
        (chat({"content": [{"type": "text", "text": "abc"}]}), ODD, 0, 0),
        (chat({"tool_calls": [{"function": {"arguments": "a"}}, {"function": {"arguments": "b"}}]}), ODD, 0, 0),
        (chat({"content": "abc"}, index=1), ODD, 0, 0),
        (chat({"content": "abc"}, finish_reason={"type": "stop"}), ODD, 0, 0),
        (chat({"content": "abc"}, usage={"completion_tokens": 3}), ODD, 0, 0),
        (chat({"content": "abc"}) | {"x_groq": {"usage": {"completion_tokens": 3}}}, ODD, 0, 0),
        (chat({"content": "abc"}) | {"usage": {"completion_tokens": 3.0}}, ODD, 0, 0),
        (block(type="text_delta", text="abc") | {"error": {"message": "x"}}, ODD, 0, 0),
        ({"type": "response.output_text.delta", "delta": {"text": "abc"}}, ODD, 0, 0),
        ({"type": "response.output_text.delta", "delta": "a", "logprobs": [{"token": "a"}]}, ODD, 0, 0),
        ({"type": "response.output_text.done", "text": "abc"}, ODD, 0, 0),
        ({"type": "something_new", "delta": {"text": "abc"}}, ODD, 0, 0),
        ({"choices": None, **block(text="abc")}, ODD, 0, 0),
    ],
)
def test_a_key_counts_at_its_place(value: dict[str, object], verdict: str, channel: int, size: int) -> None:
    raw = json.dumps(value).encode()
    (event,) = scanned(raw)
    assert contradiction(event) is None
    if verdict == ODD:
        assert event.channel == t.CH_ODD
    else:
        assert (event.channel, event.bytes) == (channel, size)
        wanted = carries(raw)
        assert (wanted.channel, wanted.bytes, wanted.flags) == (event.channel, event.bytes, event.flags)


def test_a_key_written_with_escapes() -> None:
    (event,) = scanned(b'{"choices":[{"index":0,"delta":{"content":"","cont\\u0065nt":"abc"}}]}')
    assert event.channel == t.CH_ODD


def test_the_end_marker_is_the_type_of_the_whole() -> None:
    """Of no part: a tool's arguments or a content block may say anything."""
    inner = {"type": "content_block_start", "content_block": {"type": "message_stop"}}
    tool = {"type": "response.output_item.done", "item": {"arguments": '{"type":"response.completed"}', "type": "x"}}
    for value, ends in ((inner, False), (tool, False), ({"type": "message_stop"}, True)):
        answer = run([HEAD + b"data: %s\n\n" % json.dumps(value).encode()], 10**6)
        assert (answer.done_ns == answer.events[0].stamp) is ends


def test_numbered_events_take_the_fast_path_and_say_the_same() -> None:
    """Each delta of /v1/responses has a number of its own, which may grow a digit."""

    def delta(number: int, text: str, **more: object) -> bytes:
        value = {"delta": text, "item_id": "m", "logprobs": [], "sequence_number": number, "type": kind, **more}
        return json.dumps(value).encode()

    kind = "response.output_text.delta"
    raws = [delta(n, f"w{n}" * (n % 4)) for n in range(98, 112)]
    raws.insert(5, delta(7, "odd one", logprobs=[{"token": "x"}]))
    raws.insert(9, delta(8, "a fault", error={"message": "x"}))
    events = scanned(*raws)
    assert [contradiction(event) for event in events] == [None] * len(raws)
    assert [i for i, event in enumerate(events) if event.channel == t.CH_ODD] == [5, 9]


words = st.text('ab"\\{}[]:,é', max_size=4)
names = st.sampled_from(
    "choices delta content text reasoning reasoning_content refusal tool_calls function function_call name arguments "
    "index finish_reason logprobs token_ids usage completion_tokens type error message detail metadata thinking "
    "partial_json response role audio x".split()
)
kinds = st.sampled_from(
    "content_block_delta message_stop message_delta response.output_text.delta response.reasoning_text.delta "
    "response.function_call_arguments.delta response.output_item.added response.completed chat text_delta".split()
)
values = st.recursive(
    st.none() | words | words | kinds | st.integers(0, 3) | st.sampled_from([1.0, 2.5, -1, True]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(names, inner, max_size=3),
    max_leaves=8,
)
words_or_more = words | values
functions = st.fixed_dictionaries({}, optional={"name": words_or_more, "arguments": words_or_more, "x": values})
calls = st.lists(
    st.fixed_dictionaries({}, optional={"index": values, "function": values | functions, "x": values}), max_size=2
)
deltas = st.fixed_dictionaries(
    {},
    optional={
        "content": words_or_more,
        "role": words,
        "reasoning": words,
        "reasoning_content": words_or_more,
        "tool_calls": calls | values,
        "refusal": words_or_more,
        "function_call": values,
        "x": values,
    },
)
one_choice = st.fixed_dictionaries(
    {},
    optional={
        "index": st.integers(0, 1),
        "delta": deltas | deltas | values,
        "text": words_or_more,
        "finish_reason": words_or_more,
        "logprobs": values,
        "x": values,
        "usage": values,
        "token_ids": values,
        "error": values,
    },
)
blocks = st.fixed_dictionaries({}, optional={"text": words, "thinking": words, "partial_json": words, "x": values})
objects = st.fixed_dictionaries(
    {},
    optional={
        "choices": st.lists(one_choice, max_size=1) | st.lists(one_choice | values, max_size=2) | values,
        "usage": values | st.fixed_dictionaries({"completion_tokens": st.integers(0, 9)}),
        "x": values,
        "metadata": values,
        "error": values,
    },
)
typed = st.fixed_dictionaries(
    {"type": kinds, "delta": words | blocks | values},
    optional=dict.fromkeys(["x", "logprobs", "error", "message", "response", "choices"], values),
)


@given(st.lists(objects | typed | st.dictionaries(names, values, max_size=4), min_size=1, max_size=4), st.booleans())
@example([{"choices": [{"delta": {"content": "a"}}], "metadata": {"content": "b"}}], False)
def test_any_keys_anywhere(events: list[dict[str, Any]], roomy: bool) -> None:
    """Twice each: what the first made an example of, the second may match."""
    separators = (", ", ": ") if roomy else (",", ":")
    raws = [json.dumps(value, separators=separators).encode() for value in events for _ in (0, 1)]
    assert [said for event in scanned(*raws) if (said := contradiction(event))] == []


TOKEN = '{"id":"a1","n":[-1,2.50e+3,0.07],"choices":[{"index":0,"delta":{"content":"%s"},"finish_reason":null}]}'


@pytest.mark.parametrize(
    "text",
    ["\\x", "\\u12", "\\u1g34", "\t", "\x00", "\\", 'a"b', "\udc80", "\udce4\udcb8", "\udcc0\udc80"],
)
@pytest.mark.parametrize("before", [0, 2])
def test_text_that_is_no_json_string(text: str, before: int) -> None:
    """First, and behind two like it: controls, escapes nobody knows, bytes that are no UTF-8, a quote too many."""
    raws = [(TOKEN % word).encode("utf-8", "surrogateescape") for word in [*["hello"] * before, text]]
    *others, event = scanned(*raws)
    assert event.channel == t.CH_ODD and event.payload == raws[-1]
    assert all(other.bytes == 5 for other in others)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"choices"', '"choices" '),
        (":[-1,", " : [ -1 , "),
        ("-1", "-0"),
        ("-1", "1E-09"),
        ('"a1"', '"\\u00e9\\n"'),
        ("null", "null,\t\"x\":{\"y\":[{},[],true,false]}"),
        ("[-1,2.50e+3,0.07]", "[" * 60 + "]" * 60),
    ],
)
def test_json_in_every_spelling(old: str, new: str) -> None:
    (event,) = scanned((TOKEN % "hello").replace(old, new).encode())
    assert (event.channel, event.bytes) == (t.CH_CONTENT, 5) and contradiction(event) is None


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("-1", "01"),
        ("-1", "-"),
        ("-1", "1."),
        ("-1", ".5"),
        ("-1", "1e"),
        ("-1", "NaN"),
        ("-1", "+1"),
        ("-1", "9" * 5000),
        ("-1,", "-1,,"),
        ("-1,", "-1 "),
        ('"n":', '"n"'),
        ('"n":', '"n"::'),
        ('"n":', "n:"),
        ("null}", "null,}"),
        ("null", "None"),
        ("null", "nul"),
        ('"a1"', "'a1'"),
        ('"a1"', '"\n"'),
        ('"id"', '"i\\d"'),
        ("}]}", "}]]"),
        ("}]}", "}]}}"),
        ("[-1,2.50e+3,0.07]", "[" * 2000 + "]" * 2000),
    ],
)
def test_what_is_no_json_is_left_to_the_parser(old: str, new: str) -> None:
    (event,) = scanned((TOKEN % "hello").replace(old, new).encode())
    assert event.channel == t.CH_ODD


def test_counts_that_only_look_alike() -> None:
    """Continuous usage: the digits of numbers may vary, but not into something else."""
    head = '{"choices":[{"index":0,"delta":{"content":"a"}}],"usage":{"completion_tokens":%s,"total_tokens":9}}'
    told = [("1", 1), ("10", 10), ("11", 11), ("2147483646", 2147483646)]
    told[2:2] = [(count, None) for count in ("07", "1e3", "1.0", "-1", "12345678901", "2147483648")]
    events = scanned(*((head % count).encode() for count, _ in told))
    assert [None if e.channel == t.CH_ODD else e.tokens for e in events] == [n for _, n in told]


changes = st.lists(
    st.tuples(st.floats(0, 1), st.integers(0, 2), st.text('{}[]":,\\u0e1-. \tnull', max_size=2)), min_size=1, max_size=3
)


@given(objects | typed, changes)
def test_changed_json(value: dict[str, Any], edits: list[tuple[float, int, str]]) -> None:
    whole = raw = json.dumps(value)
    for share, removed, added in edits:
        at = int(len(raw) * share)
        raw = raw[:at] + added + raw[at + removed :]
    events = scanned(whole.encode(), raw.encode(), raw.encode(), whole.encode())
    assert [said for event in events if (said := contradiction(event))] == []


def test_an_odd_event_pushes_out_nothing_that_is_sure() -> None:
    """The last usage and the first choices are kept raw: broken events that seem to have them are no others."""
    broken = b'{"choices":[{"index":0,}],"usage":{}}'
    usage = b'{"choices":[],"usage":{"completion_tokens":7}}'
    token = (TOKEN % "a").encode()
    body = b"".join(b"data: %s\n\n" % payload for payload in (broken, token, token, usage, broken))
    events = run([HEAD + body], 10**6).events
    assert [event.payload for event in events] == [broken, token, None, usage, broken]


@pytest.mark.parametrize(("early", "final"), [(b"103 Early Hints", False), (b"200 OK", True)])
def test_an_interim_answer_says_nothing_of_the_final_one(early: bytes, final: bool) -> None:
    wire = b"HTTP/1.1 %s\r\nContent-Encoding: gzip\r\n\r\n" % early + HEAD + b"data: [DONE]\n\n"
    assert run([wire], 10**6).encoded is final
