"""Running the whole tool as a user does: processes of their own, in an empty directory, and what they leave."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fastload import open_run

PROGRAM = "import sys; from fastload.cli import main; main(sys.argv[1:])"
# -P: the fastload that is tested is the installed one, not a folder of the current directory.
COMMAND = (sys.executable, "-P", "-c", PROGRAM)
# Short answers at a quick pace: what is tested here is the whole path, not the engine.
QUICK_SIM = {"ttft_ms": 40.0, "step_ms": 4.0}


def went(code: int, err: str) -> bool:
    """Whether a run went as planned: code 0, or 1 for the one thing a busy machine spoils, the load held.

    Failures and lost rows would stand among the reasons.
    """
    if "Traceback" in err:
        return False
    last = err.splitlines()[-1] if err else ""
    _, invalid, reasons = last.partition("fastload: the run is invalid: ")
    spoiled = invalid and all("failed" not in one and "no row" not in one for one in reasons.split("; "))
    return code == 0 or (code == 1 and bool(spoiled) and "in flight" in reasons)


@dataclass(frozen=True)
class Ended:
    """How a command ended; `cwd` is where it stood."""

    code: int
    out: str
    err: str
    cwd: Path

    @property
    def ran(self) -> bool:
        """Whether the run went as planned."""
        return went(self.code, self.err)

    @property
    def line(self) -> str:
        """The one line an error has, checked to be the last one and no traceback."""
        assert "Traceback" not in self.err, self.err
        lines = self.err.splitlines()
        assert lines and lines[-1].startswith("fastload: "), self.err
        return lines[-1]


def environment(**more: str) -> dict[str, str]:
    """This process's, without a key, a proxy that would be warned of, and what would change the display."""
    away = ("fastload_api_key", "columns", "lines", "no_color", "http_proxy", "https_proxy", "all_proxy")
    kept = {k: v for k, v in os.environ.items() if k.lower() not in away}
    return kept | more


Sweep = Callable[..., Ended]
Start = Callable[..., "subprocess.Popen[str]"]


def run_command(cwd: Path, *words: str, env: dict[str, str] | None = None, timeout_s: float = 50) -> Ended:
    """Run a command line to its end."""
    done = subprocess.run(
        [*COMMAND, *words],
        cwd=cwd,
        env=environment(**(env or {})),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    return Ended(done.returncode, done.stdout, done.stderr, cwd)


@pytest.fixture(scope="session")
def ran() -> Callable[[int, str], bool]:
    """`ran(code, err)`: whether a run went as planned; see `went`."""
    return went


@pytest.fixture(scope="session")
def command() -> tuple[str, ...]:
    """The words before `sweep`, for who starts it in a way of his own."""
    return COMMAND


@pytest.fixture
def fastload(tmp_path: Path) -> Sweep:
    """`fastload("sweep", "--url", ...)` runs a command in an empty directory."""
    return lambda *words, **options: run_command(options.pop("cwd", tmp_path), *words, **options)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """`start("sweep", ...)` starts a command, in a process group of its own; whatever still runs is killed after it."""
    with contextlib.ExitStack() as running:

        def go(*words: str, env: dict[str, str] | None = None, **options: Any) -> subprocess.Popen[str]:
            process = subprocess.Popen(
                [*COMMAND, *words],
                cwd=options.pop("cwd", tmp_path),
                env=environment(**(env or {})),
                stdin=options.pop("stdin", subprocess.DEVNULL),
                stdout=options.pop("stdout", subprocess.PIPE),
                stderr=options.pop("stderr", subprocess.PIPE),
                text=True,
                start_new_session=True,
                **options,
            )
            running.callback(_kill, process)
            return process

        yield go


@pytest.fixture
def preloaded(tmp_path: Path) -> Callable[[str], Path]:
    """`preloaded(source)` builds a library to be loaded before libc, with the compiler that built fastload."""

    def build(text: str) -> Path:
        source, library = tmp_path / "preloaded.c", tmp_path / "preloaded.so"
        source.write_text(text)
        compiler = shlex.split(sysconfig.get_config_var("CC") or "cc")[0]
        subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
        return library

    return build


def _kill(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.kill()
    process.wait()
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()


@pytest.fixture(scope="session")
def the_run() -> Callable[[Path], Any]:
    """`the_run(output)` opens the one run under an output directory."""

    def opened(output: Path) -> Any:
        (path,) = output.iterdir()
        return open_run(path)

    return opened


@pytest.fixture(scope="session")
def children() -> Callable[[int], dict[int, str]]:
    """`children(pid)`: what lives below a process, as pid -> command line."""
    return _children


def _children(pid: int) -> dict[int, str]:
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
                if fields[0] != "Z":
                    parents.setdefault(int(fields[1]), []).append(int(entry.name))
    found: dict[int, str] = {}
    waiting = [pid]
    while waiting:
        for child in parents.get(waiting.pop(), []):
            with contextlib.suppress(OSError):
                found[child] = (Path("/proc") / str(child) / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                waiting.append(child)
    return found


@pytest.fixture(scope="session")
def gone() -> Callable[..., bool]:
    """`gone(pids, within_s)`: whether none of these processes lives any more, waiting a little for it."""

    def are_gone(pids: Any, within_s: float = 5.0) -> bool:
        give_up = time.monotonic() + within_s
        while any(_lives(pid) for pid in pids):
            if time.monotonic() > give_up:
                return False
            time.sleep(0.02)
        return True

    return are_gone


def _lives(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


@pytest.fixture(scope="session")
def until() -> Callable[..., None]:
    """`until(condition)` waits until it is true; fails after `within_s`."""

    def wait(condition: Callable[[], object], within_s: float = 30.0) -> None:
        give_up = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < give_up, "waited in vain"
            time.sleep(0.02)

    return wait


@dataclass(frozen=True)
class SimRun:
    """A finished sweep of the built-in engine, for tests that only read."""

    ended: Ended
    path: Path
    run: Any


@pytest.fixture(scope="session")
def sim_run(tmp_path_factory: pytest.TempPathFactory, the_run: Callable[[Path], Any]) -> SimRun:
    """`sweep --levels 1,2,4` of the embedded engine, run once."""
    cwd = tmp_path_factory.mktemp("sweep")
    ended = run_command(cwd, "sweep", "--levels", "1,2,4", "--osl", "8", "--rounds", "3", "--min-requests", "4")
    assert ended.ran, ended.err
    run = the_run(cwd / "results")
    return SimRun(ended, run.path, run)


@pytest.fixture
def quick(sim_url: Callable[..., str]) -> str:
    """The URL of a simulated engine that answers quickly."""
    return sim_url(**QUICK_SIM)


@pytest.fixture(scope="session")
def interrupt() -> Callable[[subprocess.Popen[str], int], None]:
    """Ctrl-C as a terminal sends it: to the whole process group."""
    return lambda process, signum=signal.SIGINT: os.killpg(process.pid, signum)
