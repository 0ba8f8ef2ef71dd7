"""summary.json and summary.csv: the figures of a run, made from its trace and at any time again."""

import csv
import io
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa

from fastload.analysis import slo
from fastload.analysis.imported import level_figures as told_figures
from fastload.analysis.imported import samples as told_samples
from fastload.analysis.levels import LevelFigures, level_figures
from fastload.analysis.validity import verdict
from fastload.errors import TraceError
from fastload.trace.formats.told import ToldLevel
from fastload.trace.imported import imported, read_imported
from fastload.trace.reader import Run
from fastload.trace.schema import DEFINITIONS_VERSION
from fastload.trace.writer import TEMPORARY

SUMMARY_SCHEMA = 1

WINDOW_RULE = (
    "rates: one window a level, from all slots having a request out to the end of the last measured request;"
    " tokens and requests of all roles inside it"
)
PERCENTILE_RULE = (
    "percentiles: nearest rank over the successful measured requests of the whole level;"
    " TPS p10 = what 90 % of users get at least; 95 % intervals by order statistics, if independent"
)
LINEAR_RULE = (
    "percentiles: linear interpolation between the two nearest of the successful measured requests (numpy's default);"
    " 95 % intervals by order statistics, if independent"
)
GOODPUT_RULE = (
    "goodput: measured requests due in the window that met every limit, as a share of all measured requests due in it"
    " (a failed one met none), and per second of it"
)
ITL_RULE = (
    "ITL is per request (TPOT): its percentiles are of per-request means; ICL pools the gaps between events"
)
WARMUP_RULE = (
    "warm-up: one request alone opens the run (--warmup adds some at each level's head, handed over without draining);"
    " never measured; each level's first wave is"
)


def summarise(run: Run, limits: slo.Slo | None = None, method: str = "nearest-rank") -> dict[str, Any]:
    """Return the summary of an opened run that is over (its status is taken from the manifest)."""
    if imported(run) is not None:
        return summarise_imported(run, read_imported(run), limits)
    levels = (
        (each, run.requests(each["dir"]), run.pieces("tokens", each["dir"])) for each in facts_of_levels(run)
    )
    summary = summarise_levels(run.manifest, levels, limits, method)
    summary["verdict"]["notes"][:0] = run.notes
    return summary


def facts_of_levels(run: Run) -> list[Mapping[str, Any]]:
    """Return the manifest's entries of the levels that have rows, in the order in which they ran."""
    there = run.level_dirs()
    listed: Any = run.manifest.get("levels") or []
    return sorted(
        (each for each in listed if each["index"] >= 0 and each["dir"] in there), key=lambda each: int(each["index"])
    )


def summarise_imported(run: Run, told: Sequence[ToldLevel], limits: slo.Slo | None = None) -> dict[str, Any]:
    """Return the summary of a run imported from another tool's file: null where that file has no figure."""
    limits = limits or slo.Slo()
    source = imported(run) or {}
    figures = [told_figures(each) for each in told]
    for each, one in zip(figures, told, strict=True):
        judged = slo.judge_level(limits, each, told_samples(one))
        each |= {"slo_ttft": judged.ttft, "slo_tps": judged.tps, "slo": judged.both}
    where = f"{source.get('file')} ({source.get('format')})"
    notes = [
        f"imported from {where}: its figures are by that tool's definitions (fastload reconcile names them)",
        f"not told there, so null here: {', '.join(source.get('lacks') or ()) or 'nothing'}",
    ]
    if any(each["failed"] is None for each in figures):
        notes.append("how many requests failed is not told; limits are judged as if none had")
    verdict = {"status": "unknown", "reasons": ["imported: no trace to judge the instrument by"], "notes": notes}
    return _summary(run.manifest, figures, limits, verdict, {"import": f"figures and percentiles: as told in {where}"})


def summarise_levels(
    manifest: Mapping[str, Any],
    levels: Iterable[tuple[Mapping[str, Any], pa.Table, pa.Table | Iterable[pa.Table]]],
    limits: slo.Slo | None = None,
    method: str = "nearest-rank",
) -> dict[str, Any]:
    """Return the summary of a run from its manifest and, per level, (facts, `requests` rows, `tokens` rows).

    Levels are read one at a time, so an iterator keeps memory to the largest level; one that was cut off
    before it had a row is left out, and listed in `levels_not_run`. Strict JSON: null where a figure does not
    exist, never NaN. `method` is "nearest-rank" or "linear".
    """
    limits = limits or slo.Slo()
    figures = [
        level_figures(requests, tokens, facts, limits, method)
        for facts, requests, tokens in levels
        if requests.num_rows or facts.get("complete")
    ]
    status = str(manifest.get("status", "complete"))
    judged = verdict(figures, status, manifest.get("calibration"))
    judged["notes"] += _plan_notes(manifest.get("plan") or {})
    judged["notes"] += _way_notes(manifest.get("target") or {}, manifest.get("levels") or [])
    rules = {
        "percentiles": PERCENTILE_RULE if method == "nearest-rank" else LINEAR_RULE,
        "window": WINDOW_RULE,
        "itl": ITL_RULE,
        "goodput": GOODPUT_RULE,
        "warmup": WARMUP_RULE,
    }
    return _summary(manifest, figures, limits, judged, rules)


