"""The simulated engine as a client meets it: over sockets, byte for byte."""

import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest

from fastload.errors import PlanError, TargetError
from fastload.sim import Options, start
from fastload.sim.tokenizer import chat_tokens, pieces

SimUrl = Callable[..., str]

QUICK = {"ttft_ms": 5.0, "step_ms": 5.0}


class Wire:
    """One connection, read answer by answer."""

    def __init__(self, url: str) -> None:
        host, _, port = url.removeprefix("http://").partition(":")
        self.socket = socket.create_connection((host, int(port)), 10)
        self.file = self.socket.makefile("rb")

    def ask(
        self, method: str, path: str, body: object = None, headers: str = "", version: str = "1.1"
    ) -> None:
        data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        head = f"{method} {path} HTTP/{version}\r\nHost: sim\r\nContent-Length: {len(data)}\r\n{headers}\r\n"
        self.socket.sendall(head.encode() + data)

    def head(self) -> tuple[int, dict[str, str]]:
        status = int(self.file.readline().split()[1])
        headers = {}
        while (line := self.file.readline().strip()) != b"":
            name, _, value = line.decode().partition(": ")
            headers[name.lower()] = value
        return status, headers

    def answer(self) -> tuple[int, dict[str, str], bytes]:
        """An answer with its length told."""
        status, headers = self.head()
        return status, headers, self.file.read(int(headers["content-length"]))

    def chunks(self) -> Iterator[bytes]:
        while (size := int(self.file.readline(), 16)) > 0:
            yield self.file.read(size)
            assert self.file.readline() == b"\r\n"
        assert self.file.readline() == b"\r\n"

    def close(self) -> None:
        self.file.close()
        self.socket.close()


@pytest.fixture
def wire() -> Iterator[Callable[[str], Wire]]:
    """`wire(url)` connects; all are closed with the test."""
    with contextlib.ExitStack() as stack:

        def connect(url: str) -> Wire:
            connection = Wire(url)
            stack.callback(connection.close)
            return connection

        yield connect


def chat(max_tokens: int | None = 4, **more: object) -> dict[str, object]:
    body: dict[str, object] = {
        "messages": [{"role": "user", "content": "Tell me of the sea."}],
        "stream": True,
        **more,
    }
    return body if max_tokens is None else {"max_tokens": max_tokens, **body}


def events(chunks: Iterator[bytes]) -> list[Any]:
    """One event a chunk; `[DONE]` is the last and left out."""
    texts = list(chunks)
    assert all(
        text.startswith(b"data: ") and text.endswith(b"\n\n") and text.count(b"\n") == 2 for text in texts
    )
    assert texts.pop() == b"data: [DONE]\n\n"
    return [json.loads(text[6:]) for text in texts]


def text_of(event: dict[str, Any]) -> str:
    choice = event["choices"][0]
    text = choice["delta"]["content"] if "delta" in choice else choice["text"]
    assert isinstance(text, str)
    return text


def stream(connection: Wire, path: str, body: dict[str, object]) -> list[Any]:
    connection.ask("POST", path, body)
    status, headers = connection.head()
    assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    assert headers["server"] == "fastload-sim"
    return events(connection.chunks())


def test_chat_stream_has_vllms_skeleton(sim_url: SimUrl, wire: Callable[[str], Wire]) -> None:
    body = chat(4, stream_options={"include_usage": True})
    role, *texts, usage = stream(wire(sim_url(**QUICK)), "/v1/chat/completions", body)
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [event["choices"][0]["finish_reason"] for event in texts] == [None, None, None, "length"]
    assert [len(pieces(text_of(event))) for event in texts] == [1, 1, 1, 1]
    assert usage["choices"] == []
    prompt = chat_tokens(["Tell me of the sea."])
    assert usage["usage"] == {"prompt_tokens": prompt, "completion_tokens": 4, "total_tokens": prompt + 4}
    assert not any("usage" in event for event in (role, *texts))
    assert len({event["id"] for event in (role, *texts, usage)}) == 1


