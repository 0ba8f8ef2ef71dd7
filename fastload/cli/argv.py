"""The words of a command line, and what is secret in them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

KEY_VARIABLE = "FASTLOAD_API_KEY"
# RFC 9110 section 5.6.2: what a header name may be made of.
HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+\Z")
# A header whose name says one of these carries a secret: its value is never written anywhere.
SECRET_NAME = re.compile(r"auth|key|token|secret|cookie|passw|credential|signature", re.IGNORECASE)
# The login of a URL, typed with or without a scheme; to the last @, for a password may hold one, and a slash.
URL_LOGIN = re.compile(r"(?:(?<=://)|^(?![a-z]+://))\S+(?=@)", re.IGNORECASE)
SECRET_FLAGS = ("--api-key", "--header", "--url", "--base-url", "--proxy")
MASK = "***"


def protect(secrets: Iterable[str]) -> None:
    """Keep these texts out of everything that is said or written from now on, memory images included."""
    for secret in secrets:
        import resource  # here, for --help needs none of it

        from fastload.load import hiding

        hiding.protect(secret)
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def secrets_in(arguments: Sequence[str]) -> list[str]:
    """Return what is secret in a command line: keys, secret headers, logins in URLs."""
    found = [_secret(flag, value) for _, flag, value in _values(arguments)]
    return [secret for secret in found if secret.strip()]


def masked(arguments: Sequence[str]) -> list[str]:
    """Return the command line for the manifest: keys, secret headers and logins in URLs replaced by `***`."""
    return [
        head + (value.replace(secret, MASK) if (secret := _secret(flag, value)) else value)
        for head, flag, value in _values(arguments)
    ]


def _values(arguments: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Yield each word as (what stands before its value, the flag, the value); the flag is "" for what is no value."""
    flag = ""  # the flag whose value the next word is
    for word in arguments:
        name, equals, value = word.partition("=")
        if flag:
            yield "", flag, word
        elif name in SECRET_FLAGS and equals:
            yield f"{name}=", name, value
        else:
            yield "", "", word
        flag = word if word in SECRET_FLAGS and not flag else ""


def _secret(flag: str, value: str) -> str:
    """Return the part of a flag's value that is secret, "" for none."""
    if flag == "--api-key":
        return value
    if flag == "--header":
        name, _, rest = value.partition("=")
        if HEADER_NAME.match(name.strip()):
            return rest if SECRET_NAME.search(name) else ""
        return re.split(r"[:=\s]", value, maxsplit=1)[-1]  # mistyped: what stands behind the name
    login = URL_LOGIN.search(value) if flag or "://" in value else None
    return login[0] if login else ""
