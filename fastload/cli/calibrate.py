"""`fastload calibrate`: what the client itself adds on this host, measured against a server that knows the truth.

The ground-truth server (`sim/truth.py`, its own process and core) logs the time before each send. The real supervisor
and measurer load it and write a real trace; every token is then joined with the log (`analysis/calibration.py`). The
result is kept for this host, and later runs carry it in their manifest and verdict.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fastload import __version__
from fastload.cli import display, inputs, signals
from fastload.errors import PlanError, TraceError

if TYPE_CHECKING:
    from fastload.cli.groundtruth import Bench

TARGET = "against fastload's own ground-truth server, simulated, over loopback"
DEFAULT_LEVELS = "1,2,4,8,16,32,64,256,1024"
LARGEST_LEVEL = 4096  # what the server's listen queue takes at once
# Lockstep steps that leave an engine's burst room: one send takes about 3 us, one event about as much again.
STEPS_MS = ((4096, 50.0), (1024, 30.0), (0, 20.0))
SCHEMA = 1
EXIT_FAILED = 1


@click.command("calibrate")
@click.option("--levels", default=DEFAULT_LEVELS, show_default=True, metavar="N,N,...", help="Requests in flight.")
@click.option(
    "--step-ms",
    **inputs.real(0.0, 1000.0, above=True),
    help="Time between two tokens.  [default: 20; 30 from 1024, 50 from 4096 on]",
)
@click.option("--osl", **inputs.whole(2, 100_000), default="64", show_default=True, help="Tokens of each answer.")
@click.option(
    "--rounds",
    **inputs.whole(1, 10_000),
    help="Requests of a level, in multiples of it.  [default: 4, 3 from 1024 on, at least 12 requests]",
)
@click.option(
    "--stamp", default="kernel", show_default=True, metavar="kernel|read", help="read: as where there are no others."
)
@click.option("--cpu", **inputs.whole(0), help="CPU of the measuring process.  [default: the last one]")
@click.option("--server-cpu", **inputs.whole(0), help="CPU of the server.  [default: the first one]")
@click.option("--selftest", is_flag=True, help="Check every count and the order too; exit 1 on any difference.")
@click.option("--saturate", is_flag=True, help="Find the highest event rate too (half a minute more).")
@click.option("--output", metavar="FILE", help="Write the result here too, as JSON.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON on stdout and nothing else.")
@click.option("--quiet", is_flag=True, help="No progress on stderr.")
def calibrate(
    levels: str,
    step_ms: float | None,
    osl: int,
    rounds: int | None,
    stamp: str,
    cpu: int | None,
    server_cpu: int | None,
    selftest: bool,
    saturate: bool,
    output: str | None,
    as_json: bool,
    quiet: bool,
) -> int:
    """Measure what the client itself adds on this host.

    The real client loads fastload's own ground-truth server (simulated: no model) over loopback,
    and each token's stamp is compared with the time the server sent it. Takes about two minutes.
    The result is kept for this host and stands in later runs.
    """
    from fastload.cli import groundtruth
    from fastload.load import host as limits
    from fastload.plan import parse_levels

    concurrencies = parse_levels(levels)
    if max(concurrencies) > LARGEST_LEVEL:
        raise PlanError(f"--levels {max(concurrencies)}: the ground-truth server takes up to {LARGEST_LEVEL}")
    if stamp not in ("kernel", "read"):
        raise PlanError(f"--stamp {stamp!r}: give kernel or read")
    if output is not None:
        if "\0" in output or Path(output).is_dir():
            raise PlanError(f"--output {output!r}: is not a file's name; give one such as calibration.json")
        inputs.writable("--output", Path(output).parent)
    bench = _bench(cpu, server_cpu, stamp, selftest)
    limits.raise_descriptor_limit(max(*concurrencies, groundtruth.LADDER_CONCURRENCY if saturate else 1))

    with signals.installed() as brake, contextlib.ExitStack() as held:
        bench.shown = display.choose(quiet, simulated=True)
        held.callback(bench.shown.close)
        held.enter_context(_away_from(bench.cpu))
        brake.ask = bench.stop.request
        measured: list[dict[str, Any]] = []
        for step, together in _by_step(concurrencies, step_ms):
            measured += bench.measure(step, groundtruth.planned_levels(together, rounds), osl)
        measured = _measured_again(bench, measured, rounds, osl)
        saturated = groundtruth.saturate(bench) if saturate else None
    if brake.signum is not None:
        click.echo(f"fastload: stopped by {signal.Signals(brake.signum).name}; nothing is kept", err=True)
        return 128 + brake.signum
    result = _result(bench, measured, osl, saturated)
    failed = bool(bench.differences)
    _conclude(result, output, as_json, quiet, keep=not failed)
    return EXIT_FAILED if failed else 0


def _measured_again(
    bench: Bench, measured: list[dict[str, Any]], rounds: int | None, osl: int
) -> list[dict[str, Any]]:
    """Return the levels with those on which the verdict turns narrowly measured again, as the median."""
    from fastload.analysis import calibration
    from fastload.cli.groundtruth import planned_levels

    narrow = calibration.undecided(measured)
    if narrow:
        bench.shown.notice(f"close to a limit, measured again: c={', '.join(map(str, narrow))}")
    merged = []
    for level in measured:
        same = [level]
        for _ in range(calibration.REPEATS if level["concurrency"] in narrow else 0):
            same += bench.measure(level["step_ms"], planned_levels([level["concurrency"]], rounds), osl)
        merged.append(calibration.median(same) | {"times": len(same)})
    return merged


def _by_step(concurrencies: Sequence[int], step_ms: float | None) -> Iterator[tuple[float, list[int]]]:
    """Yield the levels in ascending order, those of one step together: a server has one pace."""
    steps: dict[float, list[int]] = {}
    for one in sorted(concurrencies):
        step = step_ms if step_ms is not None else next(step for least, step in STEPS_MS if one >= least)
        steps.setdefault(step, []).append(one)
    yield from steps.items()


def _bench(cpu: int | None, server_cpu: int | None, stamp: str, selftest: bool) -> Bench:
    """Return where things run: the client on the last CPU we may use, the server on the first."""
    from fastload.cli.groundtruth import Bench
    from fastload.load.supervisor import Stop

    allowed = sorted(os.sched_getaffinity(0))
    cpu = allowed[-1] if cpu is None else inputs.processor(cpu)
    if server_cpu is not None and server_cpu not in allowed:
        raise PlanError(f"--server-cpu {server_cpu}: not a CPU this process may use ({', '.join(map(str, allowed))})")
    if server_cpu is None:
        server_cpu = next((one for one in allowed if one != cpu), allowed[0])
    assert cpu is not None
    return Bench(cpu, server_cpu, stamp, selftest, display.Silent(), Stop())


@contextlib.contextmanager
def _away_from(cpu: int) -> Iterator[None]:
    """Keep this process, the supervisor, off the client's CPU inside the block, where there is another."""
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, before - {cpu} or before)
        yield
    finally:
        os.sched_setaffinity(0, before)


