"""`fastload doctor`: is this host fit to measure, and what would make it fitter?

Two halves. `_look` takes about two seconds to watch the host; the functions below it each turn what was seen into one
finding, without looking at anything themselves, so that tests can give them any host.
"""

from __future__ import annotations

import ctypes
import dataclasses
import importlib
import importlib.util
import json
import os
import select
import socket
import statistics
import struct
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import click

from fastload.cli.display import one_line
from fastload.errors import TargetError, TraceError

if TYPE_CHECKING:
    from fastload.load.host import Nic, Ticks
    from fastload.load.target_address import Address, Place

EXIT_UNFIT = 1
WAKE_GAP_NS = 2_000_000
WAKES = 250  # half a second of them
HICCUP_TICK_NS = 1_000_000
HICCUP_TICKS = 1000  # a second
CONNECTS = 20
BUSY_SHARE = 0.05  # of one core: below this a process disturbs nobody

Mark = Literal["ok", "look", "bad"]
COLOURS: dict[Mark, str] = {"ok": "green", "look": "yellow", "bad": "bold red"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: `ok`, `look` (worth a change) or `bad` (figures will suffer); `advice` is empty when ok."""

    mark: Mark
    subject: str
    found: str
    advice: str = ""


@click.command("doctor")
@click.option(
    "--url",
    "--base-url",
    "url",
    metavar="URL",
    help="Look at the way to this server too: interface, offloads, round trip.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON on stdout and nothing else.")
def doctor(url: str | None, as_json: bool) -> int:
    """Say whether this host is fit to measure, and what to change.

    Watches the host for about two seconds. With --url it also opens 20 connections to the server, one
    after the other, and sends nothing on them. Exit code 1 only when kernel time stamps or epoll do not
    work at all.
    """
    from fastload.load.target_address import parse_url

    findings, facts, fit = _look(None if url is None else parse_url(url))
    if as_json:
        click.echo(json.dumps({"fit": fit, "findings": [dataclasses.asdict(one) for one in findings], "host": facts}))
    elif sys.stdout is not None and sys.stdout.isatty():
        _print_table(findings)
    else:
        for one in findings:
            click.echo(f"{one.mark:<4}  {one.subject}: {_text(one)}")
        click.echo(summary(findings))
    return 0 if fit else EXIT_UNFIT


def _print_table(findings: Sequence[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    for one in findings:
        colour = COLOURS[one.mark]
        table.add_row(Text(one.mark, style=colour), Text(one.subject, style="bold"), Text(_text(one)))
    console = Console()
    console.print(table)
    console.print(summary(findings), highlight=False)


def _text(one: Finding) -> str:
    return one_line(f"{one.found}; {one.advice}" if one.advice else one.found)


def summary(findings: Sequence[Finding]) -> str:
    """Return the last line: how many there are of each."""
    bad, look = (sum(one.mark == mark for one in findings) for mark in ("bad", "look"))
    if not bad and not look:
        return "nothing to change: this host is fit to measure"
    return f"{bad} bad, {look} to look at, {len(findings) - bad - look} ok"


def _look(place: Place | None) -> tuple[list[Finding], dict[str, object], bool]:
    """Watch the host; return the findings, the facts of a manifest, and whether it can measure at all."""
    from fastload import _timing
    from fastload.cli import host as manifest
    from fastload.load import host

    load_before = host.load_average()  # before our own watching is in it
    cores = host.usable_cores() or 1.0
    stamps = {name: host.kernel_stamps(family) for name, family in host.FAMILIES.items()}
    epoll_ok, epoll_found = host.epoll_works()
    _, bracket_ns = _timing.clock_offset()

    processes, ticks, begun_ns = host.process_ticks(), host.cpu_ticks(), _timing.now_ns()
    timing = timer_findings()
    watched_s = (_timing.now_ns() - begun_ns) / 1e9
    busy = busy_processes(processes, host.process_ticks(), watched_s)
    ticks_after = host.cpu_ticks()

    findings = [stamp_finding(name, works, said) for name, (works, said) in stamps.items()]
    findings.append(Finding("ok" if epoll_ok else "bad", "epoll", epoll_found, "" if epoll_ok else _NO_EPOLL))
    findings.append(clock_finding(host.clocksource(), bracket_ns))
    findings += timing
    findings.append(cores_finding(cores, host.cpu_quota(), os.cpu_count()))
    findings.append(governor_finding(host.governors()))
    findings.append(load_finding(load_before, os.cpu_count() or 1))
    findings.append(busy_finding(busy, cores))
    virtual = host.is_virtual()
    findings += [machine_finding(virtual)]
    if virtual and ticks is not None and ticks_after is not None:
        findings.append(steal_finding(ticks, ticks_after))
    findings.append(descriptor_finding(*host.descriptors()))
    findings.append(port_finding(host.local_ports(), host.port_range(), host.time_wait_reuse(), host.time_waits()))
    findings += [python_finding(), uvloop_finding(importlib.util.find_spec("uvloop") is not None)]
    findings += calibration_findings()

    address = None
    if place is not None:
        to_server, address = _way_findings(place)
        findings += to_server
    fit = epoll_ok and any(works for works, _ in stamps.values())
    return findings, manifest.facts(None if address is None else address.host), fit


_NO_EPOLL = "the engine waits with epoll and cannot run without it: use a Linux kernel that is not emulated"


# --- watching -----------------------------------------------------------------------------------------------


@contextmanager
def _timer() -> Iterator[tuple[int, Any]]:
    """A timerfd on CLOCK_MONOTONIC, and `set(first_ns, every_ns)` for it (the os module has it from 3.13 on)."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd = libc.timerfd_create(1, os.O_CLOEXEC | os.O_NONBLOCK)  # CLOCK_MONOTONIC
    if fd < 0:
        raise OSError(ctypes.get_errno(), "timerfd_create fails")

    def set_to(first_ns: int, every_ns: int = 0) -> None:
        spec = (ctypes.c_long * 4)(*divmod(every_ns, 1_000_000_000), *divmod(first_ns, 1_000_000_000))
        if libc.timerfd_settime(fd, 1, ctypes.byref(spec), None) != 0:  # TFD_TIMER_ABSTIME
            raise OSError(ctypes.get_errno(), "timerfd_settime fails")

    try:
        yield fd, set_to
    finally:
        os.close(fd)


def wake_lateness(wakes: int = WAKES, gap_ns: int = WAKE_GAP_NS) -> list[int]:
    """Return, sorted, how many ns after its due time each wake-up from an idle epoll came."""
    from fastload._timing import now_ns

    late: list[int] = []
    with _timer() as (fd, set_to), select.epoll() as events:
        events.register(fd, select.EPOLLIN)
        for _ in range(wakes):
            due = now_ns() + gap_ns
            set_to(due)
            events.poll(1.0)
            late.append(max(0, now_ns() - due))
    return sorted(late)


def hiccups(ticks: int = HICCUP_TICKS, every_ns: int = HICCUP_TICK_NS) -> list[int]:
    """Return, sorted, how many ns after the first tick it should have seen each wake-up of a steady timer came."""
    from fastload._timing import now_ns

    overshoots: list[int] = []
    with _timer() as (fd, set_to), select.epoll() as events:
        events.register(fd, select.EPOLLIN)
        start, seen = now_ns() + every_ns, 0
        set_to(start, every_ns)
        while seen < ticks and events.poll(1.0):
            overshoots.append(max(0, now_ns() - (start + seen * every_ns)))
            seen += struct.unpack("=Q", os.read(fd, 8))[0]
    return sorted(overshoots)


def timer_findings() -> list[Finding]:
    """Watch timers for a second and a half. A sandbox that has none is a finding, like any other."""
    try:
        return [wake_finding(wake_lateness()), hiccup_finding(hiccups())]
    except OSError as error:
        why = f"no timerfd here ({error.strerror or error})"
        return [Finding("bad", "wake-up", why, "use a Linux kernel that is not emulated, or a laxer sandbox")]


def busy_processes(
    before: Mapping[tuple[int, int], tuple[str, int]],
    after: Mapping[tuple[int, int], tuple[str, int]],
    seconds: float,
) -> list[tuple[str, int, float]]:
    """Return name, pid and share of a core of every other process that ran noticeably, the busiest first."""
    per_second = os.sysconf("SC_CLK_TCK")
    shares = (
        (name, pid, (ran - before.get((pid, start), ("", 0))[1]) / per_second / seconds)
        for (pid, start), (name, ran) in after.items()
        if pid != os.getpid()
    )
    return sorted((one for one in shares if one[2] >= BUSY_SHARE), key=lambda one: -one[2])


def connect_times(address: Address, connects: int = CONNECTS) -> list[int]:
    """Return, sorted, the ns that opening a connection took: one round trip each. Raises OSError."""
    from fastload._timing import now_ns

    took: list[int] = []
    for _ in range(connects):
        with socket.socket(address.family, socket.SOCK_STREAM) as one:
            one.settimeout(5.0)
            begun = now_ns()
            one.connect(address.sockaddr)
            took.append(now_ns() - begun)
    return sorted(took)


def _way_findings(place: Place) -> tuple[list[Finding], Address | None]:
    """Look at the way to a server. One that does not answer is a finding: the rest is still worth printing."""
    from fastload.load import host
    from fastload.load.target_address import reach

    try:
        address, _ = reach(place, timeout_s=5.0)
    except TargetError as error:
        return [Finding("bad", "server", str(error))], None
    name = host.interface_to(address.host)
    found = [] if name is None else [nic_finding(host.nic(name))]
    try:
        return [*found, round_trip_finding(connect_times(address))], address
    except OSError as error:
        why = f"a connection to {address.host} port {address.port} failed ({error.strerror or error})"
        return [*found, Finding("bad", "round trip", why, "the server or a firewall refuses some connections")], address


# --- findings -----------------------------------------------------------------------------------------------


def stamp_finding(name: str, works: bool | None, said: str) -> Finding:
    """Whether arrivals are stamped by the kernel."""
    subject = f"kernel stamps, {name}"
    if works is None or works:  # None: there is no such loopback, so no run uses it
        return Finding("ok", subject, said)
    advice = (
        "runs use the time of the read instead, which is late by however long the client was busy; "
        "use a Linux kernel that is not emulated"
    )
    return Finding("bad", subject, said, advice)


def clock_finding(source: str | None, bracket_ns: int) -> Finding:
    """How well kernel stamps and our clock can be brought together."""
    found = f"{source or 'unknown clock source'}, kernel and process clocks agree within {bracket_ns / 2:.0f} ns"
    if bracket_ns <= 1_000:
        return Finding("ok", "clock", found)
    advice = "reading the time is slow, each stamp is off by up to that; set clocksource=tsc where the CPU allows it"
    return Finding("look" if bracket_ns <= 20_000 else "bad", "clock", found, advice)


def wake_finding(late_ns: Sequence[int]) -> Finding:
    """How late the kernel wakes a process that waits: it is in what paced sends and read stamps cost."""
    p50, p99 = (_at(late_ns, q) / 1e3 for q in (0.5, 0.99))
    found = f"P50 {p50:.0f} us, P99 {p99:.0f} us after the timer was due ({len(late_ns)} wake-ups)"
    # The engine wakes 120 us before a due time and spins: what is later than that makes a send late.
    if p99 <= 120:
        return Finding("ok", "wake-up", found)
    advice = "sends at a given time leave late beyond 120 us; free a core (--cpu), forbid deep idle states"
    return Finding("look" if p99 <= 1_000 else "bad", "wake-up", found, advice)


def hiccup_finding(overshoots_ns: Sequence[int]) -> Finding:
    """The longest time a process that only waits was kept from running."""
    worst = overshoots_ns[-1] / 1e6
    above = sum(one > HICCUP_TICK_NS for one in overshoots_ns)
    found = f"worst {worst:.2f} ms, {above} above 1 ms in {HICCUP_TICKS / 1000:g} s"
    if worst <= 1.0:
        return Finding("ok", "hiccups", found)
    advice = "something else holds the core that long; kernel stamps stay true, turn-around of streams does not"
    return Finding("look" if worst <= 10.0 else "bad", "hiccups", found, advice)


def cores_finding(usable: float, quota: float | None, online: int | None) -> Finding:
    """How many cores measuring, the supervisor and perhaps the server have to share."""
    found = f"{usable:g} usable" + ("" if online is None else f" of {online}")
    found += "" if quota is None else f", cgroup quota {quota:g}"
    if usable < 2:
        advice = "the measurer shares its core with everything else; give it 4 (affinity, container limits)"
        return Finding("bad", "cores", found, advice)
    if quota is not None:
        advice = "a quota stops all threads for up to 100 ms once it is spent; pin cores instead (cpuset)"
        return Finding("look", "cores", found, advice)
    if usable < 4:
        advice = "enough for a server elsewhere; one on this host shares cores with its own measurer"
        return Finding("look", "cores", found, advice)
    return Finding("ok", "cores", found)


def governor_finding(governors: Mapping[str, int]) -> Finding:
    """Whether cores keep their clock rate while they wait."""
    from fastload.cli.host import governor_text

    text = governor_text(dict(governors))
    if text is None:
        return Finding("ok", "governor", "none to set (no cpufreq here)")
    if set(governors) == {"performance"}:
        return Finding("ok", "governor", text)
    advice = "cores clock down between tokens and wake slowly; `sudo cpupower frequency-set -g performance`"
    return Finding("look", "governor", text, advice)


def load_finding(load: tuple[float, float, float] | None, online: int) -> Finding:
    """How much ran lately, on the whole host."""
    if load is None:
        return Finding("ok", "load average", "not told here")
    found = f"{load[0]:.2f} over 1 min, {load[1]:.2f} over 5 min, on {online} cores"
    if load[0] <= 0.25 * online:
        return Finding("ok", "load average", found)
    advice = "other work competes for the cores; stop it or wait"
    return Finding("look" if load[0] < online else "bad", "load average", found, advice)


def busy_finding(busy: Sequence[tuple[str, int, float]], usable: float) -> Finding:
    """Which other processes run now."""
    if not busy:
        return Finding("ok", "busy processes", f"none above {BUSY_SHARE:.0%} of a core")
    total = sum(share for _, _, share in busy)
    listed = ", ".join(f"{name} ({pid}) {share:.0%}" for name, pid, share in busy[:3])
    more = f" and {len(busy) - 3} more" if len(busy) > 3 else ""
    advice = "stop what is not the server under test, or pin fastload away from it (--cpu)"
    mark: Mark = "bad" if total > usable - 1 else "look"
    return Finding(mark, "busy processes", f"{listed}{more}, together {total:.0%} of a core", advice)


def machine_finding(virtual: bool | None) -> Finding:
    """Whether a hypervisor is below."""
    if not virtual:
        return Finding("ok", "machine", "no hypervisor" if virtual is False else "does not say if it is virtual")
    advice = "its host can stop it unseen; hiccups and stolen time show what it costs, `fastload calibrate` how much"
    return Finding("look", "machine", "virtual (hypervisor flag)", advice)


def steal_finding(before: Ticks, after: Ticks) -> Finding:
    """What the hypervisor gave to others while we watched."""
    share = (after.steal - before.steal) / max(1, after.total - before.total)
    found = f"{share:.1%} of the processors' time"
    if share <= 0.005:
        return Finding("ok", "stolen time", found)
    advice = "the hypervisor runs others on these cores; use a dedicated or larger instance"
    return Finding("look" if share <= 0.03 else "bad", "stolen time", found, advice)


def descriptor_finding(soft: int | None, hard: int | None) -> Finding:
    """How many connections the limit of open files allows; a run raises the soft limit by itself."""
    from fastload.load.host import RESERVE_DESCRIPTORS

    if hard is None:
        return Finding("ok", "descriptors", f"soft {soft or 'unlimited'}, hard unlimited")
    level = max(0, hard - RESERVE_DESCRIPTORS)
    found = f"soft {'unlimited' if soft is None else soft}, hard {hard}: concurrency up to {level}"
    if level >= 1024:
        return Finding("ok", "descriptors", found)
    advice = "lift it as root: `ulimit -Hn 65536`, LimitNOFILE=65536 in a systemd unit, --ulimit of a container"
    return Finding("look" if level >= 64 else "bad", "descriptors", found, advice)


def port_finding(ports: int | None, limits: tuple[int, int] | None, reuse: int | None, waiting: int | None) -> Finding:
    """How many connections to one server there is room for, those in TIME_WAIT included."""
    if ports is None or limits is None:
        return Finding("ok", "local ports", "not told here")
    tells = {0: "not reused from TIME_WAIT", 1: "reused from TIME_WAIT", 2: "reused from TIME_WAIT on loopback only"}
    now = "" if waiting is None else f", {waiting} in TIME_WAIT now"
    reused = "" if reuse not in tells else f", {tells[reuse]}"
    found = f"{limits[0]}-{limits[1]}, {ports} usable{reused}{now}"
    if ports >= 16_384 and (waiting or 0) < ports // 2:
        return Finding("ok", "local ports", found)
    advice = (
        "a server that closes after each answer uses one a request for 60 s; widen it: "
        '`sudo sysctl -w net.ipv4.ip_local_port_range="1024 65535" net.ipv4.tcp_tw_reuse=1`'
    )
    return Finding("look" if ports >= 1_024 else "bad", "local ports", found, advice)


def python_finding() -> Finding:
    """Which interpreter runs the measurer."""
    from fastload.cli.host import python_version

    free = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
    debug = bool(sysconfig.get_config_var("Py_DEBUG"))
    found = f"{python_version()}, {'free-threaded' if free else 'GIL'}, {'debug' if debug else 'release'} build"
    if debug or sys.flags.dev_mode:
        return Finding("look", "python", found, "debug checks slow arming and turn-around; use a release build")
    if free:
        return Finding("look", "python", found, "not measured yet on free-threaded builds; use the plain one")
    return Finding("ok", "python", found)


def uvloop_finding(present: bool) -> Finding:
    """Whether the measurer's loop can be imported."""
    if present:
        return Finding("ok", "uvloop", "installed")
    return Finding("bad", "uvloop", "not installed", "the measurer needs it: `pip install uvloop`")


def calibration_findings() -> list[Finding]:
    """Whether this host's own error was measured; nothing where this fastload cannot calibrate."""
    if importlib.util.find_spec("fastload.cli.calibrate") is None:
        return []
    try:
        known = importlib.import_module("fastload.cli.calibrate").known()
    except TraceError as error:
        return [Finding("look", "calibration", str(error), "make it anew: `fastload calibrate`")]
    if known is None:
        advice = "run `fastload calibrate` (3 minutes): it says up to which load the client's own error is negligible"
        return [Finding("look", "calibration", "none for this host", advice)]
    return [known_finding(known)]


def known_finding(known: Mapping[str, Any]) -> Finding:
    """What a calibration of this host says; the kernel stamps' verdict, where there is one."""
    verdict = known.get("verdict") or {}
    source = "kernel" if verdict.get("kernel") else "read"
    judged = verdict.get(source) or {}
    level = judged.get("concurrency")
    if level is not None:
        return Finding("ok", "calibration", f"the client is negligible up to concurrency {level} ({source} stamps)")
    why = (judged.get("reasons") or ["it has no verdict"])[0]
    advice = "mend what else is found here, then `fastload calibrate` anew"
    return Finding("look", "calibration", f"the client is not negligible at any level ({why})", advice)


def nic_finding(nic: Nic) -> Finding:
    """What the interface on the way does to segments before they are stamped."""
    if nic.loopback:
        return Finding("ok", "interface", f"{nic.name} (loopback): no network card is in the figures")
    offloads = {"GRO": nic.gro, "LRO": nic.lro, "GSO": nic.gso, "TSO": nic.tso}
    told = " ".join(f"{name} {'on' if on else 'off'}" for name, on in offloads.items() if on is not None)
    waits = "" if nic.rx_usecs is None else f", interrupts wait {nic.rx_usecs} us"
    waits += " (adaptive)" if nic.adaptive_rx else ""
    driver = f" ({nic.driver})" if nic.driver else ""
    found = f"{nic.name}{driver}: {told or 'offloads not told'}{waits}"
    changes = []
    if nic.lro:
        changes.append(f"LRO merges tokens into one stamp: `sudo ethtool -K {nic.name} lro off`")
    if nic.gro_flush_ns:
        changes.append(
            f"GRO holds segments back up to {nic.gro_flush_ns / 1e3:g} us: "
            f"write 0 to /sys/class/net/{nic.name}/gro_flush_timeout"
        )
    if nic.adaptive_rx or (nic.rx_usecs or 0) > 20:
        changes.append(f"arrivals are stamped after that wait: `sudo ethtool -C {nic.name} adaptive-rx off rx-usecs 0`")
    return Finding("look" if changes else "ok", "interface", found, "; ".join(changes))


def round_trip_finding(took_ns: Sequence[int]) -> Finding:
    """What the network adds to every TTFT."""
    median = statistics.median(took_ns) / 1e6
    found = f"median {median:.3f} ms of {len(took_ns)} connects, {took_ns[0] / 1e6:.3f} to {took_ns[-1] / 1e6:.3f} ms"
    if median <= 1.0:
        return Finding("ok", "round trip", found)
    return Finding("look", "round trip", found, "that much of each TTFT is the network; measure from nearer by")


def _at(ordered: Sequence[int], q: float) -> int:
    """Return the nearest-rank quantile of sorted values."""
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]
