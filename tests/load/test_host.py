"""Facts from made-up trees, limits in real processes, stamps on real sockets."""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from fastload.errors import PlanError
from fastload.load import host

SYSCTL = "proc/sys/net/ipv4"


def plant(root: Path, files: dict[str, str]) -> Path:
    """Write the files of a made-up host below `root`."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


# --- facts --------------------------------------------------------------------------------------------------


def test_a_host_that_says_nothing(tmp_path: Path) -> None:
    for fact in (
        host.cpu_model,
        host.is_virtual,
        host.affinity,
        host.cpu_quota,
        host.usable_cores,
        host.load_average,
        host.clocksource,
        host.cpu_ticks,
        host.port_range,
        host.local_ports,
        host.time_wait_reuse,
        host.time_waits,
        host.congestion_control,
    ):
        assert fact(tmp_path) is None, fact.__name__
    assert host.governors(tmp_path) == {} and host.process_ticks(tmp_path) == {}
    assert host.check_ports(60_000, tmp_path) is None


def test_processor_and_hypervisor(tmp_path: Path) -> None:
    cpu = "processor\t: 0\nmodel name\t: Made Up 9000: fast\nflags\t\t: fpu hypervisor tsc\n\n"
    root = plant(tmp_path, {"proc/cpuinfo": cpu + cpu.replace("9000", "1")})
    assert host.cpu_model(root) == "Made Up 9000: fast"
    assert host.is_virtual(root) is True
    assert host.is_virtual(plant(tmp_path, {"proc/cpuinfo": "flags : fpu hypervisors\n"})) is False
    assert host.is_virtual(plant(tmp_path, {"proc/cpuinfo": "Features : fp asimd\n"})) is None


def test_affinity_and_governors_of_the_allowed_processors(tmp_path: Path) -> None:
    where = "sys/devices/system/cpu/cpu{}/cpufreq/scaling_governor"
    names = {0: "powersave", 1: "performance", 2: "performance", 7: "powersave", 9: "ondemand"}
    root = plant(tmp_path, {where.format(cpu): f"{name}\n" for cpu, name in names.items()})
    plant(root, {"proc/self/status": "Name:\tx\nCpus_allowed:\t87\nCpus_allowed_list:\t0-2,7\n"})
    assert host.affinity(root) == (0, 1, 2, 7)
    assert host.governors(root) == {"powersave": 2, "performance": 2}
    assert host.usable_cores(root) == 4.0


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "150000 100000"}, 1.5),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "max 100000"}, None),
        # the least on the way up counts
        (
            {
                "proc/self/cgroup": "0::/a/b",
                "sys/fs/cgroup/a/cpu.max": "50000 100000",
                "sys/fs/cgroup/a/b/cpu.max": "max 100000",
            },
            0.5,
        ),
        # a container that is shown its host's path
        ({"proc/self/cgroup": "0::/docker/123", "sys/fs/cgroup/cpu.max": "200000 100000"}, 2.0),
        # version 1, under its own name and under the short one
        (
            {
                "proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/y\n0::/",
                "sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_quota_us": "25000",
                "sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_period_us": "100000",
            },
            0.25,
        ),
        (
            {
                "proc/self/cgroup": "1:cpu:/",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            None,
        ),
    ],
)
def test_quota(tmp_path: Path, files: dict[str, str], quota: float | None) -> None:
    root = plant(tmp_path, files)
    assert host.cpu_quota(root) == quota
    plant(root, {"proc/self/status": "Cpus_allowed_list:\t0-3\n"})
    assert host.usable_cores(root) == (4.0 if quota is None else quota)


def test_ticks(tmp_path: Path) -> None:
    tail = " 0" * 6
    stat = f"7 (a) b (c) S{' 0' * 10} 30 12{tail} 99{tail}"
    root = plant(
        tmp_path,
        {"proc/stat": "cpu  10 1 5 100 4 2 3 7 6 0\ncpu0 1\n", "proc/7/stat": stat, "proc/8/stat": "8 (short) S 0"},
    )
    assert host.cpu_ticks(root) == host.Ticks(total=132, idle=104, steal=7)
    assert host.process_ticks(root) == {(7, 99): ("a) b (c", 42)}


def test_load_clock_and_tcp(tmp_path: Path) -> None:
    root = plant(
        tmp_path,
        {
            "proc/loadavg": "0.50 1.25 2.00 1/200 4242\n",
            "sys/devices/system/clocksource/clocksource0/current_clocksource": "tsc\n",
            f"{SYSCTL}/tcp_tw_reuse": "2\n",
            f"{SYSCTL}/tcp_congestion_control": "cubic\n",
            "proc/net/sockstat": "sockets: used 9\nTCP: inuse 150 orphan 0 tw 705 alloc 150 mem 21\nUDP: inuse 0\n",
        },
    )
    assert host.load_average(root) == (0.5, 1.25, 2.0)
    assert host.clocksource(root) == "tsc"
    assert host.time_wait_reuse(root) == 2 and host.congestion_control(root) == "cubic"
    assert host.time_waits(root) == 705


# --- limits -------------------------------------------------------------------------------------------------


def test_ports(tmp_path: Path) -> None:
    root = plant(tmp_path, {f"{SYSCTL}/ip_local_port_range": "40000\t40099\n"})
    assert host.port_range(root) == (40_000, 40_099)
    assert host.check_ports(100, root) == 100
    plant(root, {f"{SYSCTL}/ip_local_reserved_ports": "39999-40001,40050,50000\n"})
    assert host.check_ports(97, root) == 97
    with pytest.raises(PlanError, match="--levels 98: .* 40000 40099 has 97; .*1024 65535.* levels to 97"):
        host.check_ports(98, root)


LIMITED = """
import resource
from fastload.errors import PlanError
from fastload.load import host
resource.setrlimit(resource.RLIMIT_NOFILE, (64, {hard}))
try:
    print(host.raise_descriptor_limit({level}), host.descriptors())
