"""Hours of bad service in a few minutes: does memory stay flat, and is every descriptor given back?

    fastload sweep (supervisor, measurer)  --64 streams-->  a server of its own, which by turns answers well, sends an
                                                            event of 1 MB, garbage, or a reset

Of 16 answers 8 are good (three of them close), 3 hold an event of 1 MB, 3 are garbage of seven kinds, 2 are cut by a
reset. Memory is VmRSS of each process (shared blocks and all), sampled twice a second and compared from the first
20k requests on; descriptors are counted in /proc, those of connections included. Ends with 1 when a limit is missed.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import rig
from churn_server import TOKENS

REQUESTS, WARM, STREAMS = 200_000, 20_000, 64
GROWTH_MB = 50.0
GIVE_UP_S = 1800
COLUMNS = ("process", "RSS at 20k, MB", "at the end, MB", "growth, MB", "most, MB", "descriptors at 20k", "at the end")


def main() -> None:
    """Run it."""
    given = rig.order(
        __doc__,
        lambda words: words.add_argument("--requests", type=int, default=REQUESTS),
        lambda words: words.set_defaults(runs=1),
    )
    found = [churn(given.requests) for _ in range(given.runs)]
    rows, faults = [], []
    for one in found:
        for name in ("supervisor", "measurer"):
            rows.append([name, *(one[name][key] for key in KEYS)])
            if one[name]["growth"] > GROWTH_MB:
                faults.append(f"the {name} grew by {one[name]['growth']:.0f} MB, more than {GROWTH_MB:.0f}")
            if one[name]["descriptors_last"] > one[name]["descriptors"] + STREAMS:
                faults.append(f"the {name} has {one[name]['descriptors_last']} descriptors open")
        faults += one["faults"]
    last = found[-1]
    rig.answer(
        given, "churn", f"{given.requests:,} requests against a server that fails every third", "none: memory only",
        COLUMNS, rows, packages=rig.versions("uvloop", "orjson", "pyarrow"), data=found,
        notes=(f"{last['seconds']:.0f} s; rows by status: {last['statuses']}", *(f"MISSED: {each}" for each in faults)),
    )
    sys.exit(1 if faults else 0)


KEYS = ("rss", "rss_last", "growth", "most", "descriptors", "descriptors_last")


# ---------------------------------------------------------------- the client, watched


def churn(requests: int) -> dict[str, Any]:
    """One sweep: for each process its memory and descriptors; `faults` are sentences."""
    with tempfile.TemporaryDirectory(prefix="fastload-bench-") as folder:
        program = str(Path(__file__).with_name("churn_server.py"))
        server = subprocess.Popen([sys.executable, "-P", program], stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            url = f"http://127.0.0.1:{int(server.stdout.readline())}"
            return watch(url, requests, Path(folder))
        finally:
            server.send_signal(signal.SIGTERM)
            server.communicate()


def watch(url: str, requests: int, folder: Path) -> dict[str, Any]:
    """Run the sweep and look at it twice a second."""
    words = ["sweep", "--url", url, "--levels", str(STREAMS), "--num-requests", str(requests), "--osl", str(TOKENS)]
    words += ["--isl", "16", "--quiet", "--output", str(folder)]
    sweep = subprocess.Popen(
        [sys.executable, "-P", "-c", "import sys; from fastload.cli import main; main(sys.argv[1:])", *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )
    samples: dict[str, list[tuple[int, float, int]]] = {"supervisor": [], "measurer": []}
    begun = time.monotonic()
    measurer = 0
    while sweep.poll() is None:
        time.sleep(0.5)
        if time.monotonic() - begun > GIVE_UP_S:
            sweep.kill()
            raise SystemExit(f"not done after {GIVE_UP_S} s")
        measurer = measurer or child(sweep.pid)
        shown = progress(folder)
        # behind the level the supervisor analyses the run: that is no load
        if measurer and shown and shown["level"] == 0 and shown["done"] + shown["failed"] < requests:
            for name, pid in (("supervisor", sweep.pid), ("measurer", measurer)):
                samples[name].append((shown["done"] + shown["failed"], rss_mb(pid), descriptors(pid)))
    _, said = sweep.communicate()
    if sweep.returncode not in (0, 1) or "Traceback" in said:
        raise SystemExit(f"the sweep ended with {sweep.returncode}:\n{said}")
    found: dict[str, Any] = {name: figures(taken, min(WARM, requests // 10)) for name, taken in samples.items()}
    statuses, faults = account(folder)
    if os.path.exists(f"/proc/{measurer}"):
        faults.append("the measurer is still there")
    return found | {"seconds": time.monotonic() - begun, "statuses": statuses, "faults": faults}


def figures(samples: list[tuple[int, float, int]], warm: int) -> dict[str, float]:
    """Memory (MB) and descriptors behind the warm-up, and at the end: each the highest of ten samples there."""
    after = [sample for sample in samples if sample[0] >= warm]
    first, last = after[:10], after[-10:]
    rss, rss_last = (max(sample[1] for sample in some) for some in (first, last))
    opened, opened_last = (max(sample[2] for sample in some) for some in (first, last))
    most = max(sample[1] for sample in after)
    return {
        "rss": rss, "rss_last": rss_last, "growth": rss_last - rss, "most": most,
        "descriptors": opened, "descriptors_last": opened_last,
    }


def account(folder: Path) -> tuple[str, list[str]]:
    """Rows by status, and what is wrong with them."""
    (path,) = folder.iterdir()
    table = rig.open_run(path).requests()
    numbers = sorted(table["request"].to_pylist())
    counts: dict[str, int] = {}
    for status in table["status"].to_pylist():
        counts[status] = counts.get(status, 0) + 1
    faults = [] if numbers == list(range(len(numbers))) else ["requests were lost or sent twice"]
    faults += [f"{status} is no failure of this server" for status in counts if status not in STATUSES]
    return ", ".join(f"{status} {count}" for status, count in sorted(counts.items())), faults


STATUSES = ("ok", "reset", "truncated", "malformed_event", "http_status", "stream_error", "empty", "not_streaming")


def progress(folder: Path) -> dict[str, Any] | None:
    """What the run shows of itself."""
    for path in folder.glob("*/progress.json"):
        shown: dict[str, Any] = json.loads(path.read_text())
        return shown
    return None


def child(pid: int) -> int:
    """The measuring process below `pid`; 0 while there is none."""
    for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        if b"fastload.load.measurer" in Path(f"/proc/{each}/cmdline").read_bytes():
            return int(each)
    return 0


def rss_mb(pid: int) -> float:
    """Resident memory of a process; 0 when it has gone."""
    try:
        found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    except OSError:
        return 0.0
    return int(found[1]) / 1024 if found else 0.0


def descriptors(pid: int) -> int:
    """Files a process has open; 0 when it has gone."""
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return 0


if __name__ == "__main__":
    main()
