"""Whole runs through both processes against scripted servers: levels, stops, deaths, servers that come and go."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rig import Taken
from scripted import LAST_CHUNK, WAIT_S, Call, answer, body_of, chunk, event, head, quick, serve

from fastload import _timing
from fastload.errors import TargetError
from fastload.load import process, supervisor
from fastload.load.progress import Progress
from fastload.load.supervisor import LevelFacts, LoadOptions, Outcome, Stop
from fastload.load.target import Address, Target
from fastload.plan import Level, Plan


@dataclass(frozen=True)
class Bodies(Plan):
    """A plan whose bodies carry no prompt but their request's number; `make` makes them."""

    make: Callable[[int], bytes] = body_of

    def body(self, request: int) -> bytes:
        return self.make(request)

    def prompt_tokens_planned(self, request: int) -> int | None:
        return 7


def bodies(*levels: Level, make: Callable[[int], bytes] = body_of) -> Bodies:
    no_lengths: Any = None
    return Bodies(levels, "m", "chat", 1, 1, False, 0, {}, {}, no_lengths, make=make)


class Sink(Taken):
    """Takes blocks as the trace's writer does, and keeps them in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: list[int] = []
        self.ended: list[LevelFacts] = []

    def begin_level(self, index: int, concurrency: int, planned: object, max_tokens: int) -> None:
        self.begun.append(index)

    def end_level(self, facts: LevelFacts) -> None:
        self.ended.append(facts)

    def of(self, level: int) -> list[dict[str, int]]:
        """Rows of a level in the order they were sent."""
        return sorted((row for row in self.rows if row["level"] == level), key=lambda row: row["sent_ns"])

    def finished(self, level_index: int) -> list[dict[str, object]]:
        known = {"completion_tokens": 1, "text_events": 1, "token_source": "usage"}
        return [
            {
                "status": "ok" if (row["end"], row["http_status"]) == (_timing.END_COMPLETE, 200) else "failed",
                "error": self.error(row["request"]),
                "http_status": row["http_status"],
                **known,
            }
            for row in self.of(level_index)
        ]


def level(index: int, concurrency: int, measured: int | None, duration_s: float | None = None) -> Level:
    return Level(index, concurrency, measured, duration_s, 1)


def target(port: int, family: int = socket.AF_INET) -> Target:
    host = "127.0.0.1" if family == socket.AF_INET else "::1"
    sockaddr: tuple[object, ...] = (host, port) if family == socket.AF_INET else (host, port, 0, 0)
    address = Address(host, port, family, sockaddr, "http")
    return Target(f"http://x:{port}", address, "/v1", "x", "m", False, ("m",), {}, None, 0.1, None)


def load(
    port: int,
    plan: Plan,
    sink: Sink,
    watch: Callable[[Progress], None] = lambda progress: None,
    stop: Stop | None = None,
    family: int = socket.AF_INET,
    **options: Any,
) -> Outcome:
    """A run of `plan` against the port."""
    where, how = target(port, family), LoadOptions(**options)
    return supervisor.run(plan, where, None, {}, sink, how, watch, stop or Stop())


def stalling(call: Call) -> None:
    """Answer the warm-up, begin every other answer and say no more."""
    if call.number == 0:
        quick(call)
    else:
        call.send(head() + chunk(event("a")))
        call.stay()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list["subprocess.Popen[bytes]"]:
    """The measurers this test starts."""
    made: list[subprocess.Popen[bytes]] = []
    make = subprocess.Popen

    def popen(*args: Any, **more: Any) -> "subprocess.Popen[bytes]":
        made.append(make(*args, **more))
        return made[-1]

    monkeypatch.setattr(process.subprocess, "Popen", popen)
    return made


@contextlib.contextmanager
def later(wait: Callable[[], object], do: Callable[[], object]) -> Iterator[None]:
    """Beside the block: wait, then do."""
    thread = threading.Thread(target=lambda: (wait(), do()), daemon=True)
    thread.start()
    yield
    thread.join(WAIT_S)


# ---------------------------------------------------------------- whole runs


@pytest.mark.parametrize("close", [False, True], ids=["keep-alive", "closing"])
@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6], ids=["IPv4", "IPv6"])
def test_levels_of_one_run(close: bool, family: int) -> None:
    sink, seen = Sink(), []
    plan = bodies(level(0, 1, 5), level(1, 64, 200), level(2, 2, 10))
    with serve(lambda call: call.finish(answer("one", close=close)), family=family) as server:
        outcome = load(server.port, plan, sink, seen.append, family=family)
        assert (outcome.interrupted, outcome.died, outcome.stopped) == (None, None, None)
        assert server.accepts == 64 if not close else server.accepts >= len(sink.rows)
        assert server.most_in_flight <= 64
        assert len(server.requests) == len(sink.rows)
    assert sink.begun == [-1, 0, 1, 2] and [facts.index for facts in sink.ended] == [-1, 0, 1, 2]
    assert [facts.index for facts in outcome.levels] == [0, 1, 2]

    # every number once over the run, and none left out before a level's end
    sent = [row["request"] for row in sorted(sink.rows, key=lambda row: row["sent_ns"])]
    assert len(set(sent)) == len(sent)
    for facts, streams, measured in zip(outcome.levels, (1, 64, 2), (5, 200, 10), strict=True):
        rows = sink.of(facts.index)
        roles = [row["role"] for row in rows]
        assert roles == sorted(roles) and roles.count(_timing.ROLE_WARMUP) == 1
        assert roles.count(_timing.ROLE_MEASURED) == measured == facts.measured_done == facts.measured_planned
        assert facts.complete and facts.concurrency == streams
        assert {row["slot"] for row in rows} <= set(range(streams))
        assert [row["request"] for row in rows] == sorted(row["request"] for row in rows)
        assert facts.started_ns <= min(row["sent_ns"] for row in rows)
        assert facts.ended_ns >= max(row["done_ns"] for row in rows)
        assert all(row["end"] == _timing.END_COMPLETE and row["attempt"] == 1 for row in rows)
        instrument = facts.instrument
        assert instrument["connections_kept"] is not close
        assert instrument["stamps"] == "kernel" and instrument["gc_pauses"] == 0
        assert instrument["stray_bytes"] == instrument["stale_retries"] == instrument["clamped"] == 0
        # 4 events an answer: text, finish, usage, [DONE]
        assert instrument["events"] == 4 * len(rows) == sum(len(sink.stream(row["request"])) for row in rows)
    assert sink.sequences == sorted(sink.sequences)
    assert outcome.clock["offsets"] and len(outcome.clock["anchors"]) == 2
    assert {progress.level for progress in seen} == {-1, 0, 1, 2}


def test_read_stamps_all_through() -> None:
    sink = Sink()
    with serve(quick) as server:
        outcome = load(server.port, bodies(level(0, 2, 6)), sink, stamp="read")
    assert outcome.levels[0].instrument["stamps"] == "read"
    assert all(row["stamp_source"] == 0 for row in sink.rows)
    delays = {one["delay_ns"] for row in sink.rows for one in sink.stream(row["request"])}
    assert delays == {-1}


def test_a_level_of_a_duration() -> None:
    sink = Sink()
    with serve(quick) as server:
        outcome = load(server.port, bodies(level(0, 4, None, 0.3)), sink)
    (facts,) = outcome.levels
    assert facts.complete and facts.measured_planned is None
    assert facts.measured_done == sum(row["role"] == _timing.ROLE_MEASURED for row in sink.of(0)) > 0
    assert facts.ended_ns - facts.started_ns >= 300_000_000


def test_a_prompt_of_tens_of_megabytes() -> None:
    sink, plan = Sink(), bodies(level(0, 2, 4), make=lambda request: body_of(request, 20 << 20))
    with serve(quick) as server:
        outcome = load(server.port, plan, sink)
        assert {len(seen.body) for seen in server.requests} == {len(body_of(0, 20 << 20))}
    assert outcome.levels[0].complete
    assert all(row["end"] == _timing.END_COMPLETE and row["sent_done_ns"] > row["sent_ns"] for row in sink.rows)


def test_the_warm_up_must_succeed() -> None:
    said = b'{"error":{"message":"no such model"}}'
    with serve(lambda call: call.finish(head(b"Content-Length: %d" % len(said), 404) + said)) as server:
        with pytest.raises(TargetError, match=r"^--url http://x:\d+: the warm-up request failed \(.*404"):
            load(server.port, bodies(level(0, 2, 6)), Sink())
        assert len(server.requests) == 1


def test_the_warm_up_does_not_wait_for_a_server_that_is_gone() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and does not listen
        sink = Sink()
        with pytest.raises(TargetError, match="the warm-up request failed .*Connection refused"):
            load(closed.getsockname()[1], bodies(level(0, 2, 6)), sink)
    assert 1 <= len(sink.rows) <= 3


# ---------------------------------------------------------------- servers that fail


def test_a_server_that_goes_and_comes_back() -> None:
    sink, gone = Sink(), threading.Event()
    plan = bodies(level(0, 8, 150))

    def script(call: Call) -> None:
        if call.number > 40:
            gone.set()
            call.stay()
        call.sleep(0.005)
        quick(call)

    def restart() -> None:
        first.__exit__(None, None, None)
        time.sleep(0.5)
        second.enter_context(serve(quick, port=server.port))

    first = serve(script)
    server = first.__enter__()
    with contextlib.ExitStack() as second, later(lambda: gone.wait(WAIT_S), restart):
        outcome = load(server.port, plan, sink, max_failures=10_000)
    (facts,) = outcome.levels
    assert facts.complete and outcome.stopped is None
    rows = sink.of(0)
    refused = [row for row in rows if row["end"] == _timing.END_CONNECT]
    assert refused and any(row["backoff_ms"] > 0 for row in refused)
    assert len({row["request"] for row in rows}) == len(rows)
    # what never left does not use up the level: 150 measured requests were sent
    sent = [row for row in rows if row["sent_ns"] >= 0 and row["role"] == _timing.ROLE_MEASURED]
    assert len(sent) == 150
    assert rows[-1]["end"] == _timing.END_COMPLETE


def test_a_server_that_goes_for_good() -> None:
    sink, gone = Sink(), threading.Event()

    def script(call: Call) -> None:
        if call.number > 10:
            gone.set()
            call.stay()
        quick(call)

    first = serve(script)
    server = first.__enter__()
    with later(lambda: gone.wait(WAIT_S), lambda: first.__exit__(None, None, None)):
        outcome = load(server.port, bodies(level(0, 4, 100), level(1, 8, 100)), sink, max_failures=12)
    assert outcome.died is None and outcome.interrupted is None
    assert outcome.stopped is not None and outcome.stopped.startswith("level 4: ")
    assert "requests failed in a row (--max-failures 12)" in outcome.stopped
    (facts,) = outcome.levels
    assert not facts.complete and sink.begun == [-1, 0]
    assert len({row["request"] for row in sink.rows}) == len(sink.rows)


def test_a_stream_that_stalls_is_a_timeout_and_the_others_go_on() -> None:
    sink = Sink()

    def script(call: Call) -> None:
        if call.number == 3:
            call.send(head() + chunk(event("a")))
            call.stay()
        quick(call)

    with serve(script) as server:
        outcome = load(server.port, bodies(level(0, 2, 20)), sink, idle_timeout_s=0.3)
    assert outcome.levels[0].complete and outcome.stopped is None
    ends = {row["request"]: row["end"] for row in sink.of(0)}
    assert [request for request, end in ends.items() if end != _timing.END_COMPLETE] == [3]
    assert ends[3] == _timing.END_TIMEOUT
    assert sink.error(3) == "silent for longer than --idle-timeout"


# ---------------------------------------------------------------- the end before the end


def test_a_stop_hands_over_what_is_there() -> None:
    sink, stop = Sink(), Stop()
    with serve(stalling) as server:

        def stop_there() -> None:
            server.wait_for(lambda: len(server.requests) == 9)
            stop.request(signal.SIGINT)

        with later(stop_there, lambda: None):
            outcome = load(server.port, bodies(level(0, 8, 100), level(1, 2, 4)), sink, stop=stop)
        assert len(server.requests) == 9
    assert (outcome.interrupted, outcome.died, outcome.stopped) == (signal.SIGINT, None, None)
    (facts,) = outcome.levels
    assert not facts.complete and sink.begun == [-1, 0]
    assert [row["end"] for row in sink.of(0)] == [_timing.END_CANCELLED] * 8
    assert sorted(row["request"] for row in sink.rows) == list(range(9))


def test_a_stop_is_seen_between_two_bodies() -> None:
    stop, sink = Stop(), Sink()
    after: list[int] = []

    def body(request: int) -> bytes:
        if request > 40:
            stop.request(signal.SIGTERM)
        if stop.signal is not None:
            after.append(request)
        return body_of(request)

    with serve(quick) as server:
        outcome = load(server.port, bodies(level(0, 256, 1000), make=body), sink, stop=stop)
    # making a body of a million tokens takes a while: no other is begun
    assert len(after) == 1
    assert (outcome.interrupted, outcome.died) == (signal.SIGTERM, None)


def test_a_killed_measurer_is_named_and_its_sealed_blocks_are_kept(started: list[Any]) -> None:
    sink, killed = Sink(), threading.Event()

    def script(call: Call) -> None:
        if call.number > 300:
            call.sleep(1.5)  # longer than a block stays open
            killed.set()
            started[-1].kill()
            call.stay()
        quick(call)

    with serve(script) as server:
        outcome = load(server.port, bodies(level(0, 4, 10_000), level(1, 8, 100)), sink)
    assert killed.is_set()
    assert outcome.died == "the measuring process ended by SIGKILL"
    assert outcome.interrupted is None and outcome.stopped is None
    (facts,) = outcome.levels
    assert not facts.complete and sink.begun == [-1, 0] and [facts.index for facts in sink.ended] == [-1, 0]
    rows = sink.of(0)
    assert len(rows) >= 290 and len({row["request"] for row in rows}) == len(rows)


def test_a_fault_in_the_measurer_is_one_sentence(started: list[Any], capfd: pytest.CaptureFixture[str]) -> None:
    sink = Sink()

    def script(call: Call) -> None:
        if call.number == 20:
            started[-1].stdin.write(json.dumps({"do": "nonsense"}).encode() + b"\n")
            started[-1].stdin.flush()
            call.stay()
        quick(call)

    with serve(script) as server:
        outcome = load(server.port, bodies(level(0, 1, 100)), sink)
    assert outcome.died == "the measuring process ended with exit code 70"
    assert "nonsense" in capfd.readouterr().err  # whoever mends it finds the fault there


def test_commands_a_dead_measurer_did_not_take_are_no_second_fault() -> None:
    measurer = process.Process()
    try:
        measurer.start()
        measurer.kill("why")
        with pytest.raises(process.DiedError, match="why"):
            while True:
                measurer.hear(1.0)
        measurer.tell(do="cancel")
    finally:
        measurer.end()


def test_a_measurer_that_does_not_answer_is_killed(started: list[Any]) -> None:
    sink, stop = Sink(), Stop()

    def script(call: Call) -> None:
        if call.number == 5:
            started[-1].send_signal(signal.SIGSTOP)
            stop.request(signal.SIGINT)
            call.stay()
        quick(call)

    with serve(script) as server:
        outcome = load(server.port, bodies(level(0, 1, 100)), sink, stop=stop)
    assert outcome.interrupted == signal.SIGINT
    assert outcome.died == "the measuring process did not stop within 1.2 s and was killed"


def test_a_supervisor_that_is_killed_takes_the_measurer_along() -> None:
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import test_supervisor as here
popen = here.subprocess.Popen
def tell(*args, **more):
    made = popen(*args, **more)
    print(made.pid, flush=True)
    return made
here.process.subprocess.Popen = tell
here.load(int(sys.argv[1]), here.bodies(here.level(0, 4, 100)), here.Sink())
"""
    with serve(stalling) as server:
        run = subprocess.Popen([sys.executable, "-P", "-c", code, str(server.port)], stdout=subprocess.PIPE, text=True)
        try:
            assert run.stdout is not None
            pid = int(run.stdout.readline())
            assert server.wait_for(lambda: server.in_flight == 4)
        finally:
            run.kill()
            run.communicate()
        assert server.wait_for(lambda: server.connections == 0)
        give_up = time.monotonic() + WAIT_S
        while alive(pid):
            assert time.monotonic() < give_up
            time.sleep(0.02)


