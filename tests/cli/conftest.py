"""What the tests of the door share: running `main` as a user would, and a small faulty server."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from fastload.cli import main


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str


Run = Callable[..., Ended]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command line inside an empty directory, without any key in the environment."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FASTLOAD_API_KEY", raising=False)

    def go(*words: str) -> Ended:
        with pytest.raises(SystemExit) as left:
            main(words)
        told = capfd.readouterr()
        assert isinstance(left.value.code, int)
        return Ended(left.value.code, told.out, told.err)

    return go


@pytest.fixture
def half_server() -> Iterator[str]:
    """A server that lists a model and answers whole completions, but fails every stream with a 500."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if self.path == "/v1/models":
                self.answer(200, {"object": "list", "data": [{"id": "half", "object": "model"}]})
            else:
                self.answer(404, {"error": {"message": "no such path"}})

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if not self.path.endswith("/completions"):
                self.answer(404, {"error": {"message": "no such path"}})
            elif asked.get("stream"):
                self.answer(500, {"error": {"message": "streams are broken"}})
            else:
                prompt = asked.get("prompt") or asked["messages"][0]["content"]
                usage = {"prompt_tokens": len(prompt.split()), "completion_tokens": 1}
                self.answer(200, {"choices": [{"message": {"content": "x"}}], "usage": usage})

        def answer(self, status: int, body: object) -> None:
            text = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *args: object) -> None:
            """Keep stderr for what is tested."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
