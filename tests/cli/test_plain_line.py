"""A command line that is read without typer means what it means to typer; and what only typer reads, it gets."""

from __future__ import annotations

import inspect
import os
from typing import Any

import pytest
from torpor.cli.calling import guarded
from torpor.cli.command_list import COMMANDS, command_named
from torpor.cli.plain_line import PlainLine, read_line
from torpor.cli.program import load_command
from torpor.cli.reach.options import enter_namespace

PLAIN = [
    "",
    "notes",
    "notes other",
    "--json",
    "notes --json",
    "--json notes --socket /run/s",
    "--socket=/run/s --store /a/b notes",
    "notes --namespace team",
    "--namespace team notes other --json",
    "notes text",
    "notes - --file x",
    "notes --label a --label b",
    "-y notes",
    "notes@3 out.mvb",
    "--label a",
    "team/notes --model m text --json",
]
LEFT_TO_TYPER = [
    "--help",
    "notes --help",
    "--no-such-option",
    "--json=yes",
    "--socket",
    "--socket --json",
    "--socket /a --socket /b",
    "-yx",
    "-- notes",
    "notes other third fourth fifth",
    "--seed 1 notes",
    "notes --bits 9",
]


def read(name: str, line: str) -> dict[str, Any] | None:
    command = command_named(name)
    assert command is not None
    return read_line(PlainLine(name), inspect.signature(guarded(command)), line.split())


@pytest.mark.parametrize("name", [command.name for command in COMMANDS])
def test_a_line_that_is_read_without_typer_is_read_as_typer_reads_it(name: str) -> None:
    for line in PLAIN:
        try:
            given = read(name, line)
        except Exception as refused:
            with pytest.raises(type(refused)):
                load_command(name).make_context(name, line.split())
            continue
        if given is not None:
            taken = load_command(name).make_context(name, line.split()).params
            assert given == {key: None if value == () else value for key, value in taken.items()}, line


@pytest.mark.parametrize("name", ["ls", "show", "sleep", "wake", "du", "tag", "chat", "doctor"])
def test_most_commands_need_no_typer(name: str) -> None:
    assert any(read(name, line) is not None for line in PLAIN)


@pytest.mark.parametrize("line", LEFT_TO_TYPER)
def test_help_mistakes_and_numbers_are_left_to_typer(line: str) -> None:
    for name in ("ls", "quantize", "set"):
        assert read(name, line) is None


def test_a_namespace_of_the_environment_holds_unless_the_line_has_one() -> None:
    line = PlainLine("show")
    enter_namespace(line, "team")
    command = command_named("show")
    assert command is not None
    signature = inspect.signature(guarded(command))
    assert (read_line(line, signature, ["notes"]) or {})["session"] == "team/notes"
    assert (read_line(line, signature, ["notes", "--namespace", "own"]) or {})["session"] == "own/notes"
    assert "TORPOR_NAMESPACE" not in os.environ
