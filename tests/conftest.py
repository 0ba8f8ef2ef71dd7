"""What every test may use: servers to talk to, goldens, and an end to tests that hang."""

import contextlib
import gzip
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest
from hypothesis import HealthCheck, settings

from fastload import sim

# How long an example takes is the machine's affair, and no fact about the code.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

HERE = Path(__file__).parent
LIMIT_S = 60.0
LLAMA_READY_S = 30.0

SimUrl = Callable[..., str]
LlamaFactory = Callable[..., str]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update", action="store_true", help="write golden files anew instead of comparing")
    parser.addoption("--kills", type=int, default=3, help="how often e2e/test_kill.py kills each process")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "kill" in metafunc.fixturenames:
        metafunc.parametrize("kill", range(metafunc.config.getoption("--kills")))


@pytest.fixture
def update(request: pytest.FixtureRequest) -> bool:
    """Whether golden files are to be written anew."""
    return bool(request.config.getoption("--update"))


@pytest.fixture(scope="session", autouse=True)
def no_calibration(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests know nothing of the calibration a developer made on this host."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("FASTLOAD_CALIBRATION", str(tmp_path_factory.mktemp("host") / "calibration.json"))
        yield


@pytest.fixture(autouse=True)
def time_limit(request: pytest.FixtureRequest) -> Iterator[None]:
    """Ends a test that hangs: 60 s, or what `@pytest.mark.limit(seconds)` says."""
    marker = request.node.get_closest_marker("limit")
    seconds = float(marker.args[0]) if marker else LIMIT_S

    def over(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"the test took longer than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture
def sim_url() -> Iterator[SimUrl]:
    """`sim_url(step_ms=5, ...)` starts a simulated engine and gives its base URL; all end with the test."""
    with contextlib.ExitStack() as running:
        yield lambda cpu=None, **options: running.enter_context(sim.start(sim.Options(**options), cpu))


@pytest.fixture(scope="session")
def llama_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny scripted model, unpacked. Its words are known beforehand: see real/README.md."""
    model = tmp_path_factory.mktemp("model") / "tiny-chain.gguf"
    with gzip.open(HERE / "real" / "tiny-chain.gguf.gz") as packed, model.open("wb") as plain:
        shutil.copyfileobj(packed, plain)
    return model


@pytest.fixture(scope="session")
def llama_server(llama_model: Path) -> Iterator[str]:
    """The base URL of a real llama.cpp server with 16 slots on the scripted model."""
    with llama(llama_model, parallel=16) as (url, _):
        yield url


@pytest.fixture
def llama_factory(llama_model: Path) -> Iterator[LlamaFactory]:
    """`llama_factory(ngram=True)` starts another llama.cpp server and gives its base URL; all end with the
    test.

    Options: parallel (slots, 8), ngram (speculative decoding), ping (seconds of silence before an SSE
    comment), one_batch (all waiting prompts in one step), api_key.
    """
    with contextlib.ExitStack() as running:
        yield lambda **options: running.enter_context(llama(llama_model, **options))[0]


@pytest.fixture
def llama_process(llama_model: Path) -> Iterator[Callable[..., tuple[str, "subprocess.Popen[bytes]"]]]:
    """`llama_process(port=8000)` is `llama_factory` for who wants to kill it: (base URL, process)."""
    with contextlib.ExitStack() as running:
        yield lambda **options: running.enter_context(llama(llama_model, **options))


@contextlib.contextmanager
def llama(
    model: Path,
    parallel: int = 8,
    ngram: bool = False,
    ping: int = 0,
    one_batch: bool = False,
    api_key: str | None = None,
    port: int = 0,
) -> Iterator[tuple[str, "subprocess.Popen[bytes]"]]:
    """A llama.cpp server on a free port, or this one. Fails the test, and does not skip it, where xllamacpp is
    missing.
    """
    port = port or free_port()
    command = [sys.executable, "-P", str(HERE / "real" / "serve_llama.py"), str(model), "--port", str(port)]
    command += ["--parallel", str(parallel), "--ping", str(ping)]
    command += ["--ngram"] * ngram + ["--one-batch"] * one_batch
    environment = os.environ | ({"LLAMA_TEST_KEY": api_key} if api_key else {})
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment, start_new_session=True
        )
        try:
            if not _ready(process, port):
                log.seek(0)
                said = log.read().decode(errors="replace")[-2000:]
                pytest.fail(f"llama.cpp's server (xllamacpp, of the test extra) did not start:\n{said}")
            yield f"http://127.0.0.1:{port}", process
        finally:
            assert process.stdin is not None
            process.stdin.close()  # it ends by itself then, but need not be waited for
            process.kill()
            process.wait()


def free_port() -> int:
    """A loopback port nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _ready(process: subprocess.Popen[bytes], port: int) -> bool:
    """Wait until /health says 200; False if the server ends or takes too long."""
    give_up = time.monotonic() + LLAMA_READY_S
    while time.monotonic() < give_up and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            if connection.recv(64).startswith(b"HTTP/1.1 200"):
                return True
        time.sleep(0.05)
    return False
