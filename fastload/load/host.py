"""What the host is and what it allows: facts for the manifest and `fastload doctor`, limits for a run.

Facts are read from /proc and /sys below `root`, so that tests can make a host up; what a host does not say is
None. Limits are asked of the kernel before anything is sent: a level that cannot fit is the user's mistake, one line.
Standard library and the clock only.
"""

import array
import contextlib
import fcntl
import os
import re
import resource
import select
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from fastload import _timing
from fastload.errors import PlanError

ROOT = Path("/")
RESERVE_DESCRIPTORS = 64  # beside one a connection: libraries, shared memory, timers, the trace's files
# asm-generic, so x86, ARM, RISC-V, POWER; the socket module does not name it.
SO_TIMESTAMPNS = 35
FAMILIES = {"IPv4": socket.AF_INET, "IPv6": socket.AF_INET6}
STAMP_TRIES = 20  # the kernel switches stamping on from a work queue: the first segments may come without
STAMP_PAUSE_S = 0.002

# <linux/ethtool.h>, <linux/sockios.h>: all of them may be asked without privileges
_SIOCETHTOOL = 0x8946
_GET_COALESCE, _GET_TSO, _GET_GSO, _GET_FLAGS, _GET_GRO = 0x0E, 0x1E, 0x23, 0x25, 0x2B
_FLAG_LRO = 1 << 15
# <linux/rtnetlink.h>
_RTM_NEWROUTE, _RTM_GETROUTE, _NLM_F_REQUEST, _RTA_DST, _RTA_OIF = 24, 26, 1, 1, 4


# --- processors ---------------------------------------------------------------------------------------------


def cpuinfo(root: Path = ROOT) -> dict[str, str]:
    """Return the first processor's lines of /proc/cpuinfo."""
    found: dict[str, str] = {}
    for line in (read(root, "proc/cpuinfo") or "").splitlines():
        name, colon, value = line.partition(":")
        if colon:
            found.setdefault(name.strip(), value.strip())
    return found


def cpu_model(root: Path = ROOT) -> str | None:
    """Return the processor's name, as x86, some ARM and MIPS kernels give it."""
    info = cpuinfo(root)
    return info.get("model name") or info.get("Model") or info.get("cpu model")


def is_virtual(root: Path = ROOT) -> bool | None:
    """Whether the processor says that a hypervisor is below; None where there are no flags (ARM)."""
    flags = cpuinfo(root).get("flags")
    return None if flags is None else "hypervisor" in flags.split()


def affinity(root: Path = ROOT) -> tuple[int, ...] | None:
    """Return the processors this process may run on."""
    for line in (read(root, "proc/self/status") or "").splitlines():
        name, _, listed = line.partition(":")
        if name == "Cpus_allowed_list":
            return tuple(_numbers(listed.strip()))
    return None


def cpu_quota(root: Path = ROOT) -> float | None:
    """Return the processor time the cgroups allow, in cores: the least on the way up; None without a quota."""
    quotas: list[float] = []
    for line in (read(root, "proc/self/cgroup") or "").splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers == "":
            quotas += _quotas(root, "sys/fs/cgroup", path, _quota_v2)
        elif "cpu" in controllers.split(","):
            quotas += _quotas(root, f"sys/fs/cgroup/{controllers}", path, _quota_v1)
            quotas += _quotas(root, "sys/fs/cgroup/cpu", path, _quota_v1)
    return min(quotas, default=None)


def _quotas(root: Path, mount: str, path: str, of: Callable[[Path, str], float | None]) -> list[float]:
    # A container may see the path its host sees, which is not there for it: then only the mount's own is read.
    inside = Path(path.lstrip("/"))
    found = (of(root, f"{mount}/{level}") for level in (inside, *inside.parents))
    return [quota for quota in found if quota is not None]


def _quota_v2(root: Path, group: str) -> float | None:
    words = (read(root, f"{group}/cpu.max") or "").split()
    return int(words[0]) / int(words[1]) if len(words) == 2 and words[0] != "max" else None


def _quota_v1(root: Path, group: str) -> float | None:
    quota, period = (_number(read(root, f"{group}/cpu.cfs_{name}_us")) for name in ("quota", "period"))
    return quota / period if quota is not None and period and quota > 0 else None


def usable_cores(root: Path = ROOT) -> float | None:
    """Return how many cores this process can use: its affinity, or the cgroups' quota where that is less."""
    allowed, quota = affinity(root), cpu_quota(root)
    if allowed is None:
        return quota
    return float(len(allowed)) if quota is None else min(float(len(allowed)), quota)


