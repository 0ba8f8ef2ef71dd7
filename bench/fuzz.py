"""Does the byte machine hold on bytes no server ever sent? Two builds of it, with sanitizers, in a temporary folder.

`fuzz.py asan` (gcc): 10 million random bytes, as many of random tokens of the grammar, as many of real answers with
changes, each in random cuts: no crash, no hang, no byte read beyond its read, no undefined behaviour, and the same
story as from the uncut bytes. Then the tests of machine and engine in that build.

`fuzz.py guided` (clang, atheris): libFuzzer looks for inputs that reach new edges of the machine; for each, cut and
whole, the machine must say what the readable twin says (tests/wire/fuzzed.py). `--keep` writes the inputs that made a
difference into the corpus of the tests.

A finding ends it with exit code 1, and the input stands in a file.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import rig

ROOT = Path(__file__).resolve().parent.parent
WIRE = ROOT / "tests" / "wire"
INSIDE = Path(__file__).with_name("fuzz_inside.py")
TESTS = ("tests/test_timing.py", "tests/test_client.py", "tests/test_client_faults.py", "tests/wire")
SANITIZERS = "address,undefined"
LONGEST = 1024  # bytes of an input: longer ones are slower, and find no other edges
HANG_S = 20
PULSE = re.compile(r"^#(?=\d+\s+(INITED|pulse|DONE|NEW|REDUCE))(\d+)\s+\w+ +cov: (\d+) ft: (\d+) corp: (\d+)", re.M)


def main() -> None:
    """Build, see that the sanitizer sees, feed, tell."""
    given = rig.order(__doc__ or "", choices)
    given.runs = 1
    with tempfile.TemporaryDirectory(prefix="fastload-fuzz-") as name:
        {"asan": at_random, "guided": guided}[given.what](given, Path(name))


def choices(words: argparse.ArgumentParser) -> None:
    words.add_argument("what", choices=("asan", "guided"))
    words.add_argument("--bytes", type=int, default=10_000_000, metavar="N", help="asan: of each kind [10 million]")
    words.add_argument("--seed", type=int, default=1, metavar="N", help="of what is random [1]")
    words.add_argument("--seconds", type=int, default=300, metavar="N", help="guided: how long to look [300]")
    words.add_argument("--keep", action="store_true", help="guided: write the corpus of the tests anew")


# ---------------------------------------------------------------- random bytes


def at_random(given: argparse.Namespace, folder: Path) -> None:
    """`asan`: one process, a table of what it was fed."""
    compiler = os.environ.get("CC", "gcc")
    build(folder, compiler, f"{compiler} -shared", SANITIZERS)
    library = subprocess.run([compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    inside = Inside(folder, library.stdout.strip())
    inside.must_see()
    current = folder / "current"
    done = inside.run("random", str(given.seed), str(given.bytes), str(current))
    if done.returncode:
        found(done, current)
    tests = inside.start("-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", *TESTS)
    if tests.returncode:
        found(tests)
    rig.answer(
        given, "fuzz", f"The byte machine under -fsanitize={SANITIZERS}: no finding", "none: nothing is timed",
        ("what", "bytes taken", "answers", "reads", "seconds"), json.loads(done.stdout),
        packages=rig.versions("Cython"),
        notes=(
            "each read lay in memory of its own size; each answer was read whole as well, and told the same story",
            f"an overread made on purpose was seen; a hang would have ended it; --seed {given.seed}",
            f"the tests of machine and engine in the same build: {tests.stdout.strip().splitlines()[-1]}",
        ),
    )  # fmt: skip


# ---------------------------------------------------------------- guided by coverage


def guided(given: argparse.Namespace, folder: Path) -> None:
    """`guided`: libFuzzer for so many seconds, a table of what it reached."""
    library = atheris_library()
    build(folder, "clang", "clang -shared", f"{SANITIZERS},fuzzer-no-link")
    inside = Inside(folder, library)
    inside.must_see()
    corpus, start, words = folder / "corpus", folder / "start", folder / "words"
    corpus.mkdir()
    start.mkdir()
    inside.run("start", str(start), str(words)).check_returncode()
    options = [f"-max_len={LONGEST}", f"-timeout={HANG_S}", "-rss_limit_mb=4096", f"-artifact_prefix={folder}/input-"]
    done = inside.run(
        "guided", *options, f"-max_total_time={given.seconds}", f"-seed={given.seed}", f"-dict={words}",
        str(corpus), str(start),
    )  # fmt: skip
    inputs = sorted(folder.glob("input-*"))
    if done.returncode or inputs:
        found(done, *inputs)
    seen = [(kind, *map(int, numbers)) for kind, *numbers in PULSE.findall(done.stderr)]
    if not seen or seen[-1][0] != "DONE":
        raise SystemExit(f"libFuzzer did not get to its end:\n{done.stderr[-2000:]}")
    notes = [
        "edges: of the machine's own code, of "
        + (re.search(r"\((\d+) inline 8-bit counters\)", done.stderr) or ["", "?"])[1]
        + " with Cython's glue around it; features: edges by how often",
        "each input: the machine, cut and whole, against the twin; each read in memory of its own size",
    ]
    if given.keep:
        best = folder / "best"
        best.mkdir()
        inside.run("guided", *options, "-merge=1", str(best), str(corpus), str(start)).check_returncode()
        notes.append(f"the corpus of the tests is new: {inside.run('keep', str(best)).stdout.strip()}")
    rig.answer(
        given, "fuzz", f"The byte machine against its twin, guided by its own edges for {given.seconds} s: no finding",
        "none: nothing is timed", ("inputs tried", "edges", "features", "inputs kept"),
        [list(numbers) for _, *numbers in thinned(seen)],
        packages=rig.versions("Cython", "atheris"), notes=notes,
    )  # fmt: skip


def thinned(seen: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """The start, each doubling of what was tried, the end."""
    rows = [one for one in seen if one[0] == "INITED"]
    for one in seen:
        if rows and one[1] >= 2 * rows[-1][1]:
            rows.append(one)
    return [*rows, seen[-1]]


def atheris_library() -> str:
    """What must be loaded before all else, so that the machine's counters reach atheris' libFuzzer."""
    try:
        import atheris
    except ImportError:
        raise SystemExit("atheris is not there: pip install '.[fuzz]' (Linux on x86-64)") from None
    return str(Path(atheris.path()) / "asan_with_fuzzer.so")


# ---------------------------------------------------------------- builds and processes


class Inside:
    """Starts bench/fuzz_inside.py on the package in `folder`, under the sanitizer's library."""

    def __init__(self, folder: Path, library: str) -> None:
        if not Path(library).is_file():
            raise SystemExit(f"the sanitizer's library is not there: {library}")
        self.environment = os.environ | {
            "LD_PRELOAD": library,
            "PYTHONPATH": os.pathsep.join([str(folder / "lib"), str(WIRE)]),
            "PYTHONDONTWRITEBYTECODE": "1",
            # Python leaks at its end; short stacks and a small quarantine: three times the inputs
            "ASAN_OPTIONS": "detect_leaks=0:malloc_context_size=3:quarantine_size_mb=16",
            "UBSAN_OPTIONS": "print_stacktrace=1",
        }

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.start(str(INSIDE), *arguments)

    def start(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-P", *arguments], cwd=ROOT, env=self.environment, capture_output=True, text=True,
            errors="replace", check=False,
        )  # fmt: skip

    def must_see(self) -> None:
        """A sanitizer that sees no overread made on purpose proves nothing."""
        done = self.run("overread")
        if done.returncode == 0 or "heap-buffer-overflow" not in done.stderr:
            raise SystemExit(f"an overread made on purpose was not seen:\n{done.stderr[-2000:]}")


