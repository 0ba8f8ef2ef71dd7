"""What a user typed, turned into values: numbers, durations, headers, labels, JSON, keys and where to write.

Everything here is local: no network, and nothing stays on the disk. A mistake is a `PlanError`, one line
that names the flag, the value and what would be right.
"""

from __future__ import annotations

import math
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fastload.cli.argv import HEADER_NAME, protect
from fastload.errors import PlanError

if TYPE_CHECKING:
    from fastload.load.secrets import Secret

# The measurer writes these itself; a second one would break the framing or the stream.
RESERVED_HEADERS = frozenset(
    {
        "connection",
        "content-length",
        "content-type",
        "expect",
        "host",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")


def whole(lowest: int, highest: int | None = None) -> dict[str, Any]:
    """Keyword arguments of a click option that takes a whole number between two ends, both included."""
    right = f"give a whole number from {lowest}" + ("" if highest is None else f" to {highest}")
    most = 2**31 - 1 if highest is None else highest

    def read(flag: str, text: str) -> int:
        if not re.fullmatch(r"[+-]?[0-9]{1,19}", text.strip()):
            raise PlanError(f"{flag} {text!r}: not a whole number; {right}")
        number = int(text)
        if not lowest <= number <= most:
            raise PlanError(f"{flag} {number}: out of range; {right}")
        return number

    return _option("N", read)


def real(lowest: float, highest: float = math.inf, *, above: bool = False) -> dict[str, Any]:
    """Keyword arguments of a click option that takes a finite number; `above`: the lower end itself is
    excluded.
    """
    right = f"give a number {'above' if above else 'from'} {lowest:g}" + (
        f" to {highest:g}" if highest < math.inf else ""
    )

    def read(flag: str, text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise PlanError(f"{flag} {text!r}: not a number; {right}")
        if number > highest or number < lowest or (above and number == lowest):
            raise PlanError(f"{flag} {number:g}: out of range; {right}")
        return number

    return _option("X", read)


def duration() -> dict[str, Any]:
    """Keyword arguments of a click option that takes a span of time (90s, 10m, 2h, 500ms); its value is in
    seconds.
    """

    def read(flag: str, text: str) -> float:
        from fastload.plan import parse_duration

        return parse_duration(text, flag)

    return _option("TIME", read)


def _option(metavar: str, read: Callable[[str, str], object]) -> dict[str, Any]:
    """Let click read a string and `read(flag, text)` make the value: click's own messages do not say what
    is right.
    """

    def callback(_ctx: click.Context, param: click.Parameter, text: str | None) -> object:
        return None if text is None else read(param.opts[0], text)

    return {"metavar": metavar, "callback": callback}


def pairs(flag: str, texts: Iterable[str]) -> dict[str, str]:
    """Return `K=V` texts as a dict in their order; `flag` names the culprit in a PlanError."""
    found: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        key = key.strip()
        if not equals or not key:
            raise PlanError(f"{flag} {_shown(text)}: not of the form K=V, such as {flag} gpu=H200")
        if key in found:
            raise PlanError(f"{flag} {key!r}: given twice; give each name once")
        found[key] = value
    return found


def headers(texts: Iterable[str]) -> dict[str, str]:
    """Return `--header K=V` texts as {name: value}, fit to be sent as they are.

    PlanError for a form that is not K=V, a name or value HTTP does not allow, one given twice, or one we
    write ourselves.
    """
    found: dict[str, str] = {}
    seen: set[str] = set()  # names in lower case: HTTP knows no other
    for text in texts:
        name, equals, value = text.partition("=")
        name, value = name.strip(), value.strip()
        if not equals or not HEADER_NAME.match(name):
            raise PlanError(
                f"--header {_shown(text)}: not of the form NAME=VALUE, such as --header X-Team=search"
            )
        if name.lower() in RESERVED_HEADERS:
            raise PlanError(f"--header {name!r}: written by fastload itself; leave it out")
        if not value.isascii() or not value.isprintable():
            raise PlanError(
                f"--header {name!r}: the value has characters HTTP does not allow; use printable ASCII"
            )
        if name.lower() in seen:
            raise PlanError(f"--header {name!r}: given twice; give each header once")
        seen.add(name.lower())
        found[name] = value
    return found


def _shown(text: str) -> str:
    """Return a mistyped K=V for an error line, cut where a secret could begin: CI logs keep what stderr
    says.
    """
    head = re.split(r"[:=\s]", text, maxsplit=1)[0][:40]
    return repr(text) if head == text else f"'{head}...'"


def json_object(flag: str, text: str | None) -> dict[str, object]:
    """Return the JSON object of a flag, or {} when it was not given; PlanError when it is anything else."""
    if text is None:
        return {}
    import orjson

    cut = text if len(text) <= 60 else text[:57] + "..."
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise PlanError(
            f"{flag} {cut!r}: not JSON ({error.msg} at character {error.pos}); give an object such as "
            f"""{flag} '{{"top_a": 0.5}}'"""
        ) from None
    if not isinstance(value, dict):
        raise PlanError(f"{flag} {cut!r}: not a JSON object; give one such as {flag} '{{\"top_a\": 0.5}}'")
    return value


def api_key(typed: str | None, file: str | None) -> Secret | None:
    """Return the API key from the flag, the file (`-`: standard input) or FASTLOAD_API_KEY, in this order;
    None without one.

    PlanError when two flags name one, a file cannot be read, or the key could not stand in an HTTP header.
    The key itself is never part of a message.
    """
    from fastload.load.secrets import checked_key, read_key

    if typed is not None and file is not None:
        raise PlanError("--api-key and --api-key-file are both given; give one")
    key = checked_key(typed, "--api-key") if typed is not None else read_key(file)
    if key is not None:
        protect([key.reveal()])
    return key


def writable(flag: str, directory: Path) -> Path:
    """Return the directory when it can be written to, or be made; PlanError when not. Leaves nothing behind.

    A file without a name is made in it (or in its nearest ancestor that exists): root is told yes by
    access(2) even on a file system that takes no write.
    """
    if "\0" in str(directory):
        raise PlanError(f"{flag}: a path cannot hold a NUL character")
    place = Path(os.path.abspath(directory))
    while not os.path.lexists(place):
        place = place.parent
    shown = f"{flag} {str(directory)!r}"
    if not place.is_dir():
        what = "is not a directory" if place.exists() else "is a broken link"
        raise PlanError(f"{shown}: {str(place)!r} {what}; name a directory")
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        raise PlanError(
            f"{shown}: cannot be written to: {error.strerror} in {str(place)!r}; "
            "name a directory you may write to"
        ) from None
    return directory


def run_name(name: str | None, default: str) -> str:
    """Return the run's name, checked; without one, `default` made fit for a directory name."""
    if name is None:
        fit = re.sub(r"[^A-Za-z0-9._-]+", "-", default.rsplit("/", 1)[-1]).strip("-._")[:40]
        return fit or "run"
    if not RUN_NAME.match(name):
        raise PlanError(
            f"--name {name!r}: does not fit a directory name; use letters, digits, '.', '_' and '-', "
            "at most 64, beginning with a letter or digit"
        )
    return name


def processor(cpu: int | None) -> int | None:
    """Return --cpu when this process may run there; PlanError naming the CPUs it may use when not."""
    if cpu is None or not hasattr(os, "sched_getaffinity"):
        return cpu
    allowed = sorted(os.sched_getaffinity(0))
    if cpu not in allowed:
        raise PlanError(f"--cpu {cpu}: not a CPU this process may use; choose one of {_ranges(allowed)}")
    return cpu


def _ranges(numbers: Sequence[int]) -> str:
    """Return sorted numbers the way taskset writes them: 0-3,8."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
