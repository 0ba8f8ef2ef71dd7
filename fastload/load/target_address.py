"""The server's URL and the one address that is used for it."""

import errno
import socket
from dataclasses import dataclass
from urllib.parse import urlsplit

from fastload import _timing
from fastload.errors import PlanError, TargetError

CONNECT_TIMEOUT_S = 10.0


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
        return bracketed if self.port == 80 else f"{bracketed}:{self.port}"

    @property
    def url(self) -> str:
        """The root of the server: `http://host:8000`, with a path if there is one, without `/v1`."""
        return f"{self.scheme}://{self.netloc}{self.root}"


@dataclass(frozen=True, slots=True)
class Address:
    """One socket address, chosen once, before any clock runs; every connection of the run goes there."""

    host: str  # the IP address as text
    port: int
    family: int
    sockaddr: tuple[object, ...]
    scheme: str

    @property
    def base_url(self) -> str:
        """URL of the address itself, for a client that must not resolve the name again."""
        host = f"[{self.host}]" if self.family == socket.AF_INET6 else self.host
        return f"{self.scheme}://{host}:{self.port}"


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
    if parts.scheme == "https":
        raise PlanError(f"--url {shown}: TLS is not in this version of fastload yet; give an http:// URL")
    if parts.scheme != "http":
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
        port = 80
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


def _without_credentials(text: str) -> str:
    scheme, slashes, rest = text.partition("://")
    if not slashes:
        scheme, rest = "", text
    authority, slash, path = rest.partition("/")
    _, at, host = authority.rpartition("@")
    return f"{scheme}{slashes}{'***@' if at else ''}{host}{slash}{path}"


def reach(place: Place, timeout_s: float = CONNECT_TIMEOUT_S) -> tuple[Address, float]:
    """Resolve the host and connect to its addresses in order; the first that takes a connection is chosen.

    Returns the address and the milliseconds its connection took. Raises TargetError (a NotYetError).
    """
    try:
        found = socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise NotYetError(
            f"{place.url}: the name {place.host} does not resolve ({reason}); check --url"
        ) from None
    failures: list[OSError] = []
    for family, kind, protocol, _, sockaddr in found:
        try:
            with socket.socket(family, kind, protocol) as trial:
                trial.settimeout(timeout_s)
                begun_ns = _timing.now_ns()
                trial.connect(sockaddr)
                reach_ms = (_timing.now_ns() - begun_ns) / 1e6
        except OSError as error:
            failures.append(error)
            continue
        return Address(str(sockaddr[0]), place.port, int(family), tuple(sockaddr), place.scheme), reach_ms
    raise NotYetError(_unreachable(place, failures, timeout_s))


def _unreachable(place: Place, failures: list[OSError], timeout_s: float) -> str:
    if any(failure.errno == errno.ECONNREFUSED for failure in failures):
        return (
            f"{place.url}: nothing listens on port {place.port} (connection refused); "
            "start the server or correct --url"
        )
    if any(isinstance(failure, TimeoutError) for failure in failures):
        return f"{place.url}: no connection within {timeout_s:g} s; check the host, the port and the firewall"
    reason = failures[0].strerror or str(failures[0]) if failures else "no address"
    return f"{place.url}: cannot be reached ({reason}); check --url"