def build(folder: Path, compiler: str, linker: str, sanitizers: str) -> None:
    """The package with sanitizers, into folder/lib."""
    if shutil.which(compiler) is None:
        raise SystemExit(f"{compiler} is not there: apt install {compiler}")
    command = [sys.executable, "setup.py", "-q", "build", f"--build-base={folder}", f"--build-lib={folder / 'lib'}"]
    environment = os.environ | {"CC": compiler, "LDSHARED": linker, "FASTLOAD_SANITIZE": sanitizers}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the build with sanitizers failed:\n{done.stderr[-3000:]}")


def found(done: subprocess.CompletedProcess[str], *inputs: Path) -> None:
    """What the sanitizer or the twin said, the input in a file that stays, and exit code 1."""
    said = done.stdout + done.stderr  # atheris tells of exceptions on the one, sanitizers on the other
    begins = [at for word in ("==ERROR", "runtime error", "Traceback", "Uncaught") if (at := said.find(word)) >= 0]
    print(said[min(begins, default=0) :][:6000], file=sys.stderr)
    for path in inputs:
        kept = Path(tempfile.mkdtemp(prefix="fastload-finding-")) / path.name
        shutil.copy(path, kept)
        print(f"the input: {kept}", file=sys.stderr)
    raise SystemExit(1)


if __name__ == "__main__":
    main()
