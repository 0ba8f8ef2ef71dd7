"""Build of the compiled rooms. Everything else about the package stands in pyproject.toml.

Environment:
  FASTLOAD_COVERAGE=1           line tracing and bounds checks on, into a build folder of its own (slow: for tests,
                                not for measuring)
  FASTLOAD_ANNOTATE=1           Cython's annotated HTML beside the generated C, under build/
  FASTLOAD_SANITIZE=address,..  the compiler's sanitizers, as -fsanitize= has them; see bench/fuzz.py, which builds so
                                into a folder of its own
"""

import os
import shlex
import shutil
import sysconfig
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

NEEDED = {"fastload._timing", "fastload._client"}
COVERAGE = os.environ.get("FASTLOAD_COVERAGE") == "1"
ANNOTATE = os.environ.get("FASTLOAD_ANNOTATE") == "1"
SANITIZE = os.environ.get("FASTLOAD_SANITIZE")

# The one place for directives: no .pyx has its own. freethreading_compatible is not set: nobody has checked
# that it is true.
DIRECTIVES = {
    "language_level": 3,
    "boundscheck": COVERAGE,
    "wraparound": False,
    "cdivision": True,
    "initializedcheck": False,
    "embedsignature": True,
    "linetrace": COVERAGE,
}
FLAGS = ["-O3"]
LINK_FLAGS = []
if SANITIZE:
    FLAGS = ["-O1", "-g", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all", f"-fsanitize={SANITIZE}"]
    LINK_FLAGS = [f"-fsanitize={SANITIZE}"]
MACROS = [("CYTHON_TRACE", "1"), ("CYTHON_TRACE_NOGIL", "1")] if COVERAGE else []


def extensions() -> list[Extension]:
    """One extension for each .pyx, as C under build/: the source tree stays free of generated files."""
    found = {
        ".".join(path.with_suffix("").parts): path.as_posix() for path in Path("fastload").rglob("*.pyx")
    }
    missing = sorted(NEEDED - found.keys())
    if missing:
        raise SystemExit(f"fastload cannot be built: the source of {', '.join(missing)} is missing")
    return cythonize(
        [
            Extension(name, [source], define_macros=MACROS, extra_compile_args=FLAGS, extra_link_args=LINK_FLAGS)
            for name, source in sorted(found.items())
        ],
        build_dir="build/cython-coverage" if COVERAGE else "build/cython",
        compiler_directives=DIRECTIVES,
        annotate=ANNOTATE,
    )


class Build(build_ext):
    """Says in one line what is missing, before a compiler says it in a hundred."""

    def build_extensions(self) -> None:
        compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")[0]
        if shutil.which(compiler) is None:
            raise SystemExit(
                f"fastload needs a C compiler ({compiler} is not there): apt install gcc python3-dev"
            )
        headers = [Path(folder, "Python.h") for folder in self.compiler.include_dirs]
        if not any(header.exists() for header in headers):
            raise SystemExit(
                f"fastload needs Python's C headers ({headers[0]} is not there): apt install python3-dev"
            )
        super().build_extensions()


setup(ext_modules=extensions(), cmdclass={"build_ext": Build})
