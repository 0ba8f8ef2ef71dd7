"""What a run that was cut off left behind: found, said, and put in order.

A supervisor that is killed leaves a manifest that says `running`, perhaps a half-written file, perhaps a part that is
whole and has not got its name yet. Whoever opens the run first finishes it; the notes on that stay in the manifest.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from fastload import _timing
from fastload.errors import TraceError
from fastload.load.identity import lives, own_process
from fastload.trace.layout import KINDS, level_dirs, part_names, parts
from fastload.trace.writer import TEMPORARY, utc_text, write_json

LOCK_NS: Final = 2 * 10**9  # how long another opener may take to put a run in order
SET_ASIDE: Final = ".corrupt"


def still_written(directory: Path, supervisor: object) -> str | None:
    """A note if the run's supervisor lives, or if nobody can tell from here (another host or container)."""
    there = lives(supervisor)
    if there is None:
        assert isinstance(supervisor, dict)
        return (
            f"this run was being written on {supervisor.get('host')}: whether it still is cannot be told here"
            f"{_last_sign(directory)}"
        )
    return "this run is still being written" if there else None


def _last_sign(directory: Path) -> str:
    try:
        age_s = max(0, _timing.realtime_ns() - (directory / "progress.json").stat().st_mtime_ns) // 10**9
    except OSError:
        return ""
    return f"; its last sign of life is {age_s} s old"


@contextlib.contextmanager
def alone(directory: Path) -> Iterator[bool]:
    """Whether nobody else opens the run meanwhile: two that put it in order would take each other's files away."""
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        yield False
        return
    try:
        yield _locked(fd)
    finally:
        os.close(fd)


def _locked(fd: int) -> bool:
    give_up_ns = _timing.now_ns() + LOCK_NS
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if _timing.now_ns() > give_up_ns:
                return False
            time.sleep(0.01)
        except OSError:  # a file system without locks: then it has but one opener, we hope
            return True
        else:
            return True


def look(directory: Path, manifest: dict[str, object]) -> tuple[dict[str, object], list[str]]:
    """The manifest of a run that is over, completed with what its files tell if it was cut off, and notes on what is
    not in order. Writes nothing.
    """
    recovered = manifest.get("recovered")
    notes = [str(note) for note in recovered] if isinstance(recovered, list) else []
    if manifest.get("status") == "running":
        manifest, notes = _finish(directory, manifest)
    listed = manifest.get("levels")
    for entry in listed if isinstance(listed, list) else []:
        if isinstance(entry, dict) and entry.get("rows_not_on_disk"):
            notes.append(f"level {entry.get('dir')}: {entry['rows_not_on_disk']} rows could not be written")
    notes += [f"half-written file left by a crash, ignored: {_name(directory, one)}" for one in leftovers(directory)]
    for level in level_dirs(directory):
        orphans = part_names(directory / "tokens" / level) - part_names(directory / "requests" / level)
        notes += [f"tokens without their requests, ignored: tokens/{level}/{part}" for part in sorted(orphans)]
    return manifest, list(dict.fromkeys(notes))


def put_in_order(directory: Path, manifest: dict[str, object]) -> tuple[dict[str, object], list[str]]:
    """The same, and the directory is left as it should be: whole parts named, corrupt ones set aside, half-written
    files gone, the manifest's status `crashed`. What cannot be done is a note.
    """
    cut_off = manifest.get("status") == "running"
    done: list[str] = []
    trouble: Exception | None = None
    if cut_off:
        try:
            done += _name_whole_parts(directory, manifest)
            done += _set_aside_corrupt(directory)
        except (OSError, TraceError) as error:
            trouble = error
    manifest, notes = look(directory, manifest)
    notes = [*notes[:1], *done, *notes[1:]]
    if trouble is None and (cut_off or leftovers(directory)):
        try:
            for one in leftovers(directory):
                one.unlink(missing_ok=True)
            if cut_off:
                manifest["recovered"] = notes
                write_json(directory / "manifest.json", manifest)
            with (directory / "run.log").open("a", encoding="utf-8") as log:
                log.writelines(f"{utc_text(_timing.realtime_ns())} opened: {note}\n" for note in notes)
        except (OSError, TraceError) as error:
            trouble = error
    if trouble is not None:
        notes.append(f"the run directory could not be put in order: {trouble}")
    return manifest, notes


def leftovers(directory: Path) -> list[Path]:
    """Temporary files: of a run that is over, nobody will give them a name any more."""
    return sorted(directory.rglob(f"*{TEMPORARY}"))


