"""Secrets: an API key that cannot be printed, logged or written by accident."""

import os
import sys
from collections.abc import Mapping
from typing import TextIO

from fastload.errors import PlanError

KEY_VARIABLE = "FASTLOAD_API_KEY"
_LONGEST_KEY = 16_384


class Secret:
    """Holds a key; its repr, str and format are "***". `reveal()` is the only way to the text.

    It can be pickled, since it travels to the measurer by pipe; nothing else may serialise it.
    """

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        """The key itself: for the header that is sent, and nowhere else."""
        return self._text

    def bearer(self) -> str:
        """Value of the Authorization header."""
        return f"Bearer {self._text}"

    def __repr__(self) -> str:
        return "***"

    def __str__(self) -> str:
        return "***"

    def __format__(self, spec: str) -> str:
        return format("***", spec)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and other._text == self._text

    def __hash__(self) -> int:
        return hash(("Secret", self._text))


def read_key(
    key_file: str | None, environment: Mapping[str, str] | None = None, stdin: TextIO | None = None
) -> Secret | None:
    """The API key from `--api-key-file` (`-` is standard input), else from FASTLOAD_API_KEY, else None.

    Raises PlanError, which never shows what was read.
    """
    if key_file is not None:
        if key_file == "-":
            return checked_key((stdin or sys.stdin).read(_LONGEST_KEY), "--api-key-file -")
        try:
            with open(key_file, encoding="utf-8") as file:
                text = file.read(_LONGEST_KEY)
        except UnicodeDecodeError:
            raise PlanError(f"--api-key-file {key_file}: not a text file; put the key alone in it") from None
        except OSError as error:
            # A long name without slash and dot may be the key itself, given to the wrong flag.
            is_name = "/" in key_file or "." in key_file or len(key_file) < 16
            shown = key_file if is_name else "(not shown, for it may be the key itself)"
            raise PlanError(f"--api-key-file {shown}: cannot be read: {error.strerror or error}") from None
        return checked_key(text, f"--api-key-file {key_file}")
    text = (os.environ if environment is None else environment).get(KEY_VARIABLE, "")
    return checked_key(text, KEY_VARIABLE) if text else None


def checked_key(text: str, source: str) -> Secret:
    """A key that can stand in a header: one line of visible ASCII. `source` names where it came from."""
    key = text.strip()
    if not key:
        raise PlanError(f"{source}: is empty; it should hold the API key")
    if not (key.isascii() and key.isprintable() and " " not in key):
        raise PlanError(f"{source}: an API key is one line of visible ASCII characters without spaces")
    return Secret(key)
