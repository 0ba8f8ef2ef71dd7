"""One trace as other load generators would compute it, and each step of the difference with its size.

Pure: from our own stamps, never from another tool's clock. A step is measured by taking one more choice of the tool's
definition (reconcile_tools.py) and computing the figure again, so the steps of a figure add up to its whole
difference; in another order they would be of other sizes.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fastload.analysis import bootstrap, percentiles, reconcile_chunks, rows, window
from fastload.analysis.reconcile_tools import OURS, TOOLS, Chunks, Definition, Tool
from fastload.analysis.rows import NULL, Bools, Floats, Ints
from fastload.analysis.summary import facts_of_levels
from fastload.analysis.window import Window
from fastload.errors import PlanError
from fastload.trace.formats.told import Told, ToldLevel
from fastload.trace.imported import imported
from fastload.trace.reader import Run

STATISTICS = ("mean", "p50", "p90", "p99")
DISTRIBUTIONS = ("ttft_ms", "itl_ms", "icl_ms", "latency_s", "tps", "decode_tps")
RATES = ("aggregate_tok_s", "system_rps")
NAMED_ITL = "named_itl_ms"
"""What a tool prints as "ITL" where that is the gap between chunks; its steps start at our ITL."""


@dataclass(frozen=True, slots=True)
class Level:
    """One level as the definitions need it: a value per measured request that was sent, null is -1 (ints) or NaN.

    at: its row in `requests`, which has `rows`; the gaps of `readings` know requests by that.
    """

    at: Ints
    rows: int
    sent: Ints
    done: Ints
    framing: Ints
    connect: Ints
    completion: Ints
    requested: Ints
    prompts: Ints
    itl_ms: Floats  # ours
    status: Ints  # which of `statuses`
    statuses: tuple[str, ...]
    readings: Mapping[Chunks, reconcile_chunks.Reading]
    last_event: Ints
    steady: Window | None
    window_tokens: Mapping[Window, int]  # of all roles
    completed: Ints  # when each successful request of any role was done


def reconcile(run: Run, only: int | None = None, told: Told | None = None) -> dict[str, Any]:
    """Reconcile a run, or the one level of it that has the concurrency `only`: JSON values.

    {"run_id", "model", "simulated", "tools": {key: {"title", "names", "steps", "remarks"}}, "levels": [{"level", "n",
    "figures", "beside"}]}; see `reconcile_level`. With `told`, another tool's file, the levels that both have, and
    beside: {"tool", "file", "n", "rows": see `gaps_to`, "lacks", "remarks"}. PlanError for a level that is not there.
    """
    asked = levels_asked(run, only)
    if told is not None and not {value for value, _ in asked} & {one.level for one in told.levels}:
        theirs, ours = _listed(one.level for one in told.levels), _listed(value for value, _ in asked)
        raise PlanError(f"--with {told.file}: no level in common; it has {theirs}, the run {ours}")
    target: Mapping[str, Any] = run.manifest.get("target") or {}  # type: ignore[assignment]
    return {
        "run_id": run.run_id,
        "model": target.get("model"),
        "simulated": bool(run.manifest.get("simulated")),
        "tools": {
            tool.key: {
                "title": tool.title,
                "names": dict(tool.names),
                "steps": [step.says for step in tool.steps],
                "remarks": list(tool.remarks),
            }
            for tool in TOOLS.values()
        },
        "levels": list(_reconciled(run, asked, told)),
    }


def _reconciled(run: Run, asked: Sequence[tuple[int, str]], told: Told | None) -> Iterator[dict[str, Any]]:
    """Yield the levels, one in memory at a time."""
    others = {} if told is None else {one.level: one for one in told.levels}
    for value, directory in asked:
        if told is not None and value not in others:
            continue
        level = read_level(run.requests(directory), run.pieces("tokens", directory))
        found = {"level": value} | reconcile_level(level)
        if told is not None:
            found["beside"] = _beside(level, found["figures"], told, others[value])
        yield found


def _beside(level: Level, figures: Mapping[str, Any], told: Told, other: ToldLevel) -> dict[str, Any]:
    tool = TOOLS[told.tool]
    theirs = {name: other.figures[name] for name in DISTRIBUTIONS if other.figures.get(name) is not None}
    theirs |= {name: {"value": other.figures.get(name)} for name in RATES}
    if tool.definition.rate == "1 / mean latency":  # what it calls RPS is read as what it is
        theirs["system_rps"] = {"value": other.figures.get("stream_rps")}
    return {
        "tool": tool.key,
        "file": told.file,
        "n": other.figures.get("ok"),
        "rows": gaps_to(level, figures, tool, theirs),
        "lacks": list(told.lacks),
        "remarks": list(_unlike(level, other)),
    }


LENGTHS_ALIKE = 0.02


def _unlike(level: Level, other: ToldLevel) -> Iterator[str]:
    """Yield in what the other tool's requests were unlike ours: then a gap may be theirs, and nobody's error."""
    asked = level.prompts[level.prompts != NULL]
    answered = level.completion[accepted(level, OURS) & (level.completion != NULL)]
    length, told = other.figures.get("completion_tokens_mean"), "as each counts them"
    speed, latency = ((other.figures.get(name) or {}).get("mean") for name in ("tps", "latency_s"))
    if length is None and speed is not None and latency is not None:
        length, told = speed * latency, "which it does not tell: TPS x latency"
    for what, ours, theirs, how in (
        ("prompts", asked, other.figures.get("prompt_tokens_mean"), "as each counts them"),
        ("answers", answered, length, told),
    ):
        if theirs and len(ours) and abs(theirs / ours.mean() - 1) > LENGTHS_ALIKE:
            yield f"its {what} had {theirs:.4g} tokens on average, ours {ours.mean():.4g} ({how})"


def levels_asked(run: Run, only: int | None) -> list[tuple[int, str]]:
    """Return (concurrency, directory) of each level of a run that has rows, in their order, or of the one asked for.

    PlanError when there is no such level, or for a run that was imported and has no rows at all.
    """
    if imported(run) is not None:
        raise PlanError(f"{run.path}: was imported from another tool's file and has no trace; give a run measured here")
    known = [(int(each["concurrency"]), str(each["dir"])) for each in facts_of_levels(run)]
    asked = [pair for pair in known if only in (None, pair[0])]
    if only is not None and not asked:
        raise PlanError(f"--level {only}: the run has no such level; it has {_listed(value for value, _ in known)}")
    return asked


def _listed(levels: Iterable[int]) -> str:
    return ", ".join(map(str, levels)) or "none"


def read_level(requests: pa.Table, tokens: Iterable[pa.Table]) -> Level:
    """Read one level: all rows of `requests`, and its `tokens` in pieces (one pass)."""
    measured = rows.equals(requests, "role", "measured")
    sent, end = rows.ints(requests, "sent_ns"), rows.ends(requests)
    counted = measured & (sent != NULL)
    steady = window.closed_loop(rows.ints(requests, "slot"), sent, end, measured)
    rules = list(dict.fromkeys(step.after.chunks for tool in TOOLS.values() for step in tool.steps))
    rules = list(dict.fromkeys([OURS.chunks, *rules]))
    whole = _whole(sent[counted], end[counted])
    windows = [one for one in (steady, whole) if one is not None]
    events = reconcile_chunks.read_events(requests, tokens, counted, rules, windows)

    def of(name: str) -> Ints:
        column: Ints = rows.ints(requests, name)[counted]
        return column

    readings = {
        rule: reconcile_chunks.Reading(reading.first[counted], reading.last[counted], reading.gaps)
        for rule, reading in events.readings.items()
    }
    told = pc.dictionary_encode(pc.fill_null(requests.column("status").filter(pa.array(counted)), "")).combine_chunks()
    return Level(
        at=np.flatnonzero(counted),
        rows=requests.num_rows,
        sent=sent[counted],
        done=end[counted],
        framing=of("framing_end_ns"),
        connect=np.maximum(of("connect_ns"), 0) + np.maximum(of("tls_ns"), 0),
        completion=of("completion_tokens"),
        requested=of("max_tokens"),
        prompts=of("prompt_tokens"),
        itl_ms=rows.floats(requests, "itl_ms")[counted],
        status=told.indices.to_numpy().astype(np.int64),
        statuses=tuple(told.dictionary.to_pylist()),
        readings=readings,
        last_event=events.last_event[counted],
        steady=steady,
        window_tokens=dict(zip(windows, events.window_tokens, strict=True)),
        completed=rows.ints(requests, "done_ns")[rows.equals(requests, "status", "ok")],
    )


def reconcile_level(level: Level, tools: Mapping[str, Tool] = TOOLS) -> dict[str, Any]:
    """Return every figure by our definition and by each tool's, with the steps between.

    {"n": successes, "figures": {figure: {statistic: {"fastload": value, tool: {"value": .., "name": what the tool calls
    it, "steps": [{"says": .., "change": ..}, ..]}}}}}; a rate has the one statistic "value". Only steps that change
    something are listed. Values are None where there is none.
    """
    figures: dict[str, Any] = {}
    gaps: _Gaps = {}
    for figure in (*DISTRIBUTIONS, NAMED_ITL, *RATES):
        ours = _statistics(level, figure, OURS, gaps)
        figures[figure] = {statistic: {"fastload": value} for statistic, value in ours.items()}
        for tool in tools.values():
            if not _prints(tool, figure):
                continue
            walked = [ours, *(_statistics(level, figure, step.after, gaps) for step in tool.steps)]
            for statistic in ours:
                values = [each[statistic] for each in walked]
                figures[figure][statistic][tool.key] = {
                    "value": values[-1],
                    "name": tool.names["icl_ms" if figure == NAMED_ITL else figure],
                    "steps": _changes(tool, values),
                }
    return {"n": int(accepted(level, OURS).sum()), "figures": figures}


def _prints(tool: Tool, figure: str) -> bool:
    if figure == NAMED_ITL:
        return tool.definition.pooled
    return figure in tool.names


def _changes(tool: Tool, values: Sequence[float | None]) -> list[dict[str, Any]]:
    """Return the steps that change the figure; one that makes it appear or vanish has no size."""
    changes: list[dict[str, Any]] = []
    for step, before, after in zip(tool.steps, values[:-1], values[1:], strict=True):
        if before is not None and after is not None:
            if not math.isclose(before, after, rel_tol=1e-12):  # the same figure in another order of additions
                changes.append({"says": step.says, "change": after - before})
        elif before is not after:
            changes.append({"says": step.says, "change": None})
    return changes


_Gaps: TypeAlias = dict[tuple[object, ...], dict[str, dict[str, float | None]]]
"""Statistics of pooled gaps by what they depend on, and by rank: of ten million gaps each is sorted once."""


def _statistics(level: Level, figure: str, by: Definition, gaps: _Gaps) -> dict[str, float | None]:
    """Return a figure's statistics by a definition."""
    if figure in RATES:
        return {"value": rate(level, figure, by)}
    if figure != "icl_ms" and not (figure == NAMED_ITL and by.pooled):
        return _described(np.sort(sample(level, figure, by)), by.rank)
    pieces = tuple(id(gap) for _, gap in level.readings[by.chunks].gaps)
    key = (pieces, by.statuses.intersection(level.statuses))
    if key not in gaps:
        ordered = np.sort(sample(level, figure, by))
        gaps[key] = {rank: _described(ordered, rank) for rank in ("nearest", "linear", "nearest, median linear")}
    return gaps[key][by.rank]


