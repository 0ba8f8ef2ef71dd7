"""A run on disk: written, opened with our reader and with other tools, cut off, damaged."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import duckdb
import pandas
import polars
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from written import MS, SENT, begun, facts, two_answers, whole_run

from fastload import _timing as t
from fastload.errors import PlanError, TraceError
from fastload.trace import open_run, schema, writer
from fastload.trace.layout import level_dir, level_dirs, number_of
from fastload.trace.writer import create_run

SCHEMA_MD = Path(schema.__file__).with_name("SCHEMA.md")


def test_a_run_directory(tmp_path: Path, recording: Any) -> None:
    run = whole_run(tmp_path / "made" / "for it", recording)
    run.log("level 1\ndone")
    run.progress({"done": 1})
    files = sorted(str(path.relative_to(run.path)) for path in run.path.rglob("*") if path.is_file())
    parts = [f"{kind}/{level}/part-000.parquet" for kind in ("requests", "tokens") for level in LEVELS]
    assert files == sorted(["manifest.json", "progress.json", "run.log", *parts])
    assert re.fullmatch(r"\d{8}T\d{6}Z-test", run.run_id)
    assert run.path.name == run.run_id
    manifest = json.loads((run.path / "manifest.json").read_text())
    assert set(manifest) == set(writer.MANIFEST_KEYS)
    expected = {"schema": 1, "definitions": 1, "run_id": run.run_id, "name": "test", "status": "complete"}
    assert expected.items() <= manifest.items()
    assert (manifest["verdict"], manifest["simulated"], manifest["calibration"]) == ("valid", True, None)
    assert [(level["index"], level["dir"]) for level in manifest["levels"]] == [
        (-1, "warmup"),
        (0, "00-c1"),
        (1, "01-c8"),
    ]
    told = dataclasses.asdict(facts(1, 8)) | {"dir": "01-c8", "instrument": {"gc_pauses": 0, "lost_events": 0}}
    assert manifest["levels"][2] == told
    assert json.loads((run.path / "progress.json").read_text()) == {"done": 1}
    assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{9}Z level 1", (run.path / "run.log").read_text())


LEVELS = ("warmup", "00-c1", "01-c8")


def test_a_run_opened(tmp_path: Path, recording: Any) -> None:
    run = open_run(whole_run(tmp_path, recording).path)
    assert run.notes == ()
    assert run.manifest["status"] == "complete"
    assert run.level_dirs() == LEVELS
    requests, tokens = run.requests(), run.tokens()
    assert requests["request"].to_pylist() == tokens["request"].to_pylist() == [0, 1, 2, 3, 4, 5]
    assert requests["level"].to_pylist() == [0, 0, 1, 1, 8, 8]
    assert requests["prompt_tokens_planned"].to_pylist() == [32, 32, 32, 32, None, None]
    assert run.requests("01-c8")["request"].to_pylist() == [4, 5]
    assert run.tokens("01-c8")["tokens"].to_pylist() == [[0, 1, 1, 1, 0, 0, 0], [0, 1, 1, 0, 0, 0]]
    with pytest.raises(TraceError, match=r"no level 09-c9; it has: warmup, 00-c1, 01-c8"):
        run.requests("09-c9")


def test_every_column_of_the_contract_has_a_unit_and_a_description(tmp_path: Path, recording: Any) -> None:
    path = whole_run(tmp_path, recording).path
    for kind, columns in (("requests", schema.REQUESTS_COLUMNS), ("tokens", schema.TOKENS_COLUMNS)):
        found = pq.read_schema(path / kind / "00-c1" / "part-000.parquet")
        assert found.metadata[b"fastload_schema"] == b"1"
        assert found.metadata[b"definitions"] == b"1"
        assert found.metadata[b"run_id"] == path.name.encode()
        assert found.names == [name for name, *_ in columns]
        assert all(field.metadata[b"description"] for field in found)
        assert {name: found.field(name).metadata[b"unit"].decode() for name, *_ in columns} == {
            name: unit for name, _, unit, _ in columns
        }
        for name, *_ in columns:
            assert f"| `{name}` |" in SCHEMA_MD.read_text(), f"{name} is not in SCHEMA.md"


def test_nanoseconds_survive_in_every_tool(tmp_path: Path, recording: Any) -> None:
    path = whole_run(tmp_path, recording).path
    requests, tokens = f"{path}/requests/00-c1/part-000.parquet", f"{path}/tokens/00-c1/part-000.parquet"
    offset = int(pq.read_schema(requests).metadata[b"utc_offset_ns"])
    sent_us = (SENT + offset) // 1000

    table = pq.read_table(requests)
    assert table["sent_ns"].to_pylist() == [SENT, SENT + 7]
    assert table["sent_utc"].cast(pa.int64())[0].as_py() == sent_us
    assert pq.read_table(tokens)["event_ns"].to_pylist()[0][1:4] == [60 * MS, 80 * MS, 100 * MS]

    sql = duckdb.connect()
    sql.execute("set timezone = 'UTC'")
    found = sql.sql(f"select sent_ns, epoch_us(sent_utc), status, ttft_ms from '{requests}' order by request")
    assert found.fetchall()[0] == (SENT, sent_us, "ok", 60.0)
    glob = f"{path}/tokens/*/*.parquet"
    found = sql.sql(f"select event_ns[2], tokens, channel, flags from '{glob}' where request = 2")
    assert found.fetchall() == [
        (60 * MS, [0, 1, 1, 1, 0, 0, 0], [0, 1, 1, 1, 0, 0, 16], [8, 8, 8, 8, 24, 32, 0])
    ]

    frame = polars.read_parquet(requests)
    assert frame["sent_ns"].to_list() == [SENT, SENT + 7]
    assert frame["sent_utc"].dt.timestamp("us")[0] == sent_us
    assert polars.read_parquet(tokens)["tokens"].list.sum().to_list() == [3, 2]

    panda = pandas.read_parquet(requests)
    assert panda["sent_ns"].tolist() == [SENT, SENT + 7]
    assert panda["sent_utc"][0] == pandas.Timestamp(sent_us, unit="us", tz="UTC")
    assert pandas.read_parquet(tokens)["tokens"][0].tolist() == [0, 1, 1, 1, 0, 0, 0]


def test_the_examples_in_schema_md_run(tmp_path: Path, recording: Any) -> None:
    """They are run as written, in a directory where RUN is a run; each prints something."""
    (tmp_path / "RUN").symlink_to(whole_run(tmp_path, recording).path)
    examples = re.findall(r"```python\n(.*?)```", SCHEMA_MD.read_text(), re.DOTALL)
    assert len(examples) >= 4
    for example in examples:
        done = subprocess.run(
            [sys.executable, "-P", "-W", "error", "-c", example], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{example}\n{done.stderr}"
        assert done.stdout.strip(), example


@pytest.mark.parametrize(("step_ms", "jitter_us"), [(20.0, 100.0), (3.0, 300.0)])
def test_bytes_per_token_on_disk(
    tmp_path: Path, recording: Any, step_ms: float, jitter_us: float, record_property: Any
) -> None:
    """640 answers of 128 tokens, 64 at a time, words of 3 to 10 bytes: at most 4.5 bytes a token."""
    chance = random.Random(5)
    run = begun(tmp_path, (6, 64))
    made = recording(6)
    for request in range(640):
        gaps = [max(0.001, chance.gauss(step_ms, jitter_us / 1000)) for _ in range(128)]
        sent = SENT + request // 64 * 3_000_000_000 + chance.randrange(200_000)
        made.chat(
            request, sent, gaps, usage=128, finish="length", sizes=[chance.randint(3, 10) for _ in gaps]
        )
    run.add_block(made.blocks()[0])
    run.end_level(facts(6, 64))
    size = (run.path / "tokens/06-c64/part-000.parquet").stat().st_size / (640 * 128)
    rows = (run.path / "requests/06-c64/part-000.parquet").stat().st_size / 640
    print(
        f"\nstep {step_ms} ms, jitter {jitter_us} us: {size:.2f} bytes per token, {rows:.0f} per request row"
    )
    record_property("bytes_per_token", size)
    assert size <= 4.5


@pytest.mark.parametrize("save_text", [False, True])
def test_raw_payloads_are_let_go_of_long_before_a_part_is_due(
    save_text: bool, tmp_path: Path, recording: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server whose every answer has to be kept raw: of most of it the trace keeps a few numbers."""
    monkeypatch.setattr(writer, "PART_BYTES", 300_000)
    run = create_run(tmp_path, "test", {}, save_text=save_text)
    run.begin_level(0, 1, lambda request: None, 1)
    most = 0
    for request in range(40):
        made = recording()
        made.sent(request, SENT)
        content = {"choices": [{"index": 0, "delta": {"content": ["x"], "text": "y" * 50_000}}]}
        if save_text:
            content = {"choices": [{"index": 0, "delta": {"content": "y" * 50_000}}]}
        made.event(request, SENT + MS, t.CH_ODD, raw=content)
        made.row(request, sent_ns=SENT, done_ns=SENT + MS)
        run.add_block(made.blocks()[0])
        (level,) = run._levels.values()
        most = max(most, level.rows.raw_pending + level.waiting())
    assert most < 400_000 and (level.parts > 3) == save_text
    assert [row["request"] for row in run.finished(0)] == list(range(40))


