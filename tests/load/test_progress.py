"""What a display is told of a running level: its own figures only, failures by class, in little memory."""

import mmap
import struct
from typing import Any

import pytest
from scripted import Call, chunk, event, head, quick, serve
from test_supervisor import Sink, bodies, level, load

from fastload import _client, _timing
from fastload.load import progress, shared
from fastload.load.failures import failure_on_wire
from fastload.load.progress import Meter, Progress


@pytest.fixture
def live() -> shared.Live:
    """The shared memory as a level left it: 30 measured requests done, 2 failed, a TTFT of 50 ms."""
    memory = mmap.mmap(-1, _client.MEMORY_BYTES)
    told = {"measured_done": 30, "failed": 2, "in_flight": 4, "text_events": 300, "told_events": 300}
    struct.pack_into(f"<{len(_client.GAUGES)}q", memory, 0, *(told.get(name, 0) for name in _client.GAUGES))
    found = shared.Live(memory)
    found.ttft.record(50_000_000)
    found.delay.record(60_000)
    return found


def test_the_level_before_is_not_shown(live: shared.Live) -> None:
    meter = Meter(level(1, 8, 40), 3, live)
    seen = meter.read(ended=False, stopping=False)
    assert (seen.phase, seen.done, seen.failed, seen.in_flight, seen.events) == ("connecting", 0, 0, 0, 0)
    assert (seen.ttft_p50_ms, seen.delay_p99_us, seen.tokens_per_s, seen.eta_s) == (None, None, None, None)
    assert set(meter.counters().values()) == {0} and meter.delay.count == 0
    meter.begin()
    seen = meter.read(ended=False, stopping=False)
    assert (seen.level, seen.levels, seen.concurrency, seen.planned) == (1, 3, 8, 40)
    assert (seen.phase, seen.done, seen.failed, seen.in_flight, seen.events) == ("measuring", 30, 2, 4, 300)
    assert seen.ttft_p50_ms == pytest.approx(50, rel=0.01) and seen.delay_p99_us == pytest.approx(60, rel=0.01)
    assert seen.eta_s == pytest.approx(seen.elapsed_s / 3) and meter.counters()["measured_done"] == 30


def test_phases_and_the_time_that_is_left(live: shared.Live, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1_000_000_000]
    monkeypatch.setattr(_timing, "now_ns", lambda: clock[0])
    both = Meter(level(0, 8, 40, 100.0), 1, live)
    clock[0] += 20_000_000_000
    assert both.read(ended=False, stopping=False).eta_s == 100  # the clock of the level has not started
    both.begin()
    clock[0] += 30_000_000_000
    assert both.read(ended=False, stopping=False).eta_s == 10  # 10 requests at 1 a second, before the 70 s are over
    assert both.read(ended=False, stopping=True).phase == "stopping"
    phases = [(-1, 0, "warm-up"), (0, 30, "draining"), (0, 31, "measuring"), (0, None, "measuring")]
    for index, planned, phase in phases:
        meter = Meter(level(index, 8, planned), 1, live)
        meter.begin()
        assert meter.read(ended=False, stopping=False).phase == phase


def test_the_rate_is_of_the_last_seconds_and_what_is_kept_for_it_too(
    live: shared.Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, events = [0], [0]
    told = live.counters() | {"told_events": 1, "told_tokens": 2}
    monkeypatch.setattr(_timing, "now_ns", lambda: clock[0])
    monkeypatch.setattr(live, "counters", lambda: told | {"text_events": events[0]})
    meter = Meter(level(0, 8, None), 1, live)
    meter.begin()
    for step in range(20_000):  # 10 000 s of looks
        clock[0] += 500_000_000
        events[0] += 50 if step < 10_000 else 500
        seen = meter.read(ended=False, stopping=False)
    assert seen.tokens_per_s == pytest.approx(2000)
    assert len(meter._history) <= progress.RATE_NS // 500_000_000 + 1
    assert meter.read(ended=True, stopping=False).tokens_per_s == pytest.approx(1100)


def test_failures_by_class() -> None:
    sink: Any = Sink()
    seen: list[Progress] = []

    def script(call: Call) -> None:
        if call.number in (3, 5):
            call.send(head() + chunk(event("a")))
            call.reset()
        if call.number == 7:
            call.send(head(b"Content-Length: 2", 503) + b"{}")
            call.close()
        quick(call)

    with serve(script) as server:
        load(server.port, bodies(level(0, 1, 10), level(1, 1, 4)), sink, seen.append)
    last = {one.level: one.errors for one in seen}
    assert last == {-1: {}, 0: {"reset": 2, "http_status": 1}, 1: {}}
    assert all(one.done == one.failed == 0 for one in seen if one.phase == "connecting")


def test_the_class_of_a_failure() -> None:
    assert failure_on_wire(_timing.END_CONNECT, -1) == "connect"
    assert failure_on_wire(_timing.END_PORTS, -1) == "client_ports"
    assert failure_on_wire(_timing.END_EOF, 200) == "truncated"
    assert failure_on_wire(_timing.END_EOF, 503) == "http_status"
    assert failure_on_wire(_timing.END_COMPLETE, 302) == "redirect"
    assert failure_on_wire(_timing.END_COMPLETE, 204) == "http_status"