def governors(root: Path = ROOT) -> dict[str, int]:
    """Return each frequency governor and how many of the allowed processors it has; empty without cpufreq."""
    cpus = affinity(root) or ()
    found = (read(root, f"sys/devices/system/cpu/cpu{cpu}/cpufreq/scaling_governor") for cpu in cpus)
    return dict(Counter(governor for governor in found if governor))


def load_average(root: Path = ROOT) -> tuple[float, float, float] | None:
    """Return the load averages over 1, 5 and 15 minutes."""
    words = (read(root, "proc/loadavg") or "").split()
    try:
        return float(words[0]), float(words[1]), float(words[2])
    except (ValueError, IndexError):
        return None


def clocksource(root: Path = ROOT) -> str | None:
    """Return what the kernel reads the time from, such as `tsc`."""
    return read(root, "sys/devices/system/clocksource/clocksource0/current_clocksource")


@dataclass(frozen=True, slots=True)
class Ticks:
    """Processor time since boot, over all processors, in clock ticks (os.sysconf("SC_CLK_TCK") a second)."""

    total: int
    idle: int
    steal: int  # a hypervisor gave the processor to someone else


def cpu_ticks(root: Path = ROOT) -> Ticks | None:
    """Return how the processors spent their time so far."""
    words = (read(root, "proc/stat") or "").partition("\n")[0].split()
    if len(words) < 9 or words[0] != "cpu":
        return None
    spent = [int(word) for word in words[1:9]]  # what follows (guests) is counted in user and nice already
    return Ticks(sum(spent), spent[3] + spent[4], spent[7])


def process_ticks(root: Path = ROOT) -> dict[tuple[int, int], tuple[str, int]]:
    """Return each process's name and the ticks it ran so far, by (pid, start time): a pid alone may be reused."""
    found = {}
    for directory in (root / "proc").glob("[0-9]*"):
        line = read(root, f"proc/{directory.name}/stat")
        if line is None:
            continue  # it ended meanwhile
        head, _, rest = line.rpartition(")")  # the name itself may hold brackets and spaces
        words = rest.split()
        if len(words) > 19:
            name = head.partition("(")[2]
            found[int(directory.name), int(words[19])] = (name, int(words[11]) + int(words[12]))
    return found


# --- limits -------------------------------------------------------------------------------------------------


