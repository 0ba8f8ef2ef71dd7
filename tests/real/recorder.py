"""Stands between fastload and a real server, keeps every byte of the answers, and reads them plainly.

    with record(url, tag="[think]") as recorded:
        ... fastload sweep --url recorded.url ...
    recorded.answers[server's id of the answer] -> what it said, event by event

A tag is put behind the prompt of each streamed request, since the model answers by it. The reading here is that of
somebody who looks at the bytes: whole answers, `json.loads`, nothing of fastload's but the numbers of its channels.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from fastload import _timing as t

WAIT_S = 20.0


@dataclass(frozen=True)
class Said:
    """One event: its text by channel (c content, r reasoning, t tool call), and the completion tokens it tells of."""

    text: dict[str, str]
    told: int | None
    done: bool = False

    @property
    def channel(self) -> str:
        """The channel of its text, "" without any, "D" for [DONE]."""
        return "D" if self.done else next((name for name in "crt" if self.text[name]), "")


@dataclass(frozen=True)
class Heard:
    """One streamed answer: its events, how many events each HTTP chunk held, and its comment lines."""

    events: list[Said]
    chunks: list[int]
    comments: int

    def text(self, channel: str) -> str:
        """All of its text in a channel."""
        return "".join(event.text[channel] for event in self.events)


@dataclass
class Recorded:
    """Where to send requests, and what came back so far; read `answers` when the run is over."""

    url: str = ""
    raw: list[bytearray] = field(default_factory=list)  # all answers of each connection

    @property
    def answers(self) -> dict[str, Heard]:
        """Streamed answers by the id that the server gave them."""
        found = {}
        for raw in self.raw:
            for chunks in streams_of(bytes(raw)):
                name, heard = heard_of(chunks)
                found[name] = heard
        return found


@contextlib.contextmanager
def record(url: str, tag: str = "") -> Iterator[Recorded]:
    """Relay to `url` (http://host:port) until the block ends."""
    host, port = url.removeprefix("http://").split(":")
    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    recorded = Recorded(f"http://127.0.0.1:{listener.getsockname()[1]}")

    socks: list[socket.socket] = []
    threads: list[threading.Thread] = []

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                ours, _ = listener.accept()
                theirs = socket.create_connection((host, int(port)))
                recorded.raw.append(kept := bytearray())
                for sock in (ours, theirs):
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    socks.append(sock)
                for work in ((_ask, ours, theirs, tag), (_answer, theirs, ours, kept)):
                    threads.append(threading.Thread(target=work[0], args=work[1:], daemon=True))
                    threads[-1].start()

    accepting = threading.Thread(target=accept, daemon=True)
    accepting.start()
    try:
        yield recorded
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        accepting.join(WAIT_S)
        for sock in socks:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join(WAIT_S)
        for sock in (listener, *socks):
            sock.close()


def _ask(client: socket.socket, server: socket.socket, tag: str) -> None:
    kept = b""
    with contextlib.suppress(OSError):
        while True:
            while b"\r\n\r\n" not in kept:
                kept += _received(client)
            head, _, kept = kept.partition(b"\r\n\r\n")
            lines = head.split(b"\r\n")
            sizes = [i for i, line in enumerate(lines) if line.lower().startswith(b"content-length:")]
            if sizes:
                size = int(lines[sizes[0]].partition(b":")[2])
                while len(kept) < size:
                    kept += _received(client)
                body = _tagged(json.loads(kept[:size]), tag)
                kept = kept[size:]
                lines[sizes[0]] = b"Content-Length: %d" % len(body)
                server.sendall(b"\r\n".join(lines) + b"\r\n\r\n" + body)
            else:
                server.sendall(head + b"\r\n\r\n")
    with contextlib.suppress(OSError):
        server.shutdown(socket.SHUT_WR)


def _received(sock: socket.socket) -> bytes:
    data = sock.recv(65536)
    if not data:
        raise ConnectionError
    return data


def _tagged(body: dict[str, Any], tag: str) -> bytes:
    if tag and body.get("stream"):
        if "messages" in body:
            body["messages"][-1]["content"] += tag
        else:
            body["input" if "input" in body else "prompt"] += tag
    return json.dumps(body).encode()


def _answer(server: socket.socket, client: socket.socket, kept: bytearray) -> None:
    with contextlib.suppress(OSError):
        while True:
            data = _received(server)
            kept += data
            client.sendall(data)
    with contextlib.suppress(OSError):
        client.shutdown(socket.SHUT_WR)


# ---- reading

CHANNELS = {t.CH_NONE: "", t.CH_CONTENT: "c", t.CH_REASONING: "r", t.CH_TOOL: "t", t.CH_DONE: "D"}


def agrees(row: dict[str, Any], events: dict[str, Any], heard: Heard) -> None:
    """Assert that a row of the trace and its events say what the bytes say."""
    assert row["status"] == "ok", row["error"]
    channels = [one.channel for one in heard.events]
    assert [CHANNELS[channel] for channel in events["channel"]] == channels
    assert row["events"] == len(channels)
    assert events["bytes"] == [sum(len(text.encode()) for text in one.text.values()) for one in heard.events]
    texts = {"c": events["text"], "r": events["reasoning_text"], "t": events["tool_text"]}
    assert {name: text or "" for name, text in texts.items()} == {name: heard.text(name) for name in "crt"}
    spoken = [i for i, channel in enumerate(channels) if channel in ("c", "r", "t")]
    told = [one.told for one in heard.events if one.told is not None]
    assert row["text_events"] == len(spoken)
    assert sum(events["tokens"]) == row["completion_tokens"] == (told[-1] if told else len(spoken))
    # stamps: in order, TTFT at the first text of any channel, TTFA at the first content
    assert events["event_ns"] == sorted(events["event_ns"])
    at_ms = [ns / 1e6 for ns in events["event_ns"]]
    content = [i for i in spoken if channels[i] == "c"]
    assert row["ttft_ms"] == (pytest.approx(at_ms[spoken[0]], abs=1e-6) if spoken else None)
    assert row["ttfa_ms"] == (pytest.approx(at_ms[content[0]], abs=1e-6) if content else None)
    last_ns = row["sent_ns"] + events["event_ns"][spoken[-1]] if spoken else None
    assert row["last_token_ns"] == last_ns
    assert row["first_byte_ns"] <= row["first_event_ns"]
    assert not spoken or row["sent_ns"] <= row["first_event_ns"] <= row["first_token_ns"] <= row["last_token_ns"]
    assert (last_ns or 0) <= row["done_ns"] <= row["framing_end_ns"]


def streams_of(raw: bytes) -> Iterator[list[bytes]]:
    """The chunks of each whole event stream among the answers of a connection."""
    at = 0
    while (end := raw.find(b"\r\n\r\n", at)) >= 0:
        head, at = raw[at:end].lower(), end + 4
        length = next((int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"content-length:")), None)
        if length is not None:
            at += length
            continue
        chunks: list[bytes] = []
        while (end := raw.find(b"\r\n", at)) >= 0:
            size = int(raw[at:end], 16)
            chunk, at = raw[end + 2 : end + 2 + size], end + 4 + size
            if size == 0:
                if b"text/event-stream" in head:
                    yield chunks
                break
            chunks.append(chunk)


