"""Does a run keep its limits, and is it worse than another? What CI asks, answered by figures.

An assertion is METRIC[.STATISTIC] OPERATOR VALUE[@LEVEL]: ttft.p90<=1000@32, users>=400. Without a statistic the mean
is meant, without a level every level of the run. A figure that was not measured keeps no limit.
"""

import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastload.analysis import bootstrap, percentiles
from fastload.analysis.compare import differing_axes, edges, label
from fastload.analysis.configuration import Configuration, Level
from fastload.analysis.figures import FIGURES, HIGHER, STATISTICS, Figure, by_name, of_level
from fastload.errors import PlanError

OPERATORS: Mapping[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "<": operator.lt,
    ">": operator.gt,
}

WATCHED: tuple[tuple[str, str | None], ...] = (
    ("ttft", "mean"),
    ("ttft", "p90"),
    ("itl", "mean"),
    ("itl", "p90"),
    ("tps", "mean"),
    ("tps", "p10"),
    ("latency", "mean"),
    ("latency", "p90"),
    ("aggregate", None),
    ("rps", None),
    ("failure_rate", None),
)
"""Figures in which a regression is looked for, at every level that both runs have."""

LENGTHS_ALIKE = 0.02
"""Mean lengths further apart than this make figures of two runs hard to compare."""

_ASSERTION = re.compile(r"\s*([A-Za-z_]\w*)(?:\.(\w+))?\s*(<=|>=|==|<|>)\s*([^\s@]+)\s*(?:@\s*(\S+))?\s*\Z")
_Z95 = 1.959964


@dataclass(frozen=True, slots=True)
class Assertion:
    """One assertion, checked by itself: `statistic` is None for a figure that is no distribution, `level` for all."""

    text: str
    figure: Figure
    statistic: str | None
    operator: str
    value: float
    level: int | None


@dataclass(frozen=True, slots=True)
class Case:
    """One thing that was checked: its name, whether it holds, and a sentence with the figures."""

    name: str
    kind: str  # run, assertion, regression
    ok: bool
    says: str


def parse(text: str) -> Assertion:
    """Read an assertion. PlanError, which lists what there is, for one that cannot be meant."""
    shown = f"--assert {text!r}"
    found = _ASSERTION.match(text)
    if found is None:
        raise PlanError(
            f"{shown}: not of the form METRIC[.STATISTIC] OPERATOR VALUE[@LEVEL], such as ttft.p90<=1000@32; operators:"
            f" {' '.join(OPERATORS)}"
        )
    name, statistic, sign, number, level = found.groups()
    figure = by_name(name)
    if figure is None:
        raise PlanError(f"{shown}: there is no metric {name!r}; there are {', '.join(FIGURES)}")
    if figure.distribution:
        statistic = statistic or "mean"
        if statistic not in STATISTICS:
            raise PlanError(f"{shown}: {name} has no statistic {statistic!r}; it has {', '.join(STATISTICS)}")
    elif statistic is not None:
        raise PlanError(f"{shown}: {name} is one figure and has no statistic {statistic!r}; write {name}{sign}{number}")
    if level is not None and figure.of_run:
        raise PlanError(f"{shown}: {name} is a figure of the whole run, not of a level; leave out @{level}")
    if level is not None and not re.fullmatch(r"[0-9]{1,9}", level):
        raise PlanError(f"{shown}: {level!r} is no level; give a concurrency, such as @32")
    at = None if level is None else int(level)
    return Assertion(text.strip(), figure, statistic, sign, _number(shown, number), at)


