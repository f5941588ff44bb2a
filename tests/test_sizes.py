"""How large a file, a class and a function may grow: one idea each. Counted on every file by parsing it."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("memvid", "snapshot", "daemon", "socket_api", "cli", "bench")
FILE_LINES = 600
CLASS_METHODS = 32
FUNCTION_LINES = 60
PARAMETERS = 10

# What a command takes are its options on the command line, a line each.
COMMANDS = "cli/commands/"

Function = ast.FunctionDef | ast.AsyncFunctionDef


@functools.cache
def _parsed() -> list[tuple[str, str, ast.Module]]:
    """Each file: its path, its text, and what it says."""
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    texts = [(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")) for path in paths]
    return [(path, text, ast.parse(text)) for path, text in texts]


def _functions() -> Iterator[tuple[str, Function]]:
    for path, _, tree in _parsed():
        yield from ((path, node) for node in ast.walk(tree) if isinstance(node, Function))


def _lines(function: Function) -> int:
    """From the first statement behind the docstring to the last one."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    last = function.end_lineno or 0
    return last - body[0].lineno + 1 if body else 0


def _parameters(function: Function) -> int:
    taken = function.args
    names = [each.arg for each in (*taken.posonlyargs, *taken.args, *taken.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")])


def test_no_file_is_longer_than_can_be_read_at_a_sitting() -> None:
    assert {path: text.count("\n") for path, text, _ in _parsed() if text.count("\n") > FILE_LINES} == {}


def test_no_class_has_more_methods_than_one_idea_needs() -> None:
    counts = {
        f"{path} {node.name}": sum(isinstance(each, Function) for each in node.body)
        for path, _, tree in _parsed()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    assert {name: count for name, count in counts.items() if count > CLASS_METHODS} == {}


def test_no_function_is_longer_than_a_screen() -> None:
    long = {f"{path} {function.name}": _lines(function) for path, function in _functions()}
    assert {name: lines for name, lines in long.items() if lines > FUNCTION_LINES} == {}


def test_no_function_takes_more_than_its_caller_can_keep_in_mind() -> None:
    many = {
        f"{path} {function.name}": _parameters(function)
        for path, function in _functions()
        if not path.startswith(COMMANDS)
    }
    assert {name: count for name, count in many.items() if count > PARAMETERS} == {}
