"""Result files of AIPerf: profile_export_aiperf.json, and profile_export.jsonl (one request a line) beside it.

Its figures are by its own definitions (see `fastload reconcile`). Tokens are those it counted with its own tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from fastload.trace.formats.told import Told, ToldLevel, bad, number, read_bytes, read_object, whole

TOOL: Final = "aiperf"
SUMMARY: Final = "profile_export_aiperf.json"
RECORDS: Final = "profile_export.jsonl"

# Its name of a distribution, ours, its unit, and the factor to ours.
_DISTRIBUTIONS: Final = (
    ("time_to_first_token", "ttft_ms", "ms", 1.0),
    ("time_to_first_output_token", "ttfa_ms", "ms", 1.0),
    ("inter_token_latency", "itl_ms", "ms", 1.0),
    ("inter_chunk_latency", "icl_ms", "ms", 1.0),
    ("e2e_output_token_throughput", "tps", "tokens/sec/user", 1.0),
    ("output_token_throughput_per_user", "decode_tps", "tokens/sec/user", 1.0),
    ("request_latency", "latency_s", "ms", 1e-3),
)
_SCALARS: Final = (
    ("output_token_throughput", "aggregate_tok_s"),
    ("request_throughput", "system_rps"),
    ("benchmark_duration", "window_s"),
    ("input_sequence_length", "prompt_tokens_mean"),
    ("output_sequence_length", "completion_tokens_mean"),
    ("effective_concurrency", "in_flight_mean"),
)


def recognises(fields: Mapping[str, Any]) -> bool:
    """Say whether an object is a summary, or a record, of AIPerf."""
    return "aiperf_version" in fields or {"metadata", "metrics"} <= fields.keys()


def read(file: Path) -> Told:
    """Read a summary, with the records beside it where there are any; or the records, with the summary beside them.

    PlanError, naming file and field, for one that is not what it should be; for records without a summary, which alone
    tells the concurrency.
    """
    if file.suffix == ".jsonl":
        summary = file.with_name(SUMMARY)
        if not summary.is_file():
            raise bad(file, f"does not tell the concurrency: {SUMMARY} must stand beside it")
        return _told(summary, file)
    records = file.with_name(RECORDS)
    return _told(file, records if records.is_file() else None)


def _told(file: Path, records: Path | None) -> Told:
    fields = read_object(file, read_bytes(file))
    if not recognises(fields):
        raise bad(file, "is no result of AIPerf: it lacks 'aiperf_version'")
    config = fields.get("input_config") if isinstance(fields.get("input_config"), dict) else {}
    assert isinstance(config, dict)
    completed = _scalar(file, "completed_request_count", fields)
    if completed is None:
        completed = _scalar(file, "request_count", fields)
    figures: dict[str, Any] = {ours: _scalar(file, theirs, fields) for theirs, ours in _SCALARS}
    figures["ok"] = None if completed is None else int(completed)
    failed = _scalar(file, "error_request_count", fields)
    if failed is None and fields.get("error_summary") == []:
        failed = 0.0
    figures["failed"] = None if failed is None else int(failed)
    figures["measured"] = None if completed is None or failed is None else int(completed + failed)
    for theirs, ours, unit, factor in _DISTRIBUTIONS:
        figures[ours] = _distribution(file, theirs, unit, factor, fields)
    level = ToldLevel(_concurrency(file, config), figures, {} if records is None else _samples(records))
    return Told(TOOL, file.name, _model(config), (level,), _facts(fields, config))


def _scalar(file: Path, name: str, fields: Mapping[str, Any]) -> float | None:
    metric = fields.get(name)
    if metric is None:
        return None
    if not isinstance(metric, dict):
        raise bad(file, f"field {name!r} is not an object with 'avg'")
    return number(file, f"{name}.avg", metric.get("avg"))


def _distribution(
    file: Path, name: str, unit: str, factor: float, fields: Mapping[str, Any]
) -> dict[str, float | None] | None:
    """Return what the summary tells of a distribution; None where it has none."""
    metric = fields.get(name)
    if metric is None:
        return None
    if not isinstance(metric, dict) or metric.get("unit") != unit:
        raise bad(file, f"field {name!r} is not an object in {unit}")
    told = {ours: number(file, f"{name}.{key}", metric.get(key)) for ours, key in (("mean", "avg"), *_PERCENTILES)}
    scaled = {ours: None if value is None else value * factor for ours, value in told.items()}
    return scaled | {"n": whole(file, f"{name}.count", metric.get("count"))}


_PERCENTILES: Final = tuple((name, name) for name in ("p10", "p50", "p90", "p99"))


def _concurrency(file: Path, config: Mapping[str, Any]) -> int:
    """Return the concurrency of the profiling phase. It stands in `phases` now, and stood in `loadgen` before."""
    phases = config.get("phases")
    for phase in phases if isinstance(phases, list) else ():
        if isinstance(phase, dict) and phase.get("kind", phase.get("name")) == "profiling" and "concurrency" in phase:
            return whole(file, "input_config.phases.concurrency", phase["concurrency"], needed=True, lowest=1) or 1
    older = config.get("loadgen")
    if isinstance(older, dict) and older.get("concurrency") is not None:
        return whole(file, "input_config.loadgen.concurrency", older["concurrency"], needed=True, lowest=1) or 1
    raise bad(file, "field 'input_config' tells no concurrency: it was not a load of one")


def _model(config: Mapping[str, Any]) -> str | None:
    models = config.get("models")
    items = models.get("items") if isinstance(models, dict) else None
    if isinstance(items, list) and items and isinstance(items[0], dict):
        return str(items[0].get("name") or "") or None
    return None


def _facts(fields: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what it says of itself; its URLs and paths stay out."""
    endpoint = config.get("endpoint") if isinstance(config.get("endpoint"), dict) else {}
    assert isinstance(endpoint, dict)
    named = {
        "aiperf_version": fields.get("aiperf_version"),
        "date": fields.get("start_time"),
        "endpoint_type": endpoint.get("type"),
        "streaming": endpoint.get("streaming"),
        "was_cancelled": fields.get("was_cancelled"),
    }
    return {name: value for name, value in named.items() if value is not None}


def _samples(file: Path) -> dict[str, list[float]]:
    """Return the values per request of the records: those that were measured, without those that failed."""
    found: dict[str, list[float]] = {ours: [] for _, ours, _, _ in _DISTRIBUTIONS if ours != "icl_ms"}
    for at, line in enumerate(read_bytes(file).splitlines(), 1):
        if not line.strip():
            continue
        record = read_object(file, line, f"line {at}: ")
        metadata, metrics = record.get("metadata"), record.get("metrics")
        if not isinstance(metadata, dict) or not isinstance(metrics, dict):
            raise bad(file, f"line {at}: lacks 'metadata' or 'metrics'")
        if metadata.get("benchmark_phase", "profiling") != "profiling" or record.get("error") is not None:
            continue
        for theirs, ours, unit, factor in _DISTRIBUTIONS:
            metric = metrics.get(theirs)
            if ours == "icl_ms" or metric is None:
                continue
            if not isinstance(metric, dict) or metric.get("unit") != unit:
                raise bad(file, f"line {at}: field {theirs!r} is not an object in {unit}")
            value = number(file, f"line {at}: {theirs}.value", metric.get("value"), needed=True)
            found[ours].append((value or 0.0) * factor)
    return {name: values for name, values in found.items() if values}
