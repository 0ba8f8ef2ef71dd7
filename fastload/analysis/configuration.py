"""A run as analysis sees it: its levels with their figures, and, where there is a trace, the values behind them.

One configuration is one run, measured here or imported from another tool's file. An imported one has the same keys;
what the format lacks is null and named in `lacks`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa

from fastload.analysis import rows, slo, window
from fastload.analysis.imported import samples as told_samples
from fastload.analysis.levels import LevelFigures
from fastload.analysis.percentiles import Floats
from fastload.analysis.summary import facts_of_levels, summarise_imported, summarise_levels
from fastload.trace.imported import imported, read_imported
from fastload.trace.reader import Run

SAMPLED = ("ttft_ms", "response_ttft_ms", "ttfa_ms", "itl_ms", "tps", "latency_s", "response_latency_s")


@dataclass(frozen=True, slots=True)
class Due:
    """The measured requests of a level that were due in its window, in no order: what goodput is counted over.

    ttft_ms, tps: one value a request, NaN where it failed. seconds: length of the window.
    """

    ttft_ms: Floats
    tps: Floats
    seconds: float


@dataclass(frozen=True, slots=True)
class Level:
    """One level. figures: its entry of the summary. samples: ascending values of the successful measured requests by
    the key of their distribution; empty without a trace. due: None without a trace or a window.
    """

    figures: LevelFigures
    samples: Mapping[str, Floats] = field(default_factory=dict)
    due: Due | None = None

    @property
    def level(self) -> int:
        """Its concurrency."""
        return int(self.figures["level"])


@dataclass(frozen=True, slots=True)
class Configuration:
    """One run. summary: as in summary.json. levels: by concurrency, ascending. run: where it lies, None if nowhere.

    short_name: the name it was given, or its id where others beside it have that name too.
    """

    summary: Mapping[str, Any]
    manifest: Mapping[str, Any]
    levels: Mapping[int, Level]
    run: Run | None = None
    short_name: str = ""

    @property
    def name(self) -> str:
        """The run's id."""
        return str(self.summary["run_id"])

    @property
    def labels(self) -> Mapping[str, str]:
        """What it was labelled (--label)."""
        return dict(self.summary["target"]["labels"])

    @property
    def simulated(self) -> bool:
        """Whether its target was simulated: then its figures are of no real server."""
        return bool(self.summary["simulated"])

    @property
    def lacks(self) -> tuple[str, ...]:
        """Figures that the format it was imported from does not have."""
        return tuple((self.manifest.get("imported") or {}).get("lacks") or ())


def configurations(
    runs: Sequence[Run], limits: slo.Slo | None = None, method: str = "nearest-rank"
) -> tuple[Configuration, ...]:
    """Return runs as configurations. TraceError for one that cannot be read."""
    found = [configuration(run, limits, method) for run in runs]
    often = Counter(one.short_name for one in found)
    return tuple(replace(one, short_name=one.name) if often[one.short_name] > 1 else one for one in found)


def configuration(run: Run, limits: slo.Slo | None = None, method: str = "nearest-rank") -> Configuration:
    """Return one run, read once, a level at a time. `method` names the percentiles ("nearest-rank" or "linear")."""
    if imported(run) is not None:
        told = read_imported(run)
        summary = summarise_imported(run, told, limits)
        values = {one.level: Level({}, told_samples(one)) for one in told}
    else:
        values = {}

        def read() -> Iterator[tuple[Mapping[str, Any], pa.Table, Iterator[pa.Table]]]:
            for facts in facts_of_levels(run):
                requests = run.requests(facts["dir"])
                values[int(facts["concurrency"])] = Level({}, samples(requests), due(requests))
                yield facts, requests, run.pieces("tokens", facts["dir"])

        summary = summarise_levels(run.manifest, read(), limits, method)
        summary["verdict"]["notes"][:0] = run.notes
    figures = sorted(summary["levels"], key=lambda each: int(each["level"]))
    levels = {each["level"]: Level(each, values[each["level"]].samples, values[each["level"]].due) for each in figures}
    return Configuration(summary, run.manifest, levels, run, str(summary["name"] or summary["run_id"]))


def samples(requests: pa.Table) -> dict[str, Floats]:
    """Return the ascending values of the successful measured requests of a level, by the key of their distribution."""
    ok = rows.equals(requests, "role", "measured") & rows.equals(requests, "status", "ok")
    found = {key: np.sort(rows.present(rows.floats(requests, key)[ok])) for key in SAMPLED}
    found["decode_tps"] = np.sort(1000 / found["itl_ms"][found["itl_ms"] > 0])
    return found


def due(requests: pa.Table) -> Due | None:
    """Return the measured requests due in the window of a level; None without a window."""
    measured = rows.equals(requests, "role", "measured")
    span = window.closed_loop(
        rows.ints(requests, "slot"), rows.ints(requests, "sent_ns"), rows.ends(requests), measured
    )
    if span is None:
        return None
    there = span.contains(rows.ints(requests, "due_ns")) & measured
    good = rows.equals(requests, "status", "ok")
    ttft, tps = (np.where(good, rows.floats(requests, name), np.nan)[there] for name in ("ttft_ms", "tps"))
    return Due(ttft, tps, span.seconds)
