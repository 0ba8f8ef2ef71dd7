"""Whole answers over real sockets, read by the whole program: `fastload sweep` at one request, its row as it must be.

Every hand-made answer of wire-cases.jsonl, some captured ones, and answers made here for what neither has. One server
plays them all, each under its own path; a few processes run the sweeps one after another, since to start Python and to
import pyarrow for each would take most of the time. Waits are real where a case says what its times are, else short.
"""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from scripted import DONE, LAST_CHUNK, Call, answer, chunk, event, head, serve, usage

from fastload import open_run

pytestmark = pytest.mark.limit(240)  # the first test waits for all sweeps

DATA = Path(__file__).parent / "data"
PROCESSES = 4
SHORT_S = 0.002
# Runs the command lines it is given, one JSON list a line, in one process; tells how each ended.
RUNNER = """
import contextlib, io, json, sys
from fastload.cli import main
for line in sys.stdin:
    said = io.StringIO()
    code = 0
    with contextlib.redirect_stderr(said):
        try:
            main(json.loads(line))
        except SystemExit as ended:
            code = ended.code
    print(json.dumps([code, said.getvalue()]), file=sys.__stdout__, flush=True)
"""


@dataclass(frozen=True)
class Play:
    """What the server does with the measured requests of one sweep, and how it is asked."""

    answers: list[tuple[list[tuple[float, bytes]], str]]  # per request: (wait in s, segment)s, and the end
    endpoint: str = "chat"
    more: tuple[str, ...] = ()
    refuses: tuple[tuple[str, int, object], ...] = ()  # (body field, status, JSON): the answer where it is sent


@dataclass
class Seen:
    """What came of a sweep."""

    code: int = -1
    err: str = ""
    rows: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    connections: list[int] = field(default_factory=list)  # of the measured requests
    bodies: list[dict[str, Any]] = field(default_factory=list)
    heads: list[bytes] = field(default_factory=list)


# ---- what is played


def of_case(case: dict[str, Any]) -> Play:
    timed = "timing_ms" in case["expect"]

    def timeline(one: dict[str, Any], end: str) -> tuple[list[tuple[float, bytes]], str]:
        segments = [base64.b64decode(chunk) for chunk in one["response_chunks_b64"]]
        waits = one.get("delays_ms") or [1] * len(segments)
        return [(ms / 1e3 if timed else SHORT_S, data) for ms, data in zip(waits, segments, strict=True)], end

    answers = [timeline(case, case["end"])]
    if "followup" in case:
        answers.append(timeline(case["followup"], "keep_open"))
    return Play(answers, case["api"])


def whole(*segments: bytes, end: str = "keep_open", endpoint: str = "chat", more: tuple[str, ...] = ()) -> Play:
    return Play([([(SHORT_S, data) for data in segments], end)], endpoint, more)


def events_of(*payloads: object, done: bool = True) -> bytes:
    """A chunked answer of these payloads: JSON values, or bytes as they are."""
    framed = [p if isinstance(p, bytes) else b"data: " + json.dumps(p).encode() + b"\n\n" for p in payloads]
    return head() + b"".join(chunk(data) for data in framed + [DONE] * done) + LAST_CHUNK


def named(name: str, value: object) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), json.dumps(value).encode())


def refusal(status: int, body: object, *headers: str) -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(data)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


def captured(name: str, end: str = "keep_open", endpoint: str = "chat") -> Play:
    return whole((DATA / "captures" / f"{name}.raw").read_bytes(), end=end, endpoint=endpoint)


def delta(index: int = 0, finish: str | None = None, **fields: object) -> dict[str, object]:
    return {"choices": [{"index": index, "delta": fields, "finish_reason": finish}]}


CASES = {case["id"]: case for case in map(json.loads, (DATA / "wire-cases.jsonl").read_text().splitlines())}
STOP = delta(finish="stop")
COUNTS = {"prompt_tokens": 5, "completion_tokens": 3}
MESSAGE = {"type": "message", "role": "assistant", "content": [], "usage": {"input_tokens": 3, "output_tokens": 1}}
STARTED = named("message_start", {"type": "message_start", "message": {"id": "msg_1", **MESSAGE}})


def block(**fields: object) -> bytes:
    return named("content_block_delta", {"type": "content_block_delta", "index": 0, "delta": fields})


