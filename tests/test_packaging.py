"""What a stranger's machine makes of the source: public fault reports P01 to P09."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
NEITHER = shutil.ignore_patterns("*.so", "*.c", "__pycache__", "data", "captures", "results", "*.gz")
PARTS = ("fastload", "setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE")


def copied(to: Path) -> Path:
    """The sources, without what was built from them."""
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, to / part, ignore=NEITHER)
        else:
            shutil.copy(ROOT / part, to / part)
    return to


def built(source: Path, *commands: str, cc: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "setup.py", "-q", *commands],
        cwd=source,
        env=os.environ | {"CC": cc},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_p01_uvloop_is_not_asked_for_where_it_cannot_be_had() -> None:
    (uvloop,) = [needed for needed in PROJECT["project"]["dependencies"] if needed.startswith("uvloop")]
    _, _, marker = uvloop.partition(";")
    assert "sys_platform" in marker and "win32" in marker


@pytest.mark.limit(120)
def test_p03_and_p07_the_sdist_has_no_c_and_a_compiler_that_fails_is_named(tmp_path: Path) -> None:
    source = copied(tmp_path)
    ended = built(source, "sdist", "build_ext", cc="/bin/false")
    assert ended.returncode != 0 and "Traceback" not in ended.stderr
    last = ended.stderr.splitlines()[-1]
    assert last.startswith("error: ") and "/bin/false" in last
    (archive,) = (source / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as inside:
        names = inside.getnames()
    assert any(name.endswith("fastload/_timing.pyx") for name in names)
    assert [name for name in names if name.endswith((".c", ".so"))] == []
    # the C is made at build time, by the Cython that the build asks for
    assert any(needed.startswith("Cython") for needed in PROJECT["build-system"]["requires"])
    ended = built(source, "build_ext", cc="/nowhere/gcc")
    assert ended.returncode == 1 and ended.stderr.splitlines()[-1].startswith(
        "fastload needs a C compiler (/nowhere/gcc"
    )


def test_p05_nothing_says_that_it_runs_without_the_gil() -> None:
    """Nobody has checked it; so no wheel for free-threaded Pythons may claim it."""
    assert not any("Free Threading" in said for said in PROJECT["project"]["classifiers"])
    sources = [*(ROOT / "fastload").rglob("*.py[xd]"), ROOT / "setup.py"]
    assert not any("freethreading_compatible =" in path.read_text() for path in sources)
    assert not any('"freethreading_compatible"' in path.read_text() for path in sources)


def test_p09_a_missing_source_ends_the_build_and_a_missing_part_is_named(tmp_path: Path) -> None:
    source = copied(tmp_path)
    (source / "fastload" / "_client.pyx").unlink()
    ended = built(source, "build_ext", cc="gcc")
    assert ended.returncode == 1 and ended.stderr == (
        "fastload cannot be built: the source of fastload._client is missing\n"
    )
    asked = subprocess.run(
        [sys.executable, "-c", "import fastload._client"], cwd=source, capture_output=True, text=True, check=False
    )
    assert asked.returncode == 1 and "No module named 'fastload._client'" in asked.stderr