def test_parts_inside_a_level(tmp_path: Path, recording: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "PART_EVENTS", 8)
    run = begun(tmp_path, (0, 1))
    run.add_block(two_answers(recording))  # 13 events: a part
    made = recording()
    made.sent(9, SENT)
    made.event(9, SENT + MS)
    run.add_block(made.blocks()[0])  # two, and open
    assert run.finished(0)[0]["request"] == 0
    run.add_block(two_answers(recording, 0, 2))
    monkeypatch.setattr(writer, "PART_INTERVAL_NS", 0)
    run.add_block(two_answers(recording, 0, 4))  # by age
    assert [row["request"] for row in run.finished(0)] == [0, 1, 2, 3, 4, 5]
    run.end_level(facts(0, 1))
    assert [row["status"] for row in run.finished(0)] == ["ok"] * 6 + ["cancelled"]
    assert len(list((run.path / "requests/00-c1").iterdir())) == 4
    assert open_run(run.path).requests()["request"].to_pylist() == [0, 1, 2, 3, 4, 5, 9]
    assert run.finished(7) == []


def test_finished_rows_that_are_not_on_disk_yet(tmp_path: Path, recording: Any) -> None:
    run = begun(tmp_path, (0, 1))
    run.add_block(two_answers(recording))
    rows = run.finished(0)
    assert [(row["request"], row["status"], row["sent_ns"]) for row in rows] == [
        (0, "ok", SENT),
        (1, "ok", SENT + 7),
    ]
    assert list((run.path / "requests/00-c1").iterdir()) == []
    run.close("interrupted")
    assert run.finished(0) == rows
    assert json.loads((run.path / "manifest.json").read_text())["levels"][0]["complete"] is False


