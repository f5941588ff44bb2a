"""T3: the store with one flush left out or one pair of steps swapped. Each must be caught by the power-loss replay, or
by the test or the sweep that it names.

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

FLUSHES: Final = frozenset({"sync_file", "sync_folder", "_sync", "sync", "fsync", "fdatasync"})
EARLY: Final = "tape: acknowledge before the work"
NONE: Final = "none"


SWAPS: Final = (
    Mutant(
        "a pack is flushed after it got its name",
        (
            Edit("pack_writer", "PackWriter.finish", "self._temp.sync()"),
            Edit("folder", "StoreFolder.publish", put_in="temp.sync()", after="temp.publish("),
        ),
    ),
    Mutant(
        "a manifest comes before its pack",
        (Edit("core", "StoreCore.publish_version", "self.publish(temp", before="for pack, pack_id in packs"),),
    ),
    Mutant(
        "a new name is flushed before it is given",
        (Edit("durable", "TempFile.publish", "sync_folder(self._folder_fd, self._folder_path)", before="os.rename("),),
    ),
    Mutant(
        "the index's file still tells of what is deleted",
        (Edit("deletion", "_drop", "core.index.forget_in_file("),),
    ),
    Mutant(
        "the index's file lets go once the manifests are gone",
        (Edit("deletion", "_drop", "core.index.forget_in_file(", before="core.folder.flush(names)"),),
    ),
    Mutant(
        "a removed index is taken for gone, though its removal was not flushed",
        (Edit("index", "Index.__init__", "self._has_file = True", "self._has_file = False"),),
    ),
    Mutant(
        "the newest version goes first",
        (Edit("deletion", "delete_versions", put_in="bundle_ids = bundle_ids[::-1]", before="marks ="),),
    ),
    Mutant(
        "the turns of a session go after its newest version",
        (Edit("deletion", "delete_versions", "core.journal.drop(uri)", before="removed ="),),
    ),
    Mutant(
        "a tag goes after its version",
        (Edit("deletion", "_unmarking", "_unmark(core, bundle_ids, strips=False)"),),
        test="sweep:kill:marks",
    ),
    Mutant(
        "a strip goes before its version",
        (
            Edit(
                "deletion",
                "_unmarking",
                "_unmark(core, bundle_ids, strips=False)",
                "_unmark(core, bundle_ids, strips=True)",
            ),
        ),
        test="sweep:kill:strip",
    ),
    Mutant(
        "old packs go before the new one has its name",
        (
            Edit(
                "repack", "_Repack._commit", put_in="core.remove_packs(pack.name for pack in step.olds)", before="with "
            ),
        ),
        test="sweep:kill:repack_into_one",
    ),
    Mutant(
        "a damaged pack moves before its sound blocks are in a new one",
        (
            Edit("mending", "Mending._mend", "place =", 'place = ""'),
            Edit("mending", "Mending._mend", put_in="self._core.folder.move_to_damaged(name)", before="new ="),
        ),
        test="sweep:kill:repair_around",
    ),
    Mutant(
        "a sleep tells the journal before it is done",
        (Edit("sleeping", "write_version", put_in="core.journal.cover(request.uri)", before="receipt ="),),
    ),
    Mutant(EARLY),
)

_NEEDS: Final = (
    Mutant(
        "what is needed is asked of the index",
        (
            Edit(
                "needs",
                "Needs.now",
                "there, unknown =",
                "there, unknown = self._folder.list_versions() & set(known), []",
            ),
        ),
        test="sweep:put_back:",
    ),
    Mutant(
        "unknown needs stop no removal",
        (Edit("removal", "remove_unneeded", "if needed.unknown"),),
        test="sweep:put_back:",
    ),
    Mutant(
        "a manifest that is missing or damaged needs nothing",
        (Edit("needs", "Needs.now", "unknown.append(finding)", "pass"),),
        test="sweep:put_back:",
    ),
    Mutant(
        "a version that only a tag tells of needs nothing",
        (Edit("removal", "needed_now", "known =", "known = core.index.bundle_ids()"),),
        test="tests/memvid/writing/test_removal.py::test_a_version_of_which_no_index_tells_is_missing_keeps_its_packs_and_comes_back",
    ),
    Mutant(
        "what a reader has open is removed",
        (Edit("removal", "needed_now", "pinned =", "pinned = ()"),),
        test="tests/memvid/test_delete.py::test_a_reader_goes_on_when_its_session_is_deleted",
    ),
    Mutant(
        "a refused version stays",
        (Edit("core", "StoreCore.publish_version", "self._take_back("),),
        test="sweep:errno:sleep_new",
    ),
    Mutant(
        "rows of a deleted version go after its manifest",
        (Edit("deletion", "_drop", "core.index.drop([bundle_id])", after="with undoing("),),
        test="sweep:errno:delete",
    ),
)

EQUIVALENT: Final[dict[str, str]] = {
    "durable.TempFile.sync_behind without `sync_file(self.fd, self.path)`": (
        "the flush at the end covers what it flushes, and no scenario has a pack that is long enough for it; that the "
        "reading back comes behind it is tested "
        "(`test_each_frame_is_flushed_then_read_back_once_and_the_pack_is_the_same`)"
    ),
    "folder_objects._flush without `os.fsync(fd)`": (
        "no recorded scenario has a remote; a test of its own has the order "
        "(`test_a_content_is_flushed_before_it_has_its_name_and_the_name_before_it_is_told`)"
    ),
    "folder_objects._flush without `fcntl.fcntl(fd, fcntl.F_FULLFSYNC)`": "as the one beside it, and on a Mac alone",
    "folder.journal.Journal._lengthen without `durable.sync_file(self._fd, self.path)`": (
        "the flush of the record behind it flushes the file's length too; this one makes a filesystem that gives room "
        "late say at once that there is none"
    ),
    "folder.journal.Journal._take_back without `durable.sync_file(self._fd, self.path)`": (
        "runs only where a write has failed, which no recorded scenario has; a test of its own has it "
        "(`test_a_whole_record_that_is_refused_is_taken_back_durably`)"
    ),
    "folder.StoreFolder.copy_to_damaged without `temp.sync()`": (
        "no recorded scenario has a manifest under another's name; a test has it "
        "(`test_what_gives_way_is_certain_before_the_new_file_has_its_name`)"
    ),
    "durable.move without `sync_folder(from_fd, from_path)`": (
        "a rename is one stroke and certain by its new folder; the flush is for filesystems on which it is two"
    ),
    "carrying_over._renew_marks without `durable.sync_folder(root_fd, path)`": (
        "counts where a power cut follows a kill between store.json's name and its flush, which no scenario has; "
        "tests/memvid/recovery/test_carrying_over.py has it"
    ),
    "carrying_over._remove without `durable.sync_folder(folder_fd, path)`": (
        "what comes back of the old store is of no use to the new one, and the next opening does not read it"
    ),
    "carrying_over._remove_folder without `durable.sync_folder(root_fd, path)`": "as the one beside it",
    "carrying_over._Carrying._require_saved without `durable.sync_file(fd, index.path)`": (
        "of versions without a file only the index tells then; that a power cut may lose that is told in "
        "docs/explanation/durability.md, and no scenario promises them"
    ),
    "carrying_over._Carrying._require_saved without `durable.sync_folder(self.folder.root_fd, self.folder.path)`": (
        "as the one beside it"
    ),
    "folder.StoreFolder.remove_old_folder without `durable.sync_folder(self.root_fd, self.path)`": (
        "an empty folder that comes back is removed by the next repack"
    ),
    "durable._sync without `fcntl.fcntl(fd, fcntl.F_FULLFSYNC)`": "runs on macOS only; the line beside it is the same",
}


# --- finding them


def package_folder() -> Path:
    """Where the package's source is, without importing it."""
    spec = importlib.util.find_spec("torpor")
    assert spec.origin is not None
    return Path(spec.origin).parent


