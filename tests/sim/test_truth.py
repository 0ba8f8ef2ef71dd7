"""The ground-truth server over raw sockets: what it sends, what it logs, and that the two are one."""

import contextlib
import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastload import _timing
from fastload.errors import TargetError
from fastload.sim import _emit, truth

RECORD = np.dtype([("ns", "<i8"), ("request", "<u4"), ("token", "<u4")])


@dataclass
class Server:
    """A running server: where it is, and its log so far."""

    port: int
    log: Path

    def connect(self, receive_bytes: int | None = None) -> socket.socket:
        client = socket.socket()
        client.settimeout(20)
        if receive_bytes is not None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        client.connect(("127.0.0.1", self.port))
        return client

    def records(self, until: Callable[[Any], bool] = lambda _: True) -> Any:
        """The log, once `until` says yes of it (a record of an end may follow the client's last byte)."""
        give_up = time.monotonic() + 20
        while True:
            written, dropped = np.fromfile(self.log, "<i8", 2).tolist()
            assert dropped == 0
            records = np.fromfile(self.log, RECORD, written, offset=_emit.HEADER_BYTES)
            if until(records):
                return records
            assert time.monotonic() < give_up, records
            time.sleep(0.01)

    def ended(self, answers: int) -> Any:
        return self.records(lambda records: (records["token"] == _emit.ENDED).sum() == answers)


