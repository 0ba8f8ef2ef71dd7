"""A plain HTTP client for the questions asked before a run (never for measuring): one address, no proxies."""

from collections.abc import Mapping
from typing import Any

import httpx

from fastload.errors import TargetError
from fastload.load.secrets import Secret
from fastload.load.target_address import Address, NotYetError

LOOK_TIMEOUT_S = 10.0  # for lists and health
FACT_TIMEOUT_S = 2.0  # for what is nice to know
ANSWER_TIMEOUT_S = 120.0  # for a completion: a cold engine compiles
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
    """A client tied to the chosen address; the environment's proxies are ignored. Close it after use."""
    sent = httpx.Headers({"Host": host_header, "Accept-Encoding": "identity"})
    sent.update(api_headers(endpoint, key))
    sent.update(headers)
    return httpx.Client(
        base_url=address.base_url,
        headers=sent,
        timeout=LOOK_TIMEOUT_S,
        verify=address.scheme == "https",  # to load the certificates takes longer than all questions, and http has none
        trust_env=False,
        follow_redirects=False,
    )


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
            # A kept connection that the server closed meanwhile fails like this once (llama.cpp does it).
            if attempt == 2:
                raise NotYetError(f"{url}{path}: the answer is not HTTP or was cut off ({_reason(error)})") from None
        except httpx.ConnectError as error:
            raise NotYetError(f"{url}: no connection ({_reason(error)}); is the server still running?") from None
        except httpx.TimeoutException:
            raise NotYetError(f"{url}{path}: no answer within {timeout_s:g} s") from None
        except httpx.HTTPError as error:
            raise TargetError(f"{url}{path}: {_reason(error)}") from None
    raise AssertionError("not reached")


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
    return line if len(line) <= 200 else line[:197] + "..."


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
        return f"{url}: the server wants an API key (HTTP {status}); give it by {where}"
    return f"{url}: the server refuses the API key given (HTTP {status}); check {where}"


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
