"""SIGINT and SIGTERM: the first ends the run in order, a second one at once."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SHOW_CURSOR = "\x1b[?25h"  # a live display hides it, and os._exit runs no cleanup


class Interrupted(BaseException):
    """A signal came while nothing was running yet. Like KeyboardInterrupt, not an Exception: no `except`
    eats it.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


class Brake:
    """What a first signal does: call `ask` with its number, or raise `Interrupted` as long as there is
    nobody to ask.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        self.ask: Callable[[int], object] | None = None

    def _on_signal(self, signum: int, _frame: FrameType | None) -> None:
        first = self.signum is None
        self.signum = self.signum or signum
        if not first:
            self._leave(self.signum)
        if self.ask is None:
            raise Interrupted(signum)
        self.ask(signum)

    def _leave(self, signum: int) -> None:
        # The measurer and the simulated engine end by themselves when their pipe from us closes.
        if sys.stderr is not None and sys.stderr.isatty():
            os.write(2, SHOW_CURSOR.encode())
        os._exit(128 + signum)


@contextmanager
def installed() -> Iterator[Brake]:
    """Handle SIGINT and SIGTERM inside the block by a new `Brake`; put the old handlers back after it."""
    brake = Brake()
    before = {number: signal.signal(number, brake._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield brake
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
