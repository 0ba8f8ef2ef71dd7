"""SIGINT and SIGTERM: the first ends the run in order, a second one without waiting, a third on the spot. SIGHUP, a
terminal that goes away, ends nothing.
"""

from __future__ import annotations

import contextlib
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
    """What signals do: the first calls `ask` with its number, or raises `Interrupted` as long as there is nobody to
    ask; the next calls `hurry` if there is something to hurry up, else the process leaves.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        self.ask: Callable[[int], object] | None = None
        self.hurry: Callable[[], object] | None = None
        self.hung_up = False  # the terminal is gone, and with it whoever would read

    def _on_signal(self, signum: int, _frame: FrameType | None) -> None:
        first = self.signum is None
        self.signum = self.signum or signum
        if first:
            if self.ask is None:
                raise Interrupted(signum)
            self.ask(signum)
            return
        hurry, self.hurry = self.hurry, None
        if hurry is None:
            self._leave(self.signum)
        else:
            hurry()

    def _on_hangup(self, _signum: int, _frame: FrameType | None) -> None:
        self.hung_up = True

    def _leave(self, signum: int) -> None:
        # The measurer and the simulated engine end by themselves when their pipe from us closes.
        with contextlib.suppress(OSError):  # a terminal that is gone
            if sys.stderr is not None and sys.stderr.isatty():
                os.write(2, SHOW_CURSOR.encode())
        os._exit(128 + signum)


@contextmanager
def installed() -> Iterator[Brake]:
    """Handle SIGINT, SIGTERM and SIGHUP inside the block by a new `Brake`; put the old handlers back after it."""
    brake = Brake()
    handlers = {signal.SIGINT: brake._on_signal, signal.SIGTERM: brake._on_signal, signal.SIGHUP: brake._on_hangup}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield brake
    finally:
        for number, old in before.items():
            signal.signal(number, old)
