"""What runs out on the client's own host, for real: file descriptors, local ports; and a server's listen queue."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.with_name("load")))

from api import api  # noqa: E402
from scripted import Call, answer, serve  # noqa: E402

SHORT = ["--osl", "3", "--isl", "12"]


def never(call: Call, number: int) -> bool:
    return False


def limited(command: Any, limits: str, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command under `ulimit` settings."""
    return subprocess.run(
        ["bash", "-c", f'{limits} && exec "$@"', "bash", *command, *words],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=50,
    )


# ---------------------------------------------------------------- file descriptors


def test_too_few_descriptors_are_told_before_anything_is_sent(command: Any, tmp_path: Path) -> None:
    with serve(api(Call.close, never)) as server:
        url = f"http://127.0.0.1:{server.port}"
        done = limited(command, "ulimit -n 64", "sweep", "--url", url, "--levels", "128", *SHORT, cwd=tmp_path)
        assert server.accepts == 0
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("fastload: --levels 128: needs 192 file descriptors, the hard limit is 64; lift it")
    assert list(tmp_path.iterdir()) == []


def test_a_soft_limit_is_raised(command: Any, tmp_path: Path, the_run: Any) -> None:
    """Bug report C13: ulimit -Sn 64, concurrency 200."""
    with serve(api(Call.close, never, together(200))) as server:
        url = f"http://127.0.0.1:{server.port}"
        words = ["sweep", "--url", url, "--levels", "200", "--num-requests", "400", *SHORT]
        done = limited(command, "ulimit -Sn 64 && ulimit -Hn 4096", *words, cwd=tmp_path)
        assert server.most_in_flight == 200
    assert done.returncode in (0, 1), done.stderr
    rows = the_run(tmp_path / "results").requests("00-c200")
    assert set(rows["status"].to_pylist()) == {"ok"} and len(rows) >= 400


def together(streams: int) -> Callable[[Call], None]:
    """A script that answers nobody, but the warm-up, before so many requests are there at once."""
    warm = threading.Event()

    def script(call: Call) -> None:
        if warm.is_set():
            while call.server.most_in_flight < streams:
                call.sleep(0.01)
        warm.set()
        call.finish(answer("one", "two", "three"))

    return script


def test_hundreds_of_streams_are_open_at_once(fastload: Any, tmp_path: Path, the_run: Any) -> None:
    """Bug report C01: 300 at a time, none waits inside the client for another's connection."""
    with serve(api(Call.close, never, together(300))) as server:
        words = ["--levels", "300", "--num-requests", "300", *SHORT]
        ended = fastload("sweep", "--url", f"http://127.0.0.1:{server.port}", *words)
        assert server.most_in_flight == 300
    assert ended.code in (0, 1) and "Traceback" not in ended.err
    rows = the_run(tmp_path / "results").requests("00-c300").to_pylist()
    assert {row["status"] for row in rows} == {"ok"}
    assert {row["slot"] for row in rows} == set(range(300))


# ---------------------------------------------------------------- a server's queue


def test_a_listen_queue_that_is_full(fastload: Any, tmp_path: Path, the_run: Any) -> None:
    """64 streams against a queue of one. The kernel tries again, or calls a connection open that waits to be accepted:
    who gets none in time, or no answer on it, is a row."""
    with serve(api(Call.close, never), backlog=0) as server:
        words = ["--levels", "64", "--num-requests", "192", *SHORT]
        words += ["--connect-timeout", "2s", "--first-byte-timeout", "3s"]
        ended = fastload("sweep", "--url", f"http://127.0.0.1:{server.port}", *words)
    assert ended.code in (0, 1) and "Traceback" not in ended.err
    run = the_run(tmp_path / "results")
    rows = run.requests("00-c64").to_pylist()
    assert "ok" in {row["status"] for row in rows} <= {"ok", "connect", "reset", "timeout"}
    assert sum(row["role"] == "measured" and row["sent_ns"] is not None for row in rows) == 192
    assert len({row["request"] for row in rows}) == len(rows)
    assert run.manifest["status"] == "complete"


# ---------------------------------------------------------------- local ports

