"""TLS: how far is a token's stamp from the moment the server sent its record, and what does an event cost?

    server (core 0) --lockstep: all streams' records in one burst a step--> client (core 1)
           [encrypt all, then for each: clock -> log, send]                 [kernel stamp | decrypt, feed]

The server is Python's ssl over sockets of its own; it encrypts a step's records before the step begins, so that its log
holds the time of the send and not of the cipher. The same client without TLS is measured in the same runs, against the
ground-truth server.
"""

import argparse
import contextlib
import gc
import json
import re
import selectors
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import rig
import trustme

from fastload.analysis import calibration
from fastload.load.tls import TlsOptions
from fastload.sim import _emit, truth

LEVELS = (64, 256)
TOKENS = 128
STEP_MS = 20
COLUMNS = ("streams", "over", "stamp us P50", "P99", "max", "coalesced %", "CPU us/event", "core %", "in flight",
           "late steps")
HEAD = (b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n")
EVENT = ('data: {"id":"truth-%08u","object":"chat.completion.chunk","created":1764500000,"model":"fastload-truth",'
         '"choices":[{"index":0,"delta":%s,"logprobs":null,"finish_reason":%s}]}\n\n')
USAGE = ('data: {"id":"truth-%08u","object":"chat.completion.chunk","created":1764500000,"model":"fastload-truth",'
         '"choices":[],"usage":{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d}}\n\n')
EARLY_NS = 2_000_000  # the step's records are made in this time before it


def main() -> None:
    """Interleaved: plain and TLS at each level, then again."""
    given = rig.order(
        __doc__ or "",
        lambda words: words.add_argument("--levels", default=",".join(map(str, LEVELS)), help="[%(default)s]"),
        lambda words: words.add_argument("--tokens", type=int, default=TOKENS, help="of an answer [%(default)s]"),
    )
    levels = [int(word) for word in given.levels.split(",")]
    runs: dict[tuple[int, str], list[dict[str, object]]] = {(c, over): [] for c in levels for over in ("TCP", "TLS")}
    with tempfile.TemporaryDirectory(prefix="fastload-bench-") as folder:
        ca_file = Path(folder) / "ca.pem"
        authority = trustme.CA()
        authority.cert_pem.write_to_path(ca_file)
        authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(Path(folder) / "own.pem")
        for _ in range(given.runs):
            for c in levels:
                much = (c, max(4, 2 * c), given.tokens, 50, STEP_MS)
                runs[c, "TCP"].append(rig.drive(*much))
                runs[c, "TLS"].append(rig.drive(*much, server=start, tls=TlsOptions(str(ca_file))))
    rows = [[c, over, *rig.middles([_flat(run) for run in found], *_NAMES)] for (c, over), found in runs.items()]
    rig.answer(
        given, "tls", "Stamp error and CPU over TLS 1.3, all tokens joined", "CLOCK_MONOTONIC, ns", COLUMNS, rows,
        packages=rig.versions("uvloop", "Cython") | {"openssl": ssl.OPENSSL_VERSION.split()[1]},
        data={f"{c} {over}": found for (c, over), found in runs.items()},
        notes=("late steps: bursts that took the server longer than a step, its fault and not the client's",),
    )


_NAMES = ("p50", "p99", "max", "coalesced", "cpu", "core", "in_flight", "late_steps")


def _flat(level: dict[str, object]) -> dict[str, object]:
    errors = level["kernel"]["stamp_us"]  # type: ignore[index]
    return {
        "p50": errors["p50"], "p99": errors["p99"], "max": errors["max"],
        "coalesced": 100 * level["coalesced_share"],  # type: ignore[operator]
        "cpu": level["cpu_us_per_event"]["measurer"],  # type: ignore[index]
        "core": 100 * level["cpu_share"],  # type: ignore[operator]
        "in_flight": level["in_flight"],
        "late_steps": level["late_steps"],
    }


# ---------------------------------------------------------------- the server


@contextlib.contextmanager
def start(pace: truth.Pace, log: Path, cpu: int | None) -> Iterator[str]:
    """A TLS server in a process of its own, with the certificate beside the authority's; yields its URL."""
    command = [sys.executable, __file__, "serve", str(log), str(pace.ttft_ms), str(pace.step_ms), str(cpu or 0)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            yield process.stdout.readline().split()[1].decode()
        finally:
            process.stdin.close()
            process.wait(20)


class Stream:
    """One connection, and the answer it is given."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext) -> None:
        self.sock = sock
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self.incoming, self.outgoing, server_side=True)
        self.shaken = False
        self.request = b""
        self.number = -1
        self.tokens = self.sent = 0
        self.prompt = 0
        self.ready_ns = 0

    def read(self) -> bool:
        """Take what came. True when a whole request has; ConnectionError when the peer is gone."""
        data = self.sock.recv(65536)
        if not data:
            raise ConnectionError
        self.incoming.write(data)
        with contextlib.suppress(ssl.SSLWantReadError):
            if not self.shaken:
                self.tls.do_handshake()
                self.shaken = True
            while True:
                self.request += self.tls.read(65536)
        if self.outgoing.pending:
            self.sock.sendall(self.outgoing.read())
        head, _, body = self.request.partition(b"\r\n\r\n")
        length = re.search(rb"(?i)content-length: (\d+)", head)
        return length is not None and len(body) >= int(length[1])

    def begin(self, number: int, now: int, ttft_ns: int) -> None:
        """Read the request and send the head and the role."""
        asked = json.loads(self.request.partition(b"\r\n\r\n")[2])
        self.request = b""
        self.number, self.sent = number, 0
        self.tokens = asked.get("max_completion_tokens") or asked["max_tokens"]
        self.prompt = len(str(asked.get("messages")).split())
        self.ready_ns = now + ttft_ns
        role = EVENT % (number, '{"role":"assistant","content":""}', "null")
        self.sock.sendall(self.seal(HEAD + chunk(role)))

    def seal(self, data: bytes) -> bytes:
        """The record of `data`."""
        self.tls.write(data)
        return self.outgoing.read()

    def next(self) -> bytes:
        """The record of the next token."""
        last = self.sent + 1 == self.tokens
        return self.seal(chunk(EVENT % (self.number, '{"content":" token"}', '"length"' if last else "null")))

    def rest(self) -> bytes:
        """Usage, [DONE] and the end of the framing."""
        counts = USAGE % (self.number, self.prompt, self.prompt + self.tokens, self.tokens)
        return self.seal(chunk(counts)) + self.seal(chunk("data: [DONE]\n\n") + b"0\r\n\r\n")


def chunk(text: str) -> bytes:
    """One HTTP chunk."""
    return b"%x\r\n%s\r\n" % (len(text), text.encode())


def serve(log: Path, ttft_ms: float, step_ms: float, cpu: int) -> None:
    """Serve until stdin ends; then write the log in the ground-truth server's form."""
    rig.raise_descriptors()
    rig.pin(cpu)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(next(Path(tempfile.gettempdir()).glob("fastload-bench-*/own.pem")))
    records: list[tuple[int, int, int]] = []
    running: list[Stream] = []
    count = steps = late = 0
    step_ns = round(step_ms * 1e6)
    gc.disable()
    with socket.create_server(("127.0.0.1", 0), backlog=4096) as listening, selectors.EpollSelector() as wanted:
        listening.setblocking(False)
        wanted.register(listening, selectors.EVENT_READ)
        wanted.register(sys.stdin, selectors.EVENT_READ)
        print(f"listening https://127.0.0.1:{listening.getsockname()[1]}", flush=True)
        grid = time.monotonic_ns()
        while True:
            now = time.monotonic_ns()
            while grid <= now:
                grid += step_ns
            if now >= grid - EARLY_NS and running:
                due = [stream for stream in running if stream.ready_ns <= grid]
                # an answer ends a step after its last token, as the ground-truth server's does
                sealed = [
                    (stream, stream.rest() if stream.sent == stream.tokens else stream.next()) for stream in due
                ]
                while time.monotonic_ns() < grid:
                    pass
                for stream, record in sealed:
                    at = time.monotonic_ns()
                    stream.sock.send(record)
                    if stream.sent < stream.tokens:
                        records.append((at, stream.number, stream.sent))
                        stream.sent += 1
                    else:
                        records.append((at, stream.number, _emit.ENDED))
                        running.remove(stream)
                steps += 1
                late += time.monotonic_ns() > grid + step_ns
                continue
            wait_s = (grid - EARLY_NS - now) / 1e9 if running else None
            for key, _ in wanted.select(wait_s):
                if key.fileobj is sys.stdin:
                    write_log(log, records, steps, late)
                    return
                if key.fileobj is listening:
                    sock, _ = listening.accept()
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    wanted.register(sock, selectors.EVENT_READ, Stream(sock, context))
                    continue
                stream = key.data
                try:
                    whole = stream.read()
                except OSError:
                    wanted.unregister(stream.sock)
                    stream.sock.close()
                    continue
                if whole:
                    now = time.monotonic_ns()
                    records.append((now, count, _emit.RECEIVED))
                    stream.begin(count, now, round(ttft_ms * 1e6))
                    running.append(stream)
                    count += 1


def write_log(log: Path, records: list[tuple[int, int, int]], steps: int, late: int) -> None:
    """Header and records as sim/_emit.pyx writes them."""
    header = np.zeros(_emit.HEADER_BYTES // 8, "<i8")
    header[:4] = len(records), 0, steps, late
    log.write_bytes(header.tobytes() + np.array(records, calibration.RECORD).tobytes())


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        words = argparse.ArgumentParser()
        words.add_argument("mode")
        words.add_argument("log", type=Path)
        words.add_argument("ttft_ms", type=float)
        words.add_argument("step_ms", type=float)
        words.add_argument("cpu", type=int)
        asked = words.parse_args()
        serve(asked.log, asked.ttft_ms, asked.step_ms, asked.cpu)
    else:
        main()
