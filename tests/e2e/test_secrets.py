"""The API key goes to the server and nowhere else, even when the server says it back."""

from __future__ import annotations

import base64
import html
import json
import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

KEY = "sk-e2e/4f1d0c2b+9a8e7d="
LOGIN = "joe:pass-4f1d0c2b/9a"
SHORT = ["--levels", "1,4", "--num-requests", "24", "--isl", "16", "--osl", "8"]


def b64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def forms(secret: str) -> list[str]:
    """A secret as it may be written."""
    return [secret, quote(secret, safe=""), quote(secret, safe="").lower(), b64(secret).rstrip("="), secret[:12]]


def leaks(secret: str, *texts: str | bytes) -> list[str]:
    """The forms of a secret that stand in a text."""
    plain = [text if isinstance(text, str) else text.decode("utf-8", "replace") for text in texts]
    return [form for form in forms(secret) for text in plain if form in text]


def everything(cwd: Path) -> list[str | bytes]:
    """Names and bytes of all files below, and the values in Parquet, which packs its pages."""
    import pyarrow.parquet as pq

    found: list[str | bytes] = []
    for path in cwd.rglob("*"):
        found.append(path.name)
        if path.suffix == ".parquet":
            found.append(str(pq.read_table(path, partitioning=None).to_pylist()))
        if path.is_file():
            found.append(path.read_bytes())
    return found


def told_of(pid: int) -> tuple[bytes, bytes]:
    """(command line, environment) of a process."""
    return Path(f"/proc/{pid}/cmdline").read_bytes(), Path(f"/proc/{pid}/environ").read_bytes()


class Echo(BaseHTTPRequestHandler):
    """Says the Authorization it was given back: in the model list, then in each request in another way."""

    protocol_version = "HTTP/1.1"
    count = 0
    lock = threading.Lock()

    @property
    def credential(self) -> str:
        return self.headers["authorization"].partition(" ")[2]

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            model = {"id": "m", "object": "model", "meta": {"n_ctx": 4096, "owner": self.credential}}
            self.answer(200, json.dumps({"object": "list", "data": [model]}), server=f"echo {self.credential}")
        else:
            self.answer(404, json.dumps({"error": {"message": f"not for {self.credential}"}}))

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if not asked.get("stream"):
            text = asked.get("prompt") or asked["messages"][0]["content"]
            usage = {"prompt_tokens": len(str(text).split()), "completion_tokens": 1}
            self.answer(200, json.dumps({"choices": [{"message": {"content": "x"}}], "usage": usage}))
            return
        with Echo.lock:
            number, Echo.count = Echo.count, Echo.count + 1
        key = self.credential
        ways: list[Callable[[], None]] = [
            lambda: self.stream(key[:5], key[5:]),
            lambda: self.answer(500, json.dumps({"error": {"message": f"Incorrect API key provided: {key}"}})),
            lambda: self.answer(500, f"bad header Authorization: Bearer {quote(key, safe='')}", "text/plain"),
            lambda: self.answer(503, f"<p>{'x' * 485}{html.escape(key)}</p>", "text/html"),
            lambda: self.answer(500, json.dumps({"detail": b64(f"user:{key}")})),
            lambda: self.answer(302, "", location=f"http://other/{key}?key={key}"),
            lambda: self.answer(500, "{}", reason=f"no {key}"),
            lambda: self.stream("a", error=f"{key} is blocked"),
            lambda: self.stream("a", error=b64(key)),
            lambda: self.answer(500, json.dumps({"error": {"message": "x"}}), **{"x-request-id": key}),
            lambda: self.stream("a", finish=key),
            lambda: self.stream("a", answer_id=key),
        ]
        ways[number % len(ways)]()

    def stream(self, *texts: str, error: str | None = None, finish: str = "stop", answer_id: str = "id") -> None:
        events: list[Any] = [
            {"id": answer_id, "choices": [{"index": 0, "delta": {"content": text}}]} for text in texts
        ]
        if error is not None:
            events.append({"error": {"message": error}})
        else:
            counts = {"prompt_tokens": 16, "completion_tokens": len(texts)}
            events.append({"choices": [{"index": 0, "delta": {}, "finish_reason": finish}], "usage": counts})
        body = "".join(f"data: {json.dumps(each)}\n\n" for each in events) + "data: [DONE]\n\n"
        self.answer(200, body, "text/event-stream")

    def answer(self, status: int, body: str, kind: str = "application/json", reason: str = "", **fields: str) -> None:
        raw = body.encode()
        self.send_response(status, reason or None)
        for name, value in {"content-type": kind, "content-length": str(len(raw)), **fields}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, format: str, *args: object) -> None:
        """Keep stderr for what is tested."""


