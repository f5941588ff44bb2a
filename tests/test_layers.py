"""The layer table of ARCHITECTURE.md, enforced on every file of the package by parsing it."""

from __future__ import annotations

import ast
import builtins
import functools
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
AT_ROOT = ("errors", "places", "records", "spellings", "tokenizer_files")
FOLDERS = ("memvid", "snapshot", "daemon", "socket_api", "cli")
MODULES = sorted([*ROOT.glob("*.py"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))])

# What each folder may import beside the standard library and the package's own root modules, which are "".
MAY_IMPORT: dict[str, tuple[set[str], set[str]]] = {
    # the clients, under the name of the package; the kinds of pydantic's settings; a digest; where folders belong
    "": ({"socket_api"}, {"pydantic", "blake3", "platformdirs"}),
    "memvid": (set(), {"msgpack", "zstandard", "blake3", "platformdirs", "obstore", "cryptography"}),
    "snapshot": ({"memvid"}, {"mlx", "mlx_lm", "numpy", "blake3", "platformdirs"}),
    "daemon": (
        {"snapshot", "memvid"},
        {
            *("mlx", "mlx_lm", "huggingface_hub", "numpy", "blake3", "llguidance", "pydantic", "pydantic_core"),
            *("dbus_fast", "tokenizers", "platformdirs"),
        },
    ),
    "socket_api": (
        set(),
        {
            *("msgpack", "pydantic", "pydantic_core", "platformdirs", "prometheus_client", "starlette", "uvicorn"),
            *("httptools", "mcp", "mcp_types", "opentelemetry", "ray"),
        },
    ),
    "cli": ({"memvid", "socket_api"}, {"typer", "rich", "textual", "pydantic", "platformdirs"}),
}
# What each folder holds, in the order in which it builds on itself: each may import what stands before it.
HOLDS: dict[str, tuple[str, ...]] = {
    "memvid": (
        *("errors", "limits", "uri", "units", "answers", "disk", "format", "format_1", "folder", "index", "writing"),
        *("checking", "exchange", "recovery", "maintenance", "remote", "access", "store", "operations"),
    ),
    "daemon": (
        *(
            "errors",
            "api",
            "views",
            "options",
            "events",
            "tasks",
            "models",
            "engine",
            "sessions",
            "disk",
            "versions",
            "prefixes",
            "memory",
        ),
        *("residency", "branches", "chat", "config", "upkeep", "parts", "verbs", "service", "available", "doctor"),
    ),
    "socket_api": ("limits", "errors", "tokens", "wire", "client", "mcp", "server", "http", "cluster", "main"),
    "cli": (
        *(
            "exit_codes",
            "view",
            "errors",
            "reach",
            "serve",
            "launch",
            "demo",
            "commands",
            "command_list",
            "calling",
            "help",
            "plain_line",
            "program",
            "completing",
            "registry",
            "detached",
        ),
        *("main", "tied"),
    ),
}
# The server half may import the daemon; everything else of the folder is the wire half and must not.
SERVER_HALF = {"server", "http", "cluster", "main"}
# But for what a verb is asked and answers, also by the store: records and errors that know neither MLX nor the engine,
# and are the same on both sides of the wire; and the options of a daemon, which commands take.
ON_BOTH_SIDES = {
    *(("daemon", name) for name in ("api", "errors", "options")),
    *(("memvid", name) for name in ("answers", "uri")),
}
# And for what files tell of sessions: commands that read a store list them as the daemon does.
OF_FILES = ("daemon", "views")
# The files that name mlx-lm's cache classes: the adapters, and their table.
CACHE_CLASSES = frozenset((ROOT / "snapshot").glob("kinds*.py"))


@functools.cache
def imports_of(path: Path, *, typing: bool = True) -> list[tuple[str, bool, int]]:
    """Every import of a file, wherever it stands: (name, whether it is of this package, line). typing: also those that
    a type checker alone follows."""
    return list(_imports_of(path, typing=typing))


def _imports_of(path: Path, *, typing: bool) -> Iterator[tuple[str, bool, int]]:
    package = path.relative_to(ROOT).parent.parts
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    for checked in [] if typing else [node for node in nodes if isinstance(node, ast.If)]:
        if ast.unparse(checked.test) == "TYPE_CHECKING":
            nodes = [node for node in nodes if node not in checked.body]
    for node in nodes:
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


def test_every_import_runs_with_the_layers() -> None:
    against = []
    for path in MODULES:
        folder = next(iter(path.relative_to(ROOT).parent.parts), "")
        own_folders, packages = MAY_IMPORT[folder]
        allowed = own_folders | ({"daemon"} if folder == "socket_api" and _part_of(path) in SERVER_HALF else set())
        for name, ours, line in imports_of(path):
            parts = tuple(part for part in name.split(".") if part and part != "torpor")
            first, shared = parts[:1], folder in ("socket_api", "cli") and parts[:2] in ON_BOTH_SIDES
            shared = shared or (folder == "cli" and parts[:2] == OF_FILES)
            may = (
                not first or first[0] == folder or first[0] not in FOLDERS or first[0] in allowed or shared
                if ours
                else name.split(".")[0] in sys.stdlib_module_names | packages
            )
            if not may:
                against.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
    assert not against