def response(kind: str, **fields: object) -> bytes:
    return named(f"response.{kind}", {"type": f"response.{kind}", **fields})


ERROR = {"error": {"message": "engine stopped", "type": "InternalServerError", "code": 500}}
# name -> (play, wanted columns of the row); "tokens" and "text" are those of the row's events
OURS: dict[str, tuple[Play, dict[str, Any]]] = {
    # ---- servers as captured
    "vllm-messages": (
        captured("vllm/messages_anthropic", endpoint="messages"),
        {
            "status": "ok",
            "prompt_tokens": 13,
            "completion_tokens": 12,
            "text_events": 12,
            "finish_reason": "max_tokens",
        },
    ),
    "llamacpp-messages": (
        captured("llamacpp/messages_anthropic", "close", "messages"),
        {"status": "ok", "prompt_tokens": 13, "cached_tokens": 12, "completion_tokens": 12, "text_events": 12},
    ),
    "vllm-responses": (
        captured("vllm/responses_api", endpoint="responses"),
        {"status": "ok", "completion_tokens": 12, "text_events": 9, "finish_reason": "max_output_tokens"},
    ),
    "llamacpp-responses": (
        captured("llamacpp/responses_api", "close", "responses"),
        {"status": "ok", "prompt_tokens": 13, "completion_tokens": 12, "text_events": 12, "finish_reason": "completed"},
    ),
    "llamacpp-n2": (
        captured("llamacpp/chat_n2", "close"),
        {"status": "ok", "completion_tokens": 12, "prompt_tokens": 13, "text_events": 12, "finish_reason": "length"},
    ),
    "llamacpp-batch": (
        captured("llamacpp/completions_batch", "close", "completions"),
        {"status": "ok", "completion_tokens": 10, "text_events": 10},
    ),
    "llamacpp-no-usage": (
        captured("llamacpp/chat_usage_false", "close"),
        {"status": "ok", "completion_tokens": 8, "prompt_tokens": 13, "token_source": "usage"},
    ),
    "llamacpp-crash": (captured("llamacpp/crash_sigkill", "close"), {"status": "truncated", "completion_tokens": 501}),
    "vllm-sigterm": (
        captured("vllm/crash_apiserver_sigterm"),
        {"status": "stream_error", "finish_reason": None, "ttft_ms": None},
    ),
    "vllm-logprobs": (
        captured("vllm_spec/spec_logprobs"),
        {"status": "ok", "token_source": "logprobs", "itl_estimated": False},
    ),
    "vllm-ends-at-once": (
        captured("vllm/completions_tokenids", endpoint="completions"),
        {"status": "ok", "completion_tokens": 1, "ttft_ms": None},
    ),
    "token-ids": (
        whole(
            events_of(
                {"choices": [{"index": 0, "text": "a b c", "token_ids": [7, 8, 9], "finish_reason": None}]},
                {"choices": [{"index": 0, "text": "", "token_ids": [4], "finish_reason": None}]},
                {"choices": [{"index": 0, "text": "d", "token_ids": [5], "finish_reason": "length"}]},
            ),
            endpoint="completions",
        ),
        {"status": "ok", "token_source": "token_ids", "completion_tokens": 5, "tokens": [3, 1, 1, 0]},
    ),
    "vllm-continuous": (captured("vllm_spec/spec_continuous"), {"completion_tokens": 160, "n_first": 1}),
    "vllm-all-reasoning": (captured("vllm_r1parser/nothink"), {"status": "ok", "ttfa_ms": None}),
    "transformers": (
        captured("transformers_serve/chat_short_stop"),
        {"status": "ok", "completion_tokens": 7, "text_events": 6, "finish_reason": "stop", "itl_estimated": False},
    ),
    "litellm-usage-beside-a-choice": (captured("litellm/llama_max1"), {"status": "ok", "completion_tokens": 1}),
    "llmock-truncate": (captured("llmock/fault_truncate_0"), {"status": "empty"}),
    "llmock-malformed": (captured("llmock/fault_malformed_0"), {"status": "malformed_event", "finish_reason": "stop"}),
    # ---- dialects made here
    "azure": (
        whole(
            events_of(
                {"choices": [], "created": 0, "id": "", "prompt_filter_results": [{"prompt_index": 0}]},
                delta(role="assistant", content=""),
                {"choices": [{"index": 0, "delta": {"content": "Sky"}, "content_filter_results": {"hate": {}}}]},
                STOP,
                {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2}},
            )
        ),
        {"status": "ok", "text": "Sky", "completion_tokens": 2, "tokens": [0, 0, 1, 1, 0, 0]},
    ),
    "refusal": (
        whole(events_of(delta(refusal="I can"), delta(refusal="not."), STOP, {"choices": [], "usage": COUNTS})),
        {"status": "ok", "text": "I cannot.", "ttfa_ms": None, "text_events": 2},
    ),
    "function-call": (
        whole(events_of(delta(function_call={"name": "f"}), delta(function_call={"arguments": "{}"}), STOP)),
        {"status": "ok", "tool_text": "f{}", "text_events": 2, "token_source": "events"},
    ),
    "one-of-two-choices-ends": (
        whole(events_of(delta(content="a"), delta(1, content="b"), delta(1, finish="stop"), done=False)),
        {"status": "incomplete", "text": "ab"},
    ),
    "both-choices-end": (
        whole(
            events_of(
                delta(1, content="b"),
                delta(content="a"),
                delta(1, finish="stop"),
                delta(finish="length"),
                {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 4}},
                {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 4}},
                done=False,
            )
        ),
        {"status": "ok", "finish_reason": "length", "completion_tokens": 4},
    ),
    "usage-twice": (
        whole(events_of(delta(content="a"), STOP | {"usage": COUNTS}, {"choices": [], "usage": COUNTS})),
        {"status": "ok", "completion_tokens": 3, "prompt_tokens": 5},
    ),
    "usage-never": (
        whole(events_of(delta(content="a"), delta(content="b"), STOP)),
        {"status": "ok", "completion_tokens": 2, "token_source": "events", "itl_estimated": True},
    ),
    "messages-thinks-and-calls": (
        whole(
            events_of(
                STARTED,
                named("ping", {"type": "ping"}),
                block(type="thinking_delta", thinking="Hm"),
                block(type="signature_delta", signature="c2ln"),
                block(type="text_delta", text="Well"),
                named(
                    "content_block_start",
                    {"type": "content_block_start", "index": 1, "content_block": {"type": "tool_use", "name": "f"}},
                ),
                block(type="input_json_delta", partial_json="{}"),
                named(
                    "message_delta",
                    {"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {"output_tokens": 9}},
                ),
                named("message_stop", {"type": "message_stop"}),
                done=False,
            ),
            endpoint="messages",
        ),
        {
            "status": "ok",
            "text": "Well",
            "reasoning_text": "Hm",
            "tool_text": "f{}",
            "completion_tokens": 9,
            "prompt_tokens": 3,
            "finish_reason": "tool_use",
            "server_request_id": "msg_1",
        },
    ),
    "messages-error": (
        whole(
            events_of(
                STARTED,
                block(type="text_delta", text="Pa"),
                named("error", {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}),
                done=False,
            ),
            endpoint="messages",
        ),
        {"status": "stream_error", "error": "Overloaded", "text": "Pa", "ttft_ms": None},
    ),
    "messages-cut": (
        whole(
            head(b"Connection: close") + STARTED + block(type="text_delta", text="P"), end="close", endpoint="messages"
        ),
        {"status": "incomplete", "text": "P"},
    ),
    "responses-reasons-and-calls": (
        whole(
            events_of(
                response("created", response={"id": "resp_1", "usage": None}),
                response("reasoning_summary_text.delta", delta="Hm"),
                response("output_text.delta", delta="Sky"),
                response("output_item.added", item={"type": "function_call", "name": "f"}),
                response("function_call_arguments.delta", delta="{}"),
                response("output_text.done", text="Sky"),
                response(
                    "completed", response={"status": "completed", "usage": {"input_tokens": 5, "output_tokens": 8}}
                ),
                done=False,
            ),
            endpoint="responses",
        ),
        {
            "status": "ok",
            "text": "Sky",
            "reasoning_text": "Hm",
            "tool_text": "f{}",
            "completion_tokens": 8,
            "prompt_tokens": 5,
            "text_events": 4,
        },
    ),
    "responses-failed": (
        whole(
            events_of(
                response("output_text.delta", delta="Sk"),
                response("failed", response={"status": "failed", "error": {"code": "server_error", "message": "boom"}}),
                done=False,
            ),
            endpoint="responses",
        ),
        {"status": "stream_error", "error": "boom", "text": "Sk"},
    ),
    # ---- failures made here
    "error-after-finish": (
        whole(events_of(delta(content="a"), STOP, ERROR)),
        {"status": "stream_error", "error": "engine stopped", "finish_reason": "stop"},
    ),
    "error-in-a-choice": (
        whole(
            events_of(delta(content="a"), {"choices": [{"index": 0, "finish_reason": "error", "error": {"code": 1}}]})
        ),
        {"status": "stream_error"},
    ),
    "error-as-string": (
        whole(events_of({"error": "out of memory"})),
        {"status": "stream_error", "error": "out of memory"},
    ),
    "body-string": (whole(refusal(401, {"error": "Unauthorized"})), {"status": "http_status", "error": "Unauthorized"}),
    "body-detail": (
        whole(refusal(422, {"detail": [{"loc": ["body", "n"], "msg": "too many"}]})),
        {"status": "http_status", "http_status": 422, "error": "body.n: too many"},
    ),
    "body-text": (whole(refusal(500, b"Internal Server Error\n")), {"error": "Internal Server Error"}),
    "body-as-stream": (
        whole(refusal(500, b'data: {"error": {"message": "no worker"}}\n\n', "Content-Type: text/event-stream")),
        {"status": "http_status", "error": "no worker"},
    ),
    "not-streaming": (
        whole(refusal(200, {"choices": [{"message": {"content": "all at once"}}]}, "Content-Type: application/json")),
        {"status": "not_streaming"},
    ),
    "429-seconds": (
        whole(refusal(429, {"error": {"message": "slow down"}}, "Retry-After: 2", "Retry-After-Ms: 1500")),
        {"status": "http_status", "http_status": 429, "retry_after_s": 1.5, "error": "slow down"},
    ),
    "503-date": (
        whole(refusal(503, b"", "Retry-After: Mon, 30 Nov 2026 22:00:30 GMT", "Date: Mon, 30 Nov 2026 22:00:00 GMT")),
        {"status": "http_status", "http_status": 503, "retry_after_s": 30.0, "error": "HTTP 503 X"},
    ),
    "redirect-hides-credentials": (
        whole(refusal(302, b"", "Location: http://me:hunter2@elsewhere:9/v1?key=hunter2#x")),
        {"status": "redirect", "error": "redirects to http://***@elsewhere:9/v1?***", "http_status": 302},
    ),
    "finish-and-no-end": (
        whole(
            head() + chunk(event("a")) + chunk(usage(1)) + chunk(b"data: " + json.dumps(STOP).encode() + b"\n\n"),
            end="close",
        ),
        {"status": "ok", "framing_broken": True, "completion_tokens": 1},
    ),
    "event-named-error": (
        whole(events_of(delta(content="a"), b"event: error\ndata: overloaded\n\n")),
        {"status": "stream_error", "error": "overloaded", "text": "a"},
    ),
    "event-named-error-flat": (
        whole(events_of(delta(content="a"), named("error", {"msg": "busy", "retry": True}), STOP)),
        {"status": "stream_error", "error": "busy"},
    ),
    "no-answer": (whole(end="close"), {"status": "truncated", "http_status": None}),
}
GOOD = [([(SHORT_S, answer("a", "b"))], "keep_open")]
EOS, MINIMUM = ("--ignore-eos",), ("--extra-body", '{"min_tokens": 64}')
OPENAI = "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead."
# name -> (play, fields left out)
REFUSED: dict[str, tuple[Play, list[str]]] = {
    "transformers": (
        Play(GOOD, "chat", (*EOS, *MINIMUM), (
            ("min_tokens", 422, {"detail": "Unexpected fields in the request: {'min_tokens'}"}),
            ("ignore_eos", 422, {"detail": "Unexpected fields in the request: {'ignore_eos'}"}),
        )),
        ["min_tokens", "ignore_eos"],
    ),
    "fastapi": (
        Play(GOOD, "chat", EOS, (
            ("ignore_eos", 422, {"detail": [{"loc": ["body", "ignore_eos"], "msg": "Extra inputs are not permitted"}]}),
        )),
        ["ignore_eos"],
    ),
    "stream-options": (
        Play(GOOD, "completions", (), (
            ("stream_options", 400, {"error": "Unrecognized request argument supplied: stream_options"}),
        )),
        ["stream_options"],
    ),
    "openai": (Play(GOOD, "chat", (), (("max_tokens", 400, {"error": {"message": OPENAI}}),)), ["max_tokens"]),
}  # fmt: skip
PLAYS = (
    {name: of_case(case) for name, case in CASES.items()}
    | {name: play for name, (play, _) in OURS.items()}
    | {f"refuses-{name}": play for name, (play, _) in REFUSED.items()}
    | {
        "value-refused": Play(GOOD, refuses=(("stream_options", 400, {"error": "max_tokens is too large: 64"}),)),
        "key": Play([([(SHORT_S, (DATA / "captures/vllm/messages_anthropic.raw").read_bytes())], "keep_open")],
                    "messages", ("--api-key", "sk-abc")),
    }
)  # fmt: skip


