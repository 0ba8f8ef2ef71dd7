"""A plain HTTP client for the questions asked before a run (never for measuring), along the way the run will take."""

import os
import time
from collections.abc import Iterable, Mapping
from typing import Any

import httpcore
import httpx

from fastload.errors import TargetError
from fastload.load import tls
from fastload.load.hiding import hide, hide_start
from fastload.load.secrets import Secret
from fastload.load.target_address import Address, NotYetError
from fastload.load.tunnel import NO_ANSWER, TUNNEL_HEAD, tunnel_refusal

LOOK_TIMEOUT_S = 10.0  # for lists and health
FACT_TIMEOUT_S = 2.0  # for what is nice to know
TUNNEL_READ = 65_536
ANSWER_TIMEOUT_S = 120.0  # for a completion: a cold engine compiles
OTHER_VARIABLE = "OPENAI_API_KEY"  # in many an environment; a key goes to no server it was not given for
ANTHROPIC_VERSION = "2023-06-01"  # of the messages API; servers that do not speak it ignore the header


def api_headers(endpoint: str, key: Secret | None) -> dict[str, str]:
    """The headers an endpoint wants from its client: the key, and for Anthropic's API the key again and a version.

    The key goes in both ways to /v1/messages: Anthropic and most gateways read x-api-key, vLLM only Authorization.
    """
    headers = {} if key is None else {"Authorization": key.bearer()}
    if endpoint == "messages":
        headers["anthropic-version"] = ANTHROPIC_VERSION
        if key is not None:
            headers["x-api-key"] = key.reveal()
    return headers


def client_for(
    address: Address, host_header: str, key: Secret | None, headers: Mapping[str, str], endpoint: str = "chat"
) -> httpx.Client:
    """A client tied to the chosen address; the environment's proxies are ignored. Close it after use.

    Raises PlanError when a file of the TLS options is no good.
    """
    sent = httpx.Headers({"Host": host_header, "Accept-Encoding": "identity"})
    sent.update(api_headers(endpoint, key))
    sent.update(headers)
    # Without TLS no context is made: to load the certificates takes longer than all questions.
    context = None if address.tls is None else tls.context(address.tls)
    transport = httpx.HTTPTransport(verify=False, trust_env=False)
    # httpx has no public way to choose the address and keep the name for TLS; its pool has one.
    transport._pool = httpcore.ConnectionPool(ssl_context=context, network_backend=_Way(address))
    return httpx.Client(
        base_url=f"{address.scheme}://{host_header}",
        headers=sent,
        timeout=LOOK_TIMEOUT_S,
        transport=transport,
        trust_env=False,
        follow_redirects=False,
    )


class _Way(httpcore.NetworkBackend):
    """Connects to the chosen address whatever the URL's host, through the proxy's tunnel if there is one."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._sockets = httpcore.SyncBackend()

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        stream = self._sockets.connect_tcp(
            self._address.host, self._address.port, timeout, local_address, socket_options
        )
        if self._address.tunnel is not None:
            _ask_tunnel(stream, self._address.tunnel.reveal().encode("latin-1"), timeout)
        return stream

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


def _ask_tunnel(stream: httpcore.NetworkStream, request: bytes, timeout: float | None) -> None:
    stream.write(request, timeout)
    head = b""
    refusal = None
    while refusal is None and b"\r\n\r\n" not in head:
        got = stream.read(TUNNEL_READ, timeout)
        head += got
        refusal = None if got and len(head) <= TUNNEL_HEAD else NO_ANSWER
    refusal = refusal or tunnel_refusal(head)
    if refusal is not None:
        stream.close()
        raise httpcore.ConnectError(refusal)


def ask(
    client: httpx.Client, url: str, path: str, body: Any = None, timeout_s: float = LOOK_TIMEOUT_S
) -> httpx.Response:
    """GET `path`, or POST `body` as JSON; `url` is the server as the user named it. Raises NotYetError."""
    for attempt in (1, 2):
        try:
            if body is None:
                return client.get(path, timeout=timeout_s)
            return client.post(path, json=body, timeout=timeout_s)
        except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError) as error:
            _see_tls(url, error)
            # A kept connection that the server closed meanwhile fails like this once (llama.cpp does it).
            if attempt == 2:
                raise NotYetError(f"{url}{path}: the answer is not HTTP or was cut off ({_reason(error)})") from None
        except httpx.ConnectError as error:
            _see_tls(url, error)
            hint = "check --proxy" if "the proxy" in str(error) else "is the server still running?"
            raise NotYetError(f"{url}: no connection ({_reason(error)}); {hint}") from None
        except httpx.TimeoutException:
            raise NotYetError(f"{url}{path}: no answer within {timeout_s:g} s") from None
        except httpx.HTTPError as error:
            raise TargetError(f"{url}{path}: {_reason(error)}") from None
    raise AssertionError("not reached")


def _see_tls(url: str, error: httpx.HTTPError) -> None:
    """Raise TargetError when TLS failed: waiting cures nothing then."""
    fault = tls.fault(error)
    if fault is None:
        return
    if "mismatch" in fault or "not valid for" in fault:
        right = "give the name the certificate has in --url, or measure unverified by --insecure"
    elif "not trusted" in fault:
        right = "give its authority's certificate by --ca-file FILE, or measure unverified by --insecure"
    elif "does not speak" in fault:
        right = "give an http:// URL"
    elif "certificate required" in fault or "handshake failure" in fault:
        right = "it may want a client's certificate: --client-cert FILE"
    else:
        right = "check --url and the TLS flags"
    raise TargetError(f"{url}: {fault}; {right}")


def read_json(response: httpx.Response) -> Any:
    """The body as JSON; None where it is none."""
    try:
        return response.json()
    except ValueError:
        return None


def said(response: httpx.Response) -> str:
    """What the server says is wrong, in one line: OpenAI's error object, a string, or FastAPI's `detail`."""
    message = _message(read_json(response))
    if message is None:
        kind = response.headers.get("content-type", "").partition(";")[0]
        message = response.text if kind == "text/plain" else ""
    line = " ".join(message.split())
    return hide(line) if len(line) <= 200 else hide_start(line, 197) + "..."


def _message(body: object) -> str | None:
    """The sentence in an error of any form; None where there is none."""
    if isinstance(body, str):
        return body
    if isinstance(body, list):
        said = [message for each in body[:5] if (message := _message(each)) is not None]
        return "; ".join(said) or None
    if not isinstance(body, dict):
        return None
    for key in ("error", "detail", "message", "msg"):
        message = _message(body.get(key)) if body.get(key) else None
        if message is not None:
            where = body.get("loc", body.get("param"))
            where = ".".join(map(str, where)) if isinstance(where, list) else where
            return f"{where}: {message}" if isinstance(where, str) and where and where not in message else message
    return None


def denied(status: int, url: str, key: Secret | None) -> str:
    """The line for 401 and 403."""
    where = "--api-key-file or FASTLOAD_API_KEY"
    if key is None:
        other = f" ({OTHER_VARIABLE} is OpenAI's, and not sent to others)" if OTHER_VARIABLE in os.environ else ""
        return f"{url}: the server wants an API key (HTTP {status}); give it by {where}{other}"
    return f"{url}: the server refuses the API key given (HTTP {status}); check {where}"


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
