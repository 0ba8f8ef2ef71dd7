"""From blocks to rows: answers whose every figure is known beforehand, each class of failure, and any cut of
blocks.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastload import _timing as t
from fastload.trace.rows import LevelRows
from fastload.trace.tables import RowContext

MS = 1_000_000
SENT = 1764500000123456789  # exact in int64, not in a double


def taken(context: RowContext, blocks: list[Any], close: bool = False) -> tuple[list[dict[str, Any]], Any]:
    level = LevelRows(context)
    for block in blocks:
        level.add(block)
    batch = level.take(close)
    assert batch is not None
    return batch.requests.to_pylist(), batch.tokens.to_pylist()


def one_row(context: RowContext, made: Any) -> dict[str, Any]:
    rows, _ = taken(context, made.blocks())
    assert len(rows) == 1
    row: dict[str, Any] = rows[0]
    return row


def test_a_plain_answer(recording: Any, context: RowContext) -> None:
    made = recording()
    made.blob(3, t.BLOB_HEAD, b"HTTP/1.1 200 OK\r\nx-request-id: rq\r\n\r\n")
    made.chat(3, SENT, [60, 20, 20], usage=3, rtt_us=40, request_bytes=321)
    (row,), (events,) = taken(context, made.blocks())
    expected = {
        "run_id": "r",
        "target": "http://h/v1",
        "level": 8,
        "load_kind": "concurrency",
        "request": 3,
        "worker": 0,
        "slot": 0,
        "attempt": 1,
        "role": "measured",
        "due_ns": SENT - MS,
        "sent_ns": SENT,
        "connect_ns": None,
        "first_event_ns": SENT + 60 * MS - MS // 2,
        "first_token_ns": SENT + 60 * MS,
        "first_answer_ns": SENT + 60 * MS,
        "last_token_ns": SENT + 100 * MS,
        "done_ns": SENT + 100 * MS + MS // 10,
        "status": "ok",
        "http_status": 200,
        "errno": None,
        "error": None,
        "finish_reason": "stop",
        "max_tokens": 128,
        "prompt_tokens_planned": 103,
        "prompt_tokens": 11,
        "completion_tokens": 3,
        "reasoning_tokens": None,
        "token_source": "usage",
        "itl_estimated": False,
        "events": 7,
        "text_events": 3,
        "n_first": 1,
        "request_bytes": 321,
        "stamp_source": "kernel",
        "client_delay_p50_us": 2.0,
        "client_delay_max_us": 2.0,
        "conn_reused": True,
        "rtt_us": 40,
        "framing_broken": False,
        "retried": False,
        "server_request_id": "chatcmpl-3",
        "ttft_ms": 60.0,
        "response_ttft_ms": 61.0,
        "ttfa_ms": 60.0,
        "itl_ms": 20.0,
        "latency_s": 0.1001,
        "response_latency_s": 0.1011,
        "tps": 3 / 0.1001,
    }
    assert {name: row[name] for name in expected} == pytest.approx(expected, abs=1e-12)
    assert row["sent_ns"] == SENT  # approx compares as doubles: these are exact
    assert row["last_token_ns"] == SENT + 100 * MS
    assert events["event_ns"][1:4] == [60 * MS, 80 * MS, 100 * MS]
    assert events["tokens"] == [0, 1, 1, 1, 0, 0, 0]
    assert events["bytes"] == [0, 5, 5, 5, 0, 0, 0]
    assert events["channel"] == [0, 1, 1, 1, 0, 0, 16]
    assert events["flags"][4:6] == [t.FL_CHOICES | t.FL_FINISH, t.FL_USAGE]
    assert events["text"] is None


@pytest.mark.parametrize(
    ("gaps", "answer", "expected"),
    [
        # the end token of a stop has no event: n - 2
        ([60, 20, 20], dict(usage=4), dict(itl_ms=20.0, itl_estimated=False, completion_tokens=4)),
        # the same count, cut by length: n - 1, and it says so
        ([60, 20, 20], dict(usage=4, finish="length"), dict(itl_ms=40 / 3, itl_estimated=True)),
        # two tokens an event
        ([60, 20, 20], dict(usage=6, finish="length"), dict(itl_ms=8.0, itl_estimated=True, n_first=2)),
        # continuous usage: 100 ms over five tokens (case M09)
        (
            [55, 60, 40],
            dict(usage=6, told=[1, 4, 6]),
            dict(itl_ms=20.0, itl_estimated=False, token_source="continuous_usage", n_first=1),
        ),
        # no usage: text events are counted, and it is an estimate
        (
            [60, 20, 20],
            dict(usage=None),
            dict(
                itl_ms=20.0,
                itl_estimated=True,
                token_source="events",
                completion_tokens=3,
                prompt_tokens=None,
            ),
        ),
        # one token: never 0, never infinite
        ([60], dict(usage=1), dict(itl_ms=None, itl_estimated=None, ttft_ms=60.0)),
        # several tokens in one event
        ([60], dict(usage=9), dict(itl_ms=None, n_first=9)),
        # all in one read: no interval was seen
        ([60, 0, 0], dict(usage=3), dict(itl_ms=None, ttft_ms=60.0)),
        # an end token only
        ([], dict(usage=1), dict(status="ok", ttft_ms=None, itl_ms=None, completion_tokens=1, n_first=None)),
        # it only reasoned
        (
            [60, 20],
            dict(usage=2, channels=[t.CH_REASONING] * 2),
            dict(ttft_ms=60.0, ttfa_ms=None, first_answer_ns=None, itl_ms=20.0),
        ),
        # it reasoned first
        (
            [60, 50, 50],
            dict(usage=3, channels=[t.CH_REASONING, t.CH_REASONING, t.CH_CONTENT]),
            dict(ttft_ms=60.0, ttfa_ms=160.0, itl_ms=50.0),
        ),
    ],
)
def test_figures_known_beforehand(
    recording: Any, context: RowContext, gaps: list[float], answer: dict[str, Any], expected: dict[str, Any]
) -> None:
    made = recording()
    made.chat(0, SENT, gaps, **answer)
    row = one_row(context, made)
    assert {name: row[name] for name in expected} == pytest.approx(expected)


def test_token_ids_in_every_event_give_the_counts(recording: Any, context: RowContext) -> None:
    """vLLM with return_token_ids: the scan leaves such events to the parser."""
    made = recording()
    made.sent(0, SENT)
    for i, ids in enumerate(([1], [2, 3, 4], [5, 6])):
        raw = {"choices": [{"index": 0, "delta": {"content": "abc"}, "token_ids": ids}]}
        made.event(0, SENT + (i + 1) * 30 * MS, t.CH_ODD, raw=raw)
    end = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "usage": {"completion_tokens": 7}}
    made.event(0, SENT + 91 * MS, t.CH_NONE, flags=t.FL_CHOICES | t.FL_FINISH | t.FL_USAGE, raw=end)
    made.row(0, sent_ns=SENT, done_ns=SENT + 91 * MS)
    (row,), (events,) = taken(context, made.blocks())
    assert events["tokens"] == [1, 3, 2, 1]
    assert (row["token_source"], row["completion_tokens"], row["itl_ms"]) == ("token_ids", 7, 12.0)


def test_an_odd_event_gets_its_meaning_from_its_payload(recording: Any, context: RowContext) -> None:
    """A tool call (case M07): n - 1 = 8 tokens in 60 ms."""
    made = recording()
    made.sent(0, SENT)
    for ms, function in (
        (100, {"name": "get_wx"}),
        (130, {"arguments": '{"c":'}),
        (160, {"arguments": '"Ulm"}'}),
    ):
        raw = {"id": "x", "choices": [{"index": 0, "delta": {"tool_calls": [{"function": function}]}}]}
        made.event(0, SENT + ms * MS, t.CH_ODD, flags=0, raw=raw)
    end = {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]}
    made.event(0, SENT + 160 * MS, t.CH_ODD, flags=0, raw=end)
    made.event(0, SENT + 160 * MS, t.CH_ODD, flags=0, raw={"choices": [], "usage": {"completion_tokens": 9}})
    made.event(0, SENT + 161 * MS, t.CH_ODD, flags=0)  # its payload was lost to a full arena
    made.row(0, sent_ns=SENT, done_ns=SENT + 161 * MS)
    (row,), (events,) = taken(context, made.blocks())
    assert events["channel"] == [t.CH_TOOL] * 3 + [t.CH_NONE] * 3
    assert events["bytes"] == [6, 5, 6, 0, 0, 0]
    assert [flag & t.FL_FINISH for flag in events["flags"]] == [0, 0, 0, t.FL_FINISH, 0, 0]
    assert (row["ttft_ms"], row["ttfa_ms"], row["itl_ms"]) == (100.0, None, 7.5)
    assert (row["first_event_ns"], row["finish_reason"]) == (SENT + 100 * MS, "tool_calls")
    assert sum(events["tokens"]) == 9


ERROR = {"error": {"message": "engine stopped", "code": 500}}
CONTENT = {"choices": [{"index": 0, "delta": {"content": "a"}}]}
HALF = [(t.CH_NONE, {"choices": [{"index": 0, "delta": {}}]}), (t.CH_CONTENT, None)]
FINISH = (t.CH_NONE, {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
DONE = (t.CH_DONE, None)
BROKEN = (t.CH_ODD, b'{"choices": [')
TWO = (t.CH_ODD, {"choices": [{"index": 1, "text": "b"}, {"index": 0, "text": "a"}]})


@pytest.mark.parametrize(
    ("status", "error", "events", "row"),
    [
        ("ok", None, [*HALF, FINISH, DONE], {}),
        ("ok", None, [*HALF, FINISH], {}),
        ("ok", None, [*HALF, DONE], {}),
        ("ok", None, [FINISH, DONE], {}),
        ("ok", None, [*HALF, FINISH], {"end": t.END_EOF}),
        ("ok", None, [*HALF, FINISH, DONE], {"end": t.END_RESET, "errno": 104}),
        ("stream_error", "engine stopped", [*HALF, (t.CH_ODD, ERROR), DONE], {}),
        ("stream_error", "engine stopped", [*HALF, FINISH, (t.CH_ODD, ERROR)], {"end": t.END_EOF}),
        ("malformed_event", "what the server sent", [*HALF, BROKEN, FINISH, DONE], {}),
        ("malformed_event", "chunk size", [*HALF], {"end": t.END_HTTP, "blob": b"chunk size is not hex"}),
        ("ok", None, [*HALF, BROKEN, FINISH, DONE], {"row_flags": t.RF_SSE | t.RF_BLOB_CUT}),
        ("truncated", "closed", [*HALF, BROKEN], {"end": t.END_EOF}),
        ("truncated", "closed", HALF, {"end": t.END_EOF}),
        ("truncated", "closed", [], {"end": t.END_EOF, "http_status": -1, "row_flags": 0}),
        ("reset", "reset", HALF, {"end": t.END_RESET, "errno": 104}),
        ("timeout", "no byte in 60 s", HALF, {"end": t.END_TIMEOUT, "blob": b"no byte in 60 s"}),
        ("cancelled", "stopped", HALF, {"end": t.END_CANCELLED}),
        ("incomplete", "without finish_reason", HALF, {}),
        ("incomplete", "without finish_reason", [TWO, FINISH], {}),
        ("empty", "no text", [DONE], {}),
        ("empty", "no text", [], {}),
        ("connect", "refused", [], {"end": t.END_CONNECT, "http_status": -1, "blob": b"connection refused"}),
        ("client_ports", "no free local port", [], {"end": t.END_PORTS, "http_status": -1}),
        (
            "redirect",
            "redirects to /v2",
            [],
            {"http_status": 307, "head": b"HTTP/1.1 307 T\r\nLocation: /v2\r\n"},
        ),
        ("http_status", "too long", [], {"http_status": 400, "body": b'{"error": {"message": "too long"}}'}),
        ("http_status", "HTTP 503 Busy", [], {"http_status": 503, "head": b"HTTP/1.1 503 Busy\r\n"}),
        ("http_status", "HTTP 500", [], {"http_status": 500, "end": t.END_TIMEOUT}),
        ("not_streaming", '{"id": 1}', [], {"row_flags": 0, "body": b'{"id": 1}'}),
        (
            "not_streaming",
            "not an event stream",
            [],
            {"head": b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n"},
        ),
        ("not_streaming", "no worker", [], {"body": b'{"error": {"message": "no worker"}}'}),
        (
            "not_streaming",
            "x" * 500,
            [],
            {"head": b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n", "body": b"x" * 900},
        ),
        (
            "not_streaming",
            "<html>",
            [],
            {"head": b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n", "body": b"<html>"},
        ),
        ("truncated", "closed", [], {"end": t.END_EOF, "body": b'{"error": {"mess'}),
        ("unsupported_encoding", "compressed", [], {"row_flags": t.RF_SSE | t.RF_ENCODED}),
    ],
)
def test_each_way_to_end(
    recording: Any,
    context: RowContext,
    status: str,
    error: str | None,
    events: list[Any],
    row: dict[str, Any],
) -> None:
    made = recording()
    made.sent(0, SENT)
    for kind, key in ((t.BLOB_HEAD, "head"), (t.BLOB_BODY, "body"), (t.BLOB_ERROR, "blob")):
        if key in row:
            made.blob(0, kind, row[key])
    for i, (channel, raw) in enumerate(events):
        finish = t.FL_FINISH if (channel, raw) == FINISH else 0
        made.event(0, SENT + (i + 1) * MS, channel, flags=finish, raw=raw)
    fields = {name: value for name, value in row.items() if name not in ("head", "body", "blob")}
    made.row(0, sent_ns=SENT, due_ns=SENT, done_ns=SENT + 9 * MS, **fields)
    found = one_row(context, made)
    assert found["status"] == status
    if error is None:
        assert found["error"] is None
        assert found["framing_broken"] is (row.get("end", t.END_COMPLETE) != t.END_COMPLETE)
        # broken off without an end marker: its last event completed it, not the moment when we noticed
        assert found["latency_s"] == (0.003 if row.get("end") == t.END_EOF else 0.009)
    else:
        assert error in found["error"]
        derived = (
            "ttft_ms",
            "response_ttft_ms",
            "ttfa_ms",
            "itl_ms",
            "latency_s",
            "response_latency_s",
            "tps",
        )
        assert all(found[name] is None for name in derived)
        assert found["sent_ns"] == SENT


def test_retry_after_is_kept(recording: Any, context: RowContext) -> None:
    made = recording()
    made.blob(0, t.BLOB_HEAD, b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 7\r\nX-Request-Id: q\r\n\r\n")
    made.row(0, http_status=429, row_flags=0)
    row = one_row(context, made)
    assert (row["retry_after_s"], row["server_request_id"]) == (7.0, "q")


def test_a_retry_is_sent_anew(recording: Any, context: RowContext) -> None:
    """The last CH_SENT counts, also for a retry that did not connect."""
    made = recording()
    made.sent(0, SENT)
    made.sent(0, SENT + 5)
    made.row(0, attempt=2, row_flags=t.RF_SSE | t.RF_RETRIED, end=t.END_CONNECT, http_status=-1)
    (row,), (events,) = taken(context, made.blocks(), close=True)
    assert (row["sent_ns"], row["attempt"], row["retried"], row["events"]) == (SENT + 5, 2, True, 0)
    assert events["event_ns"] == []


def test_what_is_open_waits_and_is_cancelled_at_the_end(recording: Any, context: RowContext) -> None:
    made = recording()
    made.sent(1, SENT)
    made.event(1, SENT + 7 * MS, raw=CONTENT)
    made.chat(0, SENT, [5, 5], usage=2)
    made.sent(2, SENT + 1)
    made.event(1, SENT + 9 * MS, flags=t.FL_READ)
    late = recording()
    late.event(1, SENT + 11 * MS)
    late.row(1)
    level = LevelRows(context)
    level.add(made.blocks()[0])
    first = level.take()
    assert first is not None
    assert first.requests["request"].to_pylist() == [0]
    assert level.events_pending == 4
    assert level.take() is None
    rest = level.take(close=True)
    assert rest is not None
    rows = rest.requests.to_pylist()
    assert [(row["request"], row["status"], row["role"], row["sent_ns"]) for row in rows] == [
        (1, "cancelled", None, SENT),
        (2, "cancelled", None, SENT + 1),
    ]
    assert (rows[0]["first_token_ns"], rows[0]["last_token_ns"]) == (SENT + 7 * MS, SENT + 9 * MS)
    assert (rows[0]["completion_tokens"], rows[0]["token_source"]) == (2, "events")
    assert (rows[0]["stamp_source"], rows[1]["stamp_source"], rows[1]["first_event_ns"]) == (
        "read",
        None,
        None,
    )
    assert rest.tokens["event_ns"].to_pylist() == [[7 * MS, 9 * MS], []]
    level.add(late.blocks()[0])  # nobody may be counted twice
    assert level.take(close=True) is None


def test_events_that_never_came_are_counted(recording: Any, context: RowContext) -> None:
    made = recording()
    made.chat(0, SENT, [5, 5], usage=2, events=9)
    level = LevelRows(context)
    level.add(made.blocks()[0])
    batch = level.take()
    assert batch is not None
    assert batch.events_missing == 9 - 6


def test_text_is_kept_when_asked_for_and_whole(recording: Any, context: RowContext) -> None:
    made = recording()
    made.sent(0, SENT)
    deltas = (
        {"reasoning": "Let "},
        {"reasoning": "me"},
        {"content": "世"},
        {"content": "!"},
        {"tool_calls": [{}]},
    )
    for i, delta in enumerate(deltas):
        made.event(0, SENT + i, t.CH_ODD, raw={"choices": [{"index": 0, "delta": delta}]})
    made.row(0)
    asked = dataclasses.replace(context, save_text=True)
    _, (events,) = taken(asked, made.blocks())
    assert (events["text"], events["reasoning_text"], events["tool_text"]) == ("世!", "Let me", None)
    _, (events,) = taken(context, made.blocks())
    assert events["text"] is None
    made.event(1, SENT, t.CH_CONTENT)  # its payload is not there
    made.row(1)
    _, (_, events) = taken(asked, made.blocks())
    assert events["text"] is None


def test_a_nonsense_server_gives_rows_and_no_exception(recording: Any, context: RowContext) -> None:
    made = recording()
    made.sent(0, SENT)
    made.event(0, SENT - 5, t.CH_ODD, raw=b'{"id": 7, "choices": {"a": 1}, "usage": [1]}', told=2**31 - 1)
    made.event(0, SENT + 5, t.CH_CONTENT, size=2**31 - 1, told=0, raw=b'{"usage":{"completion_tokens":1e300}}')
    made.row(0, sent_ns=SENT)
    row = one_row(context, made)
    assert row["status"] == "incomplete"


answers = st.lists(
    st.tuples(
        st.lists(st.integers(0, 9), min_size=0, max_size=6),  # gaps, ms
        st.one_of(st.none(), st.integers(0, 12)),  # usage
        st.sampled_from(["stop", "length", None]),
        st.booleans(),  # ends
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=60, deadline=None)
@given(answers, st.randoms(use_true_random=False), st.data())
def test_any_cut_of_blocks_gives_the_same_rows(
    recording: Any, context: RowContext, cases: Any, random: Any, data: Any
) -> None:
    """The events of several requests, shuffled together in each one's order, whole and cut anywhere."""
    made = recording()
    queues = []
    for request, (gaps, usage, finish, ends) in enumerate(cases):
        alone = recording()
        alone.chat(request, SENT + request, gaps, usage=usage, finish=finish)
        queues.append(alone.steps if ends else alone.steps[:-1])
    while any(queues):
        queue = random.choice([queue for queue in queues if queue])
        made.steps.append(queue.pop(0))
    whole = taken(context, made.blocks(), close=True)
    cuts = data.draw(st.lists(st.integers(0, len(made.steps)), max_size=6))
    assert taken(context, made.blocks(cuts), close=True) == whole

    level = LevelRows(context)
    rows: list[dict[str, Any]] = []
    for block in made.blocks(cuts):  # and taken after every block
        level.add(block)
        batch = level.take()
        rows += batch.requests.to_pylist() if batch else []
    batch = level.take(close=True)
    rows += batch.requests.to_pylist() if batch else []
    assert sorted(rows, key=lambda row: row["request"]) == whole[0]


def test_a_million_events_in_one_take(recording: Any, context: RowContext) -> None:
    made = million(recording)
    level = LevelRows(context)
    for block in made:
        level.add(block)
    batch = level.take()
    assert batch is not None
    assert batch.requests["status"].to_pylist() == ["ok"] * 118 * 64
    assert set(batch.requests["completion_tokens"].to_pylist()) == {128}


def million(recording: Any) -> list[Any]:
    """64 streams in step, 132 events each, as the measurer would interleave them."""
    blocks = []
    for wave in range(118):
        streams = []
        for slot in range(64):
            alone = recording()
            alone.chat(wave * 64 + slot, SENT + wave * 3 * 10**9 + slot, [20] * 128, usage=128, finish="length")
            streams.append(alone.steps)
        made = recording()
        for step in range(max(len(steps) for steps in streams)):
            made.steps += [steps[step] for steps in streams if step < len(steps)]
        blocks += made.blocks()
    return blocks
