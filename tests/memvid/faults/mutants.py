"""T3: the store with one flush left out or one pair of steps swapped. Each must be caught by the power-loss replay, or
by the test that it names.

Owns the making of mutants: the source of a module is changed as a syntax tree while it is imported, in a process of its
own (`mutant_child.py`), which records the scenarios; this process replays what it recorded with the code as it is.
Every call of a flush anywhere in memvid is found by itself, so a new one without a scenario that needs it fails the
test. The swaps are named by the text of their statements; one that no longer applies is an error.

A mutant that no scenario can tell from the code stands in EQUIVALENT with its reason; if one is caught, the reason is
wrong, and that fails too.

This module imports no layer of torpor: the child uses it before.
"""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from torpor.tests.memvid.faults.journal_mutants import JOURNAL
from torpor.tests.memvid.faults.mutant import Edit, Mutant

FLUSHES: Final = frozenset({"sync_file", "sync_folder", "_sync", "sync", "fsync", "fdatasync", "_settle"})
_FLUSHING_SQL: Final = "wal_checkpoint"
EARLY: Final = "tape: acknowledge before the work"
NONE: Final = "none"


SWAPS: Final = (
    Mutant(
        "the file is flushed after it got its name",
        (
            Edit("writer", "BundleWriter.finish", "self._temp.sync()"),
            Edit("durable", "TempFile.publish", put_in="self.sync()", after="sync_folder(folder_fd, folder_path)"),
        ),
    ),
    Mutant(
        "the new name is flushed before it is given",
        (Edit("durable", "TempFile.publish", "sync_folder(folder_fd, folder_path)", before="os.rename("),),
    ),
    Mutant(
        "the index row comes before the bundle file",
        (Edit("sleeping", "publish", "core.folder.publish(", after="core.index.add("),),
    ),
    Mutant(
        "nothing flushes the name of a bundle's folder",
        (
            Edit("durable", "make_folder", "sync_folder(", before="os.mkdir("),
            Edit("durable", "TempFile.publish", "sync_folder(self._folder_fd"),
        ),
    ),
    Mutant(
        "a retired name is flushed before it is given",
        (Edit("folder", "StoreFolder.retire", "durable.sync_folder(", before="durable.rename("),),
    ),
    Mutant(
        "the newest version is retired first",
        (Edit("deletion", "delete_session", put_in="bundle_ids.reverse()", after="bundle_ids = index.bundles_of"),),
    ),
    Mutant(
        "a dropped row is settled before it is dropped",
        (Edit("index", "Index.drop", "self._settle()", before="self._transaction()"),),
    ),
    Mutant(
        "nothing flushes that a file is about to be written anew",
        (Edit("index", "Index.begin_rewrite", "self._settle()"), Edit("index", "Index._count_on_disk", "sync_folder(")),
    ),
    Mutant(
        "a refused sleep's file is flushed away before it is removed",
        (Edit("folder", "StoreFolder.remove", "durable.sync_folder(", before="durable.remove("),),
    ),
    Mutant(EARLY),
)

EQUIVALENT: Final[dict[str, str]] = {
    "folder.journal.Journal._lengthen without `durable.sync_file(self._fd, self.path)`": (
        "the flush of the record behind it flushes the file's length too; this one makes a filesystem that gives room "
        "late say at once that there is none"
    ),
    "folder.journal.Journal._take_back without `durable.sync_file(self._fd, self.path)`": (
        "runs only where a write has failed, which no recorded scenario has; a test of its own has it "
        "(`test_a_whole_record_that_is_refused_is_taken_back_durably`)"
    ),
    "durable._sync without `fcntl.fcntl(fd, fcntl.F_FULLFSYNC)`": "runs on macOS only; the line beside it is the same",
    "durable.TempFile.publish without `sync_folder(self._folder_fd, self._folder_path)`": (
        "a rename is one stroke and certain by its new folder; what else this flush covers, the name of a bundle's "
        "folder, make_folder has flushed (without both: a swap of its own, which is caught), and that temporary files "
        "of a session are gone, its forget flushes"
    ),
    "quarantine._move without `durable.sync_folder(from_fd, from_path)`": (
        "a rename is one stroke and certain by its new folder, which is flushed first; the flush is for filesystems on "
        "which it is two, where the file would have two names"
    ),
    "quarantine.move_back without `durable.sync_folder(fd, _path(folder))`": (
        "a rename is one stroke and certain by its new folder, which is flushed first; the flush is for filesystems on "
        "which it is two, where the file would have a second name in quarantine"
    ),
    "index.Index.return_to_file without `temp.sync()`": (
        "an index whose pages do not have their sums is made anew from the bundles and the notes; the flush saves a "
        "power cut that work"
    ),
    "index.Index.begin_rewrite without `self._settle()`": (
        "the count in the folder's name is flushed next, and an index that is older than that is made anew from the "
        "bundles and the versions without a file that it tells of; the flush saves a power cut that work (without "
        "both: a swap of its own, which is caught)"
    ),
}


# --- finding them


def package_folder() -> Path:
    """Where the package's source is, without importing it."""
    spec = importlib.util.find_spec("torpor")
    assert spec.origin is not None
    return Path(spec.origin).parent


def modules() -> dict[str, Path]:
    """Each module of memvid by its name; of two of one name by that of its package too. Those of the daemon by their
    whole path: `daemon.parts`."""
    root, found = package_folder(), dict[str, list[Path]]()
    for path in sorted((root / "memvid").rglob("*.py")):
        found.setdefault(path.stem, []).append(path)
    named = {
        (stem if len(paths) == 1 else f"{path.parent.name}.{stem}"): path
        for stem, paths in found.items()
        for path in paths
    }
    daemon = sorted((root / "daemon").rglob("*.py"))
    return named | {".".join(path.relative_to(root).with_suffix("").parts): path for path in daemon}