def descriptors() -> tuple[int | None, int | None]:
    """Return the soft and the hard limit of open files; None for unlimited."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _limit(soft), _limit(hard)


def _limit(value: int) -> int | None:
    return None if value == resource.RLIM_INFINITY else value


def descriptors_needed(level: int) -> int:
    """Return how many open files a process needs that holds `level` connections."""
    return level + RESERVE_DESCRIPTORS


def raise_descriptor_limit(level: int) -> int | None:
    """See that this process, and what it starts from now on, can hold `level` connections.

    Raises the soft limit as far as is needed and returns the one now in force (None: unlimited). Raises PlanError
    when the hard limit is below what is needed.
    """
    needed = descriptors_needed(level)
    soft, hard = descriptors()
    if soft is None or soft >= needed:
        return soft
    if hard is not None and hard < needed:
        most = hard - RESERVE_DESCRIPTORS
        smaller = f", or keep the levels to {most}" if most > 0 else ""
        raise PlanError(
            f"--levels {level}: needs {needed} file descriptors, the hard limit is {hard}; lift it as root with "
            f"`ulimit -Hn {needed}`, LimitNOFILE={needed} in a systemd unit, or --ulimit nofile={needed} of a "
            f"container{smaller}"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, resource.RLIM_INFINITY if hard is None else hard))
    return needed


def port_range(root: Path = ROOT) -> tuple[int, int] | None:
    """Return the first and the last port that connections may be given (IPv6 has the same)."""
    words = (read(root, "proc/sys/net/ipv4/ip_local_port_range") or "").split()
    return (int(words[0]), int(words[1])) if len(words) == 2 else None


def local_ports(root: Path = ROOT) -> int | None:
    """Return how many local ports there are for connections to one server: the range without reserved ones."""
    found = port_range(root)
    if found is None:
        return None
    first, last = found
    reserved = _numbers(read(root, "proc/sys/net/ipv4/ip_local_reserved_ports") or "")
    return max(0, last - first + 1 - sum(first <= port <= last for port in reserved))


def check_ports(level: int, root: Path = ROOT) -> int | None:
    """Return the local ports there are (None: not known). Raises PlanError when `level` connections need more."""
    ports, found = local_ports(root), port_range(root)
    if ports is None or found is None or ports >= level:
        return ports
    raise PlanError(
        f"--levels {level}: needs a local port for each connection, net.ipv4.ip_local_port_range {found[0]} {found[1]} "
        f'has {ports}; widen it as root with `sysctl -w net.ipv4.ip_local_port_range="1024 65535"`, or keep the '
        f"levels to {ports}"
    )


def time_wait_reuse(root: Path = ROOT) -> int | None:
    """Return net.ipv4.tcp_tw_reuse: 0 no, 1 yes, 2 on loopback only."""
    return _number(read(root, "proc/sys/net/ipv4/tcp_tw_reuse"))


def time_waits(root: Path = ROOT) -> int | None:
    """Return how many sockets are in TIME_WAIT now."""
    found = re.search(r"^TCP:.* tw (\d+)", read(root, "proc/net/sockstat") or "", re.MULTILINE)
    return int(found[1]) if found else None


def congestion_control(root: Path = ROOT) -> str | None:
    """Return the TCP congestion control of new connections."""
    return read(root, "proc/sys/net/ipv4/tcp_congestion_control")


# --- the way to the server ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Nic:
    """A network interface and what it does to segments before the kernel stamps them; None: it does not say."""

    name: str
    loopback: bool
    driver: str | None
    gro: bool | None  # the kernel merges segments that came in one poll
    lro: bool | None  # the card merges segments
    gso: bool | None
    tso: bool | None
    rx_usecs: int | None  # how long an arrival may wait for its interrupt
    adaptive_rx: bool | None  # that wait changes with the traffic
    gro_flush_ns: int | None  # how long merged segments may be held back
    speed_mbit: int | None


def interface_to(address: str) -> str | None:
    """Return the interface the kernel would send to this IP address through; None without a route."""
    host, _, scope = address.partition("%")
    if scope:
        return scope
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    target = socket.inet_pton(family, host)
    attribute = struct.pack("=HH", 4 + len(target), _RTA_DST) + target
    body = struct.pack("=8BI", family, 8 * len(target), 0, 0, 0, 0, 0, 0, 0) + attribute
    try:
        # Asked of the kernel, not read from a table: rules and policies are then in the answer.
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as route:
            route.settimeout(1.0)
            route.send(struct.pack("=IHHII", 16 + len(body), _RTM_GETROUTE, _NLM_F_REQUEST, 1, 0) + body)
            answer = route.recv(4096)
            index = _outgoing(answer)
            return None if index is None else socket.if_indextoname(index)
    except OSError:
        return None


def _outgoing(answer: bytes) -> int | None:
    """Return the interface index in an answer to RTM_GETROUTE."""
    size, kind = struct.unpack_from("=IH", answer)
    at = 16 + 12  # past nlmsghdr and rtmsg
    while kind == _RTM_NEWROUTE and at + 4 <= min(size, len(answer)):
        length, attribute = struct.unpack_from("=HH", answer, at)
        if attribute == _RTA_OIF:
            return int(struct.unpack_from("=I", answer, at + 4)[0])
        at += max(4, (length + 3) & ~3)
    return None


def nic(name: str, root: Path = ROOT) -> Nic:
    """Return what is known of an interface."""
    where = f"sys/class/net/{name}"
    flags = read(root, f"{where}/flags")
    merged = _ethtool(name, _GET_FLAGS, 1)
    waits = _ethtool(name, _GET_COALESCE, 22)
    speed = _number(read(root, f"{where}/speed"))
    try:
        driver = os.path.basename(os.readlink(root / where / "device/driver"))
    except OSError:
        driver = None
    return Nic(
        name=name,
        loopback=flags is not None and bool(int(flags, 16) & 0x8),  # IFF_LOOPBACK
        driver=driver,
        gro=_switch(name, _GET_GRO),
        lro=None if merged is None else bool(merged[0] & _FLAG_LRO),
        gso=_switch(name, _GET_GSO),
        tso=_switch(name, _GET_TSO),
        rx_usecs=None if waits is None else waits[0],
        adaptive_rx=None if waits is None else bool(waits[9]),
        gro_flush_ns=_number(read(root, f"{where}/gro_flush_timeout")),
        speed_mbit=speed if speed is not None and speed > 0 else None,
    )


def _switch(name: str, command: int) -> bool | None:
    value = _ethtool(name, command, 1)
    return None if value is None else bool(value[0])


def _ethtool(name: str, command: int, values: int) -> list[int] | None:
    """Return the `values` numbers that follow the command word in the driver's answer."""
    asked = array.array("I", [command, *[0] * values])
    request = struct.pack("16sP16x", name.encode()[:15], asked.buffer_info()[0])  # struct ifreq
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            fcntl.ioctl(any_socket, _SIOCETHTOOL, request)
    except OSError:
        return None
    return list(asked)[1:]


