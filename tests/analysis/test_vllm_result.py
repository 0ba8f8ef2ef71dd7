"""A level in the shape of vllm bench serve: read back, it is the vllm column, and nothing is left to explain."""

import json
from pathlib import Path
from typing import Any

import pytest

from fastload.analysis import reconcile, vllm_result
from fastload.analysis.reconcile_tools import VLLM
from fastload.trace.formats import known

MANIFEST = {
    "run_id": "20261130-secret-host",
    "created_utc": "2026-11-30T22:18:01.123456789Z",
    "simulated": True,
    "plan": {"endpoint": "chat"},
    "target": {"url": "http://secret-host:1", "model": "/srv/mallory/secret-model"},
}


@pytest.fixture
def requests(make: Any) -> list[Any]:
    """31 requests of two slots with a role and a finish event, and one that failed."""
    made = []
    for at in range(31):
        texts = [10 + at % 7 + 5 * step for step in range(3 + at % 3)]
        events = [make.event(6, 0, 0, 8), *(make.event(each, 1, 1, 8) for each in texts), make.event(40, 0, 0, 24)]
        columns = {"prompt_tokens": 20 + at, "connect_ns": 1_000_000 if at == 0 else None}
        made.append(make.request(50.0 * (at // 2), 50.0 * (at // 2) + 42, events, at % 2, columns=columns))
    failed = make.request(
        800, 810, [make.event(5, 0, 0, 8)], 1, status="reset", columns={"error": "no route to secret-host"}
    )
    return [*made, failed]


def written(make: Any, requests: list[Any], **more: Any) -> tuple[str, reconcile.Level]:
    table, tokens = make.tables(requests)
    # in two pieces, the later requests first: the order of the rows is that of the requests
    level = reconcile.read_level(table, [tokens.slice(9), tokens.slice(0, 9)])
    return "".join(vllm_result.write_json(level, table, MANIFEST, 2, **more)), level


def test_read_back_nothing_is_left_to_explain(make: Any, requests: list[Any], tmp_path: Path) -> None:
    text, level = written(make, requests)
    (tmp_path / "a.json").write_text(text)
    told = known.read(tmp_path / "a.json")
    assert (told.simulated, told.model, told.levels[0].level) == (True, "/srv/mallory/secret-model", 2)
    theirs = dict(told.levels[0].figures)
    theirs |= {name: {"value": theirs[name]} for name in reconcile.RATES}
    figures = reconcile.reconcile_level(level)["figures"]
    rows = reconcile.gaps_to(level, figures, VLLM, {name: theirs[name] for name in figures if theirs.get(name)})
    assert len(rows) == 4 * 4 + 2
    assert all(abs(row["rest"]) <= 1e-9 * row["theirs"] for row in rows)
    for name in ("ttft_ms", "itl_ms", "latency_s"):
        values = told.levels[0].samples[name]
        assert sum(values) / len(values) == pytest.approx(figures[name]["mean"]["vllm"]["value"])


def test_its_lists_belong_together(make: Any, requests: list[Any]) -> None:
    said = json.loads(written(make, requests)[0])
    assert (said["completed"], said["failed"], said["num_prompts"], said["max_concurrency"]) == (31, 1, 32, 2)
    assert {len(said[name]) for name in ("input_lens", "output_lens", "ttfts", "itls", "latencies", "errors")} == {32}
    assert said["total_input_tokens"] == sum(said["input_lens"]) == sum(20 + at for at in range(31))
    for at in range(31):
        assert said["output_lens"][at] == 3 + at % 3 == len(said["itls"][at]) - 1  # role and finish count as chunks
        assert said["ttfts"][at] == pytest.approx(0.006 + 0.001 * (at == 0))  # connecting is in its clock
        assert said["ttfts"][at] + sum(said["itls"][at]) == pytest.approx(said["latencies"][at])
        assert said["itls"][at][0] == pytest.approx((4 + at % 7) / 1000)
    assert (said["ttfts"][31], said["itls"][31], said["latencies"][31], said["output_lens"][31]) == (0, [], 0, 0)
    assert said["errors"][0] == "" and said["errors"][31] == "no route to secret-host"


def test_an_anonymous_one_names_nobody(make: Any, requests: list[Any]) -> None:
    text, _ = written(make, requests, anonymize=True)
    assert json.loads(text)["errors"][31] == "reset"
    for secret in ("secret", "mallory", "/srv/", "http"):
        assert secret not in text
    assert "secret-host" in written(make, requests)[0]  # else this test would prove nothing


def test_a_level_without_a_success(make: Any) -> None:
    said = json.loads(written(make, [make.request(0, 10, [], status="reset")])[0])
    assert (said["completed"], said["mean_ttft_ms"], said["output_throughput"], said["itls"]) == (0, None, None, [[]])