# In a network of its own: a server on a port outside of the range. The client closes first, so the ports that wait are
# its own.
SERVER = """
import fcntl, socket, struct, subprocess, sys
with socket.socket() as any_socket:
    fcntl.ioctl(any_socket, 0x8914, struct.pack("16sH14x", b"lo", 0x41))  # SIOCSIFFLAGS: up and running
for name, value in (("ip_local_port_range", "40000 40099"), ("tcp_tw_reuse", "0")):
    with open(f"/proc/sys/net/ipv4/{name}", "w") as file:
        file.write(value)
sys.path.insert(0, sys.argv[1])
from api import api
from scripted import Call, answer, serve
close = sys.argv[2] == "close"

def script(call):
    call.sleep(0.005)
    call.finish(answer("one", "two", "three", close=close))
    if close:
        call.stay()

with serve(api(Call.close, lambda call, number: False, script), port=20000) as server:
    done = subprocess.run(sys.argv[3:])
    print("accepts", server.accepts, file=sys.stderr)
sys.exit(done.returncode)
"""


NETWORK = ["unshare", *([] if os.geteuid() == 0 else ["--map-root-user"]), "--net"]
PORTS = "/proc/sys/net/ipv4/ip_local_port_range"
needs_network = pytest.mark.skipif(
    subprocess.run([*NETWORK, "test", "-w", PORTS], capture_output=True).returncode != 0,
    reason="this machine gives no network namespace: no ports of our own to run out of",
)


def in_namespace(command: Any, how: str, *words: str, cwd: Path) -> tuple[int, list[str], int]:
    """A sweep beside its server in a network of 100 ports: (exit code, lines of stderr, connections it took)."""
    load = str(Path(__file__).parent.with_name("load"))
    inside = [sys.executable, "-P", "-c", SERVER, load, how, *command, "sweep", "--url", "http://127.0.0.1:20000"]
    done = subprocess.run(
        [*NETWORK, *inside, *words, *SHORT],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=50,
    )
    *lines, last = done.stderr.splitlines()
    found = re.fullmatch(r"accepts (\d+)", last)
    assert found, done.stderr
    return done.returncode, lines, int(found[1])


@needs_network
def test_kept_connections_need_as_many_ports_as_streams(command: Any, tmp_path: Path, the_run: Any) -> None:
    """Bug report C15, its first half: 500 requests, concurrency 10."""
    code, lines, accepts = in_namespace(command, "keep", "--levels", "10", "--num-requests", "500", cwd=tmp_path)
    assert code in (0, 1) and accepts < 40
    run = the_run(tmp_path / "results")
    assert run.manifest["status"] == "complete"
    assert set(run.requests("00-c10")["status"].to_pylist()) == {"ok"}


@needs_network
def test_ports_that_run_out_are_named_and_end_the_run(command: Any, tmp_path: Path, the_run: Any) -> None:
    """Its second half: a connection for each request, which then waits a minute for its port."""
    words = ["--levels", "10,20", "--num-requests", "500", "--max-failures", "30"]
    code, lines, _ = in_namespace(command, "close", *words, cwd=tmp_path)
    assert code == 1 and "Traceback" not in "\\n".join(lines)
    assert "30 requests failed in a row (--max-failures 30); the last: client_ports: no local port" in lines[-1]
    assert "level 20 was not tried" in lines[-1]
    run = the_run(tmp_path / "results")
    rows = run.requests("00-c10").sort_by("request").to_pylist()
    assert {row["status"] for row in rows} <= {"ok", "client_ports", "cancelled"}
    scarce = [row for row in rows if row["status"] == "client_ports"]
    assert len(scarce) >= 30 and 40 < sum(row["status"] == "ok" for row in rows) <= 100
    assert {row["errno"] for row in scarce} == {99} and {row["sent_ns"] for row in scarce} == {None}
    assert len({row["request"] for row in rows}) == len(rows)
    summary = json.loads((run.path / "summary.json").read_text())
    assert summary["verdict"]["status"] == "invalid"
    assert "found no local port or file descriptor free on this host" in "; ".join(summary["verdict"]["reasons"])


@needs_network
def test_a_level_of_more_streams_than_ports_is_refused(command: Any, tmp_path: Path) -> None:
    code, lines, accepts = in_namespace(command, "keep", "--levels", "101", cwd=tmp_path)
    assert code == 2 and accepts == 0
    assert lines[-1].startswith("fastload: --levels 101: needs a local port for each connection")


def test_thousands_of_connections_one_after_the_other(fastload: Any, tmp_path: Path, the_run: Any) -> None:
    with serve(api(Call.close, never, lambda call: call.finish(answer("a", "b", "c", close=True)))) as server:
        words = ["--levels", "64", "--num-requests", "2000", *SHORT]
        ended = fastload("sweep", "--url", f"http://127.0.0.1:{server.port}", *words)
        assert server.accepts >= 2000
    assert "Traceback" not in ended.err
    assert set(the_run(tmp_path / "results").requests("00-c64")["status"].to_pylist()) == {"ok"}