def _described(ordered: Floats, rank: str) -> dict[str, float | None]:
    if not len(ordered):
        return dict.fromkeys(STATISTICS)
    return {"mean": float(ordered.mean())} | {f"p{one}": _ranked(ordered, one, rank) for one in (50, 90, 99)}


def _ranked(ordered: Floats, percent: int, rank: str) -> float | None:
    straight = rank == "linear" or (rank == "nearest, median linear" and percent == 50)
    return percentiles.linear(ordered, percent) if straight else percentiles.upper(ordered, percent)


def sample(level: Level, figure: str, by: Definition) -> Floats:
    """Return the values behind a distribution by a definition, in its unit, in no order worth keeping."""
    counting = accepted(level, by)
    reading = level.readings[by.chunks]
    if figure == "icl_ms" or (figure == NAMED_ITL and by.pooled):
        wanted = np.zeros(level.rows, dtype=np.bool_)
        wanted[level.at[counting]] = True
        return reading.pooled(wanted)
    before_ns = level.connect if by.connecting else np.zeros_like(level.connect)
    first = np.where(reading.first == NULL, np.nan, reading.first + before_ns)
    latency = ends(level, by) + before_ns
    n = _counted(level, by)
    if figure == "ttft_ms":
        values = first / 1e6
    elif figure == "latency_s":
        values = latency / 1e9
    elif figure == "tps":
        with np.errstate(divide="ignore", invalid="ignore"):
            values = np.where(latency > 0, n / (latency / 1e9), np.nan)
    else:
        values = _per_token(level, by, first, latency, n)
        if figure == "decode_tps":
            with np.errstate(divide="ignore"):
                values = np.where(values > 0, 1000 / values, np.nan)
    return rows.present(values[counting])


