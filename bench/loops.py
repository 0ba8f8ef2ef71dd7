"""The loop people write around an HTTP library: httpx, aiohttp, aiohttp with uvloop and orjson, the openai SDK.

    python -P bench/loops.py CLIENT URL CONCURRENCY REQUESTS TOKENS OUT.npz

`peers.py` and `saturate.py` run it as a process of its own, pinned by them. A closed loop: so many tasks, each sends
its next request when its last answer is done. A token's stamp is the clock right after the library handed it over, and
TTFT is that of the first one minus the clock before the call. Imports nothing of fastload.
"""

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np

MESSAGES = [{"role": "user", "content": " ".join(["token"] * 28)}]


def main() -> None:
    """Run the loop that is named, and write what it saw."""
    name, url, concurrency, requests, tokens, out = sys.argv[1:]
    body = {
        "model": "fastload-truth", "messages": MESSAGES, "max_tokens": int(tokens), "stream": True,
        "stream_options": {"include_usage": True},
    }
    run = asyncio.run
    if name == "aiohttp_uvloop_orjson":
        import uvloop

        run = uvloop.run
    run(loop(CLIENTS[name], url, int(concurrency), int(requests), body, out))


async def loop(client: Any, url: str, concurrency: int, requests: int, body: dict[str, Any], out: str) -> None:
    """`requests` requests over `concurrency` tasks: serial (of the answer's id), sent and stamps, all ns."""
    tokens = int(body["max_tokens"])
    serial, sent = np.full(requests, -1), np.full(requests, -1)
    stamps = np.full((requests, tokens), -1)
    left = iter(range(requests))

    async def task(stream: Callable[[], AsyncIterator[tuple[str, str]]]) -> None:
        for number in left:
            place = 0
            sent[number] = time.monotonic_ns()
            async for ident, text in stream():
                if text:
                    stamps[number, place] = time.monotonic_ns()
                    place += 1
                    if place == 1:
                        serial[number] = int(ident[6:])

    started = time.process_time_ns()
    async with client(url, concurrency, body) as stream:
        await asyncio.gather(*(task(stream) for _ in range(concurrency)))
    np.savez(out, serial=serial, sent=sent, stamps=stamps, cpu_ns=time.process_time_ns() - started)


class Httpx:
    """httpx.AsyncClient.stream and aiter_lines, the limits raised to the concurrency."""

    def __init__(self, url: str, concurrency: int, body: dict[str, Any]) -> None:
        import httpx

        limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
        self.client = httpx.AsyncClient(timeout=None, limits=limits, trust_env=False)
        self.url, self.body = url + "/v1/chat/completions", body

    async def __aenter__(self) -> Callable[[], AsyncIterator[tuple[str, str]]]:
        return self.stream

    async def __aexit__(self, *_: object) -> None:
        await self.client.aclose()

    async def stream(self) -> AsyncIterator[tuple[str, str]]:
        """(id, text) of each event."""
        async with self.client.stream("POST", self.url, json=self.body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    yield pick(json.loads(line[6:]))


class Aiohttp:
    """aiohttp's ClientSession.post and content, without a limit of connections."""

    loads = staticmethod(json.loads)

    def __init__(self, url: str, concurrency: int, body: dict[str, Any]) -> None:
        import aiohttp

        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
        )
        self.url, self.body = url + "/v1/chat/completions", body

    async def __aenter__(self) -> Callable[[], AsyncIterator[tuple[str, str]]]:
        return self.stream

    async def __aexit__(self, *_: object) -> None:
        await self.session.close()

    async def stream(self) -> AsyncIterator[tuple[str, str]]:
        """(id, text) of each event."""
        async with self.session.post(self.url, json=self.body) as response:
            pending = b""
            async for data in response.content.iter_any():
                *lines, pending = (pending + data).split(b"\n")
                for line in lines:
                    if line.startswith(b"data: {"):
                        yield pick(self.loads(line[6:]))


class AiohttpOrjson(Aiohttp):
    """The same with orjson (and, by main, on uvloop)."""

    def __init__(self, url: str, concurrency: int, body: dict[str, Any]) -> None:
        import orjson

        super().__init__(url, concurrency, body)
        self.loads = orjson.loads  # type: ignore[method-assign]


class Openai:
    """AsyncOpenAI.chat.completions.create(stream=True), the limits raised to the concurrency."""

    def __init__(self, url: str, concurrency: int, body: dict[str, Any]) -> None:
        import httpx
        import openai

        limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
        own = httpx.AsyncClient(timeout=None, limits=limits, trust_env=False)
        self.client = openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", http_client=own, max_retries=0)
        self.body = body

    async def __aenter__(self) -> Callable[[], AsyncIterator[tuple[str, str]]]:
        return self.stream

    async def __aexit__(self, *_: object) -> None:
        await self.client.close()

    async def stream(self) -> AsyncIterator[tuple[str, str]]:
        """(id, text) of each event."""
        async for chunk in await self.client.chat.completions.create(**self.body):
            yield chunk.id, (chunk.choices[0].delta.content or "") if chunk.choices else ""


def pick(event: dict[str, Any]) -> tuple[str, str]:
    """(id, text) of a chunk."""
    choices = event["choices"]
    return event["id"], choices[0]["delta"].get("content") or "" if choices else ""


CLIENTS = {"httpx": Httpx, "aiohttp": Aiohttp, "aiohttp_uvloop_orjson": AiohttpOrjson, "openai": Openai}

if __name__ == "__main__":
    main()