Start = Callable[..., Server]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start servers of a pace; all end with the test."""
    with contextlib.ExitStack() as running:

        def go(ttft_ms: float = 5.0, step_ms: float = 4.0) -> Server:
            log = tmp_path / f"log-{len(list(tmp_path.iterdir()))}"
            url = running.enter_context(truth.start(truth.Pace(ttft_ms, step_ms), log))
            return Server(int(url.rpartition(":")[2]), log)

        yield go


def request(tokens: int | None = 4, padding: int = 0) -> bytes:
    messages = [{"role": "user", "content": "x" * padding}]
    asked: dict[str, object] = {"model": "any", "messages": messages, "stream": True}
    if tokens is not None:
        asked["max_tokens"] = tokens
    body = json.dumps(asked, separators=(",", ":")).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: here\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def body_bytes(sent: bytes) -> int:
    return len(sent.partition(b"\r\n\r\n")[2])


def answer(client: socket.socket) -> list[Any]:
    """Read one whole answer: its events, JSON parsed, [DONE] as text. Reads not a byte beyond."""
    reader = client.makefile("rb", buffering=0)
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        byte = reader.read(1)
        assert byte, head
        head += byte
    assert head.startswith(b"HTTP/1.1 200 ") and b"transfer-encoding: chunked" in head
    text = b""
    while True:
        size = int(_line(reader), 16)
        chunk = b""
        while len(chunk) < size + 2:
            piece = reader.read(size + 2 - len(chunk))
            assert piece
            chunk += piece
        assert chunk.endswith(b"\r\n")
        if size == 0:
            break
        text += chunk[:-2]
    payloads = [event.removeprefix(b"data: ") for event in text.removesuffix(b"\n\n").split(b"\n\n")]
    return [payload.decode() if payload == b"[DONE]" else json.loads(payload) for payload in payloads]


def _line(reader: Any) -> bytes:
    line = b""
    while not line.endswith(b"\r\n"):
        byte = reader.read(1)
        assert byte, line
        line += byte
    return line[:-2]


def check_answer(events: list[Any], serial: int, tokens: int, prompt: int) -> None:
    *texts, usage, done = events
    assert done == "[DONE]" and {event["id"] for event in events[:-1]} == {f"truth-{serial:08d}"}
    if tokens > 1 or len(texts) > 1:  # a single token may come without an event for the role
        assert texts.pop(0)["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [event["choices"][0]["delta"] for event in texts] == [{"content": " token"}] * tokens
    assert [event["choices"][0]["finish_reason"] for event in texts] == [None] * (tokens - 1) + ["length"]
    assert usage["choices"] == []
    assert usage["usage"] == {
        "prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens
    }


def check_log(records: Any, serial: int, tokens: int) -> Any:
    """The records of one request: arrival, tokens, end, in this order and never back in time. Returns its sends."""
    own = records[records["request"] == serial]
    assert own["token"].tolist() == [_emit.RECEIVED, *range(tokens), _emit.ENDED]
    assert (np.diff(own["ns"]) >= 0).all()
    return own["ns"][1:-1]


@pytest.mark.parametrize("step_ms", [4.0, 0.0], ids=["paced", "unpaced"])
def test_an_answer_and_its_records(start: Start, step_ms: float) -> None:
    server = start(step_ms=step_ms)
    before = _timing.now_ns()
    with server.connect() as client:
        for serial, tokens in enumerate((4, 1, 2, 9)):  # one connection, kept alive
            sent = request(tokens)
            client.sendall(sent)
            check_answer(answer(client), serial, tokens, body_bytes(sent))
    records = server.ended(4)
    for serial, tokens in enumerate((4, 1, 2, 9)):
        check_log(records, serial, tokens)
    assert before <= records["ns"].min() and records["ns"].max() <= _timing.now_ns()
    assert len(records) == 4 * 2 + 16


def test_sends_keep_to_an_absolute_grid(start: Start) -> None:
    ttft_ns, step_ns = 10_000_000, 8_000_000
    server = start(ttft_ms=ttft_ns / 1e6, step_ms=step_ns / 1e6)
    with server.connect() as one, server.connect() as other:
        for client in (one, other):
            client.sendall(request(20))
        answer(one), answer(other)
    records = server.ended(2)
    received = records["ns"][records["token"] == _emit.RECEIVED]
    sends = [check_log(records, serial, 20) for serial in (0, 1)]
    for serial in (0, 1):
        # never before its time, and no two tokens nearer than a step but for lateness of the first of them
        assert sends[serial][0] - received[serial] >= ttft_ns
    # one grid for both: most sends share its phase, for a late one moves none of the others
    phase = np.concatenate(sends) % step_ns
    apart = np.abs(phase[:, None] - phase[None, :])
    near = np.minimum(apart, step_ns - apart) < step_ns / 8
    assert near.mean(axis=1).max() > 0.5


def test_streams_that_run_together_get_their_tokens_in_one_burst(start: Start) -> None:
    server = start(ttft_ms=50.0, step_ms=20.0)
    with contextlib.ExitStack() as held:
        clients = [held.enter_context(server.connect()) for _ in range(32)]
        for client in clients:
            client.sendall(request(5))
        for client in clients:
            answer(client)
    records = server.ended(32)
    order = records[records["token"] < _emit.ENDED]
    for serial in range(32):
        check_log(records, serial, 5)
    # whoever has joined gets token k before anyone gets its next one: in the log the tokens of a burst stand together
    bursts = np.split(order["request"], np.flatnonzero(np.diff(order["ns"]) > 5_000_000) + 1)
    assert all(len(set(burst.tolist())) == len(burst) for burst in bursts)


def test_a_body_in_pieces_counts_from_its_last_byte(start: Start) -> None:
    server = start()
    whole = request(3)
    with server.connect() as client:
        client.sendall(whole[:40])
        time.sleep(0.05)
        client.sendall(whole[40:-1])
        time.sleep(0.05)
        assert len(server.records()) == 0
        last = _timing.now_ns()
        client.sendall(whole[-1:])
        check_answer(answer(client), 0, 3, body_bytes(whole))
    records = server.ended(1)
    assert records["ns"][0] >= last - 50_000  # two clocks' brackets


@pytest.mark.parametrize("padding", [100_000, 5_000_000])
def test_large_bodies(start: Start, padding: int) -> None:
    server = start()
    sent = request(2, padding)
    with server.connect() as client:
        client.sendall(sent)
        check_answer(answer(client), 0, 2, body_bytes(sent))
        client.sendall(request(3))
        check_answer(answer(client), 1, 3, body_bytes(request(3)))
    check_log(server.ended(2), 0, 2)


def test_pipelined_requests_are_answered_one_after_the_other(start: Start) -> None:
    server = start()
    with server.connect() as client:
        client.sendall(request(2) + request(3))
        check_answer(answer(client), 0, 2, body_bytes(request(2)))
        check_answer(answer(client), 1, 3, body_bytes(request(3)))
    records = server.ended(2)
    assert check_log(records, 1, 3)[0] > check_log(records, 0, 2)[-1]


def test_without_max_tokens_there_are_sixteen(start: Start) -> None:
    with start().connect() as client:
        client.sendall(request(None))
        check_answer(answer(client), 0, 16, body_bytes(request(None)))


@pytest.mark.parametrize("step_ms", [4.0, 0.0], ids=["paced", "unpaced"])
def test_a_client_that_leaves_ends_its_own_stream_only(start: Start, step_ms: float) -> None:
    server = start(step_ms=step_ms)
    with server.connect() as stays, server.connect() as leaves:
        leaves.sendall(request(1_000_000))
        assert leaves.recv(10)
        server.records(lambda records: (records["token"] < _emit.ENDED).any())
        leaves.close()
        stays.sendall(request(50))
        check_answer(answer(stays), 1, 50, body_bytes(request(50)))
        records = server.records(lambda found: ((found["request"] == 1) & (found["token"] == _emit.ENDED)).any())
        check_log(records, 1, 50)
        seen = records["token"][(records["request"] == 0) & (records["token"] < _emit.ENDED)]
        assert seen.tolist() == list(range(len(seen))) and len(seen) < 1_000_000
        assert not ((records["request"] == 0) & (records["token"] == _emit.ENDED)).any()
        # a place that became free is used again
        with server.connect() as comes:
            comes.sendall(request(2))
            check_answer(answer(comes), 2, 2, body_bytes(request(2)))


def test_a_slow_reader_still_gets_every_byte(start: Start) -> None:
    """The socket takes sends in part, or none at all; what it did not take is sent when it can."""
    server = start(step_ms=0.0)
    tokens = 30_000
    with server.connect(receive_bytes=1 << 16) as client:
        client.sendall(request(tokens))
        time.sleep(0.3)
        read = b""
        while not read.endswith(b"0\r\n\r\n"):
            piece = client.recv(1 << 20)
            assert piece
            read += piece
    assert len(re.findall(rb'"content":" token"', read)) == tokens
    assert read.count(b"data: [DONE]") == 1 and b'"completion_tokens":30000' in read
    check_log(server.ended(1), 0, tokens)


def test_the_end_is_not_lost_where_the_socket_is_just_full(start: Start) -> None:
    """An answer whose last token is the last that the socket takes: what follows it must wait, not be dropped."""
    server = start(step_ms=0.0)
    with server.connect(receive_bytes=4096) as client:
        client.sendall(request(100_000))
        server.records(lambda records: (records["token"] == 0).any())
        seen = 0
        while (now := len(server.records())) != seen:
            seen = now
            time.sleep(0.1)
    fit = seen - 1  # without the record of the arrival
    for tokens in range(fit - 6, fit + 3):
        with server.connect(receive_bytes=4096) as client:
            client.sendall(request(tokens))
            time.sleep(0.1)
            client.settimeout(3)
            read = b""
            while not read.endswith(b"0\r\n\r\n"):
                try:
                    piece = client.recv(1 << 20)
                except TimeoutError:
                    piece = b""
                assert piece, f"{tokens} tokens: the answer has no end: ...{read[-60:]!r}"
                read += piece
        assert read.count(b"data: [DONE]") == 1


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET /v1/models HTTP/1.1\r\nHost: here\r\n\r\n", b"200"),
        (b"GET /health HTTP/1.1\r\nHost: here\r\n\r\n", b"200"),
        (b"GET /metrics HTTP/1.1\r\nHost: here\r\n\r\n", b"404"),
        (request(3).replace(b"/v1/chat/completions", b"/tokenize"), b"404"),
        (request(3).replace(b'"stream":true', b'"stream":null'), b"200"),
    ],
)
def test_what_is_no_stream_is_answered_and_not_in_the_log(start: Start, sent: bytes, status: bytes) -> None:
    server = start()
    with server.connect() as client:
        client.sendall(sent)
        head, _, body = client.recv(1 << 16).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 " + status)
        assert int(re.findall(rb"(?i)content-length: (\d+)", head)[0]) == len(body)
        assert not body or json.loads(body)
        client.sendall(request(2))  # the connection lives on, and the log begins here
        check_answer(answer(client), 0, 2, body_bytes(request(2)))
    check_log(server.ended(1), 0, 2)


def test_the_log_is_cut_to_what_was_written(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with truth.start(truth.Pace(5, 2), log) as url:
        server = Server(int(url.rpartition(":")[2]), log)
        with server.connect() as client:
            client.sendall(request(3))
            answer(client)
        server.ended(1)
    assert log.stat().st_size == _emit.HEADER_BYTES + 5 * _emit.RECORD_BYTES
    check_log(server.records(), 0, 3)


def test_a_server_that_cannot_start_says_so(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="did not start"), truth.start(truth.Pace(), tmp_path / "no" / "log"):
        pass


def test_it_ends_with_its_stdin(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "fastload.sim.truth", "--log", str(tmp_path / "log")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline().startswith(b"listening http://127.0.0.1:")
        process.stdin.close()
        assert process.wait(20) == 0


def test_a_full_log_counts_what_it_dropped(tmp_path: Path) -> None:
    """In a process of its own: the emitter serves until stdin ends."""
    code = """
