"""The measuring process as the supervisor holds it: spawned, told, heard, its memory read, and ended by pid."""

import contextlib
import os
import select
import signal
import subprocess
import sys
from typing import Any

import orjson

from fastload import _client, _timing
from fastload.load import shared
from fastload.load.hiding import clean_environment

END_S = 1.2  # how long a measurer may take to hand over what it has


class DiedError(Exception):
    """The measurer ended without being told to; the message says how."""


class Process:
    """One measurer and the memory shared with it. `start` it, and `end` it whatever happens between."""

    def __init__(self) -> None:
        sizes = (shared.BLOCKS_BYTES, shared.SLICES * shared.SLICE_BYTES, _client.MEMORY_BYTES)
        self._fds = [
            shared.create(name, size) for name, size in zip(("blocks", "plan", "live"), sizes, strict=True)
        ]
        self._blocks, self.slices, live = (
            shared.attach(fd, size) for fd, size in zip(self._fds, sizes, strict=True)
        )
        self.live = shared.Live(live)
        self._out, self._out_writer = os.pipe()
        self._pending = b""
        self._popen: subprocess.Popen[bytes] | None = None
        self._why_killed: str | None = None

    def start(self) -> None:
        """Spawn it; it says `ready` when it has been told `hello`."""
        fds = [*self._fds, self._out_writer]
        self._popen = subprocess.Popen(
            [sys.executable, "-P", "-m", "fastload.load.measurer", *map(str, fds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=fds,
            env=clean_environment(),
            process_group=0,  # a Ctrl-C of the terminal is for us alone, from the measurer's first instruction on
        )
        os.close(self._out_writer)
        self._out_writer = -1

    def tell(self, **command: object) -> None:
        """Send a command; a dead measurer is noticed by hear()."""
        assert self._popen is not None and self._popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._popen.stdin.write(orjson.dumps(command) + b"\n")
            self._popen.stdin.flush()

    def hear(self, wait_s: float) -> list[dict[str, Any]]:
        """The messages that came, waiting up to `wait_s` for one. Raises DiedError when the measurer is gone."""
        readable, _, _ = select.select([self._out], [], [], wait_s)
        if not readable:
            return []
        data = os.read(self._out, 1 << 20)
        if not data:
            raise DiedError(self._how_it_ended())
        *lines, self._pending = (self._pending + data).split(b"\n")
        return [orjson.loads(line) for line in lines]

    def kill(self, why: str) -> None:
        """End it now; hear() then says why."""
        assert self._popen is not None
        self._why_killed = why
        self._popen.kill()

    def _how_it_ended(self) -> str:
        assert self._popen is not None
        code = self._popen.wait()
        if self._why_killed is not None:
            return self._why_killed
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        return f"the measuring process ended {how}"

    def read(self, index: int) -> _timing.Block | None:
        """A copy of a sealed block; None if it is not sealed."""
        return _timing.read_block(self._blocks, index)

    def release(self, index: int) -> None:
        """Give a block that was read back to the measurer."""
        _timing.release_block(self._blocks, index)

    def abandoned(self) -> list[_timing.Block]:
        """After its death: the blocks it sealed and could not announce, in their order."""
        blocks = (self.read(index) for index in range(_timing.BLOCKS))
        return sorted((block for block in blocks if block is not None), key=lambda block: block.sequence)

    def end(self) -> None:
        """End it, by pid, and give back what it cost."""
        process = self._popen
        if process is not None:
            assert process.stdin is not None
            if process.poll() is None:
                self.tell(do="end")
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()  # writes what a dead measurer did not take
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for fd in (*self._fds, self._out, self._out_writer):
            if fd >= 0:
                os.close(fd)
