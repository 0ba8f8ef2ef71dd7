"""What a person sees while a run goes on: a live panel on a terminal, single lines elsewhere, nothing when
quiet.

All of it goes to stderr, so that stdout holds the result alone. The panel is drawn when the supervisor
calls `show` (at most twice a second) and by no thread of its own: on a small host the display shares the
server's core. A reader that goes away silences the display and never ends the run.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TextIO

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live
    from rich.table import Table

    from fastload.load.progress import Progress

LINE_EVERY_S = 10.0
LONG_S = 600.0  # a level that takes longer says less often how it stands
LINE_OF_LONG_EVERY_S = 60.0
NARROW_COLUMNS = 72  # below this the panel keeps to the figures that matter most
TINY_COLUMNS = 46  # below this, to those that do not fit on fewer characters
NO_FIGURE = "-"


class Display(Protocol):
    """What the run tells its watcher. `simulated` may be set later, when a server says that it is a
    simulation.
    """

    simulated: bool

    def notice(self, text: str) -> None:
        """Say one sentence (waiting for the server, a fitted prompt, an odd server)."""

    def show(self, progress: Progress) -> None:
        """Take the newest state of the run."""

    def close(self) -> None:
        """Leave the terminal as it was found."""


def choose(quiet: bool, simulated: bool, stream: TextIO | None = None) -> Display:
    """Return the display that fits: silent, live on a terminal, lines elsewhere. `stream` defaults to
    stderr.
    """
    out = sys.stderr if stream is None else stream
    if quiet or out is None:
        return Silent()
    if out.isatty() and _can_move_cursor():
        return LiveDisplay(simulated, out)
    return Lines(simulated, out)


def _can_move_cursor() -> bool:
    return os.environ.get("TERM", "") not in ("", "dumb")


class Silent:
    """--quiet."""

    simulated = False

    def notice(self, text: str) -> None:
        """Say nothing."""

    def show(self, progress: Progress) -> None:
        """Show nothing."""

    def close(self) -> None:
        """Nothing to put back."""


class Narrator:
    """Turns states into lines: one at each level's start and end, between them one every 10 s, later every 60 s, and
    one when nothing succeeds any more. No clock: `elapsed_s` tells.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._last: Progress | None = None
        self._spoke_s = 0.0
        self._failing_s: float | None = None  # when failures in a row were last spoken of, in this level
        self._said_failing = False

    def take(self, progress: Progress) -> None:
        """Say what this state adds to the one before."""
        last = self._last
        if last is None or progress.level != last.level:
            if last is not None:
                self._say(end_line(last))
            self._say(start_line(progress))
            self._spoke_s, self._failing_s, self._said_failing = progress.elapsed_s, None, False
        elif not self._tell_failing(progress):
            every = LINE_EVERY_S if progress.elapsed_s < LONG_S else LINE_OF_LONG_EVERY_S
            if progress.elapsed_s < self._spoke_s:  # its clock started: until then it was connecting
                self._spoke_s = progress.elapsed_s
            elif progress.elapsed_s - self._spoke_s >= every:
                self._say(middle_line(progress))
                self._spoke_s = progress.elapsed_s
        self._last = progress

    def _tell_failing(self, progress: Progress) -> bool:
        """Say that nothing succeeds, at once and then as often as there is a line at all, and when that is over."""
        if progress.failing is None:
            if self._said_failing:
                self._say(f"{_level_name(progress)}: requests succeed again; {failures(progress)} failed so far")
            self._said_failing = False
            return False
        if self._failing_s is not None and progress.elapsed_s - self._failing_s < LINE_EVERY_S:
            return False
        self._say(f"{_level_name(progress)}: {progress.failing}")
        self._spoke_s = self._failing_s = progress.elapsed_s
        self._said_failing = True
        return True

    def end(self) -> None:
        """Say how the last level ended."""
        if self._last is not None:
            self._say(end_line(self._last))
            self._last = None


class Lines:
    """Plain single lines, for logs, pipes and CI."""

    def __init__(self, simulated: bool, stream: TextIO) -> None:
        self.simulated = simulated
        self._stream: TextIO | None = stream
        self._narrator = Narrator(self.notice)

    def notice(self, text: str) -> None:
        """Write one line."""
        if self._stream is None:
            return
        try:
            mark = "[SIMULATED] " if self.simulated else ""
            self._stream.write(f"{mark}{one_line(text)}\n")
            self._stream.flush()
        except (OSError, ValueError):  # closed by the other side, or by us
            self._stream = None

    def show(self, progress: Progress) -> None:
        """Write a line when there is something to say."""
        self._narrator.take(progress)

    def close(self) -> None:
        """Write how the last level ended."""
        self._narrator.end()


