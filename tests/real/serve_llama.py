"""llama.cpp's own HTTP server on one model, for the tests; ends when its stdin does.

    python serve_llama.py MODEL.gguf --port PORT [--parallel N] [--ngram] [--ping SECONDS] [--one-batch]

The key, if there is one, comes in LLAMA_TEST_KEY. Ready when /health answers 200.
"""

import argparse
import os
import sys

import xllamacpp

TOKENS_PER_SLOT = 1024


def parameters(options: argparse.Namespace) -> xllamacpp.CommonParams:
    chosen = xllamacpp.CommonParams()
    chosen.model.path = options.model
    chosen.port = options.port
    # Whether it is one name or a list of them depends on the version.
    chosen.hostnames = "127.0.0.1" if isinstance(chosen.hostnames, str) else ["127.0.0.1"]
    chosen.n_parallel = options.parallel
    chosen.n_ctx = TOKENS_PER_SLOT * options.parallel
    # One thread: the model is tiny, and the machine's other cores belong to the client under test.
    chosen.cpuparams.n_threads = chosen.cpuparams_batch.n_threads = 1
    chosen.use_jinja = True
    chosen.endpoint_metrics = chosen.endpoint_slots = chosen.endpoint_props = True
    if options.ngram:
        chosen.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
    if options.ping:
        chosen.sse_ping_interval = options.ping
    if options.one_batch:
        chosen.n_batch = chosen.n_ctx
        chosen.kv_unified = True
    key = os.environ.pop("LLAMA_TEST_KEY", None)
    if key:
        chosen.api_keys = [key]
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--parallel", type=int, default=8, help="requests decoded together")
    parser.add_argument("--ngram", action="store_true", help="n-gram speculative decoding")
    parser.add_argument("--ping", type=int, default=0, help="seconds of silence before an SSE comment")
    parser.add_argument(
        "--one-batch", action="store_true", help="all waiting prompts in one step, during which no stream gets a token"
    )
    server = xllamacpp.Server(parameters(parser.parse_args()))
    sys.stdin.buffer.read()  # until the test that started us closes the pipe, or is gone
    del server


if __name__ == "__main__":
    main()
