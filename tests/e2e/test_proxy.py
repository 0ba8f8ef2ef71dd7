"""Sweeps through a relay that cuts, delays, repeats and collects what the server says."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.with_name("load")))

from proxy import Meddle, collects, cuts, delays, dribbles, meddling, once, passes, repeats  # noqa: E402

OSL = 12
SHORT = ["--levels", "4", "--num-requests", "24", "--osl", str(OSL), "--isl", "12"]


@pytest.fixture
def through(fastload: Any, quick: str, tmp_path: Path, the_run: Any) -> Callable[..., tuple[Any, Any, list[Any]]]:
    """`through(meddle, *flags)` sweeps the simulated engine through a relay that meddles with the level's answers, or
    only with those on each `every`th connection: how the sweep ended, the run, the level's rows."""

    def begun() -> bool:
        return any(tmp_path.glob("results/*/requests/00-c4"))

    def sweep(meddle: Meddle, *flags: str, every: int = 1) -> tuple[Any, Any, list[Any]]:
        def fate(connection: int) -> Meddle:
            return once(begun, meddle) if connection % every == 0 else passes

        with meddling(int(quick.rpartition(":")[2]), fate) as relay:
            ended = fastload("sweep", "--url", f"http://127.0.0.1:{relay.port}", *SHORT, *flags)
        run = the_run(tmp_path / "results")
        rows = run.requests("00-c4").sort_by("request").to_pylist()
        assert [row["request"] for row in rows] == list(range(1, len(rows) + 1))
        return ended, run, rows

    return sweep


@pytest.mark.parametrize(
    ("meddle", "status"), [(cuts(2000), "truncated"), (cuts(2000, reset=True), "reset")], ids=["cut", "reset"]
)
def test_connections_that_are_cut(meddle: Meddle, status: str, through: Any) -> None:
    """Each second one, somewhere in an answer: those answers fail, and as many are measured as planned."""
    _, _, rows = through(meddle, every=2)
    failed = [row for row in rows if row["status"] != "ok"]
    assert failed and {row["status"] for row in failed} == {status}
    for row in failed:
        assert 0 < row["events"] < OSL and row["first_token_ns"] is not None and row["ttft_ms"] is None
    assert sum(row["role"] == "measured" for row in rows) == 24
    assert {row["completion_tokens"] for row in rows if row["status"] == "ok"} == {OSL}


def test_what_is_held_back_is_late_and_whole(through: Any) -> None:
    held = 0.03
    _, _, rows = through(delays(held))
    assert {row["status"] for row in rows} == {"ok"}
    for row in rows:
        assert row["ttft_ms"] >= held * 1000 and row["completion_tokens"] == OSL


def test_bytes_that_come_one_by_one_are_the_same_answer(through: Any) -> None:
    _, run, rows = through(dribbles(1))
    assert {(row["status"], row["completion_tokens"], row["text_events"]) for row in rows} == {("ok", OSL, OSL)}
    (warm_up,) = run.requests("warmup").to_pylist()
    assert {row["events"] for row in rows} == {warm_up["events"]}


def test_an_event_that_comes_twice_is_no_token_more(through: Any) -> None:
    _, _, rows = through(repeats(lambda piece: piece, 1200))
    doubled = [row for row in rows if row["text_events"] == OSL + 1]
    assert doubled and {row["status"] for row in rows} == {"ok"}
    assert {row["completion_tokens"] for row in rows} == {OSL}  # the server's count stands


def test_a_piece_that_comes_twice_breaks_the_message(through: Any) -> None:
    _, _, rows = through(repeats(lambda piece: piece[-40:], 1200))
    failed = [row for row in rows if row["status"] != "ok"]
    assert failed and {row["status"] for row in failed} == {"malformed_event"}
    assert all("chunk size" in row["error"] for row in failed)


def test_a_gateway_that_collects_is_named(through: Any) -> None:
    """Bug report W60: 16 KB are collected before any of it is passed on."""
    _, run, rows = through(collects(16384), "--osl", "150")
    assert {row["status"] for row in rows} == {"ok"}
    assert {row["completion_tokens"] for row in rows} == {150}
    notes = run.manifest["verdict"]["notes"]
    assert any(note.startswith("WARNING: events come in bursts") for note in notes), notes
    assert all(row["coalesced"] > 100 for row in rows)