def modules() -> dict[str, Path]:
    """Each module of memvid by its name; of two of one name by that of its package too. Those of the daemon by their
    whole path: `daemon.parts.sessions`."""
    root, found = package_folder(), dict[str, list[Path]]()
    for path in _of_the_store(root / "memvid"):
        found.setdefault(path.stem, []).append(path)
    named = {
        (stem if len(paths) == 1 else f"{path.parent.name}.{stem}"): path
        for stem, paths in found.items()
        for path in paths
    }
    daemon = sorted((root / "daemon").rglob("*.py"))
    return named | {".".join(path.relative_to(root).with_suffix("").parts): path for path in daemon}


def _of_the_store(root: Path) -> list[Path]:
    """The modules of the store, less those that read format 1."""
    return sorted(path for path in root.rglob("*.py") if path.name != "__init__.py" and path != root / "format_1.py")


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
    return name in FLUSHES or (name == "fcntl" and "F_FULLFSYNC" in ast.unparse(node))


def _flushes(function: ast.AST) -> list[ast.Call]:
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call) and _is_flush(node)]
    return sorted(calls, key=lambda node: (node.lineno, node.col_offset))


def _leave_out(function: _Function, flush: ast.Call) -> None:
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
    mutants = [*flush_mutants(), *SWAPS, *_NEEDS, *JOURNAL]
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