# ---- the server and the sweeps


class Stage:
    """Plays each case under its own path: the questions before a run, the warm-up, then the measured requests."""

    def __init__(self) -> None:
        self.streams: Counter[str] = Counter()
        self.seen = {name: Seen() for name in PLAYS}

    def script(self, call: Call) -> None:
        method, path, _ = call.seen.head.split(b"\r\n", 1)[0].decode().split(" ")
        name = path.split("/")[1]
        if method == "GET":
            listed = {"object": "list", "data": [{"id": "m", "object": "model", "owned_by": "tests"}]}
            return self.json(call, 200, listed) if path.endswith("/v1/models") else self.json(call, 404, {})
        body = json.loads(call.seen.body)
        if "stream" not in body:
            return self.json(call, 404, {"detail": "Not Found"})
        for refused, status, said in PLAYS[name].refuses:
            if refused in body:
                return self.json(call, status, said)
        if not body["stream"]:
            return self.json(call, 200, self.counted(body))
        number = self.streams[name]
        self.streams[name] += 1
        if number == 0:
            return call.finish(answer("warm", " up"))
        seen = self.seen[name]
        seen.connections.append(call.seen.connection)
        seen.bodies.append(body)
        seen.heads.append(call.seen.head)
        answers = PLAYS[name].answers
        timeline, end = answers[min(number, len(answers)) - 1]  # a request sent again is answered alike
        call.account(False)
        for wait_s, data in timeline:
            call.sleep(wait_s)
            call.send(data)
        if end == "rst":
            call.sleep(0.1)  # so that what was sent is read before it
            call.reset()
        elif end == "close":
            call.close()

    @staticmethod
    def json(call: Call, status: int, value: object) -> None:
        data = json.dumps(value).encode()
        call.finish(
            b"HTTP/1.1 %d X\r\nContent-Type: application/json\r\n" % status
            + b"Content-Length: %d\r\n\r\n" % len(data)
            + data
        )

    @staticmethod
    def counted(body: dict[str, Any]) -> dict[str, Any]:
        """An answer of any API to a request that is not streamed, a token a word and three around them."""
        asked = body.get("prompt") or body.get("input") or body["messages"][0]["content"]
        words = len(asked.split()) + 3
        counts = {"prompt_tokens": words, "completion_tokens": 1} if "prompt" in body or "messages" in body else {}
        return {"choices": [], "output": [], "content": [], "usage": counts or {"input_tokens": words}}


