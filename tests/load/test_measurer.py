"""The measuring process on its own, told what to do line by line as the supervisor does."""

import contextlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from rig import Taken
from scripted import DONE, FINISH, LAST_CHUNK, WAIT_S, Call, body_of, chunk, event, head, quick, serve

from fastload import _client, _timing
from fastload.load import shared

SEALED = 2  # the word of a block's state that says so
OURS = {
    "fastload",
    "fastload._client",
    "fastload._timing",
    "fastload.load",
    "fastload.load.answer_head",
    "fastload.load.connections",
    "fastload.load.hiding",
    "fastload.errors",
    "fastload.load.patience",
    "fastload.load.shared",
    "fastload.load.tls",
    "fastload.load.tunnel",
}


class Process(Taken):
    """A measurer, its shared memory, and the messages it has sent."""

    def __init__(self, port: int, *, slots: int = 4, max_failures: int = 50, **limits: float) -> None:
        super().__init__()
        sizes = (shared.BLOCKS_BYTES, shared.SLICES * shared.SLICE_BYTES, _client.MEMORY_BYTES)
        self.fds = [shared.create("test", size) for size in sizes]
        self.blocks, self.plan, live = (shared.attach(fd, size) for fd, size in zip(self.fds, sizes, strict=True))
        self.live = shared.Live(live)
        self.out, writer = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "fastload.load.measurer", *map(str, [*self.fds, writer])],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=[*self.fds, writer],
        )
        os.close(writer)
        self.pending = b""
        self.messages: list[dict[str, Any]] = []
        self.taking = True
        self.next_request = 0
        known = {"connect_s": 10.0, "first_byte_s": 60.0, "idle_s": 60.0, "total_s": 60.0}
        self.tell(
            do="hello",
            slots=slots,
            head="POST / HTTP/1.1\r\nHost: x\r\n",
            family=int(socket.AF_INET),
            sockaddr=["127.0.0.1", port],
            stamp="kernel",
            cpu=None,
            save_text=False,
            max_failures=max_failures,
            limits=known | limits,
        )
        self.ready = self.await_message("ready")

    def tell(self, **command: object) -> None:
        """One command."""
        self.tell_all(command)

    def tell_all(self, *commands: dict[str, object]) -> None:
        """Several commands in one write."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"".join(json.dumps(command).encode() + b"\n" for command in commands))
        self.process.stdin.flush()

    def level(self, measured: int, *, index: int = 0, streams: int = 4, slices: int = 4) -> None:
        """Begin a level, and give it the next `slices` x 16 requests."""
        self.tell(**level_of(measured, index, streams))
        self.give(slices, index)

    def give(self, slices: int, level: int = 0) -> None:
        """Give the level slices of 16 requests."""
        for index in range(slices):
            bodies = [(number, body_of(number)) for number in range(self.next_request, self.next_request + 16)]
            self.next_request += 16
            shared.put_slice(self.plan, index, bodies)
            self.tell(do="slice", level=level, index=index, requests=16)

    def listen(self, wait_s: float) -> bool:
        """Take messages, and the blocks they tell of; False when the process has ended."""
        if select.select([self.out], [], [], wait_s)[0]:
            data = os.read(self.out, 1 << 20)
            if not data:
                return False
            *lines, self.pending = (self.pending + data).split(b"\n")
            for line in lines:
                self.messages.append(json.loads(line))
                if self.messages[-1]["do"] == "sealed" and self.taking:
                    self.take(self.messages[-1]["index"])
        return True

    def take(self, index: int) -> None:
        """Take and release a block."""
        block = _timing.read_block(self.blocks, index)
        assert block is not None
        _timing.release_block(self.blocks, index)
        self.add_block(block)

    def said(self, kind: str) -> list[dict[str, Any]]:
        """Messages of a kind so far."""
        return [message for message in self.messages if message["do"] == kind]

    def await_message(self, kind: str, count: int = 1) -> dict[str, Any]:
        """Wait for the `count`th message of a kind."""
        give_up = time.monotonic() + WAIT_S
        while len(self.said(kind)) < count:
            assert self.listen(0.05), f"the measurer ended: {self.ended()}"
            assert time.monotonic() < give_up, f"no {kind!r} came; {self.messages[1:]} {self.live.counters()}"
        return self.said(kind)[count - 1]

    def ended(self) -> tuple[int, str]:
        """Its exit code and what it wrote to stderr, once it has ended."""
        assert self.process.stderr is not None
        return self.process.wait(WAIT_S), self.process.stderr.read().decode()

    def close(self) -> None:
        """End it, and free everything."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stderr):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        for fd in (*self.fds, self.out):
            os.close(fd)