def _part_of(path: Path) -> str:
    """The folder or module of its layer that a file belongs to; empty for the layer's own `__init__`."""
    parts = path.relative_to(ROOT).with_suffix("").parts[1:]
    return "" if parts == ("__init__",) else parts[0]


@pytest.mark.parametrize("folder", HOLDS)
def test_what_a_folder_holds_builds_on_itself_without_a_circle(folder: str) -> None:
    """The whole of it is named, and each part says in its docstring what it owns."""
    order = HOLDS[folder]
    modules = [path for path in MODULES if path.is_relative_to(ROOT / folder) and _part_of(path)]
    assert {_part_of(path) for path in modules} == set(order)
    for path in modules:
        for name, ours, line in imports_of(path):
            parts = name.removeprefix("torpor.").split(".")
            if ours and parts[0] == folder and len(parts) > 1 and parts[1] in order:
                where = f"{path.relative_to(ROOT)}:{line} imports {name}"
                assert order.index(parts[1]) <= order.index(_part_of(path)), where
    for package in (ROOT / folder).glob("*/__init__.py"):
        assert ast.get_docstring(ast.parse(package.read_text(encoding="utf-8"))), package


OF_ALL = {
    "memvid": {"errors", "limits", "uri", "units", "operations"},
    "daemon": {"errors", "available", "doctor"},
    "socket_api": {"limits", "errors"},
    "cli": {"exit_codes", "errors", "detached", "main", "tied"},
}
"""What the map leaves out: what all use, and what starts a layer."""


@pytest.mark.parametrize("folder", HOLDS)
def test_the_map_has_the_order_of_a_folder(folder: str) -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").partition("## Order inside a layer")[2]
    row = re.search(rf"^{folder} +(.*(?:\n +─.*)*)", text, re.MULTILINE)
    assert row is not None
    named = [part.strip().removesuffix(".py") for part in row[1].split("─")]
    assert named == [part for part in HOLDS[folder] if part not in OF_ALL[folder]]


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Not within functions either, where Python would let them."""
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in MODULES}
    imported: dict[str, set[str]] = {}
    for module, path in modules.items():
        names = [name for name, ours, _ in imports_of(path, typing=False) if ours]
        imported[module] = modules.keys() & {*names, *(name.rpartition(".")[0] for name in names)}
    graphlib.TopologicalSorter(imported).prepare()  # raises CycleError


def test_imports_between_folders_are_relative() -> None:
    absolute = []
    for path in MODULES:
        lines = path.read_text(encoding="utf-8").splitlines()
        for name, ours, line in imports_of(path):
            if ours and lines[line - 1].strip().startswith(("import torpor", "from torpor")):
                absolute.append(f"{path.relative_to(ROOT)}:{line}: {name}")
    assert not absolute


def test_tests_import_each_other_by_one_name() -> None:
    """As `torpor.tests.…`: under two names a rig would be two modules. Those that pytest loads itself have a name of
    its own, so no other imports them. The tests of clients run where torpor is not."""
    tests = ROOT / "tests"
    paths = [path for path in tests.rglob("*.py") if not path.is_relative_to(tests / "clients")]
    by_another, against = {"tests", *(path.stem for path in paths)}, []
    for path in paths:
        for name, ours, line in imports_of(path):
            first, *parts = name.split(".")
            if first in by_another or (ours and any(part.startswith(("test_", "conftest")) for part in parts)):
                against.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
    assert not against


def test_the_records_of_the_verbs_know_nothing_else_of_the_daemon() -> None:
    for path in (ROOT / "daemon" / "api").rglob("*.py"):
        for name, ours, line in imports_of(path):
            known = tuple(name.split(".")[:2]) in ON_BOTH_SIDES or name.split(".")[0] not in FOLDERS
            assert known if ours else name.split(".")[0] in sys.stdlib_module_names | {"pydantic"}, f"{path}:{line}"


def test_no_module_of_cli_brings_the_daemon_or_mlx() -> None:
    """Not even through the server half: `torpor serve` alone imports it, when it becomes the daemon."""
    names = sorted(
        ".".join(("torpor", *path.relative_to(ROOT).with_suffix("").parts))
        for path in (ROOT / "cli").rglob("*.py")
        if path.stem != "__init__"
    )
    barred = {
        "mlx",
        "mlx_lm",
        *(f"torpor.daemon.{name}" for name in HOLDS["daemon"] if ("daemon", name) not in {*ON_BOTH_SIDES, OF_FILES}),
        "torpor.snapshot",
        *(f"torpor.socket_api.{name}" for name in SERVER_HALF),
    }
    script = f"""
