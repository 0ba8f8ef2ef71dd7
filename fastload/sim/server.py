"""The simulated engine's server: sockets, routes, and the tick. One process, one loop.

    python -m fastload.sim.server [--ttft-ms 50] [--step-ms 20] [--tokens-per-event 1] [--port 0] ...

prints `listening http://127.0.0.1:PORT` and runs until SIGINT or SIGTERM. A key, if wanted, comes by the
environment (FASTLOAD_SIM_API_KEY), for everybody can read a command line.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import gc
import hmac
import os
import resource
import secrets
import signal
import socket
import sys
from collections.abc import Callable
from typing import cast

from fastload._timing import now_ns, realtime_ns
from fastload.errors import PlanError
from fastload.sim import openai
from fastload.sim.engine import GridTimer, Lockstep
from fastload.sim.http1 import (
    CONTINUE,
    LAST_CHUNK,
    MalformedRequest,
    Request,
    RequestReader,
    chunk,
    response,
    stream_head,
)
from fastload.sim.options import Options

KEY_VARIABLE = "FASTLOAD_SIM_API_KEY"
VERSION = "lockstep-1"

# a level's first wave connects at once; a short queue would cost some of them a SYN retry of a second
_BACKLOG = 4096
_NS_PER_MS = 1_000_000


def serve(
    options: Options,
    announce: Callable[[str], None],
    *,
    cpu: int | None = None,
    until_stdin_ends: bool = False,
) -> int:
    """Serve until SIGINT or SIGTERM (or, if asked, until stdin ends); gives the signal's number, else 0.

    `announce` is called once with the base URL, when connections are taken. Raises `PlanError` if the port
    cannot be had.
    """
    if cpu is not None:
        try:
            os.sched_setaffinity(0, {cpu})
        except OSError:
            allowed = sorted(os.sched_getaffinity(0))
            raise PlanError(f"--cpu {cpu}: this process may run on {allowed} only") from None
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_serve(options, announce, until_stdin_ends))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop where it is installed; asyncio's own loop does too."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


async def _serve(options: Options, announce: Callable[[str], None], until_stdin_ends: bool) -> int:
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[int] = loop.create_future()

    def end(number: int) -> None:
        if not ended.done():
            ended.set_result(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end, int(number))
    if until_stdin_ends:
        # The pipe closes when whoever started us ends, however it ends: no server is left behind.
        loop.add_reader(0, lambda: None if os.read(0, 4096) else end(0))
    engine = Engine(options)
    try:
        server = await loop.create_server(
            lambda: Connection(engine), options.host, options.port, backlog=_BACKLOG
        )
    except OSError as error:
        engine.close()
        reason = error.strerror or str(error)
        raise PlanError(
            f"--host {options.host} --port {options.port}: cannot listen there: {reason}"
        ) from None
    port = server.sockets[0].getsockname()[1]
    gc.collect()
    gc.freeze()  # what is here now stays; collections look at the traffic's objects only
    host = f"[{options.host}]" if ":" in options.host else options.host
    announce(f"http://{host}:{port}")
    try:
        return await ended
    finally:
        server.close()
        engine.close()


class Engine:
    """The lockstep engine on the process's clock and loop."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.started_s = realtime_ns() // 1_000_000_000
        self.connections: set[Connection] = set()
        self._step_ns = round(options.step_ms * _NS_PER_MS)
        self._batch = Lockstep(
            round(options.ttft_ms * _NS_PER_MS), self._step_ns, options.tokens_per_event, now_ns()
        )
        self._timer = GridTimer()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._timer.fd, self._tick)

    def admit(self, answer: "Answering") -> None:
        self._batch.admit(answer, now_ns())
        if self._timer.armed_ns is None:
            self._timer.arm(self._batch.next_tick_ns(now_ns()))

    def drop(self, answer: "Answering") -> None:
        self._batch.drop(answer)  # the timer may fire for nobody once; it is not armed again then

    def close(self) -> None:
        self._loop.remove_reader(self._timer.fd)
        self._timer.close()
        for connection in list(self.connections):
            connection.abort()

    def _tick(self) -> None:
        tick_ns = self._timer.fired()
        if tick_ns is None:
            return
        late_ns = now_ns() - tick_ns
        tick_ns += late_ns // self._step_ns * self._step_ns  # the latest grid point that has passed
        self._batch.tick(tick_ns)
        self._timer.arm(self._batch.next_tick_ns(max(tick_ns, now_ns())))


