"""Facts about this host and these packages, for the manifest: what a reader needs to judge the figures
later.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import sys

from fastload.load import host

PACKAGES = ("fastload", "click", "httpx", "numpy", "orjson", "pyarrow", "rich", "uvloop")


def facts(address: str | None = None) -> dict[str, object]:
    """Return what the host says about itself, as plain JSON; None where it does not say.

    With the server's IP address also the network interface on the way there, under `nic`.
    """
    soft, hard = host.descriptors()
    allowed, load, ports = host.affinity(), host.load_average(), host.port_range()
    return {
        "hostname": platform.node(),
        "system": platform.system(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "cpu_model": host.cpu_model(),
        "cores": os.cpu_count(),
        "cores_allowed": None if allowed is None else list(allowed),
        "cpu_quota_cores": host.cpu_quota(),
        "hypervisor": host.is_virtual(),
        "smt": host.read(host.ROOT, "sys/devices/system/cpu/smt/active"),
        "governor": governor_text(host.governors()),
        "clocksource": host.clocksource(),
        "memory_bytes": _memory_bytes(),
        "load_average": None if load is None else list(load),
        "descriptors": {"soft": soft, "hard": hard},  # None: unlimited
        "local_ports": None if ports is None else {"first": ports[0], "last": ports[1], "usable": host.local_ports()},
        "tcp_congestion_control": host.congestion_control(),
        "tcp_tw_reuse": host.time_wait_reuse(),
        "nic": None if address is None else nic_facts(address),
    }


def nic_facts(address: str) -> dict[str, object] | None:
    """Return the interface to this IP address and its offloads; None without a route."""
    name = host.interface_to(address)
    return None if name is None else dataclasses.asdict(host.nic(name))


def governor_text(governors: dict[str, int]) -> str | None:
    """Return `performance`, or `performance on 6, powersave on 2` where they differ."""
    if len(governors) < 2:
        return next(iter(governors), None)
    return ", ".join(f"{name} on {count}" for name, count in sorted(governors.items()))


def packages() -> dict[str, str | None]:
    """Return the installed version of each package a figure can depend on; None for one that is not
    installed.
    """
    from importlib.metadata import PackageNotFoundError, version

    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def python_version() -> str:
    """Return the interpreter, such as `CPython 3.11.7`."""
    return f"{platform.python_implementation()} {sys.version.split()[0]}"


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None
