"""`fastload sweep`: the main job. Three of the five steps to the socket are here, one under the other:

    cli.sweep  ->  plan.build  ->  supervisor.run  (->  measurer  ->  engine.arm)

The order matters: everything local is checked before the network or the disk is touched (`order.check`),
and the run's directory is made only when the server has answered and the plan is built. A bad start leaves
nothing behind.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from fastload import __version__
from fastload.cli import calibrate, display, flags, host, inputs, order, record, result, signals
from fastload.cli.argv import masked
from fastload.errors import TargetError, TraceError

if TYPE_CHECKING:
    from fastload.load.supervisor import Outcome
    from fastload.load.target import Target
    from fastload.plan import Plan
    from fastload.trace import RunWriter

EXIT_FAILED = 1


@click.command("sweep")
@order.options
@click.pass_obj
def sweep(words: Sequence[str] | None, /, **typed: Any) -> int:
    """Measure a server at a list of concurrency levels.

    Each level keeps that many requests in flight and measures them. The result is a table, a
    Parquet trace, summary.json and summary.csv in a new directory under --output. Without --url
    the built-in simulated engine is measured, and everything says SIMULATED.
    """
    asked = order.check(typed)
    flags.warn_of_typed_secrets(typed, asked.quiet)
    if asked.url is not None:
        flags.warn_of_ignored_proxies(typed["proxy"], asked.quiet)
    command = ["fastload", *masked(sys.argv[1:] if words is None else words)]
    with signals.installed() as brake, contextlib.ExitStack() as held:
        shown = display.choose(asked.quiet, simulated=asked.url is None)
        held.callback(shown.close)
        return _run(asked, command, brake, shown, held)


def _run(
    asked: order.Order,
    command: list[str],
    brake: signals.Brake,
    shown: display.Display,
    held: contextlib.ExitStack,
) -> int:
    """Do what was asked; return the exit code. `held` closes what the run needs open."""
    # Imported here: --help and a mistyped flag need none of it, and pyarrow alone takes longer than --help
    # may.
    from fastload.load import supervisor
    from fastload.load.host import check_ports, raise_descriptor_limit
    from fastload.load.target import open_target
    from fastload.trace import create_run

    largest = max(level.concurrency for level in asked.levels)
    check_ports(largest)
    raise_descriptor_limit(largest)  # before the engine is started: it inherits the limit, and needs as many
    url = asked.url if asked.url is not None else _start_engine(held, asked)
    told = record.Record(shown, brake)
    target = open_target(
        url, asked.model, asked.key, asked.headers, asked.wait_ready_s, asked.endpoint, told.notice, asked.way
    )
    shown.simulated = shown.simulated or target.simulated
    if asked.sim_speed != 1:
        told.notice(f"simulated x{asked.sim_speed:g}: the engine runs so many times faster, and so do its figures")
    planned = _build_plan(asked, target, told.notice)

    stop = supervisor.Stop()
    brake.ask, brake.hurry = stop.request, stop.hurry  # from here on a first signal ends the run in order
    writer = create_run(
        asked.output,
        inputs.run_name(asked.name, target.model),
        _manifest(asked, command, target, planned, simulated=shown.simulated)
        | {"calibration": calibrate.known(told.notice)},
        save_text=asked.load["save_text"],
    )
    told.begin(writer, planned.levels, shown.simulated)
    with _left_in_order(writer):
        outcome = supervisor.run(
            planned,
            target,
            asked.key,
            asked.headers,
            writer,
            supervisor.LoadOptions(**asked.load),
            told.watch,
            stop,
        )
        brake.hurry = None  # what comes now can be made again: a second signal need not wait for it
        _see_that_it_began(writer, outcome)
        end = result.at_once(writer, outcome) if stop.at_once else result.conclude(writer, outcome)
    why = end.why(asked.strict)
    code = exit_code(brake.signum or outcome.interrupted, why)
    told.end(end.status, end.verdict, code, why)
    shown.close()
    try:
        result.show(end, writer.path, as_json=asked.as_json, quiet=asked.quiet, strict=asked.strict)
    except OSError as error:  # EPIPE stays a BrokenPipeError
        if asked.as_json or not brake.hung_up:
            raise OSError(
                error.errno, f"the result cannot be printed: {error.strerror}; it is in {writer.path}"
            ) from error
    return code


def exit_code(signum: int | None, why: Sequence[str]) -> int:
    """Return 128 + signal, 1 for a run that did not go well (`why`: result.End.why), else 0."""
    return 128 + signum if signum is not None else EXIT_FAILED if why else 0


# --- before -------------------------------------------------------------------------------------------------


def _start_engine(held: contextlib.ExitStack, asked: order.Order) -> str:
    """Start the simulated engine as a process of its own; return its URL."""
    from fastload import sim

    return held.enter_context(sim.start(sim.Options(profile=asked.profile, speed=asked.sim_speed)))


def _build_plan(asked: order.Order, target: Target, notice: Callable[[str], None]) -> Plan:
    """Learn how the server counts tokens and decide everything that will be sent."""
    from fastload import plan
    from fastload.load.target import token_counter

    count, exact = token_counter(target, asked.endpoint, asked.key, asked.headers)
    lengths = plan.fit(count, asked.isl, asked.seed, exact)
    if lengths.exact and not lengths.additive:
        requests = 1 + sum((level.measured or 0) + level.warmup + level.concurrency for level in asked.levels)
        notice(f"tokens do not simply add up at this server: counting {requests} prompts one by one")
        lengths = plan.ensure(lengths, range(requests), count)
    if lengths.notice is not None:
        notice(lengths.notice)
    return plan.build(
        asked.levels,
        target.model,
        asked.endpoint,
        asked.osl,
        lengths,
        ignore_eos=asked.ignore_eos,
        sampling=asked.sampling,
        extra_body=asked.extra_body,
        max_model_len=target.max_model_len,
    )


def _manifest(
    asked: order.Order, command: list[str], target: Target, planned: Plan, *, simulated: bool
) -> dict[str, object]:
    """Return what manifest.json says before the run: no secret is in it (header values are not, only
    names).
    """
    return {
        "fastload": __version__,
        "python": host.python_version(),
        "packages": host.packages(),
        "command": command,
        "plan": planned.describe(),
        "target": {
            "url": target.url,
            "model": target.model,
            "simulated": simulated,
            "facts": target.facts,
            "labels": dict(asked.labels) | ({"simulated": f"x{asked.sim_speed:g}"} if asked.sim_speed != 1 else {}),
            "address": f"{target.address.host}:{target.address.port}",
            "headers": sorted(asked.headers),
            "tls": _tls(target),
            "proxy": None if asked.way.proxy is None else asked.way.proxy.place.url,
        },
        "sampling": dict(asked.sampling) or "server default",
        "host": host.facts(target.address.host),
        "simulated": simulated,
    }


def _tls(target: Target) -> dict[str, object] | None:
    """What a reader must know of the TLS options; None without TLS."""
    options = target.address.tls
    if options is None:
        return None
    return {"verified": not options.insecure, "ca_file": options.ca_file, "client_cert": options.client_cert}


# --- during -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _left_in_order(writer: RunWriter) -> Iterator[None]:
    """See that a run that raises leaves no riddle: what was measured is closed as failed, a bad start is
    taken away.
    """
    try:
        yield
    except (TargetError, signals.Interrupted):  # nothing was measured: there is no run
        writer.discard()
        raise
    except BaseException:
        with contextlib.suppress(TraceError):  # the disk that broke the run may break this too
            writer.close("failed")
        raise


def _see_that_it_began(writer: RunWriter, outcome: Outcome) -> None:
    """Raise when the run ended before its first level: then there is nothing to keep."""
    if outcome.levels:
        return
    if outcome.interrupted is not None:
        raise signals.Interrupted(outcome.interrupted)
    writer.discard()
    if outcome.unwritten is not None:
        raise TraceError(f"{outcome.unwritten}; nothing was measured")
    raise TargetError(f"{outcome.died or outcome.stopped or 'no level was run'}; nothing was measured")
