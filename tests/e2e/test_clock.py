"""The clock is set, or everything of ours stands still for a while: no figure is bent, and the level says so."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# From an instant on (monotonic, in the file SET_AT; 0: not yet) the wall clock is off by SET_BY_NS: for whoever asks,
# and in the receive stamps of what comes from then on, as if somebody had set it.
SETTING = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <time.h>
static int (*real_gettime)(clockid_t, struct timespec *);
static volatile long long *at;
static long long by;
static void find(void) {
    if (real_gettime) return;
    at = mmap(NULL, 8, PROT_READ, MAP_SHARED, open(getenv("SET_AT"), O_RDONLY | O_CLOEXEC), 0);
    by = atoll(getenv("SET_BY_NS"));
    real_gettime = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
}
static long long ns_of(const struct timespec *t) { return t->tv_sec * 1000000000LL + t->tv_nsec; }
static void shift(struct timespec *t) {
    long long ns = ns_of(t) + by;
    t->tv_sec = ns / 1000000000LL, t->tv_nsec = ns % 1000000000LL;
}
static long long now(clockid_t clock) {
    struct timespec t;
    real_gettime(clock, &t);
    return ns_of(&t);
}
int clock_gettime(clockid_t clock, struct timespec *t) {
    find();
    int result = real_gettime(clock, t);
    if (clock == CLOCK_REALTIME && *at && now(CLOCK_MONOTONIC) >= *at) shift(t);
    return result;
}
ssize_t recvmsg(int fd, struct msghdr *message, int flags) {
    static ssize_t (*real)(int, struct msghdr *, int);
    if (!real) real = (ssize_t (*)(int, struct msghdr *, int))dlsym(RTLD_NEXT, "recvmsg");
    find();
    ssize_t got = real(fd, message, flags);
    struct cmsghdr *c = got >= 0 && message->msg_controllen ? CMSG_FIRSTHDR(message) : NULL;
    if (c && c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_TIMESTAMPNS) {
        struct timespec t;
        memcpy(&t, CMSG_DATA(c), sizeof t);
        if (*at && ns_of(&t) - (now(CLOCK_REALTIME) - now(CLOCK_MONOTONIC)) >= *at) shift(&t);
        memcpy(CMSG_DATA(c), &t, sizeof t);
    }
    return got;
}
"""


@pytest.fixture
def setting(preloaded: Callable[[str], Path]) -> Path:
    """The library."""
    return preloaded(SETTING)


@pytest.mark.parametrize("by_s", [3600, -3600, -0.004])
def test_the_clock_is_set_in_the_middle_of_a_level(
    by_s: float, setting: Path, start: Any, sim_url: Any, tmp_path: Path, the_run: Any, until: Any
) -> None:
    at = tmp_path / "at"
    at.write_bytes(bytes(8))
    process = start(
        "sweep", "--url", sim_url(ttft_ms=20, step_ms=10), "--levels", "4", "--duration", "4s", "--osl", "16",
        env={"LD_PRELOAD": str(setting), "SET_AT": str(at), "SET_BY_NS": str(int(by_s * 1e9))},
    )  # fmt: skip
    until(lambda: list(tmp_path.glob("results/*/progress.json")))
    (path,) = (tmp_path / "results").iterdir()
    until(lambda: json.loads((path / "progress.json").read_text())["done"] > 8)
    at_ns = time.monotonic_ns()
    with at.open("r+b") as file:  # mapped by them: not a byte shorter, not for an instant
        file.write(at_ns.to_bytes(8, "little"))
    out, err = process.communicate(timeout=50)
    assert process.returncode in (0, 1) and "Traceback" not in err, err
    run = the_run(tmp_path / "results")
    assert run.manifest["status"] == "complete" and run.notes == ()
    rows = run.requests("00-c4").to_pylist()
    assert min(row["sent_ns"] for row in rows) < at_ns < max(row["sent_ns"] for row in rows)
    assert {row["status"] for row in rows} == {"ok"}
    for row in rows:
        stamps = [row[name] for name in ("sent_ns", "first_byte_ns", "first_token_ns", "last_token_ns", "done_ns")]
        assert stamps == sorted(stamps)
        assert row["latency_s"] < 60  # an hour is nowhere in it
    for events in run.tokens("00-c4")["event_ns"].to_pylist():
        assert events == sorted(events) and events[0] >= 0
    utc = [row["sent_utc"] for row in rows]  # one offset for all: no hour between two of them
    assert (max(utc) - min(utc)).total_seconds() < 60
    clock = run.manifest["clock"]["offsets"]
    moved = max(one["offset_ns"] for one in clock) - min(one["offset_ns"] for one in clock)
    assert moved == pytest.approx(abs(by_s) * 1e9, abs=1e6)
    (level,) = json.loads((run.path / "summary.json").read_text())["levels"]
    if abs(by_s) > 1:
        assert level["instrument"]["rebracketed"] > 0
        assert "WARNING: c=4: the system clock was set while it ran" in out
    assert level["clamped_share"] < 0.05 and level["stamp_source"] == "kernel"