except PlanError as error:
    print(error)
"""


def limited(level: int, hard: int) -> str:
    """What raise_descriptor_limit does in a process with a soft limit of 64."""
    code = LIMITED.format(level=level, hard=hard)
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_soft_limit_is_raised_as_far_as_needed() -> None:
    assert host.descriptors_needed(136) == 200
    assert limited(136, hard=4096) == "200 (200, 4096)"
    assert limited(136, hard=200) == "200 (200, 200)"


def test_soft_limit_that_is_enough_stays() -> None:
    soft, _ = host.descriptors()
    assert host.raise_descriptor_limit(0) == soft
    assert host.descriptors()[0] == soft


def test_hard_limit_is_refused_in_one_line() -> None:
    line = limited(136, hard=100)
    assert "\n" not in line
    for part in (
        "--levels 136:",
        "needs 200",
        "hard limit is 100",
        "ulimit -Hn 200",
        "LimitNOFILE=200",
        "levels to 36",
    ):
        assert part in line
    assert "keep the levels" not in limited(1, hard=64)  # not even one would fit


# --- the way to the server ----------------------------------------------------------------------------------


def test_route_over_loopback() -> None:
    assert host.interface_to("127.0.0.1") == "lo"
    assert host.interface_to("fe80::1%eth9") == "eth9"
    found = host.nic("lo")
    assert found.loopback and found.driver is None and found.lro in (False, None)


def test_interface_from_a_tree(tmp_path: Path) -> None:
    where = "sys/class/net/made-up0"
    root = plant(
        tmp_path,
        {f"{where}/flags": "0x1003\n", f"{where}/gro_flush_timeout": "20000\n", f"{where}/speed": "-1\n"},
    )
    (root / where / "device").mkdir()
    (root / where / "device/driver").symlink_to("../../drivers/fastnic")
    found = host.nic("made-up0", root)
    assert not found.loopback and found.driver == "fastnic" and found.gro_flush_ns == 20_000
    assert found.speed_mbit is None and found.gro is None and found.rx_usecs is None
    assert not host.nic("no-such0", root).loopback


def test_answer_without_a_route_names_no_interface() -> None:
    refusal = struct.pack("=IHHII", 36, 2, 0, 1, 0) + bytes(20)
    assert host._outgoing(refusal) is None
    attributes = struct.pack("=HHI", 8, 15, 254) + struct.pack("=HHI", 8, 4, 3)
    route = struct.pack("=IHHII", 28 + len(attributes), 24, 0, 1, 0) + bytes(12) + attributes
    assert host._outgoing(route) == 3
    assert host._outgoing(route[:-8]) is None


# --- what measuring stands on -------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6], ids=["IPv4", "IPv6"])
def test_kernel_stamps_here(family: int) -> None:
    works, said = host.kernel_stamps(family)
    assert works or (works is None and family == socket.AF_INET6), said
    assert ("after the send" in said) == bool(works)


def test_stamps_of_both_families_in_one_sentence() -> None:
    works, said = host.kernel_stamps_work()
    assert works and said.startswith("IPv4: ") and "; IPv6: " in said


def test_stamps_that_the_kernel_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "SO_TIMESTAMPNS", 9999)
    works, said = host.kernel_stamps(socket.AF_INET)
    assert works is False and "setsockopt(SO_TIMESTAMPNS) fails" in said
    assert host.kernel_stamps_work()[0] is False


def test_stamps_that_do_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "SO_TIMESTAMPNS", socket.SO_KEEPALIVE)
    works, said = host.kernel_stamps(socket.AF_INET)
    assert works is False and "gives no stamps" in said


@pytest.mark.parametrize(("shift_ns", "says"), [(10**9, "before its send"), (-(10**9), "when it was read")])
def test_stamps_of_another_time(monkeypatch: pytest.MonkeyPatch, shift_ns: int, says: str) -> None:
    true_offset = host._timing.clock_offset()[0]
    monkeypatch.setattr(host._timing, "clock_offset", lambda: (true_offset + shift_ns, 50))
    works, said = host.kernel_stamps(socket.AF_INET)
    assert works is False and says in said


def test_no_loopback_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(family: int) -> None:
        raise OSError(97, "Address family not supported by protocol")

    monkeypatch.setattr(host, "_loopback_pair", refuse)
    works, said = host.kernel_stamps(socket.AF_INET6)
    assert works is None and "Address family not supported" in said


def test_epoll() -> None:
    assert host.epoll_works() == (True, "works")
