"""What bench/fuzz.py runs in a process whose byte machine was built with sanitizers. Not for the command line.

`random`: bytes, then real answers with changes, in random cuts, each read in memory of its own size. `overread`: a read
that claims one byte more than it has, which the sanitizer must see, or it would see nothing. `guided`: libFuzzer.
`start` and `keep`: its first inputs and words, and the corpus of the tests.
"""

import ctypes
import faulthandler
import json
import random
import re
import shlex
import sys
import time
from pathlib import Path

import fuzzed
from machine import cut, run, story

HANG_S = 60
NASTY = [
    b"\r", b"\n", b"\r\n", b"\n\n", b":", b"data: ", b"data:", b"event: error\n", b": ping\n\n", b"[DONE]", b"null",
    b'"', b"\\", b"{", b"}", b"[", b"]", b",", b" ", b"\x00", b"\xef\xbb\xbf", b"\xe2\x80\xa8", b"\xff",
    b"0\r\n\r\n", b"ffffffffffffffff\r\n",
    b'{"choices":[{"index":0,"delta":{"content":"', b'"}}]}\n\n', b'"usage":{"completion_tokens":', b"\\u00e9", b"7",
    b"HTTP/1.1 200 OK\r\n", b"Content-Length: 9\r\n", b"Transfer-Encoding: chunked\r\n",
]  # fmt: skip
KEYS = [
    b'"%s":' % key.encode()
    for key in "choices delta content text reasoning reasoning_content refusal tool_calls function function_call name "
    "arguments index finish_reason logprobs token_ids usage completion_tokens type error message detail object "
    "thinking partial_json response role audio".split()
] + [
    b'"type":"%s"' % kind.encode()
    for kind in "content_block_delta message_stop response.output_text.delta response.reasoning_text.delta "
    "response.reasoning_summary_text.delta response.function_call_arguments.delta response.refusal.delta "
    "response.completed response.incomplete response.failed".split()
]


def main() -> None:
    what, *rest = sys.argv[1:]
    {"random": at_random, "overread": overread, "guided": guided, "start": start, "keep": keep}[what](*rest)


def at_random(seed: str, size: str, current: str) -> None:
    """Feed `size` bytes of each kind; the input of the moment stands in the file `current`. Prints what was fed."""
    rng = random.Random(int(seed))
    real = seeds()
    kinds = {
        "random bytes": lambda: framed(rng, rng.randbytes(rng.randint(1, 4000))),
        "random tokens of the grammar": lambda: framed(rng, b"".join(rng.choices(NASTY, k=rng.randint(1, 300)))),
        "changed real answers": lambda: changed(rng, rng.choice(real), real),
    }
    fed = []
    for kind, make in kinds.items():
        begun, taken, streams, reads = time.monotonic(), 0, 0, 0
        while taken < int(size):
            wire, sizes = make(), [rng.randint(1, rng.choice((3, 30, 300, 3000))) for _ in range(4)]
            Path(current).write_bytes(json.dumps(sizes).encode() + b"\n" + wire)
            faulthandler.dump_traceback_later(HANG_S, exit=True)
            pieces = cut(wire, sizes)
            eof_ns, keep = rng.choice((None, 10**9)), rng.random() < 0.3
            with fuzzed.exactly(pieces) as places:
                found = run(places, eof_ns, save_text=keep)
            with fuzzed.exactly([wire]) as places:
                whole = run(places, eof_ns, save_text=keep)
            assert found.code in (0, 1, -5, -6), found.code
            assert story(found) == story(whole), "cut otherwise, the same bytes tell another story"
            taken += found.used
            streams += 1
            reads += len(pieces)
        faulthandler.cancel_dump_traceback_later()
        fed.append([kind, taken, streams, reads, time.monotonic() - begun])
    print(json.dumps(fed))


