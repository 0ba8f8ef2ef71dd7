"""`watch` on run directories made by hand: which run is meant, what is read of it, and how it says that it ended."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest

from fastload import _timing
from fastload.cli import display, signals, watch
from fastload.cli.watch import Look
from fastload.errors import PlanError, TraceError
from fastload.load import identity
from fastload.load.progress import Progress

NOW = Progress(1, 8, 3, "measuring", 12, 40, 1, 8, 99, 50.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, {"reset": 1})
BEFORE = dataclasses.replace(NOW, level=0, concurrency=4, done=30, failed=0, errors={})


def written(place: Path, name: str, created: str = "", **manifest: object) -> Path:
    """A run directory with a manifest."""
    path = place / name
    path.mkdir(parents=True)
    (path / "manifest.json").write_text(json.dumps({"schema": 1, "created_utc": created} | manifest))
    return path


def state(**more: object) -> dict[str, object]:
    """progress.json of a run in its second level."""
    known = {"status": "running", "finished": [dataclasses.asdict(BEFORE)], "simulated": True}
    return dataclasses.asdict(NOW) | known | more


def test_the_run_itself_and_the_newest_of_several(tmp_path: Path) -> None:
    one = written(tmp_path, "20261130T221801Z-b", "2026-11-30T22:18:01.5Z")
    assert watch.find(str(one)) == (one, None)
    assert watch.find(str(tmp_path)) == (one, None)
    written(tmp_path, "20261129T000000Z-z", "2026-11-29T00:00:00.9Z")
    (tmp_path / "20261231T000000Z-empty").mkdir()
    (tmp_path / "notes.txt").write_text("")
    newest = written(tmp_path, "20261130T221801Z-a", "2026-11-30T22:18:01.7Z")  # of the same second
    path, said = watch.find(str(tmp_path))
    assert path == newest and said == f"{tmp_path} holds 3 runs; this is the newest: {newest.name}"


@pytest.mark.parametrize("run", ["nothing", "file", "empty", "a\0b"])
def test_no_run_there(run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    with pytest.raises(PlanError, match="^RUN .*; give a run's directory, or the one above it, such as results$"):
        watch.find(run)


def test_levels_that_ended_unseen_are_shown_too() -> None:
    class Shown(display.Silent):
        def __init__(self) -> None:
            self.states: list[Progress] = []

        def show(self, progress: Progress) -> None:
            self.states.append(progress)

    shown = Shown()
    teller = watch.Teller(shown)
    teller.take(state())
    assert shown.states == [BEFORE, NOW] and shown.simulated
    third = dataclasses.replace(NOW, level=2)
    teller.take(state(**dataclasses.asdict(third), finished=[dataclasses.asdict(BEFORE), dataclasses.asdict(NOW)]))
    assert shown.states == [BEFORE, NOW, NOW, third]
    teller.take({})  # the file was not there
    assert len(shown.states) == 4


def test_another_version_of_progress() -> None:
    finished, now = watch.states(state(new_field=1))
    assert (finished, now) == ([BEFORE], NOW)
    older = state()
    del older["errors"]
    assert watch.states(older)[1] == dataclasses.replace(NOW, errors={})
    with pytest.raises(TraceError, match=r"progress.json is of another version"):
        watch.states({"level": 1})


@pytest.mark.parametrize(
    ("look", "code"),
    [
        (Look(Path(), "running", {}), 0),
        (Look(Path(), "running", {}, over=True), 1),  # nobody knows what became of it
        (Look(Path(), "complete", {"status": "complete", "exit_code": 0}, over=True), 0),
        (Look(Path(), "complete", {"status": "complete", "exit_code": 1}, over=True), 1),  # invalid
        (Look(Path(), "interrupted", {"status": "interrupted", "exit_code": 130}, over=True), 1),
        (Look(Path(), "crashed", {"status": "running", "exit_code": None}, over=True), 1),
        (Look(Path(), "complete", {}, over=True, summary={"verdict": {"status": "suspect"}}), 0),
        (Look(Path(), "complete", {}, over=True, summary={"verdict": {"status": "invalid"}}), 1),
        (Look(Path(), "complete", {}, over=True), 1),
    ],
)
def test_exit_codes(look: Look, code: int) -> None:
    assert look.exit_code == code
    assert json.loads(look.as_line())["status"] == look.status


def follow(path: Path, brake: Any, monkeypatch: pytest.MonkeyPatch, each: Any) -> tuple[list[Look], list[str]]:
    """What `follow` yields and says; `each` is called in place of each pause, with its number."""
    monkeypatch.setattr(watch.os, "nice", lambda by: 0)
    pauses = iter(range(1000))
    monkeypatch.setattr(watch.time, "sleep", lambda s: each(next(pauses)))
    said: list[str] = []
    return list(watch.follow(path, brake, said.append)), said


def test_a_silent_run_is_noted_once_and_a_signal_ends_the_watching(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, "20261130T221801Z-a", status="running", supervisor=identity.own_process())
    brake = signals.Brake()
    progress = path / "progress.json"

    def each(pause: int) -> None:
        if pause in (0, 4):
            progress.write_text(json.dumps(state(done=pause)))
        if pause in (1, 5):
            long_ago = _timing.realtime_ns() - 20 * 10**9
            os.utime(progress, ns=(long_ago, long_ago))
        if pause == 7:
            brake.signum = 2

    looks, said = follow(path, brake, monkeypatch, each)
    assert [look.state.get("done") for look in looks] == [None, 0, 4]
    assert not any(look.over for look in looks)
    assert len(said) == 2 and all("suspended, or its disk takes no more" in one for one in said)
    assert sorted(one.name for one in path.iterdir()) == ["manifest.json", "progress.json"]


def test_a_run_of_another_host_is_followed_until_it_is_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = identity.own_process() | {"host": "elsewhere"}
    path = written(tmp_path, "20261130T221801Z-a", status="running", supervisor=elsewhere)
    progress = path / "progress.json"

    def each(pause: int) -> None:
        progress.write_text(json.dumps(state(done=pause)))
        if pause == 2:
            long_ago = _timing.realtime_ns() - 90 * 10**9
            os.utime(progress, ns=(long_ago, long_ago))

    looks, _ = follow(path, signals.Brake(), monkeypatch, each)
    assert [look.state.get("done") for look in looks] == [None, 0, 1, 2]
    assert [look.over for look in looks] == [False, False, False, True]
    last = looks[-1]
    assert last.status == "running" and last.exit_code == 1 and "cannot be told here" in last.notes[0]
    assert "cannot be told here" in watch._end(last).faults[0]
    assert json.loads((path / "manifest.json").read_text())["status"] == "running"
