"""What /metrics says, under vLLM's names, in Prometheus' text format. No sockets, no clock: times come in."""

from bisect import bisect_left

from fastload.sim.engine import Counters

CONTENT_TYPE = "text/plain; version=1.0.0; charset=utf-8"

_FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_TOKEN_S = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_REQUEST_S = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_TOKENS = tuple(first * 10**power for power in range(6) for first in (1, 2, 5))


class Histogram:
    """Counts by bucket, and their sum."""

    def __init__(self, name: str, says: str, bounds: tuple[float, ...]) -> None:
        self.name, self.says, self.bounds = name, says, bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def lines(self, labels: str) -> list[str]:
        lines = [f"# HELP {self.name} {self.says}", f"# TYPE {self.name} histogram"]
        total = 0
        for bound, count in zip((*self.bounds, None), self.counts, strict=True):
            total += count
            le = "+Inf" if bound is None else repr(float(bound))
            lines.append(f'{self.name}_bucket{{{labels},le="{le}"}} {float(total)}')
        return [*lines, f"{self.name}_count{{{labels}}} {float(total)}", f"{self.name}_sum{{{labels}}} {self.sum!r}"]


class Metrics:
    """What the server has seen since it began. Seconds are those of the wall, whatever the engine's speed."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.finished = {"stop": 0, "length": 0, "abort": 0}
        self.first_token = Histogram("vllm:time_to_first_token_seconds", "Time to first token.", _FIRST_TOKEN_S)
        self.between = Histogram(
            "vllm:inter_token_latency_seconds", "Time between two outputs of a request.", _TOKEN_S
        )
        self.per_token = Histogram(
            "vllm:request_time_per_output_token_seconds", "Mean time per output token of a request.", _TOKEN_S
        )
        self.latency = Histogram("vllm:e2e_request_latency_seconds", "Latency of a request.", _REQUEST_S)
        self.queue = Histogram("vllm:request_queue_time_seconds", "Time waiting before the batch.", _REQUEST_S)
        self.prompt = Histogram("vllm:request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self.generation = Histogram("vllm:request_generation_tokens", "Tokens generated for a request.", _TOKENS)

    def text(self, model: str, counters: Counters, running: int, waiting: int, memory_share: float) -> bytes:
        """The whole page."""
        labels = f'engine="0",model_name="{model}"'
        lines: list[str] = []

        def one(name: str, kind: str, says: str, value: float, more: str = "") -> None:
            if not more or more.startswith("+"):
                lines.extend((f"# HELP {name} {says}", f"# TYPE {name} {kind}"))
            total = "_total" if kind == "counter" else ""
            extra = "," + more.lstrip("+") if more else ""
            lines.append(f"{name}{total}{{{labels}{extra}}} {float(value)}")

        one("vllm:num_requests_running", "gauge", "Requests in the batch.", running)
        one("vllm:num_requests_waiting", "gauge", "Requests that wait for the batch.", waiting)
        one("vllm:kv_cache_usage_perc", "gauge", "KV memory in use; 1 is all.", memory_share)
        one("vllm:num_preemptions", "counter", "Requests put out of the batch again.", counters.preemptions)
        one("vllm:prefix_cache_queries", "counter", "Prompt tokens looked up in the cache.", counters.cache_queries)
        one("vllm:prefix_cache_hits", "counter", "Prompt tokens found in the cache.", counters.cache_hits)
        one("vllm:prompt_tokens", "counter", "Prompt tokens of requests with a first token.", self.prompt_tokens)
        one("vllm:generation_tokens", "counter", "Tokens generated.", self.generation_tokens)
        for place, (reason, count) in enumerate(self.finished.items()):
            label = f'finished_reason="{reason}"'
            one("vllm:request_success", "counter", "Requests ended.", count, label if place else "+" + label)
        if counters.accepted is not None:
            one("vllm:spec_decode_num_drafts", "counter", "Drafts made.", counters.drafts)
            one("vllm:spec_decode_num_draft_tokens", "counter", "Tokens drafted.", counters.draft_tokens)
            one("vllm:spec_decode_num_accepted_tokens", "counter", "Drafted tokens taken.", sum(counters.accepted))
            name = "vllm:spec_decode_num_accepted_tokens_per_pos"
            for place, count in enumerate(counters.accepted):
                label = f'position="{place}"'
                one(name, "counter", "Taken, by position in the draft.", count, label if place else "+" + label)
        for histogram in (
            self.first_token,
            self.between,
            self.per_token,
            self.latency,
            self.queue,
            self.prompt,
            self.generation,
        ):
            lines += histogram.lines(labels)
        return "\n".join([*lines, ""]).encode()