class Answering:
    """One completion request on its connection, from arrival to its last byte."""

    def __init__(self, ask: openai.Ask, request: Request, connection: "Connection", model: str) -> None:
        self.left = ask.limit
        self._ask = ask
        self._connection = connection
        self._chunked = request.http11
        self._keep_alive = request.keep_alive and (request.http11 or not ask.stream)
        self._id = ("chatcmpl-" if ask.chat else "cmpl-") + secrets.token_hex(8)
        self._created_s = realtime_ns() // 1_000_000_000
        self._model = model
        self._events = openai.EventWriter(ask, self._id, self._created_s, model) if ask.stream else None
        if ask.stream:
            # as vLLM: the head before queue and prefill
            connection.write(stream_head(self._chunked, self._keep_alive))

    def emit(self, tokens: int) -> None:
        """Called by the engine at a tick. One write, hence one segment, an event."""
        start = self._ask.limit - self.left
        self.left -= tokens
        events = self._events
        if events is None:
            if self.left == 0:
                body = openai.whole_answer(self._ask, self._id, self._created_s, self._model)
                self._connection.write(response(200, body, self._keep_alive))
                self._connection.answered(self._keep_alive)
            return
        if start == 0 and self._ask.chat:
            self._send(events.role())
        self._send(events.text(start, tokens))
        if self.left == 0:
            if self._ask.include_usage:
                self._send(events.usage())
            self._send(openai.DONE)
            if self._chunked:
                self._connection.write(LAST_CHUNK)
            self._connection.answered(self._keep_alive)

    def _send(self, event: bytes) -> None:
        self._connection.write(chunk(event) if self._chunked else event)