def level_of(measured: int, index: int = 0, streams: int = 4) -> dict[str, object]:
    return {
        "do": "level",
        "level": index,
        "concurrency": streams,
        "warmup": 0,
        "measured": measured,
        "duration_s": None,
        "reuse": True,
        "learn": False,
    }


@contextlib.contextmanager
def measurer(port: int, **options: Any) -> Iterator[Process]:
    """A measurer that is ready."""
    process = Process(port, **options)
    try:
        yield process
    finally:
        process.close()


def test_it_loads_nothing_but_its_loop_its_parser_and_our_extensions() -> None:
    code = "import sys; print(*sys.modules)"
    bare = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    with serve(quick) as server, measurer(server.port) as process:
        loaded = set(process.ready["modules"]) - set(bare.stdout.split())
    ours = {name for name in loaded if name.partition(".")[0] == "fastload"}
    assert ours == OURS  # and the measurer itself, as __main__
    # Cython's extensions register names of their own
    foreign = {name.partition(".")[0] for name in loaded - ours} - set(sys.stdlib_module_names) - {"__main__"}
    assert {name for name in foreign if "cython" not in name} == {"uvloop", "orjson"}


def test_a_level_from_its_slices_to_its_last_row() -> None:
    with serve(quick) as server, measurer(server.port) as process:
        process.level(40)
        end = process.await_message("level_done")
        sent = [row["request"] for row in process.rows]
        assert sorted(sent) == list(range(len(sent))) and len(sent) >= 40
        assert sum(row["role"] == _timing.ROLE_MEASURED for row in process.rows) == 40
        assert end["unsent"] == (len(sent) if len(sent) < 64 else -1)
        assert (end["cancelled"], end["gave_up"], end["short"], end["gc_pauses"]) == (False, "", False, 0)
        # every slice came back, before the end was told
        assert sorted(message["index"] for message in process.said("free")) == [0, 1, 2, 3]
        assert process.messages[-1]["do"] == "level_done"


def test_a_slice_that_crosses_the_end_of_its_level_is_void() -> None:
    with serve(quick) as server, measurer(server.port) as process:
        process.level(4, slices=1)
        process.await_message("level_done")
        rows = len(process.rows)
        process.give(2, level=0)  # too late
        process.next_request = 1000
        process.level(4, index=1, slices=2)
        process.await_message("level_done", 2)
        assert min(row["request"] for row in process.rows[rows:]) == 1000
        assert len(process.said("free")) == 3


def test_cancel_makes_rows_of_what_is_on_the_wire() -> None:
    with serve(Call.stay) as server, measurer(server.port) as process:
        process.level(100)
        assert server.wait_for(lambda: len(server.requests) == 4)
        process.tell(do="cancel")
        end = process.await_message("level_done")
        assert end["cancelled"] and end["short"]
        assert sorted(row["request"] for row in process.rows) == [0, 1, 2, 3]
        assert all(row["end"] == _timing.END_CANCELLED for row in process.rows)
        assert server.wait_for(lambda: server.connections == 0)
        assert len(server.requests) == 4 and server.accepts == 4


def test_cancel_while_connections_are_being_opened() -> None:
    # a listener whose queue is full answers no SYN
    with socket.socket() as listener, contextlib.ExitStack() as crowd:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            sock = crowd.enter_context(socket.socket())
            sock.setblocking(False)
            sock.connect_ex(listener.getsockname())
        with measurer(listener.getsockname()[1], connect_s=60.0) as process:
            process.level(100)
            process.listen(0.2)
            process.tell(do="cancel")
            end = process.await_message("level_done")
            assert end["cancelled"] and end["short"] and process.rows == []


def test_cancel_in_the_same_breath_as_the_level() -> None:
    with serve(Call.stay) as server, measurer(server.port) as process:
        process.tell_all(level_of(100), {"do": "cancel"})
        end = process.await_message("level_done")
        assert end["cancelled"]
        assert process.rows == [] and server.requests == []


def test_cancel_waits_for_a_free_block() -> None:
    with serve(Call.stay) as server, measurer(server.port) as process:
        process.taking = False
        step = _timing.block_bytes()
        for index in range(1, _timing.BLOCKS):  # as if the supervisor were far behind
            struct.pack_into("<q", process.blocks, index * step, SEALED)
        process.level(100)
        assert server.wait_for(lambda: len(server.requests) == 4)
        assert process.await_message("sealed")["index"] == 0  # each second the open block is sealed
        process.tell(do="cancel")
        for _ in range(4):
            process.listen(0.05)
        assert process.said("level_done") == []
        process.taking = True
        process.take(0)
        assert process.await_message("level_done")["cancelled"]
        assert sorted(row["request"] for row in process.rows) == [0, 1, 2, 3]


