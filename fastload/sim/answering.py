"""One request being answered: from the engine's tokens to the bytes of its API, and the faults it asked for."""

from collections import deque
from types import ModuleType
from typing import TYPE_CHECKING

from fastload.sim import messages, openai, responses
from fastload.sim.asks import Ask
from fastload.sim.engine import Sequence
from fastload.sim.http1 import LAST_CHUNK, Request, chunk, response, stream_head

if TYPE_CHECKING:
    from fastload.sim.live import Live
    from fastload.sim.server import Connection

_DIALECTS: dict[str, ModuleType] = {
    "chat": openai,
    "completions": openai,
    "responses": responses,
    "messages": messages,
}
_ID_PREFIX = {"chat": "chatcmpl-", "completions": "cmpl-", "responses": "resp_", "messages": "msg_"}


class Choice(Sequence):
    """One of the answers to a request."""

    __slots__ = ("answering", "first_ns", "index", "last_ns", "made", "written")

    def __init__(self, answering: "Answering", index: int, ask: Ask) -> None:
        super().__init__(ask.prompt_tokens, ask.limit, ask.hashes)
        self.answering = answering
        self.index = index
        self.written = 0  # tokens whose events are made
        self.made: deque[list[bytes]] = deque()  # events made before they are due
        self.first_ns = -1
        self.last_ns = -1


class Answering:
    """One request on its connection, from arrival to its last byte."""

    def __init__(self, ask: Ask, request: Request, connection: "Connection", live: "Live", number: int) -> None:
        self.ask = ask
        self.connection = connection
        self.choices = [Choice(self, index, ask) for index in range(ask.n)]
        self.arrived_ns = -1
        self._live = live
        self._left = ask.n  # choices that are not complete
        self._given = 0  # tokens of all choices
        self._fault = ask.wishes.fault_of(number)
        self._silent: list[bytes] | None = None  # what is kept back during a stall
        self._chunked = request.http11
        self._keep_alive = request.keep_alive and (request.http11 or not ask.stream)
        self._id = f"{_ID_PREFIX[ask.api]}{number:016x}"
        self._dialect = _DIALECTS[ask.api]
        self._stream = (
            self._dialect.Stream(ask, self._id, live.created_s, live.options.model) if ask.stream else None
        )

    def begin(self) -> None:
        """Send the head, as vLLM does before queue and prefill; give the choices to the engine."""
        if self._fault == "slow_head":
            self._live.later(self.ask.wishes.seconds, self._begin)
        else:
            self._begin()

    def _begin(self) -> None:
        if not self.connection.answers(self):
            return  # gone meanwhile
        if self._stream is not None:
            self.connection.write(stream_head(self._chunked, self._keep_alive))
        self._live.admit(self)

    def make(self, choice: Choice, tokens: int) -> None:
        """Make the events of tokens that are to come, while there is time."""
        if self._stream is not None:
            choice.made.append(self._events(choice, tokens))

    def give(self, choice: Choice, tokens: int) -> list[bytes]:
        """The engine gave tokens: what to send now, each piece in a segment of its own."""
        self._given += tokens
        self._left -= choice.given == choice.limit
        fault = self._fault if self._given >= self.ask.wishes.after_tokens else None
        if fault in ("reset", "truncate"):
            self.connection.close_in_stream(reset=fault == "reset")
            return []
        if self._stream is None:
            return [self._whole()] if self._left == 0 else []
        pieces = choice.made.popleft() if choice.made else self._events(choice, tokens)
        if self._left == 0 and fault != "error":
            pieces += self._end(fault == "late_usage")
        if fault == "error":
            self._fault = None
            pieces += [self._framed(event) for event in self._stream.error("EngineCore encountered an issue.")]
            pieces += self._last_piece()
            self._live.give_up(self)
            self.connection.answered(self, self._keep_alive)
        if fault == "stall":
            self._fault = None
            self._silent = []
            self._live.later(self.ask.wishes.seconds, self._speak)
            return pieces
        if self._silent is not None:
            self._silent += pieces
            return []
        return pieces

    def _events(self, choice: Choice, tokens: int) -> list[bytes]:
        assert self._stream is not None
        start = choice.written
        choice.written += tokens
        events = self._stream.opening(choice.index, self._cached(choice)) if start == 0 else []
        events += self._stream.tokens(choice.index, start, tokens)
        return [self._framed(event) for event in events]

    def _end(self, late: bool) -> list[bytes]:
        assert self._stream is not None
        pieces = [self._framed(event) for event in self._stream.closing(self._cached(self.choices[0]))]
        pieces += self._last_piece()
        if late:
            self._live.later(self.ask.wishes.seconds, self._say, pieces)
            return []
        if self._silent is None:
            self.connection.answered(self, self._keep_alive)
        return pieces

    def _say(self, pieces: list[bytes]) -> None:
        if self.connection.answers(self):
            for piece in pieces:
                self.connection.write(piece)
            self.connection.answered(self, self._keep_alive)

    def _speak(self) -> None:
        """A stall is over."""
        pieces, self._silent = self._silent or [], None
        if not self.connection.answers(self):
            return
        for piece in pieces:
            self.connection.write(piece)
        if self._left == 0:
            self.connection.answered(self, self._keep_alive)

    def _whole(self) -> bytes:
        body = self._dialect.whole(
            self.ask, self._id, self._live.created_s, self._live.options.model, self._cached(self.choices[0])
        )
        self.connection.answered(self, self._keep_alive)
        return response(200, body, self._keep_alive)

    def _cached(self, choice: Choice) -> int | None:
        return choice.cached_tokens if self._live.block_tokens else None

    def _framed(self, event: bytes) -> bytes:
        return chunk(event) if self._chunked else event

    def _last_piece(self) -> list[bytes]:
        return [LAST_CHUNK] if self._chunked else []
