"""What does an event cost, from bytes to columns? The byte machine alone, without a socket.

The input is a vLLM-shaped answer of 128 tokens, one HTTP chunk an event, cut into reads of several sizes. The machine
loops natively over the reads (`Parser.feed_slices`), as the engine does; the other rows are what a Python client does
for each event. Time per event = time of one answer / its events; the fastest of many is shown (nothing else may run
faster than it can), median over the runs.
"""

import json
import mmap

import orjson
import rig

from fastload import _timing

TOKENS = 128
SIZES = (0, 1460, 300, 64, 7)  # bytes a read; 0 is the whole answer
ROUNDS = 300
COLUMNS = ("what", "ns/event", "ratio")
_EVENT = (
    '{{"id":"chatcmpl-5f0c3c1c8f4a4f6e9d1b2a3c4d5e6f70","object":"chat.completion.chunk","created":1764500000,'
    '"model":"meta-llama/Llama-3.1-8B-Instruct","choices":[{{"index":0,"delta":{{{delta}}},"logprobs":null,'
    '"finish_reason":{finish}}}]}}'
)


def main() -> None:
    """Interleaved: every row once, then again."""
    given = rig.order(__doc__ or "")
    rig.pin(rig.CLIENT_CPU)
    payloads = events()
    whole, bodies = answer(payloads), [payload.encode() for payload in payloads]
    machine = Machine()
    contestants = {
        **{f"fastload, {size or 'whole'}": (lambda size=size: machine.time(whole, size)) for size in SIZES},
        "orjson.loads alone": lambda: best(lambda: [orjson.loads(body) for body in bodies]),
        "json.loads alone": lambda: best(lambda: [json.loads(body) for body in bodies]),
    }
    try:
        import httptools

        contestants["httptools + split + orjson, 1460"] = lambda: best(lambda: library(httptools, whole, 1460))
    except ImportError:
        pass
    runs: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(given.runs):
        for name, measure in contestants.items():
            runs[name].append(measure() / len(payloads))
    medians = {name: rig.middle(values) or 0.0 for name, values in runs.items()}
    floor = medians["fastload, whole"]
    rig.answer(
        given, "wire", f"Cost of an event, from bytes to columns ({len(payloads)} events, {len(whole):,} bytes)",
        "CLOCK_MONOTONIC around a whole answer", COLUMNS,
        [[name, value, value / floor] for name, value in medians.items()],
        packages=rig.versions("orjson", "httptools"), data=runs,
        notes=(
            "numbers behind a name: bytes of a read",
            "fastload rows hold the head, chunked decoding, SSE, scan, columns and the row; the head and the few "
            "events that are examined whole weigh on an answer of 128 tokens, less on a longer one",
        ),
    )


def events() -> list[str]:
    """JSON payloads as vLLM sends them: role, tokens, finish, usage."""
    made = [_EVENT.format(delta='"role":"assistant","content":""', finish="null")]
    made += [_EVENT.format(delta=f'"content":" word{i % 10}"', finish="null") for i in range(TOKENS - 1)]
    made.append(_EVENT.format(delta='"content":" end"', finish='"length","stop_reason":null'))
    usage = ',"usage":{"prompt_tokens":32,"total_tokens":160,"completion_tokens":128}}'
    made.append(_EVENT.format(delta="", finish="null").partition('"choices"')[0] + '"choices":[]' + usage)
    return made


def answer(payloads: list[str]) -> bytes:
    """A whole HTTP/1.1 answer, one chunk an event."""
    chunks = [f"data: {payload}\n\n" for payload in [*payloads, "[DONE]"]]
    body = "".join(f"{len(chunk):x}\r\n{chunk}\r\n" for chunk in chunks)
    head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
    return f"{head}{body}0\r\n\r\n".encode()


class Machine:
    """The parser and memory for its columns."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, _timing.BLOCKS * _timing.block_bytes())
        self.recorder = _timing.Recorder(self.memory)
        self.parser = _timing.Parser(self.recorder)

    def time(self, data: bytes, size: int) -> int:
        """ns of the fastest answer fed in reads of `size` bytes."""
        fastest = 1 << 62
        for number in range(ROUNDS):
            self.parser.begin(number, 0)
            start = _timing.now_ns()
            code = self.parser.feed_slices(data, size or min(len(data), 131072), 1)
            fastest = min(fastest, _timing.now_ns() - start)
            self.parser.finish()
            if code != 1:
                raise SystemExit(f"the answer was not read whole: code {code}, {self.parser.why}")
            if number % 50 == 49:
                self.recorder.seal()
            for index in self.recorder.take_sealed():
                _timing.release_block(self.memory, index)
        return fastest


def best(work: object) -> int:
    """ns of the fastest of many calls."""
    fastest = 1 << 62
    for _ in range(ROUNDS // 4):
        start = _timing.now_ns()
        work()  # type: ignore[operator]
        fastest = min(fastest, _timing.now_ns() - start)
    return fastest


def library(httptools: object, data: bytes, size: int) -> None:
    """The same bytes through httptools' parser, split by line, orjson."""
    found = []

    class Protocol:
        pending = b""

        def on_body(self, body: bytes) -> None:
            *lines, self.pending = (self.pending + body).split(b"\n")
            found.extend(orjson.loads(line[6:]) for line in lines if line.startswith(b"data: {"))

    parser = httptools.HttpResponseParser(Protocol())  # type: ignore[attr-defined]
    for at in range(0, len(data), size):
        parser.feed_data(data[at : at + size])
    assert len(found) == TOKENS + 2


if __name__ == "__main__":
    main()