class LiveDisplay:
    """The panel: finished levels above, the running one below."""

    def __init__(self, simulated: bool, stream: TextIO) -> None:
        from rich.live import Live

        self.simulated = simulated
        self._console = _console(stream)
        self._finished: list[Progress] = []
        self._last: Progress | None = None
        self._live: Live | None = Live(console=self._console, auto_refresh=False, transient=True)
        self._started = False

    def notice(self, text: str) -> None:
        """Print a sentence above the panel."""
        self._write(
            lambda: self._console.print(one_line(text), markup=False, highlight=False, soft_wrap=True)
        )

    def show(self, progress: Progress) -> None:
        """Draw the state."""
        if (
            self._last is not None
            and progress.level != self._last.level
            and not _warms_up(self._last)
        ):
            self._finished.append(self._last)
        self._last = progress
        self._write(self._draw)

    def close(self) -> None:
        """Take the panel away (the table of results follows) and show the cursor again."""
        live, self._live = self._live, None
        if live is not None and self._started:
            try:
                live.stop()
            except (OSError, ValueError):
                pass  # the terminal is gone: nothing to put back

    def _draw(self) -> None:
        if self._live is None or self._last is None:
            return
        if not self._started:
            self._live.start()
            self._started = True
        width, height = self._console.size
        self._live.update(panel(self._finished, self._last, self.simulated, width, height), refresh=True)

    def _write(self, draw: Callable[[], object]) -> None:
        if self._live is None:
            return
        try:
            draw()
        except (OSError, ValueError):
            self.close()


