"""What stands around the answers of an OpenAI server, so that a whole sweep can be run against a script."""

import json
import threading
from collections.abc import Callable

from scripted import Call, Script, answer, head

Failing = Callable[[Call, int], bool]


def good(call: Call) -> None:
    """Three tokens, a few ms apart in their making, in one segment."""
    call.sleep(0.005)
    call.finish(answer("one", "two", "three"))


def api(fault: Script, failing: Failing, otherwise: Script = good) -> Script:
    """A script that lists a model, counts tokens, and answers streamed requests by `otherwise`, or by `fault` where
    `failing(call, number)`.

    A streamed request has the number of its prompt, 0 being the warm-up of the run: one that is sent again keeps it.
    """
    numbers: dict[bytes, int] = {}
    lock = threading.Lock()

    def script(call: Call) -> None:
        path = call.seen.head.split(b" ", 2)[1]
        asked = json.loads(call.seen.body) if call.seen.body else {}
        if asked.get("stream"):
            with lock:
                number = numbers.setdefault(call.seen.body, len(numbers))
            (fault if failing(call, number) else otherwise)(call)
        elif path == b"/v1/models":
            tell(call, {"object": "list", "data": [{"id": "scripted", "owned_by": "a test", "max_model_len": 100_000}]})
        elif path == b"/tokenize":
            told = asked.get("prompt") or asked["messages"][0]["content"]
            tell(call, {"count": tokens(told), "max_model_len": 100_000})
        elif "messages" in asked:
            usage = {"prompt_tokens": tokens(asked["messages"][0]["content"]), "completion_tokens": 1}
            tell(call, {"choices": [{"index": 0, "message": {"content": "a"}}], "usage": usage})
        else:
            tell(call, {"detail": "Not Found"}, 404)

    return script


def tokens(text: str) -> int:
    """A token a word, and three around them."""
    return len(text.split()) + 3


def tell(call: Call, value: object, status: int = 200) -> None:
    """Answer with JSON, no stream."""
    body = json.dumps(value).encode()
    framing = b"Content-Length: %d" % len(body)
    call.finish(head(framing, status).replace(b"text/event-stream", b"application/json") + body)
