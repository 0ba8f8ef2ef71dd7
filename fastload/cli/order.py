"""The flags of `fastload sweep`, and the order they make: every value checked, nothing touched yet.

Defaults that belong to another room are written here because --help must show them without importing that
room.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fastload.cli import flags, inputs
from fastload.errors import PlanError

if TYPE_CHECKING:
    from fastload.load.secrets import Secret
    from fastload.load.target_address import Way
    from fastload.plan import Level

SIM_PROFILES = ("lockstep", "vllm-direct", "vllm-spec", "sglang-direct", "sglang-spec")
DEFAULT_LEVELS = "1,2,4,8,16,32,64"
LARGEST_SEED = 2**63 - 1
# Body fields that fastload decides: another value from --extra-body would measure something else than asked.
OWN_FIELDS = {
    "model": "use --model",
    "messages": "the plan writes the prompts",
    "prompt": "the plan writes the prompts",
    "input": "the plan writes the prompts",
    "stream": "every request streams",
    "stream_options": "usage is always asked for",
    "max_tokens": "use --osl",
    "max_completion_tokens": "use --osl",
    "max_output_tokens": "use --osl",
    "ignore_eos": "use --ignore-eos",
}
SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)

_whole, _real, _time = inputs.whole, inputs.real, inputs.duration()

options = flags.together(
    [
        click.option(
            "--url",
            "--base-url",
            "url",
            metavar="URL",
            help="The server, with or without /v1. Without it the simulated engine is measured.",
        ),
        click.option(
            "--target",
            metavar="sim:PROFILE",
            help="Measure the built-in simulated engine: sim:lockstep (the default without --url), "
            "sim:vllm-direct, sim:vllm-spec, sim:sglang-direct or sim:sglang-spec.",
        ),
        click.option(
            "--sim-speed",
            **_real(0.0, above=True),
            help="Run the simulated engine so many times faster; every output says so.",
        ),
        click.option(
            "--model",
            metavar="NAME",
            help="The model to ask for. One that is served alone is chosen by itself.",
        ),
        click.option(
            "--endpoint",
            default="chat",
            show_default=True,
            metavar="NAME",
            help="The API that is asked: OpenAI's chat, completions or responses, or Anthropic's messages.",
        ),
        flags.access,
        click.option(
            "--wait-ready",
            **_time,
            help="Wait this long (2h, 90s) for the server to come up, the model to be listed and "
            "one real completion to succeed. Without it the server must be there.",
        ),
        click.option(
            "--levels",
            "--concurrency",
            "levels",
            default=DEFAULT_LEVELS,
            show_default=True,
            metavar="N,N,...",
            help="Requests in flight, one level after the other.",
        ),
        click.option(
            "--rounds",
            **_whole(0, 1_000_000),
            default="10",
            show_default=True,
            help="Measured requests of a level, in multiples of its concurrency ...",
        ),
        click.option(
            "--min-requests",
            **_whole(0),
            default="30",
            show_default=True,
            help="... but not fewer than these.",
        ),
        click.option(
            "--num-requests",
            "--num-prompts",
            "num_requests",
            **_whole(1),
            help="Measured requests of each level, in place of --rounds and --min-requests.",
        ),
        click.option("--duration", **_time, help="End each level after this time (90s, 5m)."),
        click.option(
            "--warmup",
            **_whole(0),
            default="0",
            show_default=True,
            help="Warm-up requests at the head of each level, handed over without draining. "
            "One request opens the run in any case.",
        ),
        click.option(
            "--isl",
            "--random-input-len",
            "isl",
            **_whole(1, 10_000_000),
            default="128",
            show_default=True,
            help="Tokens of each prompt, as the server counts them.",
        ),
        click.option(
            "--osl",
            "--random-output-len",
            "osl",
            **_whole(1, 10_000_000),
            default="128",
            show_default=True,
            help="Most tokens of each answer (max_tokens).",
        ),
        click.option("--ignore-eos", is_flag=True, help="Ask the server not to end answers early."),
        click.option("--temperature", **_real(0.0), help="This and the next seven are sent only if given."),
        click.option("--top-p", **_real(0.0, 1.0)),
        click.option("--top-k", **_whole(-1)),
        click.option("--min-p", **_real(0.0, 1.0)),
        click.option("--presence-penalty", **_real(-2.0, 2.0)),
        click.option("--frequency-penalty", **_real(-2.0, 2.0)),
        click.option("--repetition-penalty", **_real(0.0, above=True)),
        click.option("--stop", multiple=True, metavar="TEXT", help="End an answer at this text; repeatable."),
        click.option(
            "--extra-body", metavar="JSON", help="More fields for the request body, as a JSON object."
        ),
        click.option(
            "--seed",
            **_whole(0, LARGEST_SEED),
            help="The same seed gives the same prompts. Without it a new one is drawn and recorded, "
            "so that a second run does not measure the prefix cache.",
        ),
        click.option(
            "--connect-timeout",
            **_time,
            default="10s",
            show_default=True,
            help="Longest wait for a connection.",
        ),
        click.option(
            "--first-byte-timeout",
            **_time,
            default="10m",
            show_default=True,
            help="Longest wait for an answer to begin, up to its first token. Servers send a head, pings "
            "and comments while a request queues: they do not end it.",
        ),
        click.option(
            "--idle-timeout",
            **_time,
            default="60s",
            show_default=True,
            help="From then on the longest time without an event or a piece of one; pings and comments are none.",
        ),
        click.option(
            "--timeout",
            **_time,
            default="1h",
            show_default=True,
            help="Longest request, whatever comes.",
        ),
        click.option(
            "--max-failures",
            **_whole(1),
            help="Give a level up after so many failed requests in a row. Without it: when for 30 s nothing "
            "but failures came, 10 at least and one for each stream.",
        ),
        click.option(
            "--respect-retry-after",
            is_flag=True,
            help="After a 429 or 503 its stream waits as long as Retry-After says, up to 5 minutes. Without "
            "it, as after any failure that repeats: 100 ms doubling to 2 s.",
        ),
        click.option("--cpu", **_whole(0), help="Keep the measuring process on this CPU."),
        click.option(
            "--save-text", is_flag=True, help="Keep every event as it came, not only its times and sizes."
        ),
        click.option(
            "--output",
            default="results",
            show_default=True,
            metavar="DIR",
            help="The run's own directory is made inside this one.",
        ),
        click.option("--name", metavar="NAME", help="Name of the run; the model's name without it."),
        click.option(
            "--label",
            "labels",
            multiple=True,
            metavar="K=V",
            help="Note about the target, kept with the run; repeatable.",
        ),
        click.option("--strict", is_flag=True, help="Exit with 1 when the run is suspect, too."),
        click.option("--quiet", is_flag=True, help="No progress; only the result."),
        click.option(
            "--json", "as_json", is_flag=True, help="Print summary.json on stdout and nothing else."
        ),
    ]
)


@dataclass(frozen=True, slots=True)
class Order:
    """What to run, checked as far as it can be without network or disk. Times in seconds."""

    url: str | None  # None: the simulated engine
    profile: str | None  # of the simulated engine; None: lockstep
    sim_speed: float
    model: str | None
    endpoint: str
    key: Secret | None
    headers: Mapping[str, str]
    way: Way
    wait_ready_s: float | None
    levels: tuple[Level, ...]
    isl: int
    osl: int
    ignore_eos: bool
    sampling: Mapping[str, object]
    extra_body: Mapping[str, object]
    seed: int
    load: Mapping[str, Any]  # keyword arguments of load.supervisor.LoadOptions
    output: Path
    name: str | None
    labels: Mapping[str, str]
    strict: bool
    quiet: bool
    as_json: bool


def check(typed: Mapping[str, Any]) -> Order:
    """Return the order the flags make. Raises PlanError for the first that cannot be meant."""
    from fastload import plan

    url = _url(typed["url"], typed["target"])
    sampling: dict[str, object] = {name: typed[name] for name in SAMPLING_FIELDS if typed[name] is not None}
    if typed["stop"]:
        sampling["stop"] = list(typed["stop"])
    key, headers = flags.credentials(typed["api_key"], typed["api_key_file"], typed["headers"])
    load: dict[str, Any] = {
        "cpu": inputs.processor(typed["cpu"]),
        "connect_timeout_s": typed["connect_timeout"],
        "first_byte_timeout_s": typed["first_byte_timeout"],
        "idle_timeout_s": typed["idle_timeout"],
        "timeout_s": typed["timeout"],
        "respect_retry_after": typed["respect_retry_after"],
        "save_text": typed["save_text"],
    }
    if typed["max_failures"] is not None:
        load["max_failures"] = typed["max_failures"]
    return Order(
        url=url,
        profile=_profile(typed["target"]),
        sim_speed=_sim_speed(typed["sim_speed"], url),
        model=typed["model"],
        endpoint=_endpoint(typed["endpoint"]),
        # The embedded engine asks for no key, and a secret goes nowhere it is not asked for.
        key=key if url is not None else None,
        headers=headers,
        way=flags.way(typed),
        wait_ready_s=typed["wait_ready"],
        levels=plan.levels(
            plan.parse_levels(typed["levels"]),
            rounds=typed["rounds"],
            min_requests=typed["min_requests"],
            num_requests=typed["num_requests"],
            duration_s=typed["duration"],
            warmup=typed["warmup"],
        ),
        isl=typed["isl"],
        osl=typed["osl"],
        ignore_eos=typed["ignore_eos"],
        sampling=sampling,
        extra_body=_extra_body(typed["extra_body"], sampling),
        seed=secrets.randbits(31) if typed["seed"] is None else typed["seed"],
        load=load,
        name=None if typed["name"] is None else inputs.run_name(typed["name"], ""),
        labels=inputs.pairs("--label", typed["labels"]),
        strict=typed["strict"],
        quiet=typed["quiet"],
        as_json=typed["as_json"],
        output=inputs.writable("--output", Path(typed["output"])),
    )


def _url(url: str | None, target: str | None) -> str | None:
    """Return the server's URL, or None for the simulated engine."""
    if url is not None and target is not None:
        raise PlanError("--url and --target are both given; give one")
    if url is not None:
        from fastload.load.target_address import parse_url

        parse_url(url)  # its PlanError now, not after something was started
    return url