def _summary(
    manifest: Mapping[str, Any],
    figures: list[LevelFigures],
    limits: slo.Slo,
    judged: Mapping[str, Any],
    rules: Mapping[str, str],
) -> dict[str, Any]:
    status = str(manifest.get("status", "complete"))
    marks = [
        slo.Mark(each["level"], each["slo"], each["latency_s"]["mean"], each["latency_s"]["p90"]) for each in figures
    ]
    target = manifest.get("target") or {}
    return {
        "schema": SUMMARY_SCHEMA,
        "definitions": manifest.get("definitions", DEFINITIONS_VERSION),
        "run_id": manifest.get("run_id"),
        "name": manifest.get("name"),
        "status": status,
        "interrupted": status == "interrupted",
        "simulated": bool(manifest.get("simulated", False)),
        "target": {
            "url": target.get("url"),
            "model": target.get("model"),
            "labels": target.get("labels") or {},
        },
        "rules": dict(rules),
        "verdict": dict(judged),
        "slo": asdict(limits),
        "levels_not_run": _not_run(manifest, figures),
        "levels": figures,
        "capacity": asdict(slo.capacity(marks, convention=limits.convention)),
    }


def _plan_notes(plan: Mapping[str, Any]) -> list[str]:
    """Say what the warm-up changed in the requests."""
    notes = []
    if plan.get("left_out"):
        notes.append(f"fields the server refuses, left out after the warm-up: {', '.join(plan['left_out'])}")
    if plan.get("continuous_usage_stats"):
        notes.append(
            "continuous usage was asked for, since events hold several tokens: counting costs the server something"
        )
    return notes


def _way_notes(target: Mapping[str, Any], levels: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say what stood between client and server: a proxy, TLS, and whether the server was who it says it is."""
    notes = []
    if target.get("proxy"):
        notes.append(f"through the proxy {target['proxy']} (CONNECT): its time is part of every figure")
    if target.get("tls") is None:
        return notes
    shaken = [seen for level in levels if (seen := (level.get("instrument") or {}).get("tls"))]
    said = f"{shaken[-1]['version']}, {shaken[-1]['cipher']}; " if shaken else ""
    made, resumed = (sum(seen[name] for seen in shaken) for name in ("handshakes", "resumed"))
    notes.append(f"TLS: {said}{made} handshakes in the levels, {resumed} resumed a session")
    if not target["tls"]["verified"]:
        notes.append("TLS: the server's certificate was NOT verified (--insecure): who answered is not known")
    return notes


def _not_run(manifest: Mapping[str, Any], figures: list[LevelFigures]) -> list[int]:
    """Return the planned levels (their concurrency) of which there is no row."""
    planned = (manifest.get("plan") or {}).get("levels") or []
    seen = {each["level"] for each in figures}
    return [int(each["concurrency"]) for each in planned if each["concurrency"] not in seen]


def as_json(summary: Mapping[str, Any]) -> str:
    """Return the summary as strict JSON text; ValueError if a figure is NaN or infinite (our bug)."""
    return json.dumps(summary, indent=2, allow_nan=False, ensure_ascii=False) + "\n"


def as_csv(summary: Mapping[str, Any]) -> str:
    """Return the summary as CSV text: one row a level, flat column names with units; null is empty."""
    head = {
        "run_id": summary["run_id"],
        "model": summary["target"]["model"],
        "simulated": summary["simulated"],
        "status": summary["status"],
        "verdict": summary["verdict"]["status"],
    }
    lines = [dict(_flat({**head, **level})) for level in summary["levels"]]
    names = list(dict.fromkeys(name for line in lines for name in line)) or list(head)
    text = io.StringIO()
    writer = csv.DictWriter(text, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def _flat(figures: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Walk nested figures; an object whose keys are data (errors, say) stays JSON in one column."""
    for name, value in figures.items():
        key = f"{prefix}_{name}" if prefix else name
        if name.endswith("_ci95"):
            low, high = value if value is not None else (None, None)
            yield f"{key}_low", low
            yield f"{key}_high", high
        elif name in ("errors", "token_sources"):
            yield key, json.dumps(value)
        elif isinstance(value, Mapping):
            yield from _flat(value, key)
        else:
            yield key, str(value).lower() if isinstance(value, bool) else value


def write_summary(run: Run, summary: Mapping[str, Any]) -> None:
    """Write summary.json and summary.csv into the run's directory, each whole or not at all (TraceError)."""
    try:
        _replace(run.path / "summary.json", as_json(summary))
        _replace(run.path / "summary.csv", as_csv(summary))
    except OSError as error:
        raise TraceError(f"cannot write the summary into {run.path}: {error.strerror or error}") from error


def _replace(path: Path, text: str) -> None:
    """Put the text at `path` in one step: written beside it, synced, renamed."""
    beside = path.with_name(path.name + TEMPORARY)
    try:
        with open(beside, "w", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