def _per_token(level: Level, by: Definition, first: Floats, latency: Floats, n: Floats) -> Floats:
    """Return the time per token of each request, in ms; NaN where there is none."""
    if by.per_token == "ours":
        return level.itl_ms
    reading = level.readings[by.chunks]
    last = np.where(reading.last == NULL, np.nan, reading.last + (level.connect if by.connecting else 0))
    until = latency if by.per_token == "end / (n - 1)" else last
    with np.errstate(divide="ignore", invalid="ignore"):
        values = np.where(n > 1, (until - first) / 1e6 / (n - 1), np.nan)
    return values if by.one_token_itl is None else np.where(n == 1, by.one_token_itl, values)


def ends(level: Level, by: Definition) -> Floats:
    """Return when each request is over by this definition, in ns after it was sent; NaN where that never came."""
    done, over = level.done - level.sent, level.last_event
    if by.end == "last chunk":
        over = level.readings[by.chunks].last
    elif by.end == "framing":
        over = np.where(level.framing == NULL, done, level.framing - level.sent)
    elif by.end == "done":
        over = done
    return np.where(over == NULL, np.nan, over)


def _counted(level: Level, by: Definition) -> Floats:
    """Return the output tokens of each request; NaN where they are not known."""
    asked = (by.counted == "requested") & (level.requested != NULL)
    n = np.where(asked, level.requested, level.completion)
    return np.where(n == NULL, np.nan, n)


