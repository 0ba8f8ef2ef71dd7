"""Faults and speed through the main job: a sweep of the profile engine, in another process, over sockets."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

START = "import sys; from fastload.cli import main; sys.exit(main())"


def sweep(tmp_path: Path, wishes: dict[str, object]) -> dict[str, Any]:
    command = [sys.executable, "-P", "-c", START, "sweep", "--target", "sim:vllm-direct", "--sim-speed", "20"]
    command += ["--quiet", "--levels", "4", "--num-requests", "40", "--osl", "16", "--json", "--output", str(tmp_path)]
    command += ["--extra-body", json.dumps({"sim": wishes})]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, cwd=tmp_path)
    assert done.returncode in (0, 1), done.stderr
    summary = json.loads(done.stdout)
    assert isinstance(summary, dict)
    return summary


@pytest.mark.parametrize(
    ("fault", "error"),
    [("reset", "reset"), ("truncate", "truncated"), ("error", "stream_error"), ("429", "http_status")],
)
def test_the_share_of_requests_asked_for_fails_as_asked(tmp_path: Path, fault: str, error: str) -> None:
    summary = sweep(tmp_path, {"fault": fault, "share": 0.1, "after_tokens": 3})
    (level,) = summary["levels"]
    assert set(level["errors"]) == {error} and level["errors"][error] in (3, 4, 5)
    assert level["ok"] + level["failed"] == 40


def test_a_faster_engine_says_so_everywhere(tmp_path: Path) -> None:
    summary = sweep(tmp_path, {})
    assert summary["simulated"] is True
    assert summary["target"]["model"] == "fastload-sim-vllm-direct-x20"
    assert summary["target"]["labels"] == {"simulated": "x20"}
