"""The doctor on made-up hosts, one finding at a time, and as a command on this one."""

from __future__ import annotations

import json
import os
import socket
import sys
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

from fastload.cli import doctor, host
from fastload.errors import TraceError
from fastload.load import host as load_host

if TYPE_CHECKING:
    from .conftest import Run

US, MS = 1_000, 1_000_000
MARKS = {"ok", "look", "bad"}


@pytest.fixture(autouse=True)
def _brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Watch for a moment only: what is tested is not this host."""
    monkeypatch.setattr(doctor, "timer_findings", lambda: [doctor.wake_finding([1]), doctor.hiccup_finding([1])])


# --- findings -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "mark", "says"),
    [
        (doctor.stamp_finding("IPv4", True, "5 us"), "ok", "5 us"),
        (doctor.stamp_finding("IPv6", None, "no loopback"), "ok", "no loopback"),
        (doctor.stamp_finding("IPv4", False, "refused"), "bad", "time of the read"),
        (doctor.clock_finding("tsc", 60), "ok", "within 30 ns"),
        (doctor.clock_finding("hpet", 3_000), "look", "clocksource=tsc"),
        (doctor.clock_finding(None, 90_000), "bad", "unknown clock source"),
        (doctor.wake_finding([50 * US] * 99 + [100 * US]), "ok", "P50 50 us, P99 100 us"),
        (doctor.wake_finding([50 * US] * 90 + [400 * US] * 10), "look", "--cpu"),
        (doctor.wake_finding([5 * MS]), "bad", "P50 5000 us"),
        (doctor.hiccup_finding([1, 900 * US]), "ok", "worst 0.90 ms, 0 above"),
        (doctor.hiccup_finding([1, 2 * MS, 4 * MS]), "look", "worst 4.00 ms, 2 above"),
        (doctor.hiccup_finding([1, 40 * MS]), "bad", "worst 40.00 ms"),
        (doctor.cores_finding(1.5, 1.5, 8), "bad", "1.5 usable of 8, cgroup quota 1.5"),
        (doctor.cores_finding(6, 6.0, 8), "look", "quota stops all threads"),
        (doctor.cores_finding(2, None, 2), "look", "2 usable of 2"),
        (doctor.cores_finding(16, None, None), "ok", "16 usable"),
        (doctor.governor_finding({}), "ok", "no cpufreq"),
        (doctor.governor_finding({"performance": 8}), "ok", "performance"),
        (doctor.governor_finding({"powersave": 2, "performance": 6}), "look", "performance on 6, powersave on 2"),
        (doctor.load_finding(None, 4), "ok", "not told"),
        (doctor.load_finding((0.5, 3.0, 9.0), 4), "ok", "0.50 over 1 min"),
        (doctor.load_finding((2.0, 0.0, 0.0), 4), "look", "on 4 cores"),
        (doctor.load_finding((4.0, 0.0, 0.0), 4), "bad", "competes"),
        (doctor.busy_finding([], 2), "ok", "none above 5%"),
        (doctor.busy_finding([("x", 7, 0.4)], 2), "look", "x (7) 40%"),
        (doctor.busy_finding([("x", 7, 0.9)] * 4, 2), "bad", "and 1 more, together 360%"),
        (doctor.machine_finding(False), "ok", "no hypervisor"),
        (doctor.machine_finding(None), "ok", "does not say"),
        (doctor.machine_finding(True), "look", "virtual"),
        (doctor.descriptor_finding(1024, None), "ok", "hard unlimited"),
        (doctor.descriptor_finding(1024, 1_048_576), "ok", "concurrency up to 1048512"),
        (doctor.descriptor_finding(256, 512), "look", "LimitNOFILE"),
        (doctor.descriptor_finding(64, 100), "bad", "concurrency up to 36"),
        (doctor.port_finding(None, None, None, None), "ok", "not told"),
        (doctor.port_finding(28_232, (32_768, 60_999), 2, 3), "ok", "loopback only, 3 in TIME_WAIT now"),
        (doctor.port_finding(28_232, (32_768, 60_999), 0, 20_000), "look", "not reused"),
        (doctor.port_finding(4_000, (1, 4_000), None, None), "look", "ip_local_port_range"),
        (doctor.port_finding(500, (1, 500), 1, 0), "bad", "500 usable"),
        (doctor.uvloop_finding(True), "ok", "installed"),
        (doctor.uvloop_finding(False), "bad", "pip install uvloop"),
        (doctor.round_trip_finding([90 * US, 100 * US, 200 * US]), "ok", "median 0.100 ms of 3 connects"),
        (doctor.round_trip_finding([20 * MS]), "look", "nearer"),
    ],
)
def test_finding(one: doctor.Finding, mark: str, says: str) -> None:
    assert one.mark == mark
    assert says in doctor._text(one)
    assert bool(one.advice) == (mark != "ok")  # whatever is not well, there is something to do about it


def test_stolen_time() -> None:
    before = load_host.Ticks(1000, 500, 10)
    marks = [doctor.steal_finding(before, load_host.Ticks(2000, 900, 10 + steal)).mark for steal in (0, 10, 100)]
    assert marks == ["ok", "look", "bad"]
    assert doctor.steal_finding(before, before).mark == "ok"


def nic(**told: bool | int | str | None) -> load_host.Nic:
    plain: dict[str, bool | int | str | None] = dict.fromkeys(load_host.Nic.__dataclass_fields__)
    return load_host.Nic(**{**plain, "name": "eth7", "loopback": False, **told})  # type: ignore[arg-type]


def test_interface() -> None:
    assert "no network card" in doctor.nic_finding(nic(name="lo", loopback=True)).found
    silent = doctor.nic_finding(nic())
    assert silent.mark == "ok" and silent.found == "eth7: offloads not told"
    usual = doctor.nic_finding(nic(driver="ixgbe", gro=True, tso=True, lro=False, rx_usecs=3))
    assert usual.mark == "ok" and usual.found == "eth7 (ixgbe): GRO on LRO off TSO on, interrupts wait 3 us"
    slow = doctor.nic_finding(nic(lro=True, adaptive_rx=True, rx_usecs=50, gro_flush_ns=20_000))
    assert slow.mark == "look" and "wait 50 us (adaptive)" in slow.found
    for part in ("ethtool -K eth7 lro off", "up to 20 us", "ethtool -C eth7 adaptive-rx off rx-usecs 0"):
        assert part in slow.advice


def test_busy_processes_are_the_others_that_ran() -> None:
    tick = os.sysconf("SC_CLK_TCK")
    before = {(7, 1): ("old", 100), (8, 1): ("idle", 50), (9, 1): ("gone", 3), (os.getpid(), 1): ("we", 0)}
    after = {
        (7, 1): ("old", 100 + tick // 2),
        (7, 5): ("new", tick),  # the same pid, another process
        (8, 1): ("idle", 50),
        (os.getpid(), 1): ("we", 9 * tick),
    }
    assert doctor.busy_processes(before, after, 1.0) == [("new", 7, 1.0), ("old", 7, 0.5)]


def test_calibration(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("fastload.cli.calibrate")
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    assert doctor.calibration_findings() == []
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(module, "known", lambda: None, raising=False)
    [none] = doctor.calibration_findings()
    assert none.mark == "look" and "fastload calibrate" in none.advice
    monkeypatch.setattr(module, "known", lambda: {"verdict": {"kernel": {"concurrency": 256}}})
    [known] = doctor.calibration_findings()
    assert known.mark == "ok" and known.found.endswith("up to concurrency 256 (kernel stamps)")

    def broken() -> None:
        raise TraceError("calibration.json: not JSON")

    monkeypatch.setattr(module, "known", broken)
    [unreadable] = doctor.calibration_findings()
    assert unreadable.mark == "look" and "not JSON" in unreadable.found


def test_what_a_calibration_says() -> None:
    read = {"kernel": None, "read": {"concurrency": 8, "reasons": ["c=16: x"]}}
    assert doctor.known_finding({"verdict": read}).found.endswith("up to concurrency 8 (read stamps)")
    never = doctor.known_finding({"verdict": {"kernel": {"concurrency": None, "reasons": ["c=1: slow", "c=2: y"]}}})
    assert never.mark == "look" and "(c=1: slow)" in never.found
    assert "no verdict" in doctor.known_finding({}).found


def test_summary_counts() -> None:
    one = {mark: doctor.Finding(mark, "x", "y") for mark in ("ok", "look", "bad")}
    assert doctor.summary([one["ok"]]) == "nothing to change: this host is fit to measure"
    assert doctor.summary([one["ok"], one["look"], one["bad"]]) == "1 bad, 1 to look at, 1 ok"


# --- watching -----------------------------------------------------------------------------------------------


def test_timers_are_watched() -> None:
    late = doctor.wake_lateness(wakes=5, gap_ns=MS)
    assert len(late) == 5 and late == sorted(late) and late[0] >= 0
    overshoots = doctor.hiccups(ticks=5)
    assert 1 <= len(overshoots) <= 5 and overshoots == sorted(overshoots)


def test_a_sandbox_without_timers_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> list[int]:
        raise OSError(1, "Operation not permitted")

    monkeypatch.undo()  # the brief stand-in for what is tested here
    monkeypatch.setattr(doctor, "wake_lateness", refuse)
    [only] = doctor.timer_findings()
    assert only.mark == "bad" and "Operation not permitted" in only.found


# --- the command --------------------------------------------------------------------------------------------


def test_plain_lines(run: Run) -> None:
    ended = run("doctor")
    assert ended.code == 0 and ended.err == ""
    *lines, last = ended.out.splitlines()
    assert {line[:4].strip() for line in lines} <= MARKS and all(line[4:6] == "  " for line in lines)
    for subject in (
        "kernel stamps, IPv4",
        "kernel stamps, IPv6",
        "epoll",
        "clock",
        "cores",
        "descriptors",
        "local ports",
    ):
        assert sum(line[6:].startswith(f"{subject}: ") for line in lines) == 1
    assert last.endswith(" ok") or last.startswith("nothing to change")


def test_json_and_the_way_to_a_server(run: Run, half_server: str) -> None:
    ended = run("doctor", "--json", "--url", half_server)
    told = json.loads(ended.out)
    assert ended.code == 0 and ended.err == "" and told["fit"] is True
    subjects = [one["subject"] for one in told["findings"]]
    assert len(subjects) == len(set(subjects)) and subjects[-2:] == ["interface", "round trip"]
    assert {one["mark"] for one in told["findings"]} <= MARKS
    assert told["host"]["nic"]["name"] == "lo" and told["host"]["kernel"] == os.uname().release


def test_server_that_is_not_there_is_a_finding(run: Run) -> None:
    with socket.socket() as taken:  # bound, not listening: nobody else gets the port
        taken.bind(("127.0.0.1", 0))
        ended = run("doctor", "--url", f"http://127.0.0.1:{taken.getsockname()[1]}")
    assert ended.code == 0
    assert "bad   server: " in ended.out and "connection refused" in ended.out


def test_bad_url_is_refused_at_once(run: Run) -> None:
    ended = run("doctor", "--url", "localhost:8000")
    assert ended.code == 2 and ended.out == "" and "--url localhost:8000" in ended.err


def test_without_any_stamps_the_host_is_unfit(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_host, "SO_TIMESTAMPNS", 9999)
    ended = run("doctor")
    assert ended.code == 1 and "bad   kernel stamps, IPv4: setsockopt" in ended.out


def test_without_epoll_the_host_is_unfit(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_host, "epoll_works", lambda: (False, "fails"))
    ended = run("doctor", "--json")
    assert ended.code == 1 and json.loads(ended.out)["fit"] is False


def test_stamps_of_one_family_are_enough(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_host, "kernel_stamps", lambda family: (family == socket.AF_INET, "made up"))
    ended = run("doctor")
    assert ended.code == 0 and "bad   kernel stamps, IPv6: made up" in ended.out


def test_a_terminal_gets_a_table(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    doctor._print_table([doctor.Finding("look", "x[bold]", "found\x1b[2J", "change [/this]")])
    shown = capfd.readouterr().out
    assert "x[bold]" in shown and "found?[2J; change [/this]" in shown and "1 to look at" in shown


def test_facts_name_the_interface_of_the_route() -> None:
    facts = host.facts("127.0.0.1")
    assert json.loads(json.dumps(facts)) == facts
    assert isinstance(facts["nic"], dict) and facts["nic"]["loopback"] is True
    assert host.facts()["nic"] is None
