"""A host where the kernel gives no receive stamps: made by a library that refuses the socket option."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fastload.cli.calibrate import identity

REFUSE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <sys/socket.h>
int setsockopt(int fd, int level, int name, const void *value, socklen_t size) {
    static int (*real)(int, int, int, const void *, socklen_t);
    if (level == SOL_SOCKET && name == SO_TIMESTAMPNS) { errno = ENOPROTOOPT; return -1; }
    if (!real) real = (int (*)(int, int, int, const void *, socklen_t))dlsym(RTLD_NEXT, "setsockopt");
    return real(fd, level, name, value, size);
}
"""
READ_ERROR_US = 777.0


@pytest.fixture
def refusing(preloaded: Callable[[str], Path]) -> Path:
    """The library."""
    return preloaded(REFUSE)


def test_a_host_without_kernel_stamps(
    tmp_path: Path,
    refusing: Path,
    fastload: Callable[..., Any],
    ran: Callable[[int, str], bool],
    sim_url: Callable[..., str],
) -> None:
    """The run works, says what its stamps are, and is judged by the calibrated error of a read stamp."""
    level = {"concurrency": 64, "kernel": None, "read": {"stamp_us": {"p99": READ_ERROR_US}}}
    kept = {
        "created_utc": "2026-11-30T00:00:00Z",
        "fastload": "0",
        "cpu": None,
        "target": "made up",
        "verdict": {"kernel": None, "read": {"concurrency": 64, "events_per_s": 1.0, "reasons": []}},
        "levels": [level],
    }
    calibration = tmp_path / "calibration.json"
    calibration.write_text(json.dumps({"schema": 1, "hosts": {identity()["id"]: kept}}))
    url = sim_url(ttft_ms=40, step_ms=20)
    ended = fastload(
        "sweep", "--url", url, "--levels", "2", "--rounds", "2", "--min-requests", "0", "--osl", "8", "--json",
        env={"LD_PRELOAD": str(refusing), "FASTLOAD_CALIBRATION": str(calibration)},
    )  # fmt: skip
    assert ran(ended.code, ended.err), ended.err
    summary = json.loads(ended.out)
    assert [entry["stamp_source"] for entry in summary["levels"]] == ["read"]
    # 777 us is 1.9 % of a TTFT of 40 ms and 3.9 % of an ITL of 20 ms
    assert summary["verdict"]["status"] != "valid"
    assert any("777 us" in reason and "of ITL" in reason for reason in summary["verdict"]["reasons"])
    assert any(note.startswith("stamps: read") for note in summary["verdict"]["notes"])
