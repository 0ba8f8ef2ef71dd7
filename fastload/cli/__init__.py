"""The door: one file a command, and the one place where an error becomes a line and an exit code.

click lives in this room only. A command's module is imported when the command is called, and the heavy
libraries (numpy, pyarrow, httpx, rich) inside its function, so that `fastload --help` answers at once.

Exit codes: 0 valid or suspect, 1 a failed or invalid run (or a server that did not answer), 2 the user's
mistake, 3 a `check` that missed, 130 / 143 on SIGINT / SIGTERM.
"""

from __future__ import annotations

import errno
import importlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from types import TracebackType

import click

from fastload import __version__
from fastload.cli.argv import KEY_VARIABLE, protect, secrets_in
from fastload.cli.display import one_line
from fastload.cli.signals import Interrupted
from fastload.errors import PlanError, TargetError, TraceError

EXIT_FAILED = 1

# Name -> (module, attribute, the line in `fastload --help`). The line is repeated here so that help imports
# no command.
COMMANDS: dict[str, tuple[str, str, str]] = {
    "sweep": ("fastload.cli.sweep", "sweep", "Measure a server at a list of concurrency levels."),
    "watch": ("fastload.cli.watch", "watch", "Show a running or finished run from another terminal."),
    "report": ("fastload.cli.report", "report", "Tables of finished runs: limits, users, speculation, anomalies."),
    "compare": ("fastload.cli.compare", "compare", "Set runs side by side: axes, differences, intervals."),
    "check": ("fastload.cli.check", "check", "Check a run against limits and another run, for CI (exit code 3)."),
    "reconcile": ("fastload.cli.reconcile", "reconcile", "One run's figures as other load generators compute them."),
    "export": ("fastload.cli.export", "export", "Write a run's requests as one file for other programs."),
    "import": ("fastload.cli.imports", "import_", "Make runs of another tool's result file."),
    "models": ("fastload.cli.models", "models", "List the models a server serves."),
    "serve-sim": ("fastload.cli.serve_sim", "serve_sim", "Run the simulated engine in the foreground."),
    "calibrate": ("fastload.cli.calibrate", "calibrate", "Measure what the client itself adds on this host."),
    "doctor": ("fastload.cli.doctor", "doctor", "Say whether this host is fit to measure, and what to change."),
}


class LazyGroup(click.Group):
    """A group whose commands are imported when they are asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the commands in the order of their use, not of the alphabet."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return the command, or None when there is none of that name."""
        if cmd_name not in COMMANDS:
            return None
        module, attribute, _ = COMMANDS[cmd_name]
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command; an unknown one is answered with the names there are."""
        if not args[0].startswith("-") and args[0] not in COMMANDS:
            raise click.UsageError(f"{args[0]!r} is no command; the commands are {', '.join(COMMANDS)}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands from the table above, importing none of them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, _, line) in COMMANDS.items()])


def _print_version(ctx: click.Context, _param: click.Parameter, asked: bool) -> None:
    if not asked or ctx.resilient_parsing:
        return
    click.echo(f"fastload {__version__}")
    ctx.exit(0)


@click.group(
    cls=LazyGroup,
    no_args_is_help=False,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Print the version and exit.",
)
@click.pass_context
def cli(ctx: click.Context) -> None:
    """fastload: a precise load generator for LLM inference servers.

    `fastload sweep --url http://HOST:PORT` measures a server at concurrency 1 to 64;
    without --url it measures the built-in simulated engine.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and leave the process with its exit code.

    `arguments` defaults to `sys.argv[1:]`. Never returns: raises SystemExit.
    """
    argv = list(sys.argv[1:] if arguments is None else arguments)
    _fill_standard_streams()
    sys.excepthook = _say_a_bug
    protect([*secrets_in(argv), *filter(None, [os.environ.get(KEY_VARIABLE)])])

    def command() -> object:
        # Not `cli.main`: it has its own way with a broken pipe, and says nothing.
        with cli.make_context("fastload", list(argv), obj=argv) as context:
            return cli.invoke(context)

    code = _guarded(command)
    _forget_what_nobody_takes()
    sys.exit(code)


def _fill_standard_streams() -> None:
    """Open /dev/null where a caller closed stdin, stdout or stderr (cron, `<&-`).

    Else the next file or pipe gets that number, and a child's standard stream in its place.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)


def _guarded(run: Callable[[], object]) -> int:
    """Run a command; turn every expected way to fail into one line on stderr and its exit code."""
    try:
        code = run()
        if sys.stdout is not None:
            sys.stdout.flush()  # here, so that a closed pipe is met inside this `try`, not at exit
        return code if isinstance(code, int) else 0
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.ClickException as error:
        _say(_click_line(error))
        return error.exit_code
    except (PlanError, TargetError, TraceError) as error:
        _say(str(error))
        return error.exit_code
    except Interrupted as stop:
        _say(f"stopped by {signal.Signals(stop.signum).name} before the run began")
        return 128 + stop.signum
    except (KeyboardInterrupt, click.Abort):
        _say("interrupted")
        return 128 + signal.SIGINT
    except BrokenPipeError as error:
        plain = error.strerror in (None, os.strerror(errno.EPIPE))
        _say("the reader of the output went away (broken pipe)" if plain else str(error.strerror))
        return EXIT_FAILED
    except OSError as error:  # a full disk, a terminal that is gone: the world's fault, not a bug to trace
        where = f" ({error.filename})" if error.filename else ""
        _say(f"{error.strerror or error}{where}")
        return EXIT_FAILED


def _forget_what_nobody_takes() -> None:
    """Point a standard stream that takes no more (a closed pipe, a terminal that is gone, a full disk) at /dev/null: it
    is flushed again at exit, and a failure there would be the exit code.
    """
    for stream, fd in ((sys.stdout, 1), (sys.stderr, 2)):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), fd)


def _say_a_bug(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print the traceback of what nothing caught, as Python would, but without secrets."""
    import traceback

    from fastload.load.hiding import hide

    sys.stderr.write(hide("".join(traceback.format_exception(kind, error, trace))))


def _click_line(error: click.ClickException) -> str:
    """Return click's complaint as one line that begins with the flag."""
    if isinstance(error, click.NoSuchOption):
        hint = f"; near to it: {', '.join(error.possibilities)}" if error.possibilities else ""
        return f"{error.option_name}: there is no such flag{hint}{_see_help(error)}"
    if isinstance(error, click.MissingParameter) and error.param is not None:
        name = error.param.metavar if isinstance(error.param, click.Argument) else error.param.opts[0]
        return f"{name} is needed{_see_help(error)}"
    if isinstance(error, click.BadParameter) and error.param is not None:
        return f"{error.param.opts[0]} {error.message}"
    if isinstance(error, click.UsageError):
        return f"{error.format_message()}{_see_help(error)}"
    return error.format_message()


def _see_help(error: click.UsageError) -> str:
    path = error.ctx.command_path if error.ctx is not None else "fastload"
    return f" (see {path} --help)"


def _say(line: str) -> None:
    """Write one line on stderr, whatever the message holds, but no secret; a closed stderr is no reason to fail."""
    try:
        click.echo(f"fastload: {one_line(line)}", err=True)
    except OSError:
        pass