def heard_of(chunks: list[bytes]) -> tuple[str, Heard]:
    """The server's id of an answer, and what it said."""
    name, events = "", []
    body = b"".join(chunks).decode()
    for line in body.split("\n"):
        if not line.startswith("data:"):
            continue
        data = line[5:].strip()
        if data == "[DONE]":
            events.append(Said(dict.fromkeys("crt", ""), None, done=True))
            continue
        value = json.loads(data)
        inner = value.get("message") or value.get("response") or value
        name = name or inner.get("id") or ""
        usage = value.get("usage") or inner.get("usage") or {}
        told = usage.get("completion_tokens", usage.get("output_tokens"))
        told = (value.get("timings") or {}).get("predicted_n") if told is None else told
        events.append(Said(_text_of(value), told))
    counts = [chunk.count(b"data:") for chunk in chunks]
    return name, Heard(events, counts, sum(line.startswith(":") for line in body.split("\n")))


def _text_of(value: dict[str, Any]) -> dict[str, str]:
    pieces: list[tuple[str, str | None]] = []
    for choice in value.get("choices") or []:
        delta = choice.get("delta") or {}
        pieces += [("c", choice.get("text")), ("c", delta.get("content"))]
        pieces += [("r", delta.get("reasoning_content") or delta.get("reasoning"))]
        for call in delta.get("tool_calls") or []:
            pieces += [("t", call["function"].get("name")), ("t", call["function"].get("arguments"))]
    match value.get("type"):
        case "content_block_start":
            pieces.append(("t", value["content_block"].get("name")))
        case "content_block_delta":
            names = {"text": "c", "thinking": "r", "partial_json": "t"}
            pieces += [(channel, value["delta"].get(name)) for name, channel in names.items()]
        case "response.output_text.delta":
            pieces.append(("c", value["delta"]))
        case "response.reasoning_text.delta":
            pieces.append(("r", value["delta"]))
        case "response.function_call_arguments.delta":
            pieces.append(("t", value["delta"]))
        case "response.output_item.added":
            pieces.append(("t", value["item"].get("name")))
    return {name: "".join(text or "" for channel, text in pieces if channel == name) for name in "crt"}
