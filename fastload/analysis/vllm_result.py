"""A level as the result file of `vllm bench serve --save-detailed`: its keys, and its definitions of every figure.

So what reads such files gets what vllm would have written, had its client our stamps: the figures are those of the vllm
column of `fastload reconcile`, not those of our own tables.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from fastload.analysis import rows
from fastload.analysis.reconcile import Level, accepted, ends, rate, sample
from fastload.analysis.reconcile_tools import VLLM
from fastload.analysis.rows import NULL, Bools, Floats, Ints

_BY = VLLM.definition
_PERCENTILES = (50, 90, 99)
_DISTRIBUTIONS = {"ttft": ("ttft_ms", 1), "tpot": ("itl_ms", 1), "itl": ("icl_ms", 1), "e2el": ("latency_s", 1000)}
"""vllm's name of a distribution, ours, and the factor to its ms."""


def write_json(
    level: Level, requests: pa.Table, manifest: Mapping[str, Any], concurrency: int, *, anonymize: bool = False
) -> Iterator[str]:
    """Yield the JSON text of one level, in pieces. `requests` are all its rows, as they were read into `level`.

    `anonymize`: no model, label, run or message of an error. Texts are not in it in either case.
    """
    head = _head(level, manifest, concurrency, anonymize)
    good = _good(level)
    reading = level.readings[_BY.chunks]
    prompts = np.where(good, np.maximum(rows.ints(requests, "prompt_tokens")[level.at], 0), 0)
    outputs = np.where(good, np.maximum(level.completion, 0), 0)
    head |= {"total_input_tokens": int(prompts.sum()), "total_output_tokens": int(outputs.sum())}
    yield json.dumps(head, ensure_ascii=False, allow_nan=False)[:-1]
    yield from _array("input_lens", prompts.tolist())
    yield from _array("output_lens", outputs.tolist())
    yield from _array("ttfts", np.where(good, (reading.first + level.connect) / 1e9, 0.0).tolist())
    yield from _gaps(level, good)
    yield from _array("latencies", np.where(good, (ends(level, _BY) + level.connect) / 1e9, 0.0).tolist())
    yield from _array("start_times", ((level.sent - level.connect) / 1e9).tolist())
    errors = requests.column("status" if anonymize else "error").take(pa.array(level.at)).to_pylist()
    yield from _array("errors", ["" if fine else str(one or "") for fine, one in zip(good, errors, strict=True)])
    yield "}\n"


def _head(level: Level, manifest: Mapping[str, Any], concurrency: int, anonymize: bool) -> dict[str, Any]:
    """Return everything that is one value."""
    good = _good(level)
    plan, target = manifest.get("plan") or {}, manifest.get("target") or {}
    count = int(good.sum())
    throughput, requests = (rate(level, name, _BY) for name in ("aggregate_tok_s", "system_rps"))
    shape = "openai-chat" if plan.get("endpoint") == "chat" else "openai"
    own = {"definitions": "vllm bench serve", "simulated": bool(manifest.get("simulated"))}
    head: dict[str, Any] = {
        "date": str(manifest.get("created_utc") or "")[:19],
        "endpoint_type": shape,
        "backend": shape,
        "label": None,
        "model_id": None if anonymize else target.get("model"),
        "tokenizer_id": None,
        "num_prompts": len(level.sent),
        "request_rate": "inf",
        "burstiness": 1.0,
        "max_concurrency": concurrency,
        "duration": count / requests if requests else None,
        "completed": count,
        "failed": len(level.sent) - count,
        "request_throughput": requests,
        "request_goodput": None,
        "output_throughput": throughput,
        "fastload": own if anonymize else own | {"run_id": manifest.get("run_id")},
    }
    for name, (figure, factor) in _DISTRIBUTIONS.items():
        values = sample(level, figure, _BY) * factor
        head |= _described(name, values)
    return head


def _good(level: Level) -> Bools:
    """Say which requests vllm would call successful: a chunk came."""
    good: Bools = accepted(level, _BY) & (level.readings[_BY.chunks].last != NULL)
    return good


def _described(name: str, values: Floats) -> dict[str, float | None]:
    """Return a distribution under vllm's keys, its percentiles interpolated as numpy does."""
    if not len(values):
        names = ("mean", "median", "std", *(f"p{one}" for one in _PERCENTILES))
        return {f"{one}_{name}_ms": None for one in names}
    told = {"mean": values.mean(), "median": np.median(values), "std": values.std()}
    told |= {f"p{one}": np.percentile(values, one) for one in _PERCENTILES}
    return {f"{one}_{name}_ms": float(value) for one, value in told.items()}


def _gaps(level: Level, good: Bools) -> Iterator[str]:
    """Yield the gaps of each request in the order of the others, in seconds."""
    start, stop = np.zeros(level.rows, np.int64), np.zeros(level.rows, np.int64)
    piece_of = np.full(level.rows, NULL, np.int64)
    pieces = level.readings[_BY.chunks].gaps
    for number, (row, _) in enumerate(pieces):
        begins: Ints = np.flatnonzero(np.diff(row, prepend=NULL))
        owner = row[begins]
        start[owner], stop[owner], piece_of[owner] = begins, np.append(begins[1:], len(row)), number
    yield ', "itls": ['
    for at, (row, fine) in enumerate(zip(level.at.tolist(), good.tolist(), strict=True)):
        known = fine and piece_of[row] != NULL
        gaps = (pieces[piece_of[row]][1][start[row] : stop[row]] / 1e3).tolist() if known else []
        yield (", " if at else "") + json.dumps(gaps)
    yield "]"


def _array(name: str, values: list[Any]) -> Iterator[str]:
    yield f", {json.dumps(name)}: {json.dumps(values, ensure_ascii=False, allow_nan=False)}"
