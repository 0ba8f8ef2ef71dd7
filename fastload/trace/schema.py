"""The Arrow schemas of a run, version 1: one row a request in `requests`, one row a request with lists in
`tokens`.

This is the contract between the rooms and with the reader's own tools; SCHEMA.md says it in prose. Stamps are
int64 nanoseconds of CLOCK_MONOTONIC on the measuring host, never timestamps: only `sent_utc` is a date. A
column that cannot be filled yet is there and null. Within a version columns are only added; a change of
meaning is a new version.
"""

from __future__ import annotations

from typing import Final

import pyarrow as pa

SCHEMA_VERSION: Final = 1
DEFINITIONS_VERSION: Final = 1  # of METRICS.md: what the numbers mean

# Microseconds, not nanoseconds: pyarrow without pandas cannot turn a nanosecond timestamp into a Python
# value, and DuckDB's TIMESTAMPTZ holds microseconds. The exact instant is sent_ns + `utc_offset_ns` of the
# schema metadata.
UTC: Final = pa.timestamp("us", tz="UTC")

# name, type, unit, description. The stamps stand in the order in which they happen.
REQUESTS_COLUMNS: Final[tuple[tuple[str, pa.DataType, str, str], ...]] = (
    ("run_id", pa.string(), "", "name of the run directory"),
    ("target", pa.string(), "", "URL measured, without credentials"),
    ("level", pa.int32(), "", "value of the load: the concurrency; 0 for the warm-up of the run"),
    ("load_kind", pa.string(), "", "what level counts: concurrency, rate or users"),
    ("request", pa.int64(), "", "number of the request in the run; key to tokens"),
    ("worker", pa.int32(), "", "measuring process"),
    ("slot", pa.int32(), "", "slot of the closed loop that sent it"),
    ("attempt", pa.int32(), "", "1, or 2 after a stale kept-alive connection"),
    ("role", pa.string(), "", "warmup, measured or fill; null if the run ended before it was known"),
    ("due_ns", pa.int64(), "ns", "when it was wanted: closed loop, the done_ns before it in its slot"),
    ("sent_ns", pa.int64(), "ns", "just before its first byte was handed to the kernel"),
    ("sent_done_ns", pa.int64(), "ns", "after its last byte was handed to the kernel"),
    ("connect_ns", pa.int64(), "ns", "duration of the TCP connect made for it; null on a warm connection"),
    ("tls_ns", pa.int64(), "ns", "duration of the TLS handshake made for it; null if none"),
    ("first_byte_ns", pa.int64(), "ns", "first byte of the answer"),
    ("head_ns", pa.int64(), "ns", "complete head of the answer"),
    ("first_event_ns", pa.int64(), "ns", "first event with non-empty choices, even if only a role"),
    ("first_token_ns", pa.int64(), "ns", "first event with generated text in any channel"),
    ("first_answer_ns", pa.int64(), "ns", "first event with non-empty content; null if it only reasoned"),
    ("last_token_ns", pa.int64(), "ns", "last event with generated text"),
    (
        "done_ns",
        pa.int64(),
        "ns",
        "the read that completed the answer; in a failed row, the end of the exchange",
    ),
    ("framing_end_ns", pa.int64(), "ns", "end of the HTTP message"),
    ("sent_utc", UTC, "UTC", "sent_ns as a date (offset taken once at the start of the run, floor to us)"),
    ("status", pa.string(), "", "ok, or the class of the failure"),
    ("http_status", pa.int32(), "", "HTTP status code"),
    ("errno", pa.int32(), "", "errno of the socket that failed"),
    ("error", pa.string(), "", "message of the failure, cut to 500 characters"),
    ("retry_after_s", pa.float64(), "s", "Retry-After of the answer"),
    ("finish_reason", pa.string(), "", "finish_reason of the first choice"),
    ("max_tokens", pa.int32(), "tokens", "output length asked for"),
    ("prompt_tokens_planned", pa.int32(), "tokens", "prompt length the plan meant"),
    ("prompt_tokens", pa.int32(), "tokens", "prompt length in the server's usage"),
    ("completion_tokens", pa.int32(), "tokens", "n: output tokens; see token_source"),
    ("reasoning_tokens", pa.int32(), "tokens", "of n, reasoning, as usage says"),
    ("cached_tokens", pa.int32(), "tokens", "of the prompt, served from the prefix cache, as usage says"),
    (
        "token_source",
        pa.string(),
        "",
        "continuous_usage, token_ids, logprobs, usage, or events (an estimate)",
    ),
    ("itl_estimated", pa.bool_(), "", "true where the divisor of itl_ms is not known exactly"),
    ("events", pa.int32(), "events", "SSE events received, [DONE] included"),
    ("text_events", pa.int32(), "events", "of these, events that carry generated text"),
    ("n_first", pa.int32(), "tokens", "tokens in the first text event"),
    ("request_bytes", pa.int64(), "B", "bytes sent"),
    ("response_bytes", pa.int64(), "B", "bytes received"),
    (
        "stamp_source",
        pa.string(),
        "",
        "kernel (receive time of the segment) or read (time the read returned)",
    ),
    (
        "coalesced",
        pa.int32(),
        "events",
        "events whose stamp is an upper bound: more bytes came in their read",
    ),
    ("clamped", pa.int32(), "events", "events whose kernel stamp was out of order and was replaced"),
    ("client_delay_p50_us", pa.float64(), "us", "read time - kernel time over its events, median"),
    ("client_delay_max_us", pa.float64(), "us", "read time - kernel time over its events, maximum"),
    ("conn_reused", pa.bool_(), "", "sent on a connection that was already open"),
    ("backoff_ms", pa.int32(), "ms", "wait before it because of failures before it in its slot"),
    ("rtt_us", pa.int32(), "us", "TCP_INFO round trip time at the end"),
    ("retransmits", pa.int32(), "", "TCP_INFO retransmitted segments at the end"),
    ("framing_broken", pa.bool_(), "", "the connection failed after the answer was complete"),
    ("retried", pa.bool_(), "", "sent again because a kept-alive connection was stale"),
    ("due_late", pa.bool_(), "", "sent late after a stall of the client"),
    ("conversation", pa.int64(), "", "conversation it belongs to"),
    ("turn", pa.int32(), "", "turn in that conversation"),
    ("server_request_id", pa.string(), "", "id of the answer, else x-request-id"),
    ("ttft_ms", pa.float64(), "ms", "first_token - sent; null unless ok"),
    ("response_ttft_ms", pa.float64(), "ms", "first_token - due; null unless ok"),
    ("ttfa_ms", pa.float64(), "ms", "first_answer - sent; null unless ok"),
    (
        "itl_ms",
        pa.float64(),
        "ms/token",
        "(last_token - first_token) / tokens after the first event; null unless ok",
    ),
    ("latency_s", pa.float64(), "s", "done - sent; null unless ok"),
    ("response_latency_s", pa.float64(), "s", "done - due; null unless ok"),
    ("tps", pa.float64(), "tokens/s", "completion_tokens / latency; null unless ok"),
)