# --- the result -------------------------------------------------------------------------------------------------------


def _result(
    bench: Bench, measured: list[dict[str, Any]], osl: int, saturated: dict[str, Any] | None
) -> dict[str, Any]:
    """Return everything found, as it is written: plain JSON values."""
    from fastload import _timing
    from fastload.analysis.calibration import judge
    from fastload.trace.writer import utc_text

    notes = [f"measuring process on CPU {bench.cpu}, server on CPU {bench.server_cpu}"]
    if bench.cpu == bench.server_cpu:
        notes.append("client and server share one CPU: each waits for the other, and the figures say so")
    if bench.stamp == "kernel" and any(level["stamp_source"] == "read" for level in measured):
        notes.append("kernel stamps (SO_TIMESTAMPNS) do not work here: read stamps are used and judged")
    return {
        "schema": SCHEMA,
        "fastload": __version__,
        "created_utc": utc_text(_timing.realtime_ns()),
        "simulated": True,
        "target": TARGET,
        "host": identity(),
        "cpu": bench.cpu,
        "server_cpu": bench.server_cpu,
        "stamp": bench.stamp,
        "osl": osl,
        "levels": measured,
        "verdict": judge(measured),
        "selftest": {"differences": bench.differences, "tokens": bench.tokens, "requests": bench.requests}
        if bench.selftest
        else None,
        "saturate": saturated,
        "notes": notes,
    }