def test_a_directory_is_never_used_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(t, "realtime_ns", lambda: 1796077081_000000042, raising=True)
    names = [create_run(tmp_path, "a", {}).run_id for _ in range(3)]
    assert names == ["20261130T221801Z-a", "20261130T221801Z-a-2", "20261130T221801Z-a-3"]


@pytest.mark.parametrize("name", ["", "a/b", " a", "a\n", "x" * 300, "a\0b"])
def test_a_name_that_is_none(tmp_path: Path, name: str) -> None:
    with pytest.raises(PlanError, match="--name"):
        create_run(tmp_path, name, {})
    assert list(tmp_path.iterdir()) == []


def test_an_output_that_cannot_be(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for output in (file, file / "below"):
        with pytest.raises(PlanError, match=r"--output .*file.*: cannot make a run directory: "):
            create_run(output, "a", {})
    assert os.listdir(tmp_path) == ["file"]


def test_a_full_disk_loses_nothing(tmp_path: Path, recording: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = begun(tmp_path, (0, 1))
    run.add_block(two_answers(recording))
    run.end_level(facts(0, 1))
    run.begin_level(1, 2, lambda request: None, 64)
    run.add_block(two_answers(recording, 1, 2))

    def full(*args: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(pq, "write_table", full)
        with pytest.raises(TraceError, match=r"cannot write .*/tokens/01-c2/part-000.parquet: No space left"):
            run.end_level(facts(1, 2))
    assert not list(run.path.rglob("*.tmp"))
    assert open_run(run.path).requests()["request"].to_pylist() == [0, 1]
    run.close("failed")  # there is room again
    assert open_run(run.path).requests()["request"].to_pylist() == [0, 1, 2, 3]


def test_a_part_that_cannot_be_written_waits_and_is_tried_again(
    tmp_path: Path, recording: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "PART_EVENTS", 8)
    run = begun(tmp_path, (0, 1))
    said: list[str] = []
    run.notice = said.append
    requests = run.path / "requests/00-c1"
    requests.rmdir()
    for first in (0, 2):
        run.add_block(two_answers(recording, 0, first))
    assert len(said) == 1 and "No such file or directory; measuring goes on, the rows wait in memory" in said[0]
    assert [row["request"] for row in run.finished(0)] == [0, 1, 2, 3]
    assert sum(table.num_rows for table in run.waiting("00-c1")[0]) == 4
    requests.mkdir()
    monkeypatch.setattr(writer, "PART_INTERVAL_NS", 0)
    run.write_old()  # though no block came
    assert said[1:] == ["the disk takes rows again: all that waited is written"]
    run.add_block(two_answers(recording, 0, 4))
    run.end_level(facts(0, 1))
    opened = open_run(run.path)
    assert opened.requests()["request"].to_pylist() == opened.tokens()["request"].to_pylist() == [0, 1, 2, 3, 4, 5]
    assert len(list(requests.iterdir())) == 2 and run.waiting("00-c1") == ([], [])


@pytest.mark.parametrize("why", ["too much waits", "the run is gone"])
def test_a_run_whose_rows_wait_in_vain_is_ended(
    why: str, tmp_path: Path, recording: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "PART_EVENTS", 8)
    run = begun(tmp_path, (0, 1))
    if why == "too much waits":
        monkeypatch.setattr(writer, "WAITING_BYTES", 10)
        (run.path / "requests/00-c1").rmdir()
    else:
        shutil.rmtree(run.path)
    with pytest.raises(TraceError, match=r"cannot write .*/part-000.parquet: No such file or directory"):
        run.add_block(two_answers(recording))
    assert [row["request"] for row in run.finished(0)] == [0, 1]  # still there, for who can use them
    with pytest.raises(TraceError, match=r"of level 00-c1 2 rows are not on disk \(requests 0 to 1\)$"):
        run.close("complete")
    if why == "too much waits":
        manifest = json.loads((run.path / "manifest.json").read_text())
        assert manifest["status"] == "failed"
        assert [(one["complete"], one["rows_not_on_disk"]) for one in manifest["levels"]] == [(False, 2)]


def test_a_run_taken_away_leaves_what_others_made(tmp_path: Path) -> None:
    for there in (False, True):
        run = begun(tmp_path / "a" / "b", (0, 1))
        if there:
            (tmp_path / "a" / "theirs").write_text("")
        run.discard()
        assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == ["a", "a/theirs"] * there


def test_a_directory_that_vanished_is_named(tmp_path: Path, recording: Any) -> None:
    run = begun(tmp_path, (0, 1))
    shutil.rmtree(run.path)
    for write in (
        lambda: run.log("x"),
        lambda: run.progress({}),
        lambda: run.update_manifest(status="failed"),
        lambda: run.begin_level(1, 1, lambda request: None, 1),
    ):
        with pytest.raises(TraceError, match=re.escape(str(run.path))):
            write()


# ---------------------------------------------------------------- opening what is no run, or damaged


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (None, None, "does not exist; give the directory of a run"),
        ("other.txt", "", "is not a run: it has no manifest.json"),
        ("manifest.json", "{", r"manifest\.json is corrupt"),
        ("manifest.json", "[]", "is not the manifest of a run"),
        ("manifest.json", '{"a": 1}', "is not the manifest of a run"),
        ("manifest.json", '{"schema": 2}', "written by a newer fastload"),
    ],
)
def test_what_is_no_run(tmp_path: Path, name: str | None, content: str | None, message: str) -> None:
    path = tmp_path / "run"
    if name is not None and content is not None:
        path.mkdir()
        (path / name).write_text(content)
    with pytest.raises(TraceError, match=message) as raised:
        open_run(path)
    assert str(raised.value).startswith(str(path))
    assert "\n" not in str(raised.value)


def test_a_file_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TraceError, match="is a file; give the directory of a run"):
        open_run(tmp_path / "file")


