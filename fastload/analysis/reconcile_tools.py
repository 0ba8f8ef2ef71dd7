"""How other load generators define their figures, as choices that can be taken one at a time.

Read in their sources: vllm 0.32.0 (benchmarks/serve.py), sglang 0.5.23 (benchmark/serving.py), aiperf 0.13.0
(metrics/types), guidellm 0.8.1 (schemas/base), CordatusAI/llm-benchmark (benchmark.py); chat completions, streamed.
A tool is a chain of steps that starts at our own definition (METRICS.md, 3 and 4). `reconcile` takes them in this
order and measures what each one changes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

ANY_TEXT, NO_REFUSAL, NO_TOOL = 4, 3, 2
"""Highest channel that is a chunk (trace/SCHEMA.md): 1 content, 2 reasoning, 3 tool call, 4 refusal."""


@dataclass(frozen=True, slots=True)
class Chunks:
    """Which events a tool takes as a chunk of output: text in a channel up to `channels`, and events with non-empty
    choices but without text that stand before the first text (a role), between, or after the last (a finish).
    """

    channels: int = ANY_TEXT
    before: bool = False
    between: bool = False
    after: bool = False


@dataclass(frozen=True, slots=True)
class Definition:
    """One set of choices; the defaults are ours.

    chunks: see there. end: where a latency ends ("done", "last chunk", "last event", "framing"). statuses: of measured
    requests that count. connecting: a connection made for the request is inside its clock. counted: output tokens as
    the server's "usage" tells or as "requested". per_token: the time over the tokens ("ours", "chunks / (n - 1)", from
    the first chunk to the last; "end / (n - 1)", to the end). one_token_itl: of an answer of one token. pooled: "ITL"
    is the gap between chunks. rank: percentiles by "nearest" rank, "linear" interpolation, or "nearest, median linear".
    Throughput: window "steady" (ours), "whole" (first sent to last end) or "to the last chunk"; roles "all" or
    "measured"; rate "window" or "1 / mean latency".
    """

    chunks: Chunks = Chunks()
    end: str = "done"
    statuses: frozenset[str] = frozenset({"ok"})
    connecting: bool = False
    counted: str = "usage"
    per_token: str = "ours"
    one_token_itl: float | None = None
    pooled: bool = False
    rank: str = "nearest"
    window: str = "steady"
    roles: str = "all"
    rate: str = "window"


OURS = Definition()


@dataclass(frozen=True, slots=True)
class Step:
    """One difference between definitions: what it is, in words, and the choices after it."""

    says: str
    after: Definition


@dataclass(frozen=True, slots=True)
class Tool:
    """A load generator: the steps from our definition to its own, what it calls each figure, and what its client does
    that no definition can show (`remarks`).

    names: our name of a figure to the tool's; a figure it does not print is missing.
    """

    key: str
    title: str
    steps: tuple[Step, ...]
    names: Mapping[str, str]
    remarks: tuple[str, ...]

    @property
    def definition(self) -> Definition:
        """All its choices."""
        return self.steps[-1].after


def _chain(*steps: tuple[str, Mapping[str, object]]) -> tuple[Step, ...]:
    """Return steps whose choices add up. A choice of `Chunks` is given by its own name."""
    made: list[Step] = []
    now = OURS
    for says, choices in steps:
        of_chunks = {name: choice for name, choice in choices.items() if name in Chunks.__slots__}
        others = {name: choice for name, choice in choices.items() if name not in of_chunks}
        now = replace(now, chunks=replace(now.chunks, **of_chunks), **others)  # type: ignore[arg-type]
        made.append(Step(says, now))
    return tuple(made)


_EARLY_ENDS = "answers that ended without finish_reason or [DONE] count as successes"
_CONNECTING = "connecting is inside the clock, where a connection was made for the request"
_N_MINUS_1 = "per token: divided by n - 1 in any case, not by the tokens that came after the first event"
_POOLED = 'its "ITL" is the gap between chunks, pooled over requests: not per token, not per request'
_NO_TOOLS = "tool calls and refusals are no chunks"
_LINEAR = "percentiles interpolated between ranks, not the nearest rank"
_WHOLE = "rates from the first request sent to the last one's end, ramp and drain included"
_ONLY_MEASURED = "rates of measured requests only: none sent to keep the load up"
_LAST_CHUNK = "latency ends at the last chunk, not at [DONE]"

# sglang's program began as vllm's, and kept its words
_BENCH_NAMES = {
    "ttft_ms": "TTFT",
    "itl_ms": "TPOT",
    "icl_ms": "ITL",
    "latency_s": "E2EL",
    "aggregate_tok_s": "output_throughput",
    "system_rps": "request_throughput",
}

VLLM = Tool(
    "vllm",
    "vllm bench serve",
    _chain(
        (_EARLY_ENDS, {"statuses": frozenset({"ok", "incomplete", "stream_error", "empty"})}),
        (_CONNECTING, {"connecting": True}),
        (_POOLED, {"pooled": True}),
        (_N_MINUS_1, {"per_token": "chunks / (n - 1)"}),
        ("the role event is taken as the first token", {"before": True}),
        ("events with choices but without text, between tokens, count as chunks", {"between": True}),
        ("the finish event counts as a chunk", {"after": True}),
        (_LAST_CHUNK, {"end": "last chunk"}),
        (_WHOLE, {"window": "whole"}),
        (_ONLY_MEASURED, {"roles": "measured"}),
        (_LINEAR, {"rank": "linear"}),
    ),
    _BENCH_NAMES,
    (
        "its clock starts in Python before the request is encoded, and it stamps an event when its loop comes to it",
        "where usage is missing it counts tokens with its own tokenizer",
    ),
)

SGLANG = Tool(
    "sglang",
    "sglang bench_serving",
    _chain(
        (_EARLY_ENDS, {"statuses": frozenset({"ok", "incomplete", "stream_error", "empty"})}),
        (_CONNECTING, {"connecting": True}),
        (_POOLED, {"pooled": True}),
        (_N_MINUS_1, {"per_token": "chunks / (n - 1)"}),
        (_NO_TOOLS, {"channels": NO_TOOL}),
        ("latency ends at the last event of any kind, usage and [DONE] included", {"end": "last event"}),
        ("per token: the time behind the last token (usage, [DONE]) is in it", {"per_token": "end / (n - 1)"}),
        ("the length asked for is taken as the count of tokens: it asks for no usage", {"counted": "requested"}),
        (_WHOLE, {"window": "whole"}),
        (_ONLY_MEASURED, {"roles": "measured"}),
        (_LINEAR, {"rank": "linear"}),
    ),
    _BENCH_NAMES | {"latency_s": "E2E latency"},
    (
        "it makes a new connection for every request, inside its clock: no trace on kept connections holds that time",
        "an answer without text counts with a TTFT of 0",
        "with speculation its ITL is divided by tokens that it counts itself, chunk by chunk",
        "its clock is read after each event was parsed",
    ),
)

AIPERF = Tool(
    "aiperf",
    "AIPerf",
    _chain(
        (_CONNECTING, {"connecting": True}),
        (_N_MINUS_1, {"per_token": "chunks / (n - 1)"}),
        ("refusals are no chunks", {"channels": NO_REFUSAL}),
        (_LAST_CHUNK, {"end": "last chunk"}),
        (_WHOLE + ", which is its last chunk", {"window": "to the last chunk"}),
        (_ONLY_MEASURED, {"roles": "measured"}),
        (_LINEAR, {"rank": "linear"}),
    ),
    {
        "ttft_ms": "Time to First Token",
        "itl_ms": "Inter Token Latency",
        "icl_ms": "Inter Chunk Latency",
        "latency_s": "Request Latency",
        "tps": "E2E Output Token Throughput",
        "decode_tps": "Output Token Throughput Per User",
        "aggregate_tok_s": "Output Token Throughput",
        "system_rps": "Request Throughput",
    },
    (
        "it counts tokens with its own tokenizer unless told --use-server-token-count; here the server's count stands",
        "its percentiles of chunk gaps are those of a sketch (t-digest), near the interpolated ones",
    ),
)

GUIDELLM = Tool(
    "guidellm",
    "guidellm",
    _chain(
        (_EARLY_ENDS, {"statuses": frozenset({"ok", "incomplete"})}),
        (_N_MINUS_1, {"per_token": "chunks / (n - 1)"}),
        ("refusals are no chunks", {"channels": NO_REFUSAL}),
        (_WHOLE, {"window": "whole"}),
        (_ONLY_MEASURED, {"roles": "measured"}),
    ),
    {
        "ttft_ms": "time_to_first_token_ms",
        "itl_ms": "inter_token_latency_ms",
        "latency_s": "request_latency",
        "aggregate_tok_s": "output_tokens_per_second",
        "system_rps": "requests_per_second",
    },
    (
        'what it calls time_per_output_token_ms has the TTFT in it: (last token - start) / n; its "ITL" is our ITL',
        "its clock is the wall clock, which may be set during a run",
        "it keeps the first and the last token's time and spaces those between evenly: it has no gaps between chunks",
    ),
)

CORDATUS = Tool(
    "cordatus",
    "Cordatus llm-benchmark",
    _chain(
        (_EARLY_ENDS, {"statuses": frozenset({"ok", "incomplete"})}),
        (_CONNECTING, {"connecting": True}),
        (_N_MINUS_1, {"per_token": "chunks / (n - 1)"}),
        (_NO_TOOLS, {"channels": NO_TOOL}),
        ("latency ends at the end of the HTTP message", {"end": "framing"}),
        ("an answer of one token has an ITL of 0", {"one_token_itl": 0.0}),
        (
            'its "RPS" is requests / sum of latencies, which is 1 / mean latency: one stream\'s rate',
            {"rate": "1 / mean latency"},
        ),
        ("the median is interpolated where n is even", {"rank": "nearest, median linear"}),
    ),
    {"ttft_ms": "TTFT", "itl_ms": "ITL", "latency_s": "Latency", "tps": "TPS", "system_rps": "Throughput (RPS)"},
    (
        "its clock is the wall clock, which may be set during a run",
        "it holds at most 100 connections: above that, waiting for one is in its TTFT",
        "its threads share one Python interpreter, and stamp an event when their turn comes",
    ),
)

TOOLS: Mapping[str, Tool] = {tool.key: tool for tool in (VLLM, SGLANG, AIPERF, GUIDELLM, CORDATUS)}
