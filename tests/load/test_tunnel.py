"""The way through a proxy: only when asked for, only by CONNECT, and the login seen by the proxy alone."""

import base64

import pytest
from authority import Authority
from relay import proxy
from scripted import Call, serve

from fastload.errors import PlanError, TargetError
from fastload.load.target import list_models
from fastload.load.target_address import Way, parse_proxy, parse_url
from fastload.load.tls import TlsOptions
from fastload.load.tunnel import tunnel_refusal


def models(call: Call) -> None:
    body = b'{"object":"list","data":[{"id":"m","object":"model"}]}'
    call.finish(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body)


@pytest.mark.parametrize("secure", [False, True], ids=["http", "https"])
def test_questions_go_through_the_tunnel(secure: bool, tmp_path: object) -> None:
    authority = Authority(tmp_path)  # type: ignore[arg-type]
    tls = authority.server() if secure else None
    options = TlsOptions(str(authority.ca_file)) if secure else TlsOptions()
    with serve(models, tls=tls) as server, proxy() as between:
        way = Way(options, parse_proxy(f"http://ann:p%40ss@127.0.0.1:{between.port}"))
        url = f"http{'s' * secure}://localhost:{server.port}"
        assert [one["id"] for one in list_models(url, None, {"X-Own": "1"}, way)] == ["m"]
        word = base64.b64encode(b"ann:p@ss").decode()
        first, *rest = between.heads[0].splitlines()
        assert first == f"CONNECT localhost:{server.port} HTTP/1.1"
        assert f"Proxy-Authorization: Basic {word}" in rest and "X-Own" not in between.heads[0]
        head = server.requests[0].head.decode()
        assert head.startswith("GET /v1/models HTTP/1.1") and "Proxy-Authorization" not in head and "X-Own" in head


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n", r"the proxy refuses the tunnel \(407 Proxy Auth"),
        (b"SSH-2.0-x\r\n\r\n", r"the proxy refuses the tunnel \(SSH-2.0-x\)"),
        (b"HTTP/1.1 20", "the proxy gave no answer to CONNECT that is HTTP"),
    ],
)
def test_a_proxy_that_makes_no_tunnel_is_named(answer: bytes, said: str) -> None:
    with proxy(answer) as between, pytest.raises(TargetError, match=f"{said}.*check --proxy") as told:
        list_models("http://localhost:9", None, {}, Way(proxy=parse_proxy(f"http://127.0.0.1:{between.port}")))
    assert "\n" not in str(told.value)


def test_a_proxy_that_is_not_there_is_named() -> None:
    with pytest.raises(TargetError, match="nothing listens on port 9 .*start the proxy or correct --proxy"):
        list_models("http://localhost:8", None, {}, Way(proxy=parse_proxy("http://127.0.0.1:9")))


@pytest.mark.parametrize(
    "text", ["", "proxy:3128", "socks5://proxy:1080", "https://proxy:3128", "http://", "http://p:x", "http://p/path"]
)
def test_addresses_that_are_no_proxy(text: str) -> None:
    with pytest.raises(PlanError, match="^--proxy .*give it like http://proxy.example:3128|a proxy has no path"):
        parse_proxy(text)


def test_a_login_is_not_shown() -> None:
    with pytest.raises(PlanError) as told:
        parse_proxy("socks5://ann:secret@proxy:1080")
    assert "secret" not in str(told.value) and "secret" not in repr(parse_proxy("http://ann:secret@proxy:1"))


def test_a_tunnel_to_an_ipv6_address_and_to_the_default_ports() -> None:
    to = parse_proxy("http://proxy:3128").tunnel_to
    six = to(parse_url("http://[::1]:8000/v1")).reveal()
    assert six.startswith("CONNECT [::1]:8000 HTTP/1.1\r\nHost: [::1]:8000\r\n")
    assert to(parse_url("https://host")).reveal().startswith("CONNECT host:443 HTTP/1.1\r\n")


def test_any_2xx_is_a_tunnel() -> None:
    assert tunnel_refusal(b"HTTP/1.0 204 Fine\r\n\r\n") is None
    assert tunnel_refusal(b"HTTP/1.1 302 Found\r\n\r\n") == "the proxy refuses the tunnel (302 Found)"
