"""Runs side by side: on which axis they differ, by how much at each level, and whether so few requests can say so."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fastload.analysis import bootstrap, percentiles
from fastload.analysis.configuration import Configuration, Level
from fastload.analysis.figures import FIGURES, Figure, of_level
from fastload.analysis.levels import LevelFigures
from fastload.analysis.percentiles import Floats

AXES = ("engine", "model", "hardware", "speculation", "draft_model")
"""What runs are usually compared by. Any other label is an axis too."""

COMPARED: tuple[tuple[str, str | None], ...] = (
    *(("ttft", one) for one in ("mean", "p50", "p90")),
    *(("itl", one) for one in ("mean", "p50", "p90")),
    *(("icl", one) for one in ("p50", "p90", "p99")),
    *(("tps", one) for one in ("mean", "p50", "p10")),
    *(("latency", one) for one in ("mean", "p50", "p90")),
    *((name, None) for name in ("aggregate", "rps", "goodput", "failure_rate")),
)

BOOTSTRAP_RULE = (
    "intervals of differences: middle 95 % of 2,000 bootstrap resamples of the requests of both runs (seeded), if"
    " requests are independent; of rates: the edge error of their windows; gaps between chunks have none, since those"
    " of a request hang together"
)
LOW_N_RULE = "low n: too few requests for an interval of that percentile (29 for P90 and p10, 299 for P99, 6 for P50)"


def compare(runs: Sequence[Configuration]) -> dict[str, Any]:
    """Compare the first run with each other one: JSON values, None where there is no figure.

    {"runs": [{"run_id", "simulated", "verdict", "axes", "levels"}], "pairs": [{"from", "to", "axes": {name: [a, b]},
    "warnings", "levels": [{"level", "figures": {"ttft.p90": difference}}], "levels_of_one", "manifest": [..]}],
    "rules"}; a difference is that of `difference`.
    """
    first, *others = runs
    return {
        "runs": [
            {
                "run_id": one.name,
                "simulated": one.summary["simulated"],
                "verdict": one.summary["verdict"]["status"],
                "axes": axes(one),
                "capacity": one.summary["capacity"],
                "levels": [side.figures for side in one.levels.values()],
            }
            for one in runs
        ],
        "pairs": [_pair(first, other, runs) for other in others],
        "rules": [BOOTSTRAP_RULE, LOW_N_RULE],
    }


def _pair(old: Configuration, new: Configuration, everyone: Sequence[Configuration]) -> dict[str, Any]:
    common = [level for level in old.levels if level in new.levels]
    differing = differing_axes(old, new)
    return {
        "from": old.name,
        "to": new.name,
        "axes": differing,
        "warnings": list(_warnings(old, new, differing, everyone)),
        "levels": [
            {
                "level": level,
                "figures": {
                    label(name, statistic): difference(old.levels[level], new.levels[level], FIGURES[name], statistic)
                    for name, statistic in COMPARED
                },
            }
            for level in common
        ],
        "levels_of_one": sorted(set(old.levels) ^ set(new.levels)),
        "manifest": manifest_differences(old.manifest, new.manifest),
    }


def label(name: str, statistic: str | None) -> str:
    """Return a figure's name as it is written in an assertion: ttft.p90, or rps."""
    return name if statistic is None else f"{name}.{statistic}"


def axes(one: Configuration) -> dict[str, str]:
    """Return what a run says of the axes: its labels, else the model it asked for and the engine the server names."""
    target: Mapping[str, Any] = one.manifest.get("target") or {}
    said = {str(key).lower().replace("-", "_"): str(value) for key, value in (target.get("labels") or {}).items()}
    told = {"model": target.get("model"), "engine": (target.get("facts") or {}).get("owned_by")}
    known = {name: str(value) for name, value in told.items() if value} | said
    return {name: known[name] for name in dict.fromkeys((*AXES, *known)) if name in known}


def differing_axes(old: Configuration, new: Configuration) -> dict[str, list[str | None]]:
    """Return the axes on which two runs differ, {name: [old, new]}; what a run does not say is None.

    A draft model that only one run has belongs to its speculation, and is no axis of its own.
    """
    a, b = axes(old), axes(new)
    found = {name: [a.get(name), b.get(name)] for name in dict.fromkeys((*a, *b)) if a.get(name) != b.get(name)}
    if "speculation" in found and None in found.get("draft_model", ()):
        del found["draft_model"]
    return found


def _warnings(
    old: Configuration, new: Configuration, differing: Mapping[str, Any], everyone: Sequence[Configuration]
) -> Iterator[str]:
    if len(differing) > 1:
        names = ", ".join(differing)
        alone = [one.name for one in everyone if one is not new and len(differing_axes(one, new)) == 1]
        hint = f"; {', '.join(alone)} differs from {new.name} in one only" if alone else ""
        yield f"{len(differing)} axes differ ({names}): no difference below can be laid to one of them{hint}"
    if not differing:
        yield "no axis differs: a repetition, or what differs is not labelled (--label engine=.. at the sweep)"
    for one in (old, new):
        status = one.summary["verdict"]["status"]
        if status != "valid":
            yield f"{one.name} is {status}: {'; '.join(one.summary['verdict']['reasons'])}"
    if old.summary["simulated"] != new.summary["simulated"]:
        yield "one of the two is simulated, the other does not say so"
    tools = [(one.manifest.get("imported") or {}).get("format") or "fastload" for one in (old, new)]
    if tools[0] != tools[1] or old.summary["definitions"] != new.summary["definitions"]:
        whose = " and ".join(f"{tool}'s ({one.name})" for one, tool in zip((old, new), tools, strict=True))
        yield f"figures by different definitions, {whose}: fastload reconcile says what that alone makes"


