"""`fastload calibrate`: a short real one, the self-test on doctored logs, and what is kept for later runs.

No absolute time is asserted: a busy machine changes figures, not counts.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastload.analysis.calibration import ENDED, RECEIVED
from fastload.cli import calibrate, groundtruth
from fastload.load import supervisor
from fastload.report import calibration as report

Run = Callable[..., Any]
QUICK = ("calibrate", "--levels", "1,4", "--osl", "16", "--step-ms", "5", "--rounds", "3")


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where calibrations are kept in these tests."""
    path = tmp_path / "state" / "calibration.json"
    monkeypatch.setenv("FASTLOAD_CALIBRATION", str(path))
    return path


def test_a_short_one(run: Run, kept: Path, tmp_path: Path) -> None:
    affinity = os.sched_getaffinity(0)
    ended = run(*QUICK, "--selftest", "--json", "--output", "result.json")
    assert ended.code == 0
    found = json.loads(ended.out)
    assert json.loads((tmp_path / "result.json").read_text()) == found
    assert found["simulated"] is True and "ground-truth server, simulated" in found["target"]
    assert "[SIMULATED]" in ended.err and str(kept) in ended.err

    assert [level["concurrency"] for level in found["levels"]] == [1, 4]
    for level in found["levels"]:
        concurrency = level["concurrency"]
        assert (level["measured"], level["failed"], level["unmatched"]) == (3 * concurrency, 0, 0)
        assert level["tokens"] == 16 * level["requests"] >= 16 * 3 * concurrency
        assert level["true_ttft_ms"]["mean"] >= 50 and level["step_ms"] == 5
        assert 0 < level["in_flight"] <= concurrency
        assert level["cpu_us_per_event"]["tree"] > level["cpu_us_per_event"]["measurer"] > 0
        assert level["others_share"] >= 0
        assert (level["wait_us_per_wake"] is None) is not Path("/proc/self/schedstat").exists()
        for name in ("kernel", "read"):
            stamp = level[name]["stamp_us"]
            assert 0 <= stamp["p50"] <= stamp["p99"] <= stamp["max"]
        assert level["kernel"]["stamp_us"]["p50"] <= level["read"]["stamp_us"]["p50"]
    checked = found["selftest"]
    assert checked["differences"] == [] and checked["tokens"] == 16 * checked["requests"]
    assert checked["requests"] >= sum(level["requests"] for level in found["levels"])  # a narrow level is run again
    assert os.sched_getaffinity(0) == affinity

    stored = kept.read_text()
    assert json.loads(stored)["hosts"] == {found["host"]["id"]: found}
    machine = Path("/etc/machine-id")
    if machine.exists() and machine.read_text().strip():
        assert machine.read_text().strip() not in stored
    known = calibrate.known()
    assert known is not None and known["verdict"] == report.sentence(found["verdict"])
    assert known["levels"][1] == {
        "concurrency": 4, **{name: found["levels"][1][name]["stamp_us"]["p99"] for name in ("kernel", "read")}
    }

    for width in (80, 120):
        text = report.plain(found, width)
        assert max(map(len, text.splitlines())) <= width
        for words in ("simulated", "verdict: with kernel stamps the client is", "self-test: passed", "loopback only"):
            assert words in " ".join(text.split())


def test_text_and_quiet(run: Run) -> None:
    ended = run("calibrate", "--levels", "2", "--osl", "2", "--step-ms", "5", "--rounds", "1", "--quiet")
    assert (ended.code, ended.err) == (0, "")
    assert "against fastload's own ground-truth server, simulated" in ended.out
    assert "kept for later runs of this host" in ended.out


def drop(records: Any) -> Any:
    at = int(np.flatnonzero(records["token"] == 3)[0])
    return np.delete(records, at)


def double(records: Any) -> Any:
    at = int(np.flatnonzero(records["token"] == 3)[0])
    return np.insert(records, at, records[at])


def swap(records: Any) -> Any:
    one = int(np.flatnonzero(records["token"] == 3)[0])
    other = int(np.flatnonzero((records["token"] == 4) & (records["request"] == records["request"][one]))[0])
    records[[one, other]] = records[[other, one]]
    return records


