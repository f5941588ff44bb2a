"""The layer table of ARCHITECTURE.md, enforced on every file of the package by parsing it."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("memvid", "snapshot", "daemon", "socket_api", "cli")
MODULES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))

# What each folder may import beside the standard library and the package's own root modules.
MAY_IMPORT: dict[str, tuple[set[str], set[str]]] = {
    "memvid": (set(), {"msgpack", "zstandard", "blake3", "platformdirs"}),
    "snapshot": ({"memvid"}, {"mlx", "mlx_lm", "numpy", "blake3", "platformdirs"}),
    "daemon": ({"snapshot", "memvid"}, {"mlx", "mlx_lm", "numpy", "blake3", "pydantic", "watchfiles"}),
    "socket_api": (set(), {"msgpack", "pydantic", "platformdirs"}),
    "cli": ({"memvid", "socket_api"}, {"typer", "rich", "pydantic", "platformdirs"}),
}
# The server half may import the daemon; everything else of the folder is the wire half and must not.
SERVER_HALF = {"dispatch", "main", "served", "server", "serving"}
# The one file that names mlx-lm's cache classes.
CACHE_CLASSES = ROOT / "snapshot" / "kinds.py"


def imports_of(path: Path) -> Iterator[tuple[str, bool, int]]:
    """Every import of a file, wherever it stands: (name, whether it is of this package, line)."""
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, alias.name.split(".")[0] == "torpor", node.lineno
        elif isinstance(node, ast.ImportFrom):
            if node.level == 0:
                for alias in node.names:
                    yield f"{node.module}.{alias.name}", (node.module or "").split(".")[0] == "torpor", node.lineno
                continue
            base = package[: len(package) - node.level + 1]
            for alias in node.names:
                yield ".".join([*base, *(node.module or "").split("."), alias.name]).strip("."), True, node.lineno


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_import_runs_with_the_layers(path: Path) -> None:
    folder = path.relative_to(ROOT).parts[0]
    own_folders, packages = MAY_IMPORT[folder]
    allowed = own_folders | ({"daemon"} if folder == "socket_api" and path.stem in SERVER_HALF else set())
    for name, ours, line in imports_of(path):
        where = f"{path.relative_to(ROOT)}:{line} imports {name}"
        first = [part for part in name.split(".") if part and part != "torpor"][:1]
        if ours:
            assert not first or first[0] == folder or first[0] not in FOLDERS or first[0] in allowed, where
        else:
            top = name.split(".")[0]
            assert top in sys.stdlib_module_names or top in packages, where


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_between_folders_are_relative_and_at_the_top(path: Path) -> None:
    for name, ours, line in imports_of(path):
        if ours:
            source = path.read_text(encoding="utf-8").splitlines()[line - 1].strip()
            assert not source.startswith(("import torpor", "from torpor")), f"{path.relative_to(ROOT)}:{line}: {name}"


def test_only_one_file_names_the_cache_classes_of_mlx_lm() -> None:
    for path in MODULES:
        if path == CACHE_CLASSES:
            continue
        for name, ours, line in imports_of(path):
            assert ours or "Cache" not in name, f"{path.relative_to(ROOT)}:{line}: {name}"


def test_the_table_covers_every_folder_of_the_package() -> None:
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert packages == set(FOLDERS)


# T14: what may never be called anywhere in the package, because bytes of a store or a peer could reach it.
BANNED_MODULES = {"pickle", "cPickle", "dill", "shelve", "marshal", "torch", "joblib"}
BANNED_CALLS = {"eval", "exec", "globals", "compile", "__import__"}
# Except in the one file that gives `mx.load` a header of its own making, and no bytes of anybody else's.
ALLOWED = {(ROOT / "snapshot" / "memory.py", ("mx", "load"))}
BANNED_ATTRIBUTES = {("mx", "load"), ("torch", "load"), ("yaml", "load"), ("np", "load"), ("os", "system")}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_that_could_run_stored_bytes_is_used_t14(path: Path) -> None:
    for name, _, line in imports_of(path):
        assert name.split(".")[0] not in BANNED_MODULES, f"{path.relative_to(ROOT)}:{line}: {name}"
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        where = f"{path.relative_to(ROOT)}:{node.lineno}"
        if isinstance(node.func, ast.Name):
            assert node.func.id not in BANNED_CALLS, f"{where}: {node.func.id}"
        elif isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
            called = node.func.value.id, node.func.attr
            assert called not in BANNED_ATTRIBUTES or (path, called) in ALLOWED, f"{where}: {node.func.attr}"