def test_everything_stands_still_for_a_while(
    start: Any, sim_url: Any, children: Any, until: Any, tmp_path: Path, the_run: Any
) -> None:
    """As a suspended laptop or a frozen container: what came meanwhile lies in the kernel, stamped, and is not late."""
    limits = ["--idle-timeout", "1s", "--first-byte-timeout", "1s"]
    process = start(
        "sweep", "--url", sim_url(ttft_ms=50, step_ms=20), "--levels", "8", "--duration", "3s", "--osl", "32", *limits
    )
    until(lambda: list(tmp_path.glob("results/*/progress.json")))
    (path,) = (tmp_path / "results").iterdir()
    until(lambda: json.loads((path / "progress.json").read_text())["done"] > 8)
    ours = [process.pid, *children(process.pid)]
    for pid in ours:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(2.5)
    for pid in ours:
        os.kill(pid, signal.SIGCONT)
    out, err = process.communicate(timeout=40)
    assert "Traceback" not in err
    run = the_run(tmp_path / "results")
    statuses = run.requests("00-c8")["status"].to_pylist()
    assert set(statuses) == {"ok"} and len(statuses) > 16
    summary = json.loads((run.path / "summary.json").read_text())
    (level,) = summary["levels"]
    assert level["instrument"]["loop_lag_max_ms"] > 2000
    assert summary["verdict"]["status"] != "valid"
    assert any("the measuring process was held up for" in reason for reason in summary["verdict"]["reasons"])
    # The kernel stamped what came while nobody read: the pause is in no gap between two tokens.
    assert level["icl_ms"]["p99"] < 1000 and level["ttft_ms"]["p99"] < 1000
    last = json.loads((path / "progress.json").read_text())
    assert last["status"] == "complete" and last["elapsed_s"] > 2.5


def test_only_the_supervisor_stands_still(
    start: Any, sim_url: Any, until: Any, tmp_path: Path, the_run: Any, ran: Any
) -> None:
    """Ctrl-Z: the measurer is not of its group, and measures on."""
    process = start(
        "sweep", "--url", sim_url(ttft_ms=20, step_ms=10), "--levels", "2", "--duration", "4s", "--osl", "8"
    )
    until(lambda: list(tmp_path.glob("results/*/progress.json")))
    (path,) = (tmp_path / "results").iterdir()
    until(lambda: json.loads((path / "progress.json").read_text())["done"] > 2)
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(2)
    os.kill(process.pid, signal.SIGCONT)
    _, err = process.communicate(timeout=40)
    assert ran(process.returncode, err), err
    rows = the_run(tmp_path / "results").requests("00-c2").to_pylist()
    assert {row["status"] for row in rows} == {"ok"}
    sent = sorted(row["sent_ns"] for row in rows)
    assert max(b - a for a, b in zip(sent, sent[1:], strict=False)) < 1_500_000_000  # nothing waited for it
