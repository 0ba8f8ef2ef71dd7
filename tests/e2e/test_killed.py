"""The real server dies in the middle of a sweep and comes back: the run goes on, and does not look good."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

WORDS = ["--levels", "2,16", "--num-requests", "400", "--osl", "48", "--isl", "24", "--seed", "5"]


@pytest.mark.limit(120)
def test_llama_cpp_is_killed_and_started_again(
    start: Any, llama_process: Callable[..., Any], tmp_path: Path, until: Any, the_run: Any
) -> None:
    url, server = llama_process(parallel=16)
    sweep = start("sweep", "--url", url, *WORDS)

    def in_the_middle() -> bool:
        (path,) = tmp_path.glob("results/*/progress.json")
        shown = json.loads(path.read_text())
        return bool(shown["level"] == 1 and shown["done"] > 40)

    until(lambda: list(tmp_path.glob("results/*/progress.json")))
    until(in_the_middle)
    server.kill()
    server.wait()
    time.sleep(3)
    llama_process(parallel=16, port=int(url.rpartition(":")[2]))
    out, err = sweep.communicate(timeout=90)
    assert "Traceback" not in err

    run = the_run(tmp_path / "results")
    assert run.manifest["status"] == "complete"  # the run went on
    rows = run.requests().sort_by("request").to_pylist()
    assert [row["request"] for row in rows] == list(range(len(rows)))  # every prompt once: none lost, none doubled
    first, second = ([row for row in rows if row["level"] == level] for level in (2, 16))
    assert {row["status"] for row in first} == {"ok"}
    failed = Counter(row["status"] for row in second if row["status"] != "ok")
    assert set(failed) <= {"reset", "truncated", "connect"} and failed["connect"] and len(failed) > 1
    # who was on the wire failed once, and what could not be sent did not use up the plan
    assert 0 < failed["reset"] + failed["truncated"] <= 2 * 16
    measured = [row for row in second if row["role"] == "measured"]
    assert sum(row["status"] != "connect" for row in measured) == 400
    last_refused = max(row["done_ns"] for row in second if row["status"] == "connect")
    assert sum(row["status"] == "ok" and row["sent_ns"] > last_refused for row in second) > 100
    tokens = run.tokens("01-c16")
    assert sorted(tokens["request"].to_pylist()) == [row["request"] for row in second]

    assert sweep.returncode == 1
    level = json.loads((run.path / "summary.json").read_text())["levels"][1]
    assert level["complete"] and level["failed"] == sum(row["status"] != "ok" for row in measured)
    assert "requests failed in a row so far; the last: connect: Connection refused" in err
    assert "requests succeed again" in err
    last = err.splitlines()[-1]
    assert last.startswith("fastload: the run is invalid: ")
    assert "connections could not be had, the server was away" in last
