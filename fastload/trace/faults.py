"""What a server says when it fails: error bodies and error events in any form seen, redirects.

Pure, and nothing here raises but `parse_json`. A server that fails does not keep to anybody's schema, so each rule
takes whatever has the right shape and ignores the rest.
"""

from __future__ import annotations

import json
import re
from typing import Final

import orjson

from fastload.load.hiding import hide, hide_start
from fastload.load.redirects import shown_location

ERROR_CHARACTERS: Final = 500
_LONGEST_LOOK: Final = 65_536  # of an error body: a page of HTML is cut to 500 characters anyway
# Keys that hold the sentence, the likelier first.
_SAYING: Final = ("message", "detail", "msg", "error", "error_message", "error_msg", "reason", "title")


def read_error(value: object) -> str | None:
    """The message of an error object in any form (object, string, `detail`, flat, in a list); None if it is none."""
    if isinstance(value, list):
        return next((said for each in value if (said := read_error(each)) is not None), None)
    if not isinstance(value, dict):
        return None
    error = value.get("error")
    if error:
        return _message(error if error is not True else {**value, "error": None})
    if value.get("choices"):
        return None
    if value.get("object") == "error" or value.get("type") == "error":
        return _message(value)
    if value.get("detail"):
        return _message(value["detail"])
    if isinstance(value.get("message"), str) and not value.get("usage"):
        codes = (value.get("code"), value.get("status"), value.get("status_code"))
        if any(str(code).isdecimal() and 400 <= int(str(code)) < 600 for code in codes):
            return _message(value)
    return None


def read_named_error(raw: bytes) -> str:
    """The message of an event that is named `error`, whatever its data is."""
    return read_error_body(raw) or "an event named error"


def read_error_body(body: bytes) -> str | None:
    """The message of a body that is no stream, as JSON in any form or as plain text; None if it is empty.

    An error may also come dressed as an event stream: then it is that of the first data line.
    """
    body = body.strip()
    if re.match(rb"(event|data|id|retry)?:", body):
        body = next((line[5:].strip() for line in body.splitlines() if line.startswith(b"data:")), body)
    try:
        value = parse_json(body)
    except ValueError:
        value = None
    message = read_error(value)
    if message is None and isinstance(value, dict | list) and value:
        message = _message(value)
    if message is None and isinstance(value, str):
        message = value
    text = message if message is not None else body[:_LONGEST_LOOK].decode("utf-8", "replace")
    return cut(text.strip()) or None


def read_location(headers: dict[str, str]) -> str | None:
    """Where a redirect leads, without what may be secret in it."""
    return cut(shown_location(headers.get("location", ""))) or None


def parse_json(raw: bytes) -> object:
    """The value of a JSON text. Takes what real servers write and orjson refuses; ValueError if it is none.

    Python's `json` on the server's side writes NaN (in logprobs) and lone surrogates (an emoji cut between two
    tokens); bytes that are not UTF-8 are replaced, as the SSE specification says.
    """
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError:
        pass
    try:
        return json.loads(raw.decode("utf-8", "replace"))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def cut(text: str) -> str:
    """`text` as it may stand in a column: without our secrets and lone surrogates, at most 500 characters."""
    return _encodable(hide_start(text, ERROR_CHARACTERS))


def clean(text: str) -> str:
    """`text` without our secrets, should the server say them, and without lone surrogates."""
    return _encodable(hide(text))


def _encodable(text: str) -> str:
    """`text` without lone surrogates, which no UTF-8 column can hold."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def _message(error: object) -> str:
    """The sentence in an error of any form; the JSON itself where no key holds one."""
    if isinstance(error, str):
        return error
    if isinstance(error, list) and error and all(isinstance(each, dict) for each in error):
        return "; ".join(_message(each) for each in error[:5])
    if isinstance(error, dict):
        for key in _SAYING:
            said = error.get(key)
            if isinstance(said, str) and said:
                return f"{_place(error, said)}{said}"
            if isinstance(said, dict) and said and key in ("error", "detail"):
                return _message(said)
    return json.dumps(error, ensure_ascii=False, default=str)


def _place(error: dict[object, object], said: str) -> str:
    """The field that an error is about, where the sentence does not name it: FastAPI's `loc`, OpenAI's `param`."""
    where = error.get("loc", error.get("param"))
    if isinstance(where, list):
        where = ".".join(str(part) for part in where)
    return f"{where}: " if isinstance(where, str) and where and where not in said else ""
