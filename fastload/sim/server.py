"""The simulated engine's server: sockets and routes. One process, one loop.

    python -m fastload.sim.server [--profile vllm-direct] [--ttft-ms 50] [--step-ms 20] [--port 0] ...

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
import signal
import socket
import struct
import sys
from collections.abc import Callable
from typing import cast

from fastload.errors import PlanError
from fastload.sim import openai
from fastload.sim._burst import send_all
from fastload.sim.answering import Answering
from fastload.sim.asks import Rejected, read_ask, tokenize
from fastload.sim.http1 import CONTINUE, MalformedRequest, Request, RequestReader, response
from fastload.sim.live import Live
from fastload.sim.metrics import CONTENT_TYPE
from fastload.sim.options import Options
from fastload.sim.wishes import HEADER

KEY_VARIABLE = "FASTLOAD_SIM_API_KEY"
VERSION = "fastload-sim-2"

# a level's first wave connects at once; a short queue would cost some of them a SYN retry of a second
_BACKLOG = 4096


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
    live = Live(options)
    connections: set[Connection] = set()
    try:
        server = await loop.create_server(
            lambda: Connection(live, connections), options.host, options.port, backlog=_BACKLOG
        )
    except OSError as error:
        live.close()
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
        live.close()
        for connection in list(connections):
            connection.abort()


class Connection(asyncio.Protocol):
    """One client's connection: its requests one after the other."""

    def __init__(self, live: Live, connections: "set[Connection]") -> None:
        self._live = live
        self._connections = connections
        self._reader = RequestReader()
        self._answering: Answering | None = None
        self._transport: asyncio.Transport
        self._ending: bool | None = None  # the answer's last piece is on its way out: keep the connection?
        self.fd = -1

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but its bases
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.fd = sock.fileno()
        self._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.fd = -1
        self._connections.discard(self)
        self._let_go()

    def data_received(self, data: bytes) -> None:
        try:
            self._reader.feed(data)
        except MalformedRequest:
            self.abort()
            return
        self._serve()

    # ------------------------------------------------------------ out

    @property
    def clear(self) -> bool:
        """Nothing is queued: bytes may go straight to the socket `fd`."""
        return self._transport.get_write_buffer_size() == 0 and not self._transport.is_closing()

    def write(self, data: bytes) -> None:
        """Hand `data` to the kernel now, in a segment of its own.

        uvloop's own write gathers what one pass of the loop wrote; here that would glue the role event to the
        first token.
        """
        if self.fd < 0 or self._transport.is_closing():
            return
        if self.clear:
            for _, sent in send_all([self.fd], [data]):
                self.send_rest(data, sent)
        else:
            self._transport.write(data)

    def send_rest(self, data: bytes, sent: int) -> None:
        """The kernel took `sent` bytes of `data`; -1: the connection is broken."""
        if sent < 0:
            self.abort()
        elif self.fd >= 0 and not self._transport.is_closing():
            self._transport.write(data[sent:])

    def answers(self, answering: Answering) -> bool:
        """Is it still this request that is answered here?"""
        return self._answering is answering and self.fd >= 0

    def answered(self, answering: Answering, keep_alive: bool) -> None:
        """The answer's last pieces go out in this pass of the loop; the next one goes on."""
        if self._answering is answering:
            self._answering = None
            self._ending = keep_alive
            asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        """With the next request, or close after the last."""
        keep_alive, self._ending = self._ending, None
        if keep_alive is None or self.fd < 0:
            return
        if keep_alive:
            self._serve()
        else:
            self._transport.close()

    def close_in_stream(self, reset: bool) -> None:
        """A fault: end the connection in the middle, by RST or by FIN."""
        self._let_go()
        if reset:
            sock = self._transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._transport.abort()
        else:
            self._transport.close()

    def abort(self) -> None:
        """Close at once, without the rest."""
        self._transport.abort()

    def _let_go(self) -> None:
        if self._answering is not None:
            self._live.drop(self._answering)
            self._answering = None

    # ------------------------------------------------------------ in

    def _serve(self) -> None:
        while self._answering is None and self._ending is None and self.fd >= 0 and not self._transport.is_closing():
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
            except Rejected as error:
                body = openai.error_body(error.status, str(error), error.kind, error.param)
                self._reply(request, error.status, body, retry_after_s=error.retry_after_s)

    def _handle(self, request: Request) -> None:
        live = self._live
        options = live.options
        method, path = request.method, request.path
        wanted = _ROUTES.get(path)
        if wanted is None:
            raise Rejected(404, f"Not Found: {path}", kind="NotFoundError")
        if method != wanted:
            raise Rejected(405, f"Method Not Allowed: {method} {path}", kind="Method Not Allowed")
        if options.api_key is not None and path.startswith("/v1/"):
            given = request.headers.get("authorization", "")
            if path == "/v1/messages" and "x-api-key" in request.headers:
                given = f"Bearer {request.headers['x-api-key']}"
            if not hmac.compare_digest(given.encode(), f"Bearer {options.api_key}".encode()):
                raise Rejected(401, "Unauthorized", kind="AuthenticationError")
        match path:
            case "/v1/models":
                self._reply(request, 200, openai.models(options, live.created_s))
            case "/tokenize":
                self._reply(request, 200, tokenize(request.body, options))
            case "/version":
                self._reply(request, 200, b'{"version":"%b"}' % VERSION.encode())
            case "/metrics":
                self._reply(request, 200, live.metrics_page(), CONTENT_TYPE)
            case "/health":
                self._reply(request, 200, b"")  # empty, as vLLM's
            case _:
                self._answer(request, _APIS[path])

    def _answer(self, request: Request, api: str) -> None:
        live = self._live
        ask = read_ask(request.body, api, live.options, live.block_tokens, request.headers.get(HEADER))
        if not live.engine.fits(ask.prompt_tokens + ask.limit):
            raise Rejected(400, f"{ask.prompt_tokens} + {ask.limit} tokens are more than KV memory holds.")
        number = live.requests
        live.requests += 1
        if ask.wishes.fault_of(number) == "429":
            seconds = max(round(ask.wishes.seconds), 1)
            raise Rejected(429, "Too many requests.", kind="RateLimitError", retry_after_s=seconds)
        self._answering = Answering(ask, request, self, live, number)
        self._answering.begin()

    def _reply(
        self,
        request: Request,
        status: int,
        body: bytes,
        content_type: str = "application/json",
        retry_after_s: int | None = None,
    ) -> None:
        more = "" if retry_after_s is None else f"Retry-After: {retry_after_s}\r\n"
        self.write(response(status, body, request.keep_alive, content_type, more))
        if not request.keep_alive:
            self._transport.close()


_APIS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
}
_ROUTES = {
    **dict.fromkeys(_APIS, "POST"),
    "/v1/models": "GET",
    "/tokenize": "POST",
    "/health": "GET",
    "/version": "GET",
    "/metrics": "GET",
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
    parser.add_argument("--profile", default=None)
    parser.add_argument("--speed", type=float, default=defaults.speed)
    parser.add_argument("--seed", type=int, default=defaults.seed)
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
