"""The run directory as it is written: parts, manifest, log and progress. Made so that a crash loses only what
is open.

Goals: nothing on disk is ever half a file (temporary name, sync, rename); nothing written is ever touched
again; a full disk loses nothing that was written. A batch stays in memory until its part is renamed: a part that
cannot be written is tried again with the next, at the level's end and at the run's.

The tokens part is renamed before the requests part of the same number, so a requests part always has its
tokens.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import shutil
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from fastload import _timing
from fastload.errors import PlanError, TraceError
from fastload.load.hiding import hidden, hide
from fastload.load.identity import own_process
from fastload.trace.layout import KINDS, level_dir, part_name
from fastload.trace.rows import LevelRows
from fastload.trace.schema import DEFINITIONS_VERSION, REQUESTS_LAYOUT, SCHEMA_VERSION, TOKENS_LAYOUT
from fastload.trace.tables import Batch, RowContext

if TYPE_CHECKING:
    from fastload._timing import Block
    from fastload.load.supervisor import LevelFacts

PART_EVENTS: Final = 1_000_000  # a part inside a level is written at so many events
PART_BYTES: Final = 64 << 20  # or where it holds so much: whole texts, say
PART_INTERVAL_NS: Final = 50 * 10**9  # or so long after the last: with its writing no row waits for a minute
WAITING_BYTES: Final = 512 << 20  # rows that wait for a disk to take them; with more the run is ended
DISK_FAULTS: Final = {errno.ENOSPC, errno.EDQUOT, errno.EIO}  # not the user's mistake
TEMPORARY: Final = ".tmp"

# Every key of manifest.json; what the caller does not give is null.
MANIFEST_KEYS: Final = (
    *(
        "schema",
        "definitions",
        "run_id",
        "name",
        "fastload",
        "python",
        "packages",
        "created_utc",
        "command",
        "plan",
    ),
    *(
        "target",
        "sampling",
        "host",
        "clock",
        "calibration",
        "levels",
        "status",
        "verdict",
        "simulated",
        "supervisor",
    ),
)


class RunWriter:
    """Writes one run; the `sink` of the supervisor. Every method raises TraceError, naming the path, if the
    disk fails, and has kept what it was given.

    path: the run directory. run_id: its name. made: what `create_run` made for it, the deepest directory first.
    notice: told in a sentence when the disk fails inside a level, and when it takes rows again.
    """

    def __init__(
        self, made: Sequence[Path], manifest: dict[str, object], *, save_text: bool, utc_offset_ns: int
    ) -> None:
        """For `create_run`, which makes the directory."""
        self.made = tuple(made)
        self.path = self.made[0]
        self.run_id = self.path.name
        self.manifest: dict[str, object] = dict.fromkeys(MANIFEST_KEYS) | manifest
        self.notice: Callable[[str], object] = lambda sentence: None
        self._save_text = save_text
        self._utc_offset_ns = utc_offset_ns
        self._levels: dict[int, _Level] = {}
        self._behind = False  # a part could not be written, and waits

    def begin_level(
        self, index: int, concurrency: int, planned: Callable[[int], int | None], max_tokens: int
    ) -> None:
        """Make the directories of a level; index -1 is the warm-up of the run, `planned`: prompt tokens."""
        directory = level_dir(index, concurrency)
        target = self.manifest.get("target")
        context = RowContext(
            run_id=self.run_id,
            target=str(target.get("url", "")) if isinstance(target, dict) else "",
            level=0 if index < 0 else concurrency,
            max_tokens=max_tokens,
            utc_offset_ns=self._utc_offset_ns,
            planned=planned,
            save_text=self._save_text,
        )
        for kind in KINDS:
            folder = self.path / kind / directory
            try:
                folder.parent.mkdir(exist_ok=True)  # not its parents: a run that vanished is not made again
                folder.mkdir(exist_ok=True)
            except OSError as error:
                raise _cannot_write(folder, error) from error
        self._levels[index] = _Level(directory, LevelRows(context), _timing.now_ns())
        self._set_level({"index": index, "concurrency": concurrency, "dir": directory, "complete": False})
        self.update_manifest()

    def add_block(self, block: Block) -> None:
        """Take over a sealed block of a level that has begun; writes a part when enough has come together.

        A part that cannot be written waits in memory. TraceError when too much does, or the directory is gone.
        """
        level = self._levels[block.level]
        level.rows.add(block)
        if level.rows.raw_pending >= PART_BYTES:
            self._take(level)  # most of a raw payload is in no column
        if level.rows.events_pending >= PART_EVENTS or self._has_much(level) or _is_old(level):
            error = self._try_to_write(level)
            if error is not None and (level.waiting() > WAITING_BYTES or not self.path.is_dir()):
                raise error

    def write_old(self) -> None:
        """Write a part of what has waited for long, should no block come that would bring it about. Never raises."""
        for level in self._levels.values():
            if (level.rows.rows_pending or level.batches) and _is_old(level):
                self._try_to_write(level)

    def end_level(self, facts: LevelFacts) -> None:
        """Write what is left of a level, what is still open as `cancelled`, and its facts to the manifest."""
        level = self._levels[facts.index]
        self._take(level, close=True)
        entry = dataclasses.asdict(facts) | {"dir": level.directory}
        entry["instrument"] = facts.instrument | {"lost_events": level.missing}
        self._set_level(entry)
        self._flush(level)
        self.update_manifest()

    def waiting(self, directory: str) -> tuple[list[pa.Table], list[pa.Table]]:
        """The finished `requests` and `tokens` of a level that are not on disk."""
        batches = [batch for level in self._levels.values() if level.directory == directory for batch in level.batches]
        return [batch.requests for batch in batches], [batch.tokens for batch in batches]

    def finished(self, level_index: int) -> list[dict[str, object]]:
        """The rows of a level so far (columns of `requests`), on disk or not; [] if it never began.

        `sent_utc` is a datetime in UTC without a zone.
        """
        level = self._levels.get(level_index)
        if level is None:
            return []
        self._take(level)
        rows: list[dict[str, object]] = []
        for number in range(level.parts):
            path = self.path / "requests" / level.directory / part_name(number)
            try:
                rows += _to_rows(pq.read_table(path, partitioning=None))
            except (OSError, pa.ArrowException) as error:
                raise TraceError(f"cannot read {path}: {error}") from error
        for batch in level.batches:
            rows += _to_rows(batch.requests)
        return rows

    def log(self, text: str) -> None:
        """Append a line to run.log, with the UTC time."""
        path = self.path / "run.log"
        line = f"{utc_text(_timing.realtime_ns())} {hide(text)}\n"
        try:
            with path.open("a", encoding="utf-8", errors="replace") as file:
                file.write(line)
        except OSError as error:
            raise _cannot_write(path, error) from error

    def progress(self, state: dict[str, object]) -> None:
        """Replace progress.json. Not synced: it is for who looks now, and redrawn in half a second."""
        write_json(self.path / "progress.json", state, sync=False)

    def update_manifest(self, **keys: object) -> None:
        """Set keys of manifest.json; on disk it is always whole, the old or the new one."""
        self.manifest |= keys
        write_json(self.path / "manifest.json", self.manifest)

    def settle(self) -> list[str]:
        """Write everything that is in memory, open requests as `cancelled`; sentences on what the disk does not take.

        A level whose rows are not all on disk is not complete in the manifest.
        """
        lost: list[str] = []
        for index, level in self._levels.items():
            self._take(level, close=True)
            try:
                self._flush(level)
            except TraceError as error:
                numbers = [number for batch in level.batches for number in batch.requests["request"].to_pylist()]
                lost.append(
                    f"{error}; of level {level.directory} {len(numbers)} rows are not on disk "
                    f"(requests {min(numbers)} to {max(numbers)})"
                )
                entry = self._entry(index)
                self._set_level(entry | {"complete": False, "rows_not_on_disk": len(numbers)})
        return lost

    def close(self, status: str, **keys: object) -> None:
        """Write what is in memory, then `status` and `keys` to the manifest: what comes last, so that a run that
        could not be finished does not look as if it were.

        `status` is complete, interrupted, failed or crashed. TraceError if not all could be written: it says which
        rows, if there are any, else why.
        """
        lost = self.settle()
        try:
            self.update_manifest(**keys, status="failed" if lost and status == "complete" else status)
        except TraceError as error:
            raise TraceError("; ".join(lost) or str(error)) from error
        if lost:
            raise TraceError("; ".join(lost))

    def discard(self) -> None:
        """Take the run away again, and the directories that were made for it."""
        shutil.rmtree(self.path, ignore_errors=True)
        _remove_empty(self.made[1:])

    def _take(self, level: _Level, close: bool = False) -> None:
        batch = level.rows.take(close)
        if batch is not None:
            level.missing += batch.events_missing
            level.batches.append(batch)

    def _has_much(self, level: _Level) -> bool:
        """Whether a part is due for its size; a disk that takes none is not asked at every block."""
        return not self._behind and level.waiting() >= PART_BYTES

    def _try_to_write(self, level: _Level) -> TraceError | None:
        """Write a part, and say so if that fails, or works again."""
        self._take(level)
        level.written_ns = _timing.now_ns()
        try:
            self._flush(level)
        except TraceError as error:
            if not self._behind:
                self.notice(f"{error}; measuring goes on, the rows wait in memory")
            self._behind = True
            return error
        if self._behind:
            self.notice("the disk takes rows again: all that waited is written")
        self._behind = False
        return None

    def _flush(self, level: _Level) -> None:
        """Write the batches of a level as its next part; they leave memory only when it is renamed."""
        if not level.batches:
            return
        name = part_name(level.parts)
        tokens = pa.concat_tables([batch.tokens for batch in level.batches])
        requests = pa.concat_tables([batch.requests for batch in level.batches])
        write_part(self.path / "tokens" / level.directory / name, tokens, TOKENS_LAYOUT)
        write_part(self.path / "requests" / level.directory / name, requests, REQUESTS_LAYOUT)
        level.parts += 1
        level.batches.clear()

    def _entry(self, index: int) -> dict[str, object]:
        """The manifest's entry of a level."""
        levels = self.manifest["levels"]
        assert isinstance(levels, list)
        return next((one for one in levels if one["index"] == index), {"index": index})

    def _set_level(self, entry: dict[str, object]) -> None:
        """Replace the manifest's entry of a level; not yet on disk."""
        levels = self.manifest["levels"]
        kept = [one for one in levels if one["index"] != entry["index"]] if isinstance(levels, list) else []
        self.manifest["levels"] = [*kept, entry]


