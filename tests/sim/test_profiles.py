"""Profiles: what is packaged says where it is from; what cannot be meant is refused by the field's name."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from fastload.cli.order import SIM_PROFILES
from fastload.errors import PlanError
from fastload.sim import profiles
from fastload.sim.profiles import parse

TEXT = """
name = "mine"
source = "a test"
[prefill]
batch = [1, 8]
ms = [50, 80.5]
[decode]
batch = [1]
ms = [10]
"""


def test_packaged_profiles_are_those_the_command_names_and_cite_their_source() -> None:
    assert set(profiles.names()) == set(SIM_PROFILES) - {"lockstep"}
    for name in profiles.names():
        profile = profiles.load(name)
        assert profile.name == name and "July 2026" in profile.source
        assert (profile.speculation is not None) == name.endswith("-spec")


def test_profile_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(TEXT)
    profile = profiles.load(str(file))
    assert profile.name == "mine" and profile.prefill.knots.at(8) == 80.5 and profile.speculation is None


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (("batch = [1, 8]", "batch = [8, 1]"), "prefill.batch"),
        (("ms = [50, 80.5]", "ms = [50]"), "prefill.ms"),
        (("[decode]", "[decoding]"), "decoding: not known"),
        (("[decode]", "[scheduler]\nmax_num_seqs = 0\n[decode]"), "scheduler.max_num_seqs 0"),
        (("[decode]", "[scheduler]\nlate_results = true\n[decode]"), "scheduler.late_results"),
        (("[decode]", "[speculation]\nacceptance = [1.5]\nbatch = [1]\nms = [1]\n[decode]"), "speculation.acceptance"),
        (('name = "mine"', "name = 5"), "name: a text"),
    ],
)
def test_what_cannot_be_meant_is_named(change: tuple[str, str], word: str) -> None:
    with pytest.raises(PlanError, match=word.replace(".", r"\.").replace("[", r"\[")):
        parse(tomllib.loads(TEXT.replace(*change, 1)))


def test_unknown_profiles_and_files() -> None:
    with pytest.raises(PlanError, match="vllm-direct"):
        profiles.load("warp")
    with pytest.raises(PlanError, match="cannot be read"):
        profiles.load("nowhere.toml")


@pytest.mark.limit(120)
def test_the_reports_tables_come_back_in_simulated_time() -> None:
    """bench/twin.py over the pure model: its exit code is 0 when nothing is off that is not named as odd."""
    twin = Path(__file__).parent.parent.parent / "bench" / "twin.py"
    done = subprocess.run(
        [sys.executable, str(twin), "--in-simulated-time"], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 off: the tables come back" in done.stdout
