"""`fastload sweep`: the main job. Three of the five steps to the socket are here, one under the other:

    cli.sweep  ->  plan.build  ->  supervisor.run  (->  measurer  ->  engine.arm)

The order matters: everything local is checked before the network or the disk is touched (`order.check`),
and the run's directory is made only when the server has answered and the plan is built. A bad start leaves
nothing behind.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fastload import __version__
from fastload.cli import calibrate, display, flags, host, inputs, order, signals
from fastload.errors import TargetError, TraceError

if TYPE_CHECKING:
    from fastload.load.progress import Progress
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
    flags.warn_of_typed_key(typed["api_key"], asked.quiet)
    if asked.url is not None:
        flags.warn_of_ignored_proxies(typed["proxy"], asked.quiet)
    command = ["fastload", *inputs.masked(sys.argv[1:] if words is None else words)]
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
    url = asked.url if asked.url is not None else _start_engine(held)
    target = open_target(
        url, asked.model, asked.key, asked.headers, asked.wait_ready_s, asked.endpoint, shown.notice, asked.way
    )
    shown.simulated = shown.simulated or target.simulated
    planned = _build_plan(asked, target, shown.notice)

    stop = supervisor.Stop()
    brake.ask = stop.request  # from here on a first signal ends the run in order
    # The directories that --output still lacks, the deepest first: a run that never began takes them away
    # again.
    made = [one for one in (asked.output, *asked.output.parents) if not one.exists()]
    writer = create_run(
        asked.output,
        inputs.run_name(asked.name, target.model),
        _manifest(asked, command, target, planned, simulated=shown.simulated)
        | {"calibration": calibrate.known(shown.notice)},
        save_text=asked.load["save_text"],
    )
    log = display.Narrator(writer.log)
    with _left_in_order(writer, made):
        outcome = supervisor.run(
            planned,
            target,
            asked.key,
            asked.headers,
            writer,
            supervisor.LoadOptions(**asked.load),
            _watch(shown, log, writer),
            stop,
        )
        log.end()
        _see_that_it_began(outcome)
        summary = _conclude(writer, outcome)
    shown.close()
    try:
        _print(summary, asked)
        _say_the_end(writer, outcome, summary, asked)
    except OSError as error:  # EPIPE stays a BrokenPipeError
        raise OSError(error.errno, f"the result cannot be printed: {error.strerror}; it is in {writer.path}") from error
    return exit_code(brake.signum or outcome.interrupted, outcome, summary["verdict"]["status"], asked.strict)


def exit_code(signum: int | None, outcome: Outcome, verdict: str, strict: bool) -> int:
    """Return 128 + signal, 1 for a run that failed or is invalid (with `strict` suspect too), else 0."""
    if signum is not None:
        return 128 + signum
    if outcome.died is not None or outcome.stopped is not None or verdict == "invalid":
        return EXIT_FAILED
    return EXIT_FAILED if strict and verdict == "suspect" else 0


# --- before -------------------------------------------------------------------------------------------------


def _start_engine(held: contextlib.ExitStack) -> str:
    """Start the simulated engine as a process of its own; return its URL."""
    from fastload import sim

    return held.enter_context(sim.start())


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
            "labels": dict(asked.labels),
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


def _watch(shown: display.Display, log: display.Narrator, writer: RunWriter) -> Callable[[Progress], None]:
    """Return the supervisor's watcher: it draws, and keeps run.log and progress.json."""

    def watch(progress: Progress) -> None:
        shown.show(progress)
        # A full disk is for the trace itself to report, when it cannot write a part.
        with contextlib.suppress(TraceError):
            log.take(progress)
            writer.progress(dataclasses.asdict(progress))

    return watch


@contextlib.contextmanager
def _left_in_order(writer: RunWriter, made: Sequence[Path]) -> Iterator[None]:
    """See that a run that raises leaves no riddle: what was measured is closed as failed, a bad start is
    taken away.
    """
    try:
        yield
    except (TargetError, signals.Interrupted):  # nothing was measured: there is no run
        shutil.rmtree(writer.path, ignore_errors=True)
        with contextlib.suppress(OSError):  # another run may have come to stand there meanwhile
            for directory in made:
                directory.rmdir()
        raise
    except BaseException:
        with contextlib.suppress(TraceError):  # the disk that broke the run may break this too
            writer.close("failed")
        raise


def _see_that_it_began(outcome: Outcome) -> None:
    """Raise when the run ended before its first level: then there is nothing to keep."""
    if outcome.levels:
        return
    if outcome.interrupted is not None:
        raise signals.Interrupted(outcome.interrupted)
    raise TargetError(f"{outcome.died or outcome.stopped or 'no level was run'}; nothing was measured")


# --- after --------------------------------------------------------------------------------------------------


def _conclude(writer: RunWriter, outcome: Outcome) -> dict[str, Any]:
    """Close the trace, make summary.json and summary.csv from it, and return the summary."""
    from fastload.analysis.summary import summarise_levels, write_summary
    from fastload.trace import open_run

    writer.close(_status(outcome), clock=outcome.clock, plan=outcome.plan.describe())
    run = open_run(writer.path, repair=False)
    listed = run.manifest["levels"]
    assert isinstance(listed, list)
    levels = sorted((one for one in listed if one["index"] >= 0), key=lambda one: one["index"])
    summary = summarise_levels(
        run.manifest, ((facts, run.requests(facts["dir"]), run.tokens(facts["dir"])) for facts in levels)
    )
    write_summary(run, summary)
    writer.update_manifest(verdict=summary["verdict"])
    return summary


def _status(outcome: Outcome) -> str:
    if outcome.interrupted is not None:
        return "interrupted"
    if outcome.died is not None:
        return "crashed"
    return "complete" if outcome.stopped is None else "failed"


def _print(summary: Mapping[str, Any], asked: order.Order) -> None:
    """Put the result on stdout: JSON alone, or the table (for a terminal of its width, else plain)."""
    if asked.as_json:
        from fastload.analysis.summary import as_json

        click.echo(as_json(summary), nl=False)
        return
    from fastload.report import tables

    if sys.stdout is not None and sys.stdout.isatty():
        from rich.console import Console

        Console().print(tables.sweep_table(summary))
    else:
        click.echo(tables.plain(summary), nl=False)


def _say_the_end(writer: RunWriter, outcome: Outcome, summary: Mapping[str, Any], asked: order.Order) -> None:
    """Say where the run lies, and on stderr in one line why it is not whole."""
    verdict = summary["verdict"]
    mark = "SIMULATED run" if summary["simulated"] else "run"
    if not asked.as_json:
        click.echo(f"{mark} in {writer.path}")
    elif not asked.quiet:
        click.echo(f"{mark} in {writer.path}", err=True)
    if outcome.interrupted is not None:
        why = f"stopped by {signal.Signals(outcome.interrupted).name}"
    elif outcome.died is not None or outcome.stopped is not None:
        why = outcome.died or outcome.stopped or ""
    elif verdict["status"] == "invalid" or (asked.strict and verdict["status"] == "suspect"):
        click.echo(
            f"fastload: the run is {verdict['status']}: {display.one_line('; '.join(verdict['reasons']))}",
            err=True,
        )
        return
    else:
        return
    click.echo(
        f"fastload: {display.one_line(why)}; finished levels and rows so far are in {writer.path}", err=True
    )