@dataclasses.dataclass(slots=True)
class _Level:
    """A level being written: what is pending, what is taken but not on disk, and how many parts are."""

    directory: str
    rows: LevelRows
    written_ns: int
    batches: list[Batch] = dataclasses.field(default_factory=list)
    parts: int = 0
    missing: int = 0  # events the measurer counted and the trace never got: the run's verdict reads it

    def waiting(self) -> int:
        """Bytes taken and not on disk."""
        return sum(batch.requests.nbytes + batch.tokens.nbytes for batch in self.batches)


def _is_old(level: _Level) -> bool:
    return _timing.now_ns() - level.written_ns >= PART_INTERVAL_NS


def create_run(
    output: Path | str, name: str, manifest: dict[str, object], *, save_text: bool = False
) -> RunWriter:
    """Make the run directory `<output>/<UTC>-<name>` (never an existing one) with its manifest, status
    `running`.

    `manifest` gives the keys of MANIFEST_KEYS that the caller knows, without secrets. PlanError if the
    directory cannot be made or `name` is no name for one, TraceError if the disk is full or broken; nothing is left
    then.
    """
    if not name or name != name.strip() or any(c in "/\\\0\n\r" for c in name) or len(name.encode()) > 200:
        raise PlanError(f"--name {name!r}: give a plain name without slashes, at most 200 bytes")
    now_ns = _timing.realtime_ns()
    stem = f"{datetime.fromtimestamp(now_ns // 10**9, UTC):%Y%m%dT%H%M%SZ}-{name}"
    made = _make_directory(Path(output), stem)
    offset_ns, _ = _timing.clock_offset()
    own: dict[str, object] = {
        "schema": SCHEMA_VERSION,
        "definitions": DEFINITIONS_VERSION,
        "run_id": made[0].name,
        "name": name,
        "created_utc": utc_text(now_ns),
        "levels": [],
        "status": "running",
        "supervisor": own_process(),
    }
    writer = RunWriter(made, manifest | own, save_text=save_text, utc_offset_ns=offset_ns)
    try:
        writer.update_manifest()
    except TraceError:
        writer.discard()  # nothing half written is left
        raise
    return writer


