"""The ground-truth server as a process of its own: `_emit.Emitter`, and its log read back.

    python -P -m fastload.sim.truth --log FILE --ttft-ms 50 --step-ms 20 --cpu 0

prints "listening http://127.0.0.1:PORT" and serves until its stdin ends. Loopback only.
"""

import argparse
import mmap
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fastload.errors import TargetError
from fastload.sim import _emit

RECORDS = 1 << 25  # 512 MB of address space; only what is written takes disk
BACKLOG = 4096
TTFT_MS, STEP_MS = 50.0, 20.0


@dataclass(frozen=True, slots=True)
class Pace:
    """How the server sends: first token at the first step at least `ttft_ms` after the request, then one a step.

    `step_ms` 0 sends without pace.
    """

    ttft_ms: float = TTFT_MS
    step_ms: float = STEP_MS


def serve(pace: Pace, log_path: Path, cpu: int | None) -> None:
    """Serve until stdin ends; the log is cut to what was written."""
    if cpu is not None:
        os.sched_setaffinity(0, {cpu})
    with open(log_path, "w+b") as file:
        file.truncate(_emit.HEADER_BYTES + RECORDS * _emit.RECORD_BYTES)
        log = mmap.mmap(file.fileno(), 0)
        with socket.create_server(("127.0.0.1", 0), backlog=BACKLOG) as listening:
            listening.setblocking(False)
            emitter = _emit.Emitter(
                listening.fileno(), log, round(pace.ttft_ms * 1e6), round(pace.step_ms * 1e6)
            )
            print(f"listening http://127.0.0.1:{listening.getsockname()[1]}", flush=True)
            emitter.serve()
            written = emitter.records_written
        log.flush()
        file.truncate(_emit.HEADER_BYTES + written * _emit.RECORD_BYTES)


@contextmanager
def start(pace: Pace, log_path: Path, cpu: int | None = None) -> Iterator[str]:
    """A running ground-truth server; yields its base URL. After the block the log is whole. TargetError if it
    does not come up."""
    command = [sys.executable, "-P", "-m", "fastload.sim.truth", "--log", str(log_path)]
    command += ["--ttft-ms", str(pace.ttft_ms), "--step-ms", str(pace.step_ms)]
    if cpu is not None:
        command += ["--cpu", str(cpu)]
    inherited = {name: value for name, value in os.environ.items() if name != "FASTLOAD_API_KEY"}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, env=inherited
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            line = process.stdout.readline()
            if not line.startswith(b"listening "):
                raise TargetError("the ground-truth server did not start")
            yield line.split()[1].decode()
        finally:
            process.stdin.close()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()


def main() -> None:
    """The command line of the module."""
    words = argparse.ArgumentParser(description="Serve equal tokens at a known pace, with a log of every send.")
    words.add_argument("--log", type=Path, required=True)
    words.add_argument("--ttft-ms", type=float, default=TTFT_MS)
    words.add_argument("--step-ms", type=float, default=STEP_MS)
    words.add_argument("--cpu", type=int)
    given = words.parse_args()
    serve(Pace(given.ttft_ms, given.step_ms), given.log, given.cpu)


if __name__ == "__main__":
    main()