_Function = ast.FunctionDef | ast.AsyncFunctionDef


def _functions(tree: ast.AST, above: str = "") -> Iterator[tuple[str, _Function]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, _Function):
            yield f"{above}{node.name}", node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{node.name}.")


def _is_flush(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    return name in FLUSHES or (name == "fcntl" and "F_FULLFSYNC" in ast.unparse(node)) or _is_flushing_sql(node)


def _is_flushing_sql(node: ast.Call) -> bool:
    is_execute = isinstance(node.func, ast.Attribute) and node.func.attr == "execute"
    return is_execute and any(isinstance(arg, ast.Constant) and _FLUSHING_SQL in str(arg.value) for arg in node.args)


def _flushes(function: ast.AST) -> list[ast.Call]:
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call) and _is_flush(node)]
    return sorted(calls, key=lambda node: (node.lineno, node.col_offset))


def _leave_out(function: _Function, flush: ast.Call) -> None:
    if _is_flushing_sql(flush):
        flush.args = [ast.Constant("SELECT 0, 0, 0")]  # what a checkpoint answers
        return
    for node in ast.walk(function):
        if isinstance(node, ast.Expr) and node.value is flush:
            _replace(function, node, [])
            return
    raise AssertionError(f"`{ast.unparse(flush)}` in {function.name} is not a statement of its own")


def flush_mutants() -> list[Mutant]:
    """One for each flush in the source of memvid."""
    found = []
    for module, path in modules().items():
        if module.startswith("daemon."):
            continue
        for name, function in _functions(ast.parse(path.read_text())):
            for number, call in enumerate(_flushes(function)):
                what = ast.unparse(call)[:60]
                found.append(Mutant(f"{module}.{name} without `{what}`", flush=(module, name, number)))
    return found


def all_mutants() -> dict[str, Mutant]:
    mutants = [*flush_mutants(), *SWAPS, *JOURNAL]
    named = {mutant.name: mutant for mutant in mutants}
    if len(named) != len(mutants):
        raise AssertionError("two mutants have one name")
    return named


# --- making them


def _replace(tree: ast.AST, old: ast.stmt, new: list[ast.stmt]) -> None:
    for node in ast.walk(tree):
        for block in ("body", "orelse", "finalbody"):
            statements = getattr(node, block, None)
            if isinstance(statements, list) and old in statements:
                at = statements.index(old)
                statements[at : at + 1] = new or [ast.Pass()]
                return
    raise AssertionError("the statement is in no block")


def _statement(function: ast.FunctionDef, text: str) -> ast.stmt:
    """The smallest statement whose source holds `text`; the first of several."""
    holding = [
        node for node in ast.walk(function) if isinstance(node, ast.stmt) and node is not function
        and text in ast.unparse(node)
    ]  # fmt: skip
    if not holding:
        raise AssertionError(f"no statement of {function.name} holds {text!r}: the mutant needs new words")
    return min(holding, key=lambda node: (len(ast.unparse(node)), node.lineno))


def _edit(tree: ast.Module, edit: Edit) -> None:
    functions = dict(_functions(tree))
    if edit.function not in functions:
        raise AssertionError(f"{edit.module} has no {edit.function}: the mutant needs new words")
    function = functions[edit.function]
    anchor_text = edit.after or edit.before
    anchor = _statement(function, anchor_text) if anchor_text else None
    taken = None
    if edit.take_out:
        taken = _statement(function, edit.take_out)
        in_its_place = ast.parse(edit.put_in).body if edit.put_in and anchor is None else []
        _replace(function, taken, in_its_place)
    if anchor is not None:
        new = ast.parse(edit.put_in).body if edit.put_in else [taken]
        assert all(statement is not None for statement in new)
        placed = [anchor, *new] if edit.after else [*new, anchor]
        _replace(function, anchor, placed)  # type: ignore[arg-type]


def mutate(tree: ast.Module, module: str, mutant: Mutant) -> ast.Module:
    """Change a module's syntax tree as the mutant says."""
    if mutant.flush is not None and mutant.flush[0] == module:
        _, name, number = mutant.flush
        function = dict(_functions(tree))[name]
        _leave_out(function, _flushes(function)[number])
    for edit in mutant.edits:
        if edit.module == module:
            _edit(tree, edit)
    return ast.fix_missing_locations(tree)


def touched_by(mutant: Mutant) -> set[str]:
    """The modules that a mutant changes."""
    return {edit.module for edit in mutant.edits} | ({mutant.flush[0]} if mutant.flush else set())


def install(mutant: Mutant) -> None:
    """From now on the package is imported as the mutant has it."""
    touched = {str(path): name for name, path in modules().items() if name in touched_by(mutant)}
    real = importlib.machinery.SourceFileLoader.get_code

    def get_code(loader: Any, fullname: str) -> types.CodeType | None:
        path = loader.get_filename(fullname)
        if not fullname.startswith("torpor.") or path not in touched:
            return real(loader, fullname)
        tree = mutate(ast.parse(Path(path).read_text()), touched[path], mutant)
        code: types.CodeType = compile(tree, path, "exec")
        return code

    importlib.machinery.SourceFileLoader.get_code = get_code  # type: ignore[method-assign,assignment]
