"""The head of an answer, and how long its server asks to be left alone (Retry-After, in any form seen).

Standard library only, for the measurer imports it.
"""

import re
from datetime import UTC
from email.utils import parsedate_to_datetime


def read_retry_after_s(headers: dict[str, str], answered_utc_s: float | None = None) -> float | None:
    """Seconds to wait: `retry-after-ms`, `retry-after` as seconds, or as a date less the head's own.

    `headers` has names in lower case. `answered_utc_s` stands in for a head without a date. A gateway (LiteLLM) keeps
    its upstream's under another name.
    """
    for name, scale in (("retry-after-ms", 1000.0), ("retry-after", 1.0), ("llm_provider-retry-after", 1.0)):
        text = headers.get(name, "")
        if re.fullmatch(r"[0-9]{1,12}(\.[0-9]{0,6})?", text):
            return float(text) / scale
    until = _utc_s(headers.get("retry-after"))
    since = _utc_s(headers.get("date"))
    since = answered_utc_s if since is None else since
    return None if until is None or since is None else max(0.0, until - since)


def read_head(raw: bytes) -> dict[str, str]:
    """The header fields of a raw answer head, names in lower case; the last of a repeated name, "" for the status line.

    A head with 1xx answers before it is read from its last status line.
    """
    headers: dict[str, str] = {}
    for line in raw.decode("latin-1").split("\n"):
        if line.startswith("HTTP/"):
            headers = {"": line.rstrip("\r")}
            continue
        name, colon, value = line.partition(":")
        if colon:
            headers[name.strip().lower()] = value.strip()
    return headers


def _utc_s(date: str | None) -> float | None:
    """An HTTP date in seconds of UTC; None where it is none. One without a zone is UTC, as HTTP has it."""
    try:
        read = parsedate_to_datetime(date or "")
        return (read if read.tzinfo else read.replace(tzinfo=UTC)).timestamp()
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
