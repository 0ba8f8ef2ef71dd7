"""The trace: bytes per token on disk, and the time to write and read ten million tokens.

Made-up blocks, in the shape the measurer gives (64 streams in lockstep, 128 tokens an answer, 20 ms a step and some
jitter), go through the run writer; then all tokens are read into Arrow, in a process of its own. Making the blocks is
not timed. What analysis costs is in analysis.py.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import rig

from fastload import _timing
from fastload.load.supervisor import LevelFacts
from fastload.trace.reader import open_run
from fastload.trace.writer import create_run

TOKENS = 10_000_000
OSL = 128
STREAMS = 64
STEP_NS = 20_000_000
COLUMNS = ("what", "value", "unit")
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_EVENT = (
    '{"id":"chatcmpl-%08d","object":"chat.completion.chunk","created":1764500000,"model":"made-up","choices":[%s]%s}'
)
_ROLE = '{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
_LAST = '{"index":0,"delta":{"content":" token"},"logprobs":null,"finish_reason":"length"}'
_USAGE = ',"usage":{"prompt_tokens":32,"total_tokens":%d,"completion_tokens":%d}'


def main() -> None:
    """Write and read, as often as asked."""
    if len(sys.argv) == 3 and sys.argv[1] == "--read":
        return read(Path(sys.argv[2]))
    given = rig.order(
        __doc__ or "",
        lambda words: words.add_argument("--tokens", type=int, default=TOKENS, help="of the trace [%(default)s]"),
    )
    waves = max(1, given.tokens // (OSL * STREAMS))
    tokens = waves * OSL * STREAMS
    runs: list[dict[str, float]] = []
    for _ in range(given.runs):
        with tempfile.TemporaryDirectory(prefix="fastload-bench-") as folder:
            path, seconds = write(Path(folder), waves)
            per = {
                kind: sum(part.stat().st_size for part in (path / kind).rglob("*.parquet")) / tokens
                for kind in ("tokens", "requests")
            }
            run = {"on disk, tokens/": per["tokens"], "on disk, requests/": per["requests"]}
            run["write"] = tokens / seconds / 1e6
            said = subprocess.run(
                [sys.executable, __file__, "--read", str(path)], check=True, stdout=subprocess.PIPE, text=True
            ).stdout
            run["read"] = tokens / float(said) / 1e6
        runs.append(run)
    units = ("bytes/token", "bytes/token", "M tokens/s", "M tokens/s")
    rows = [[name, rig.middle([run[name] for run in runs]), unit] for name, unit in zip(runs[0], units, strict=True)]
    rig.answer(
        given, "trace", f"The trace of {tokens:,} tokens ({waves * STREAMS:,} requests)", "CLOCK_MONOTONIC",
        COLUMNS, rows, packages=rig.versions("pyarrow", "numpy"), data=runs,
        notes=(
            "write: from sealed blocks to synced Parquet files; read: all tokens into Arrow",
        ),
    )


def write(folder: Path, waves: int) -> tuple[Path, float]:
    """Write the run: (its directory, seconds inside the writer)."""
    writer = create_run(folder, "bench", {"target": {"url": "http://127.0.0.1", "model": "made-up"}})
    start = _timing.now_ns()
    writer.begin_level(0, STREAMS, lambda request: 32, OSL)
    spent = 0
    for block in blocks(waves, start):
        began = time.monotonic_ns()
        writer.add_block(block)
        spent += time.monotonic_ns() - began
    began = time.monotonic_ns()
    end = start + waves * (OSL + 3) * STEP_NS
    done = waves * STREAMS
    writer.end_level(LevelFacts(0, STREAMS, True, start, end, done, done, {"stamps": "kernel"}))
    writer.close("complete")
    return writer.path, (spent + time.monotonic_ns() - began) / 1e9


def blocks(waves: int, start: int) -> Iterator[_timing.Block]:
    """One block a wave: every stream sends a request and gets its whole answer."""
    random = np.random.default_rng(1)
    steps = OSL + 3  # sent, role with the first token's step, tokens, usage, [DONE]
    channel = np.full((steps + 1, STREAMS), _timing.CH_CONTENT, "u1")
    channel[0], channel[1], channel[-2], channel[-1] = (
        _timing.CH_SENT, _timing.CH_NONE, _timing.CH_NONE, _timing.CH_DONE,
    )
    flags = np.full(channel.shape, _timing.FL_CHOICES, "u1")
    flags[0] = flags[-1] = 0
    flags[-3] |= _timing.FL_FINISH
    flags[-2] = _timing.FL_USAGE
    size = np.where(channel == _timing.CH_CONTENT, 6, 0).astype("<i4")
    told = np.full(channel.shape, -1, "<i4")
    told[-2] = OSL
    field = {name: i for i, name in enumerate(_timing.ROW_FIELDS)}
    for wave in range(waves):
        # a burst a step, 4 us a stream, and noise of the kind a kernel stamp has
        at = start + wave * steps * STEP_NS + np.arange(steps + 1)[:, None] * STEP_NS + np.arange(STREAMS) * 4000
        stamp = at + random.exponential(2000, at.shape).astype("i8")
        stamp[1], stamp[-2:] = stamp[2], stamp[-3]
        request = np.arange(wave * STREAMS, (wave + 1) * STREAMS)
        columns = {
            "stamp_ns": stamp.astype("<i8"),
            "request": np.broadcast_to(request.astype("<i4"), at.shape),
            "delay_ns": random.integers(2000, 60000, at.shape).astype("<i4"),
            "bytes": size, "tokens": told, "channel": channel, "flags": flags,
        }
        rows = np.full((STREAMS, len(field)), -1, "<i8")
        rows[:, [field[name] for name in ("level", "coalesced", "clamped", "end", "backoff_ms", "retransmits")]] = 0
        for name, value in {
            "request": request, "slot": np.arange(STREAMS), "attempt": 1, "role": _timing.ROLE_MEASURED,
            "due_ns": stamp[0], "sent_ns": stamp[0], "sent_done_ns": stamp[0] + 9000, "first_byte_ns": stamp[1],
            "head_ns": stamp[1], "done_ns": stamp[-1], "framing_end_ns": stamp[-1], "http_status": 200,
            "request_bytes": 400, "response_bytes": 33000, "events": steps, "stamp_source": 1, "conn_reused": 1,
            "rtt_us": 30, "framing": 1, "row_flags": _timing.RF_SSE | _timing.RF_DONE | _timing.RF_KEEPALIVE,
        }.items():
            rows[:, field[name]] = value
        blobs = []
        for number in request.tolist():
            usage = _USAGE % (32 + OSL, OSL)
            blobs.append((number, 0, _timing.BLOB_HEAD, _HEAD))
            for ordinal, (choice, more) in {0: (_ROLE, ""), OSL: (_LAST, ""), OSL + 1: ("", usage)}.items():
                blobs.append((number, ordinal, _timing.BLOB_EVENT, (_EVENT % (number, choice, more)).encode()))
        events = {name: np.ascontiguousarray(column).tobytes() for name, column in columns.items()}
        yield _timing.Block(0, events, at.size, rows.tobytes(), STREAMS, blobs, wave)


def read(path: Path) -> None:
    """Print the seconds to read all tokens."""
    rig.pin(rig.CLIENT_CPU)
    began = _timing.now_ns()
    if not open_run(path).tokens().num_rows:
        raise SystemExit("there are no tokens in the run")
    print((_timing.now_ns() - began) / 1e9)


if __name__ == "__main__":
    main()