def test_completions_stream_has_no_role_event(sim_url: SimUrl, wire: Callable[[str], Wire]) -> None:
    body: dict[str, object] = {"prompt": "one two three", "max_tokens": 3, "stream": True}
    texts = stream(wire(sim_url(**QUICK)), "/v1/completions", body)
    assert [len(pieces(text_of(event))) for event in texts] == [1, 1, 1]
    assert [event["object"] for event in texts] == ["text_completion"] * 3


def test_two_tokens_per_event(sim_url: SimUrl, wire: Callable[[str], Wire]) -> None:
    body = chat(5, stream_options={"include_usage": True, "continuous_usage_stats": True})
    role, *texts, usage = stream(wire(sim_url(**QUICK, tokens_per_event=2)), "/v1/chat/completions", body)
    assert [len(pieces(text_of(event))) for event in texts] == [2, 2, 1]
    assert [event["usage"]["completion_tokens"] for event in (role, *texts, usage)] == [0, 2, 4, 5, 5]


def test_answers_that_are_not_streamed(sim_url: SimUrl, wire: Callable[[str], Wire]) -> None:
    connection = wire(sim_url(**QUICK))
    connection.ask("POST", "/v1/chat/completions", chat(6, stream=False))
    status, _, body = connection.answer()
    answer = json.loads(body)
    assert status == 200
    assert len(pieces(answer["choices"][0]["message"]["content"])) == 6
    assert answer["usage"]["completion_tokens"] == 6
    connection.ask("POST", "/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 2})
    answer = json.loads(connection.answer()[2])
    assert len(pieces(answer["choices"][0]["text"])) == 2
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


def test_max_completion_tokens_goes_before_max_tokens(sim_url: SimUrl, wire: Callable[[str], Wire]) -> None:
    connection = wire(sim_url(**QUICK))
    assert len(stream(connection, "/v1/chat/completions", chat(9, max_completion_tokens=2))) == 1 + 2


def test_model_that_ends_by_itself(sim_url: SimUrl, wire: Callable[[str], Wire]) -> None:
    connection = wire(sim_url(**QUICK, answer_tokens=4))
    usage: dict[str, object] = {"stream_options": {"include_usage": True}}
    _, *texts, last = stream(connection, "/v1/chat/completions", chat(9, **usage))
    assert [len(pieces(text_of(event))) for event in texts] == [1, 1, 1, 0]  # the end token has no text
    assert texts[-1]["choices"][0]["finish_reason"] == "stop"
    assert last["usage"]["completion_tokens"] == 4
    _, *texts, last = stream(connection, "/v1/chat/completions", chat(9, ignore_eos=True, **usage))
    assert texts[-1]["choices"][0]["finish_reason"] == "length"
    assert last["usage"]["completion_tokens"] == 9
    _, *texts, last = stream(connection, "/v1/chat/completions", chat(3, **usage))
    assert texts[-1]["choices"][0]["finish_reason"] == "length"
    assert last["usage"]["completion_tokens"] == 3


def test_same_prompt_same_text(sim_url: SimUrl, wire: Callable[[str], Wire]) -> None:
    connection = wire(sim_url(**QUICK))
    texts = [
        [text_of(event) for event in stream(connection, "/v1/chat/completions", chat())] for _ in range(2)
    ]
    assert texts[0] == texts[1]


def test_streams_run_in_lockstep(sim_url: SimUrl, wire: Callable[[str], Wire]) -> None:
    """Streams that began at different times get their events at the same ticks."""
    url = sim_url(ttft_ms=20, step_ms=100)
    connections = [wire(url) for _ in range(4)]
    seen: list[tuple[float, int]] = []
    for connection in connections:
        connection.ask("POST", "/v1/chat/completions", chat(6))
        time.sleep(0.015)
    left, buffers = set(range(4)), [b""] * 4
    for connection in connections:
        connection.socket.setblocking(False)
    while left:
        for number in sorted(left):
            with contextlib.suppress(BlockingIOError):
                data = connections[number].socket.recv(65536)
                assert data
                seen += [(time.monotonic(), number)] * data.count(b'"content":" ')
                buffers[number] += data
                if buffers[number].endswith(b"0\r\n\r\n"):
                    left.remove(number)
        time.sleep(0.0005)
    times = [[when for when, who in seen if who == number] for number in range(4)]
    assert [len(times[number]) for number in range(4)] == [6] * 4
    some_tick = times[3][-1]
    for stream_times in times:
        for when in stream_times[1:]:  # a first one may have waited here while the others were asked
            off = (when - some_tick + 0.045) % 0.100
            assert off < 0.090, off  # nearly half a step early or late is room for a busy machine


def test_each_event_is_a_segment_of_its_own(sim_url: SimUrl, wire: Callable[[str], Wire]) -> None:
    """The first token must not hide behind the role event's read: both are written alone, role first."""
    connection = wire(sim_url(ttft_ms=30, step_ms=30))
    connection.ask("POST", "/v1/chat/completions", chat(3))
    status, _ = connection.head()  # the head comes at once, before the first tick
    assert status == 200
    assert len(events(connection.chunks())) == 1 + 3
    info = connection.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 160)
    (segments_in,) = struct.unpack_from("=I", info, 152)  # struct tcp_info, tcpi_data_segs_in
    assert segments_in == 1 + (1 + 3 + 1) + 1  # head; role, tokens, [DONE]; the last chunk


