"""A run that was cut off: what was there is found and said, once, whoever opens it and however it was cut."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from written import begun, facts, two_answers

from fastload import _timing
from fastload.errors import TraceError
from fastload.load import identity
from fastload.trace import open_run, recovery, schema, writer


def cut_off(output: Path, recording: Any) -> Path:
    """A run whose supervisor died in its second level, with half a file left."""
    run = begun(output, (0, 1))
    run.add_block(two_answers(recording))
    run.end_level(facts(0, 1))
    run.begin_level(1, 8, lambda request: None, 64)
    run.add_block(two_answers(recording, 1, 2))
    run.finished(1)
    run._flush(run._levels[1])  # a part inside the level, by age
    (run.path / "tokens/01-c8/part-001.parquet").write_bytes(b"")
    (run.path / "requests/01-c8/part-001.parquet.tmp").write_bytes(b"PAR1half")
    dead = subprocess.Popen([sys.executable, "-P", "-c", ""])
    dead.wait()
    run.update_manifest(supervisor={**identity.own_process(), "pid": dead.pid})
    return run.path


def test_a_crash_is_finished_and_said(tmp_path: Path, recording: Any) -> None:
    path = cut_off(tmp_path, recording)
    run = open_run(path)
    assert run.manifest["status"] == "crashed"
    said = "\n".join(run.notes)
    assert "supervisor ended without closing it" in said
    assert "level 01-c8 has no end: 2 requests were saved of it" in said
    assert "half-written file left by a crash, ignored: requests/01-c8/part-001.parquet.tmp" in said
    assert "tokens without their requests, ignored: tokens/01-c8/part-001.parquet" in said
    assert run.requests()["request"].to_pylist() == run.tokens()["request"].to_pylist() == [0, 1, 2, 3]
    levels: Any = run.manifest["levels"]
    assert [(level["dir"], level["complete"], level["measured_done"]) for level in levels] == [
        ("00-c1", True, 2),
        ("01-c8", False, 2),
    ]
    assert not list(path.rglob("*.tmp"))
    assert "opened: the run was cut off" in (path / "run.log").read_text()
    assert open_run(path).manifest == run.manifest


def test_a_crash_is_only_said_where_nothing_may_be_written(tmp_path: Path, recording: Any) -> None:
    path = cut_off(tmp_path, recording)
    before = sorted((one, one.stat().st_mtime_ns) for one in path.rglob("*"))
    run = open_run(path, repair=False)
    assert run.manifest["status"] == "crashed"
    assert sorted((one, one.stat().st_mtime_ns) for one in path.rglob("*")) == before


def test_a_level_the_manifest_does_not_know(tmp_path: Path, recording: Any) -> None:
    path = cut_off(tmp_path, recording)
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**manifest, "levels": None}))
    levels: Any = open_run(path).manifest["levels"]
    assert [(level["index"], level["concurrency"], level["dir"]) for level in levels] == [
        (0, 1, "00-c1"),
        (1, 8, "01-c8"),
    ]


def test_a_living_run_is_left_alone(tmp_path: Path, recording: Any) -> None:
    run = begun(tmp_path, (0, 1))
    run.add_block(two_answers(recording))
    leftover = run.path / "requests/00-c1/part-000.parquet.tmp"
    leftover.write_bytes(b"")
    opened = open_run(run.path)
    assert opened.notes == ("this run is still being written",)
    assert opened.manifest["status"] == "running"
    assert leftover.exists()
    assert opened.requests().num_rows == 0
    assert opened.requests().schema.names == [name for name, *_ in schema.REQUESTS_COLUMNS]


def test_a_run_of_another_host_is_not_judged(tmp_path: Path, recording: Any) -> None:
    path = cut_off(tmp_path, recording)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["supervisor"]["host"] = "elsewhere"
    (path / "manifest.json").write_text(json.dumps(manifest))
    run = open_run(path)
    assert run.notes == ("this run was being written on elsewhere: whether it still is cannot be told here",)
    (path / "progress.json").write_text("{}")
    os.utime(path / "progress.json", ns=(0, _timing.realtime_ns() - 90 * 10**9))
    assert re.search(r"cannot be told here; its last sign of life is 9\d s old$", open_run(path).notes[0])
    assert run.manifest["status"] == "running"
    assert run.requests().num_rows == 4


def requests_of(run: Any) -> list[int]:
    """Numbers of the requests, which must be those of their events."""
    numbers: list[int] = run.requests()["request"].to_pylist()
    assert run.tokens()["request"].to_pylist() == numbers
    return numbers


def alter(path: Path, **keys: object) -> None:
    """Set keys of the manifest."""
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | keys))


def without_name(part: Path) -> None:
    """As if its writer had been killed before the renaming."""
    part.rename(part.with_name(part.name + writer.TEMPORARY))


def test_what_was_said_of_a_crash_is_said_again(tmp_path: Path, recording: Any) -> None:
    path = cut_off(tmp_path, recording)
    first, second = open_run(path), open_run(path)
    assert first.notes == second.notes and len(set(first.notes)) == len(first.notes) >= 4
    assert (path / "run.log").read_text().count("the run was cut off") == 1


def test_openers_at_once(tmp_path: Path, recording: Any) -> None:
    """Each sees the same run, whoever is first; the directory is put in order once."""
    path = cut_off(tmp_path, recording)
    (path / "requests/01-c8/part-001.parquet.tmp").unlink()
    shutil.copy(path / "requests/01-c8/part-000.parquet", path / "requests/01-c8/part-001.parquet.tmp")
    shutil.copy(path / "tokens/01-c8/part-000.parquet", path / "tokens/01-c8/part-001.parquet")
    together, found = threading.Barrier(8), []

    def open_it() -> None:
        together.wait()
        run = open_run(path)
        found.append((run.manifest, run.notes, requests_of(run)))

    openers = [threading.Thread(target=open_it) for _ in range(8)]
    for opener in openers:
        opener.start()
    for opener in openers:
        opener.join()
    assert len(found) == 8 and all(one == found[0] for one in found)
    assert found[0][2] == [0, 1, 2, 3, 2, 3]
    assert (path / "run.log").read_text().count("the run was cut off") == 1
    assert not list(path.rglob("*.tmp"))


def test_another_process_that_puts_it_in_order_is_waited_for_but_not_forever(
    tmp_path: Path, recording: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = cut_off(tmp_path, recording)
    monkeypatch.setattr(recovery, "LOCK_NS", 10_000_000)
    with recovery.alone(path) as first, recovery.alone(path) as second:
        assert (first, second) == (True, False)
        assert open_run(path).manifest["status"] == "crashed"  # read, and nothing written
        assert json.loads((path / "manifest.json").read_text())["status"] == "running"
    open_run(path)
    assert json.loads((path / "manifest.json").read_text())["status"] == "crashed"


@pytest.mark.parametrize("who", ["another with its pid", "nobody but its exit code"])
def test_a_supervisor_that_is_gone(who: str, tmp_path: Path, recording: Any) -> None:
    path = cut_off(tmp_path, recording)
    own = identity.own_process()
    child = subprocess.Popen([sys.executable, "-P", "-c", "input()"], stdin=subprocess.PIPE)
    try:
        started = identity.process_start(child.pid)
        assert started is not None
        alter(path, supervisor={**own, "pid": child.pid, "start": started})
        assert open_run(path).manifest["status"] == "running"
        if who == "another with its pid":
            alter(path, supervisor={**own, "pid": child.pid, "start": started - 1})
        else:
            child.kill()
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # dead, and not yet waited for
        assert open_run(path).manifest["status"] == "crashed"
    finally:
        child.kill()
        child.communicate()


def test_a_boot_ago(tmp_path: Path, recording: Any) -> None:
    path = cut_off(tmp_path, recording)
    alter(path, supervisor={**identity.own_process(), "boot": "another"})
    assert open_run(path).manifest["status"] == "crashed"


@pytest.mark.parametrize("left", [[], ["manifest.json.tmp"]])
def test_killed_before_its_manifest(left: list[str], tmp_path: Path) -> None:
    path = tmp_path / "20261130T221801Z-a"
    path.mkdir()
    for name in left:
        (path / name).write_text('{"schema"')
    with pytest.raises(TraceError, match="had not begun, and nothing of it is to be had"):
        open_run(path)


def test_killed_during_the_warm_up_or_between_levels(tmp_path: Path, recording: Any) -> None:
    plan = {"levels": [{"concurrency": 1}, {"concurrency": 8}, {"concurrency": 64}]}
    for ended in (0, 1):
        path = cut_off(tmp_path, recording)
        levels = json.loads((path / "manifest.json").read_text())["levels"]
        shutil.rmtree(path / "requests/01-c8")
        shutil.rmtree(path / "tokens/01-c8")
        if not ended:
            shutil.rmtree(path / "requests/00-c1")
            shutil.rmtree(path / "tokens/00-c1")
            (path / "requests/warmup").mkdir()
        alter(path, levels=levels[:ended], plan=plan)
        run = open_run(path)
        assert requests_of(run) == [0, 1] * ended
        missing = "8, 64" if ended else "1, 8, 64"
        assert f"levels that had not begun: {missing}" in run.notes
        assert any("level warmup has no end: 0 requests" in note for note in run.notes) is not bool(ended)


def test_what_the_display_had_seen_and_is_not_there(tmp_path: Path, recording: Any) -> None:
    path = cut_off(tmp_path, recording)
    (path / "progress.json").write_text(json.dumps({"level": 1, "done": 17}))
    assert any(
        "level 01-c8 has no end: 2 requests were saved of it; 15 more had been done, and are lost" == note
        for note in open_run(path).notes
    )


@pytest.mark.parametrize("tokens", ["named", "not yet"])
def test_a_part_that_was_whole_gets_its_name(tokens: str, tmp_path: Path, recording: Any) -> None:
    path = cut_off(tmp_path, recording)
    without_name(path / "requests/01-c8/part-000.parquet")
    if tokens == "not yet":
        without_name(path / "tokens/01-c8/part-000.parquet")
    run = open_run(path)
    named = "a part that was whole and had no name yet was named: requests/01-c8/part-000.parquet"
    assert (named in run.notes) is (tokens == "named")
    assert requests_of(run) == ([0, 1, 2, 3] if tokens == "named" else [0, 1])
    assert not list(path.rglob("*.tmp"))


def test_a_whole_part_of_another_boot_is_not_trusted(tmp_path: Path, recording: Any) -> None:
    """A file that was not synced may have its end and lack its middle after a power failure."""
    path = cut_off(tmp_path, recording)
    without_name(path / "requests/01-c8/part-000.parquet")
    alter(path, supervisor={**identity.own_process(), "boot": "another"})
    assert requests_of(open_run(path)) == [0, 1]


@pytest.mark.parametrize("kind", ["requests", "tokens"])
def test_a_corrupt_part_is_set_aside_and_the_rest_is_read(kind: str, tmp_path: Path, recording: Any) -> None:
    path = cut_off(tmp_path, recording)
    shutil.copy(path / "requests/01-c8/part-000.parquet", path / "requests/01-c8/part-002.parquet")
    shutil.copy(path / "tokens/01-c8/part-000.parquet", path / "tokens/01-c8/part-002.parquet")
    (path / kind / "01-c8/part-000.parquet").write_bytes(b"PAR1")
    seen = open_run(path, repair=False)
    assert (kind == "tokens") or any(f"corrupt file: {kind}/01-c8/part-000.parquet" in note for note in seen.notes)
    run = open_run(path)
    assert "corrupt part, set aside as part-000.parquet.corrupt: level 01-c8" in run.notes
    assert run.manifest["status"] == "crashed" and requests_of(run) == [0, 1, 2, 3]
    assert sorted(one.name for one in (path / kind / "01-c8").glob("*.corrupt")) == ["part-000.parquet.corrupt"]


def test_rows_that_could_not_be_written_are_said(tmp_path: Path, recording: Any) -> None:
    run = begun(tmp_path, (0, 1))
    run.add_block(two_answers(recording))
    (run.path / "tokens/00-c1").rmdir()
    with pytest.raises(TraceError, match="2 rows are not on disk"):
        run.close("complete")
    opened = open_run(run.path)
    assert opened.manifest["status"] == "failed" and opened.notes == ("level 00-c1: 2 rows could not be written",)
