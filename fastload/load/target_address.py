"""The server's URL, and the one way to it that is used: an address, a proxy before it, TLS around it."""

import base64
import errno
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from fastload import _timing
from fastload.errors import PlanError, TargetError
from fastload.load.secrets import Secret
from fastload.load.tls import TlsOptions

CONNECT_TIMEOUT_S = 10.0
DEFAULT_PORTS = {"http": 80, "https": 443}


class NotYetError(TargetError):
    """A fault that waiting may cure: no connection, a server that is loading, an empty model list."""


@dataclass(frozen=True, slots=True)
class Place:
    """A URL taken apart. `root` is the path before `/v1`, without a slash at its end ("" mostly)."""

    scheme: str
    host: str  # without brackets
    port: int
    root: str

    @property
    def netloc(self) -> str:
        """host or host:port as a URL and a Host header have it (the default port is left out)."""
        host = self.host.partition("%")[0]  # a scope id has no meaning at the other end
        bracketed = f"[{host}]" if ":" in host else host
        return bracketed if self.port == DEFAULT_PORTS[self.scheme] else f"{bracketed}:{self.port}"

    @property
    def url(self) -> str:
        """The root of the server: `http://host:8000`, with a path if there is one, without `/v1`."""
        return f"{self.scheme}://{self.netloc}{self.root}"


@dataclass(frozen=True, slots=True)
class Proxy:
    """An HTTP proxy that is asked for a tunnel (CONNECT), for http and https alike. `login`: user:password."""

    place: Place
    login: Secret | None = None

    def tunnel_to(self, place: Place) -> Secret:
        """The head of the request for a tunnel, the login in it."""
        host = f"[{place.host}]" if ":" in place.host else place.host
        lines = [f"CONNECT {host}:{place.port} HTTP/1.1", f"Host: {host}:{place.port}"]
        if self.login is not None:
            word = base64.b64encode(self.login.reveal().encode()).decode()
            lines.append(f"Proxy-Authorization: Basic {word}")
        return Secret("\r\n".join([*lines, "", ""]))


@dataclass(frozen=True, slots=True)
class Way:
    """How the user wants to be connected: TLS options (used for https only) and a proxy."""

    tls: TlsOptions = TlsOptions()
    proxy: Proxy | None = None


DIRECT = Way()  # no proxy; certificates verified by the system's authorities


@dataclass(frozen=True, slots=True)
class Address:
    """One socket address, chosen once, before any clock runs; every connection of the run goes there.

    With a proxy it is the proxy's, and `tunnel` what the proxy is asked. `tls` is None for plain http; `server_name`
    is what the server's certificate must be made out to.
    """

    host: str  # the IP address as text
    port: int
    family: int
    sockaddr: tuple[object, ...]
    scheme: str
    tunnel: Secret | None = None
    tls: TlsOptions | None = None
    server_name: str = ""


def parse_url(text: str) -> Place:
    """Take a `--url` apart, with or without `/v1` at its end. Raises PlanError saying what would be right."""
    right = "give it like http://127.0.0.1:8000"
    shown = _without_credentials(text.strip())
    if not text.strip():
        raise PlanError(f"--url is empty; {right}")
    if any(c.isspace() or not c.isprintable() for c in text.strip()):
        raise PlanError(f"--url {shown!r}: has a space or control character in it; {right}")
    try:
        parts = urlsplit(text.strip())
        host = parts.hostname
    except ValueError as error:
        raise PlanError(f"--url {shown}: {error}; {right}") from None
    if "://" not in text:
        raise PlanError(f"--url {shown}: has no scheme; give http://{shown}")
    if parts.scheme not in DEFAULT_PORTS:
        raise PlanError(f"--url {shown}: the scheme {parts.scheme!r} is not known; {right}")
    if parts.username is not None or parts.password is not None:
        raise PlanError(
            f"--url {shown}: credentials in a URL end up in logs; use --api-key-file or FASTLOAD_API_KEY"
        )
    if not host:
        raise PlanError(f"--url {shown}: has no host; {right}")
    try:
        port = parts.port
    except ValueError:
        port = -1
    if port is None:
        if parts.netloc.endswith(":"):
            raise PlanError(f"--url {shown}: has no number after the colon; {right}")
        port = DEFAULT_PORTS[parts.scheme]
    if not 0 < port <= 65_535:
        raise PlanError(f"--url {shown}: the port must be a number from 1 to 65535; {right}")
    if parts.query or parts.fragment:
        raise PlanError(f"--url {shown}: give the server's root without ? and #; headers go to --header")
    if not host.isascii():
        try:
            host = host.encode("idna").decode()
        except UnicodeError:
            raise PlanError(f"--url {shown}: the host is not a valid name; {right}") from None
    root = parts.path.rstrip("/")
    for known in ("/chat/completions", "/completions", "/models"):
        if root.endswith(known):
            raise PlanError(f"--url {shown}: give the server's root, without {known}")
    if root.endswith("/v1"):
        root = root[: -len("/v1")].rstrip("/")
    return Place(parts.scheme, host, port, root)


