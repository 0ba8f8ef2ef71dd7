"""Runs written by hand, for tests of what is then on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastload.load.supervisor import LevelFacts
from fastload.trace.writer import RunWriter, create_run

MS = 1_000_000
SENT = 1764500000123456789
MANIFEST: dict[str, object] = {"target": {"url": "http://127.0.0.1:8000/v1", "model": "m"}, "simulated": True}


def facts(index: int, concurrency: int) -> LevelFacts:
    return LevelFacts(index, concurrency, True, SENT, SENT + 1, 2, 2, {"gc_pauses": 0})


def begun(output: Path, *levels: tuple[int, int], **options: Any) -> RunWriter:
    run = create_run(output, "test", MANIFEST, **options)
    for index, concurrency in levels:
        run.begin_level(index, concurrency, lambda request: 32, 64)
    return run


def two_answers(recording: Any, level: int = 0, first: int = 0) -> Any:
    made = recording(level)
    made.chat(first, SENT, [60, 20, 20], usage=3)
    made.chat(first + 1, SENT + 7, [40, 10], usage=2, finish="length")
    return made.blocks()[0]


def whole_run(output: Path, recording: Any) -> RunWriter:
    run = begun(output, (-1, 1), (0, 1))
    run.add_block(two_answers(recording, -1))
    run.end_level(facts(-1, 1))
    run.add_block(two_answers(recording, 0, 2))
    run.end_level(facts(0, 1))
    run.begin_level(1, 8, lambda request: None, 64)
    run.add_block(two_answers(recording, 1, 4))
    run.end_level(facts(1, 8))
    run.close("complete", verdict="valid")
    return run
