"""What the documents and the messages of the store tell people to type: each option is one that its command has."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from torpor.cli.command_list import COMMANDS
from torpor.cli.program import load_command

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = {
    command.name: {
        option
        for parameter in load_command(command.name).params
        for option in (*parameter.opts, *parameter.secondary_opts)
    }
    for command in COMMANDS
}


def told_in(text: str) -> Iterator[tuple[str, str]]:
    """Each command in backticks or on a line of its own, with each long option that follows."""
    text = re.sub(r' "\n\s*f?"', " ", text)  # a message that goes on in the next line
    for command, rest in re.findall(r"(?:`|^)torpor ([a-z-]+)\b([^`\n|&;#]*)", text, re.MULTILINE):
        own, _, _ = rest.partition(" -- ")  # what follows is another program's
        yield from ((command, option) for option in re.findall(r"(?<=\s)--[a-z][a-z-]*", own))


@pytest.mark.parametrize("pattern", ["*.md", "docs/**/*.md", "memvid/**/*.py"])
def test_every_option_that_somebody_is_told_to_type_is_one_of_its_command(pattern: str) -> None:
    told = {one for path in ROOT.glob(pattern) for one in told_in(path.read_text(encoding="utf-8"))}
    assert told
    unknown = {(command, option) for command, option in told if option not in OPTIONS.get(command, ())}
    assert unknown - {(command, "--help") for command in OPTIONS} == set()