import importlib, sys
for name in {names}:
    importlib.import_module(name)
print(sorted({barred} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "[]"
    becoming = {path.name for path in (ROOT / "cli").rglob("*.py") if any(_of_server_half(path))}
    assert becoming == {"serve.py", "serve_ray.py"}


def _of_server_half(path: Path) -> Iterator[str]:
    for name, ours, _ in imports_of(path):
        parts = name.removeprefix("torpor.").split(".")
        if ours and parts[0] == "socket_api" and SERVER_HALF & set(parts[1:2]):
            yield name


def test_only_the_adapters_of_caches_name_the_cache_classes_of_mlx_lm() -> None:
    for path in MODULES:
        if path in CACHE_CLASSES:
            continue
        for name, ours, line in imports_of(path):
            assert ours or "Cache" not in name, f"{path.relative_to(ROOT)}:{line}: {name}"


@pytest.mark.parametrize(
    ("package", "folder"),
    [("obstore", "memvid/remote"), ("cryptography", "memvid/remote"), ("ray", "socket_api/cluster")],
)
def test_what_an_extra_brings_is_imported_within_functions_of_one_folder_alone(package: str, folder: str) -> None:
    """It takes time: who has no remote, no sealed one, or no cluster, imports nothing of it."""
    for path in MODULES:
        if any(name.split(".")[0] == package for name, ours, _ in imports_of(path) if not ours):
            assert path.parent == ROOT / folder, path
            for each in ast.parse(path.read_text(encoding="utf-8")).body:
                assert package not in ast.unparse(each) or not isinstance(each, (ast.Import, ast.ImportFrom)), path


def test_the_table_covers_every_folder_of_the_package() -> None:
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert packages == set(FOLDERS)


def test_no_module_of_the_package_escapes_these_tests() -> None:
    at_root = {path.name for path in MODULES if path.parent == ROOT}
    assert at_root == {"__init__.py", *(f"{name}.py" for name in AT_ROOT)}
    assert {path.parent.relative_to(ROOT).parts[0] for path in MODULES if path.parent != ROOT} == set(FOLDERS)


# T14: what may never be named anywhere in the package, because bytes of a store or a peer could reach it.
BANNED_MODULES = {"pickle", "_pickle", "cPickle", "dill", "shelve", "marshal", "runpy", "torch", "joblib", "yaml"}
BANNED_NAMES = {
    *(f"builtins.{name}" for name in ("eval", "exec", "globals", "compile", "__import__")),
    *(f"os.{name}" for name in ("system", "popen")),
    "importlib.import_module",
    "mlx.core.load",
    "numpy.load",
}
# What they are found in: nothing there may be looked up under a name that only a run tells.
OWNERS = {name.rpartition(".")[0] for name in BANNED_NAMES}
# Arguments that may only ever be False.
BANNED_ARGUMENTS = {"allow_pickle", "shell"}
# Expands to as much as its frame says, which one file looks at first.
DECOMPRESS = "decompress"
# What a file may name all the same: a header of its own making and no bytes of anybody else's; a frame that it checked;
# the modules of the commands, whose names stand in the source beside it.
ALLOWED = {
    ROOT / "snapshot" / "memory.py": {"mlx.core.load"},
    ROOT / "memvid" / "format" / "codecs.py": {DECOMPRESS},
    ROOT / "cli" / "calling.py": {"importlib.import_module"},
}


class Names:
    """What the names of a module stand for: dotted names, through imports, their aliases, and assignments of these."""

    def __init__(self, tree: ast.AST) -> None:
        self._meant: dict[str, set[str]] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    whole = alias.name if alias.asname else alias.name.partition(".")[0]
                    self._bind(alias.asname or whole, {whole})
            elif isinstance(node, ast.ImportFrom) and not node.level:
                for alias in node.names:
                    self._bind(alias.asname or alias.name, {f"{node.module}.{alias.name}"})
        assigned = [node for node in ast.walk(tree) if isinstance(node, (ast.Assign, ast.AnnAssign, ast.NamedExpr))]
        while any(self._assign(node) for node in assigned):
            pass

    def of(self, node: ast.AST | None) -> set[str]:
        """All that an expression may stand for; nothing for what is no name."""
        if isinstance(node, ast.Name):
            own = {f"builtins.{node.id}"} if hasattr(builtins, node.id) else set()
            return self._meant.get(node.id, set()) | own
        if isinstance(node, ast.Attribute):
            return {f"{owner}.{node.attr}" for owner in self.of(node.value)}
        if isinstance(node, ast.Call) and "builtins.getattr" in self.of(node.func) and len(node.args) > 1:
            name = node.args[1].value if isinstance(node.args[1], ast.Constant) else "*"
            return {f"{owner}.{name}" for owner in self.of(node.args[0])}
        return set()

    def _assign(self, node: ast.Assign | ast.AnnAssign | ast.NamedExpr) -> bool:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return any(self._bind(target.id, self.of(node.value)) for target in targets if isinstance(target, ast.Name))

    def _bind(self, name: str, meant: set[str]) -> bool:
        """Whether it was not known yet."""
        known = self._meant.setdefault(name, set())
        before = len(known)
        known |= meant
        return len(known) > before


def banned_in(source: str) -> set[str]:
    """All that is banned in a source: dotted names, modules, and arguments that are not False."""
    tree = ast.parse(source)
    names, found = Names(tree), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names} & BANNED_MODULES
        elif isinstance(node, ast.ImportFrom) and not node.level:
            module = node.module or ""
            found |= {module.partition(".")[0]} & BANNED_MODULES
            found |= {f"{module}.{alias.name}" for alias in node.names} & BANNED_NAMES
            found |= {f"{module}.*" for alias in node.names if alias.name == "*" and module in OWNERS}
        elif isinstance(node, ast.Call):
            found |= {
                f"{each.arg}="
                for each in node.keywords
                if each.arg in BANNED_ARGUMENTS
                and not (isinstance(each.value, ast.Constant) and each.value.value is False)
            }
            if "builtins.vars" in names.of(node.func) and node.args:
                found |= {f"{owner}.*" for owner in names.of(node.args[0]) & OWNERS}
        elif isinstance(node, ast.Attribute) and node.attr == DECOMPRESS:
            found.add(DECOMPRESS)
        elif isinstance(node, ast.Name) and node.id == "__builtins__":
            found.add("builtins.*")
        for name in names.of(node):
            owner, _, last = name.rpartition(".")
            if name in BANNED_NAMES:
                found.add(name)
            elif owner in OWNERS and last in ("*", "__dict__"):
                found.add(f"{owner}.*")
    return found


def test_nothing_that_could_run_stored_bytes_is_used_t14() -> None:
    found = {path: banned_in(path.read_text(encoding="utf-8")) for path in MODULES}
    assert {path: names for path, names in found.items() if names} == ALLOWED


@pytest.mark.parametrize(
    ("source", "banned"),
    [
        *((f"import {module}", module) for module in sorted(BANNED_MODULES)),
        *((f"from {module}.part import name", module) for module in sorted(BANNED_MODULES)),
        *((name.replace("builtins.", ""), name) for name in sorted(BANNED_NAMES) if name.startswith("builtins.")),
        *((f"import {name.rpartition('.')[0]}\n{name}(x)", name) for name in sorted(BANNED_NAMES)),
        *((f"from {name.rpartition('.')[0]} import {name.rpartition('.')[2]}", name) for name in sorted(BANNED_NAMES)),
        ("from os import system as go\ngo('x')", "os.system"),
        ("import os as o\no.system('x')", "os.system"),
        ("import builtins as b\nb.eval('x')", "builtins.eval"),
        ("import mlx.core as mx\ndef f():\n    return mx.load('x')", "mlx.core.load"),
        ("from mlx import core\ncore.load('x')", "mlx.core.load"),
        ("from mlx import core as c\nm = c\nn = m\nload = n.load", "mlx.core.load"),
        ("def f():\n    import numpy as np\n    return np.load('x', allow_pickle=True)", "numpy.load"),
        ("f('x', allow_pickle=True)", "allow_pickle="),
        ("f('x', allow_pickle=wanted)", "allow_pickle="),
        ("run('x', shell=True)", "shell="),
        ("call = eval", "builtins.eval"),
        ("map(eval, texts)", "builtins.eval"),
        ("import builtins\ngetattr(builtins, 'eval')('x')", "builtins.eval"),
        ("import os\ngetattr(os, name)('x')", "os.*"),
        ("import os\nos.__dict__['system']('x')", "os.*"),
        ("import os\nvars(os)['system']('x')", "os.*"),
        ("from os import *", "os.*"),
        ("__builtins__['eval']('x')", "builtins.*"),
        ("reader.decompress(data)", DECOMPRESS),
    ],
)
def test_what_is_banned_is_found_however_it_is_named_t14(source: str, banned: str) -> None:
    assert banned in banned_in(source)


@pytest.mark.parametrize(
    "source",
    [
        "import re\nre.compile('x')",
        "self.load(path)",
        "import os\nos.path.join(a, b)\ngetattr(thing, name)",
        "from .memory import load\nload(x)",
        "import mlx_lm\nmlx_lm.load(folder)",
        "read(path, allow_pickle=False)",
    ],
)
def test_what_only_looks_alike_is_left_alone_t14(source: str) -> None:
    assert not banned_in(source)
