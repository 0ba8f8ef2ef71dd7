from typing import NamedTuple

from typing_extensions import Buffer

BLOCKS: int
EVENTS: int
ROWS: int
ARENA: int
EVENT_COLUMNS: tuple[tuple[str, str], ...]
ROW_FIELDS: tuple[str, ...]
CH_NONE: int
CH_CONTENT: int
CH_REASONING: int
CH_TOOL: int
CH_REFUSAL: int
CH_ODD: int
CH_DONE: int
CH_SENT: int
FL_COALESCED: int
FL_CLAMPED: int
FL_READ: int
FL_CHOICES: int
FL_FINISH: int
FL_USAGE: int
FL_NAMED_ERROR: int
ROLE_WARMUP: int
ROLE_MEASURED: int
ROLE_FILL: int
END_COMPLETE: int
END_EOF: int
END_RESET: int
END_TIMEOUT: int
END_CONNECT: int
END_HTTP: int
END_LIMIT: int
END_CANCELLED: int
END_PORTS: int
RF_SSE: int
RF_DONE: int
RF_FRAMING_BROKEN: int
RF_KEEPALIVE: int
RF_ENCODED: int
RF_DUE_LATE: int
RF_RETRIED: int
RF_BLOB_CUT: int
BLOB_HEAD: int
BLOB_EVENT: int
BLOB_BODY: int
BLOB_ERROR: int

class Block(NamedTuple):
    level: int
    events: dict[str, bytes]
    n_events: int
    rows: bytes
    n_rows: int
    blobs: list[tuple[int, int, int, bytes]]
    sequence: int

def now_ns() -> int: ...
def realtime_ns() -> int: ...
def clock_offset(samples: int = 500) -> tuple[int, int]: ...
def convert_stamp(real_ns: int, offset_ns: int, floor_ns: int, now_ns: int) -> int | None: ...
def block_bytes(events: int = ..., rows: int = ..., arena: int = ...) -> int: ...
def read_block(
    memory: Buffer, index: int, events: int = ..., rows: int = ..., arena: int = ...
) -> Block | None: ...
def release_block(
    memory: Buffer, index: int, events: int = ..., rows: int = ..., arena: int = ...
) -> None: ...

class Histogram:
    SIZE: int
    def __init__(self, memory: Buffer | None = None, offset: int = 0) -> None: ...
    @property
    def count(self) -> int: ...
    @property
    def overflow(self) -> int: ...
    @property
    def max_ns(self) -> int | None: ...
    def record(self, ns: int) -> bool: ...
    def merge(self, other: Histogram) -> None: ...
    def clear(self) -> None: ...
    def quantile(self, q: float) -> int | None: ...
    def to_bytes(self) -> bytes: ...
    @staticmethod
    def from_bytes(data: bytes) -> Histogram: ...

class Recorder:
    save_text: bool
    def __init__(
        self, memory: Buffer, blocks: int = ..., events: int = ..., rows: int = ..., arena: int = ...
    ) -> None: ...
    def seal(self) -> None: ...
    def take_sealed(self) -> list[int]: ...
    def begin_level(self, level: int) -> None: ...

class Parser:
    def __init__(self, recorder: Recorder) -> None: ...
    @property
    def why(self) -> str | None: ...
    def begin(self, request: int, sent_ns: int) -> None: ...
    def feed(
        self, data: bytes | bytearray | memoryview, stamp_ns: int, delay_ns: int = 0, flags: int = 0
    ) -> tuple[int, int]: ...
    def feed_slices(self, data: bytes, size: int, stamp_ns: int) -> int: ...
    def eof(self, stamp_ns: int) -> int: ...
    def finish(self, end: int = 0) -> dict[str, int]: ...
