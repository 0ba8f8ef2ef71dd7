"""One sweep a fault: the rows and the class it makes, what the run says of it, and how the process ends."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fastload import cli, open_run

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.with_name("load")))

from adversity import FAULTS, Fault, refusal  # noqa: E402
from api import api  # noqa: E402
from scripted import Call, serve  # noqa: E402

Sweep = Callable[..., "tuple[int, str, str]"]
SHORT = ("--osl", "3", "--isl", "12")


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Sweep:
    """`sweep("--url", ...)` runs one in this process: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main(["sweep", *SHORT, *words])
        out, err = capfd.readouterr()
        return int(ended.value.code or 0), out, err

    return run


def the_run(tmp_path: Path) -> Any:
    (path,) = (tmp_path / "results").iterdir()
    return open_run(path)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault(name: str, sweep: Sweep, tmp_path: Path) -> None:
    """Now and then at the first level, which goes on; always at the second, after which no third is tried."""
    fault: Fault = FAULTS[name]
    failed: set[int] = set()

    def failing(call: Call, number: int) -> bool:
        if number % 4 == 2 or any(tmp_path.glob("results/*/requests/01-c3")):
            failed.add(number)
        return number in failed

    with serve(api(fault.script, failing)) as server:
        words = ["--levels", "2,3,4", "--num-requests", "9", *fault.flags]
        code, _, err = sweep("--url", f"http://127.0.0.1:{server.port}", *words)
    assert "Traceback" not in err
    run = the_run(tmp_path)
    rows = run.requests().sort_by("request").to_pylist()
    assert [row["request"] for row in rows] == list(range(len(rows)))  # every prompt once, none left out
    first, *later = json.loads((run.path / "summary.json").read_text())["levels"]
    assert first["complete"] and first["measured"] == 9
    if fault.status == "ok":
        assert {row["status"] for row in rows} == {"ok"}
        hit = [row for row in rows if all(row[column] == value for column, value in fault.columns)]
        assert len(hit) >= len(failed) > 0
        assert len(later) == 2 and run.manifest["status"] == "complete"
        assert not any("failed" in reason for reason in run.manifest["verdict"]["reasons"])
        return

    hit = [row for row in rows if row["status"] != "ok"]
    assert {row["status"] for row in hit} == {fault.status} and len(hit) == len(failed)
    for row in hit:
        assert fault.error in row["error"]
        for column, value in fault.columns:
            # a connection just made for the request cannot be stale
            assert row[column] == value or (column == "attempt" and row["connect_ns"] is not None), (column, row)
    measured = [row for row in hit if row["level"] == 2 and row["role"] == "measured"]
    assert first["failed"] == len(measured) > 0 and first["errors"] == {fault.status: len(measured)}
    (second,) = later
    assert second["measured"] == second["failed"] == 9 and second["errors"] == {fault.status: 9}
    assert code == 1 and run.manifest["status"] == "failed"
    last = err.splitlines()[-1]
    assert last.startswith("fastload: level 3: all 9 measured requests failed; the last: ")
    assert "level 4 was not tried" in last
    assert "c=3: all 9 measured requests failed" in "; ".join(run.manifest["verdict"]["reasons"])


@pytest.mark.parametrize("flag", [[], ["--respect-retry-after"]], ids=["not asked", "asked"])
def test_a_server_that_asks_to_be_left_alone(flag: list[str], sweep: Sweep, tmp_path: Path) -> None:
    """Each third request meets a 429: its stream goes on at once, or after what the server said."""
    busy = refusal(429, b"Retry-After-Ms: 120")
    with serve(api(lambda call: call.finish(busy), lambda call, number: number % 3 == 2)) as server:
        words = ["--levels", "1", "--num-requests", "9", *flag]
        sweep("--url", f"http://127.0.0.1:{server.port}", *words)
    rows = the_run(tmp_path).requests("00-c1").sort_by("request").to_pylist()
    refused = [at for at, row in enumerate(rows) if row["status"] == "http_status"]
    assert len(refused) == 3 and {rows[at]["retry_after_s"] for at in refused} == {0.12}
    after = {at + 1 for at in refused}
    assert [row["backoff_ms"] for row in rows] == [120 if flag and at in after else 0 for at in range(len(rows))]
