"""What single payloads carry: shapes of real servers as captured, and everything else."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastload._timing import CH_CONTENT, CH_DONE, CH_NONE, CH_REASONING, CH_REFUSAL, CH_TOOL
from fastload.load import answer_head
from fastload.trace import faults
from fastload.trace.dialects import Payload, Usage, read_event


def delta(**fields: object) -> bytes:
    return json.dumps(
        {"id": "a1", "choices": [{"index": 0, "delta": fields, "finish_reason": None}]}
    ).encode()


def text_event(channel: int, text: str) -> Payload:
    return Payload(channel, len(text.encode()), {channel: text}, True, (0,), answer_id="a1")


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (delta(content="Blue"), text_event(CH_CONTENT, "Blue")),
        (delta(content="世界"), text_event(CH_CONTENT, "世界")),
        (delta(reasoning="hm"), text_event(CH_REASONING, "hm")),
        (delta(reasoning_content="hm"), text_event(CH_REASONING, "hm")),
        (delta(reasoning_content="hm", reasoning="hm"), text_event(CH_REASONING, "hm")),
        (delta(refusal="no"), text_event(CH_REFUSAL, "no")),
        (delta(content=None, tool_calls=[{"function": {"name": "get"}}]), text_event(CH_TOOL, "get")),
        (
            delta(tool_calls=[{"index": 0, "function": {"name": "get", "arguments": "{"}}]),
            text_event(CH_TOOL, "get{"),
        ),
        (delta(function_call={"arguments": "{}"}), text_event(CH_TOOL, "{}")),
        (delta(content=[{"type": "text", "text": "part"}]), text_event(CH_CONTENT, "part")),
        (delta(role="assistant", content=""), Payload(has_choices=True, choices=(0,), answer_id="a1")),
        (delta(role="assistant", content=None), Payload(has_choices=True, choices=(0,), answer_id="a1")),
        (delta(tool_calls=[{"id": "call_1"}]), Payload(has_choices=True, choices=(0,), answer_id="a1")),
        (b"null", Payload()),
        (b"", Payload()),
        (b"[DONE]", Payload(channel=CH_DONE)),
        (b'{"object":"ping","ts":1}', Payload()),
        (b"[1, 2]", Payload()),
        (b'{"choices":', Payload(malformed=True)),
        (b"not json", Payload(malformed=True)),
        (b'{"a":1}x', Payload(malformed=True)),
        (b"[" * 100_000, Payload(malformed=True)),
    ],
)
def test_one_event(raw: bytes, expected: Payload) -> None:
    assert read_event(raw) == expected


def test_content_names_an_event_that_also_reasons() -> None:
    payload = read_event(delta(content="Ok", reasoning="so"))
    assert (payload.channel, payload.bytes) == (CH_CONTENT, 4)
    assert payload.text == {CH_CONTENT: "Ok", CH_REASONING: "so"}


def test_several_choices() -> None:
    choices: list[dict[str, Any]] = [
        {"index": 1, "text": " two", "finish_reason": None},
        {"index": 0, "text": "é", "finish_reason": "length"},
    ]
    payload = read_event(json.dumps({"choices": choices}).encode())
    assert (payload.choices, payload.finish, payload.bytes) == ((1, 0), {0: "length"}, 6)


def test_usage_in_full() -> None:
    usage = {
        "prompt_tokens": 13,
        "completion_tokens": 160,
        "completion_tokens_details": {"reasoning_tokens": 40},
        "prompt_tokens_details": {"cached_tokens": 8},
    }
    payload = read_event(json.dumps({"choices": [], "usage": usage}).encode())
    assert payload.usage == Usage(13, 160, 40, 8)
    assert not payload.has_choices


@pytest.mark.parametrize("wrong", [None, "7", -1, True, 2**40, 1.5, [], {}])
def test_a_count_that_is_none(wrong: object) -> None:
    payload = read_event(json.dumps({"usage": {"completion_tokens": wrong, "prompt_tokens": 3.0}}).encode())
    assert payload.usage == Usage(prompt=3)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"error": {"message": "engine stopped", "code": 500}}, "engine stopped"),
        ({"error": "Unauthorized"}, "Unauthorized"),
        ({"error": {"code": 1}}, '{"code": 1}'),
        ({"type": "error", "error": {"type": "overloaded_error", "message": "busy"}}, "busy"),
        ({"object": "error", "message": "too long", "code": 400}, "too long"),
        ({"detail": "Not Found"}, "Not Found"),
        (
            {"detail": [{"loc": ["body"], "msg": "field required"}]},
            "body: field required",
        ),
        ({"error": None, "choices": []}, None),
        ({"error": {}}, None),
    ],
)
def test_error_event_in_every_form(value: object, message: str | None) -> None:
    assert read_event(json.dumps(value).encode()).error == message


def test_error_is_cut_and_can_be_stored() -> None:
    error = read_event(b'{"error": "\\ud83d' + b"x" * 900 + b'"}').error
    assert error is not None
    assert len(error) == 500
    assert error.encode()[:2] == b"?x"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error":{"code":400,"message":"Expected an array"}}', "Expected an array"),
        (b'{"message":"no Route matched"}', "no Route matched"),
        (b" Internal Server Error\n", "Internal Server Error"),
        (b"<html>\xff</html>", "<html>�</html>"),
        (b"", None),
    ],
)
def test_error_body(body: bytes, message: str | None) -> None:
    assert faults.read_error_body(body) == message


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b'{"choices":[{"text":"\\ud83d"}]}', "\ud83d"),  # a cut emoji: orjson refuses it, servers send it
        (b'{"choices":[{"text":"a","logprobs":{"tokens":["a"],"x":[NaN,-Infinity]}}]}', "a"),
        (b'{"choices":[{"text":"\xff"}]}', "�"),
    ],
)
def test_json_that_only_python_writes(raw: bytes, text: str) -> None:
    payload = read_event(raw)
    assert not payload.malformed
    assert payload.text == {CH_CONTENT: text}


def test_lists_of_tokens_are_counted() -> None:
    choice = {"index": 0, "text": "ab", "token_ids": [1, 2, 3], "logprobs": {"tokens": ["a", "b"]}}
    payload = read_event(json.dumps({"choices": [choice]}).encode())
    assert (payload.token_ids, payload.logprobs) == (3, 2)
    chat = {"delta": {"content": "a"}, "logprobs": {"content": [{"token": "a"}]}, "token_ids": None}
    payload = read_event(json.dumps({"choices": [chat]}).encode())
    assert (payload.token_ids, payload.logprobs) == (None, 1)


def test_head() -> None:
    head = answer_head.read_head(
        b"HTTP/1.1 100 Continue\r\n\r\n"
        b"HTTP/1.1 429 Too Many\r\nX-Request-ID: r7\r\nretry-after: 2\r\nbad\r\n\r\n"
    )
    assert head == {"": "HTTP/1.1 429 Too Many", "x-request-id": "r7", "retry-after": "2"}


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after": "2"}, 2.0),
        ({"retry-after": "2", "retry-after-ms": "1500"}, 1.5),
        (
            {"retry-after": "Mon, 30 Nov 2026 22:00:30 GMT", "date": "Mon, 30 Nov 2026 22:00:00 GMT"},
            30.0,
        ),
        ({"retry-after": "Mon, 30 Nov 2026 22:00:30 GMT"}, None),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "9" * 400}, None),
        ({}, None),
    ],
)
def test_retry_after(headers: dict[str, str], seconds: float | None) -> None:
    assert answer_head.read_retry_after_s(headers) == seconds


names = st.sampled_from(
    "id choices index delta text content reasoning tool_calls function name arguments finish_reason usage "
    "completion_tokens prompt_tokens completion_tokens_details reasoning_tokens error message detail "
    "logprobs tokens token_ids refusal object type".split()
)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=5),
    max_leaves=20,
)


@given(st.dictionaries(names, values, max_size=6))
def test_any_shape_is_read_and_never_raises(value: dict[str, object]) -> None:
    payload = read_event(json.dumps(value).encode())
    assert not payload.malformed
    assert payload.bytes == sum(len(s.encode("utf-8", "surrogatepass")) for s in payload.text.values())
    assert (payload.channel == CH_NONE) == (payload.bytes == 0)


@given(st.binary(max_size=64))
def test_any_bytes_are_read_and_never_raise(raw: bytes) -> None:
    read_event(raw)
    faults.read_error_body(raw)
    answer_head.read_retry_after_s(answer_head.read_head(raw))
