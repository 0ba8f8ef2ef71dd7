"""What a simulated engine can be told."""

import ipaddress
import math
from dataclasses import dataclass, field

from fastload.errors import PlanError
from fastload.sim import profiles

MODEL_PREFIX = "fastload-sim-"
# in /v1/models: how a client knows, without being told, that it measures a simulation
OWNED_BY = "fastload-sim"


@dataclass(frozen=True, slots=True)
class Options:
    """One simulated engine. Times in milliseconds. Raises `PlanError` for a value that makes no sense.

    ttft_ms: a request may get its first token this long after it arrived, at the next tick of the grid.
    step_ms: distance of two ticks; at each, every running stream gets one event.
    tokens_per_event: tokens in each event (more than 1 looks like speculative decoding).
    answer_tokens: the model ends by itself after so many, the end token counted (None: max_tokens ends it).
    profile: the engine model of that name (`profiles.load`) in place of the plain lockstep one, which the first three
    are for. speed: so many seconds of the engine pass in one of the wall. seed: varies what a profile draws.
    model: its name; without one, that of the profile, and of the speed if it is not 1. port: 0 takes a free one.
    host: loopback only, unless allow_remote.
    """

    ttft_ms: float = 50.0
    step_ms: float = 20.0
    tokens_per_event: int = 1
    answer_tokens: int | None = None
    max_model_len: int = 131_072
    profile: str | None = None
    speed: float = 1.0
    seed: int = 0
    model: str = ""
    host: str = "127.0.0.1"
    port: int = 0
    allow_remote: bool = False
    api_key: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        # The grid is kept in ns and armed by the kernel; below 0.1 ms Python could not follow it anyway.
        if not 0 <= self.ttft_ms <= 3_600_000:
            raise PlanError(f"--ttft-ms {self.ttft_ms:g}: must be 0 to 3600000 milliseconds")
        if not 0.1 <= self.step_ms <= 60_000 or not math.isfinite(self.step_ms):
            raise PlanError(f"--step-ms {self.step_ms:g}: must be 0.1 to 60000 milliseconds")
        if not 1 <= self.tokens_per_event <= 1024:
            raise PlanError(f"--tokens-per-event {self.tokens_per_event}: must be 1 to 1024")
        if self.answer_tokens is not None and self.answer_tokens < 1:
            raise PlanError(f"--answer-tokens {self.answer_tokens}: must be at least 1")
        if self.max_model_len < 2:
            raise PlanError(f"--max-model-len {self.max_model_len}: must be at least 2")
        if not 0.01 <= self.speed <= 1000:
            raise PlanError(f"--sim-speed {self.speed:g}: must be 0.01 to 1000 times real time")
        name = "lockstep" if self.profile is None else profiles.load(self.profile).name
        if not self.model:
            mark = "" if self.speed == 1 else f"-x{self.speed:g}"
            object.__setattr__(self, "model", f"{MODEL_PREFIX}{name}{mark}")
        if not 0 <= self.port <= 65_535:
            raise PlanError(f"--port {self.port}: must be 0 (a free one) to 65535")
        if not self.allow_remote and not _is_loopback(self.host):
            raise PlanError(f"--host {self.host}: must be a loopback address, unless --allow-remote is given")


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