@pytest.fixture
def echo() -> Iterator[str]:
    """The URL of a server that says back what it was told in confidence."""
    Echo.count = 0
    with ThreadingHTTPServer(("127.0.0.1", 0), Echo) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("how", ["environment", "file", "standard input", "command line", "header", "Basic header"])
def test_a_server_that_says_the_key_back(
    how: str, echo: str, start: Any, children: Any, until: Any, tmp_path: Path, the_run: Any
) -> None:
    """In errors, headers, URLs, tokens and ids, plain, encoded or cut: nothing of it is said or kept by us."""
    words: list[str] = []
    env = {"OPENAI_API_KEY": KEY, "KEEP": "kept"}
    cwd, stdin = tmp_path / "cwd", tmp_path / "stdin"
    cwd.mkdir()
    stdin.write_text(f"{KEY}\n" if how == "standard input" else "")
    match how:
        case "environment":
            env["FASTLOAD_API_KEY"] = KEY
        case "file":
            (tmp_path / "key").write_text(f"{KEY}\n")
            words = ["--api-key-file", str(tmp_path / "key")]
        case "standard input":
            words = ["--api-key-file", "-"]
        case "command line":
            words = ["--api-key", KEY]
        case "header":
            words = ["--header", f"Authorization=Bearer {KEY}"]
        case "Basic header":
            words = ["--header", f"Authorization=Basic {b64(LOGIN)}"]
    typed = how in ("command line", "header", "Basic header")
    options = ["--save-text", "--max-failures", "1000", "--label", f"note={KEY}"]
    with stdin.open() as given:
        process = start("sweep", "--url", echo, *SHORT, *options, *words, env=env, stdin=given, cwd=cwd)
    until(lambda: any("measurer" in line for line in children(process.pid).values()))
    (measurer,) = children(process.pid)
    command, environment = told_of(measurer)
    own, _ = told_of(process.pid)
    out, err = process.communicate(timeout=50)
    assert process.returncode in (0, 1) and "Traceback" not in err, err

    secrets = [b64(LOGIN), LOGIN, LOGIN.partition(":")[2]] if how == "Basic header" else [KEY]
    run = the_run(cwd / "results")
    rows = run.requests().to_pylist()
    assert len(rows) > 40 and len({row["status"] for row in rows}) >= 4
    masked = [row for row in rows if "***" in str(row)]
    assert len(masked) > 12  # it was said, and it was masked
    for secret in secrets:
        assert leaks(secret, out, err) == []
        assert leaks(secret, *everything(cwd)) == []
        assert leaks(secret, command, environment) == []
        if not typed:
            # the label is typed on purpose, and the one place where a key stands
            assert leaks(secret, own.replace(f"note={KEY}".encode(), b"")) == []
    assert b"KEEP=kept" in environment
    assert ("warning: others on this machine can see" in err) is typed
    assert run.manifest["target"]["labels"] == {"note": KEY if how == "Basic header" else "***"}
    facts = json.dumps(run.manifest["target"]["facts"])
    assert "***" in facts