def test_head_comes_at_once_and_the_first_token_after_ttft(
    sim_url: SimUrl, wire: Callable[[str], Wire]
) -> None:
    connection = wire(sim_url(ttft_ms=300, step_ms=10))
    began = time.monotonic()
    connection.ask("POST", "/v1/chat/completions", chat(1))
    connection.head()
    head_s = time.monotonic() - began
    next(connection.chunks())
    first_s = time.monotonic() - began
    assert head_s < 0.3 <= first_s


def test_keep_alive_and_pipelining(sim_url: SimUrl, wire: Callable[[str], Wire]) -> None:
    connection = wire(sim_url(**QUICK))
    connection.ask("POST", "/v1/chat/completions", chat(2))
    connection.ask("GET", "/v1/models")
    connection.ask("POST", "/v1/chat/completions", chat(3), headers="Connection: close\r\n")
    connection.head()
    assert len(events(connection.chunks())) == 1 + 2
    assert connection.answer()[0] == 200
    assert connection.head()[1]["connection"] == "close"
    assert len(events(connection.chunks())) == 1 + 3
    assert connection.file.read() == b""


def test_http_1_0_stream_ends_with_the_connection(sim_url: SimUrl, wire: Callable[[str], Wire]) -> None:
    connection = wire(sim_url(**QUICK))
    connection.ask("POST", "/v1/chat/completions", chat(2), version="1.0")
    _, headers = connection.head()
    assert "transfer-encoding" not in headers
    assert connection.file.read().endswith(b"data: [DONE]\n\n")


