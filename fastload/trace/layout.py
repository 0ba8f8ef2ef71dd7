"""Where things stand in a run directory, as names: levels in their order, parts in theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from fastload.errors import TraceError

KINDS: Final = ("requests", "tokens")
WARMUP_INDEX: Final = -1


def level_dir(index: int, concurrency: int) -> str:
    """The directory of a level under requests/ and tokens/: `03-c8`; `warmup` for index -1, `warmup-2` for -2."""
    if index >= 0:
        return f"{index:02d}-c{concurrency}"
    return "warmup" if index == WARMUP_INDEX else f"warmup-{-index}"


def part_name(number: int) -> str:
    """The file name of a part."""
    return f"part-{number:03d}.parquet"


def level_dirs(directory: Path) -> tuple[str, ...]:
    """The warm-ups of a run first, then the levels by their number. TraceError if it cannot be read."""
    try:
        names = [one.name for one in (directory / "requests").iterdir() if one.is_dir()]
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise TraceError(f"cannot read {directory / 'requests'}: {error.strerror}") from error
    return tuple(sorted(names, key=lambda name: (not name.startswith("warmup"), number_of(name), name)))


def parts(directory: Path, level: str) -> list[str]:
    """The parts of a level in order: those with requests, since these are renamed last."""
    return sorted(part_names(directory / "requests" / level), key=lambda name: (number_of(name), name))


def part_names(folder: Path) -> set[str]:
    """The parts in a folder."""
    return {one.name for one in folder.glob("part-*.parquet")}


def number_of(name: str) -> int:
    """The number in `03-c8` or `part-012.parquet`, so that 100 comes after 99; -1 without one."""
    digits = "".join(
        c for c in name.partition(".")[0].removeprefix("part-").partition("-c")[0] if c.isdigit()
    )
    return int(digits) if digits else -1
