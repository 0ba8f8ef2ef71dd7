"""Hypothesis strategies: answers as servers might send them, and slicings of them."""

import json
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

NASTY = ['"', "\\", '"content":', '{"choices":[', "}\n\n", "data: [DONE]\n\n", "\u2028", "\x85", "\x00", "🌍", "é", "'"]
SPACINGS = [(",", ":"), (", ", ": "), (" ,\t", " :  ")]
LINE_ENDS = [b"\n", b"\r\n", b"\r"]

texts = st.one_of(
    st.text(max_size=12),
    st.lists(st.sampled_from(NASTY), min_size=1, max_size=3).map("".join),
    st.sampled_from(["", "a", " the", "你好"]),
)
half_pairs = st.sampled_from(["\ud83d", "\ude00", "x\ud83d", "\ud83d\ude00\ud83d"])  # an emoji cut in two


def chunk(**choice: Any) -> dict[str, Any]:
    """An ordinary event with one choice, the keys in the order vLLM has them."""
    whole = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": None} | choice
    return {"id": "chatcmpl-1", "object": "chat.completion.chunk", "model": "m", "choices": [whole]}


def usage(n: int) -> dict[str, Any]:
    details = {"reasoning_tokens": 7}
    return {"prompt_tokens": 9, "completion_tokens": n, "completion_tokens_details": details}


PLAIN: dict[str, Callable[[str], dict[str, Any]]] = {
    "content": lambda text: chunk(delta={"content": text}),
    "role": lambda text: chunk(delta={"role": "assistant", "content": ""}),
    "reasoning": lambda text: chunk(delta={"reasoning_content": text}),
    "reasoning, vLLM's name": lambda text: chunk(delta={"content": None, "reasoning": text}),
    "completions": lambda text: {"choices": [{"index": 0, "text": text, "finish_reason": None}]},
    "content with counts": lambda text: chunk(delta={"content": text}) | {"usage": usage(len(text))},
    "usage is null": lambda text: chunk(delta={"content": text}) | {"usage": None},
    "reason is empty": lambda text: chunk(delta={"content": text}, finish_reason=""),
    "empty lists": lambda text: chunk(delta={"content": text, "tool_calls": [], "refusal": None}),
    "tool": lambda text: chunk(delta={"tool_calls": [{"index": 0, "function": {"arguments": text}}]}),
    "refusal": lambda text: chunk(delta={"refusal": text}),
    "messages": lambda text: {"type": "content_block_delta", "index": 0, "delta": {"text": text}},
    "responses": lambda text: {"type": "response.output_text.delta", "delta": text, "sequence_number": len(text)},
    "said elsewhere": lambda text: {"note": {"content": text + "n"}} | chunk(delta={"content": text}),
    "a value like a key": lambda text: chunk(delta={"role": "content", "content": text}) | {"x": "choices"},
    "finish": lambda text: chunk(finish_reason="stop"),
    "finish with text": lambda text: chunk(delta={"content": text}, finish_reason="length"),
    "usage": lambda text: {"choices": [], "usage": usage(len(text))},
}
ODD: dict[str, Callable[[str], dict[str, Any]]] = {
    "error": lambda text: {"error": {"message": text}},
    "error beside": lambda text: chunk(delta={"content": text}) | {"error": {"message": "x"}},
    "two choices": lambda text: {"choices": [{"index": i, "delta": {"content": text}} for i in (0, 1)]},
    "logprobs": lambda text: chunk(delta={"content": text}, logprobs={"content": [{"token": text}]}),
    "both channels": lambda text: chunk(delta={"content": text + "x", "reasoning": text + "y"}),
    "parts": lambda text: chunk(delta={"content": [{"type": "text", "text": text}]}),
    "two calls": lambda text: chunk(delta={"tool_calls": [{"function": {"name": text}}, {"function": {}}]}),
    "no choices": lambda text: {"content": text},
}


@st.composite
def payloads(draw: st.DrawFn, plain: bool) -> bytes:
    """The payload of one event."""
    if not plain:
        other = draw(st.sampled_from([b"", b"null", b"not json", b'{"choices":[', b" [DONE]", b"[]", None, None, None]))
        if other is not None:
            return other
    kinds = PLAIN if plain else PLAIN | ODD
    value = kinds[draw(st.sampled_from(sorted(kinds)))](draw(texts))
    pretty = draw(st.sampled_from([None, None, None, 1]))
    return json.dumps(
        value, ensure_ascii=draw(st.booleans()), separators=draw(st.sampled_from(SPACINGS)), indent=pretty
    ).encode()


