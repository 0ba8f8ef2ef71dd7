"""The profile engine as a client meets it: four APIs, channels, n, /metrics, and faults on request."""

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from fastload.sim import Options, start
from fastload.sim.tokenizer import chat_tokens, pieces

PROFILE = """
name = "quick"
source = "a test"
[prefill]
batch = [1]
ms = [4]
[decode]
batch = [1]
ms = [2]
[speculation]
acceptance = [0.8, 0.6]
batch = [1]
ms = [1]
[memory]
blocks = 64
"""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    file = tmp_path_factory.mktemp("profile") / "quick.toml"
    file.write_text(PROFILE)
    with start(Options(profile=str(file))) as url:
        yield url


def post(url: str, path: str, headers: dict[str, str] | None = None, **body: object) -> bytes:
    answer = httpx.post(url + path, json=body, headers=headers, timeout=20)
    answer.raise_for_status()
    return answer.content


def events(raw: bytes) -> list[Any]:
    data = [line[6:] for line in raw.split(b"\n") if line.startswith(b"data: ")]
    return [json.loads(one) for one in data if one != b"[DONE]"]


def ask(**more: object) -> dict[str, object]:
    body: dict[str, object] = {"messages": [{"role": "user", "content": "Tell me of the sea."}], "max_tokens": 24}
    return body | more


def metrics(url: str) -> dict[str, float]:
    lines = httpx.get(f"{url}/metrics", timeout=20).text.splitlines()
    found: dict[str, float] = {}
    for line in lines:
        if not line.startswith("#") and "_bucket" not in line:
            series, _, value = line.rpartition(" ")
            name = series.partition("{")[0]
            found[name] = found.get(name, 0.0) + float(value)
    return found


def test_several_answers_to_one_request(engine: str) -> None:
    usage = {"include_usage": True}
    got = events(post(engine, "/v1/chat/completions", **ask(n=3, stream=True, stream_options=usage)))
    texts = {index: "" for index in range(3)}
    ends = []
    for event in got[:-1]:
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["delta"].get("content") or ""
        ends += [choice["index"]] if choice["finish_reason"] else []
    assert [len(pieces(text)) for text in texts.values()] == [24] * 3 and sorted(ends) == [0, 1, 2]
    assert got[-1]["choices"] == [] and got[-1]["usage"]["completion_tokens"] == 72


def test_accepted_drafts_leave_in_one_event(engine: str) -> None:
    usage = {"include_usage": True, "continuous_usage_stats": True}
    got = events(post(engine, "/v1/chat/completions", **ask(stream=True, stream_options=usage)))
    counts = [event["usage"]["completion_tokens"] for event in got]
    assert counts[0] == 0 and counts[1] == 1 and counts[-1] == 24
    assert max(later - earlier for earlier, later in zip(counts, counts[1:], strict=False)) == 3


def test_reasoning_and_tool_call_on_request(engine: str) -> None:
    wishes = {"reasoning_tokens": 10, "tool_call": True}
    got = events(post(engine, "/v1/chat/completions", **ask(stream=True, sim=wishes)))
    deltas = [event["choices"][0]["delta"] for event in got]
    assert len(pieces("".join(delta.get("reasoning", "") for delta in deltas))) == 10
    calls = [delta["tool_calls"][0]["function"] for delta in deltas if "tool_calls" in delta]
    assert calls[0]["name"] == "look_up" and len(pieces("".join(call["arguments"] for call in calls))) == 14
    assert got[-1]["choices"][0]["finish_reason"] == "tool_calls"
    whole = json.loads(post(engine, "/v1/chat/completions", {"X-Fastload-Sim": json.dumps(wishes)}, **ask()))
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": 10}
    assert len(pieces(whole["choices"][0]["message"]["reasoning"])) == 10


def test_responses_streamed_and_whole(engine: str) -> None:
    body = {"input": "Tell me of the sea.", "max_output_tokens": 24, "sim": {"reasoning_tokens": 5}}
    got = events(post(engine, "/v1/responses", **body, stream=True))
    assert [event["sequence_number"] for event in got] == list(range(len(got)))
    kinds = [event["type"] for event in got]
    assert kinds[0] == "response.created" and kinds[-1] == "response.incomplete"
    text = "".join(event["delta"] for event in got if event["type"] == "response.output_text.delta")
    thought = "".join(event["delta"] for event in got if event["type"] == "response.reasoning_text.delta")
    assert (len(pieces(text)), len(pieces(thought))) == (19, 5)
    whole = json.loads(post(engine, "/v1/responses", **body))
    assert whole["output"][1]["content"][0]["text"] == text
    assert whole["usage"]["input_tokens"] == chat_tokens(["Tell me of the sea."])
    assert whole["usage"]["output_tokens"] == got[-1]["response"]["usage"]["output_tokens"] == 24


def test_messages_streamed_and_whole(engine: str) -> None:
    body = ask(system="Be brief.", sim={"reasoning_tokens": 5})
    raw = post(engine, "/v1/messages", **body, stream=True)
    got = events(raw)
    names = [line[7:].decode() for line in raw.split(b"\n") if line.startswith(b"event: ")]
    assert names == [event["type"] for event in got]
    assert names[0] == "message_start" and names[-2:] == ["message_delta", "message_stop"]
    assert names.count("content_block_start") == names.count("content_block_stop") == 2
    text = "".join(event["delta"].get("text", "") for event in got if event["type"] == "content_block_delta")
    assert len(pieces(text)) == 19
    assert got[-2]["usage"]["output_tokens"] == 24 and got[-2]["delta"]["stop_reason"] == "max_tokens"
    whole = json.loads(post(engine, "/v1/messages", **body))
    assert whole["content"][1] == {"type": "text", "text": text}


