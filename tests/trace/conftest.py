"""A recording made by hand: what the measurer would have put into its blocks, cut where a test wants it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson
import pytest

from fastload import _timing as t
from fastload.trace.tables import RowContext

sys.path.insert(0, str(Path(__file__).parent))  # for written.py, beside the tests that use it

MS = 1_000_000


class Recording:
    """Events, rows and raw pieces in the order in which they were recorded."""

    def __init__(self, level: int = 0) -> None:
        self.level = level
        self.steps: list[tuple[str, Any]] = []
        self.ordinal: dict[int, int] = {}

    def sent(self, request: int, ns: int) -> None:
        self.steps.append(("event", (ns, request, -1, 0, -1, t.CH_SENT, 0)))

    def event(
        self,
        request: int,
        ns: int,
        channel: int = t.CH_CONTENT,
        *,
        size: int = 5,
        told: int = -1,
        flags: int = t.FL_CHOICES,
        delay: int = 2000,
        raw: object = None,
    ) -> None:
        """An SSE event; `raw` (bytes, or a value for JSON) is kept as its payload."""
        ordinal = self.ordinal.get(request, 0)
        self.ordinal[request] = ordinal + 1
        size = size if t.CH_CONTENT <= channel <= t.CH_REFUSAL else 0
        self.steps.append(("event", (ns, request, delay, size, told, channel, flags)))
        if raw is not None:
            payload = raw if isinstance(raw, bytes) else orjson.dumps(raw)
            self.steps.append(("blob", (request, ordinal, t.BLOB_EVENT, payload)))

    def blob(self, request: int, kind: int, raw: bytes) -> None:
        self.steps.append(("blob", (request, 0, kind, raw)))

    def row(self, request: int, **fields: int) -> None:
        known = {
            "request": request,
            "level": self.level,
            "slot": 0,
            "attempt": 1,
            "role": t.ROLE_MEASURED,
            "end": t.END_COMPLETE,
            "http_status": 200,
            "stamp_source": 1,
            "conn_reused": 1,
            "row_flags": t.RF_SSE,
            "events": self.ordinal.get(request, 0),
            "coalesced": 0,
            "clamped": 0,
        }
        values = dict.fromkeys(t.ROW_FIELDS, -1) | known | fields
        assert set(values) == set(t.ROW_FIELDS)
        self.steps.append(("row", [values[name] for name in t.ROW_FIELDS]))

    def chat(
        self,
        request: int,
        sent_ns: int,
        gaps_ms: Sequence[float],
        *,
        usage: int | None,
        finish: str | None = "stop",
        told: Sequence[int] | None = None,
        channels: Sequence[int] | None = None,
        sizes: Sequence[int] | None = None,
        prompt: int = 11,
        done: bool = True,
        **fields: int,
    ) -> None:
        """A whole streamed answer: role, one text event per gap, finish, usage, [DONE], all one after
        another.
        """
        self.sent(request, sent_ns)
        now = sent_ns + round(gaps_ms[0] * MS) - MS // 2 if gaps_ms else sent_ns + MS
        role = {"id": f"chatcmpl-{request}", "choices": [{"index": 0, "delta": {"role": "assistant"}}]}
        self.event(request, now, t.CH_NONE, raw=role, told=0 if told else -1)
        now = sent_ns
        for i, gap in enumerate(gaps_ms):
            now += round(gap * MS)
            channel = channels[i] if channels else t.CH_CONTENT
            size = sizes[i] if sizes else 5
            self.event(request, now, channel, size=size, told=told[i] if told else -1)
        now += MS // 10
        if finish is not None:
            end = {"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]}
            self.event(request, now, t.CH_NONE, flags=t.FL_CHOICES | t.FL_FINISH, raw=end)
        if usage is not None:
            counts = {"prompt_tokens": prompt, "completion_tokens": usage, "total_tokens": prompt + usage}
            last = {"choices": [], "usage": counts}
            self.event(request, now, t.CH_NONE, flags=t.FL_USAGE, told=usage, raw=last)
        if done:
            self.event(request, now, t.CH_DONE, flags=0)
        known = {"sent_ns": sent_ns, "due_ns": sent_ns - MS, "done_ns": now, "framing_end_ns": now + 1}
        flags = {"row_flags": t.RF_SSE | (t.RF_DONE if done else 0)}
        self.row(request, **(known | flags | fields))

    def blocks(self, cuts: Iterable[int] = ()) -> list[Any]:
        """The steps as blocks, a new one at each index of `cuts`."""
        bounds = [0, *sorted(cuts), len(self.steps)]
        return [self._block(self.steps[a:b]) for a, b in zip(bounds, bounds[1:], strict=False)]

    def _block(self, steps: Sequence[tuple[str, Any]]) -> Any:
        events = [value for kind, value in steps if kind == "event"]
        rows = [value for kind, value in steps if kind == "row"]
        columns = zip(*events, strict=True) if events else [()] * len(t.EVENT_COLUMNS)
        return SimpleNamespace(
            level=self.level,
            events={
                name: np.array(column, dtype=kind).tobytes()
                for (name, kind), column in zip(t.EVENT_COLUMNS, columns, strict=True)
            },
            n_events=len(events),
            rows=np.array(rows, dtype="<i8").tobytes(),
            n_rows=len(rows),
            blobs=[value for kind, value in steps if kind == "blob"],
            sequence=0,
        )


@pytest.fixture(scope="session")
def recording() -> type[Recording]:
    """The class, so that a property may make as many as it likes."""
    return Recording


@pytest.fixture(scope="session")
def context() -> RowContext:
    return RowContext(
        run_id="r",
        target="http://h/v1",
        level=8,
        max_tokens=128,
        utc_offset_ns=10**18,
        planned=lambda n: n + 100,
    )
