"""Facts about this host and these packages, for the manifest: what a reader needs to judge the figures
later.
"""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

PACKAGES = ("fastload", "click", "httpx", "numpy", "orjson", "pyarrow", "rich", "uvloop")


def facts() -> dict[str, object]:
    """Return what the host says about itself; None where it does not say."""
    cpuinfo = _cpuinfo()
    affinity = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    return {
        "hostname": platform.node(),
        "system": platform.system(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "cpu_model": cpuinfo.get("model name") or cpuinfo.get("Model") or cpuinfo.get("cpu model"),
        "cores": os.cpu_count(),
        "cores_allowed": affinity,
        "hypervisor": "hypervisor" in cpuinfo["flags"].split() if "flags" in cpuinfo else None,
        "smt": _read("/sys/devices/system/cpu/smt/active"),
        "governor": _read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        "clocksource": _read("/sys/devices/system/clocksource/clocksource0/current_clocksource"),
        "memory_bytes": _memory_bytes(),
        "load_average": list(os.getloadavg()),
    }


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


def _cpuinfo() -> dict[str, str]:
    """Return the first processor's lines of /proc/cpuinfo."""
    found: dict[str, str] = {}
    for line in (_read("/proc/cpuinfo") or "").splitlines():
        name, colon, value = line.partition(":")
        if colon:
            found.setdefault(name.strip(), value.strip())
    return found


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None


def _read(path: str) -> str | None:
    """Return a small file's text without its last line break; None when it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
