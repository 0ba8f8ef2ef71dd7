"""The first signal ends the run in order, the second at once; before a run a signal leaves nothing behind."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from fastload.cli import signals


def test_a_first_signal_raises_while_there_is_nobody_to_ask() -> None:
    with pytest.raises(signals.Interrupted) as caught, signals.installed():
        signal.raise_signal(signal.SIGTERM)
    assert caught.value.signum == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_first_signal_asks_the_run_to_stop() -> None:
    asked: list[int] = []
    with signals.installed() as brake:
        brake.ask = asked.append
        signal.raise_signal(signal.SIGINT)
        assert asked == [signal.SIGINT] and brake.signum == signal.SIGINT


@pytest.mark.parametrize(("second", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 130)])
def test_a_second_signal_leaves_at_once(second: signal.Signals, code: int) -> None:
    program = (
        "import time\nfrom fastload.cli import signals\n"
        "with signals.installed() as brake:\n    brake.ask = lambda n: print('asked', flush=True)\n"
        "    print('ready', flush=True)\n    time.sleep(30)\n"
    )
    with subprocess.Popen([sys.executable, "-P", "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "asked\n"
        process.send_signal(second)
        assert process.wait() == code


def test_a_second_signal_hurries_where_there_is_something_to_keep_and_a_third_leaves() -> None:
    program = (
        "import time\nfrom fastload.cli import signals\n"
        "with signals.installed() as brake:\n    brake.ask = lambda n: print('asked', flush=True)\n"
        "    brake.hurry = lambda: print('hurried', flush=True)\n"
        "    print('ready', flush=True)\n    time.sleep(30)\n"
    )
    with subprocess.Popen([sys.executable, "-P", "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for said, signum in (("ready", signal.SIGTERM), ("asked", signal.SIGINT), ("hurried", signal.SIGINT)):
            assert process.stdout.readline() == f"{said}\n"
            process.send_signal(signum)
        assert process.wait(10) == 128 + signal.SIGTERM


def test_a_hangup_ends_nothing() -> None:
    with signals.installed() as brake:
        signal.raise_signal(signal.SIGHUP)
        assert brake.hung_up and brake.signum is None
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_waiting_for_the_server(signum: signal.Signals, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    program = f"from fastload.cli import main; main(['sweep', '--url', {url!r}, '--wait-ready', '1h'])"
    with subprocess.Popen(
        [sys.executable, "-P", "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    ) as process:
        assert process.stderr is not None and process.stdout is not None
        assert "waiting up to 3600 s" in process.stderr.readline()
        process.send_signal(signum)
        assert process.wait() == 128 + signum
        said = process.stderr.read().splitlines()
        assert said[-1] == f"fastload: stopped by {signum.name} before the run began"
        assert process.stdout.read() == ""
    assert list(tmp_path.iterdir()) == []


def test_serve_sim_ends_by_a_signal(tmp_path: Path) -> None:
    program = "from fastload.cli import main; main(['serve-sim', '--port', '0', '--json'])"
    with subprocess.Popen(
        [sys.executable, "-P", "-c", program], stdout=subprocess.PIPE, text=True, cwd=tmp_path
    ) as process:
        assert process.stdout is not None
        assert '"simulated": true' in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait() == 130
