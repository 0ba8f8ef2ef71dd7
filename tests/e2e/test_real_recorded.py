"""Every row of a sweep against the bytes of its answer, as a recorder between fastload and a real llama.cpp kept them:
speculation, pings, reasoning, tool calls, in each of its APIs."""

from __future__ import annotations

import itertools
import json
import sys
import threading
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from fastload import _timing as t

sys.path.insert(0, str(Path(__file__).parents[1] / "real"))

from recorder import Heard, agrees, record  # noqa: E402

WORDS = "alpha bravo charlie delta echo foxtrot golf hotel".split()
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "get_weather", "description": "w", "parameters": CITY}
TOOLS: dict[str, object] = {
    "chat": {"type": "function", "function": FUNCTION},
    "responses": {"type": "function", **FUNCTION},
    "messages": {"name": "get_weather", "description": "w", "input_schema": CITY},
}
APIS = ("chat", "responses", "messages")


def words_of(endpoint: str, osl: int, requests: int, *more: str) -> list[str]:
    fixed = ["--levels", "1,8", "--num-requests", str(requests), "--isl", "64", "--temperature", "0", "--save-text"]
    return ["sweep", "--endpoint", endpoint, "--osl", str(osl), *fixed, *more]


def rows_of(run: Any, answers: dict[str, Heard]) -> list[tuple[dict[str, Any], dict[str, Any], Heard]]:
    """Each row with its events and its answer; every row must have one, and agree with it."""
    requests, events = run.requests().to_pylist(), run.tokens().to_pylist()
    events_of = {one["request"]: one for one in events}
    found = [(row, events_of[row["request"]], answers[row["server_request_id"]]) for row in requests]
    assert len(found) == len(events) and found
    for row, event, heard in found:
        agrees(row, event, heard)
    return found


def test_ngram_speculation(fastload: Any, llama_factory: Any, tmp_path: Path, the_run: Any) -> None:
    """A draft's tokens come in a burst of events, one token each; two events share a chunk at both ends."""
    with record(llama_factory(ngram=True)) as recorded:
        ended = fastload(*words_of("chat", 160, 8), "--url", recorded.url)
    assert ended.code in (0, 1) and "Traceback" not in ended.err, ended.err
    for row, events, heard in rows_of(the_run(tmp_path / "results"), recorded.answers):
        said = events["text"].split()
        assert len(said) == 160 and said[:8] == said[40:48] == said[80:88] == WORDS
        assert (row["completion_tokens"], row["text_events"], row["itl_estimated"]) == (160, 160, False)
        assert heard.chunks[0] == heard.chunks[-2] == 2
        assert events["channel"][:2] == [t.CH_NONE, t.CH_CONTENT]  # the role, and the first token
        assert events["event_ns"][0] == events["event_ns"][1] and events["flags"][0] & t.FL_COALESCED
        assert row["first_event_ns"] == row["first_token_ns"]


@pytest.mark.parametrize("endpoint", APIS)
def test_reasoning(endpoint: str, fastload: Any, llama_factory: Any, tmp_path: Path, the_run: Any) -> None:
    with record(llama_factory(ngram=True), "[think]") as recorded:
        ended = fastload(*words_of(endpoint, 48, 8), "--url", recorded.url)
    assert ended.code in (0, 1) and "Traceback" not in ended.err, ended.err
    for row, events, _ in rows_of(the_run(tmp_path / "results"), recorded.answers):
        assert len(events["reasoning_text"].split()) == 12 and len(events["text"].split()) == 6
        assert (row["completion_tokens"], row["text_events"]) == (21, 18)  # the markers and the end have no event
        assert row["ttft_ms"] <= row["ttfa_ms"]


@pytest.mark.parametrize("endpoint", APIS)
def test_tool_calls(endpoint: str, fastload: Any, llama_factory: Any, tmp_path: Path, the_run: Any) -> None:
    with record(llama_factory(), "[tool]") as recorded:
        body = json.dumps({"tools": [TOOLS[endpoint]]})
        ended = fastload(*words_of(endpoint, 48, 8, "--extra-body", body), "--url", recorded.url)
    assert ended.code in (0, 1) and "Traceback" not in ended.err, ended.err
    for row, events, _ in rows_of(the_run(tmp_path / "results"), recorded.answers):
        assert events["tool_text"].startswith("get_weather{") and "Paris" in events["tool_text"]
        assert (row["completion_tokens"], row["ttfa_ms"], events["text"]) == (12, None, None)


@pytest.mark.limit(150)
def test_pings_are_no_events(fastload: Any, llama_factory: Any, tmp_path: Path, the_run: Any) -> None:
    """While the server reads the prompts of many, a stream is silent for seconds and gets comments."""
    url = llama_factory(ping=1, parallel=40, one_batch=True)
    over = threading.Event()

    def crowd() -> None:
        """Long prompts in the midst of an answer, until one had comments in it."""
        numbers = itertools.count()
        while not over.wait(0.002):
            if any(b'"content":" ' in raw and b"[DONE]" not in raw for raw in recorded.raw[-1:]):
                crowded = [threading.Thread(target=ask_long, args=(url, next(numbers))) for _ in range(36)]
                for one in crowded:
                    one.start()
                for one in crowded:
                    one.join()
                if any(b"\n:\n" in raw for raw in recorded.raw):
                    return

    with record(url) as recorded:
        crowding = threading.Thread(target=crowd)
        crowding.start()
        more = ["--levels", "1", "--num-requests", "8", "--min-requests", "0", "--rounds", "1"]
        ended = fastload(*words_of("chat", 900, 8), *more, "--url", recorded.url, timeout_s=120)
        over.set()
        crowding.join()
    assert ended.code in (0, 1) and "Traceback" not in ended.err, ended.err
    found = rows_of(the_run(tmp_path / "results"), recorded.answers)
    pinged = [(row, events) for row, events, heard in found if heard.comments]
    assert pinged
    for row, events in pinged:
        said = events["text"].split()
        assert len(said) == 900 and said[:8] == WORDS and said[880:888] == WORDS
        assert (row["completion_tokens"], row["text_events"]) == (900, 900)
        at_ns = [0, *events["event_ns"]]
        assert max(b - a for a, b in zip(at_ns, at_ns[1:], strict=False)) > 1_000_000_000  # the silence is a gap


def ask_long(url: str, number: int) -> None:
    """A prompt of some 900 tokens, not two alike, for one token."""
    words = " ".join(WORDS[(i + number // 8 ** (i % 8)) % 8] for i in range(900))
    connection = HTTPConnection(url.removeprefix("http://"), timeout=60)
    try:
        body = {"messages": [{"role": "user", "content": words}], "max_tokens": 1}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        connection.getresponse().read()
    finally:
        connection.close()
