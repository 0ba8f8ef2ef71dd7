"""What may stand between a client and a server: TLS that ends before the server, and a proxy that makes tunnels."""

import asyncio
import contextlib
import ssl
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
WAIT_S = 20.0


async def _pour(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await source.read(65536):
            sink.write(data)
            await sink.drain()
    sink.close()


async def _join(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int) -> None:
    there, back = await asyncio.open_connection("127.0.0.1", port)
    try:
        await asyncio.gather(_pour(reader, back), _pour(there, writer))
    finally:
        back.transport.abort()


@contextlib.contextmanager
def _listening(handler: Handler, tls: ssl.SSLContext | None) -> Iterator[int]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def handled(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await handler(reader, writer)
        except asyncio.IncompleteReadError:
            pass  # it went away without a word
        finally:
            writer.transport.abort()

    async def open_it() -> asyncio.Server:
        return await asyncio.start_server(handled, "127.0.0.1", 0, ssl=tls)

    async def close_it(server: asyncio.Server) -> None:
        server.close()
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await asyncio.sleep(0.05)  # transports close their sockets some turns of the loop later

    server = asyncio.run_coroutine_threadsafe(open_it(), loop).result(WAIT_S)
    try:
        yield int(server.sockets[0].getsockname()[1])
    finally:
        asyncio.run_coroutine_threadsafe(close_it(server), loop).result(WAIT_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(WAIT_S)
        loop.close()


@contextlib.contextmanager
def tls_front(port: int, context: ssl.SSLContext) -> Iterator[int]:
    """Speaks TLS on the port it yields, and plainly to `port`."""
    with _listening(lambda reader, writer: _join(reader, writer, port), context) as own:
        yield own


@dataclass
class Proxy:
    """A proxy's port, and the heads of the requests it was sent."""

    port: int = 0
    heads: list[str] = field(default_factory=list)


@contextlib.contextmanager
def proxy(answer: bytes | None = None) -> Iterator[Proxy]:
    """A proxy that makes any tunnel asked for; with `answer` it says that and closes."""
    seen = Proxy()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        except asyncio.IncompleteReadError:  # it only looked whether anybody listens
            writer.close()
            return
        seen.heads.append(head)
        if answer is not None:
            writer.write(answer)
            await writer.drain()
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
            return
        method, place, _ = head.split(" ", 2)
        assert method == "CONNECT"
        writer.write(b"HTTP/1.1 200 Connection established\r\nVia: test\r\n\r\n")
        await _join(reader, writer, int(place.rpartition(":")[2]))

    with _listening(serve, None) as seen.port:
        yield seen
