"""What a message advises means the store of the command that shows it."""

from __future__ import annotations

import contextlib
import re
import shlex
from pathlib import Path

import pytest
from torpor.cli.command_list import COMMANDS
from torpor.cli.program import load_command
from torpor.cli.view.advice import OF_ANY_STORE, ON_FILES, advising_for, naming_store, naming_store_in
from torpor.cli.view.output import plain, typed
from torpor.memvid.errors import SessionNotFound
from torpor.tests.cli.cli_rig import MadeStore, Torpor
from torpor.tests.socket_api.server_rig import ServerThread


def test_the_commands_that_are_made_to_name_a_store_are_those_that_take_one() -> None:
    taking = {
        command.name
        for command in COMMANDS
        if any("--store" in parameter.opts for parameter in load_command(command.name).params)
    }
    assert taking == ON_FILES | OF_ANY_STORE


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("let `torpor repair` do it", "let `torpor repair --store '/b k'` do it"),
        ("`torpor rm a@3`, `torpor untag a x`", "`torpor rm a@3 --store '/b k'`, `torpor untag a x --store '/b k'`"),
        ("`torpor wake a --at 9` goes on", "`torpor wake a --at 9` (once `torpor serve --store '/b k'` runs) goes on"),
        ("`torpor repair --store /other`", "`torpor repair --store /other`"),
        ("`torpor ensure --socket /s`", "`torpor ensure --socket /s`"),
        ("what `torpor export` has written", "what `torpor export` has written"),
        ("stop it (`torpor stop`)", "stop it (`torpor stop`)"),
        ("the session torpor://default/rm", "the session torpor://default/rm"),
    ],
)
def test_a_command_that_is_advised_names_the_store_if_it_can_or_how_to_serve_it(message: str, told: str) -> None:
    assert plain(message) == message
    with advising_for(Path("/b k")):
        assert plain(message) == told
        assert naming_store_in({"problems": [{"message": message, "session": message}]}) == {
            "problems": [{"message": told, "session": message}]
        }
    assert naming_store(message) == message


def test_a_command_in_colour_and_an_error_name_the_store_too() -> None:
    error = SessionNotFound("See `torpor ls`.")
    with contextlib.suppress(SessionNotFound), advising_for(Path("/bk")):
        assert typed("torpor ls") == "[cyan]torpor ls --store /bk[/]"
        raise error
    assert error.message == "See `torpor ls --store /bk`."
    assert typed("torpor ls") == "[cyan]torpor ls[/]"


def test_what_is_advised_about_damage_means_the_store_that_was_named(
    torpor: Torpor, made_store: MadeStore, daemon: ServerThread, tmp_path: Path
) -> None:
    """The daemon serves another store, and has a session of this name."""
    torpor("append", "agent", "one")
    torpor("sleep", "agent")
    made_store.manifests[1].unlink()
    advised = re.compile(r"`torpor (rm [^`]*)`")
    told = {
        found
        for command in ("show", "export")
        for found in advised.findall(
            made_store(command, "agent", *([tmp_path / "x"] if command == "export" else ()), "--json").err
        )
    }
    told |= set(advised.findall(made_store("verify", "--json").out)) | set(advised.findall(made_store("repair").out))
    (command,) = told
    assert torpor(*shlex.split(command), "--yes").status == 0
    assert [version["version"] for version in made_store("show", "agent", "--json").document["versions"]] == [1]
    assert made_store("verify", "--deep").status == 0
    assert len(daemon.service.sessions["agent"].versions) == 1
