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
from fastload.analysis.levels import LevelFigures, level_figures
from fastload.analysis.validity import verdict
from fastload.errors import TraceError
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
ITL_RULE = (
    "ITL is per request (TPOT): its percentiles are of per-request means; ICL pools the gaps between events"
)
WARMUP_RULE = (
    "warm-up: one request alone opens the run (--warmup adds some at each level's head, handed over without draining);"
    " never measured; each level's first wave is"
)


def summarise(run: Run, limits: slo.Slo | None = None, method: str = "nearest-rank") -> dict[str, Any]:
    """Return the summary of an opened run that is over (its status is taken from the manifest)."""
    manifest: Mapping[str, Any] = run.manifest
    there = run.level_dirs()
    entries = [each for each in manifest.get("levels") or [] if each["index"] >= 0 and each["dir"] in there]
    entries.sort(key=lambda each: each["index"])
    levels = ((each, run.requests(each["dir"]), run.tokens(each["dir"])) for each in entries)
    summary = summarise_levels(manifest, levels, limits, method)
    summary["verdict"]["notes"][:0] = run.notes
    return summary


def summarise_levels(
    manifest: Mapping[str, Any],
    levels: Iterable[tuple[Mapping[str, Any], pa.Table, pa.Table]],
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
    marks = (slo.Mark(each["level"], each["slo"], each["latency_s"]["mean"]) for each in figures)
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
        "rules": {
            "percentiles": PERCENTILE_RULE
            if method == "nearest-rank"
            else "percentiles: linear interpolation",
            "window": WINDOW_RULE,
            "itl": ITL_RULE,
            "warmup": WARMUP_RULE,
        },
        "verdict": judged,
        "slo": asdict(limits),
        "levels_not_run": _not_run(manifest, figures),
        "levels": figures,
        "capacity": asdict(slo.capacity(marks)),
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
