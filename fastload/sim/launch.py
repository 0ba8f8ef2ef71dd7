"""Start a simulated engine as a process of its own, for the length of a `with` block."""

import os
import selectors
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

from fastload.errors import TargetError
from fastload.sim.options import Options

READY_TIMEOUT_S = 20.0
END_TIMEOUT_S = 2.0


@contextmanager
def start(options: Options | None = None, cpu: int | None = None) -> Iterator[str]:
    """A running simulated engine; yields its base URL (`http://127.0.0.1:PORT`), ends it when the block ends.

    It also ends when this process does, even by SIGKILL: it watches the pipe to its stdin. A Ctrl-C on the
    terminal does not reach it, so a run can drain. `cpu`: keep it on that CPU. Raises `TargetError` when it
    does not come up.
    """
    # Here, not above: the server module brings asyncio, which whoever only wants the name `start` need not
    # load.
    from fastload.sim.server import KEY_VARIABLE, command_line

    options = options or Options()
    # -P: the server is the installed fastload, not a folder of that name where the user happens to stand.
    command = [
        sys.executable,
        "-P",
        "-m",
        "fastload.sim.server",
        "--until-stdin-ends",
        *command_line(options),
    ]
    if cpu is not None:
        command += ["--cpu", str(cpu)]
    # The key is for the server that is measured, if one is: an engine of ours needs none to be started.
    inherited = {name: value for name, value in os.environ.items() if name != "FASTLOAD_API_KEY"}
    environment = inherited | ({KEY_VARIABLE: options.api_key} if options.api_key is not None else {})
    with tempfile.TemporaryFile() as complaints:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=complaints,
            env=environment,
            start_new_session=True,
        )
        try:
            assert process.stdout is not None
            line = _first_line(process.stdout, READY_TIMEOUT_S)
            if not line.startswith(b"listening "):
                raise TargetError(f"the simulated engine did not start: {_why(process, complaints)}")
            yield line.split()[1].decode()
        finally:
            _end(process)


def _first_line(stream: IO[bytes], timeout_s: float) -> bytes:
    """The first line of `stream`; empty if it ends, or says nothing for so long."""
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        return stream.readline() if selector.select(timeout_s) else b""


def _why(process: subprocess.Popen[bytes], complaints: IO[bytes]) -> str:
    try:
        process.wait(1.0)
    except subprocess.TimeoutExpired:
        return f"nothing heard from it for {READY_TIMEOUT_S:g} s"
    complaints.seek(0)
    lines = complaints.read().decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"it ended with code {process.returncode}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """Close its stdin, which ends it; insist where that is not enough."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()
    try:
        process.wait(END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()