class Connection(asyncio.Protocol):
    """One client's connection: its requests one after the other."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._reader = RequestReader()
        self._answer: Answering | None = None
        self._transport: asyncio.Transport
        self._fd = -1

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but its bases
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._fd = sock.fileno()
        self._engine.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._fd = -1
        self._engine.connections.discard(self)
        if self._answer is not None:
            self._engine.drop(self._answer)
            self._answer = None

    def data_received(self, data: bytes) -> None:
        try:
            self._reader.feed(data)
        except MalformedRequest:
            self.abort()
            return
        self._serve()

    def write(self, data: bytes) -> None:
        """Hand `data` to the kernel now, in a segment of its own.

        uvloop's own write gathers what one pass of the loop wrote; here that would glue the role event to the
        first token.
        """
        if self._fd < 0 or self._transport.is_closing():
            return
        sent = 0
        if self._transport.get_write_buffer_size() == 0:
            try:
                sent = os.write(self._fd, data)
            except BlockingIOError:
                pass
            except OSError:
                self.abort()
                return
        if sent < len(data):
            self._transport.write(data[sent:])

    def answered(self, keep_alive: bool) -> None:
        """The answer's last byte is written. A request that waits already starts in the loop's next pass."""
        self._answer = None
        if keep_alive:
            asyncio.get_running_loop().call_soon(self._serve)
        else:
            self._transport.close()

    def abort(self) -> None:
        """Close at once, without the rest."""
        self._transport.abort()

    def _serve(self) -> None:
        while self._answer is None and self._fd >= 0 and not self._transport.is_closing():
            try:
                request = self._reader.next()
            except MalformedRequest as error:
                body = openai.error_body(error.status, str(error), "Bad Request", None)
                self.write(response(error.status, body, keep_alive=False))
                self._transport.close()
                return
            if request is None:
                if self._reader.expects_continue:
                    self.write(CONTINUE)
                return
            try:
                self._handle(request)
            except openai.Rejected as error:
                self._reply(
                    request,
                    error.status,
                    openai.error_body(error.status, str(error), error.kind, error.param),
                )

    def _handle(self, request: Request) -> None:
        options = self._engine.options
        method, path = request.method, request.path
        wanted = _ROUTES.get(path)
        if wanted is None:
            raise openai.Rejected(404, f"Not Found: {path}", kind="NotFoundError")
        if method != wanted:
            raise openai.Rejected(405, f"Method Not Allowed: {method} {path}", kind="Method Not Allowed")
        if options.api_key is not None and path.startswith("/v1/"):
            given = request.headers.get("authorization", "")
            if not hmac.compare_digest(given.encode(), f"Bearer {options.api_key}".encode()):
                raise openai.Rejected(401, "Unauthorized", kind="AuthenticationError")
        match path:
            case "/v1/chat/completions" | "/v1/completions":
                ask = openai.read_ask(request.body, path == "/v1/chat/completions", options)
                self._answer = Answering(ask, request, self, options.model)
                self._engine.admit(self._answer)
            case "/v1/models":
                self._reply(request, 200, openai.models(options, self._engine.started_s))
            case "/tokenize":
                self._reply(request, 200, openai.tokenize(request.body, options))
            case "/version":
                self._reply(request, 200, b'{"version":"%b"}' % VERSION.encode())
            case _:  # /health and /ping: an empty body, as vLLM
                self._reply(request, 200, b"")

    def _reply(self, request: Request, status: int, body: bytes) -> None:
        self.write(response(status, body, request.keep_alive))
        if not request.keep_alive:
            self._transport.close()


_ROUTES = {
    "/v1/chat/completions": "POST",
    "/v1/completions": "POST",
    "/v1/models": "GET",
    "/tokenize": "POST",
    "/health": "GET",
    "/version": "GET",
}


def command_line(options: Options) -> list[str]:
    """The arguments that make `main` serve `options`; the key is left out, see KEY_VARIABLE."""
    arguments = []
    for option in dataclasses.fields(Options):
        value = getattr(options, option.name)
        flag = "--" + option.name.replace("_", "-")
        if value is None or option.name == "api_key" or value is False:
            continue
        arguments += [flag] if value is True else [flag, str(value)]
    return arguments


def main(arguments: list[str] | None = None) -> int:
    """The command line; gives the exit code."""
    defaults = Options()
    parser = argparse.ArgumentParser(
        prog="python -m fastload.sim.server", description="A simulated engine to load."
    )
    parser.add_argument("--ttft-ms", type=float, default=defaults.ttft_ms)
    parser.add_argument("--step-ms", type=float, default=defaults.step_ms)
    parser.add_argument("--tokens-per-event", type=int, default=defaults.tokens_per_event)
    parser.add_argument("--answer-tokens", type=int, default=None)
    parser.add_argument("--max-model-len", type=int, default=defaults.max_model_len)
    parser.add_argument("--model", default=defaults.model)
    parser.add_argument("--host", default=defaults.host)
    parser.add_argument("--port", type=int, default=defaults.port)
    parser.add_argument("--allow-remote", action="store_true")
    parser.add_argument("--cpu", type=int, default=None, help="stay on this CPU")
    parser.add_argument("--until-stdin-ends", action="store_true", help="end when stdin does")
    given = vars(parser.parse_args(arguments))
    cpu, until_stdin_ends = given.pop("cpu"), given.pop("until_stdin_ends")
    try:
        options = Options(**given, api_key=os.environ.pop(KEY_VARIABLE, None))
        number = serve(
            options,
            lambda url: print(f"listening {url}", flush=True),
            cpu=cpu,
            until_stdin_ends=until_stdin_ends,
        )
    except PlanError as error:
        print(error, file=sys.stderr)
        return 2
    return 128 + number if number else 0


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