def alive(pid: int) -> bool:
    """Whether a process runs; one that ended and that nobody waited for does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_nothing_is_left_open(started: list[Any]) -> None:
    with serve(quick) as server:
        load(server.port, bodies(level(0, 4, 20)), Sink())  # what is imported late is there now
        before = os.listdir("/proc/self/fd")
        load(server.port, bodies(level(0, 4, 20)), Sink())
        assert server.wait_for(lambda: server.connections == 0)
        assert len(os.listdir("/proc/self/fd")) <= len(before)
    assert [process.poll() for process in started] == [0, 0]


def test_an_unfinished_answer_has_the_events_that_came() -> None:
    sink = Sink()

    def script(call: Call) -> None:
        if call.number == 2:
            call.send(head() + chunk(event("a")), chunk(event("b")) + b"5\r\nda")
            call.close()
        if call.number == 4:
            call.send(head() + chunk(event("a")))
            call.reset()
        if call.number == 6:
            call.send(head() + chunk(event("a")) + chunk(b"data: [DONE]\n\n"))
            call.close()
        call.finish(head() + chunk(event("a")) + chunk(b"data: [DONE]\n\n") + LAST_CHUNK)

    with serve(script) as server:
        load(server.port, bodies(level(0, 1, 8)), sink)
    ends = {row["request"]: row["end"] for row in sink.of(0)}
    assert (ends[2], ends[4], ends[6]) == (_timing.END_EOF, _timing.END_RESET, _timing.END_EOF)
    assert [len(sink.stream(request)) for request in (2, 4, 6)] == [2, 1, 2]
    flags = {row["request"]: row["row_flags"] for row in sink.of(0)}
    assert flags[6] & _timing.RF_DONE and flags[6] & _timing.RF_FRAMING_BROKEN
