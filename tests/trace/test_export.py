"""A run's rows as one flat file: all of them, readable elsewhere, and nothing of a place or a person when asked."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from fastload.errors import TraceError
from fastload.trace import Run, export, open_run
from fastload.trace.schema import REQUESTS_LAYOUT, TOKENS_LAYOUT, requests_schema, tokens_schema
from fastload.trace.writer import write_part

HOST, USER, PROMPT, SERVER_ID = "gpu-17.secret.example", "mallory", "tell me the secret", "chatcmpl-abcdef"
SECRETS = (HOST, USER, PROMPT, SERVER_ID, "secret-model", "/srv/", "http://", "run-of-mallory")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Two levels in three parts: 5 requests, the last one failed; 3 events each but for it."""
    path = tmp_path / "run-of-mallory"
    for folder, parts in (("00-c1", [[0, 1], [2]]), ("01-c2", [[3, 4]])):
        for number, requests in enumerate(parts):
            rows = [_row(request, 1 if folder == "00-c1" else 2) for request in requests]
            lists = [
                {
                    "request": request,
                    "event_ns": [5, 10 + request, 20],
                    "tokens": [0, 1, 2],
                    "bytes": [0, 4, 9],
                    "channel": [0, 1, 1],
                    "flags": [8, 8, 24],
                    "text": PROMPT,
                }
                for request in requests
                if request != 4
            ]
            for kind, made, schema, layout in (
                ("requests", rows, requests_schema({"run_id": path.name}), REQUESTS_LAYOUT),
                ("tokens", lists, tokens_schema({"run_id": path.name}), TOKENS_LAYOUT),
            ):
                (path / kind / folder).mkdir(parents=True, exist_ok=True)
                table = pa.Table.from_pylist(made, schema=schema)
                write_part(path / kind / folder / f"part-{number:03d}.parquet", table, layout)
    levels = [{"index": 0, "dir": "00-c1", "concurrency": 1}, {"index": 1, "dir": "01-c2", "concurrency": 2}]
    target = {"url": f"http://{HOST}:8000", "model": "/srv/mallory/secret-model"}
    manifest = {"schema": 1, "status": "complete", "levels": levels, "target": target}
    (path / "manifest.json").write_text(json.dumps(manifest))
    return open_run(path)


def _row(request: int, level: int) -> dict[str, Any]:
    failed = request == 4
    return {
        "run_id": "run-of-mallory",
        "target": f"http://{HOST}:8000",
        "level": level,
        "request": request,
        "role": "measured",
        "status": "connect" if failed else "ok",
        "error": f"=cmd|' /C calc'!A0 connect to {HOST} from /srv/{USER}" if failed else None,
        "sent_ns": None if failed else 1000 * request,
        "sent_utc": datetime(2026, 11, 30, 22, 18, 1, 5, UTC),
        "server_request_id": SERVER_ID,
        "finish_reason": "-stop" if request == 1 else "stop",
        "ttft_ms": -1.5 if request == 1 else 2.5,
    }


def read(path: Path) -> pa.Table:
    if path.suffix == ".csv":
        return pyarrow.csv.read_csv(path)
    return pq.read_table(path) if path.suffix == ".parquet" else pa.ipc.open_file(path).read_all()


@pytest.mark.parametrize("form", export.FORMATS)
def test_every_request_in_every_format(run: Run, form: str, tmp_path: Path) -> None:
    path = tmp_path / f"out.{form}"
    assert export.write(run, path, form) == 5
    table = read(path)
    assert table["request"].to_pylist() == [0, 1, 2, 3, 4]
    assert table.column_names == requests_schema().names
    assert table["ttft_ms"].to_pylist() == [2.5, -1.5, 2.5, 2.5, 2.5]
    if form != "csv":
        assert table.equals(run.requests())
    assert sorted(one.name for one in tmp_path.iterdir()) == [path.name, "run-of-mallory"]


@pytest.mark.parametrize("form", export.FORMATS)
def test_every_event_in_every_format(run: Run, form: str, tmp_path: Path) -> None:
    path = tmp_path / f"out.{form}"
    assert export.write(run, path, form, events=True) == 12
    rows = read(path).to_pylist()
    assert [row["event_ns"] for row in rows[:6]] == [5, 10, 20, 5, 11, 20]
    assert [(row["request"], row["event"], row["level"]) for row in rows[-3:]] == [(3, 0, 2), (3, 1, 2), (3, 2, 2)]
    assert sum(row["tokens"] for row in rows) == 12 and {row["status"] for row in rows} == {"ok"}


def test_one_level(run: Run, tmp_path: Path) -> None:
    assert export.write(run, tmp_path / "a.parquet", "parquet", level_dirs=("01-c2",)) == 2
    assert export.write(run, tmp_path / "b.parquet", "parquet", level_dirs=("01-c2",), events=True) == 3


def test_text_that_a_spreadsheet_would_run_is_quoted(run: Run, tmp_path: Path) -> None:
    export.write(run, tmp_path / "a.csv", "csv")
    table = read(tmp_path / "a.csv")
    assert table["error"].to_pylist()[-1].startswith("'=cmd")
    assert table["finish_reason"].to_pylist()[:2] == ["stop", "'-stop"]
    assert table["ttft_ms"].to_pylist()[1] == -1.5  # a number is a number
    export.write(run, tmp_path / "a.parquet", "parquet")
    assert read(tmp_path / "a.parquet")["finish_reason"].to_pylist()[1] == "-stop"


@pytest.mark.parametrize("form", export.FORMATS)
@pytest.mark.parametrize("events", [False, True])
def test_an_anonymous_file_names_nobody(run: Run, form: str, events: bool, tmp_path: Path) -> None:
    """Every byte of it, and of what it says when it is read (Parquet compresses)."""
    path = tmp_path / f"out.{form}"
    export.write(run, path, form, events=events, anonymize=True)
    table = read(path)
    said = [path.read_bytes(), repr(table.to_pylist()).encode(), repr(table.schema.metadata).encode()]
    for secret in SECRETS:
        assert not any(secret.encode() in each for each in said), secret
    if not events:
        assert table["status"].to_pylist()[-1] == "connect" and table["request"].to_pylist() == [0, 1, 2, 3, 4]
    export.write(run, path, form, events=events)
    if not events:
        assert HOST in repr(read(path).to_pylist())  # else this test would prove nothing


def test_a_disk_that_fails_leaves_nothing(run: Run, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot write .*no/such/out.csv: No such file or directory"):
        export.write(run, tmp_path / "no/such/out.csv", "csv")
    part = run.path / "tokens" / "01-c2" / "part-000.parquet"
    part.write_bytes(part.read_bytes()[:-30])
    with pytest.raises(TraceError, match="part-000.parquet is corrupt"):
        export.write(run, tmp_path / "out.csv", "csv", events=True)
    assert [one.name for one in tmp_path.iterdir()] == ["run-of-mallory"]
