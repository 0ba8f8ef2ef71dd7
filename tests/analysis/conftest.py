"""Hand-made traces: a few requests whose every figure can be worked out on paper."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from fastload.trace.schema import requests_schema, tokens_schema

BOOT_NS = 5_000_000_000_000  # a host that runs for 83 minutes: stamps never start at 0


@dataclass(frozen=True, slots=True)
class Event:
    """An event: ms after the request was sent, tokens it brought, its channel and flags."""

    ms: float
    tokens: int = 1
    channel: int = 1
    flags: int = 0


@dataclass(frozen=True, slots=True)
class Request:
    """A request: when it was sent and done (ms), and its events; stamps and derived columns follow."""

    sent_ms: float
    done_ms: float
    events: Sequence[Event] = ()
    slot: int = 0
    role: str | None = "measured"
    status: str = "ok"
    columns: dict[str, Any] = field(default_factory=dict)
    """Columns to set as they are, instead of what follows from the rest."""


def tables(requests: Sequence[Request], first: int = 0) -> tuple[pa.Table, pa.Table]:
    """The `requests` and `tokens` tables of one level, numbered from `first`."""
    rows = [_row(first + at, each) for at, each in enumerate(requests)]
    lists = [
        {
            "request": row["request"],
            "event_ns": [round(event.ms * 1e6) for event in each.events],
            "tokens": [event.tokens for event in each.events],
            "bytes": [4 * event.tokens for event in each.events],
            "channel": [event.channel for event in each.events],
            "flags": [event.flags for event in each.events],
        }
        for row, each in zip(rows, requests, strict=True)
        if each.status not in ("connect", "client_ports")
    ]
    return (
        pa.Table.from_pylist(rows, schema=requests_schema()),
        pa.Table.from_pylist(lists, schema=tokens_schema()),
    )


def _row(number: int, request: Request) -> dict[str, Any]:
    sent, done = BOOT_NS + round(request.sent_ms * 1e6), BOOT_NS + round(request.done_ms * 1e6)
    text = [event for event in request.events if 1 <= event.channel <= 4]
    n = sum(event.tokens for event in request.events)
    ok = request.status == "ok"
    row: dict[str, Any] = {
        "request": number,
        "slot": request.slot,
        "role": request.role,
        "status": request.status,
        "due_ns": sent,
        "sent_ns": sent,
        "done_ns": done,
        "completion_tokens": n or None,
        "token_source": "usage" if n else None,
        "stamp_source": "kernel",
        "events": len(request.events),
        "text_events": len(text),
    }
    if text:
        row["first_token_ns"] = sent + round(text[0].ms * 1e6)
        row["last_token_ns"] = sent + round(text[-1].ms * 1e6)
    if ok:
        row["latency_s"] = (done - sent) / 1e9
        row["response_latency_s"] = row["latency_s"]
        row["tps"] = n / row["latency_s"] if done > sent else None
    if ok and text:
        row["ttft_ms"] = row["ttfa_ms"] = text[0].ms
        if n > 1 and len(text) > 1:
            row["itl_ms"] = (text[-1].ms - text[0].ms) / (n - text[0].tokens)
    return row | request.columns


def facts(concurrency: int, **more: Any) -> dict[str, Any]:
    """A level's entry of the manifest, complete unless said otherwise."""
    return {"index": 0, "concurrency": concurrency, "complete": True, "dir": f"00-c{concurrency}"} | more


@dataclass(frozen=True, slots=True)
class Maker:
    """The tools of this file, as a fixture: test modules cannot import one another."""

    request: type[Request] = Request
    event: type[Event] = Event
    tables: Callable[..., tuple[pa.Table, pa.Table]] = tables
    facts: Callable[..., dict[str, Any]] = facts

    @staticmethod
    def steady(
        slot: int, waves: int, start_ms: float, events: int = 4, step_ms: float = 10.0, **more: Any
    ) -> list[Request]:
        """Requests of one slot without a pause: `events` tokens, one event a step, done with the last."""
        length = events * step_ms
        return [
            Request(
                start_ms + wave * length,
                start_ms + (wave + 1) * length,
                [Event((at + 1) * step_ms) for at in range(events)],
                slot,
                **more,
            )
            for wave in range(waves)
        ]


@pytest.fixture
def make() -> Maker:
    """Tools to make traces by hand."""
    return Maker()


@pytest.fixture
def kimi() -> dict[str, Any]:
    """The source report's table and what it derived from it."""
    loaded: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "kimi-k3.json").read_text())
    return loaded