def test_the_key_is_in_no_file_and_no_command_line_of_a_real_server(
    start: Any, llama_factory: Any, children: Any, until: Any, tmp_path: Path, the_run: Any
) -> None:
    url = llama_factory(api_key=KEY)
    words = ["--levels", "1,4", "--duration", "1s", "--isl", "32", "--osl", "32", "--save-text"]
    process = start("sweep", "--url", url, *words, env={"FASTLOAD_API_KEY": KEY})
    until(lambda: list(tmp_path.glob("results/*/requests/00-c1")))
    told = [text for pid in children(process.pid) for text in told_of(pid)] + [told_of(process.pid)[0]]
    out, err = process.communicate(timeout=50)
    assert process.returncode in (0, 1), err  # 1: a busy machine may spoil the load, not the secret
    assert leaks(KEY, out, err, *told, *everything(tmp_path)) == []
    run = the_run(tmp_path / "results")
    assert {row["status"] for row in run.requests().to_pylist() if row["role"] == "measured"} <= {"ok", "cancelled"}
    assert "ok" in run.requests()["status"].to_pylist()


def test_a_typed_key_is_masked_in_the_manifest(fastload: Any, quick: str, tmp_path: Path, the_run: Any) -> None:
    words = ["--levels", "1", "--num-requests", "2", "--osl", "4", "--header", f"X-Secret={LOGIN}"]
    ended = fastload("sweep", "--url", quick, *words, "--api-key", KEY)
    assert ended.ran
    assert "warning: others on this machine can see --api-key, --header X-Secret in the process list" in ended.err
    assert leaks(KEY, ended.out, ended.err, *everything(tmp_path)) == []
    assert leaks(LOGIN, ended.out, ended.err, *everything(tmp_path)) == []
    run = the_run(tmp_path / "results")
    assert "***" in run.manifest["command"] and run.manifest["target"]["headers"] == ["X-Secret"]


def test_the_embedded_engine_does_not_inherit_the_key(
    start: Any, children: Any, until: Any, interrupt: Any, tmp_path: Path
) -> None:
    process = start("sweep", "--levels", "1", "--duration", "30s", "--quiet", env={"FASTLOAD_API_KEY": KEY})
    until(lambda: list(tmp_path.glob("results/*/requests/00-c1")))
    below = children(process.pid)
    assert len(below) == 2  # the engine and the measurer
    assert leaks(KEY, *(text for pid in below for text in told_of(pid))) == []
    interrupt(process)
    process.communicate(timeout=20)


@pytest.mark.parametrize(
    "words",
    [
        ["sweep", "--url", f"http://{LOGIN}@127.0.0.1:9"],
        ["sweep", "--url", f"{LOGIN}@127.0.0.1:9"],
        ["sweep", "--url", f"http://127.0.0.1:9/v1?key={quote(KEY, safe='')}", "--api-key", KEY],
        ["models", "--url", f"http://{quote(LOGIN, safe=':')}@127.0.0.1:9", "--ca-file", "ca.pem"],
        ["sweep", "--url", "http://127.0.0.1:9", "--proxy", f"http://{LOGIN.replace('/', '-')}@127.0.0.1:9"],
        ["sweep", "--api-key-file", KEY.replace("/", "-")],
        ["sweep", "--api-key", f"{KEY} {KEY}"],
        ["sweep", "--header", f"Authorization: Bearer {KEY}"],
        ["sweep", "--header", f"Authorization=Bearer\t{KEY}\x01"],
        ["sweep", "--api-key", KEY, KEY],
    ],
    ids=lambda words: " ".join(words)[:30],
)
def test_a_mistake_does_not_show_it(words: list[str], fastload: Any, tmp_path: Path) -> None:
    ended = fastload(*words)
    assert ended.code in (1, 2) and "Traceback" not in ended.err
    for secret in (KEY, KEY.replace("/", "-"), LOGIN.partition(":")[2], LOGIN.replace("/", "-").partition(":")[2]):
        assert leaks(secret, ended.out, ended.err) == []
    assert re.match(r"fastload: ", ended.err) and list(tmp_path.iterdir()) == []


def test_a_key_for_another_service_is_not_sent(fastload: Any, llama_factory: Any) -> None:
    url = llama_factory(api_key=KEY)
    ended = fastload("sweep", "--url", url, env={"OPENAI_API_KEY": KEY})
    assert ended.code == 1 and "OPENAI_API_KEY is OpenAI's, and not sent to others" in ended.line
    assert leaks(KEY, ended.err) == []