def accepted(level: Level, by: Definition) -> Bools:
    """Say which measured requests count. One that failed by our rule needs a chunk for it."""
    known, ok = (
        np.array([each in statuses for each in level.statuses], dtype=np.bool_)[level.status]
        for statuses in (by.statuses, ("ok",))
    )
    counting: Bools = known & (ok | (level.readings[by.chunks].last != NULL))
    return counting


def rate(level: Level, figure: str, by: Definition) -> float | None:
    """Return tokens or requests a second by a definition."""
    counting = accepted(level, by)
    if by.rate == "1 / mean latency":
        mean = rows.mean((ends(level, by) + (level.connect if by.connecting else 0))[counting] / 1e9)
        return 1 / mean if mean else None
    span = level.steady if by.window == "steady" else _whole(level.sent, level.done)
    if span is None:
        return None
    if by.roles == "all":
        inside = span.contains(level.completed).sum() if figure == "system_rps" else level.window_tokens[span]
        return float(inside) / span.seconds
    if not counting.any():
        return None
    seconds = _measured_seconds(level, by, counting)
    count = counting.sum() if figure == "system_rps" else np.nansum(_counted(level, by)[counting])
    return float(count) / seconds if seconds > 0 else None


def _measured_seconds(level: Level, by: Definition, counting: Bools) -> float:
    """Return the time from the first request sent to the end of the last; what its end is, the definition says."""
    over = level.sent + ends(level, by) if by.window == "to the last chunk" else level.done
    return float(np.nanmax(over[counting]) - level.sent.min()) / 1e9


def _whole(sent: Ints, end: Ints) -> Window | None:
    """Return the window from the first measured request sent to the end of the last one."""
    if not len(sent) or end.max() <= sent.min():
        return None
    return Window(int(sent.min()), int(end.max()))



def gaps_to(
    level: Level, figures: Mapping[str, Any], tool: Tool, told: Mapping[str, Mapping[str, float | None]]
) -> list[dict[str, Any]]:
    """Set a tool's own figures beside ours: how much of the gap its definition explains, and how much it does not.

    `figures` are those of `reconcile_level`, `told` the tool's by the same names: {figure: {statistic: value}}. Each
    entry: ours, by_definition (our stamps, its definition), theirs, gap = theirs - ours = explained + rest, and chance:
    the 95 % bootstrap interval of by_definition, None where requests are not the unit (chunk gaps, rates). What
    is not explained is the other client's error, or another run's luck: `by_chance` says whether theirs is in `chance`.
    """
    found: list[dict[str, Any]] = []
    for figure, statistics in figures.items():
        for statistic, entry in statistics.items():
            theirs = (told.get(figure) or {}).get(statistic)
            ours, by_definition = entry["fastload"], (entry.get(tool.key) or {}).get("value")
            if theirs is None or ours is None or by_definition is None or figure == NAMED_ITL:
                continue
            chance = _chance(level, figure, statistic, tool.definition)
            found.append(
                {
                    "figure": figure,
                    "statistic": statistic,
                    "name": entry[tool.key]["name"],
                    "ours": ours,
                    "by_definition": by_definition,
                    "theirs": theirs,
                    "gap": theirs - ours,
                    "explained": 0.0 if math.isclose(ours, by_definition, rel_tol=1e-12) else by_definition - ours,
                    "rest": theirs - by_definition,
                    "rest_share": (theirs - by_definition) / by_definition if by_definition else None,
                    "chance": chance,
                    "by_chance": None if chance is None else chance[0] <= theirs <= chance[1],
                }
            )
    return found


def _chance(level: Level, figure: str, statistic: str, by: Definition) -> list[float] | None:
    """Return the 95 % bootstrap interval of a figure; None for a low n, pooled gaps and rates."""
    if figure in RATES or figure == "icl_ms":
        return None
    ordered = np.sort(sample(level, figure, by))
    if not len(ordered):
        return None
    if statistic == "mean":
        return list(bootstrap.interval(bootstrap.means(ordered)))
    percent = int(statistic.removeprefix("p"))
    if percentiles.is_low_n(len(ordered), percent):
        return None
    return list(bootstrap.interval(bootstrap.percentiles(ordered, percent)))