def command(name: str, port: int, output: Path) -> list[str]:
    play = PLAYS[name]
    return [
        "sweep", "--url", f"http://127.0.0.1:{port}/{name}", "--endpoint", play.endpoint, "--levels", "1",
        "--num-requests", str(len(play.answers)), "--min-requests", "0", "--warmup", "0", "--save-text", "--quiet",
        "--isl", "16", "--osl", "64", "--seed", "5", "--output", str(output / name), *play.more,
    ]  # fmt: skip


def sweep_all(names: list[str], port: int, output: Path, seen: dict[str, Seen]) -> None:
    """Run these sweeps one after another in one process, and read what each left."""
    lines = "".join(json.dumps(command(name, port, output)) + "\n" for name in names)
    ran = subprocess.run(
        [sys.executable, "-P", "-c", RUNNER], input=lines, capture_output=True, text=True, timeout=200, cwd=output
    )
    ended = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("[")]
    assert len(ended) == len(names), ran.stderr
    for name, (code, err) in zip(names, ended, strict=True):
        one = seen[name]
        one.code, one.err = code, err
        for path in (output / name).iterdir() if (output / name).exists() else ():
            run = open_run(path)
            one.left_out = run.manifest["plan"]["left_out"]
            one.rows = [row for row in run.requests("00-c1").to_pylist() if row["role"] == "measured"]
            of = {events["request"]: events for events in run.tokens("00-c1").to_pylist()}
            one.events = [of[row["request"]] for row in one.rows]


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Seen]]:
    """All sweeps, run once."""
    stage = Stage()
    output = tmp_path_factory.mktemp("sockets")
    names = list(PLAYS)
    with serve(stage.script) as server, ThreadPoolExecutor(PROCESSES) as pool:
        parts = [names[i::PROCESSES] for i in range(PROCESSES)]
        list(pool.map(lambda part: sweep_all(part, server.port, output, stage.seen), parts))
    yield stage.seen