def test_continue_is_sent_when_asked_for(sim_url: SimUrl, wire: Callable[[str], Wire]) -> None:
    connection = wire(sim_url(**QUICK))
    connection.ask(
        "POST", "/tokenize", b"", headers="Expect: 100-continue\r\n"
    )  # no body: nothing to wait for
    assert connection.answer()[0] == 400
    body = b'{"prompt": "a b"}'
    head = (
        f"POST /tokenize HTTP/1.1\r\nHost: sim\r\nExpect: 100-continue\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    connection.socket.sendall(head.encode())
    assert connection.head()[0] == 100
    connection.socket.sendall(body)
    assert json.loads(connection.answer()[2])["count"] == 2


def test_models_health_version_tokenize(sim_url: SimUrl, wire: Callable[[str], Wire]) -> None:
    connection = wire(sim_url(**QUICK, max_model_len=4096))

    def get(path: str) -> Any:
        connection.ask("GET", path)
        status, _, body = connection.answer()
        assert status == 200
        return json.loads(body) if body else None

    def count(body: object) -> Any:
        connection.ask("POST", "/tokenize", body)
        return json.loads(connection.answer()[2])

    (model,) = get("/v1/models")["data"]
    assert (model["id"], model["owned_by"]) == ("fastload-sim-lockstep", "fastload-sim")
    assert get("/health") is None
    assert "version" in get("/version")
    plain = count({"prompt": "one two three"})
    assert (plain["count"], len(plain["tokens"]), plain["max_model_len"]) == (3, 3, 4096)
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Tell me"}, {"type": "text", "text": " of it"}]}
    ]
    told = count({"messages": messages})["count"]
    assert told == chat_tokens(["Tell me of it"])
    connection.ask("POST", "/v1/chat/completions", chat(1, messages=messages, stream=False))
    assert json.loads(connection.answer()[2])["usage"]["prompt_tokens"] == told


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "word"),
    [
        ("POST", "/v1/chat/completions", b"{", 400, "JSON"),
        ("POST", "/v1/chat/completions", b"[]", 400, "object"),
        ("POST", "/v1/chat/completions", {}, 400, "messages"),
        ("POST", "/v1/chat/completions", chat(messages=[{"content": "no role"}]), 400, "role"),
        ("POST", "/v1/chat/completions", chat(messages=[{"role": "user", "content": 5}]), 400, "content"),
        ("POST", "/v1/chat/completions", chat(0), 400, "max_tokens"),
        ("POST", "/v1/chat/completions", chat(max_tokens=True), 400, "max_tokens"),
        ("POST", "/v1/chat/completions", chat(10**6), 400, "too large"),
        ("POST", "/v1/chat/completions", chat(temperature=-3), 400, "temperature"),
        ("POST", "/v1/chat/completions", chat(n=500), 400, "at most"),
        ("POST", "/v1/chat/completions", chat(stream=False, stream_options={}), 400, "stream_options"),
        ("POST", "/v1/chat/completions", chat(model="no-such-model"), 404, "no-such-model"),
        ("POST", "/v1/completions", {"prompt": ["a", "b"]}, 400, "prompt"),
        ("POST", "/tokenize", {"prompt": 5}, 400, "prompt"),
        ("GET", "/v1/chat/completions", None, 405, "Method"),
        ("GET", "/nowhere", None, 404, "/nowhere"),
    ],
)
def test_errors_are_in_openais_form_and_keep_the_connection(
    sim_url: SimUrl, wire: Callable[[str], Wire], method: str, path: str, body: object, status: int, word: str
) -> None:
    connection = wire(sim_url(**QUICK))
    connection.ask(method, path, body)
    told, _, answer = connection.answer()
    error = json.loads(answer)["error"]
    assert (told, error["code"]) == (status, status)
    assert word in error["message"]
    assert len(stream(connection, "/v1/chat/completions", chat(2))) == 1 + 2


def test_key(sim_url: SimUrl, wire: Callable[[str], Wire]) -> None:
    connection = wire(sim_url(**QUICK, api_key="secret"))
    connection.ask("GET", "/health")
    assert connection.answer()[0] == 200
    for headers, status in (
        ("", 401),
        ("Authorization: Bearer no\r\n", 401),
        ("Authorization: Bearer secret\r\n", 200),
    ):
        connection.ask("GET", "/v1/models", headers=headers)
        assert connection.answer()[0] == status