def _conclude(result: Mapping[str, Any], output: str | None, as_json: bool, quiet: bool, *, keep: bool) -> None:
    """Write, keep and print the result."""
    from fastload.report import calibration as report
    from fastload.trace.writer import write_json

    if output is not None:
        Path(output).parent.mkdir(parents=True, exist_ok=True)
        write_json(Path(output), result)
    if not keep:
        kept = "not kept: the self-test failed"
    elif result["stamp"] == "read":
        kept = "not kept for later runs: --stamp read measures only half of it"
    else:
        kept = f"kept for later runs of this host in {keep_for_host(result)}"
    if as_json:
        click.echo(json.dumps(result, indent=2, allow_nan=False, ensure_ascii=False))
        if not quiet:
            click.echo(kept, err=True)
        return
    terminal = sys.stdout is not None and sys.stdout.isatty()
    width = os.get_terminal_size(sys.stdout.fileno()).columns if terminal else report.WIDTH
    click.echo(report.plain(result, max(80, width)), nl=False)
    click.echo(kept)


# --- what later runs know ---------------------------------------------------------------------------------------------


def identity() -> dict[str, Any]:
    """Return what names this host: a hash of its machine-id, processor, cores and kernel, and the last three."""
    from fastload.load import host

    model, cores, kernel = host.cpu_model(), os.cpu_count(), os.uname().release
    machine = host.read(host.ROOT, "etc/machine-id") or host.read(host.ROOT, "var/lib/dbus/machine-id")
    text = "\0".join(map(str, ("fastload calibration", machine, model, cores, kernel)))
    digest = hashlib.sha256(text.encode()).hexdigest()[:32]  # the machine-id itself is to stay on its machine
    return {"id": digest, "cpu_model": model, "cores": cores, "kernel": kernel}


def place() -> Path:
    """Return where calibrations are kept."""
    named = os.environ.get("FASTLOAD_CALIBRATION")
    if named:
        return Path(named)
    state = os.environ.get("XDG_STATE_HOME")
    # a relative one is to be ignored, says its specification
    base = Path(state) if state and os.path.isabs(state) else Path.home() / ".local" / "state"
    return base / "fastload" / "calibration.json"


def keep_for_host(result: Mapping[str, Any]) -> Path:
    """Put the result into the file as this host's, in one step; other hosts' stay. TraceError if the disk fails."""
    from fastload.trace.writer import write_json

    path = place()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        hosts = _hosts(path)
    except OSError as error:
        raise TraceError(f"cannot keep the calibration in {path}: {error.strerror}") from error
    except ValueError:
        hosts = {}  # broken: nobody can read it anyway
    write_json(path, {"schema": SCHEMA, "hosts": hosts | {result["host"]["id"]: result}})
    return path


def _hosts(path: Path) -> dict[str, Any]:
    """Return the calibrations in a file, by host; {} without a file. ValueError if it is none, OSError."""
    try:
        kept = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    if not isinstance(kept, dict) or kept.get("schema") != SCHEMA or not isinstance(kept.get("hosts"), dict):
        raise ValueError("not a calibration of this version")
    return dict(kept["hosts"])


def known(notice: Callable[[str], None] | None = None) -> dict[str, Any] | None:
    """Return this host's calibration in short, for manifest and verdict; None if there is none to be used.

    {"created_utc", "fastload", "cpu", "target", "verdict": sentence, "negligible": {"kernel": c | None, "read": ..},
    "levels": [{"concurrency", "kernel": P99 in us | None, "read": ..}]}. A file that is broken, or of other hosts
    only, is left aside with one sentence to `notice`.
    """
    path = place()
    try:
        hosts = _hosts(path)
        if not hosts:
            return None
        found = hosts.get(identity()["id"])
        if found is not None:
            return _short(found)
        why = "is of another host, or this one has changed (processor, cores, kernel)"
    except OSError as error:
        why = f"cannot be read ({error.strerror})"
    except (ValueError, KeyError, TypeError, AttributeError):
        why = "is broken, or of another version of fastload"
    if notice is not None:
        notice(f"the calibration in {path} {why}: not used; `fastload calibrate` makes one")
    return None


def _short(kept: Mapping[str, Any]) -> dict[str, Any]:
    """Return a kept result in short. KeyError, TypeError or AttributeError where it is not one."""
    from fastload.report.calibration import sentence

    verdict = kept["verdict"]
    return {
        **{name: kept[name] for name in ("created_utc", "fastload", "cpu", "target")},
        "verdict": sentence(verdict),
        "negligible": {name: verdict[name] and verdict[name]["concurrency"] for name in ("kernel", "read")},
        "levels": [
            {
                "concurrency": int(level["concurrency"]),
                **{name: level[name] and float(level[name]["stamp_us"]["p99"]) for name in ("kernel", "read")},
            }
            for level in kept["levels"]
        ],
    }
