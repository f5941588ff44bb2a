"""The beginning of a session's name, where nothing is changed."""

from __future__ import annotations

from pathlib import Path

import pytest
from torpor.cli.command_list import COMMANDS, LOOKING
from torpor.memvid.store import Store
from torpor.memvid.uri import SessionUri
from torpor.tests.cli.cli_rig import Torpor
from torpor.tests.memvid import store_making as making


@pytest.fixture
def store(short_path: Path) -> Path:
    path = short_path / "store"
    with Store.open(path, writable=True) as store:
        for number, name in enumerate(("notes", "notes-of-march", "notes-of-may", "writer-of-long-texts")):
            making.sleep(store, 3, uri=SessionUri("default", name), seed=number)
        making.sleep(store, 4, uri=SessionUri("team", "writer-elsewhere"), seed=9)
    return path


def test_a_beginning_that_one_session_has_is_enough_and_is_told(torpor: Torpor, store: Path) -> None:
    for typed, rest in (("wri", ""), ("default/writer-of", "@1"), ("torpor://default/w", "")):
        ran = torpor("show", typed + rest, "--store", store, "--json")
        assert ran.document["info"]["session"] == "torpor://default/writer-of-long-texts"
        assert ran.err == ""
    ran = torpor("show", "wri", "--store", store)
    assert "this is torpor://default/writer-of-long-texts\n" in ran.err


def test_of_each_name_of_a_line(torpor: Torpor, store: Path) -> None:
    told = torpor("log", "wri", "notes-of-ma", "--store", store)
    assert (told.status, "notes-of-march, torpor://default/notes-of-may." in told.err) == (4, True)
    whole = torpor("log", "writer-of-long-texts", "notes-of-may", "--store", store, "--json").document
    assert torpor("log", "wri", "notes-of-may", "--store", store, "--json").document == whole


def test_a_whole_name_wins_and_several_are_listed(torpor: Torpor, store: Path) -> None:
    assert torpor("show", "notes", "--store", store).out.startswith("torpor://default/notes\n")
    refused = torpor("show", "no", "--store", store, "--json")
    assert refused.status == 4
    names = [f"torpor://default/notes{more}" for more in ("", "-of-march", "-of-may")]
    assert refused.error["error"]["details"]["begun"] == names
    assert refused.error["error"]["message"].endswith(f" These begin so: {', '.join(names)}.")


@pytest.mark.parametrize("command", ["rm", "forget"])
def test_where_something_is_changed_the_name_is_whole(torpor: Torpor, store: Path, command: str) -> None:
    before = sorted(store.rglob("*.mv?"))
    refused = torpor(command, "wri", "--yes", "--store", store)
    assert refused.status == 4
    assert sorted(store.rglob("*.mv?")) == before


def test_only_commands_that_look_take_a_beginning() -> None:
    changing = {"rm", "forget", "clear", "tag", "untag", "pin", "unpin", "strip", "prune", "append", "sleep", "wake"}
    assert not LOOKING & changing
    assert {"show", "log", "why", "blocks", "du"} <= LOOKING & {command.name for command in COMMANDS}
