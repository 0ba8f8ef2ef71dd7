from typing_extensions import Buffer

RECEIVED: int
ENDED: int
HEADER_BYTES: int
RECORD_BYTES: int

class Emitter:
    def __init__(
        self,
        fd: int,
        log: Buffer,
        ttft_ns: int,
        step_ns: int,
        model: str = "fastload-truth",
        streams: int = 8192,
    ) -> None: ...
    @property
    def late_steps(self) -> int: ...
    @property
    def steps(self) -> int: ...
    @property
    def records_written(self) -> int: ...
    def serve(self) -> None: ...