def test_a_prompt_asked_twice_is_in_the_cache(engine: str) -> None:
    words = " ".join(f"cache{number}" for number in range(40))
    body = ask(messages=[{"role": "user", "content": words}])
    told = [json.loads(post(engine, "/v1/chat/completions", **body))["usage"] for _ in range(2)]
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in told]
    assert cached == [0, told[0]["prompt_tokens"] // 16 * 16]


def test_what_memory_can_never_hold_is_refused(engine: str) -> None:
    with pytest.raises(httpx.HTTPStatusError, match="400"):
        post(engine, "/v1/chat/completions", **ask(max_tokens=2000))


def test_metrics_count_what_was_answered(engine: str) -> None:
    before = metrics(engine)
    answers = [json.loads(post(engine, "/v1/chat/completions", **ask(max_tokens=40))) for _ in range(3)]
    after = metrics(engine)

    def grown(name: str) -> float:
        return after[f"vllm:{name}"] - before[f"vllm:{name}"]

    assert grown("request_success_total") == grown("time_to_first_token_seconds_count") == 3
    assert grown("generation_tokens_total") == 120
    assert grown("prompt_tokens_total") == sum(answer["usage"]["prompt_tokens"] for answer in answers)
    assert grown("spec_decode_num_draft_tokens_total") == 2 * grown("spec_decode_num_drafts_total")
    accepted = grown("spec_decode_num_accepted_tokens_total")
    assert accepted == grown("spec_decode_num_accepted_tokens_per_pos_total") > 0
    outputs = grown("inter_token_latency_seconds_count")
    assert outputs == grown("spec_decode_num_drafts_total")  # each step of a lone request is one output
    assert after["vllm:num_requests_running"] == after["vllm:num_requests_waiting"] == 0
    assert after["vllm:kv_cache_usage_perc"] == 0


def test_client_that_goes_away_frees_its_place(engine: str) -> None:
    host, _, port = engine.removeprefix("http://").partition(":")
    body = json.dumps(ask(max_tokens=900, stream=True)).encode()
    with socket.create_connection((host, int(port)), 10) as client:
        client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        while b"content" not in client.recv(65536):
            pass
        assert metrics(engine)["vllm:num_requests_running"] == 1
    until = time.monotonic() + 10
    while metrics(engine)["vllm:num_requests_running"] and time.monotonic() < until:
        time.sleep(0.01)
    assert metrics(engine)["vllm:num_requests_running"] == 0 and metrics(engine)["vllm:kv_cache_usage_perc"] == 0


@pytest.mark.parametrize("fault", ["reset", "truncate"])
def test_connection_that_breaks_in_the_stream(engine: str, fault: str) -> None:
    wanted = httpx.ReadError if fault == "reset" else httpx.RemoteProtocolError
    with pytest.raises(wanted):
        post(engine, "/v1/chat/completions", **ask(stream=True, sim={"fault": fault, "after_tokens": 5}))


def test_error_in_the_stream_is_followed_by_its_end(engine: str) -> None:
    got = events(
        post(engine, "/v1/chat/completions", **ask(stream=True, sim={"fault": "error", "after_tokens": 5}))
    )
    assert got[-1]["error"]["code"] == 500 and not any("choices" in event for event in got[-1:])


def test_429_says_when_to_come_again(engine: str) -> None:
    with pytest.raises(httpx.HTTPStatusError) as refused:
        post(engine, "/v1/chat/completions", **ask(sim={"fault": "429", "seconds": 7}))
    assert refused.value.response.status_code == 429 and refused.value.response.headers["Retry-After"] == "7"


@pytest.mark.parametrize("fault", ["stall", "slow_head", "late_usage"])
def test_silence_of_the_length_asked_for(engine: str, fault: str) -> None:
    began = time.monotonic()
    usage = {"include_usage": True}
    wishes = {"fault": fault, "seconds": 0.5, "after_tokens": 3}
    got = events(post(engine, "/v1/chat/completions", **ask(stream=True, stream_options=usage, sim=wishes)))
    assert time.monotonic() - began >= 0.5
    assert got[-1]["usage"]["completion_tokens"] == 24
    assert len(pieces("".join(e["choices"][0]["delta"].get("content", "") for e in got[:-1]))) == 24


def test_a_wish_that_makes_no_sense_is_named(engine: str) -> None:
    with pytest.raises(httpx.HTTPStatusError) as refused:
        post(engine, "/v1/chat/completions", **ask(sim={"fault": "fire"}))
    assert refused.value.response.status_code == 400 and "sim.fault 'fire'" in refused.value.response.text


def test_one_by_one_in_a_burst_as_llama_cpp(tmp_path: Path) -> None:
    file = tmp_path / "burst.toml"
    file.write_text(PROFILE.replace("acceptance", "single_events = true\nacceptance"))
    with start(Options(profile=str(file))) as url:
        got = events(post(url, "/v1/chat/completions", **ask(stream=True)))
    assert [len(pieces(event["choices"][0]["delta"]["content"])) for event in got[1:]] == [1] * 24