def test_a_full_memory_is_waited_for_and_nothing_is_late_by_it() -> None:
    idle_s = 0.3

    def script(call: Call) -> None:
        call.send(head())
        for _ in range(40):
            call.send(chunk(event("a")))
            call.sleep(0.03)
        call.finish(chunk(FINISH + DONE) + LAST_CHUNK)

    with serve(script) as server, measurer(server.port, idle_s=idle_s) as process:
        process.taking = False
        step = _timing.block_bytes()
        for index in range(1, _timing.BLOCKS):  # as if the supervisor were far behind
            struct.pack_into("<q", process.blocks, index * step, SEALED)
        process.level(4)
        assert process.await_message("sealed")["index"] == 0  # each second the open block is sealed
        since = time.monotonic()
        while time.monotonic() - since < 2 * idle_s:
            process.listen(0.05)
        assert process.live.counters()["done"] == 0
        process.taking = True
        process.take(0)
        process.await_message("level_done")
        assert process.live.counters()["stalled_ns"] > 0
        assert {row["end"] for row in process.rows} == {_timing.END_COMPLETE}
        assert all(len(process.stream(row["request"])) == 42 for row in process.rows)


def test_nobody_listens() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and does not listen
        with measurer(closed.getsockname()[1], max_failures=9) as process:
            process.level(40, streams=2)
            end = process.await_message("level_done")
    assert end["gave_up"].startswith("9 requests failed in a row (--max-failures 9)")
    assert end["short"] and not end["cancelled"]
    assert len(process.rows) == 9
    assert all(row["end"] == _timing.END_CONNECT and row["sent_ns"] == -1 for row in process.rows)
    assert len({row["request"] for row in process.rows}) == 9
    for slot in (0, 1):
        waits = [row["backoff_ms"] for row in process.rows if row["slot"] == slot]
        assert waits == sorted(waits) and waits[:3] == [0, 100, 300]
    assert process.error(0) == "connect: Connection refused"


def test_a_server_that_accepts_and_closes_is_backed_off_from() -> None:
    with serve(quick, accept=lambda number: False) as server, measurer(server.port, max_failures=4) as process:
        process.level(40, streams=1)
        end = process.await_message("level_done")
        assert end["gave_up"].startswith("4 requests failed in a row")
        # a connection closed before it was used costs a wait as well, and has no row
        waits = [row["backoff_ms"] for row in process.rows]
        assert len(waits) == 4 and waits == sorted(waits) and waits[-1] >= 400
        assert server.accepts <= 10


def test_what_came_during_a_pause_of_the_process_is_not_late() -> None:
    gate = threading.Event()

    def script(call: Call) -> None:
        call.send(head() + chunk(event("a")))
        call.hold(gate)
        call.finish(chunk(event("b")) + chunk(DONE) + LAST_CHUNK)

    with serve(script) as server, measurer(server.port, idle_s=0.5) as process:
        process.level(1, streams=1, slices=1)
        give_up = time.monotonic() + WAIT_S
        while process.live.counters()["reads"] < 1:
            assert process.listen(0.01) and time.monotonic() < give_up
        process.process.send_signal(signal.SIGSTOP)
        gate.set()
        time.sleep(0.7)  # longer than the limit
        process.process.send_signal(signal.SIGCONT)
        process.await_message("level_done")
        assert [row["end"] for row in process.rows] == [_timing.END_COMPLETE]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGTERM])
def test_a_signal_to_the_whole_group_is_not_for_the_measurer(number: signal.Signals) -> None:
    with serve(quick) as server, measurer(server.port) as process:
        process.process.send_signal(number)
        process.level(4, slices=1)
        process.await_message("level_done")
        assert len(process.rows) >= 4


def test_it_ends_when_told_and_when_its_supervisor_is_gone() -> None:
    with serve(Call.stay) as server:
        for busy in (False, True):
            for told in (False, True):
                with measurer(server.port) as process:
                    if busy:
                        process.level(100)
                        assert server.wait_for(lambda: server.in_flight > 0)
                    assert process.process.stdin is not None
                    if told:
                        process.tell(do="end")
                    else:
                        process.process.stdin.close()
                    assert process.ended() == (0, "")


def test_nobody_reads_its_messages_any_more() -> None:
    with serve(quick) as server, measurer(server.port) as process:
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, process.out)  # closes the pipe's reading end
        os.close(nothing)
        process.level(40)
        assert process.ended()[1] == ""  # no traceback on the user's terminal


def test_a_fault_of_its_own_ends_it() -> None:
    with serve(Call.stay) as server, measurer(server.port) as process:
        process.level(100)
        assert server.wait_for(lambda: server.in_flight == 4)
        process.tell(do="nonsense")
        code, said = process.ended()
        assert code == 70 and "nonsense" in said