@pytest.mark.parametrize("damage", ["cut", "noise", "missing", "newer", "foreign"])
def test_a_damaged_part_is_named(tmp_path: Path, recording: Any, damage: str) -> None:
    path = whole_run(tmp_path, recording).path
    part = path / "tokens/00-c1/part-000.parquet"
    whole = part.read_bytes()
    if damage == "cut":
        part.write_bytes(whole[: len(whole) // 2])
    elif damage == "noise":
        part.write_bytes(os.urandom(500))
    elif damage == "missing":
        part.unlink()
    else:
        metadata = {b"fastload_schema": b"2"} if damage == "newer" else None
        pq.write_table(pq.read_table(part).replace_schema_metadata(metadata), part)
    run = open_run(path)
    assert run.requests().num_rows == 6
    with pytest.raises(TraceError, match=re.escape(str(part))) as raised:
        run.tokens()
    assert "\n" not in str(raised.value)


def test_an_older_file_without_a_column_stays_readable(tmp_path: Path, recording: Any) -> None:
    path = whole_run(tmp_path, recording).path
    part = path / "requests/00-c1/part-000.parquet"
    pq.write_table(pq.read_table(part).drop_columns(["due_late"]), part)
    assert open_run(path).requests("00-c1")["due_late"].to_pylist() == [None, None]


def test_parts_come_in_order_beyond_a_thousand() -> None:
    assert sorted(["part-1000.parquet", "part-999.parquet", "part-002.parquet"], key=number_of) == [
        "part-002.parquet",
        "part-999.parquet",
        "part-1000.parquet",
    ]
    assert number_of("100-c8") == 100
    assert number_of("warmup") == -1


def test_warm_ups_come_before_the_levels(tmp_path: Path) -> None:
    for index, concurrency in ((2, 4), (-2, 1), (10, 64), (-1, 1), (0, 1)):
        (tmp_path / "requests" / level_dir(index, concurrency)).mkdir(parents=True)
    assert level_dirs(tmp_path) == ("warmup", "warmup-2", "00-c1", "02-c4", "10-c64")
