"""The entry: help, version, exit codes, and what is not imported for them."""

from __future__ import annotations

import errno
import importlib
import subprocess
import sys
import time
from typing import Any

import click
import pytest

from fastload import __version__, cli
from fastload.cli import display, flags, signals
from fastload.cli.result import End
from fastload.cli.sweep import exit_code
from fastload.errors import PlanError, TargetError, TraceError

HEAVY = ("numpy", "pyarrow", "httpx", "rich", "uvloop", "asyncio")


def test_help_imports_nothing_heavy() -> None:
    code = "import sys\nfrom fastload.cli import main\n"
    code += "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
    code += f"print('HEAVY', [name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "HEAVY []"


def test_help_takes_little_more_than_python_and_click() -> None:
    def least(code: str) -> float:
        taken = []
        for _ in range(5):
            begun = time.monotonic()
            subprocess.run([sys.executable, "-P", "-c", code], check=True, stdout=subprocess.DEVNULL)
            taken.append(time.monotonic() - begun)
        return min(taken)

    # pyarrow alone would be six times the whole
    assert least("from fastload.cli import main; main(['--help'])") < 3 * least("import click")


def test_help_lists_the_commands_and_version_says_it(run: Any) -> None:
    for words in ([], ["--help"], ["-h"]):
        ended = run(*words)
        assert ended.code == 0 and ended.err == ""
        assert all(name in ended.out for name in cli.COMMANDS)
    assert run("--version").out == f"fastload {__version__}\n"


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_of_a_command_lists_every_flag_and_its_own_first_line(name: str, run: Any) -> None:
    module, attribute, line = cli.COMMANDS[name]
    command = getattr(importlib.import_module(module), attribute)
    told = run(name, "--help")
    assert told.code == 0
    for param in command.params:
        if isinstance(param, click.Argument):
            assert (param.metavar or f"[{str(param.name).upper()}]") in told.out
        for flag in (*param.opts, *param.secondary_opts) if isinstance(param, click.Option) else ():
            assert flag in told.out
    if name == "sweep":  # the others say a little more there
        assert command.get_short_help_str(100).rstrip(".") == line.rstrip(".")


def test_help_of_sweep_has_the_flags_of_the_design(run: Any) -> None:
    told = run("sweep", "--help").out
    wanted = """
        --url --base-url --target --model --endpoint --levels --concurrency --rounds --min-requests
        --num-requests --num-prompts --duration --warmup --wait-ready --isl --random-input-len --osl
        --random-output-len --ignore-eos --temperature --top-p --top-k --min-p --presence-penalty
        --frequency-penalty --repetition-penalty --stop --extra-body --header --label --seed --api-key
        --api-key-file --connect-timeout --first-byte-timeout --idle-timeout --timeout --max-failures
        --respect-retry-after --cpu --save-text --output --name --quiet --json --strict
    """
    assert [flag for flag in wanted.split() if flag not in told] == []
    assert "1,2,4,8,16,32,64" in told and "FASTLOAD_API_KEY" in told


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (PlanError("--levels 0: no"), 2, "--levels 0: no"),
        (TargetError("http://x: \x1b[31mgone\nfor good"), 1, "http://x: ?[31mgone for good"),
        (TraceError("results/x is no run"), 1, "results/x is no run"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (signals.Interrupted(15), 143, "stopped by SIGTERM before the run began"),
        (OSError(errno.ENOSPC, "No space left on device", "x"), 1, "No space left on device (x)"),
    ],
)
def test_what_goes_wrong_is_one_line_and_a_code(
    error: BaseException, code: int, line: str, monkeypatch: pytest.MonkeyPatch, run: Any
) -> None:
    def broken(_context: object) -> None:
        raise error

    monkeypatch.setattr(cli.cli, "invoke", broken)
    ended = run("sweep")
    assert (ended.code, ended.out, ended.err) == (code, "", f"fastload: {line}\n")


def test_a_bug_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_context: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(cli.cli, "invoke", broken)
    with pytest.raises(ZeroDivisionError):
        cli.main(["sweep"])


def test_a_reader_that_left_is_one_line() -> None:
    code = "from fastload.cli import main; main(['sweep', '--help'])"
    with subprocess.Popen(
        [sys.executable, "-P", "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        said = process.stderr.read()
        code_left = process.wait()
    assert said == "fastload: the reader of the output went away (broken pipe)\n"
    assert code_left == 1


def ended(verdict: str | None, *faults: str) -> End:
    summary = None if verdict is None else {"verdict": {"status": verdict, "reasons": ["c=8: a reason"]}}
    return End("complete", summary, faults)


@pytest.mark.parametrize(
    ("signum", "end", "strict", "code"),
    [
        (None, ended("valid"), False, 0),
        (None, ended("suspect"), False, 0),
        (None, ended("suspect"), True, 1),
        (None, ended("valid"), True, 0),
        (None, ended("invalid"), False, 1),
        (None, ended("valid", "the measuring process was killed"), False, 1),
        (2, ended("valid"), False, 130),
        (2, ended(None, "stopped by SIGINT"), False, 130),
        (15, ended("invalid", "the measuring process was killed"), True, 143),
    ],
)
def test_exit_codes(signum: int | None, end: End, strict: bool, code: int) -> None:
    assert exit_code(signum, end.why(strict)) == code


def test_why_a_run_did_not_go_well() -> None:
    assert ended("invalid").why(False) == ("the run is invalid: c=8: a reason",)
    assert ended("invalid", "the disk is full").why(False) == ("the disk is full",)
    assert ended("suspect").why(False) == ()


def test_typed_secrets_are_warned_of_and_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    none: dict[str, Any] = {"api_key": None, "headers": (), "proxy": None}
    typed = {"api_key": "sk-1", "headers": ("X-Team=a", "Authorization=Basic c2VjcmV0"), "proxy": "http://u:p@q@host:1"}
    flags.warn_of_typed_secrets(typed, quiet=False)
    told = capsys.readouterr().err
    assert "warning" in told and "FASTLOAD_API_KEY" in told
    assert "can see --api-key, --header Authorization, the login in --proxy in the process list" in told
    assert not any(secret in told for secret in ("sk-1", "c2VjcmV0", "p@q", "X-Team"))
    flags.warn_of_typed_secrets(typed, quiet=True)
    flags.warn_of_typed_secrets(none | {"headers": ("X-Team=a",), "proxy": "http://host:1"}, quiet=False)
    assert capsys.readouterr().err == ""


def test_a_traceback_of_ours_has_no_secret_in_it() -> None:
    code = "from fastload import cli\nfrom unittest import mock\n"
    code += "def broken(context):\n    raise ValueError('sk-e2e-4f1d0c and c2stZTJlLTRmMWQwYw==')\n"
    code += "with mock.patch.object(cli.cli, 'invoke', broken):\n"
    code += "    cli.main(['models', '--url', 'http://h', '--api-key', 'sk-e2e-4f1d0c'])\n"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert "Traceback" in done.stderr and done.stderr.endswith("ValueError: *** and ***==\n")


def test_one_line_takes_control_characters_away() -> None:
    assert display.one_line("a\r\n b\x1b[2J\x00") == "a b?[2J?"