def difference(old: Level, new: Level, figure: Figure, statistic: str | None) -> dict[str, Any]:
    """Return how a figure differs between two levels.

    {"from", "to", "difference", "ratio", "interval": [low, high] of the difference or None, "method", "n": [a, b],
    "differs": whether the interval leaves out 0 (None without an interval), "low_n"}.
    """
    a, b = of_level(old.figures, figure, statistic), of_level(new.figures, figure, statistic)
    counts = [_count(side, figure) for side in (old, new)]
    found: dict[str, Any] = {
        "from": a,
        "to": b,
        "difference": None if a is None or b is None else b - a,
        "ratio": None if a is None or b is None or a == 0 else b / a,
        "interval": None,
        "method": None,
        "n": counts,
        "differs": None,
        "low_n": False,
    }
    if a is None or b is None:
        return found
    if figure.distribution and statistic is not None and any(_too_few(n, statistic) for n in counts):
        return found | {"low_n": True}
    method, interval = _interval(old, new, figure, statistic)
    if interval is not None:
        found |= {"interval": list(interval), "method": method, "differs": not interval[0] <= 0 <= interval[1]}
    return found


def _count(side: Level, figure: Figure) -> int | None:
    if figure.distribution:
        return (side.figures.get(figure.key) or {}).get("n")
    return side.figures.get("ok")


def _too_few(n: int | None, statistic: str) -> bool:
    if statistic == "mean":
        return (n or 0) < 2
    return percentiles.is_low_n(n or 0, int(statistic.removeprefix("p")))


def _interval(
    old: Level, new: Level, figure: Figure, statistic: str | None
) -> tuple[str | None, tuple[float, float] | None]:
    """Return how the interval of a difference was made, and it."""
    if figure.distribution and figure.key in old.samples and figure.key in new.samples:
        drawn = [_draws(side.samples[figure.key], str(statistic), at) for at, side in enumerate((old, new))]
        return "bootstrap", bootstrap.interval(drawn[1] - drawn[0])
    a, b = (edges(side.figures, figure) for side in (old, new))
    if a is None or b is None:
        return None, None
    return "edge error", (b[0] - a[1], b[1] - a[0])


def _draws(ordered: Floats, statistic: str, at: int) -> bootstrap.Draws:
    """Return resampled figures; the two sides draw different numbers."""
    if statistic == "mean":
        return bootstrap.means(ordered, (bootstrap.SEED, at))
    percent = int(statistic.removeprefix("p"))
    return bootstrap.percentiles(ordered, percent, low=statistic == "p10", seed=(bootstrap.SEED, at))


def edges(level: LevelFigures, figure: Figure) -> tuple[float, float] | None:
    """Return how far a rate may be off because its window cuts waves of requests; None for other figures."""
    error = level.get("rate_edge_error")
    value = level.get(figure.key)
    if figure.key not in ("aggregate_tok_s", "system_rps") or error is None or value is None:
        return None
    return value * (1 - error), value * (1 + error)


GROUPS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("import", ("imported",)),
    ("server", ("target.facts", "target.url", "target.model")),
    ("requests", ("plan", "sampling")),
    ("client", ("fastload", "definitions", "python", "packages")),
    ("host", ("host",)),
)
"""What of two manifests is set side by side, by whose affair it is."""

ALWAYS_DIFFERENT = ("plan.levels", "host.load_average", "plan.prompts.texts_counted", "imported.lacks")


def manifest_differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what two manifests say differently: [{"group", "key", "from", "to"}]; None where one says nothing.

    Of what only one of them speaks of at all (an import knows no host, and no plan) nothing is listed.
    """
    found: list[dict[str, Any]] = []
    a, b = dict(_flat(old)), dict(_flat(new))
    for group, prefixes in GROUPS:
        for key in dict.fromkeys((*a, *b)):
            both = group == "import" or all(one.get(key.partition(".")[0]) is not None for one in (old, new))
            wanted = both and any(key == prefix or key.startswith(f"{prefix}.") for prefix in prefixes)
            if wanted and key not in ALWAYS_DIFFERENT and a.get(key) != b.get(key):
                found.append({"group": group, "key": key, "from": a.get(key), "to": b.get(key)})
    return found


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Walk a manifest: nested names joined by dots; lists stay whole."""
    for name, inner in value.items():
        key = f"{prefix}{name}"
        if isinstance(inner, Mapping):
            yield from _flat(inner, f"{key}.")
        else:
            yield key, inner
