"""The API key goes to the server and nowhere else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

KEY = "sk-e2e-4f1d0c2b9a"


def test_the_key_is_in_no_file_and_no_command_line(
    start: Any, llama_factory: Any, children: Any, until: Any, tmp_path: Path, the_run: Any
) -> None:
    url = llama_factory(api_key=KEY)
    words = ["--levels", "1,4", "--duration", "1s", "--isl", "32", "--osl", "32", "--save-text"]
    process = start("sweep", "--url", url, *words, env={"FASTLOAD_API_KEY": KEY})
    until(lambda: any("measurer" in line for line in children(process.pid).values()))
    until(lambda: list(tmp_path.glob("results/*/requests/00-c1")))
    lines = children(process.pid)
    lines[process.pid] = Path(f"/proc/{process.pid}/cmdline").read_bytes().decode()
    out, err = process.communicate(timeout=50)
    assert process.returncode in (0, 1), err  # 1: a busy machine may spoil the load, not the secret
    assert [line for line in lines.values() if KEY in line] == []
    assert KEY not in out and KEY not in err
    run = the_run(tmp_path / "results")
    assert {row["status"] for row in run.requests().to_pylist() if row["role"] == "measured"} <= {"ok", "cancelled"}
    assert "ok" in run.requests()["status"].to_pylist()
    files = [path for path in run.path.rglob("*") if path.is_file()]
    assert len(files) > 5
    assert [path for path in files if KEY.encode() in path.read_bytes()] == []
    # Parquet packs its pages: look into the values too.
    assert KEY not in str(run.requests().to_pylist()) and KEY not in str(run.tokens().to_pylist())
    assert not [path for path in tmp_path.rglob("*") if KEY in path.name]


def test_a_typed_key_is_masked_in_the_manifest(fastload: Any, quick: str, tmp_path: Path, the_run: Any) -> None:
    words = ["--levels", "1", "--num-requests", "2", "--osl", "4", "--header", f"X-Secret={KEY}"]
    ended = fastload("sweep", "--url", quick, *words, "--api-key", KEY)
    assert ended.ran and "warning" in ended.err and KEY not in ended.err + ended.out
    run = the_run(tmp_path / "results")
    assert "***" in run.manifest["command"] and run.manifest["target"]["headers"] == ["X-Secret"]
    for path in run.path.rglob("*"):
        assert path.is_dir() or KEY.encode() not in path.read_bytes()