@st.composite
def events(draw: st.DrawFn, plain: bool) -> bytes:
    """One event as it stands in the body, with what may stand around its data."""
    end = draw(st.sampled_from(LINE_ENDS))
    colon = draw(st.sampled_from([b": ", b": ", b":"]))
    lines = [b"data" + colon + line for line in draw(payloads(plain)).split(b"\n")]
    around = [b": ping", b"id: 7", b"retry: 10", b"event: message", b"unknown", b"data2: x", b":"]
    if not plain:
        around += [b"event: error", b"event:error", b"event: xerror", b"event: a", b"data"]
    for field in draw(st.lists(st.sampled_from(around), max_size=2)):
        lines.insert(draw(st.sampled_from([0, len(lines)])), field)
    blank = end if draw(st.integers(0, 9)) or plain else b""  # some servers leave it out
    return end.join(lines) + end + blank + draw(st.sampled_from([b"", b"", b"", end, b": ping" + end + end]))


@st.composite
def bodies(draw: st.DrawFn, plain: bool) -> bytes:
    """An event stream; it may lack its [DONE], its last blank line, its last line end."""
    body = draw(st.sampled_from([b"", b"", b"\xef\xbb\xbf", b"\xef\xbb"])) if not plain else b""
    body += b"".join(draw(st.lists(events(plain), max_size=6)))
    return body + draw(st.sampled_from([b"data: [DONE]\n\n", b"data:[DONE]\r\n", b"data: [DONE]", b""]))


@st.composite
def framed(draw: st.DrawFn, body: bytes) -> bytes:
    """`body` as a whole HTTP answer, in any framing."""
    head = draw(st.sampled_from([b"", b"", b"HTTP/1.1 100 Continue\r\n\r\n", b"\r\n"]))
    head += b"HTTP/1." + draw(st.sampled_from([b"1", b"1", b"0"])) + b" 200 OK\r\n"
    head += draw(st.sampled_from([b"Content-Type: text/event-stream\r\n", b"content-type:text/event-stream\r\n", b""]))
    head += draw(st.sampled_from([b"", b"Connection: close\r\n", b"connection: Keep-Alive\r\n", b"X-Odd:\t \r\n"]))
    kind = draw(st.sampled_from(["chunked", "chunked", "length", "close"]))
    if kind == "close":
        return head + b"\r\n" + body
    if kind == "length":
        return head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    sizes = draw(st.lists(st.integers(1, 300), min_size=1, max_size=5))
    style = draw(st.sampled_from([b"%x\r\n", b"%X\r\n", b"00%x\r\n", b'%x;a="b"\r\n', b"%x \r\n"]))
    wire, at, i = head + b"Transfer-Encoding: " + draw(st.sampled_from([b"chunked", b"Chunked "])) + b"\r\n\r\n", 0, 0
    while at < len(body):
        piece = body[at : at + sizes[i % len(sizes)]]
        wire += style % len(piece) + piece + b"\r\n"
        at, i = at + len(piece), i + 1
    return wire + b"0\r\n" + draw(st.sampled_from([b"", b"", b"X-Took: 1\r\nX-More: 2\r\n"])) + b"\r\n"


def streams(plain: bool) -> st.SearchStrategy[bytes]:
    """Whole answers with an event stream; `plain`: only events a server sends every day."""
    return bodies(plain).flatmap(framed)


# sizes of the reads, repeated for as long as there are bytes
cuts = st.lists(st.one_of(st.integers(1, 9), st.integers(1, 400)), min_size=1, max_size=6)

FRAGMENTS = [
    b"HTTP/1.1 200 OK\r\n",
    b"HTTP/1.1 100 C\r\n\r\n",
    b"HTTP/1.",
    b"\r\n",
    b"\n",
    b"\r",
    b"Transfer-Encoding: chunked\r\n\r\n",
    b"Content-Length: 40\r\n\r\n",
    b"Content-Type: application/json\r\n",
    b"5\r\n",
    b"ffffffffffffffff",
    b"0\r\n\r\n",
    b"data",
    b"data: ",
    b"event: error\n",
    b'{"choices":[{"delta":{"content":"',
    b'"}}]}',
    b"\\u00",
    b"\\",
    b'"usage":{"completion_tokens":',
    b"[DONE]",
    b"\xef\xbb\xbf",
    b"}",
    b"{",
]
rubbish = st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.binary(max_size=8)), max_size=30).map(b"".join)
