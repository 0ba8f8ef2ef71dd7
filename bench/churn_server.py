"""The server of churn.py: good answers, events of 1 MB, garbage and resets by turns. Says its port; SIGTERM ends it."""

import asyncio
import json
import random
import re
import signal
import struct

TOKENS = 8


def event(payload: object) -> bytes:
    """One event in a chunk of its own."""
    data = b"data: " + (payload if isinstance(payload, bytes) else json.dumps(payload).encode()) + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(data), data)


def text(content: str) -> bytes:
    """A text event of the chat endpoint."""
    return event({"id": "c", "choices": [{"index": 0, "delta": {"content": content}}]})


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n%s\r\n"
END = (
    event({"id": "c", "choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
    + event({"id": "c", "choices": [], "usage": {"prompt_tokens": 16, "completion_tokens": TOKENS}})
    + event(b"[DONE]")
    + b"0\r\n\r\n"
)
WORDS = [text(f" word{i}") for i in range(TOKENS)]
GOOD = HEAD % b"" + b"".join(WORDS) + END
CLOSING = HEAD % b"Connection: close\r\n" + b"".join(WORDS) + END
LARGE = HEAD % b"" + b"".join(WORDS[1:]) + text("x" * (1 << 20)) + END
ODD = HEAD % b"" + WORDS[0] + event(b'{"choices":[{"delta":{"content":["%s"]}}]}' % (b"y" * (1 << 20))) + END
REFUSAL = b'{"error":{"message":"out of memory","code":500}}'
GARBAGE = (
    random.Random(1).randbytes(3000),
    b"HTTP/1.1 200 OK\r\nX: " + b"x" * 80_000,
    HEAD % b"" + WORDS[0] + b"zz\r\n",
    HEAD % b"" + WORDS[0] + event(b'{"choices":[{"delta":' + random.Random(2).randbytes(500).replace(b"\n", b"")) + END,
    HEAD % b"" + WORDS[0] + event(REFUSAL) + event(b"[DONE]") + b"0\r\n\r\n",
    b"HTTP/1.1 503 Busy\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(REFUSAL), REFUSAL),
    GOOD + b"and more than was asked for",
)
TURN = "good closing large garbage good good odd closing reset good large garbage closing good garbage cut".split()


class Server(asyncio.Protocol):
    """One connection. The turn goes on over all of them."""

    turn = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.kept = b""

    def data_received(self, data: bytes) -> None:
        self.kept += data
        while b"\r\n\r\n" in self.kept and not self.transport.is_closing():
            head, _, rest = self.kept.partition(b"\r\n\r\n")
            found = re.search(rb"(?i)content-length: *(\d+)", head)
            length = int(found[1]) if found else 0
            if len(rest) < length:
                return
            body, self.kept = rest[:length], rest[length:]
            self.reply(head, body)

    def reply(self, head: bytes, body: bytes) -> None:
        """What was asked for, or what the turn says."""
        asked = json.loads(body) if body else {}
        if asked.get("stream"):
            kind = TURN[Server.turn % len(TURN)]
            Server.turn += 1
            self.answer(kind)
        elif b"/v1/models" in head:
            self.tell({"object": "list", "data": [{"id": "churn"}]})
        elif b"/tokenize" in head:
            told = asked.get("prompt") or asked["messages"][0]["content"]
            self.tell({"count": len(told.split()) + 3, "max_model_len": 1 << 20})
        elif "messages" in asked:
            usage = {"prompt_tokens": len(asked["messages"][0]["content"].split()) + 3, "completion_tokens": 1}
            self.tell({"choices": [{"message": {"content": "a"}}], "usage": usage})
        else:
            self.tell({"detail": "Not Found"}, b"404 Not Found")

    def tell(self, value: object, status: bytes = b"200 OK") -> None:
        """JSON, no stream."""
        data = json.dumps(value).encode()
        kind = b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(data)
        self.transport.write(b"HTTP/1.1 " + status + b"\r\n" + kind + data)

    def answer(self, kind: str) -> None:
        """One of the turn."""
        write = self.transport.write
        if kind == "garbage":
            write(GARBAGE[Server.turn // len(TURN) % len(GARBAGE)])
            self.transport.close()
        elif kind in ("reset", "cut"):
            if kind == "cut":
                write(HEAD % b"" + WORDS[0] + WORDS[1][:20])
            self.transport.get_extra_info("socket").setsockopt(1, 13, struct.pack("ii", 1, 0))  # SO_LINGER: a reset
            self.transport.abort()
        else:
            write({"good": GOOD, "closing": CLOSING, "large": LARGE, "odd": ODD}[kind])
            if kind == "closing":
                self.transport.close()


async def serve() -> None:
    """Listen on a free port, say which, and serve until SIGTERM."""
    loop = asyncio.get_running_loop()
    over = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, over.set)
    server = await loop.create_server(Server, "127.0.0.1", 0, backlog=512)
    print(server.sockets[0].getsockname()[1], flush=True)
    await over.wait()


if __name__ == "__main__":
    asyncio.run(serve())
