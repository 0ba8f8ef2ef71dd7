"""The real server does what the tests build on: known words, counts, and its habits on the wire."""

import json
from collections.abc import Callable
from http.client import HTTPConnection
from typing import Any

WORDS = "alpha bravo charlie delta echo foxtrot golf hotel".split()

LlamaFactory = Callable[..., str]


def ask(url: str, prompt: str, max_tokens: int, key: str | None = None) -> tuple[int, list[Any], bytes]:
    """(status, events without [DONE], the raw body) of a streamed chat."""
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    connection = HTTPConnection(url.removeprefix("http://"), timeout=20)
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        raw = answer.read()
    finally:
        connection.close()
    lines = [line[6:] for line in raw.split(b"\n") if line.startswith(b"data: {")]
    return answer.status, [json.loads(line) for line in lines], raw


def text_of(events: list[Any], channel: str = "content") -> str:
    return "".join(choice["delta"].get(channel) or "" for event in events for choice in event["choices"])


def usage_of(events: list[Any]) -> dict[str, int]:
    (usage,) = [event["usage"] for event in events if event.get("usage")]
    assert isinstance(usage, dict)
    return usage


def test_the_words_are_known_and_each_has_an_event(llama_server: str) -> None:
    status, events, raw = ask(llama_server, "go on", 48)
    words = text_of(events).split()
    assert status == 200
    assert words[: len(WORDS)] == WORDS
    assert words[40:48] == WORDS  # the loop of 40 begins anew
    assert usage_of(events)["completion_tokens"] == 48
    assert sum(bool(text_of([event])) for event in events) == 48
    assert raw.rstrip().endswith(b"data: [DONE]")


def test_the_end_token_is_counted_and_has_no_text(llama_server: str) -> None:
    _, events, _ = ask(llama_server, "[short]", 48)
    assert len(text_of(events).split()) == 6
    assert usage_of(events)["completion_tokens"] == 7


def test_reasoning_has_a_channel_of_its_own(llama_server: str) -> None:
    _, events, _ = ask(llama_server, "[think]", 48)
    assert len(text_of(events, "reasoning_content").split()) == 12
    assert len(text_of(events).split()) == 6


def test_ngram_speculation_gives_the_same_text(llama_server: str, llama_factory: LlamaFactory) -> None:
    plain = text_of(ask(llama_server, "go on", 160)[1])
    assert text_of(ask(llama_factory(ngram=True), "go on", 160)[1]) == plain


def test_key(llama_factory: LlamaFactory) -> None:
    url = llama_factory(api_key="test-key")
    assert ask(url, "[short]", 8)[0] == 401
    assert ask(url, "[short]", 8, key="test-key")[0] == 200
