"""Keeps secrets out of what is written or said: a server may send a key back, in an error, a header, a URL, a token.

The door names the secrets of this process once (`protect`); every text on its way to a file, a log or a terminal goes
through `hide`. Forms of a secret are hidden too: percent-encoded, in JSON or HTML, in base64 alone or inside a longer
text (`Basic`). Standard library only.
"""

import base64
import binascii
import html
import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final
from urllib.parse import quote, quote_plus, unquote

MASK: Final = "***"
SHORTEST: Final = 4  # what is shorter stands in any text
WORD: Final = 8  # what is shorter than this is hidden as a whole word only: "test" is a key at many a server

_secrets: set[str] = set()
_forms: set[str] = set()
_pattern: re.Pattern[str] | None = None


def protect(secret: str) -> None:
    """Hide this text from now on: a key, a password, or the value of a header that carries one (`Basic dXNl...`)."""
    global _pattern
    _secrets.add(secret)
    for part in _parts(secret.strip()):
        _forms.update(form for form in _written(part) if len(form) >= SHORTEST)
    if _forms:
        longest_first = sorted(_forms, key=lambda form: (-len(form), form))
        _pattern = re.compile("|".join(map(_as_word, longest_first)))


def protected() -> list[str]:
    """What is hidden, for another process that is to hide it too; by pipe, and nowhere else."""
    return sorted(_secrets)


def hide(text: str) -> str:
    """`text` with every secret, in any form, replaced by ***."""
    # One look for each form is quick; the pattern, which tries all at each character, is for what has one.
    if _pattern is None or not any(form in text for form in _forms):
        return text
    return _pattern.sub(MASK, text)


def hide_start(text: str, length: int) -> str:
    """The first `length` characters of `hide(text)`, without reading far beyond; no secret is cut in two."""
    longest = max(map(len, _forms), default=0)
    window = 2 * (length + longest)
    shown = hide(text[:window])
    return (shown[: len(shown) - longest] if len(text) > window else shown)[:length]


def hidden(value: Any) -> Any:
    """A JSON value with all texts in it hidden, keys of objects too."""
    if _pattern is None:
        return value
    if isinstance(value, str):
        return hide(value)
    if isinstance(value, Mapping):
        return {hidden(key): hidden(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [hidden(each) for each in value]
    return value


def clean_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment for a child of ours: without variables that hold a secret."""
    return {name: value for name, value in environment.items() if hide(value) == value}


def _parts(secret: str) -> Iterator[str]:
    """A secret and those inside it: the credentials behind a scheme, a login's password, a cookie's value."""
    yield secret
    scheme, _, rest = secret.partition(" ")
    if rest and scheme.isalpha():
        yield from _parts(rest.strip())
        if scheme.lower() == "basic":
            try:
                login = base64.b64decode(rest, validate=True).decode()
            except (binascii.Error, UnicodeDecodeError):
                return
            yield login
            yield login.partition(":")[2]
    elif "=" in secret.rstrip("="):  # a cookie; the end of a base64 text is none
        yield from (value.strip() for each in secret.split(";") if (value := each.partition("=")[2]))
    elif ":" in secret:
        yield unquote(secret)
        yield secret.partition(":")[2]
        yield unquote(secret.partition(":")[2])


def _written(secret: str) -> Iterator[str]:
    """A secret as it may stand in a text."""
    yield secret
    for escaped in (quote(secret, safe=""), quote(secret), quote_plus(secret)):
        yield escaped
        yield re.sub(r"%[0-9A-F]{2}", lambda found: found[0].lower(), escaped)
    yield json.dumps(secret)[1:-1]
    yield json.dumps(secret)[1:-1].replace("/", "\\/")
    yield html.escape(secret)
    if len(secret) < WORD:  # too little of it is left inside a longer base64 text to be known by
        return
    raw = secret.encode()
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        yield encode(raw).decode().rstrip("=")
        for shift in range(3):  # where in the groups of three bytes of a longer text it begins
            text = encode(bytes(shift) + raw).decode()
            yield text[-(-shift * 8 // 6) : (shift + len(raw)) * 8 // 6]


def _as_word(form: str) -> str:
    escaped = re.escape(form)
    return escaped if len(form) >= WORD else rf"(?<![A-Za-z0-9]){escaped}(?![A-Za-z0-9])"
