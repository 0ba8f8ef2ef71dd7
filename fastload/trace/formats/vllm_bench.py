"""Result files of `vllm bench serve`: --save-result, --save-detailed, and --append-result (one object a line).

Times are seconds in its lists and ms in its figures. Its figures are by its own definitions (see `fastload reconcile`):
its TTFT may be that of the role event, its "ITL" is the gap between chunks.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from fastload.trace.formats.told import (
    Told,
    ToldLevel,
    bad,
    number,
    numbers,
    read_bytes,
    read_object,
    whole,
)

TOOL: Final = "vllm"

# Its name of a distribution, ours, and the factor from its ms.
_DISTRIBUTIONS: Final = (
    ("ttft", "ttft_ms", 1.0),
    ("tpot", "itl_ms", 1.0),
    ("itl", "icl_ms", 1.0),
    ("e2el", "latency_s", 1e-3),
)
_TOTALS: Final = (("prompt_tokens_mean", "total_input_tokens"), ("completion_tokens_mean", "total_output_tokens"))
_FACTS: Final = (
    *("date", "backend", "endpoint_type", "tokenizer_id", "num_prompts", "request_rate", "burstiness", "label"),
    *("spec_decode_acceptance_rate", "spec_decode_acceptance_length"),
)


def recognises(fields: Mapping[str, Any]) -> bool:
    """Say whether an object is a result of vllm bench serve."""
    return {"completed", "duration", "max_concurrency"} <= fields.keys()


def read(file: Path) -> Told:
    """Read a result file. PlanError, naming file and field, for one that is not what it should be."""
    content = read_bytes(file)
    lines = [line for line in content.splitlines() if line.strip()]
    one = len(lines) == 1 or not lines[0].rstrip().endswith(b"}")
    texts = [("", content)] if one else [(f"line {at}: ", line) for at, line in enumerate(lines, 1)]
    levels: list[ToldLevel] = []
    objects = [(where, read_object(file, text, where)) for where, text in texts]
    for where, fields in objects:
        if not recognises(fields):
            raise bad(file, f"{where}is no result of vllm bench serve: it lacks completed, duration or max_concurrency")
        levels.append(_level(file, fields))
    if len({level.level for level in levels}) < len(levels):
        raise bad(file, "has two results of one concurrency; keep one of them")
    first = objects[0][1]
    own = first.get("fastload")
    return Told(
        tool=TOOL,
        file=file.name,
        model=str(first["model_id"]) if first.get("model_id") else None,
        levels=tuple(sorted(levels, key=lambda level: level.level)),
        facts={name: first[name] for name in _FACTS if first.get(name) is not None},
        simulated=bool(own.get("simulated")) if isinstance(own, dict) else None,
    )


def _level(file: Path, fields: Mapping[str, Any]) -> ToldLevel:
    completed = whole(file, "completed", fields.get("completed"), needed=True)
    failed = whole(file, "failed", fields.get("failed"))
    figures: dict[str, Any] = {
        "ok": completed,
        "failed": failed,
        "measured": None if failed is None else (completed or 0) + failed,
        "window_s": number(file, "duration", fields.get("duration"), needed=True),
        "aggregate_tok_s": number(file, "output_throughput", fields.get("output_throughput")),
        "system_rps": number(file, "request_throughput", fields.get("request_throughput")),
    }
    for ours, theirs in _TOTALS:
        total = number(file, theirs, fields.get(theirs))
        figures[ours] = total / completed if total is not None and completed else None
    for theirs, ours, factor in _DISTRIBUTIONS:
        figures[ours] = _distribution(file, theirs, factor, fields, completed)
    return ToldLevel(_concurrency(file, fields), figures, _samples(file, fields))


def _concurrency(file: Path, fields: Mapping[str, Any]) -> int:
    """Return the load. Without --max-concurrency all requests went at once, or at a rate, which is no concurrency."""
    concurrency = whole(file, "max_concurrency", fields.get("max_concurrency"), lowest=1)
    if concurrency is not None:
        return concurrency
    if fields.get("request_rate") in (None, "inf"):
        return whole(file, "num_prompts", fields.get("num_prompts"), needed=True, lowest=1) or 1
    rate = fields["request_rate"]
    raise bad(file, f"field 'max_concurrency' is null: the load was a rate ({rate} requests/s), not a concurrency")


def _distribution(
    file: Path, name: str, factor: float, fields: Mapping[str, Any], completed: int | None
) -> dict[str, float | None] | None:
    """Return what the file tells of a distribution; None where it tells nothing of it."""
    keys = {"mean": f"mean_{name}_ms", "p50": f"median_{name}_ms"} | {
        f"p{percent}": f"p{percent}_{name}_ms" for percent in (10, 90, 99)
    }
    told = {ours: number(file, key, fields.get(key)) for ours, key in keys.items()}
    if all(value is None for value in told.values()):
        return None
    # vllm counts requests; how many gaps there were it does not say
    n = None if name == "itl" else completed
    return {ours: None if value is None else value * factor for ours, value in told.items()} | {"n": n}


def _samples(file: Path, fields: Mapping[str, Any]) -> dict[str, list[float]]:
    """Return the values per request of a detailed file, of those that succeeded (a failed one has latency 0)."""
    latencies, ttfts = (numbers(file, name, fields.get(name)) for name in ("latencies", "ttfts"))
    counts = numbers(file, "output_lens", fields.get("output_lens"))
    found: dict[str, list[float]] = {}
    if latencies is not None:
        found["latency_s"] = [each for each in latencies if each > 0]
    if latencies is None or ttfts is None or counts is None:
        return found
    if not len(latencies) == len(ttfts) == len(counts):
        lengths = f"{len(latencies)}, {len(ttfts)} and {len(counts)}"
        raise bad(file, f"fields 'latencies', 'ttfts' and 'output_lens' have {lengths} entries")
    good = [(each, first, n) for each, first, n in zip(latencies, ttfts, counts, strict=True) if each > 0]
    found["ttft_ms"] = [first * 1e3 for _, first, _ in good]
    found["itl_ms"] = [(each - first) * 1e3 / (n - 1) for each, first, n in good if n > 1]
    found["tps"] = [n / each for each, _, n in good]
    return found
