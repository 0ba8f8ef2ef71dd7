"""Everything `fastload report` shows of one run or several, as JSON values: the arithmetic is done here, once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from fastload.analysis import anomalies, capacity, slo, speculation
from fastload.analysis.configuration import Configuration
from fastload.analysis.slo import Slo

RELATIVE = "for relative comparison"
"""Stands under every number of users: it rests on one workload and an assumed think time."""

LOW_N_RULE = "low n: fewer than 29 requests: no 95 % interval of P90 exists"


def overview(
    configurations: Sequence[Configuration], limits: Slo, think_time_s: float = slo.THINK_TIME_S
) -> dict[str, Any]:
    """Return the report of configurations, which were read with these limits.

    {"configurations": [{"name", "low_n": [levels], "decoding": {level: streams}, .. of the summary}], "limits",
    "convention", "think_time_s", "slo": `capacity.matrix`, "capacity": `capacity.capacities`, "speculation":
    `speculation.speculation`, "speculation_unpaired": [names], "anomalies": [{"kind", "configuration", "levels",
    "figures"}], "rules"}. Strict JSON: null where a figure does not exist.
    """
    found = anomalies.anomalies(configurations, limits)
    return {
        "simulated": any(one.simulated for one in configurations),
        "configurations": [_configuration(one) for one in configurations],
        "limits": asdict(limits),
        "convention": asdict(limits.rules),
        "think_time_s": think_time_s,
        "slo": capacity.matrix(configurations, limits),
        "capacity": capacity.capacities(configurations, limits, think_time_s) | {"note": RELATIVE},
        "speculation": speculation.speculation(configurations, limits.rules),
        "speculation_unpaired": speculation.unpaired(configurations),
        "anomalies": [{**asdict(fact), "levels": list(fact.levels)} for fact in found],
        "rules": rules(limits, think_time_s),
    }


def _configuration(one: Configuration) -> dict[str, Any]:
    return {
        "name": one.short_name,
        "imported": one.manifest.get("imported"),
        "low_n": [at.level for at in one.levels.values() if capacity.low_n(at.figures, "ttft_ms", "p90")],
        "decoding": {str(at.level): speculation.decoding_at_once(at) for at in one.levels.values()},
        **{key: value for key, value in one.summary.items() if key not in ("name", "slo", "capacity")},
    }


def rules(limits: Slo, think_time_s: float) -> dict[str, str]:
    """Return the definitions that this report used, by subject."""
    convention = limits.rules
    tail = "mean" if limits.percentile == "mean" else limits.percentile.upper()
    if limits.percentile != "mean":
        low = convention.tps_tail == "low"
        tail += (
            f" (TPS: what {limits.percentile.removeprefix('p')} % of users get at least)"
            if low
            else " (TPS: the upper tail, as the source took it)"
        )
    failures = (
        "failed requests count as the worst; a level passes only if complete and at most 1 % failed"
        if convention.failures_count
        else "failed requests are left out"
    )
    level = "it and every lower level pass" if convention.c_max == "unbroken" else "it passes"
    how = "to nearest" if convention.users_rounding == "nearest" else "cut"
    return {
        "slo": f"limits at {tail}; {failures}",
        "users": (
            f"users = c_max x (1 + {think_time_s:g} s / {convention.users_latency} latency at c_max), {how};"
            f" c_max: the highest level such that {level}; {RELATIVE}"
        ),
        "limits": (
            "why: 1 s is the limit of an unbroken flow of thought (Miller 1968, Nielsen); 15 tok/s is the upper limit"
            " of visual reading, about 700 words a minute (Rayner et al. 2016); 45 s of think time is reading plus"
            " writing"
        ),
        "rates": (
            "RPS all and out: counted over one window a level; RPS 1/L = 1 / mean latency and TPSxc = mean TPS x c are"
            " the source report's, one stream's rate and an overstatement when requests differ"
        ),
        "speculation": speculation.RULE,
        "decoding": "streams decoding at once = c (L - TTFT) / L by means: where it stops growing, the engine queues",
        "low_n": LOW_N_RULE,
    }