def write_part(path: Path, table: pa.Table, layout: dict[str, object]) -> None:
    """Write a Parquet file whole and synced, or not at all. TraceError names the path."""
    temporary = path.with_name(path.name + TEMPORARY)
    try:
        with temporary.open("wb") as file:
            pq.write_table(table, file, **layout)
            file.flush()
            os.fsync(file.fileno())
        _rename(temporary, path)
    except (OSError, pa.ArrowException) as error:
        _remove(temporary)
        raise _cannot_write(path, error) from error


def write_json(path: Path, value: object, *, sync: bool = True) -> None:
    """Replace a JSON file in one step, without secrets; unknown types become text. TraceError names the path."""
    temporary = path.with_name(path.name + TEMPORARY)
    option = (
        orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE
    )
    try:
        with temporary.open("wb") as file:
            file.write(orjson.dumps(hidden(value), option=option, default=str))
            if sync:
                file.flush()
                os.fsync(file.fileno())
        _rename(temporary, path, sync)
    except OSError as error:
        _remove(temporary)
        raise _cannot_write(path, error) from error


def _remove(temporary: Path) -> None:
    with contextlib.suppress(OSError):  # what broke the writing may break this too
        temporary.unlink()


def utc_text(utc_ns: int) -> str:
    """An instant as text, exact to the nanosecond: 2026-11-30T22:18:01.123456789Z."""
    return f"{datetime.fromtimestamp(utc_ns // 10**9, UTC):%Y-%m-%dT%H:%M:%S}.{utc_ns % 10**9:09d}Z"


