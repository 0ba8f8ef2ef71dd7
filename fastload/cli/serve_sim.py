"""`fastload serve-sim`: the simulated engine in the foreground, until a signal ends it."""

from __future__ import annotations

import json

import click

from fastload.cli import flags, inputs


@click.command("serve-sim")
@click.option(
    "--port", **inputs.whole(0, 65_535), default="8000", show_default=True, help="0 takes a free one."
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Loopback only, unless --allow-remote.")
@click.option("--allow-remote", is_flag=True, help="Let other machines reach it.")
@click.option(
    "--profile",
    metavar="NAME",
    help="Behave like a measured engine: vllm-direct, vllm-spec, sglang-direct, sglang-spec, or a .toml file. "
    "Without it: lockstep, by the next three.",
)
@click.option(
    "--sim-speed",
    **inputs.real(0.0, above=True),
    default="1",
    show_default=True,
    help="Run the engine so many times faster; its name then says so.",
)
@click.option(
    "--ttft-ms", **inputs.real(0.0), default="50", show_default=True, help="Time to the first token."
)
@click.option(
    "--step-ms",
    **inputs.real(0.0),
    default="20",
    show_default=True,
    help="Time between two events; all streams get theirs in the same instant.",
)
@click.option(
    "--tokens-per-event",
    **inputs.whole(1, 1024),
    default="1",
    show_default=True,
    help="More than 1 looks like speculative decoding.",
)
@click.option(
    "--answer-tokens",
    **inputs.whole(1),
    help="End each answer by itself after N tokens. Without it only max_tokens ends one.",
)
@click.option(
    "--max-model-len",
    **inputs.whole(2),
    default="131072",
    show_default=True,
    help="Longest prompt and answer together, in tokens.",
)
@click.option("--model", metavar="NAME", help="The model's name.  [default: fastload-sim-PROFILE]")
@click.option(
    "--api-key", metavar="KEY", help="Ask clients for this key. FASTLOAD_API_KEY or --api-key-file are safer."
)
@click.option("--api-key-file", metavar="FILE", help="Read the key from a file; - reads standard input.")
@click.option("--cpu", **inputs.whole(0), help="Keep to this CPU.")
@click.option("--quiet", is_flag=True, help="Say nothing but errors.")
@click.option("--json", "as_json", is_flag=True, help="Announce the address as one line of JSON.")
def serve_sim(
    port: int,
    host: str,
    allow_remote: bool,
    profile: str | None,
    sim_speed: float,
    ttft_ms: float,
    step_ms: float,
    tokens_per_event: int,
    answer_tokens: int | None,
    max_model_len: int,
    model: str | None,
    api_key: str | None,
    api_key_file: str | None,
    cpu: int | None,
    quiet: bool,
    as_json: bool,
) -> int:
    """Run the simulated engine in the foreground, until Ctrl-C.

    It speaks OpenAI's protocol (chat, completions, responses, models, tokenize), Anthropic's
    messages, and has vLLM's /metrics. With --profile it queues, prefills and decodes like the engine
    that was measured; without, a fixed time to the first token and a fixed step. No model, no GPU.
    """
    key = inputs.api_key(api_key, api_key_file)
    cpu = inputs.processor(cpu)
    flags.warn_of_typed_secrets({"api_key": api_key, "headers": ()}, quiet)

    from fastload.sim.options import Options
    from fastload.sim.server import serve

    options = Options(
        ttft_ms=ttft_ms,
        step_ms=step_ms,
        tokens_per_event=tokens_per_event,
        answer_tokens=answer_tokens,
        max_model_len=max_model_len,
        profile=profile,
        speed=sim_speed,
        model=model or "",
        host=host,
        port=port,
        allow_remote=allow_remote,
        api_key=key.reveal() if key is not None else None,
    )

    def announce(url: str) -> None:
        if as_json:
            click.echo(json.dumps({"url": url, "model": options.model, "simulated": True}))
        elif not quiet:
            click.echo(f"SIMULATED engine {options.model} at {url} (Ctrl-C ends it)")

    signum = serve(options, announce, cpu=cpu)
    return 128 + signum if signum else 0