def _console(stream: TextIO) -> Console:
    """Return a console on the stream that tells us when its reader is gone.

    rich's own answer to a broken pipe is to point file descriptor 1 at /dev/null and exit: it would end the
    run and lose the result on stdout.
    """
    from rich.console import Console

    class PlainConsole(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError(errno.EPIPE, "the reader of the display is gone")

    return PlainConsole(file=stream)


# --- the panel ----------------------------------------------------------------------------------------------


def panel(
    finished: list[Progress], now: Progress, simulated: bool, width: int, height: int
) -> RenderableType:
    """Return the drawing of a run's state for a terminal of `width` x `height` characters."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = []
    title = Text("fastload sweep", style="bold", no_wrap=True, overflow="ellipsis")
    if simulated:
        title.append("  SIMULATED", style="bold yellow")
        title.append(" engine, no real server" if width >= NARROW_COLUMNS else "")
    parts.append(title)
    room = max(0, height - 8)  # title, head of the table, the running level's lines, a line for the cursor
    if finished and room:
        parts.append(_levels_table(finished[-room:], width))
    parts.append(_level_line(now))
    parts.append(_bar_line(now, width))
    parts.extend(Text(line, no_wrap=True, overflow="ellipsis") for line in _figure_lines(now, width))
    return Group(*parts)


def _levels_table(finished: list[Progress], width: int) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    cells: dict[str, Callable[[Progress], str]] = {
        "c": lambda level: str(level.concurrency),
        "done": lambda level: str(level.done),
        "fail": lambda level: str(level.failed),
        "tok/s": lambda level: figure(level.tokens_per_s),
        "TTFT p50": lambda level: figure(level.ttft_p50_ms),
        "TTFT p90": lambda level: figure(level.ttft_p90_ms),
        "ITL p50": lambda level: figure(level.itl_p50_ms),
        "ITL p90": lambda level: figure(level.itl_p90_ms),
    }
    left_out = {"TTFT p50", "ITL p50"} if width < NARROW_COLUMNS else set()
    left_out |= {"done", "tok/s"} if width < TINY_COLUMNS else set()
    columns = [name for name in cells if name not in left_out]
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for level in finished:
        table.add_row(*(cells[name](level) for name in columns), style="red" if level.failed else None)
    return table


def _level_line(now: Progress) -> RenderableType:
    from rich.text import Text

    line = Text(no_wrap=True, overflow="ellipsis")
    if _warms_up(now):
        line.append("warm-up request", style="bold cyan")
    else:
        line.append(f"level {now.level + 1}/{now.levels}", style="bold cyan")
        line.append(f"  concurrency {now.concurrency}", style="bold")
        line.append(f"  {now.phase}", style="dim")
    return line


def _bar_line(now: Progress, width: int) -> RenderableType:
    from rich.text import Text

    tail = f" {now.done}/{now.planned if now.planned is not None else '?'}"
    if now.eta_s is not None:
        tail += f"  ETA {clock(now.eta_s)}"
    room = max(0, min(48, width - len(tail) - 1))
    share = min(1.0, now.done / now.planned) if now.planned else 0.0
    full = round(room * share)
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append("━" * full, style="green")
    line.append("━" * (room - full), style="bright_black")
    line.append(tail)
    return line


def _figure_lines(now: Progress, width: int) -> list[str]:
    """Return the running figures in groups of words, as many groups to a line as fit."""
    groups = [
        f"{figure(now.tokens_per_s)} tok/s",
        f"TTFT p50 {figure(now.ttft_p50_ms)} p90 {figure(now.ttft_p90_ms)} ms",
        f"ITL p50 {figure(now.itl_p50_ms)} p90 {figure(now.itl_p90_ms)} ms",
        f"in flight {now.in_flight}",
        f"failed {failures(now)}",
        *([] if now.failing is None else [now.failing]),
        f"client delay p50 {figure(now.delay_p50_us)} p99 {figure(now.delay_p99_us)} us",
        f"elapsed {clock(now.elapsed_s)}",
    ]
    lines = [groups[0]]
    for group in groups[1:]:
        if len(lines[-1]) + 3 + len(group) <= width - 1:
            lines[-1] += "   " + group
        else:
            lines.append(group)
    return lines


# --- the lines ----------------------------------------------------------------------------------------------


def _warms_up(progress: Progress) -> bool:
    """Whether the request is one of those that open the run: the levels are numbered from 0."""
    return progress.level < 0


def _level_name(progress: Progress) -> str:
    return "warm-up" if _warms_up(progress) else f"level {progress.level + 1}/{progress.levels}"


def start_line(progress: Progress) -> str:
    """Return the line that opens a level."""
    if _warms_up(progress):
        return "warm-up request"
    planned = "" if progress.planned is None else f", {progress.planned} requests"
    return f"{_level_name(progress)}: concurrency {progress.concurrency}{planned}"


def middle_line(progress: Progress) -> str:
    """Return the line said every 10 s inside a level."""
    if _warms_up(progress):
        return f"warm-up request: waiting for {clock(progress.elapsed_s)}"
    eta = "" if progress.eta_s is None else f", ETA {clock(progress.eta_s)}"
    return (
        f"{_level_name(progress)} {progress.phase}: "
        f"{_counts(progress)}, {_figures(progress)}, in flight {progress.in_flight}, "
        f"client delay p99 {figure(progress.delay_p99_us)} us{eta}"
    )


def end_line(progress: Progress) -> str:
    """Return the line that closes a level."""
    if _warms_up(progress):
        return "warm-up request done" if not progress.failed else "warm-up request failed"
    return (
        f"{_level_name(progress)} ended: concurrency {progress.concurrency}, "
        f"{_counts(progress)}, {_figures(progress)}"
    )


def _counts(progress: Progress) -> str:
    planned = "" if progress.planned is None else f"/{progress.planned}"
    return f"{progress.done}{planned} done, {failures(progress)} failed"


def failures(progress: Progress) -> str:
    """Return the number of failures, and of which classes: 3 (connect 2, reset 1)."""
    classes = ", ".join(f"{name} {count}" for name, count in progress.errors.items())
    return f"{progress.failed}{f' ({classes})' if classes else ''}"


def _figures(progress: Progress) -> str:
    return (
        f"{figure(progress.tokens_per_s)} tok/s, TTFT p50 {figure(progress.ttft_p50_ms)} "
        f"p90 {figure(progress.ttft_p90_ms)} ms, ITL p50 {figure(progress.itl_p50_ms)} "
        f"p90 {figure(progress.itl_p90_ms)} ms"
    )


def figure(value: float | None) -> str:
    """Return a number in about four digits, `-` for none."""
    if value is None:
        return NO_FIGURE
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def clock(seconds: float) -> str:
    """Return a span as 0:42, 12:05 or 1:02:03."""
    whole = max(0, round(seconds))
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def one_line(text: str) -> str:
    """Return the text on one line, without secrets and control characters: servers choose some of it, and terminals
    obey them.
    """
    from fastload.load.hiding import hide

    text = hide(text)
    return "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))
