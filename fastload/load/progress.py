"""How a level stands while it runs: the live counters, looked at now and then and made into figures for a display."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from fastload import _timing
from fastload.load import patience, shared
from fastload.load.failures import failure_on_wire
from fastload.plan import Level

RATE_NS = 3_000_000_000  # the live rate is of so many seconds

_WIDTH = len(_timing.ROW_FIELDS)
_END, _STATUS = (_timing.ROW_FIELDS.index(name) for name in ("end", "http_status"))


@dataclass(frozen=True, slots=True)
class Progress:
    """What a display shows of a running level. Times in s or ms as named; None where nothing was measured yet.

    `errors`: failed requests by class, as far as the wire tells it and their block has come (up to a second later).
    """

    level: int
    concurrency: int
    levels: int
    phase: str  # "warm-up", "connecting", "measuring", "draining" or "stopping"
    done: int
    planned: int | None
    failed: int
    in_flight: int
    events: int
    tokens_per_s: float | None
    ttft_p50_ms: float | None
    ttft_p90_ms: float | None
    itl_p50_ms: float | None
    itl_p90_ms: float | None
    delay_p50_us: float | None
    delay_p99_us: float | None
    elapsed_s: float
    eta_s: float | None
    errors: Mapping[str, int] = field(default_factory=dict)
    failing: str | None = None  # a sentence, while nothing succeeds


class Meter:
    """Reads one level's figures; `levels` is how many the run has. Memory does not grow with the level's length.

    Until `begin` the counters are still those of the level before, and nothing is shown of them.
    """

    def __init__(self, level: Level, levels: int, live: shared.Live) -> None:
        self._level, self._levels, self._live = level, levels, live
        self._since_ns = _timing.now_ns()
        self._begun = False
        self._history: list[tuple[int, int]] = []  # (ns, text events) of the last RATE_NS
        self._errors: Counter[str] = Counter()

    def begin(self) -> None:
        """The level's clock started, and its counters with it."""
        self._begun, self._since_ns = True, _timing.now_ns()

    def count(self, block: _timing.Block) -> None:
        """Take the failures in a block of the level."""
        rows = memoryview(block.rows).cast("q")
        for (end, status), times in Counter(zip(rows[_END::_WIDTH], rows[_STATUS::_WIDTH], strict=True)).items():
            if end != _timing.END_COMPLETE or status != 200:
                self._errors[failure_on_wire(end, status)] += times

    def counters(self) -> dict[str, int]:
        """Name -> count since the level began."""
        counters = self._live.counters()
        return counters if self._begun else dict.fromkeys(counters, 0)

    @property
    def delay(self) -> _timing.Histogram:
        """The client's own delay since the level began."""
        return self._live.delay if self._begun else _timing.Histogram()

    def read(self, *, ended: bool, stopping: bool) -> Progress:
        """Look at the counters now; `ended`: for the last time, `stopping`: on somebody's order."""
        clock, level = _timing.now_ns(), self._level
        elapsed_s = (clock - self._since_ns) / 1e9
        counters = self.counters()
        done = counters["measured_done"]
        left_s: list[float] = []  # with a number and a time, whichever comes first
        if level.duration_s is not None:
            left_s.append(max(0.0, level.duration_s - elapsed_s * self._begun))
        if level.measured is not None and done:
            left_s.append(elapsed_s / done * max(0, level.measured - done))

        def quantile(of: _timing.Histogram, q: float, unit_ns: float) -> float | None:
            value = of.quantile(q) if self._begun else None
            return None if value is None else value / unit_ns

        ttft, itl, delay = self._live.ttft, self._live.itl, self._live.delay
        return Progress(
            level=level.index,
            concurrency=level.concurrency,
            levels=self._levels,
            phase=self._phase(done, stopping),
            done=done,
            planned=level.measured,
            failed=counters["failed"],
            in_flight=counters["in_flight"],
            events=counters["text_events"],
            tokens_per_s=self._rate(counters, clock, ended),
            ttft_p50_ms=quantile(ttft, 0.5, 1e6),
            ttft_p90_ms=quantile(ttft, 0.9, 1e6),
            itl_p50_ms=quantile(itl, 0.5, 1e6),
            itl_p90_ms=quantile(itl, 0.9, 1e6),
            delay_p50_us=quantile(delay, 0.5, 1e3),
            delay_p99_us=quantile(delay, 0.99, 1e3),
            elapsed_s=elapsed_s,
            eta_s=min(left_s, default=None),
            errors=dict(self._errors),
            failing=patience.failing(counters),
        )

    def _phase(self, done: int, stopping: bool) -> str:
        if stopping:
            return "stopping"
        if self._level.index < 0:
            return "warm-up"
        if not self._begun:
            return "connecting"
        return "draining" if self._level.measured is not None and done >= self._level.measured else "measuring"

    def _rate(self, counters: Mapping[str, int], clock: int, ended: bool) -> float | None:
        """Tokens a second: of the last seconds while the level runs, its mean once it has ended."""
        events = counters["text_events"]
        recent = [(at, n) for at, n in self._history if clock - at < RATE_NS]
        self._history = [*recent, (clock, events)]
        since_ns, since = (self._since_ns, 0) if ended or not recent else recent[0]
        if clock <= since_ns or events <= since:
            return None
        told = counters["told_tokens"] / counters["told_events"] if counters["told_events"] else 1.0
        return (events - since) / ((clock - since_ns) / 1e9) * told