def _to_rows(requests: pa.Table) -> list[dict[str, object]]:
    """A table as dicts; without the zone, for which Python needs a database that images lack."""
    at = requests.schema.get_field_index("sent_utc")
    plain = requests.set_column(at, "sent_utc", requests["sent_utc"].cast(pa.timestamp("us")))
    rows: list[dict[str, object]] = plain.to_pylist()
    return rows


def _make_directory(output: Path, stem: str) -> list[Path]:
    """Make the run's directory; the directories that were made, the deepest first."""
    parents = [path for path in (output, *output.parents) if not os.path.lexists(path)]
    try:
        output.mkdir(parents=True, exist_ok=True)
        for number in range(1, 1000):
            path = output / (stem if number == 1 else f"{stem}-{number}")
            try:
                path.mkdir()
            except FileExistsError:
                continue
            return [path, *parents]
    except OSError as error:
        _remove_empty(parents)
        kind = TraceError if error.errno in DISK_FAULTS else PlanError
        raise kind(f"--output {output}: cannot make a run directory: {_reason(error)}") from error
    raise PlanError(f"--output {output}: 1000 runs of the same second and name are there already")


def _remove_empty(directories: Sequence[Path]) -> None:
    """Remove directories, the deepest first, up to one that is not empty: another run may have come to stand there."""
    with contextlib.suppress(OSError):
        for directory in directories:
            directory.rmdir()


def _rename(temporary: Path, path: Path, sync: bool = True) -> None:
    """Rename and make the new name itself durable."""
    temporary.replace(path)
    if not sync:
        return
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _cannot_write(path: Path, error: BaseException) -> TraceError:
    return TraceError(f"cannot write {path}: {_reason(error)}")


def _reason(error: BaseException) -> str:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(text.split())
