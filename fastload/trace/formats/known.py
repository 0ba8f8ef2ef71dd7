"""Which tool wrote a result file: by what is in it, not by its name."""

from __future__ import annotations

from pathlib import Path

from fastload.trace.formats import aiperf, cordatus, vllm_bench
from fastload.trace.formats.told import Told, bad, read_bytes, read_object

WRITTEN_BY = "vllm bench serve (JSON), AIPerf (profile_export_aiperf.json or .jsonl), the Cordatus tool (CSV)"


def read(file: Path) -> Told:
    """Read a result file of any tool we know. PlanError, naming the file, for another one or one that is damaged."""
    content = read_bytes(file)
    if content.lstrip()[:1] != b"{":
        if not content.lstrip(b"\xef\xbb\xbf").startswith(cordatus.LEVEL.encode()):
            raise bad(file, f"is no result file we know; known are those of {WRITTEN_BY}")
        return cordatus.read(file)
    lines = content.splitlines()
    fields = read_object(file, lines[0] if len(lines) > 1 and lines[0].rstrip().endswith(b"}") else content)
    if aiperf.recognises(fields):
        return aiperf.read(file)
    if vllm_bench.recognises(fields):
        return vllm_bench.read(file)
    raise bad(file, f"is no result file we know; known are those of {WRITTEN_BY}")