def _profile(target: str | None) -> str | None:
    """The profile behind `sim:`; None for the lockstep engine."""
    if target is None:
        return None
    kind, _, name = target.partition(":")
    if kind != "sim" or name not in SIM_PROFILES:
        hint = " (a server's address goes into --url)" if "://" in target else ""
        raise PlanError(f"--target {target!r}: not known{hint}; give sim:{', sim:'.join(SIM_PROFILES)}")
    return None if name == "lockstep" else name


def _sim_speed(speed: float | None, url: str | None) -> float:
    if speed is None:
        return 1.0
    if url is not None:
        raise PlanError(f"--sim-speed {speed:g}: is for the simulated engine, not for --url")
    if not 0.01 <= speed <= 1000:
        raise PlanError(f"--sim-speed {speed:g}: must be 0.01 to 1000 times real time")
    return speed


def _endpoint(endpoint: str) -> str:
    from fastload.plan import ENDPOINTS

    right = f"give {' or '.join(ENDPOINTS)}"
    if endpoint not in ENDPOINTS:
        raise PlanError(f"--endpoint {endpoint!r}: not known; {right}")
    return endpoint


def _extra_body(text: str | None, sampling: Mapping[str, object]) -> dict[str, object]:
    fields = inputs.json_object("--extra-body", text)
    for name in fields:
        if name in OWN_FIELDS:
            raise PlanError(f"--extra-body {name!r}: fastload writes this field itself; {OWN_FIELDS[name]}")
        if name in sampling:
            raise PlanError(f"--extra-body {name!r}: given by --{name.replace('_', '-')} too; give it once")
    return fields
