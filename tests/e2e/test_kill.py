"""kill -9 of either process at a random moment: nothing measured before is lost, doubled or made to look whole.

`--kills 20` kills each process 20 times instead of 3. The server gives every answer an id and remembers when the answer
was out: what must be in the trace is known from there, and not from us.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from fastload import open_run
from fastload.errors import TraceError

PART_S = 1.0  # a part so often, and not every 50 s: what is missing must be of this last while
SLACK_S = 3.0  # a block is open for a second; the rest is for a busy machine
REQUESTS = 60
WORDS = ["--levels", "8,4,2", "--num-requests", str(REQUESTS), "--osl", "6", "--isl", "16"]
PROGRAM = (
    "import sys\nfrom fastload.trace import writer\n"
    f"writer.PART_INTERVAL_NS = {int(PART_S * 1e9)}\n"
    "from fastload.cli import main\nmain(sys.argv[1:])\n"
)


@dataclass
class Server:
    """A model that answers in six events; `out`: id of an answer -> when its last byte was handed to the kernel."""

    url: str
    out: dict[str, int] = field(default_factory=dict)

    def out_before(self, ns: int) -> set[str]:
        return {name for name, at in list(self.out.items()) if at < ns}


@pytest.fixture
def server() -> Iterator[Server]:
    told = Server("")

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            known = {"/v1/models": {"object": "list", "data": [{"id": "m", "object": "model"}]}}
            self.answer(200 if self.path in known else 404, json.dumps(known.get(self.path, {})).encode())

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if not asked.get("stream"):
                words = len(str(asked.get("prompt") or asked["messages"][0]["content"]).split())
                usage = {"prompt_tokens": words, "completion_tokens": 1}
                self.answer(200, json.dumps({"choices": [{"message": {"content": "x"}}], "usage": usage}).encode())
                return
            name = f"{threading.get_ident()}-{time.monotonic_ns()}"
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            for at in range(6):
                time.sleep(0.008)
                choice = {"index": 0, "delta": {"content": "word "}, "finish_reason": "length" if at == 5 else None}
                self.event({"id": name, "choices": [choice]})
            self.event({"id": name, "choices": [], "usage": {"prompt_tokens": 16, "completion_tokens": 6}})
            self.wfile.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
            told.out[name] = time.monotonic_ns()

        def event(self, value: object) -> None:
            data = b"data: " + json.dumps(value).encode() + b"\n\n"
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

        def answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Keep stderr for what is tested."""

    class Quiet(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: Any, client_address: Any) -> None:
            """Clients that are killed break off, of course."""

    with Quiet(("127.0.0.1", 0), Handler) as listening:
        told.url = f"http://127.0.0.1:{listening.server_address[1]}"
        thread = threading.Thread(target=listening.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield told
        finally:
            listening.shutdown()
            thread.join()


def sweep(server: Server, cwd: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-P", "-c", PROGRAM, "sweep", "--url", server.url, *WORDS],
        cwd=cwd, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip


def check(run: Any, server: Server, killed_ns: int, within_s: float) -> None:
    """Every row of finished levels, all but the last while of the current one, none twice."""
    rows = run.requests().to_pylist()
    numbers = [row["request"] for row in rows]
    assert sorted(run.tokens()["request"].to_pylist()) == sorted(numbers)
    assert len(set(numbers)) == len(numbers)
    names = [row["server_request_id"] for row in rows if row["status"] == "ok"]
    assert len(set(names)) == len(names)
    missing = server.out_before(killed_ns - int(within_s * 1e9)) - {row["server_request_id"] for row in rows}
    assert not missing
    for entry in run.manifest["levels"]:
        if entry["index"] >= 0 and entry["complete"]:
            level = [row for row in rows if row["level"] == entry["concurrency"]]
            measured = [row for row in level if row["role"] == "measured"]
            assert len(measured) == entry["measured_done"] == REQUESTS
            assert {row["status"] for row in measured} == {"ok"}
            of_level = sorted(row["request"] for row in level)
            assert of_level == list(range(of_level[0], of_level[-1] + 1))
    assert not list(run.path.rglob("*.tmp"))


@pytest.mark.limit(100)
def test_the_supervisor_is_killed(
    kill: int, server: Server, children: Any, gone: Any, until: Any, tmp_path: Path
) -> None:
    chance = random.Random(f"supervisor {kill}")
    process = sweep(server, tmp_path)
    below: dict[int, str] = {}
    if chance.random() < 0.8:  # else perhaps before there is anything
        until(lambda: (tmp_path / "results").exists())
    delay_s = chance.uniform(0.0, 6.0)
    give_up = time.monotonic() + delay_s
    while time.monotonic() < give_up and process.poll() is None:
        below |= children(process.pid)
        time.sleep(0.01)
    killed_ns = time.monotonic_ns()
    process.kill()
    process.communicate()
    assert gone(below)
    found = list((tmp_path / "results").iterdir()) if (tmp_path / "results").exists() else []
    print(f"killed after {delay_s:.2f} s: {len(server.out)} answers were out")
    if process.returncode != -signal.SIGKILL:
        assert process.returncode in (0, 1)  # it had ended before
        return
    if not found:
        assert len(server.out) <= 1  # no directory before the server has answered
        return
    (path,) = found
    try:
        run = open_run(path)
    except TraceError as error:
        assert "nothing of it is to be had" in str(error) and not server.out_before(killed_ns)
        return
    assert run.manifest["status"] in ("crashed", "complete")
    check(run, server, killed_ns, PART_S + SLACK_S)
    if run.manifest["status"] == "crashed":
        said = "\n".join(run.notes)
        assert "the run was cut off" in said
        for entry in run.manifest["levels"]:
            assert entry.get("ended_ns") is not None or f"level {entry['dir']} has no end: " in said
        begun = {entry["concurrency"] for entry in run.manifest["levels"] if entry["index"] >= 0}
        missing = [str(level) for level in (8, 4, 2) if level not in begun]
        assert not missing or f"levels that had not begun: {', '.join(missing)}" in said
    again = open_run(path)
    assert again.notes == run.notes and again.manifest == run.manifest


@pytest.mark.limit(100)
def test_the_measurer_is_killed(
    kill: int, server: Server, children: Any, until: Any, tmp_path: Path, the_run: Any
) -> None:
    chance = random.Random(f"measurer {kill}")
    process = sweep(server, tmp_path)
    until(lambda: any("measurer" in line for line in children(process.pid).values()) or process.poll() is not None)
    (measurer,) = children(process.pid)
    delay_s = chance.uniform(0.0, 6.0)
    time.sleep(delay_s)
    killed_ns = time.monotonic_ns()
    try:
        os.kill(measurer, signal.SIGKILL)
    except ProcessLookupError:
        killed_ns = 0  # it had ended before
    out, err = process.communicate(timeout=60)
    print(f"killed after {delay_s:.2f} s: {len(server.out)} answers were out")
    assert "Traceback" not in err
    if not killed_ns or process.returncode == 0:
        assert process.returncode in (0, 1)  # all its work was done
        return
    assert process.returncode == 1 and err.splitlines()[-1].startswith("fastload: ")
    if not list(tmp_path.glob("results/*")):
        assert "the measuring process ended by SIGKILL; nothing was measured" in err.splitlines()[-1]
        return
    run = the_run(tmp_path / "results")
    assert run.notes == ()
    check(run, server, killed_ns, SLACK_S)
    if run.manifest["status"] == "crashed":
        assert "the measuring process ended by SIGKILL" in err.splitlines()[-1]
        assert "crashed" in out
        assert json.loads((run.path / "summary.json").read_text())["status"] == "crashed"
