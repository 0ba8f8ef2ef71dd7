"""A disk that fills, turns read-only or is taken away under a run: a real tmpfs, in a mount namespace of its own.

What was measured is kept as far as the disk lets; the rest is named in one line, and nothing looks finished.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fastload import open_run

NAMESPACE = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "--mount"]
USERS = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]


@dataclass
class Disk:
    """A tmpfs that only a process entering its namespace sees; `seen` is the way to it from here."""

    holder: subprocess.Popen[bytes]
    place: Path

    @property
    def seen(self) -> Path:
        return Path(f"/proc/{self.holder.pid}/root{self.place}")

    @property
    def enter(self) -> list[str]:
        """The words before a command that is to run inside."""
        return ["nsenter", "--target", str(self.holder.pid), "--mount", *USERS]

    def fill(self) -> None:
        """Leave no byte."""
        with (self.seen / "filler").open("ab", buffering=0) as file:
            for size in (1 << 20, 1 << 12, 1):
                try:
                    while True:
                        file.write(b"x" * size)
                except OSError:
                    continue

    def free(self) -> None:
        (self.seen / "filler").unlink()

    def remount(self, how: str, within_s: float = 10) -> None:
        """Mount it anew, read-only or not; not while a file is being written, which never takes long."""
        give_up = time.monotonic() + within_s
        argv = [*self.enter, "mount", "-o", f"remount,{how}", str(self.place)]
        while subprocess.run(argv, capture_output=True).returncode:
            assert time.monotonic() < give_up
            time.sleep(0.01)

    def run(self) -> Path:
        """The one run on it."""
        (path,) = (self.seen / "out").iterdir()
        return path


def can_mount() -> bool:
    """A container may not let us have a mount namespace of our own, and then there is no disk to fill."""
    script = ["sh", "-c", "mount -t tmpfs -o size=1m tmpfs /mnt"]
    return subprocess.run([*NAMESPACE, *script], capture_output=True).returncode == 0


pytestmark = pytest.mark.skipif(not can_mount(), reason="this machine gives no mount namespace: no real tmpfs to fill")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """A disk of 4 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    script = f"mount -t tmpfs -o size=4m,mode=777 tmpfs {place} && echo mounted && exec sleep 600"
    holder = subprocess.Popen([*NAMESPACE, "sh", "-c", script], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"mounted\n"
    try:
        yield Disk(holder, place)
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()


Sweep = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def sweep(disk: Disk, sim_url: Any, command: Any, tmp_path: Path) -> Iterator[Sweep]:
    """`sweep("--levels", "2", ...)` starts one that writes to the disk, by a path of its own namespace."""
    url = sim_url(ttft_ms=10, step_ms=5)
    started = []

    def go(*words: str) -> subprocess.Popen[str]:
        argv = ["sweep", "--url", url, "--osl", "8", "--output", str(disk.place / "out"), *words]
        process = subprocess.Popen(
            [*disk.enter, *command, *argv],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
        )  # fmt: skip
        started.append(process)
        return process

    yield go
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def ended(process: subprocess.Popen[str]) -> tuple[str, str]:
    """(stdout, the one line on stderr that says why) of a run that could not be written: exit code 1, no traceback."""
    out, err = process.communicate(timeout=40)
    assert process.returncode == 1 and "Traceback" not in err, err
    last = err.splitlines()[-1]
    assert last.startswith("fastload: cannot ") and len(last) < 700, err
    return out, last


def state(disk: Disk) -> dict[str, Any]:
    """progress.json."""
    found: dict[str, Any] = json.loads((disk.run() / "progress.json").read_text())
    return found


def level_of(path: Path, name: str) -> dict[str, Any]:
    """The manifest's entry of a level."""
    levels = json.loads((path / "manifest.json").read_text())["levels"]
    found: dict[str, Any] = next((one for one in levels if one["dir"] == name), {})
    return found


def test_full_at_the_start(disk: Disk, sweep: Sweep) -> None:
    disk.fill()
    out, line = ended(sweep("--levels", "2", "--num-requests", "4"))
    assert out == "" and "No space left on device" in line
    assert [path.name for path in disk.seen.iterdir()] == ["filler"]


def test_full_during_the_warm_up(disk: Disk, sweep: Sweep, until: Any) -> None:
    """Nothing was measured, so nothing is left."""
    process = sweep("--levels", "2", "--num-requests", "4")
    until(lambda: list(disk.seen.glob("out/*/manifest.json")))
    disk.fill()
    out, line = ended(process)
    assert out == "" and "No space left on device" in line and line.endswith("; nothing was measured")
    assert [path.name for path in disk.seen.iterdir()] == ["filler"]


def test_full_in_the_second_level(disk: Disk, sweep: Sweep, until: Any) -> None:
    process = sweep("--levels", "2,4", "--duration", "2s", "--quiet")
    until(lambda: list(disk.seen.glob("out/*/requests/01-c4")))
    until(lambda: state(disk)["level"] == 1 and state(disk)["done"] > 0)
    disk.fill()
    out, line = ended(process)
    assert "No space left on device" in line
    told = re.search(r"of level 01-c4 (\d+) rows are not on disk \(requests (\d+) to (\d+)\)", line)
    assert told is not None, line
    rows, first, last = map(int, told.groups())
    assert rows > 4 and last - first == rows - 1
    assert "[FAILED]" in out
    assert [line.split()[0] for line in out.splitlines() if re.match(r" *[24]\*? ", line)] == ["2", "4*"]
    run = open_run(disk.run(), repair=False)
    assert run.manifest["status"] != "complete"
    whole = run.requests("00-c2")
    assert level_of(disk.run(), "00-c2")["complete"] and whole.num_rows > 4
    assert max(whole["request"].to_pylist()) + 1 == first  # not one between the two
    assert "01-c4" not in run.level_dirs() and not (disk.run() / "summary.json").exists()
    assert not list(disk.run().rglob("*.tmp"))


def test_full_in_a_level_and_room_again_before_its_end(disk: Disk, sweep: Sweep, until: Any, ran: Any) -> None:
    process = sweep("--levels", "2", "--duration", "4s")
    until(lambda: list(disk.seen.glob("out/*/requests/00-c2")))
    disk.fill()
    time.sleep(1.5)
    disk.free()
    _, err = process.communicate(timeout=40)
    assert ran(process.returncode, err), err
    assert "No space left on device; measuring goes on" in err
    run = open_run(disk.run())
    assert run.manifest["status"] == "complete" and run.notes == ()
    requests = run.requests("00-c2")["request"].to_pylist()
    assert sorted(requests) == list(range(min(requests), max(requests) + 1))


def test_full_at_the_summary(disk: Disk, sweep: Sweep, until: Any) -> None:
    process = sweep("--levels", "2", "--num-requests", "20", "--quiet")
    until(lambda: list(disk.seen.glob("out/*/requests/00-c2/*.parquet")))
    until(lambda: level_of(disk.run(), "00-c2").get("complete"))
    disk.fill()
    out, line = ended(process)
    assert "cannot write the summary into " in line and "No space left on device" in line
    assert re.search(r"^ *2 ", out, re.MULTILINE)  # the figures are whole, and told
    path = disk.run()
    assert not (path / "summary.json").exists() or not (path / "summary.csv").exists()
    assert json.loads((path / "manifest.json").read_text())["status"] != "complete"
    assert open_run(path, repair=False).requests("00-c2").num_rows >= 20


def test_read_only_in_the_middle_and_for_good(disk: Disk, sweep: Sweep, until: Any) -> None:
    process = sweep("--levels", "2", "--duration", "2s", "--quiet")
    until(lambda: [one for one in disk.seen.glob("out/*/progress.json") if json.loads(one.read_text())["done"]])
    disk.remount("ro")
    out, line = ended(process)
    assert "Read-only file system" in line and re.search(r"of level 00-c2 \d+ rows are not on disk", line)
    assert "[FAILED]" in out
    run = open_run(disk.run())  # which cannot put it in order, and says so
    assert run.manifest["status"] == "crashed"
    assert any("could not be put in order" in note and "Read-only" in note for note in run.notes)


def test_taken_away_in_the_middle(disk: Disk, sweep: Sweep, until: Any) -> None:
    process = sweep("--levels", "2,4", "--duration", "1500ms", "--quiet")
    until(lambda: list(disk.seen.glob("out/*/requests/00-c2")))
    (disk.seen / "out").rename(disk.seen / "elsewhere")
    _, line = ended(process)
    assert "No such file or directory" in line and re.search(r"of level 00-c2 \d+ rows are not on disk", line)
    assert sorted(path.name for path in disk.seen.iterdir()) == ["elsewhere"]  # a run that went is not made again
