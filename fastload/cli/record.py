"""What a run tells while it goes on, to whoever looks: the display, run.log in sentences, progress.json as it stands.

Both files say all that the display says, so that `fastload watch` can show the same from another terminal. A disk that
takes no more of them ends no run: the rows matter, and those the writer keeps.
"""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fastload.cli.display import Display, Narrator, one_line
from fastload.cli.signals import Brake
from fastload.errors import TraceError

if TYPE_CHECKING:
    from fastload.load.progress import Progress
    from fastload.plan import Level
    from fastload.trace import RunWriter

PROGRESS_SCHEMA = 1


class Record:
    """Tells the display and, from `begin` on, the files of the run; what was said before comes first in its log."""

    def __init__(self, shown: Display, brake: Brake) -> None:
        self.shown = shown
        self._brake = brake
        self._writer: RunWriter | None = None
        self._early: list[str] = []
        self._narrator = Narrator(self._log)
        self._run: dict[str, object] = {}
        self._finished: list[dict[str, object]] = []
        self._last: Progress | None = None
        self._heard: set[str] = set()  # signals that were told
        self._failing = False  # the files cannot be written at present

    def notice(self, text: str) -> None:
        """Say one sentence."""
        self.shown.notice(text)
        self._log(text)

    def begin(self, writer: RunWriter, levels: Iterable[Level], simulated: bool) -> None:
        """There is a directory to write to now."""
        self._writer = writer
        writer.notice = self.notice
        self._run = {
            "schema": PROGRESS_SCHEMA,
            "run_id": writer.run_id,
            "simulated": simulated,
            "plan": [dataclasses.asdict(level) for level in levels],
        }
        early, self._early = self._early, []
        for text in early:
            self._log(text)

    def watch(self, progress: Progress) -> None:
        """Take the newest state of the run: the supervisor's watcher, called at most twice a second."""
        last, self._last = self._last, progress
        if last is not None and last.level != progress.level and last.level >= 0:
            self._finished.append(dataclasses.asdict(last))
        self.shown.show(progress)
        self._narrator.take(progress)
        if self._brake.hung_up:
            self._hear("SIGHUP: the terminal is gone, the run goes on")
        if self._brake.signum is not None:
            self._hear(f"{signal.Signals(self._brake.signum).name}: stopping")
        self._write_progress("running", verdict=None, exit_code=None, why=())
        if self._writer is not None:
            self._writer.write_old()

    def end(self, status: str, verdict: Mapping[str, Any] | None, exit_code: int, why: Sequence[str]) -> None:
        """The run is over: say how it ended, and why if that did not go well."""
        self._narrator.end()
        if verdict is not None:
            self._log(f"verdict: {verdict['status']}")
            for text in (*verdict["reasons"], *verdict["notes"]):
                self._log(text)
        self._log(": ".join([status, *(["; ".join(why)] if why else [])]))
        self._write_progress(status, verdict=verdict, exit_code=exit_code, why=why)

    def _hear(self, sentence: str) -> None:
        if sentence not in self._heard:
            self._heard.add(sentence)
            self._log(sentence)

    def _write_progress(self, status: str, **end: object) -> None:
        from fastload._timing import realtime_ns
        from fastload.trace.writer import utc_text

        if self._writer is None or self._last is None:
            return
        state = {
            **self._run,
            "status": status,
            "updated_utc": utc_text(realtime_ns()),
            **dataclasses.asdict(self._last),
            "finished": self._finished,
            **end,
        }
        try:
            self._writer.progress(state)
        except TraceError as error:
            self._cannot(error)
        else:
            self._failing = False

    def _log(self, text: str) -> None:
        if self._writer is None:
            self._early.append(text)
            return
        try:
            self._writer.log(one_line(text))
        except TraceError as error:
            self._cannot(error)

    def _cannot(self, error: TraceError) -> None:
        """Say once that the files cannot be written; the display is left to say so."""
        if not self._failing:
            self._failing = True
            self.shown.notice(f"{error}; measuring goes on")
