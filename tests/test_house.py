"""Rules of the house that a machine can check. ARCHITECTURE.md says why they are."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = sorted((ROOT / "omnisim").rglob("*.py"))

ROOMS = (
    "errors",
    "talker",
    "trace",
    "talkers",
    "coverage",
    "workload",
    "known_vllm",
    "importers",
    "sim",
    "cache",
    "batch",
    "rows",
    "checks",
    "compare",
    "inputs",
    "subjects",
    "truth",
    "writes",
    "replay",
    "handed",
    "verdict",
    "explain",
    "verify",
    "workers",
    "versus",
    "matrix",
    "expectations",
    "bisect",
    "report",
    "bench",
    "cli",
    "__main__",
)
"""From the ground up: a module imports from its own room and from rooms before it."""

STANDS_ALONE = {"cache": "so that it can be used without the rest", "errors": "everybody needs it"}
MUST_NOT_SHARE = {room: {"cache", "subjects"} for room in ("truth", "checks", "compare", "inputs")}
"""The judge shares no code with what it judges, not even through a third room."""

MAY_IMPORT = {
    "vllm": {"known_vllm.py", "batch/vllm_batch.py", "sim/engine.py"},
    "rich": {"report", "bench", "cli"},
    "typer": {"cli"},
}
TORCHLESS = {"errors", "talker", "trace", "talkers", "coverage", "workload", "importers"}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT / "omnisim"))


def room_of(path: Path) -> str:
    return path.relative_to(ROOT / "omnisim").parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, anywhere in it (dotted names)."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}:{node.lineno}: a relative import"
            assert node.module is not None
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def rooms_imported(path: Path) -> set[str]:
    parts = (name.split(".") for name in imports(path))
    return {room for top, room, *_ in (part for part in parts if len(part) > 1) if top == "omnisim"} - {"__version__"}


def needs(room: str) -> set[str]:
    """Rooms that a room imports, directly or through others; not itself."""
    found: set[str] = set()
    new = {room}
    while new:
        new = {other for path in MODULES if room_of(path) in new for other in rooms_imported(path)} - found
        found |= new
    return found - {room}


@pytest.mark.parametrize("module", ["torch", "vllm", "numpy", "rich"])
def test_import_omnisim_loads_nothing_heavy(module: str) -> None:
    code = f"import omnisim, sys; sys.exit({module!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_every_room_has_its_place() -> None:
    assert {room_of(path) for path in MODULES} - {"__init__"} <= set(ROOMS)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_imports_only_from_rooms_before_its_own(path: Path) -> None:
    room = room_of(path)
    allowed = set(ROOMS[: ROOMS.index(room) + 1]) if room in ROOMS else set()
    assert rooms_imported(path) <= allowed


@pytest.mark.parametrize("room", STANDS_ALONE)
def test_a_room_that_stands_alone_imports_nothing_of_omnisim(room: str) -> None:
    assert needs(room) == set()


@pytest.mark.parametrize("room", MUST_NOT_SHARE)
def test_the_judge_shares_no_code_with_what_it_judges(room: str) -> None:
    assert needs(room) & MUST_NOT_SHARE[room] == set()


@pytest.mark.parametrize("library", MAY_IMPORT)
def test_a_library_is_imported_only_where_it_belongs(library: str) -> None:
    users = {path for path in MODULES if library in {name.split(".")[0] for name in imports(path)}}
    assert {name_of(path) for path in users if not {name_of(path), room_of(path)} & MAY_IMPORT[library]} == set()


@pytest.mark.parametrize("path", [path for path in MODULES if room_of(path) in TORCHLESS], ids=name_of)
def test_rooms_before_the_tensors_do_not_import_torch(path: Path) -> None:
    assert "torch" not in {name.split(".")[0] for name in imports(path)}


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_all_lists_the_public_classes_and_functions(path: Path) -> None:
    tree = ast.parse(path.read_text())
    told = listed(tree)
    if told is None:
        pytest.skip("it has no __all__")
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    assert len(told) == len(set(told))
    assert set(told) <= set(bound(tree)), "names that do not exist"
    assert {name for name in defined if not name.startswith("_")} <= set(told)
    assert not [name for name in told if name.startswith("_")]


def listed(tree: ast.Module) -> list[str] | None:
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__":
            names: list[str] = ast.literal_eval(node.value)
            return names
    return None


def bound(tree: ast.Module) -> Iterator[str]:
    """Names that a module's top level binds."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.ImportFrom | ast.Import):
            yield from (alias.asname or alias.name for alias in node.names)
        else:
            yield from (name.id for name in ast.walk(node) if isinstance(name, ast.Name))


def test_the_readme_tells_every_target_of_the_makefile() -> None:
    readme = ROOT / "README.md"
    if not readme.exists():
        pytest.skip("there is no README yet")
    targets = re.findall(r"^([a-z]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert targets
    assert [target for target in targets if f"make {target}" not in readme.read_text()] == []
