"""`fastload watch`: a run as its own terminal shows it, from another one, or after it.

A run that is going on is only looked at: twice a second its progress.json is read and nothing else, no heavy library is
loaded, and whoever needs the core goes first. Once it is over its trace is opened, which finishes what a crash left.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fastload.cli import display, result, signals
from fastload.errors import PlanError, TraceError

if TYPE_CHECKING:
    from fastload.load.progress import Progress
    from fastload.trace import Run

LOOK_EVERY_S = 0.5
SILENT_S = 10.0  # a run says twice a second how it stands; if not, it is stopped, or its disk takes no more
LOST_S = 60.0  # one of another host, where nobody can be asked, is then given up
EXIT_FAILED = 1


@dataclass(frozen=True, slots=True)
class Look:
    """A run as it stands. status: the manifest's. state: progress.json, {} without one. over: nothing more will come.

    notes: what was not in order. summary: as in summary.json, None while the run goes on.
    """

    path: Path
    status: str
    state: Mapping[str, Any]
    over: bool = False
    notes: tuple[str, ...] = ()
    summary: Mapping[str, Any] | None = None

    @property
    def exit_code(self) -> int:
        """0 for a run that goes on or went well, 1 for one that did not."""
        if not self.over:
            return 0
        told = self.state.get("exit_code") if self.state.get("status") == self.status else None
        if told is None:
            valid = self.summary is not None and self.summary["verdict"]["status"] != "invalid"
            told = 0 if self.status == "complete" and valid else EXIT_FAILED
        return EXIT_FAILED if told else 0

    def as_line(self) -> str:
        """One line of JSON."""
        known = {"run": str(self.path), "status": self.status, "notes": self.notes}
        return json.dumps(known | {"progress": self.state or None, "summary": self.summary})


@click.command("watch")
@click.argument("run", default="results")
@click.option("--once", is_flag=True, help="Show how it stands now, and leave.")
@click.option("--json", "as_json", is_flag=True, help="A line of JSON for each change; the last has the summary.")
def watch(run: str, once: bool, as_json: bool) -> int:
    """Show a running or finished run from another terminal.

    RUN is its directory, or one that holds several, of which the newest is taken. Ends when the
    run ends, with 0 if that went well and 1 if not. Leaving earlier (Ctrl-C) does not disturb it.
    """
    path, choice = find(run)
    with signals.installed() as brake, contextlib.ExitStack() as held:
        brake.ask = lambda signum: None
        shown = display.choose(quiet=as_json or once, simulated=False)
        held.callback(shown.close)
        if choice and not as_json:
            click.echo(f"fastload: {choice}", err=True)
        teller = Teller(shown)
        for look in follow(path, brake, shown.notice):
            if as_json:
                click.echo(look.as_line())
            elif not look.over and once:
                _print(look)
            elif not look.over:
                teller.take(look.state)
            if look.over or once:
                break
        else:
            return 128 + (brake.signum or 1)
    if look.over and not as_json:
        result.show(_end(look), path, as_json=False, quiet=False, strict=False)
    return look.exit_code


def find(run: str) -> tuple[Path, str | None]:
    """Return the directory of the run meant, and what to say where there was a choice. PlanError if there is none."""
    place = Path(run)
    right = "give a run's directory, or the one above it, such as results"
    if "\0" in run or not place.is_dir():
        raise PlanError(f"RUN {run!r}: {'is a file' if place.is_file() else 'does not exist'}; {right}")
    if (place / "manifest.json").exists():
        return place, None
    runs = [one for one in place.iterdir() if (one / "manifest.json").is_file()]
    if not runs:
        raise PlanError(f"RUN {run!r}: is no run and holds none; {right}")
    latest = max(one.name[:16] for one in runs)  # runs are named by the second of their start
    newest = max((one for one in runs if one.name[:16] == latest), key=lambda one: (_created(one), one.name))
    return newest, f"{place} holds {len(runs)} runs; this is the newest: {newest.name}" if len(runs) > 1 else None


def _created(path: Path) -> str:
    return str(_read(path / "manifest.json").get("created_utc"))


def follow(path: Path, brake: signals.Brake, say: Callable[[str], object]) -> Iterator[Look]:
    """Yield the run at each change, the last time when it is over. Ends earlier when a signal wants it."""
    from fastload.load.identity import lives

    manifest = _read(path / "manifest.json")
    state: Mapping[str, Any] = {}
    silent = False
    if manifest.get("status") == "running" and lives(manifest.get("supervisor")):
        os.nice(10)
    first = True
    while manifest.get("status") == "running":
        there = lives(manifest.get("supervisor"))
        before, state = state, _read(path / "progress.json")
        age_s = _age_s(path / "progress.json")
        # what the run says of its end, it says when all is written
        if there is False or state.get("status", "running") != "running" or (there is None and age_s > LOST_S):
            break
        if first or state != before:
            first = False
            yield Look(path, "running", state)
        if age_s > SILENT_S and not silent:
            say(f"nothing new for {age_s:.0f} s: the run is suspended, or its disk takes no more")
        silent = age_s > SILENT_S
        time.sleep(LOOK_EVERY_S)
        if brake.signum is not None or brake.hung_up:
            return
    yield _over(path, _read(path / "progress.json"))


def _over(path: Path, state: Mapping[str, Any]) -> Look:
    """Open a run that is over; TraceError if it cannot be read."""
    from fastload.trace import open_run

    run = open_run(path)
    status = str(run.manifest.get("status"))
    summary = None if status == "running" else _summary(run)
    return Look(path, status, state, over=True, notes=run.notes, summary=summary)


def _summary(run: Run) -> Mapping[str, Any]:
    """Return the run's summary: the one that lies there if it is of this end, else made again, and not written."""
    from fastload.analysis.summary import summarise

    there = _read(run.path / "summary.json")
    if there.get("status") != run.manifest.get("status") or run.notes:
        return summarise(run)
    return there


