"""The display: lines, the panel at every width, and a reader who goes away."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from rich.console import Console

from fastload.cli import display


@dataclass(frozen=True)
class State:
    """The fields of load.progress.Progress."""

    level: int = 2
    concurrency: int = 4
    levels: int = 7
    phase: str = "measuring"
    done: int = 12
    planned: int | None = 40
    failed: int = 0
    in_flight: int = 4
    events: int = 1536
    tokens_per_s: float | None = 198.4
    ttft_p50_ms: float | None = 50.3
    ttft_p90_ms: float | None = 51.2
    itl_p50_ms: float | None = 20.01
    itl_p90_ms: float | None = 20.08
    delay_p50_us: float | None = 61.0
    delay_p99_us: float | None = 140.0
    elapsed_s: float = 21.0
    eta_s: float | None = 95.0
    errors: Mapping[str, int] = field(default_factory=dict)
    failing: str | None = None


NO_FIGURES: dict[str, Any] = dict.fromkeys(
    ["tokens_per_s", "ttft_p50_ms", "ttft_p90_ms", "itl_p50_ms", "itl_p90_ms", "delay_p50_us", "delay_p99_us"]
)
NOTHING = State(
    level=-1,
    concurrency=1,
    phase="warm-up",
    done=0,
    planned=None,
    events=0,
    in_flight=1,
    eta_s=None,
    **NO_FIGURES,
)


def drawn(finished: list[Any], now: Any, simulated: bool, width: int, height: int = 24) -> list[str]:
    out = io.StringIO()
    console = Console(file=out, width=width, height=height, force_terminal=False)
    console.print(display.panel(finished, now, simulated, width, height))
    return out.getvalue().splitlines()


def test_lines_at_start_end_and_every_ten_seconds() -> None:
    out = io.StringIO()
    lines = display.Lines(False, out)
    states: list[Any] = [NOTHING, replace(NOTHING, done=1)]
    states += [replace(State(), level=0, done=n, elapsed_s=n / 2) for n in range(41)]
    states += [replace(State(), level=1, concurrency=8, done=0, elapsed_s=0.5, eta_s=None)]
    for state in states:
        lines.show(state)
    lines.close()
    said = out.getvalue().splitlines()
    assert said[0] == "warm-up request" and said[1] == "warm-up request done"
    assert said[2] == "level 1/7: concurrency 4, 40 requests"
    assert [line.startswith("level 1/7 measuring: ") for line in said[3:5]] == [True, True]
    assert said[5].startswith(
        "level 1/7 ended: concurrency 4, 40/40 done, 0 failed, 198 tok/s, TTFT p50 50.3 p90 51.2 ms"
    )
    assert said[6] == "level 2/7: concurrency 8, 40 requests"
    assert said[7].startswith("level 2/7 ended: concurrency 8")
    assert len(said) == 8


def test_failures_in_a_row_are_told_at_once_and_when_they_are_over() -> None:
    out = io.StringIO()
    lines = display.Lines(False, out)
    words = "7 requests failed in a row so far; the last: HTTP 429"
    at_s = {1.0: None, 1.5: words, 2.0: words, 3.0: None, 3.5: words, 4.0: None, 11.5: words, 12.0: words, 21.5: words}
    for elapsed_s, failing in at_s.items():
        lines.show(State(level=0, failed=7, elapsed_s=elapsed_s, failing=failing))  # type: ignore[arg-type]
    lines.close()
    said = [line.removeprefix("level 1/7") for line in out.getvalue().splitlines()][1:-1]
    # now and then one that comes and goes is not told again
    assert said == [f": {words}", ": requests succeed again; 7 failed so far", f": {words}", f": {words}"]


def test_every_line_of_a_simulated_run_says_so() -> None:
    out = io.StringIO()
    lines = display.Lines(True, out)
    lines.notice("two\nlines")
    lines.show(State())  # type: ignore[arg-type]
    lines.close()
    said = out.getvalue().splitlines()
    assert said[0] == "[SIMULATED] two lines"
    assert all(line.startswith("[SIMULATED] ") for line in said)


@pytest.mark.parametrize("width", [20, 40, 60, 72, 80, 120, 200])
@pytest.mark.parametrize("now", [State(), NOTHING, State(failed=3, done=40, in_flight=12345)])
def test_the_panel_fits_its_width(width: int, now: Any) -> None:
    finished = [State(level=n, concurrency=2**n, done=40, failed=n) for n in range(6)]
    for line in drawn(finished, now, True, width):
        assert len(line) <= width


@pytest.mark.parametrize("height", [6, 10, 14, 24])
def test_the_panel_fits_its_height(height: int) -> None:
    finished = [State(level=n, concurrency=2**n) for n in range(30)]
    assert len(drawn(finished, State(), True, 100, height)) < max(height, 8)


def test_the_panel_shows_what_matters() -> None:
    failing = State(failed=3, errors={"connect": 2, "reset": 1}, failing="3 requests failed in a row so far")
    text = "\n".join(drawn([State(level=1, concurrency=2, done=30)], failing, True, 100))
    parts = [
        "SIMULATED",
        "level 3/7",
        "concurrency 4",
        "12/40",
        "ETA 1:35",
        "198 tok/s",
        "in flight 4",
        "failed 3 (connect 2, reset 1)",
        "3 requests failed in a row so far",
    ]
    parts += ["TTFT p50 50.3 p90 51.2", "ITL p50 20.0 p90 20.1", "client delay p50 61.0 p99 140 us"]
    for part in parts:
        assert part in text
    assert "SIMULATED" not in "\n".join(drawn([], State(), False, 100))


class Gone(io.StringIO):
    """A stream whose reader left."""

    def write(self, _text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")


class GoneTerminal(Gone):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    "make", [lambda: display.Lines(False, Gone()), lambda: display.LiveDisplay(False, GoneTerminal())]
)
def test_a_reader_who_left_does_not_end_the_run(make: Any) -> None:
    shown = make()
    shown.notice("hello")
    shown.show(State())
    shown.show(State(level=3))
    shown.close()


def test_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(display.choose(True, False, Terminal()), display.Silent)
    assert isinstance(display.choose(False, False, io.StringIO()), display.Lines)
    assert isinstance(display.choose(False, False, Terminal()), display.LiveDisplay)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(display.choose(False, False, Terminal()), display.Lines)


def test_figures_and_clocks() -> None:
    shown = [display.figure(v) for v in (None, 0.123, 12.34, 123.4, 12345.6)]
    assert shown == ["-", "0.12", "12.3", "123", "12,346"]
    assert [display.clock(s) for s in (-1, 42, 725, 3723)] == ["0:00", "0:42", "12:05", "1:02:03"]