import socket, sys
from fastload.sim import _emit
log = bytearray(_emit.HEADER_BYTES + 3 * _emit.RECORD_BYTES)
with socket.create_server(("127.0.0.1", 0)) as listening:
    listening.setblocking(False)
    emitter = _emit.Emitter(listening.fileno(), log, 0, 0)
    print(listening.getsockname()[1], flush=True)
    emitter.serve()
print(*memoryview(log)[:16].cast("q"))
"""
    command = [sys.executable, "-P", "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        with Server(int(process.stdout.readline()), tmp_path).connect() as client:
            client.sendall(request(4))
            check_answer(answer(client), 0, 4, body_bytes(request(4)))
            client.sendall(request(1))  # the end of the first is noted by the time this one is answered
            answer(client)
        process.stdin.close()
        written, dropped = map(int, process.stdout.readline().split())
    assert written == 3 and dropped in (5, 6)


def test_a_pace_below_zero_is_refused_and_nothing_of_ours_closed() -> None:
    """In a process of its own, for what it did not open (descriptor 0, say) it must not close."""
    code = """
import os, socket
from fastload.sim import _emit
with socket.create_server(("127.0.0.1", 0)) as listening:
    try:
        _emit.Emitter(listening.fileno(), bytearray(_emit.HEADER_BYTES + _emit.RECORD_BYTES), -1, 0)
    except ValueError as error:
        print(error)
os.fstat(0)
"""
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], input="", capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 0, done.stderr
    assert "ttft_ns=-1" in done.stdout
