"""The list of commands is whole: no file of a command is left out of it, and no verb without a word about it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from torpor.cli.command_list import COMMANDS
from torpor.daemon.api.verbs import VERBS

FOLDER = Path(__file__).parents[2] / "cli" / "commands"
COMMAND_OF = {
    "causes": "why",
    "contents": "cat",
    "difference": "diff",
    "create": "append",
    "delete": "rm",
    "import_bundle": "import",
    "list": "ls",
    "load_model": "models",
    "maintain": "repack",
    "history": "log",
    "mark": "tag",
    "plan_wake": "wake",
    "remote": "ls",
    "shutdown": "stop",
    "status": "doctor",
    "subscribe": "events",
    "unload_model": "models",
    "usage": "du",
}
"""The command that asks for a verb, where it has another name."""

WITHOUT_COMMAND = {
    *("converse", "measure", "recall", "disown"),  # what the APIs of HTTP are made of
    *("tree", "branch", "prefill", "produce", "commit", "advance"),  # most of branches is for programs
    *("guide", "retain", "keep", "branches"),
}


def test_every_verb_has_a_command_or_is_named_as_one_without() -> None:
    names = {command.name for command in COMMANDS}
    assert COMMAND_OF.keys() | WITHOUT_COMMAND <= VERBS.keys()
    missing = {verb for verb in VERBS.keys() - WITHOUT_COMMAND if COMMAND_OF.get(verb, verb) not in names}
    assert not missing, "give it a command in cli/commands, or name it here"


def files_behind(name: str) -> Iterator[str]:
    """A module of the folder, and those that it imports from there."""
    yield name
    for node in ast.walk(ast.parse((FOLDER / f"{name}.py").read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module:
            yield from files_behind(node.module)


def test_every_file_of_a_command_is_behind_a_row_of_the_list() -> None:
    listed = {command.function.split(".")[1] for command in COMMANDS if command.function.startswith("commands.")}
    reached = {file for name in listed for file in files_behind(name)}
    files = {file.stem for file in FOLDER.glob("*.py")} - {"__init__"}
    assert files == reached, "give its command a row in cli/command_list.py"
