"""Files of other tools as configurations: one reader a format, found by what is in the file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fastload.trace.formats import aiperf, cordatus, kimi, known, vllm_bench
from fastload.trace.formats.told import Told, read_bytes


@dataclass(frozen=True, slots=True)
class Source:
    """One configuration of a file: the name it has there, what that says of it, and its figures."""

    name: str
    labels: Mapping[str, str]
    told: Told


def _one(read: Callable[[Path], Told]) -> Callable[[Path], tuple[Source, ...]]:
    """Return the reader of a format that has one configuration a file, named as its model, else as the file."""

    def sources(file: Path) -> tuple[Source, ...]:
        told = read(file)
        return (Source((told.model or file.stem).rpartition("/")[2] or file.stem, {}, told),)

    return sources


def _kimi(file: Path) -> tuple[Source, ...]:
    return tuple(Source(kimi.short(name), kimi.labels(name), told) for name, told in kimi.read(file).items())


READERS: Final[Mapping[str, Callable[[Path], tuple[Source, ...]]]] = {
    kimi.TOOL: _kimi,
    vllm_bench.TOOL: _one(vllm_bench.read),
    aiperf.TOOL: _one(aiperf.read),
    cordatus.TOOL: _one(cordatus.read),
}
"""Format -> its reader. The formats that `known` tells apart need no entry of their own to be guessed."""


def read(file: Path, form: str | None = None) -> tuple[Source, ...]:
    """Return the configurations of a file, by the reader of `form` (a key of READERS) or of what is in it.

    PlanError, naming the file, for one that is none of them or is damaged.
    """
    if form is not None:
        return READERS[form](file)
    return _kimi(file) if kimi.recognises(read_bytes(file)) else _one(known.read)(file)