def framed(rng: random.Random, body: bytes) -> bytes:
    """A body under a sound head, so that the layers below are reached; sometimes without one."""
    kind = rng.randrange(8)
    if kind == 0:
        return body
    if kind == 1:
        return fuzzed.STREAM + b"Content-Length: %d\r\n\r\n" % len(body) + body
    if kind < 5:
        return fuzzed.STREAM + b"\r\n" + body
    wire, at = fuzzed.STREAM + b"Transfer-Encoding: chunked\r\n\r\n", 0
    while at < len(body):
        piece = body[at : at + rng.randint(1, 700)]
        wire += b"%x\r\n%s\r\n" % (len(piece), piece)
        at += len(piece)
    return wire + b"0\r\n\r\n"


def seeds() -> list[bytes]:
    """The wire of every case and capture, and the corpus."""
    from test_captures import CAPTURES, bytes_of
    from test_cases import CASES, segments

    found = [b"".join(segments(case)) for case in CASES] + [bytes_of(capture) for capture in CAPTURES]
    corpus = fuzzed.read_corpus() if fuzzed.CORPUS.exists() else []
    return [wire[:60_000] for wire in found] + [fuzzed.HEADS[data[0] & 3] + data[3:] for data in corpus]


def changed(rng: random.Random, wire: bytes, others: list[bytes]) -> bytes:
    """A real answer after a few accidents: bits flipped, cut, repeated, spliced, a length changed, tokens put in."""
    data = bytearray(wire)
    for _ in range(rng.randint(1, 6)):
        at = rng.randrange(len(data) + 1)
        to = min(len(data), at + rng.choice((1, 2, 8, 64, 1000)))
        kind = rng.randrange(7)
        if kind == 0 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del data[at:to]
        elif kind == 2:
            data[at:at] = data[at:to] * rng.choice((1, 2, 9))
        elif kind == 3:
            other = rng.choice(others)
            start = rng.randrange(len(other) + 1)
            data[at:to] = other[start : start + rng.choice((8, 64, 1000))]
        elif kind == 4:
            lengths = list(re.finditer(rb"(?<=\n)[0-9a-f]{1,5}(?=\r\n)|(?<=length: )[0-9]+", data, re.IGNORECASE))
            if lengths:
                one = rng.choice(lengths)
                data[one.start() : one.end()] = b"%x" % max(0, int(one[0], 16) + rng.choice((-9, -2, -1, 1, 2, 900)))
        else:
            data[at:at] = rng.choice(NASTY)
    return bytes(data[:200_000]) or b"\n"


def overread() -> None:
    with fuzzed.exactly([fuzzed.STREAM + b"\r\ndata: x"]) as (place,):
        address = ctypes.addressof(ctypes.c_ubyte.from_buffer(place))
        longer = (ctypes.c_ubyte * (len(place) + 1)).from_address(address)
        run([memoryview(longer).cast("B")], 10**9)


def guided(*options: str) -> None:
    """libFuzzer, whose counters are those of the machine built for it. It ends the process itself."""
    import atheris

    # to merge it starts itself again, with a shell
    itself = shlex.join([sys.executable, "-P", sys.argv[0], "guided"])
    atheris.Setup([itself, *options], lambda data: fuzzed.check(data, exact=True))
    atheris.Fuzz()


def start(folder: str, words: str) -> None:
    """Inputs to begin with, and a dictionary."""
    pieces = [wire[at : at + 1000] for wire in seeds() for at in (0, 700)]
    inputs = [bytes([i % 16, i * 7 % 256, i * 13 % 256]) + piece for i, piece in enumerate(pieces)]
    for i, data in enumerate(inputs + (fuzzed.read_corpus() if fuzzed.CORPUS.exists() else [])):
        (Path(folder) / f"{i:04}").write_bytes(data)
    escaped = ["".join(f"\\x{byte:02x}" for byte in word) for word in NASTY + KEYS]
    Path(words).write_text("".join(f'"{word}"\n' for word in escaped))


def keep(folder: str) -> None:
    """Make these inputs the corpus."""
    inputs = [path.read_bytes() for path in sorted(Path(folder).iterdir())]
    size = fuzzed.write_corpus(inputs)
    print(f"{len(inputs)} inputs of {sum(map(len, inputs)):,} bytes, {size:,} packed")


if __name__ == "__main__":
    main()
