"""Payloads of /v1/responses and /v1/messages, usage under every name, and errors in every dress."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastload._timing import CH_CONTENT, CH_NONE, CH_REASONING, CH_REFUSAL, CH_TOOL
from fastload.load import answer_head
from fastload.trace import faults
from fastload.trace.dialects import Usage, read_event, read_usage


def event(kind: str, **fields: object) -> bytes:
    return json.dumps({**fields, "type": kind}).encode()


@pytest.mark.parametrize(
    ("raw", "channel", "text"),
    [
        (event("response.output_text.delta", delta="a", logprobs=[]), CH_CONTENT, "a"),
        (event("response.reasoning_text.delta", delta="a"), CH_REASONING, "a"),
        (event("response.reasoning_summary_text.delta", delta="a"), CH_REASONING, "a"),
        (event("response.function_call_arguments.delta", delta="{"), CH_TOOL, "{"),
        (event("response.refusal.delta", delta="no"), CH_REFUSAL, "no"),
        (event("response.output_item.added", item={"type": "function_call", "name": "f"}), CH_TOOL, "f"),
        (event("response.output_item.added", item={"type": "message", "content": []}), CH_NONE, None),
        (event("response.content_part.added", part={"type": "output_text", "text": ""}), CH_NONE, None),
        (event("response.output_text.delta", delta=""), CH_NONE, None),
        (event("content_block_delta", delta={"type": "text_delta", "text": "a"}), CH_CONTENT, "a"),
        (event("content_block_delta", delta={"type": "thinking_delta", "thinking": "a"}), CH_REASONING, "a"),
        (event("content_block_delta", delta={"type": "input_json_delta", "partial_json": "{"}), CH_TOOL, "{"),
        (event("content_block_delta", delta={"type": "signature_delta", "signature": "a"}), CH_NONE, None),
        (event("content_block_start", content_block={"type": "text", "text": ""}), CH_NONE, None),
        (event("content_block_start", content_block={"type": "tool_use", "name": "f", "input": {}}), CH_TOOL, "f"),
        (event("message_start", message={"role": "assistant", "content": []}), CH_NONE, None),
    ],
)
def test_events_of_an_answer(raw: bytes, channel: int, text: str | None) -> None:
    payload = read_event(raw)
    assert (payload.channel, payload.text.get(channel)) == (channel, text)
    assert payload.has_choices and payload.choices == (0,) and not payload.ends


@pytest.mark.parametrize(
    "raw",
    [
        event("response.created", response={"id": "resp_1", "status": "in_progress", "usage": None}),
        event("response.in_progress", response={}),
        event("response.output_text.done", text="all of it again"),
        event("response.content_part.done", part={"type": "output_text", "text": "all of it again"}),
        event("response.audio.delta", delta="UklGRg=="),
        event("ping"),
        event("content_block_stop", index=0),
        event("something_new", text="x", delta={"text": "y"}),
    ],
)
def test_events_that_carry_nothing(raw: bytes) -> None:
    payload = read_event(raw)
    assert (payload.channel, payload.has_choices, payload.error, payload.ends) == (CH_NONE, False, None, False)


@pytest.mark.parametrize(
    ("raw", "finish", "error"),
    [
        (event("message_stop"), {}, None),
        (event("response.completed", response={"status": "completed"}), {0: "completed"}, None),
        # vLLM says it this way, OpenAI in an event of its own
        (
            event("response.completed", response={"incomplete_details": {"reason": "max_output_tokens"}}),
            {0: "max_output_tokens"},
            None,
        ),
        (
            event("response.incomplete", response={"incomplete_details": {"reason": "content_filter"}}),
            {0: "content_filter"},
            None,
        ),
        (event("response.failed", response={"error": {"code": "x", "message": "boom"}}), {}, "boom"),
        (event("response.failed", response={}), {}, "the server ends with response.failed"),
        (event("response.completed", response={"status": "failed", "error": {"message": "boom"}}), {}, "boom"),
    ],
)
def test_end_markers(raw: bytes, finish: dict[int, str], error: str | None) -> None:
    payload = read_event(raw)
    assert payload.ends
    assert (payload.finish, payload.error) == (finish, error)


def test_a_stop_reason_comes_before_the_end_marker() -> None:
    payload = read_event(event("message_delta", delta={"stop_reason": "end_turn"}, usage={"output_tokens": 7}))
    assert (payload.finish, payload.usage, payload.ends) == ({0: "end_turn"}, Usage(completion=7), False)


@pytest.mark.parametrize(
    ("told", "usage"),
    [
        ({"prompt_tokens": 3, "completion_tokens": 2}, Usage(3, 2)),
        ({"input_tokens": 3, "output_tokens": 2}, Usage(3, 2)),
        ({"input_tokens": 1, "cache_read_input_tokens": 12, "output_tokens": 0}, Usage(13, 0, None, 12)),
        ({"input_tokens": 1, "cache_creation_input_tokens": 5}, Usage(6)),
        (
            {
                "input_tokens": 3,
                "input_tokens_details": {"cached_tokens": 2},
                "output_tokens_details": {"reasoning_tokens": 1},
            },
            Usage(3, None, 1, 2),
        ),
        ({"prompt_tokens": 3, "prompt_cache_hit_tokens": 2}, Usage(3, None, None, 2)),
        ({"prompt_tokens": 3, "prompt_tokens_details": None, "completion_tokens": 1}, Usage(3, 1)),
        ({}, Usage()),
        (None, None),
        ([], None),
    ],
)
def test_usage_under_every_name(told: object, usage: Usage | None) -> None:
    assert read_usage(told) == usage


def test_usage_told_in_pieces() -> None:
    start, end = Usage(13, 0, None, 12), Usage(None, 12)
    assert end.over(start, grows=True) == Usage(13, 12, None, 12)
    assert Usage(1, 12).over(start, grows=True).prompt == 13  # without the cached ones
    assert Usage(13, 12).over(Usage(0, 1), grows=True) == Usage(13, 12)
    assert Usage(5, 1).over(Usage(9, 9), grows=False) == Usage(5, 1)  # the last told wins
    assert Usage(5, 1).over(None, grows=False) == Usage(5, 1)


@pytest.mark.parametrize(
    "value",
    [
        {"choices": [], "x_groq": {"usage": {"prompt_tokens": 5, "completion_tokens": 2}}},
        {"choices": [{"index": 0, "delta": {}, "usage": {"prompt_tokens": 5, "completion_tokens": 2}}]},
        {"choices": [], "timings": {"prompt_n": 5, "cache_n": 0, "predicted_n": 2, "predicted_ms": 1.5}},
    ],
)
def test_usage_in_odd_places(value: object) -> None:
    usage = read_event(json.dumps(value).encode()).usage
    assert usage is not None and (usage.prompt, usage.completion) == (5, 2)


def test_finish_reasons_that_are_failures() -> None:
    for reason in ("error", "abort", {"type": "abort", "message": "x"}):
        payload = read_event(json.dumps({"choices": [{"index": 0, "finish_reason": reason}]}).encode())
        assert payload.error is not None and payload.finish
    for reason in ("stop", "length", "tool_calls", "content_filter", {"type": "length"}):
        assert read_event(json.dumps({"choices": [{"finish_reason": reason}]}).encode()).error is None


def test_typed_parts() -> None:
    parts = [{"type": "thinking", "thinking": [{"type": "text", "text": "Hm"}]}, {"type": "text", "text": "Ok"}]
    payload = read_event(json.dumps({"choices": [{"delta": {"content": parts}}]}).encode())
    assert payload.text == {CH_REASONING: "Hm", CH_CONTENT: "Ok"}


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"overloaded", "overloaded"),
        (b'{"message":"busy"}', "busy"),
        (b'{"a":1}', '{"a": 1}'),
        (b'"gone"', "gone"),
        (b"null", "null"),
    ],
)
def test_an_event_named_error_is_one(raw: bytes, message: str) -> None:
    assert read_event(raw, named_error=True).error == message


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([{"error": {"code": 400, "message": "no such model", "status": "INVALID_ARGUMENT"}}], "no such model"),
        ({"error": True, "message": "no worker"}, "no worker"),
        ({"code": 500, "message": "boom"}, "boom"),
        ({"code": "429", "message": "slow down"}, "slow down"),
        ({"code": 0, "message": "ok"}, None),
        ({"message": "hello"}, None),
        ({"choices": [], "detail": ""}, None),
        ({"choices": [{"delta": {"content": "a"}}], "detail": "x"}, None),
        ({"error": {"error": {"message": "inner"}}}, "inner"),
        ({"detail": [{"loc": ["body", "n"], "msg": "no"}, {"loc": ["body"], "msg": "bad"}]}, "body.n: no; body: bad"),
        ({"error": {"message": "must be >= 0", "param": "temperature"}}, "temperature: must be >= 0"),
        ({"error": {"message": "temperature must be >= 0", "param": "temperature"}}, "temperature must be >= 0"),
    ],
)
def test_errors_in_every_dress(value: object, message: str | None) -> None:
    assert faults.read_error(value) == message


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'data: {"error": {"message": "no worker"}}\n\ndata: [DONE]\n\n', "no worker"),
        (b'event: error\ndata: {"detail": "gone"}\n\n', "gone"),
        (b'"just a string"', "just a string"),
        (b'{"errors": ["a"]}', '{"errors": ["a"]}'),
        (b"{}", "{}"),
        (b"upstream connect error", "upstream connect error"),
    ],
)
def test_bodies_in_every_dress(body: bytes, message: str) -> None:
    assert faults.read_error_body(body) == message


@pytest.mark.parametrize(
    ("location", "shown"),
    [
        ("/v1/chat/completions/", "/v1/chat/completions/"),
        ("http://me:pw@h:1/x", "http://***@h:1/x"),
        ("//me:p@w@h/x", "//***@h/x"),
        ("https://h/x?sig=pw#pw", "https://h/x?***"),
        ("https://h/a@b", "https://h/a@b"),
        ("", None),
    ],
)
def test_a_location_shows_no_credentials(location: str, shown: str | None) -> None:
    assert faults.read_location({"location": location}) == shown


def test_retry_after_as_a_date_without_a_date_header() -> None:
    date = {"retry-after": "Mon, 30 Nov 2026 22:00:30 GMT"}
    assert answer_head.read_retry_after_s(date, 1796076000.0) == 30.0
    assert answer_head.read_retry_after_s(date, 1796076100.0) == 0.0
    assert answer_head.read_retry_after_s({"llm_provider-retry-after": "2"}) == 2.0


kinds = st.sampled_from(
    "message_start message_delta message_stop content_block_start content_block_delta error ping response.created "
    "response.output_text.delta response.output_item.added response.content_part.added response.completed "
    "response.failed response.incomplete response.".split()
)
names = st.sampled_from(
    "message delta content_block item part response usage error text thinking partial_json name id status detail code "
    "incomplete_details reason stop_reason input_tokens output_tokens cache_read_input_tokens logprobs loc msg "
    "type param".split()
)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=5),
    max_leaves=20,
)


@given(kinds, st.dictionaries(names, values, max_size=6), st.booleans())
def test_any_shape_is_read_and_never_raises(kind: str, value: dict[str, object], named: bool) -> None:
    raw = json.dumps({**value, "type": kind}).encode()
    payload = read_event(raw, named)
    assert not payload.malformed
    assert payload.bytes == sum(len(s.encode("utf-8", "surrogatepass")) for s in payload.text.values())
    faults.read_error_body(raw)
