"""The levels of a sweep: how many requests at once, how many of them, or for how long."""

from collections.abc import Iterable
from dataclasses import dataclass

from fastload.errors import PlanError

# One client address has 65535 ports toward one server, and each request in flight holds one.
LARGEST_LEVEL = 65_535
_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


@dataclass(frozen=True, slots=True)
class Level:
    """One load of a sweep: `concurrency` requests kept in flight.

    It ends after `measured` requests, or after `duration_s` seconds; with both, at whichever comes first.
    `warmup` is the number of requests sent before the first measured one, without draining between.
    """

    index: int
    concurrency: int
    measured: int | None
    duration_s: float | None
    warmup: int

    @property
    def dir_name(self) -> str:
        """Name of the level's directory in a run: `03-c8`."""
        return f"{self.index:02d}-c{self.concurrency}"


def parse_levels(text: str) -> tuple[int, ...]:
    """Concurrencies from a comma list: "1,2,4" -> (1, 2, 4), in the order given. Raises PlanError."""
    right = "give whole numbers from 1 separated by commas, such as 1,2,4,8"
    parsed: list[int] = []
    for part in text.split(","):
        word = part.strip()
        if not word:
            raise PlanError(f"--levels {_shown(text)}: empty entry; {right}")
        if not (word.isascii() and word.isdigit()):
            raise PlanError(f"--levels {_shown(text)}: {word[:40]!r} is not a whole number; {right}")
        digits = word.lstrip("0")
        if not digits:
            raise PlanError(f"--levels {_shown(text)}: a level of 0 sends nothing; {right}")
        if len(digits) > 6 or int(digits) > LARGEST_LEVEL:
            raise PlanError(
                f"--levels {_shown(text)}: {digits[:12]} is more requests at once than an address has ports; "
                f"the largest level is {LARGEST_LEVEL}"
            )
        level = int(digits)
        if level in parsed:
            raise PlanError(f"--levels {_shown(text)}: {level} is given twice; each level is measured once")
        parsed.append(level)
    return tuple(parsed)


def _shown(text: str) -> str:
    short = text if len(text) <= 60 else text[:57] + "..."
    return short if short and short.isprintable() and " " not in short else repr(short)


def levels(
    concurrencies: Iterable[int],
    rounds: int,
    min_requests: int,
    num_requests: int | None,
    duration_s: float | None,
    warmup: int,
) -> tuple[Level, ...]:
    """Levels with their requests: `num_requests` each if given, else max(rounds x level, min_requests).

    With `duration_s` and no `num_requests` a level has no planned number (`measured` is None) and ends by
    time. Raises PlanError for numbers out of range.
    """
    if rounds < 0:
        raise PlanError(f"--rounds {rounds}: a number of rounds is 0 or more")
    if min_requests < 0:
        raise PlanError(f"--min-requests {min_requests}: a number of requests is 0 or more")
    if num_requests is not None and num_requests < 1:
        raise PlanError(f"--num-requests {num_requests}: at least 1 request must be measured")
    if duration_s is not None and not 0 < duration_s < float("inf"):
        raise PlanError(f"--duration {duration_s}: a level must last longer than 0 s")
    if warmup < 0:
        raise PlanError(f"--warmup {warmup}: a number of requests is 0 or more")
    made = []
    for index, concurrency in enumerate(concurrencies):
        measured = num_requests
        if measured is None and duration_s is None:
            measured = max(rounds * concurrency, min_requests)
            if measured == 0:
                raise PlanError(
                    "--rounds 0 --min-requests 0: no request would be measured; give --rounds 10, say"
                )
        made.append(Level(index, concurrency, measured, duration_s, warmup))
    if not made:
        raise PlanError("--levels: no level given; give whole numbers from 1, such as 1,2,4,8")
    return tuple(made)


def parse_duration(text: str, flag: str = "--duration") -> float:
    """Seconds from "90s", "10m", "2h", "500ms", "1h30m" or a bare number. Raises PlanError naming `flag`."""
    wrong = PlanError(
        f"{flag} {_shown(text)}: not a length of time; give 500ms, 90s, 10m or 2h (a bare number is seconds)"
    )
    word = text.strip().lower()
    seconds = 0.0
    last_unit_s = float("inf")
    at = 0
    while at < len(word) or at == 0:
        begin = at
        while at < len(word) and word[at] in "0123456789.":
            at += 1
        number = word[begin:at]
        begin = at
        while at < len(word) and word[at].isalpha():
            at += 1
        unit = word[begin:at]
        if not unit and number == word:
            unit = "s"
        try:
            value = float(number)
        except ValueError:
            raise wrong from None
        unit_s = _UNITS_S.get(unit)
        if unit_s is None or unit_s >= last_unit_s:  # units fall: 1h30m, never 30m1h
            raise wrong
        last_unit_s = unit_s
        seconds += value * unit_s
    if not 0 < seconds < 10 * 365 * 86400:
        raise wrong
    return seconds