@pytest.mark.parametrize(
    ("doctor", "words"),
    [(drop, "token 3 missing"), (double, "token 3 more than once"), (swap, "records out of order")],
)
def test_the_selftest_names_what_is_wrong_in_a_log(
    run: Run, kept: Path, monkeypatch: pytest.MonkeyPatch, doctor: Callable[[Any], Any], words: str
) -> None:
    true_log = groundtruth.read_log

    def doctored(path: Path, since: int = 0) -> Any:
        records = true_log(path, since)
        whole = (records["token"] == RECEIVED).sum() == (records["token"] == ENDED).sum()
        return doctor(records.copy()) if since and whole and (records["token"] == 4).any() else records

    monkeypatch.setattr(groundtruth, "read_log", doctored)
    few = ("calibrate", "--levels", "2", "--osl", "8", "--step-ms", "5", "--rounds", "2", "--quiet")
    ended = run(*few, "--selftest")
    assert ended.code == 1
    assert "self-test: FAILED" in ended.out and words in ended.out and "not kept" in ended.out
    assert not kept.exists()


def test_read_stamps_by_order_are_judged_and_not_kept(run: Run, kept: Path) -> None:
    ended = run(*QUICK, "--stamp", "read", "--json")
    found = json.loads(ended.out)
    assert ended.code == 0 and found["verdict"]["kernel"] is None
    assert all(level["kernel"] is None and level["read"]["stamp_us"]["p99"] > 0 for level in found["levels"])
    assert "kernel stamps were not in use; with read stamps the client is" in report.plain(found)
    assert not kept.exists()


def test_a_host_without_kernel_stamps_is_judged_by_its_read_stamps(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = supervisor.LoadOptions
    monkeypatch.setattr(supervisor, "LoadOptions", lambda **given: options(**given | {"stamp": "read"}))
    ended = run(*QUICK, "--json")
    found = json.loads(ended.out)
    assert ended.code == 0 and found["verdict"]["kernel"] is None and found["verdict"]["read"] is not None
    assert any("kernel stamps (SO_TIMESTAMPNS) do not work here" in note for note in found["notes"])
    assert "kernel stamps were not in use" in report.plain(found)
    known = calibrate.known()
    assert known is not None and known["negligible"]["kernel"] is None
    assert [level["kernel"] for level in known["levels"]] == [None, None]


def test_saturate(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groundtruth, "SATURATE", (4, 200, 2))
    monkeypatch.setattr(groundtruth, "LADDER_CONCURRENCY", 2)
    monkeypatch.setattr(groundtruth, "LADDER_MS", (10.0,))
    monkeypatch.setattr(groundtruth, "LADDER_TOKENS", 8)
    ended = run("calibrate", "--levels", "1", "--osl", "4", "--step-ms", "5", "--rounds", "2", "--saturate", "--json")
    found = json.loads(ended.out)
    assert ended.code == 0
    top = found["saturate"]["unpaced"]
    assert (top["concurrency"], top["unmatched"]) == (4, 0) and top["events_per_s"] > 0
    assert found["saturate"]["limited_by"] in ("the client", "the server") and found["saturate"]["paced_end"]
    text = " ".join(report.plain(found).split())
    assert "saturated, c=4, server without pace" in text and "paced: " in text


def test_a_signal_ends_it_and_keeps_nothing(kept: Path) -> None:
    words = ["calibrate", "--levels", "2", "--rounds", "1000"]
    command = [sys.executable, "-P", "-c", "from fastload.cli import main; main()", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None and process.stdout is not None
        said = ""
        while "level 1/1" not in said:
            line = process.stderr.readline()
            assert line, f"it ended by itself: {said}"
            said += line
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
        assert "stopped by SIGINT; nothing is kept" in process.stderr.read()
        assert process.stdout.read() == ""
    assert not kept.exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--levels", "0"), "--levels 0: a level of 0 sends nothing"),
        (("--levels", "1,5000"), "--levels 5000: the ground-truth server takes up to 4096"),
        (("--osl", "1"), "--osl 1: out of range"),
        (("--step-ms", "0"), "--step-ms 0: out of range"),
        (("--rounds", "0"), "--rounds 0: out of range"),
        (("--stamp", "both"), "--stamp 'both': give kernel or read"),
        (("--cpu", "9999"), "--cpu 9999: not a CPU this process may use"),
        (("--server-cpu", "9999"), "--server-cpu 9999: not a CPU this process may use"),
        (("--output", "."), "--output '.': is not a file's name"),
        (("--output", "no\0where"), "--output 'no\\x00where': is not a file's name"),
    ],
)
def test_bad_input_is_one_line(run: Run, words: tuple[str, ...], told: str) -> None:
    ended = run("calibrate", *words)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith(f"fastload: {told}") and ended.err.count("\n") == 1


