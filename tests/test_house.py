"""The rules of the house, kept by a test: who may import whom, and what is found nowhere."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import fastload

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "fastload"

# A room imports only rooms to its left. What is in no room (errors, the extensions) is open to all.
ROOMS = ["plan", "load", "trace", "analysis", "report"]
# sim is the yard: it needs no room, and only the door opens it.
MAY_IMPORT = {
    "plan": set(),
    "load": {"plan"},
    "trace": {"plan", "load"},
    "analysis": {"plan", "load", "trace"},
    "report": {"plan", "load", "trace", "analysis"},
    "sim": set(),
    "cli": {*ROOMS, "sim"},
}
# Where a library may be used: a room, or a file's name up to the star.
LIBRARIES = {
    "click": ["cli/*"],
    "httpx": ["load/target*"],
    "uvloop": ["load/*", "sim/*"],
    "rich": ["cli/*", "report/*"],
}
WALL_CLOCK = {
    ("time", "time"),
    ("time", "time_ns"),
    ("datetime", "now"),
    ("datetime", "utcnow"),
    ("datetime", "today"),
}
BANNED_MODULES = {"utils", "util", "common", "helpers", "misc"}
BANNED_IN_NAMES = ("Manager", "Helper")

SOURCES = sorted(PACKAGE.rglob("*.py"))
COMPILED = sorted(PACKAGE.rglob("*.pyx"))
TEXTS = [
    path
    for folder in ("fastload", "tests", "bench", ".ci")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in {".py", ".pyx", ".pxd", ".pxi", ".pyi", ".md", ".toml", ".txt", ".json", ""}
    and path.is_file()
] + [path for path in sorted(ROOT.iterdir()) if path.is_file() and not path.name.startswith(".")]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything a file imports; names taken from fastload itself may be rooms."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import; write the room's name"
            if node.module == "fastload":
                yield from ((node.lineno, f"fastload.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, node.module or ""


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_imports_go_to_the_left(path: Path) -> None:
    inside = path.relative_to(PACKAGE)
    if len(inside.parts) == 1:
        return  # the front door names rooms, see test_front_door_is_lazy
    room = inside.parts[0]
    for line, module in imports(ast.parse(path.read_text())):
        parts = module.split(".")
        if parts[0] == "fastload" and len(parts) > 1 and parts[1] in MAY_IMPORT and parts[1] != room:
            assert parts[1] in MAY_IMPORT[room], f"line {line}: {room} must not import {module}"
        for library, places in LIBRARIES.items():
            if parts[0] == library:
                assert any(inside.match(place) for place in places), (
                    f"line {line}: {library} only in {places}"
                )


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_no_wall_clock_and_no_empty_names(path: Path) -> None:
    assert path.stem not in BANNED_MODULES and path.parent.name not in BANNED_MODULES
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else getattr(node.value, "attr", "")
            assert (owner, node.attr) not in WALL_CLOCK, (
                f"line {node.lineno}: wall clock; take it from _timing"
            )
        elif isinstance(node, ast.ImportFrom) and node.module == "time":
            names = {("time", alias.name) for alias in node.names}
            assert not names & WALL_CLOCK, f"line {node.lineno}: wall clock; take it from _timing"
        elif isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            bad = [word for word in BANNED_IN_NAMES if word.lower() in node.name.lower()]
            assert not bad, f"line {node.lineno}: {node.name} says nothing about what it is"


@pytest.mark.parametrize("path", COMPILED, ids=name_of)
def test_compiled_rooms_have_stubs_that_agree(path: Path) -> None:
    """Every public name of the stub is in the built module, with its members, and the other way round."""
    stub = ast.parse(path.with_suffix(".pyi").read_text())
    module = __import__(".".join(path.relative_to(ROOT).with_suffix("").parts), fromlist=["x"])
    declared: dict[str, set[str] | None] = {}
    for node in stub.body:
        if isinstance(node, ast.ClassDef):
            declared[node.name] = {
                name for part in node.body for name in _names(part) if not name.startswith("_")
            }
        else:
            declared |= dict.fromkeys(_names(node))
    public = {name for name in declared if not name.startswith("_")}
    assert not sorted(name for name in public if not hasattr(module, name)), "in the stub, not in the module"
    built = {
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and getattr(value, "__module__", module.__name__) == module.__name__
        and not isinstance(value, type(ast))
    }
    assert not sorted(built - public), "in the module, not in the stub"
    for name, members in declared.items():
        if members is not None and name in public:
            missing = sorted(member for member in members if not hasattr(getattr(module, name), member))
            assert not missing, f"{name}: in the stub, not in the class"


def _names(node: ast.stmt) -> list[str]:
    match node:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
        case ast.Assign(targets=targets):
            return [target.id for target in targets if isinstance(target, ast.Name)]
        case _:
            return []


def test_there_are_compiled_rooms() -> None:
    assert {"_timing", "_client"} <= {path.stem for path in COMPILED}


def test_no_file_names_a_path_of_somebodys_machine() -> None:
    places = [
        f"/{name}/" for name in ("work", "farm", "root", "home")
    ]  # put together, or this file would name them
    found = [
        f"{name_of(path)}:{number}: {line.strip()}"
        for path in TEXTS
        if "__pycache__" not in path.parts
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for place in places
        if line.find(place) >= 0
        and not line[max(0, line.find(place) - 1) : line.find(place)].strip(" \"'`(=")
    ]
    assert not found


def test_front_door_is_lazy() -> None:
    heavy = {"numpy", "pyarrow", "click", "httpx", "rich", "uvloop", "orjson", "asyncio"}
    assert loaded_by("import fastload") & heavy == set()
    for name in fastload.__all__:
        assert getattr(fastload, name) is not None
    assert sorted(dir(fastload)) == sorted(fastload.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        fastload.nothing  # noqa: B018


def test_help_loads_little() -> None:
    code = """
import sys
from fastload.cli import main
sys.argv = ["fastload", "sweep", "--help"]
try:
    main()
except SystemExit:
    pass
"""
    heavy = {
        "numpy",
        "pyarrow",
        "httpx",
        "rich",
        "uvloop",
        "asyncio",
        "fastload._client",
        "fastload.load.supervisor",
    }
    assert loaded_by(code) & heavy == set()


def loaded_by(code: str) -> set[str]:
    """The modules in `sys.modules` after `code` ran in a fresh interpreter."""
    code += "\nimport sys; print('\\0' + '\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.rpartition("\0")[2].split())