def test_malformed_request_is_answered_and_closed(sim_url: SimUrl, wire: Callable[[str], Wire]) -> None:
    connection = wire(sim_url(**QUICK))
    connection.socket.sendall(b"not http\r\n\r\n")
    assert connection.answer()[0] == 400
    assert connection.file.read() == b""


def test_others_go_on_when_a_client_leaves(sim_url: SimUrl, wire: Callable[[str], Wire]) -> None:
    url = sim_url(ttft_ms=5, step_ms=5)
    leaving, staying = wire(url), wire(url)
    leaving.ask("POST", "/v1/chat/completions", chat(1000))
    staying.ask("POST", "/v1/chat/completions", chat(40))
    leaving.head()
    next(leaving.chunks())
    leaving.close()
    staying.head()
    assert len(events(staying.chunks())) == 1 + 40


def test_a_reader_that_falls_behind_loses_nothing(sim_url: SimUrl, wire: Callable[[str], Wire]) -> None:
    tokens = 1_000_000  # some 7 MB: more than the kernel keeps between the two
    connection = wire(sim_url(ttft_ms=0, step_ms=0.1, tokens_per_event=1024, max_model_len=2 * tokens))
    connection.ask("POST", "/v1/chat/completions", chat(tokens))
    time.sleep(1.0)
    connection.head()
    _, *texts = events(connection.chunks())
    assert sum(text_of(event).count(" ") for event in texts) == tokens


def test_steps_keep_to_the_grid(sim_url: SimUrl, wire: Callable[[str], Wire]) -> None:
    connection = wire(sim_url(ttft_ms=0, step_ms=10))
    connection.ask("POST", "/v1/chat/completions", chat(50))
    connection.head()
    times = [time.monotonic() for _ in connection.chunks()][1:51]
    assert (times[-1] - times[0]) / 49 == pytest.approx(0.010, abs=0.0005)
    assert sorted(b - a for a, b in pairwise(times))[24] == pytest.approx(0.010, abs=0.001)


def test_it_ends_with_the_process_that_started_it() -> None:
    """Even when that is killed and can tell nobody."""
    code = (
        "import fastload.sim, sys\nwith fastload.sim.start() as url: print(url, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-P", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as starter:
        assert starter.stdout is not None
        url = starter.stdout.readline().decode().strip()
        Wire(url).close()
        starter.send_signal(signal.SIGKILL)
    give_up = time.monotonic() + 5
    while time.monotonic() < give_up:
        try:
            Wire(url).close()
        except OSError:
            return
        time.sleep(0.02)
    pytest.fail("the simulated engine is still there")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_ends_it(number: signal.Signals, code: int) -> None:
    command = [sys.executable, "-P", "-m", "fastload.sim.server"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline().startswith(b"listening http://127.0.0.1:")
        process.send_signal(number)
        assert process.stderr.read() == b""
        assert process.wait(5) == code


def test_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(TargetError, match=f"--port {port}: cannot listen"), start(Options(port=port)):
            pass


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"host": "0.0.0.0"}, "--host 0.0.0.0.*loopback"),
        ({"host": "example.org"}, "--host example.org.*loopback"),
        ({"step_ms": 0}, "--step-ms 0: must be"),
        ({"step_ms": float("nan")}, "--step-ms nan: must be"),
        ({"ttft_ms": -1}, "--ttft-ms -1: must be"),
        ({"tokens_per_event": 0}, "--tokens-per-event 0: must be"),
        ({"port": 70000}, "--port 70000: must be"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        Options(**options)


def test_the_key_is_shown_nowhere(sim_url: SimUrl) -> None:
    assert "secret" not in repr(Options(api_key="secret"))
    sim_url(**QUICK, api_key="a-secret-key")
    shown = []
    for process in os.listdir("/proc"):
        with contextlib.suppress(OSError), open(f"/proc/{process}/cmdline", "rb") as line:
            shown.append(line.read())
    assert any(b"fastload.sim.server" in line for line in shown)
    assert not any(b"a-secret-key" in line for line in shown)