TOKENS_COLUMNS: Final[tuple[tuple[str, pa.DataType, str, str], ...]] = (
    ("request", pa.int64(), "", "number of the request in the run; key to requests"),
    ("event_ns", pa.list_(pa.int64()), "ns", "per event: its stamp - sent_ns of the request"),
    (
        "tokens",
        pa.list_(pa.int32()),
        "tokens",
        "per event: output tokens it brought; sums to completion_tokens",
    ),
    ("bytes", pa.list_(pa.int32()), "B", "per event: UTF-8 bytes of generated text"),
    (
        "channel",
        pa.list_(pa.uint8()),
        "",
        "per event: 0 none, 1 content, 2 reasoning, 3 tool call, 4 refusal, 16 [DONE]",
    ),
    (
        "flags",
        pa.list_(pa.uint8()),
        "",
        "per event, bits: 1 coalesced, 2 clamped, 4 read stamp, 8 choices, 16 finish, 32 usage, 64 named error",
    ),
    ("text", pa.string(), "", "with --save-text: content (or refusal) of the answer"),
    ("reasoning_text", pa.string(), "", "with --save-text: reasoning"),
    ("tool_text", pa.string(), "", "with --save-text: names and arguments of tool calls, as they came"),
)

_NS_COLUMNS: Final = tuple(
    name for name, kind, unit, _ in REQUESTS_COLUMNS if unit == "ns" and kind == pa.int64()
)

# How the columns are laid out on disk. Event stamps are the bulk: offsets from sent_ns grow by a near
# constant step, so DELTA_BINARY_PACKED keeps only the jitter (2.7 bytes where plain int64 takes 8). The
# narrow lists repeat a few values: a dictionary with run lengths. zstd then folds what repeats between
# requests.
REQUESTS_LAYOUT: Final[dict[str, object]] = {
    "compression": "zstd",
    "use_dictionary": [
        name for name, _, _, _ in REQUESTS_COLUMNS if name not in _NS_COLUMNS and name != "request"
    ],
    "column_encoding": dict.fromkeys((*_NS_COLUMNS, "request"), "DELTA_BINARY_PACKED"),
}
TOKENS_LAYOUT: Final[dict[str, object]] = {
    "compression": "zstd",
    "use_dictionary": [f"{name}.list.element" for name in ("tokens", "bytes", "channel", "flags")],
    "column_encoding": {"request": "DELTA_BINARY_PACKED", "event_ns.list.element": "DELTA_BINARY_PACKED"},
}


def requests_schema(metadata: dict[str, str] | None = None) -> pa.Schema:
    """The schema of `requests`, with the version and `metadata` (run_id, utc_offset_ns ...) attached."""
    return _schema(REQUESTS_COLUMNS, metadata)


def tokens_schema(metadata: dict[str, str] | None = None) -> pa.Schema:
    """The schema of `tokens`, with the version and `metadata` attached."""
    return _schema(TOKENS_COLUMNS, metadata)


def version_of(schema: pa.Schema) -> int:
    """The schema version a file says it was written with; 0 if it is not one of ours."""
    text = (schema.metadata or {}).get(b"fastload_schema", b"0")
    return int(text) if text.isdigit() else 0


def _schema(
    columns: tuple[tuple[str, pa.DataType, str, str], ...], metadata: dict[str, str] | None
) -> pa.Schema:
    fields = [
        pa.field(name, kind, metadata={"unit": unit, "description": description})
        for name, kind, unit, description in columns
    ]
    versions = {"fastload_schema": str(SCHEMA_VERSION), "definitions": str(DEFINITIONS_VERSION)}
    return pa.schema(fields, metadata={**versions, **(metadata or {})})