# ---- what must have come of them


@pytest.mark.parametrize("name", CASES)
def test_case(swept: dict[str, Seen], name: str) -> None:
    case, seen = CASES[name], swept[name]
    wanted = [case["expect"], *(case["expect"] | other for other in case.get("expect_alt", []))]
    assert len(seen.rows) == len(PLAYS[name].answers), seen.err
    reasons = [differences(seen.rows[0], seen.events[0], expect) for expect in wanted]
    assert [] in reasons, reasons
    if "followup" in case:
        assert differences(seen.rows[1], seen.events[1], case["followup"]["expect"]) == []
        assert seen.connections[0] == seen.connections[1] and seen.rows[1]["conn_reused"]
    assert b"Accept-Encoding: identity" in seen.heads[0]
    assert not any(row["retried"] for row in seen.rows)


def differences(row: dict[str, Any], events: dict[str, Any], expect: dict[str, Any]) -> list[str]:
    """Where a row is not what a case says; empty is good."""
    if expect["error"] not in (None, "http_status") or expect["status"] < 300:
        status = expect["error"] or "ok"
    else:
        status = "redirect" if expect["status"] < 400 else "http_status"
    pairs = {
        "status": (row["status"], status),
        "http_status": (row["http_status"], expect["status"]),
        "finish_reason": (row["finish_reason"], expect["finish_reason"]),
        "content": (events["text"] or "", expect["content_tokens_text"]),
        "reasoning": (events["reasoning_text"] or "", expect["reasoning_text"]),
        "content events": (events["channel"].count(1), expect["n_content_chunks"]),
        "reasoning events": (events["channel"].count(2), expect.get("n_reasoning_chunks")),
        "tokens": (events["tokens"], expect.get("token_counts_per_chunk")),
        "a message": (row["error"] is not None, status != "ok"),
        "a framing": (row["framing_broken"], status == "ok" and not expect.get("http_framing_complete", True)),
    }
    if status == "ok" and expect["usage"] is not None:
        for ours, theirs in (("prompt_tokens", "prompt_tokens"), ("completion_tokens", "completion_tokens")):
            pairs[ours] = (row[ours], expect["usage"][theirs])
        pairs["the sum"] = (sum(events["tokens"]), expect["usage"]["completion_tokens"])
    if "tool_args_text" in expect:
        pairs["tool"] = (events["tool_text"].endswith(expect["tool_args_text"]), True)
    if expect.get("token_counts_per_chunk") is not None:
        pairs["tokens"] = ([n for n in events["tokens"] if n], expect["token_counts_per_chunk"])
    unchecked = {"content", "content events", "reasoning events", "tokens"}
    return [
        f"{what}: {ours!r}, not {theirs!r}"
        for what, (ours, theirs) in pairs.items()
        if ours != theirs and not (theirs is None and what in unchecked)
    ]


