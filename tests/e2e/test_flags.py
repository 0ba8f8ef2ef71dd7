"""What the flags of a sweep do to the run that comes out."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

SHORT = ["--levels", "1", "--num-requests", "2", "--osl", "4"]


def summary_of(run: Any) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((run.path / "summary.json").read_text())
    return summary


def test_duration_ends_a_level(fastload: Any, quick: str, tmp_path: Path, the_run: Any) -> None:
    ended = fastload("sweep", "--url", quick, "--levels", "1,3", "--duration", "1s", "--osl", "16")
    assert ended.ran, ended.err
    run = the_run(tmp_path / "results")
    for level, plan in zip(summary_of(run)["levels"], run.manifest["plan"]["levels"], strict=True):
        assert level["complete"] and level["measured"] == level["ok"] > 5
        assert level["measured_planned"] is None and plan["duration_s"] == 1.0
        assert level["window_s"] == pytest.approx(1.0, rel=0.5)
    rows = run.requests().to_pylist()
    assert {row["status"] for row in rows} == {"ok"}  # awaited, not cut off
    assert sorted(row["request"] for row in rows) == list(range(len(rows)))


def test_num_requests_and_warmup(fastload: Any, quick: str, tmp_path: Path, the_run: Any) -> None:
    words = ["--levels", "2,4", "--num-prompts", "9", "--warmup", "5", "--osl", "4", "--ignore-eos"]
    ended = fastload("sweep", "--url", quick, *words)
    assert ended.ran, ended.err
    run = the_run(tmp_path / "results")
    for level, name in ((2, "00-c2"), (4, "01-c4")):
        rows = sorted(run.requests(name).to_pylist(), key=lambda row: row["sent_ns"])
        assert [row["role"] for row in rows].count("measured") == 9
        assert [row["role"] for row in rows[:5]] == ["warmup"] * 5
        # handed over without draining: the first measured one leaves while warm-ups are still out
        assert rows[5]["sent_ns"] < max(row["done_ns"] for row in rows[:5])
        assert len(rows) < 9 + 5 + level
    for measured in summary_of(run)["levels"]:
        assert measured["measured"] == 9
    assert run.manifest["plan"]["ignore_eos"] is True


def test_a_seed_gives_the_same_prompts_and_none_gives_new_ones(
    start: Any, quick: str, tmp_path: Path, the_run: Any, ran: Any
) -> None:
    seeds = {"a": ["--seed", "7"], "b": ["--seed", "7"], "c": [], "d": []}
    runs = {name: start("sweep", "--url", quick, *SHORT, *seed, "--output", name) for name, seed in seeds.items()}
    sent = {}
    for name, process in runs.items():
        _, err = process.communicate(timeout=40)
        assert ran(process.returncode, err), err
        run = the_run(tmp_path / name)
        # The trace keeps no prompts; their bytes tell them apart well enough.
        sizes = run.requests().sort_by("request").column("request_bytes").to_pylist()
        sent[name] = (run.manifest["plan"]["seed"], sizes)
    assert sent["a"] == sent["b"] and sent["a"][0] == 7
    assert len({sent[name][0] for name in "acd"}) == 3  # drawn anew, and recorded
    assert sent["a"][1] != sent["c"][1] != sent["d"][1]


def test_the_recorded_plan_gives_the_prompts_again(sim_url: Any) -> None:
    """No two prompts of a run are alike, and the seed alone decides them."""
    from fastload import plan
    from fastload.load.target import open_target, token_counter

    target = open_target(sim_url(), None, None, {}, None, "chat", lambda text: None)
    count, exact = token_counter(target, "chat", None, {})

    def prompts(seed: int) -> list[str]:
        lengths = plan.fit(count, 64, seed, exact)
        return [lengths.prompt(request) for request in range(500)]

    first = prompts(7)
    assert first == prompts(7) and len(set(first)) == 500
    assert not set(first) & set(prompts(8))


def test_runs_of_one_second_get_directories_of_their_own(start: Any, quick: str, tmp_path: Path, ran: Any) -> None:
    """Bug report D01."""
    both = [start("sweep", "--url", quick, *SHORT, "--name", "twin") for _ in range(3)]
    for process in both:
        _, err = process.communicate(timeout=40)
        assert ran(process.returncode, err), err
    names = sorted(path.name for path in (tmp_path / "results").iterdir())
    assert len(names) == 3
    for name in names:
        manifest = json.loads((tmp_path / "results" / name / "manifest.json").read_text())
        assert manifest["run_id"] == name and manifest["status"] == "complete"


def test_an_output_with_spaces_and_other_letters(fastload: Any, quick: str, tmp_path: Path, the_run: Any) -> None:
    place = "my results/ölçüm 测试 'q'"
    ended = fastload("sweep", "--url", quick, *SHORT, "--output", place, "--label", "yer=İstanbul 测")
    assert ended.ran, ended.err
    run = the_run(tmp_path / place)
    assert summary_of(run)["target"]["labels"] == {"yer": "İstanbul 测"} and place in ended.out
    assert len(run.requests("00-c1")) == 2


def test_an_ascii_locale_is_no_obstacle(fastload: Any, quick: str, tmp_path: Path, the_run: Any) -> None:
    env = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    ended = fastload("sweep", "--url", quick, *SHORT, "--label", "gpu=H200", env=env)
    assert ended.ran, ended.err
    assert the_run(tmp_path / "results").manifest["target"]["labels"] == {"gpu": "H200"}


def test_times_are_utc_wherever_one_is(fastload: Any, quick: str, tmp_path: Path, the_run: Any) -> None:
    """Bug report D12: with zone, and start and end named."""
    ended = fastload("sweep", "--url", quick, *SHORT, env={"TZ": "Asia/Kolkata"})
    assert ended.ran, ended.err
    run = the_run(tmp_path / "results")
    manifest = run.manifest
    created = manifest["created_utc"]
    assert created.endswith("Z") and re.sub(r"[-:]", "", created)[:15] == run.path.name[:15]
    begun = datetime.fromisoformat(created)
    assert abs((datetime.now(UTC) - begun).total_seconds()) < 60
    for row in run.requests().to_pylist():
        assert 0 <= (row["sent_utc"] - begun).total_seconds() < 60
    first, last = (anchor["utc_ns"] for anchor in manifest["clock"]["anchors"])
    assert begun.timestamp() <= first / 1e9 <= last / 1e9
    assert all(line.split()[0].endswith("Z") for line in (run.path / "run.log").read_text().splitlines())


def test_the_summary_stays_small_and_has_no_prompts(fastload: Any, sim_url: Any, tmp_path: Path, the_run: Any) -> None:
    """Bug report D05: long prompts in, none of them out."""
    url = sim_url(ttft_ms=5, step_ms=2, max_model_len=40_000)
    words = ["--levels", "4", "--num-requests", "20", "--isl", "20000", "--osl", "4", "--save-text"]
    ended = fastload("sweep", "--url", url, *words)
    assert ended.ran, ended.err
    run = the_run(tmp_path / "results")
    assert min(run.requests()["request_bytes"].to_pylist()) > 80_000
    files = {path: path.stat().st_size for path in run.path.rglob("*") if path.is_file()}
    assert files[run.path / "summary.json"] < 200_000 and sum(files.values()) < 1_000_000


def test_quiet_and_names_that_every_file_system_takes(sim_run: Any, fastload: Any, quick: str, tmp_path: Path) -> None:
    """Bug report D14."""
    ended = fastload("sweep", "--url", quick, *SHORT, "--output", "r", "--quiet")
    assert ended.ran and "verdict" in ended.out
    assert [line for line in ended.err.splitlines() if "the run is invalid" not in line] == []  # --quiet
    for path in [*sim_run.path.parent.rglob("*"), *(tmp_path / "r").rglob("*")]:
        assert not set('\\/:*?"<>|') & set(path.name) and not path.name.endswith((".", " ")), path
