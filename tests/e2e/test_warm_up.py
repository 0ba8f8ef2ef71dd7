"""What a person reads about the request that opens a run: done when it was, failed when it was not."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "load"))

from scripted import DONE, LAST_CHUNK, Call, answer, chunk, event, head, serve  # noqa: E402


def whole(body: bytes, *headers: bytes) -> bytes:
    """An answer 200 with a length, and no content type but a given one."""
    lines = [b"HTTP/1.1 200 OK", b"Content-Length: %d" % len(body), *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


ERROR = b'data: {"error": {"message": "engine stopped", "code": 500}}\n\n'
# name -> (an answer, what is said of it)
ENDS = {
    "an error inside the stream": (
        head() + chunk(event("a")) + chunk(ERROR) + chunk(DONE) + LAST_CHUNK,
        "stream_error: engine stopped",
    ),
    "no end": (head() + chunk(event("a")) + LAST_CHUNK, "incomplete: "),
    "JSON": (whole(b'{"text":""}', b"Content-Type: application/json"), 'not_streaming: {"text": ""}'),
    "JSON that says not what it is": (whole(b'{"error":{"message":"no worker"}}'), "not_streaming: no worker"),
    "a page of a proxy": (whole(b"try later\n", b"Content-Type: text/plain"), "not_streaming: try later"),
    "a page that says it is a stream": (
        whole(b"try later\n", b"Content-Type: text/event-stream"),
        "not_streaming: try later",
    ),
    "nothing": (whole(b""), "empty: "),
    "a refusal": (head(b"Content-Length: 21", status=400) + b'{"detail":"no model"}', "http_status: no model"),
}
ORDER = ("sweep", "--model", "m", "--levels", "1", "--num-requests", "1", "--min-requests", "0", "--warmup", "0")


def played(call: Call, said: Callable[[dict[str, Any]], bytes]) -> None:
    """Answer the questions before a run; `said` makes the answer to a request of the run from its body."""
    body = json.loads(call.seen.body or b"{}")
    if call.seen.head.startswith(b"GET"):
        plain(call, {"data": [{"id": "m"}]})
    elif not body.get("stream"):
        words = len(body["messages"][0]["content"].split()) if "messages" in body else 1
        plain(call, {"choices": [], "usage": {"prompt_tokens": words + 3, "completion_tokens": 1}})
    else:
        call.finish(said(body))


def plain(call: Call, value: object) -> None:
    data = json.dumps(value).encode()
    call.finish(head(b"Content-Length: %d" % len(data)) + data)


@pytest.mark.parametrize(("played_back", "why"), ENDS.values(), ids=ENDS)
def test_a_failed_one_is_not_called_done(played_back: bytes, why: str, fastload: Any) -> None:
    with serve(lambda call: played(call, lambda body: played_back)) as server:
        ended = fastload(*ORDER, "--url", f"http://127.0.0.1:{server.port}")
    assert ended.code == 1 and f"the warm-up request failed ({why}" in ended.line
    said_of_it = [line for line in ended.err.splitlines() if line.startswith("warm-up request")]
    assert said_of_it == ["warm-up request", "warm-up request failed"]


def test_each_try_is_told_as_it_went(fastload: Any) -> None:
    """A refused field costs a warm-up request, and the next one is a warm-up request too."""

    def said(body: dict[str, Any]) -> bytes:
        if "stream_options" not in body:
            return answer("one")
        error = b'{"error":{"message":"Unrecognized field: stream_options"}}'
        return head(b"Content-Length: %d" % len(error), status=400) + error

    with serve(lambda call: played(call, said)) as server:
        ended = fastload(*ORDER, "--url", f"http://127.0.0.1:{server.port}")
    assert "Traceback" not in ended.err
    told = [line for line in ended.err.splitlines() if line.startswith(("warm-up request", "level "))]
    assert told[:4] == ["warm-up request", "warm-up request failed", "warm-up request", "warm-up request done"]
    assert told[4].startswith("level 1/1: ")