TIMED = [name for name, case in CASES.items() if "timing_ms" in case["expect"] and name != "W48-gzip"]


@pytest.mark.parametrize("name", TIMED)
def test_times(swept: dict[str, Seen], name: str) -> None:
    """No stamp is before its segment was sent, and each is after what it must be after. How late is for the benches."""
    row, expect = swept[name].rows[0], CASES[name]["expect"]["timing_ms"]
    sent = row["sent_ns"]
    for ours, theirs in (
        ("first_token_ns", "ttft"),
        ("last_token_ns", "last_token"),
        ("first_answer_ns", "first_answer"),
    ):
        if name == "M07-tool-calls" and theirs == "first_answer":
            assert row[ours] is None  # a tool call is no content; the case counts it as an answer
        elif expect[theirs] is None:
            assert row[ours] is None
        else:
            assert row[ours] - sent >= expect[theirs] * 1_000_000 - 50_000
    assert (row["itl_ms"] is None) == (expect["tpot"] is None and row["completion_tokens"] in (0, 1))
    assert row["done_ns"] > sent
    if row["first_token_ns"] is not None:
        assert sent < row["first_byte_ns"] <= row["first_event_ns"] <= row["first_token_ns"] <= row["last_token_ns"]
        assert row["last_token_ns"] <= row["done_ns"]
        assert row["ttft_ms"] == (row["first_token_ns"] - sent) / 1e6


