"""Which process runs a run: named so that it can be told from another one with its pid, and seen to live or not."""

import os
import socket
from pathlib import Path


def own_process() -> dict[str, object]:
    """What names this process beyond its pid, so that a reader can tell whether it still lives."""
    pid = os.getpid()
    return {
        "pid": pid,
        "start": process_start(pid),
        "boot": _boot_id(),
        "namespace": _pid_namespace(),
        "host": socket.gethostname(),
    }


def lives(process: object) -> bool | None:
    """Whether the process that `own_process` named lives; None where nobody can tell (another host or container)."""
    if not isinstance(process, dict):
        return False
    own = own_process()
    if process.get("host") != own["host"] or process.get("namespace") != own["namespace"]:
        return None
    pid, start = process.get("pid"), process.get("start")
    if process.get("boot") != own["boot"] or not isinstance(pid, int) or start is None:
        return False
    return bool(process_start(pid) == start)


def process_start(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None if there is no such process, or only its exit code."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        fields = stat.rpartition(")")[2].split()  # from field 3 on; the name in brackets may hold anything
        return None if fields[0] in ("Z", "X") else int(fields[19])
    except (OSError, ValueError, IndexError):
        return None


def _pid_namespace() -> str | None:
    """The kernel's name for where our pid counts; None where there is none."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return None


def _boot_id() -> str | None:
    """The kernel's name for this boot; None where there is none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None