def test_levels_of_one_step_share_a_server() -> None:
    assert list(calibrate._by_step((1024, 4, 256, 4096), None)) == [(20.0, [4, 256]), (30.0, [1024]), (50.0, [4096])]
    assert list(calibrate._by_step((1024, 4), 7.0)) == [(7.0, [4, 1024])]
    planned = groundtruth.planned_levels([1, 4, 256, 1024], None)
    assert [(level.index, level.measured) for level in planned] == [(0, 12), (1, 16), (2, 1024), (3, 3072)]
    assert [level.measured for level in groundtruth.planned_levels([1, 4], 5)] == [5, 20]


# --- what later runs know ---------------------------------------------------------------------------------------------


def result(host: str) -> dict[str, Any]:
    level = {
        "concurrency": 8,
        "kernel": {"stamp_us": {"p99": 12.5}},
        "read": {"stamp_us": {"p99": 250.0}},
    }
    passed = {"concurrency": 8, "events_per_s": 400.0, "reasons": []}
    return {
        "created_utc": "2026-11-30T22:18:01Z",
        "fastload": "0",
        "cpu": 1,
        "target": calibrate.TARGET,
        "host": {"id": host},
        "levels": [level],
        "verdict": {"kernel": passed, "read": {"concurrency": None, "events_per_s": None, "reasons": ["c=8: so"]}},
    }


def test_known_is_the_short_form_of_this_host(kept: Path) -> None:
    told: list[str] = []
    assert calibrate.known(told.append) is None
    own = calibrate.identity()["id"]
    assert calibrate.keep_for_host(result("another")) == kept
    assert calibrate.known(told.append) is None
    assert len(told) == 1 and "is of another host" in told[0] and str(kept) in told[0]
    calibrate.keep_for_host(result(own))
    assert set(json.loads(kept.read_text())["hosts"]) == {"another", own}
    assert calibrate.known(told.append) == {
        "created_utc": "2026-11-30T22:18:01Z",
        "fastload": "0",
        "cpu": 1,
        "target": calibrate.TARGET,
        "verdict": "with kernel stamps the client is negligible up to c=8 (400 events/s); "
        "with read stamps the client is NOT negligible on this host",
        "negligible": {"kernel": 8, "read": None},
        "levels": [{"concurrency": 8, "kernel": 12.5, "read": 250.0}],
    }
    assert len(told) == 1


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": 99, "hosts": {}}', '{"schema": 1, "hosts": []}', "\xff"])
def test_a_broken_file_is_left_aside_with_one_notice(kept: Path, text: str) -> None:
    kept.parent.mkdir()
    kept.write_bytes(text.encode("latin-1"))
    told: list[str] = []
    assert calibrate.known(told.append) is None
    assert len(told) == 1 and "is broken, or of another version" in told[0]
    calibrate.keep_for_host(result(calibrate.identity()["id"]))  # and replaced
    assert calibrate.known(told.append) is not None and len(told) == 1


@pytest.mark.parametrize("broken", [None, {}, {"verdict": 3}, {"levels": [{}]}])
def test_a_broken_entry_too(kept: Path, broken: Any) -> None:
    kept.parent.mkdir()
    entry = result("x") | broken if isinstance(broken, dict) and broken else broken
    kept.write_text(json.dumps({"schema": 1, "hosts": {calibrate.identity()["id"]: entry}}))
    told: list[str] = []
    assert calibrate.known(told.append) is None and len(told) == 1


def test_where_it_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FASTLOAD_CALIBRATION")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert calibrate.place() == tmp_path / "fastload" / "calibration.json"
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert calibrate.place() == tmp_path / ".local" / "state" / "fastload" / "calibration.json"


def test_a_sweep_carries_it(run: Run, kept: Path, tmp_path: Path) -> None:
    calibrate.keep_for_host(result(calibrate.identity()["id"]))
    ended = run("sweep", "--levels", "1", "--num-requests", "2", "--osl", "4", "--quiet", "--output", "runs")
    assert ended.code == 0
    (manifest,) = tmp_path.glob("runs/*/manifest.json")
    assert json.loads(manifest.read_text())["calibration"] == calibrate.known()
    said = " ".join(ended.out.split())
    assert "calibrated on this host: stamp error P99" in said and "client negligible up to c=8" in said


def test_a_sweep_on_a_host_without_one(run: Run, tmp_path: Path) -> None:
    ended = run("sweep", "--levels", "1", "--num-requests", "2", "--osl", "4", "--quiet", "--output", "runs")
    assert ended.code == 0
    (manifest,) = tmp_path.glob("runs/*/manifest.json")
    assert json.loads(manifest.read_text())["calibration"] is None
    assert "stamp error not calibrated on this host" in " ".join(ended.out.split())