def parse_proxy(text: str) -> Proxy:
    """Take a `--proxy` apart: http://proxy:3128, with user:password@ before the host if it wants a login. Raises
    PlanError, which does not show the login."""
    shown = _without_credentials(text.strip())
    right = "give it like http://proxy.example:3128"
    try:
        parts = urlsplit(text.strip())
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise PlanError(f"--proxy {shown}: {error}; {right}") from None
    if parts.scheme != "http" or not host or any(c.isspace() for c in text.strip()):
        raise PlanError(f"--proxy {shown}: not the address of an HTTP proxy; {right}")
    if parts.path not in ("", "/") or parts.query or parts.fragment:
        raise PlanError(f"--proxy {shown}: a proxy has no path; {right}")
    login = None
    if parts.username is not None:
        login = Secret(f"{unquote(parts.username)}:{unquote(parts.password or '')}")
    return Proxy(Place("http", host, port or 80, ""), login)


def _without_credentials(text: str) -> str:
    scheme, slashes, rest = text.partition("://")
    if not slashes:
        scheme, rest = "", text
    authority, slash, path = rest.partition("/")
    _, at, host = authority.rpartition("@")
    return f"{scheme}{slashes}{'***@' if at else ''}{host}{slash}{path}"


def reach(
    place: Place,
    way: Way = DIRECT,
    timeout_s: float = CONNECT_TIMEOUT_S,
    notice: Callable[[str], None] = lambda text: None,
) -> tuple[Address, float]:
    """Resolve the host (the proxy's if there is one) and connect to its addresses in order; the first that takes a
    connection is chosen. `notice` is told which, where there are several.

    Returns the address and the milliseconds its connection took. Raises TargetError (a NotYetError).
    """
    at = place if way.proxy is None else way.proxy.place
    flag = "--url" if way.proxy is None else "--proxy"
    try:
        found = socket.getaddrinfo(at.host, at.port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise NotYetError(f"{at.url}: the name {at.host} does not resolve ({reason}); check {flag}") from None
    failures: dict[str, OSError] = {}
    for family, kind, protocol, _, sockaddr in found:
        try:
            with socket.socket(family, kind, protocol) as trial:
                trial.settimeout(timeout_s)
                begun_ns = _timing.now_ns()
                trial.connect(sockaddr)
                reach_ms = (_timing.now_ns() - begun_ns) / 1e6
        except OSError as error:
            failures[str(sockaddr[0])] = error
            continue
        others = {str(each[4][0]) for each in found} - {str(sockaddr[0])}
        if others:
            notice(_choice(at.host, str(sockaddr[0]), len(others) + 1, failures))
        address = Address(
            host=str(sockaddr[0]),
            port=at.port,
            family=int(family),
            sockaddr=tuple(sockaddr),
            scheme=place.scheme,
            tunnel=None if way.proxy is None else way.proxy.tunnel_to(place),
            tls=way.tls if place.scheme == "https" else None,
            server_name=place.host.partition("%")[0],
        )
        return address, reach_ms
    raise NotYetError(_unreachable(at, flag, list(failures.values()), timeout_s))


def _choice(host: str, chosen: str, addresses: int, failures: Mapping[str, OSError]) -> str:
    """The sentence that says which of a name's addresses is used."""
    passed = "".join(f" {at} takes no connection ({_reason(error)});" for at, error in failures.items())
    return f"{host} has {addresses} addresses:{passed} {chosen} is used for the whole run"


def _reason(error: OSError) -> str:
    return os.strerror(error.errno) if error.errno else error.strerror or str(error)


def _unreachable(at: Place, flag: str, failures: list[OSError], timeout_s: float) -> str:
    if any(failure.errno == errno.ECONNREFUSED for failure in failures):
        what = "server" if flag == "--url" else "proxy"
        return f"{at.url}: nothing listens on port {at.port} (connection refused); start the {what} or correct {flag}"
    if any(isinstance(failure, TimeoutError) for failure in failures):
        return f"{at.url}: no connection within {timeout_s:g} s; check the host, the port and the firewall"
    reason = failures[0].strerror or str(failures[0]) if failures else "no address"
    return f"{at.url}: cannot be reached ({reason}); check {flag}"