def _finish(directory: Path, manifest: dict[str, object]) -> tuple[dict[str, object], list[str]]:
    """The manifest of a run that died, completed with what its files tell, and the notes on it."""
    notes = ["the run was cut off: its supervisor ended without closing it; status set to crashed"]
    listed = manifest.get("levels")
    levels = [dict(one) for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
    known = {one.get("dir"): one for one in levels}
    for level in level_dirs(directory):
        entry = known.get(level)
        if entry is not None and entry.get("ended_ns") is not None:
            continue
        if entry is None:
            index, _, concurrency = level.partition("-c")
            entry = {"index": int(index) if index.isdigit() else -1, "dir": level, "complete": False}
            entry["concurrency"] = int(concurrency) if concurrency.isdigit() else 1
            levels.append(entry)
        rows, measured, ok = 0, 0, 0
        for part in parts(directory, level):
            try:
                path = directory / "requests" / level / part
                found = pq.read_table(path, columns=["role", "status"], partitioning=None).to_pylist()
            except (OSError, pa.ArrowException) as error:
                notes.append(f"corrupt file: requests/{level}/{part}: {one_line(error)}")
                continue
            rows += len(found)
            measured += sum(row["role"] == "measured" for row in found)
            ok += sum(row["role"] == "measured" and row["status"] == "ok" for row in found)
        entry["measured_done"] = measured
        lost = _done_of(directory, entry["index"]) - ok
        more = f"; {lost} more had been done, and are lost" if lost > 0 else ""
        notes.append(f"level {level} has no end: {rows} requests were saved of it{more}")
    begun = {one.get("index") for one in levels}
    missing = [str(one["concurrency"]) for one in _planned(manifest) if one["index"] not in begun]
    if missing:
        notes.append(f"levels that had not begun: {', '.join(missing)}")
    return {**manifest, "levels": levels, "status": "crashed"}, notes


def _planned(manifest: dict[str, object]) -> list[dict[str, Any]]:
    """The levels of the plan, with `index` and `concurrency`."""
    plan = manifest.get("plan")
    listed = plan.get("levels") if isinstance(plan, dict) else None
    levels = [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
    return [{"index": index, **one} for index, one in enumerate(levels) if "concurrency" in one]


def _done_of(directory: Path, index: object) -> int:
    """How many measured requests of a level were done when the display last saw it; 0 if that was another level."""
    try:
        state = orjson.loads((directory / "progress.json").read_bytes())
        return int(state["done"]) if state["level"] == index else 0
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def _name_whole_parts(directory: Path, manifest: dict[str, object]) -> list[str]:
    """Finish parts whose writer was killed between writing and renaming, requests last, as it would have.

    Only in the boot they were written in: a file that was not yet synced may hold anything after a power failure.
    """
    supervisor = manifest.get("supervisor")
    if not isinstance(supervisor, dict) or supervisor.get("boot") != own_process()["boot"]:
        return []
    notes: list[str] = []
    for requests in sorted((directory / "requests").glob(f"*/part-*.parquet{TEMPORARY}")):
        level, name = requests.parent.name, requests.name.removesuffix(TEMPORARY)
        tokens = directory / "tokens" / level / name
        if _rows(requests) is not None and _rows(requests) == _rows(tokens) and not requests.with_name(name).exists():
            requests.replace(requests.with_name(name))
            notes.append(f"a part that was whole and had no name yet was named: requests/{level}/{name}")
    return notes


def _set_aside_corrupt(directory: Path) -> list[str]:
    """Rename parts that cannot be read, with their partner, so that the rest of their level can."""
    notes: list[str] = []
    for level in level_dirs(directory):
        for part in parts(directory, level):
            pair = [directory / kind / level / part for kind in KINDS]
            if None in (rows := [_rows(path) for path in pair]) or rows[0] != rows[1]:
                for path in pair:
                    with contextlib.suppress(FileNotFoundError):
                        path.rename(path.with_name(path.name + SET_ASIDE))
                notes.append(f"corrupt part, set aside as {part}{SET_ASIDE}: level {level}")
    return notes


def _rows(path: Path) -> int | None:
    """Rows of a Parquet file; None if it is not whole: its footer comes last."""
    try:
        with pq.ParquetFile(path) as file:
            rows: int = file.metadata.num_rows
            return rows
    except (OSError, pa.ArrowException):
        return None


def _name(directory: Path, path: Path) -> str:
    return str(path.relative_to(directory))


def one_line(error: BaseException) -> str:
    """The message of a library, on one line and not too long."""
    return " ".join(str(error).split())[:200]