# --- what measuring stands on -------------------------------------------------------------------------------


def kernel_stamps_work() -> tuple[bool, str]:
    """Whether the kernel stamps what arrives, for every IP version this host has, and a sentence on each."""
    found = {name: kernel_stamps(family) for name, family in FAMILIES.items()}
    told = "; ".join(f"{name}: {sentence}" for name, (_, sentence) in found.items())
    works = [ok for ok, _ in found.values() if ok is not None]
    return bool(works) and all(works), told


def kernel_stamps(family: int) -> tuple[bool | None, str]:
    """Whether a segment sent over loopback bears the time of its arrival, and a sentence; None: no such loopback.

    The stamp must lie between the send and the read 2 ms later: then it is the kernel's, and of the arrival.
    """
    with contextlib.ExitStack() as held:
        try:
            sender, receiver = held.enter_context(_loopback_pair(family))
        except OSError as error:
            return None, f"no loopback to try it on ({error.strerror or error})"
        try:
            receiver.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        except OSError as error:
            return False, f"setsockopt(SO_TIMESTAMPNS) fails ({error.strerror or error})"
        why = "the kernel accepts SO_TIMESTAMPNS but gives no stamps"
        for _ in range(STAMP_TRIES):
            sent_ns = _timing.now_ns()
            sender.send(b"x")
            time.sleep(STAMP_PAUSE_S)
            reading_ns = _timing.now_ns()
            stamp_ns = _read_stamp(receiver)
            if stamp_ns is None:
                continue
            offset_ns, bracket_ns = _timing.clock_offset()
            stamp_ns -= offset_ns
            if sent_ns - bracket_ns <= stamp_ns <= reading_ns + bracket_ns:
                return True, f"stamped {(stamp_ns - sent_ns) / 1e3:.1f} us after the send"
            side = "before its send" if stamp_ns < sent_ns else "when it was read, not when it came"
            why = f"a segment was stamped {side}"
        return False, why


def _read_stamp(receiver: socket.socket) -> int | None:
    """Read what is there; return its kernel stamp in CLOCK_REALTIME ns."""
    _, messages, _, _ = receiver.recvmsg(64, 256)
    for level, kind, data in messages:
        if level == socket.SOL_SOCKET and kind == SO_TIMESTAMPNS and len(data) >= struct.calcsize("ll"):
            seconds, nanoseconds = struct.unpack_from("ll", data)
            return int(seconds * 1_000_000_000 + nanoseconds)
    return None


@contextlib.contextmanager
def _loopback_pair(family: int) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends of a TCP connection of this process with itself. Raises OSError where there is no loopback."""
    with socket.socket(family, socket.SOCK_STREAM) as listener, socket.socket(family, socket.SOCK_STREAM) as one:
        listener.settimeout(2.0)
        one.settimeout(2.0)
        listener.bind(("::1" if family == socket.AF_INET6 else "127.0.0.1", 0))
        listener.listen(1)
        one.connect(listener.getsockname())
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        other, _ = listener.accept()
        with other:
            other.settimeout(2.0)
            yield one, other


def epoll_works() -> tuple[bool, str]:
    """Whether epoll says that something came, and a sentence."""
    near, far = socket.socketpair()
    with near, far:
        try:
            with select.epoll() as events:
                events.register(far.fileno(), select.EPOLLIN)
                near.send(b"x")
                came = events.poll(2.0)
        except OSError as error:
            return False, f"fails ({error.strerror or error})"
    return (True, "works") if came else (False, "does not tell of what came")


# --- small files --------------------------------------------------------------------------------------------


def read(root: Path, path: str) -> str | None:
    """Return a small file's text without the space around it; None when it cannot be read."""
    try:
        return (root / path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def _number(text: str | None) -> int | None:
    try:
        return None if text is None else int(text)
    except ValueError:
        return None


def _numbers(listed: str) -> list[int]:
    """Return the numbers of a kernel list such as `0-3,8`."""
    found: list[int] = []
    for part in listed.split(","):
        first, _, last = part.strip().partition("-")
        if first:
            found += range(int(first), int(last or first) + 1)
    return found