def test_the_role_is_no_token_and_late_usage_is_no_last_token(swept: dict[str, Seen]) -> None:
    role = swept["M01-role-chunk"].rows[0]
    assert role["first_token_ns"] - role["first_event_ns"] > 100_000_000  # 200 ms as sent
    late = swept["M25-late-usage"].rows[0]
    assert late["done_ns"] - late["last_token_ns"] > 200_000_000  # 300 ms as sent


@pytest.mark.parametrize("name", OURS)
def test_answer(swept: dict[str, Seen], name: str) -> None:
    seen, wanted = swept[name], OURS[name][1]
    assert len(seen.rows) == 1, seen.err
    row, events = seen.rows[0], seen.events[0]
    found = row | {key: events[key] for key in ("tokens", "text", "reasoning_text", "tool_text")}
    assert {key: found[key] for key in wanted} == wanted
    assert (row["error"] is None) == (row["status"] == "ok")
    if row["completion_tokens"] is not None:
        assert sum(events["tokens"]) == row["completion_tokens"]
    assert "hunter2" not in seen.err


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_field_is_left_out(swept: dict[str, Seen], name: str) -> None:
    seen, left_out = swept[f"refuses-{name}"], REFUSED[name][1]
    assert len(seen.rows) == 1, seen.err
    assert seen.rows[0]["status"] == "ok" and seen.left_out == left_out
    assert not set(left_out) & seen.bodies[0].keys()
    assert ("max_completion_tokens" in seen.bodies[0]) == (name == "openai")


def test_a_refused_value_is_a_failure(swept: dict[str, Seen]) -> None:
    seen = swept["value-refused"]
    assert (seen.code, seen.rows) == (1, []) and "max_tokens is too large" in seen.err


def test_the_messages_api_gets_its_headers(swept: dict[str, Seen]) -> None:
    head = swept["key"].heads[0].lower()
    assert b"\r\nx-api-key: sk-abc\r\n" in head and b"\r\nanthropic-version: 2023-06-01\r\n" in head
    assert b"\r\nauthorization: bearer sk-abc\r\n" in head
    assert "sk-abc" not in swept["key"].err


def test_words_of_real_servers(swept: dict[str, Seen]) -> None:
    words = "alpha bravo charlie delta echo foxtrot golf hotel india juliett kilo lima"
    for name in ("vllm-messages", "llamacpp-messages", "vllm-responses", "llamacpp-responses"):
        assert swept[name].events[0]["text"].strip() == words


def test_end_markers_complete_an_answer(swept: dict[str, Seen]) -> None:
    for name in ("vllm-messages", "vllm-responses", "messages-thinks-and-calls", "responses-reasons-and-calls"):
        row, events = swept[name].rows[0], swept[name].events[0]
        assert row["done_ns"] == row["sent_ns"] + events["event_ns"][-1] <= row["framing_end_ns"]


def test_bodies_of_each_api(swept: dict[str, Seen]) -> None:
    chat, text = swept["azure"].bodies[0], swept["token-ids"].bodies[0]
    answers, messages = swept["vllm-responses"].bodies[0], swept["vllm-messages"].bodies[0]
    assert set(chat) == {"model", "messages", "max_tokens", "stream", "stream_options"}
    assert set(text) == {"model", "prompt", "max_tokens", "stream", "stream_options"}
    assert set(answers) == {"model", "input", "max_output_tokens", "stream"}
    assert set(messages) == {"model", "messages", "max_tokens", "stream"}
