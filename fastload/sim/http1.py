"""HTTP/1.1 as a server reads and writes it. No sockets here: bytes in, requests out."""

from dataclasses import dataclass

HEAD_LIMIT = 64 * 1024
BODY_LIMIT = 64 * 1024 * 1024
CHUNK_LINE_LIMIT = 256

_REASONS = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    404: "Not Found",
    405: "Method Not Allowed",
    413: "Content Too Large",
    429: "Too Many Requests",
    431: "Request Header Fields Too Large",
}

LAST_CHUNK = b"0\r\n\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class MalformedRequest(Exception):
    """The bytes are no HTTP request we take; `status` says how to answer before closing."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Request:
    """One request, complete. Header names are in lower case; the last of a repeated one counts."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    http11: bool
    keep_alive: bool


@dataclass(frozen=True, slots=True)
class _Head:
    method: str
    path: str
    headers: dict[str, str]
    length: int
    chunked: bool
    http11: bool


class RequestReader:
    """Cuts what a connection receives into requests: `feed` bytes, then `next` until it gives None."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._head: _Head | None = None
        self._chunks: list[bytes] = []
        self._chunked_bytes = 0

    def feed(self, data: bytes) -> None:
        self._buffer += data
        # Requests that wait behind a running answer stay here; one body and one head more is all a peer may
        # pile up.
        if len(self._buffer) > 2 * BODY_LIMIT:
            raise MalformedRequest(413, "too much data behind an unanswered request")

    @property
    def expects_continue(self) -> bool:
        """The head asked for `100 Continue` and its body has not come yet."""
        head = self._head
        return (
            head is not None and head.headers.get("expect", "").lower() == "100-continue" and not self._buffer
        )

    def next(self) -> Request | None:
        """The next complete request, or None when more bytes are needed. Raises `MalformedRequest`."""
        head = self._head
        if head is None:
            head = self._head = self._read_head()
            if head is None:
                return None
        body = self._read_chunks() if head.chunked else self._read_length(head.length)
        if body is None:
            return None
        self._head = None
        connection = head.headers.get("connection", "").lower()
        keep_alive = "close" not in connection if head.http11 else "keep-alive" in connection
        return Request(head.method, head.path, head.headers, body, head.http11, keep_alive)

    def _read_head(self) -> _Head | None:
        buffer = self._buffer
        while buffer.startswith(b"\r\n"):  # a blank line before a request is to be ignored (RFC 9112, 2.2)
            del buffer[:2]
        end = buffer.find(b"\r\n\r\n")
        if end > HEAD_LIMIT or (end < 0 and len(buffer) > HEAD_LIMIT):
            raise MalformedRequest(431, f"the request head is longer than {HEAD_LIMIT} bytes")
        if end < 0:
            return None
        text = buffer[:end].decode("latin-1")
        del buffer[: end + 4]
        return _parse_head(text)

    def _read_length(self, length: int) -> bytes | None:
        if len(self._buffer) < length:
            return None
        body = bytes(self._buffer[:length])
        del self._buffer[:length]
        return body

    def _read_chunks(self) -> bytes | None:
        buffer = self._buffer
        while True:
            line = buffer.find(b"\r\n", 0, CHUNK_LINE_LIMIT)
            if line < 0:
                if len(buffer) >= CHUNK_LINE_LIMIT:
                    raise MalformedRequest(400, "a chunk's size line is too long")
                return None
            size = _chunk_size(bytes(buffer[:line]))
            if size == 0:
                end = buffer.find(b"\r\n\r\n", line)
                if end < 0:
                    return None  # trailers are on their way
                del buffer[: end + 4]
                body = b"".join(self._chunks)
                self._chunks.clear()
                self._chunked_bytes = 0
                return body
            if self._chunked_bytes + size > BODY_LIMIT:
                raise MalformedRequest(413, f"the body is longer than {BODY_LIMIT} bytes")
            start = line + 2
            if len(buffer) < start + size + 2:
                return None
            if buffer[start + size : start + size + 2] != b"\r\n":
                raise MalformedRequest(400, "a chunk does not end where its size says")
            self._chunks.append(bytes(buffer[start : start + size]))
            self._chunked_bytes += size
            del buffer[: start + size + 2]


def _parse_head(text: str) -> _Head:
    lines = text.split("\r\n")
    parts = lines[0].split(" ")
    if len(parts) != 3 or parts[2] not in ("HTTP/1.1", "HTTP/1.0") or not parts[1].startswith("/"):
        raise MalformedRequest(400, "the first line is no HTTP/1.1 request line")
    headers: dict[str, str] = {}
    for line in lines[1:]:
        name, colon, value = line.partition(":")
        if not colon or not name or name != name.strip():
            raise MalformedRequest(400, "a header line is malformed")
        headers[name.lower()] = value.strip()
    chunked = headers.get("transfer-encoding", "").lower() == "chunked"
    if "transfer-encoding" in headers and (not chunked or "content-length" in headers):
        raise MalformedRequest(400, "the body's length is not clear from its headers")
    length = headers.get("content-length", "0")
    if not (length.isascii() and length.isdigit()):
        raise MalformedRequest(400, "content-length is no number")
    if len(length) > 15 or int(length) > BODY_LIMIT:
        raise MalformedRequest(413, f"the body is longer than {BODY_LIMIT} bytes")
    return _Head(parts[0], parts[1].partition("?")[0], headers, int(length), chunked, parts[2] == "HTTP/1.1")


def _chunk_size(line: bytes) -> int:
    digits = line.partition(b";")[0].strip()
    if not digits or len(digits) > 15 or any(c not in b"0123456789abcdefABCDEF" for c in digits):
        raise MalformedRequest(400, "a chunk's size is no hexadecimal number")
    return int(digits, 16)


def response(
    status: int, body: bytes, keep_alive: bool, content_type: str = "application/json", more: str = ""
) -> bytes:
    """A whole answer with its length told; `more` header lines, each with its end."""
    closing = "" if keep_alive else "Connection: close\r\n"
    return (
        f"HTTP/1.1 {status} {_REASONS[status]}\r\nServer: fastload-sim\r\nContent-Type: {content_type}\r\n"
        f"Content-Length: {len(body)}\r\n{more}{closing}\r\n"
    ).encode() + body


def stream_head(chunked: bool, keep_alive: bool) -> bytes:
    """The head of an event stream; not chunked (HTTP/1.0): the connection's end is the answer's end."""
    framing = "Transfer-Encoding: chunked\r\n" if chunked else ""
    closing = "" if keep_alive and chunked else "Connection: close\r\n"
    return (
        "HTTP/1.1 200 OK\r\nServer: fastload-sim\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
        f"Cache-Control: no-cache\r\n{framing}{closing}\r\n"
    ).encode()


def chunk(data: bytes) -> bytes:
    """`data` as one HTTP chunk."""
    return b"%x\r\n%b\r\n" % (len(data), data)