def _end(look: Look) -> result.End:
    """Return how the run ended, as its own terminal was told."""
    why = look.state.get("why") if look.state.get("status") == look.status else None
    if why is None:
        why = [] if look.status == "complete" else list(look.notes[:1]) or [f"the run is {look.status}"]
    return result.End(look.status, look.summary, tuple(map(str, why)))


def _read(path: Path) -> dict[str, Any]:
    """Return a JSON object; {} where there is none. Files of a run are replaced in one step, so it is a whole one."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise TraceError(f"cannot read {path}: {error}") from None
    return value if isinstance(value, dict) else {}


def _age_s(path: Path) -> float:
    from fastload._timing import realtime_ns

    try:
        return max(0.0, (realtime_ns() - path.stat().st_mtime_ns) / 1e9)
    except OSError:
        return 0.0


# --- the picture --------------------------------------------------------------------------------------------


class Teller:
    """Tells a display the states of a run that is going on, levels that ended unseen included."""

    def __init__(self, shown: display.Display) -> None:
        self._shown = shown
        self._told = 0  # of the finished levels

    def take(self, state: Mapping[str, Any]) -> None:
        """Show the newest state."""
        self._shown.simulated = bool(state.get("simulated"))
        finished, now = states(state)
        for level in finished[self._told :]:
            self._shown.show(level)
        self._told = len(finished)
        if now is not None:
            self._shown.show(now)


def states(state: Mapping[str, Any]) -> tuple[list[Progress], Progress | None]:
    """Return the finished levels and the running one from progress.json; what another version has more is left out."""
    from fastload.load.progress import Progress

    names = [field.name for field in dataclasses.fields(Progress)]

    def read(values: Mapping[str, Any]) -> Progress:
        return Progress(**{name: values[name] for name in names if name in values})

    try:
        return [read(one) for one in state.get("finished", ())], read(state) if state else None
    except TypeError as error:
        raise TraceError(f"progress.json is of another version of fastload: {error}") from None


def _print(look: Look) -> None:
    """Put the state on stdout once: the panel on a terminal, lines elsewhere."""
    finished, now = states(look.state)
    simulated = bool(look.state.get("simulated"))
    if now is None:
        click.echo("the run has begun, and nothing is measured yet")
    elif sys.stdout is not None and sys.stdout.isatty():
        from rich.console import Console

        console = Console()
        console.print(display.panel(finished, now, simulated, *console.size))
    else:
        lines = [*map(display.end_line, finished), display.middle_line(now)]
        click.echo("\n".join(f"{'[SIMULATED] ' * simulated}{line}" for line in lines))