def _number(shown: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise PlanError(f"{shown}: {text!r} is not a number to compare with; give a plain one, such as 1000 or 0.5")
    return value


def check(
    run: Configuration,
    assertions: Sequence[Assertion],
    baseline: Configuration | None = None,
    max_regression: float = 0.05,
    strict: bool = False,
) -> list[Case]:
    """Check a run: that it is valid, every assertion, and (with a baseline) every watched figure for a regression.

    `max_regression` is a share: 0.05 is 5 % of the baseline's figure, or 5 points of a share. `strict`: a suspect run
    is not valid enough. PlanError for a level the run does not have, or without a level in common.
    """
    cases = [_validity(run, strict)]
    for one in assertions:
        cases += _asserted(run, one)
    if baseline is not None:
        cases += _regressions(run, baseline, max_regression)
    return cases


def _validity(run: Configuration, strict: bool) -> Case:
    verdict, status = run.summary["verdict"], run.summary["status"]
    reasons = "; ".join(verdict["reasons"])
    if status != "complete":
        return Case("the run is valid", "run", False, f"the run is {status}" + (f"; {reasons}" if reasons else ""))
    says = f"the run is {verdict['status']}" + (f": {reasons}" if reasons else "")
    good = ("valid",) if strict else ("valid", "suspect", "unknown")  # unknown: imported, without a trace to judge by
    return Case("the run is valid", "run", verdict["status"] in good, says)


def _asserted(run: Configuration, one: Assertion) -> Iterator[Case]:
    if one.figure.of_run:
        yield _judged(one, run.summary["capacity"].get(one.figure.key), one.text, "")
        return
    if one.level is not None and one.level not in run.levels:
        raise PlanError(f"--assert {one.text!r}: the run has no level {one.level}; it has {_levels(run)}")
    if not run.levels:
        yield Case(one.text, "assertion", False, "not measured: the run has no level")
    for level in run.levels if one.level is None else (one.level,):
        value = of_level(run.levels[level].figures, one.figure, one.statistic)
        yield _judged(one, value, one.text if one.level is not None else f"{one.text}@{level}", f" at c={level}")


def _judged(one: Assertion, value: float | None, name: str, where: str) -> Case:
    what = label(one.figure.name, one.statistic) + where
    limit = f"{one.operator} {one.value:g}{_unit(one.figure)}"
    if value is None:
        return Case(name, "assertion", False, f"{what} was not measured; asked for {limit}")
    holds = OPERATORS[one.operator](value, one.value)
    return Case(name, "assertion", holds, f"{what} is {value:.6g}{_unit(one.figure)}; asked for {limit}")


def _regressions(run: Configuration, baseline: Configuration, limit: float) -> Iterator[Case]:
    common = [level for level in baseline.levels if level in run.levels]
    if not common:
        raise PlanError(
            f"--baseline: no level in common; the run has {_levels(run)}, the baseline {_levels(baseline)}"
        )
    if (verdict := baseline.summary["verdict"])["status"] == "invalid":
        reasons = "; ".join(verdict["reasons"])
        yield Case("the baseline is valid", "run", False, f"the baseline is invalid: {reasons}")
    for level in common:
        for name, statistic in WATCHED:
            figure = FIGURES[name]
            if lacked(run, figure, statistic):  # no fault of the server's: its tool does not tell it
                what = label(name, statistic)
                says = f"{what} at c={level}: not told by the file it was imported from"
                yield Case(f"no regression of {what}@{level}", "regression", True, says)
            else:
                yield _regression(run.levels[level], baseline.levels[level], figure, statistic, level, limit)


def lacked(run: Configuration, figure: Figure, statistic: str | None) -> bool:
    """Say whether a run was imported in a format that does not have a figure."""
    keys = ("failed",) if figure.key == "failure_rate" else (figure.key, f"{figure.key}.{statistic}")
    return any(key in run.lacks for key in keys)


def _regression(new: Level, old: Level, figure: Figure, statistic: str | None, level: int, limit: float) -> Case:
    """A regression: the 95 % intervals of both runs lie apart, and the figure is worse by more than the limit."""
    what = label(figure.name, statistic)
    name = f"no regression of {what}@{level}"
    before, after = of_level(old.figures, figure, statistic), of_level(new.figures, figure, statistic)
    if before is None:
        return Case(name, "regression", True, f"{what} at c={level}: the baseline did not measure it")
    if after is None:
        return Case(name, "regression", False, f"{what} at c={level} was not measured; the baseline has {before:.6g}")
    worse = before - after if figure.better == HIGHER else after - before
    share = worse if figure.share else worse / before if before else math.copysign(math.inf, worse) if worse else 0.0
    size = f"{100 * share:+.2f} {'points' if figure.share else '%'}" if math.isfinite(share) else "from 0"
    says = f"{what} at c={level}: {before:.6g} -> {after:.6g}{_unit(figure)}, {size} (+ is worse)"
    if share <= limit:
        return Case(name, "regression", True, says)
    a, b = interval(old, figure, statistic), interval(new, figure, statistic)
    if a is None or b is None:
        return Case(name, "regression", True, f"{says}; no interval (low n, or not told): not counted as a regression")
    apart = a[1] < b[0] or b[1] < a[0]
    shown = f"[{a[0]:.6g}, {a[1]:.6g}] and [{b[0]:.6g}, {b[1]:.6g}]"
    if not apart:
        return Case(name, "regression", True, f"{says}; 95 % intervals {shown} overlap: not counted as a regression")
    return Case(name, "regression", False, f"{says}; {100 * limit:g} allowed; 95 % intervals {shown} lie apart")


def interval(side: Level, figure: Figure, statistic: str | None) -> tuple[float, float] | None:
    """Return the 95 % interval of one level's figure, None where there is none.

    Percentiles: order statistics. Means: bootstrap. Rates: the edge error of the window. Failures: Wilson's.
    """
    if figure.key == "failure_rate":
        return _wilson(side.figures.get("failed"), side.figures.get("measured"))
    if not figure.distribution:
        return edges(side.figures, figure)
    ordered = side.samples.get(figure.key)
    if ordered is None:
        told = (side.figures.get(figure.key) or {}).get(f"{statistic}_ci95")
        return None if told is None else (float(told[0]), float(told[1]))
    if statistic == "mean":
        return bootstrap.interval(bootstrap.means(ordered)) if len(ordered) > 1 else None
    percent = int(str(statistic).removeprefix("p"))
    mirrored = statistic == "p10"
    ranks = percentiles.interval_ranks(len(ordered), 100 - percent if mirrored else percent)
    if ranks is None:
        return None
    low, high = (len(ordered) + 1 - ranks[1], len(ordered) + 1 - ranks[0]) if mirrored else ranks
    return float(ordered[low - 1]), float(ordered[high - 1])


def _wilson(failed: int | None, measured: int | None) -> tuple[float, float] | None:
    """Return Wilson's score interval of a share (Wilson 1927): sound at 0 and for few requests."""
    if not measured or failed is None:
        return None
    share, z2 = failed / measured, _Z95**2
    middle = share + z2 / (2 * measured)
    reach = _Z95 * np.sqrt(share * (1 - share) / measured + z2 / (4 * measured**2))
    return float(middle - reach) / (1 + z2 / measured), float(middle + reach) / (1 + z2 / measured)


def remarks(run: Configuration, baseline: Configuration | None) -> list[str]:
    """Return what the reader of a check should know besides its cases."""
    found = [] if run.summary["verdict"]["status"] != "suspect" else ["the run is suspect; its figures are doubtful"]
    if baseline is None:
        return found
    if run.summary["simulated"] != baseline.summary["simulated"]:
        found.append("one of run and baseline is simulated, the other does not say so")
    differing = differing_axes(baseline, run)
    if differing:
        shown = ", ".join(f"{name} ({a or 'not said'} -> {b or 'not said'})" for name, (a, b) in differing.items())
        found.append(f"run and baseline differ in {shown}")
    for name in ("isl", "osl", "endpoint", "ignore_eos"):
        a, b = ((one.manifest.get("plan") or {}).get(name) for one in (baseline, run))
        if a is not None and b is not None and a != b:
            found.append(f"run and baseline differ in {name}: {a} -> {b}")
    for level in (level for level in baseline.levels if level in run.levels):
        for what, key in (("prompts", "prompt_tokens_mean"), ("answers", "completion_tokens_mean")):
            a, b = (one.levels[level].figures.get(key) for one in (baseline, run))
            if a and b and abs(b / a - 1) > LENGTHS_ALIKE:
                found.append(f"{what} at c={level} had {b:.4g} tokens on average, {a:.4g} in the baseline")
    return found


def result(run: Configuration, baseline: Configuration | None, cases: Sequence[Case]) -> dict[str, Any]:
    """Return what was checked as JSON values."""
    return {
        "run_id": run.name,
        "baseline": baseline.name if baseline is not None else None,
        "simulated": bool(run.summary["simulated"] or (baseline is not None and baseline.summary["simulated"])),
        "ok": all(case.ok for case in cases),
        "cases": [{"name": one.name, "kind": one.kind, "ok": one.ok, "says": one.says} for one in cases],
        "remarks": remarks(run, baseline),
    }


def _levels(run: Configuration) -> str:
    return ", ".join(map(str, run.levels)) or "none"


def _unit(figure: Figure) -> str:
    return f" {figure.unit}" if figure.unit not in ("", figure.name) else ""
