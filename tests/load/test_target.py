"""The server before the run: URLs, models, keys, readiness, token counts; with fakes and with llama.cpp."""

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from fastload.errors import PlanError, TargetError
from fastload.load.secrets import Secret, read_key
from fastload.load.target import list_models, open_target, parse_url, token_counter
from fastload.plan import build, fit, levels

# path -> (status, body) or a function of (posted body, headers) that gives them
Answer = tuple[int, Any] | Callable[[dict[str, Any], dict[str, str]], tuple[int, Any]]
Routes = dict[str, Answer]


def models(*names: str, owner: str = "someone", **more: object) -> tuple[int, Any]:
    return 200, {"object": "list", "data": [{"id": name, "owned_by": owner, **more} for name in names]}


@contextlib.contextmanager
def fake(routes: Routes) -> Iterator[str]:
    """A server of fixed answers on a free loopback port. `routes` may be changed while it runs."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # head and body in one segment: else each answer waits 40 ms for a delayed ACK

        def answer(self) -> None:
            length = int(self.headers.get("content-length", 0))
            posted = json.loads(self.rfile.read(length)) if length else {}
            found = routes.get(self.path, (404, {"detail": "Not Found"}))
            if callable(found):
                found = found(posted, {name.lower(): value for name, value in self.headers.items()})
            status, body = found
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            if 300 <= status < 400:
                self.send_header("location", "http://elsewhere/")
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = answer

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def look(url: str, model: str | None = None, key: Secret | None = None, wait_s: float | None = None) -> Any:
    said: list[str] = []
    return open_target(url, model, key, {}, wait_s, "chat", said.append)


# ---- URLs ----


@pytest.mark.parametrize(
    ("text", "url", "host", "port"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000", "127.0.0.1", 8000),
        ("http://127.0.0.1:8000/", "http://127.0.0.1:8000", "127.0.0.1", 8000),
        ("http://127.0.0.1:8000/v1", "http://127.0.0.1:8000", "127.0.0.1", 8000),
        (" http://host:8000/v1// ", "http://host:8000", "host", 8000),
        ("http://host", "http://host", "host", 80),
        ("http://host:80/v1", "http://host", "host", 80),
        ("HTTP://Host:81", "http://host:81", "host", 81),
        ("http://host:8000/llm/v1", "http://host:8000/llm", "host", 8000),
        ("http://[::1]:8000/v1", "http://[::1]:8000", "::1", 8000),
        ("http://[fe80::1%eth0]:8000", "http://[fe80::1]:8000", "fe80::1%eth0", 8000),
        ("http://bücher.example", "http://xn--bcher-kva.example", "xn--bcher-kva.example", 80),
    ],
)
def test_urls_taken(text: str, url: str, host: str, port: int) -> None:
    place = parse_url(text)
    assert (place.url, place.host, place.port) == (url, host, port)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "is empty"),
        ("localhost:8000", "give http://localhost:8000"),
        ("127.0.0.1", "has no scheme"),
        ("ftp://host", "'ftp' is not known"),
        ("https://", "has no host"),
        ("http://", "has no host"),
        ("http://:8000", "has no host"),
        ("http://host:", "no number after the colon"),
        ("http://host:abc", "port must be a number"),
        ("http://host:0", "port must be a number"),
        ("http://host:65536", "port must be a number"),
        ("http://host:-1", "port must be a number"),
        ("http://[::1:8000", "IPv6"),
        ("http://ho st:8000", "space"),
        ("http://host\n:8000", "control"),
        ("http://host/?a=1", "without ? and #"),
        ("http://host/v1/chat/completions", "without /chat/completions"),
    ],
)
def test_urls_refused_with_one_line(text: str, word: str) -> None:
    with pytest.raises(PlanError) as caught:
        parse_url(text)
    line = str(caught.value)
    assert line.startswith("--url ") and word in line and "\n" not in line


def test_credentials_in_a_url_are_refused_and_not_repeated() -> None:
    for text in (
        "http://me:hunter2@host:8000",
        "https://hunter2@host",
        "hunter2@host:80",
        "http://a:hunter2@h:x",
    ):
        with pytest.raises(PlanError) as caught:
            parse_url(text)
        assert "hunter2" not in str(caught.value)
    with pytest.raises(PlanError, match="--api-key-file or FASTLOAD_API_KEY"):
        parse_url("http://me:hunter2@host:8000")


# ---- not there, or something else ----


def unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_nobody_listens() -> None:
    port = unused_port()
    with pytest.raises(TargetError, match=rf"^http://127.0.0.1:{port}: nothing listens on port {port}"):
        look(f"http://127.0.0.1:{port}")
    with pytest.raises(TargetError, match="nothing listens"):
        list_models(f"http://127.0.0.1:{port}", None, {})


def test_a_name_that_does_not_resolve() -> None:
    with pytest.raises(
        TargetError, match="^http://nowhere.invalid: the name nowhere.invalid does not resolve"
    ):
        look("http://nowhere.invalid")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((401, {"error": "Unauthorized"}), "wants an API key (HTTP 401); give it by --api-key-file"),
        ((403, b"no"), "wants an API key (HTTP 403)"),
        ((404, {"detail": "Not Found"}), "has no /v1/models (HTTP 404); is --url the root"),
        ((200, b"<html>hello</html>"), "not a model list"),
        ((200, {"data": 7}), "not a model list"),
        ((200, [1]), "not a model list"),
        ((200, {"data": []}), "lists no model yet (--wait-ready 10m"),
        ((307, b""), "redirects to http://elsewhere/; give that"),
        (
            (503, {"error": {"message": "Loading model", "code": 503}}),
            "HTTP 503: Loading model (--wait-ready",
        ),
        ((400, {"detail": "bad\nthing"}), "HTTP 400: bad thing"),
    ],
)
def test_another_kind_of_server(answer: tuple[int, Any], words: str) -> None:
    with fake({"/v1/models": answer}) as url, pytest.raises(TargetError) as caught:
        look(url)
    line = str(caught.value)
    assert line.startswith(url) and words in line and "\n" not in line


def test_a_wrong_key_is_not_repeated() -> None:
    with fake({"/v1/models": (401, b"")}) as url, pytest.raises(TargetError) as caught:
        look(url, key=Secret("hunter2"))
    assert "refuses the API key given" in str(caught.value) and "hunter2" not in str(caught.value)


def test_something_that_does_not_speak_http() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def greet() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection, contextlib.suppress(ConnectionError):
                        connection.sendall(b"220 mail.example ESMTP\r\n")
                        connection.recv(1000)

        threading.Thread(target=greet, daemon=True).start()
        with pytest.raises(TargetError, match="not HTTP or was cut off"):
            look(f"http://127.0.0.1:{listener.getsockname()[1]}")
        listener.shutdown(socket.SHUT_RDWR)


# ---- models ----


def test_the_only_model_is_chosen_and_facts_are_gathered() -> None:
    routes: Routes = {
        "/v1/models": models("m", owner="vllm", max_model_len=4096),
        "/version": (200, {"version": "0.32.0"}),
        "/health": (200, b""),
        "/get_server_info": (200, {"tp_size": 8, "api_key": "hunter2", "version": "0.5.23"}),
        "/tokenize": lambda body, _: (200, {"count": 3}) if "prompt" in body else (400, {}),
    }
    with fake(routes) as url:
        target = look(f"{url}/v1")
    assert (target.url, target.model, target.models, target.simulated) == (url, "m", ("m",), False)
    assert target.request_path("chat") == "/v1/chat/completions" and target.root == ""
    assert target.request_path("completions") == "/v1/completions"
    assert target.address.sockaddr == ("127.0.0.1", target.address.port)
    assert target.facts["version"] == "0.32.0" and target.max_model_len == 4096
    assert target.facts["sglang"] == {"tp_size": 8, "version": "0.5.23"}
    assert target.tokenizer == "vllm" and 0 < target.reach_ms < 1000
    assert "hunter2" not in repr(target)


def test_a_path_before_v1_is_kept() -> None:
    with fake({"/llm/v1/models": models("m")}) as url:
        target = look(f"{url}/llm/v1/")
    assert target.path_prefix == "/llm/v1" and target.root == "/llm" and target.url == f"{url}/llm"


def test_several_models_give_a_list_to_choose_from() -> None:
    with fake({"/v1/models": models("a", "b/c")}) as url:
        with pytest.raises(PlanError, match="has 2 models; choose one by --model: a, b/c$"):
            look(url)
        assert look(url, "b/c").model == "b/c"
        with pytest.raises(PlanError, match="^--model x: .* it has a, b/c$"):
            look(url, "x")
        assert [entry["id"] for entry in list_models(url, None, {})] == ["a", "b/c"]


def test_our_own_engine_is_known_as_simulated() -> None:
    with fake({"/v1/models": models("sim", owner="fastload-sim")}) as url:
        assert look(url).simulated


@pytest.mark.parametrize(
    ("addresses", "words"),
    [
        (["127.0.0.1"], []),
        (
            ["::1", "127.0.0.1"],
            [
                "many.test has 2 addresses: ::1 takes no connection (Connection refused);"
                " 127.0.0.1 is used for the whole run"
            ],
        ),
        (
            ["127.0.0.3", "127.0.0.2", "127.0.0.1", "::1"],
            [
                "many.test has 4 addresses: 127.0.0.3 takes no connection (Connection refused);"
                " 127.0.0.2 takes no connection (Connection refused); 127.0.0.1 is used for the whole run"
            ],
        ),
        (["127.0.0.1", "127.0.0.2"], ["many.test has 2 addresses: 127.0.0.1 is used for the whole run"]),
    ],
)
def test_of_several_addresses_the_first_that_answers_is_used_and_said(
    addresses: list[str], words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    really = socket.getaddrinfo

    def resolve(host: str, port: int, *more: Any, **named: Any) -> list[Any]:
        if host != "many.test":
            return list(really(host, port, *more, **named))
        asked.append(host)
        family = {False: socket.AF_INET, True: socket.AF_INET6}
        return [
            (family[":" in at], socket.SOCK_STREAM, 6, "", (at, port, 0, 0) if ":" in at else (at, port))
            for at in addresses
        ]

    with fake({"/v1/models": models("m")}) as url:
        port = url.rpartition(":")[2]
        monkeypatch.setattr(socket, "getaddrinfo", resolve)
        said: list[str] = []
        target = open_target(f"http://many.test:{port}", None, None, {}, None, "chat", said.append)
    assert said == words and asked == ["many.test"]
    assert (target.address.host, target.address.family) == ("127.0.0.1", socket.AF_INET)
    assert target.host_header == f"many.test:{port}"  # the server is still called by its name


def test_localhost_is_resolved_once_to_an_address_that_answers() -> None:
    with fake({"/v1/models": models("m")}) as url:
        target = look(url.replace("127.0.0.1", "localhost"))
    assert target.address.host == "127.0.0.1"
    assert target.host_header == f"localhost:{target.address.port}"


def test_key_and_headers_are_sent_and_the_environment_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    seen: list[dict[str, str]] = []

    def answer(_: dict[str, Any], headers: dict[str, str]) -> tuple[int, Any]:
        seen.append(headers)
        return models("m")

    with fake({"/v1/models": answer}) as url:
        open_target(url, None, Secret("k"), {"X-Team": "blue"}, None, "chat", print)
        open_target(url, None, Secret("k"), {"authorization": "Basic x"}, None, "chat", print)
    assert seen[0]["authorization"] == "Bearer k" and seen[0]["x-team"] == "blue"
    assert seen[1]["authorization"] == "Basic x"


# ---- waiting ----


def in_turn(*answers: tuple[int, Any]) -> Answer:
    """One answer after another; the last one stays."""
    left = list(answers)
    return lambda body, headers: left.pop(0) if len(left) > 1 else left[0]


def test_waiting_goes_through_health_models_and_one_completion() -> None:
    posted: list[dict[str, Any]] = []
    notices: list[str] = []

    def complete(body: dict[str, Any], _: dict[str, str]) -> tuple[int, Any]:
        posted.append(body)
        if len(posted) == 1:
            return 503, {"error": "warming up"}
        return 200, {"choices": [{}], "usage": {"prompt_tokens": 5}}

    routes: Routes = {
        "/health": in_turn((503, b""), (503, b""), (200, b"")),
        "/v1/models": in_turn((200, {"data": []}), models("other"), models("other", "m")),
        "/v1/chat/completions": complete,
    }
    with fake(routes) as url:
        target = open_target(url, "m", None, {}, 20.0, "chat", notices.append)
    assert target.model == "m" and len(posted) == 2
    assert posted[0]["max_tokens"] == 1 and posted[0]["stream"] is False
    assert [notice.replace(url, "URL") for notice in notices] == [
        "waiting up to 20 s for URL",
        "not yet: URL/health: HTTP 503",
        "URL is up; waiting for its model list",
        "not yet: URL: lists no model yet",
        "not yet: URL: does not list m yet; it has other",
        "model m is listed; asking for one token",
        "not yet: URL/v1/chat/completions: HTTP 503 to a request of one token: warming up",
        "URL is ready",
    ]


def test_waiting_ends_at_its_deadline() -> None:
    with pytest.raises(TargetError, match="not ready after 0.5 s: nothing listens") as caught:
        look(f"http://127.0.0.1:{unused_port()}", wait_s=0.5)
    assert "--wait-ready" not in str(caught.value)
    with (
        fake({"/v1/models": models("a"), "/health": (404, b"")}) as url,
        pytest.raises(PlanError, match="^--model b: .* it has a$"),
    ):
        look(url, "b", wait_s=0.5)


def test_waiting_does_not_cure_a_wrong_key() -> None:
    with fake({"/v1/models": (401, b"")}) as url, pytest.raises(TargetError, match="API key"):
        look(url, wait_s=3600)


# ---- counting ----


def counting(tokenizer: Answer | None, usage: Callable[[str], Any]) -> Routes:
    def complete(body: dict[str, Any], _: dict[str, str]) -> tuple[int, Any]:
        text = body["messages"][0]["content"] if "messages" in body else body["prompt"]
        return 200, {"choices": [{}], "usage": usage(text)}

    routes: Routes = {
        "/v1/models": models("m"),
        "/v1/chat/completions": complete,
        "/v1/completions": complete,
    }
    return routes | ({"/tokenize": tokenizer} if tokenizer else {})


def by_words(text: str) -> dict[str, int]:
    return {"prompt_tokens": len(text.split()) + 9}


def vllm_like(body: dict[str, Any], _: dict[str, str]) -> tuple[int, Any]:
    if "messages" in body:
        assert body["add_generation_prompt"] is True and body["model"] == "m"
        return 200, {"count": len(body["messages"][0]["content"].split()) + 9}
    return (200, {"count": len(body["prompt"].split()) + 9}) if "prompt" in body else (400, {})


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
@pytest.mark.parametrize(
    ("tokenizer", "exact"),
    [
        (vllm_like, True),
        (None, False),
        (lambda body, _: (200, {"count": 4}), False),  # disagrees with usage
        (lambda body, _: (500, {}), False),
    ],
)
def test_a_tokenizer_is_used_only_if_it_agrees_with_usage(
    endpoint: str, tokenizer: Answer | None, exact: bool
) -> None:
    with fake(counting(tokenizer, by_words)) as url:
        count, told_exact = token_counter(look(url), endpoint, None, {})
        assert told_exact is exact
        assert count(["a b", "c", "d e f"] * 5) == [11, 10, 12] * 5
        lengths = fit(count, 40, 1, told_exact)
        assert set(count([lengths.prompt(request) for request in range(20)])) == {40}


def test_a_server_without_usage_counts_nothing() -> None:
    with fake(counting(None, lambda text: None)) as url:
        count, exact = token_counter(look(url), "chat", None, {})
        assert not exact and count(["a", "b"]) == [None, None]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (
            (404, {"error": {"message": "no route"}}),
            "/v1/chat/completions is not there (HTTP 404) (no route)",
        ),
        ((401, {}), "wants an API key"),
        ((400, {"error": {"message": "too long"}}), "HTTP 400 to a request of one token: too long"),
        ((200, {"hello": 1}), "not a completion"),
    ],
)
def test_a_refused_completion_is_one_line(answer: tuple[int, Any], words: str) -> None:
    with fake({"/v1/models": models("m"), "/v1/chat/completions": answer}) as url:
        count, _ = token_counter(look(url), "chat", None, {})
        with pytest.raises(TargetError) as caught:
            count(["a"])
    assert words in str(caught.value) and "\n" not in str(caught.value)


# ---- secrets ----


def test_a_secret_shows_itself_only_when_asked() -> None:
    key = Secret("hunter2")
    assert "hunter2" not in f"{key} {key!r} {key!s} {key:>10} {[key]} {{'k': key}}"
    assert key.reveal() == "hunter2" and key.bearer() == "Bearer hunter2"


def test_where_keys_come_from(tmp_path: Path) -> None:
    import io

    file = tmp_path / "key"
    file.write_text("  from-file\n")
    assert read_key(str(file), {"FASTLOAD_API_KEY": "from-env"}) == Secret("from-file")
    assert read_key(None, {"FASTLOAD_API_KEY": "from-env"}) == Secret("from-env")
    assert read_key("-", {}, io.StringIO("from-stdin\n")) == Secret("from-stdin")
    assert read_key(None, {}) is None and read_key(None, {"FASTLOAD_API_KEY": ""}) is None
    for text in ("", " \n", "two\nlines", "a b", "schlüssel", "nul\0"):
        file.write_text(text)
        with pytest.raises(PlanError, match="^--api-key-file ") as caught:
            read_key(str(file), {})
        assert not text.strip() or text.strip() not in str(caught.value)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(PlanError, match="not a text file"):
        read_key(str(file), {})
    with pytest.raises(PlanError, match="cannot be read"):
        read_key(str(tmp_path / "none"), {})
    with pytest.raises(PlanError, match="cannot be read"):
        read_key(str(tmp_path), {})


# ---- llama.cpp ----


@pytest.mark.parametrize("isl", [32, 128])
@pytest.mark.parametrize("endpoint", ["chat", "completions"])
@pytest.mark.parametrize("by_probing", [False, True])
def test_a_real_server_counts_what_was_planned(
    llama_server: str, endpoint: str, isl: int, by_probing: bool
) -> None:
    target = open_target(llama_server, None, None, {}, None, endpoint, print)
    assert target.tokenizer == "llamacpp" and target.facts["owned_by"] == "llamacpp"
    assert target.max_model_len == 1024 and not target.simulated
    count, exact = token_counter(target, endpoint, None, {})
    assert exact

    def truth(texts: Any) -> list[int | None]:
        """usage.prompt_tokens of real requests with the plan's own kind of body."""
        told = []
        with httpx.Client(base_url=llama_server, trust_env=False) as client:
            for text in texts:
                prompt = (
                    {"messages": [{"role": "user", "content": text}]}
                    if endpoint == "chat"
                    else {"prompt": text}
                )
                answer = client.post(target.request_path(endpoint), json=prompt | {"max_tokens": 1})
                told.append(answer.json()["usage"]["prompt_tokens"])
        return told

    lengths = fit(truth, isl, 99, False) if by_probing else fit(count, isl, 99, True)
    assert lengths.additive and lengths.planned == isl
    plan = build(levels((1,), 1, 1, None, None, 0), target.model, endpoint, 8, lengths)
    prompts = [plan.prompt(request) for request in range(200)]
    assert len(set(prompts)) == 200
    assert set(truth(prompts)) == {isl}
    assert set(count(prompts)) == {isl}


def test_a_real_server_with_a_key(llama_factory: Callable[..., str]) -> None:
    url = llama_factory(api_key="open-sesame")
    with pytest.raises(TargetError, match="wants an API key"):
        open_target(url, None, None, {}, 5.0, "chat", print)
    with pytest.raises(TargetError, match="refuses the API key given"):
        open_target(url, None, Secret("wrong"), {}, 5.0, "chat", print)
    key = Secret("open-sesame")
    target = open_target(url, None, key, {}, 5.0, "chat", print)
    count, exact = token_counter(target, "chat", key, {})
    assert exact and count(["hello world"]) == [17]


def test_our_own_engine_counts_what_was_planned(sim_url: Callable[..., str]) -> None:
    target = open_target(sim_url(), None, None, {}, 10.0, "chat", print)
    assert target.simulated
    count, exact = token_counter(target, "chat", None, {})
    lengths = fit(count, 128, 4, exact)
    assert set(count([lengths.prompt(request) for request in range(30)])) == {128}
