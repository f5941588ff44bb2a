"""What the commands say of turns that the journal alone has, and of damage to it."""

from __future__ import annotations

from pathlib import Path

import pytest
from torpor.memvid.store import Store
from torpor.memvid.uri import SessionUri
from torpor.tests.cli.cli_rig import MadeStore
from torpor.tests.memvid import store_making as making


def test_a_look_at_the_files_tells_of_turns_that_stand_in_the_journal_alone(
    made_store: MadeStore, tmp_path: Path
) -> None:
    new = SessionUri("work", "new")
    with Store.open(made_store.path, writable=True) as store:
        store.acknowledge([making.turn(store, 5), making.turn(store, 5, uri=new)])
        for command in (("ls",), ("backup", str(tmp_path / "backup"))):
            ran = made_store(*command)
            assert (ran.status, ran.err.count("in the journal alone")) == (0, 1)
            assert "default/agent, work/new" in ran.err
        for session, is_told in (("agent", True), ("other", False)):
            ran = made_store("export", session, str(tmp_path / f"{session}.mvb"))
            assert (ran.status, "in the journal alone" in ran.err) == (0, is_told)
        assert "in the journal alone" in made_store("show", "work/new").err
        assert made_store("ls", "work", "--json").document["journalled"] == [str(new)]
        assert "No sessions" not in made_store("ls", "work").err
        assert "journal of turns" in made_store("du").out
    assert "work/new" in made_store("ls").err
    made_store("repack")
    ran = made_store("ls")
    assert "work/new" in ran.out
    assert "journal" not in ran.err


@pytest.mark.one_in(1)
@pytest.mark.usefixtures("examined_once")
def test_names_that_a_user_gave_come_first_and_what_is_offered_works(made_store: MadeStore) -> None:
    names = [f"chat-{number:08x}" for number in range(9)] + ["http-0123456789abcdef", "mine", "a-cafe"]
    with Store.open(made_store.path, writable=True) as store:
        store.acknowledge([making.turn(store, 5, uri=SessionUri("work", name)) for name in names])
    told = " ".join(made_store("ls").err.split())
    assert "the last turns of work/mine, work/a-cafe, work/chat-00000000, " in told
    assert "and 4 others" in told
    assert told.endswith(f"torpor save work/mine (once torpor serve --store {made_store.path} runs)")
    assert made_store("save").status == 2, "a save wants a name"
    for arguments in (("show", "work/mine@3"), ("export", "work/mine", "x.mvb")):
        assert "torpor save torpor://work/mine" in " ".join(made_store(*arguments).err.split())
    stored = made_store("doctor").out
    assert "2 sessions with a version, and 12 in the journal alone" in " ".join(stored.split())
    Store.open(made_store.path, writable=True).close()  # as a daemon that starts
    assert ("work/mine" in made_store("ls").out, "journal" in made_store("ls").err) == (True, False)
    assert "14 sessions with a version" in " ".join(made_store("doctor").out.split())


@pytest.mark.parametrize(
    "arguments", [("repack",), ("repack", "--json"), ("tag", "agent", "x"), ("pin", "agent", "--json")]
)
def test_damage_to_the_journal_is_told_by_the_command_that_finds_it(
    made_store: MadeStore, arguments: tuple[str, ...]
) -> None:
    with Store.open(made_store.path, writable=True) as store:
        store.acknowledge([making.turn(store, 5)])
    journal = made_store.path / "journal" / "turns.mvj"
    data = bytearray(journal.read_bytes())
    data[100] ^= 1
    journal.write_bytes(data)
    ran = made_store(*arguments)
    assert ran.status == 0
    assert "corrupt_journal" in ran.err
    assert "hold no record" in ran.err
    assert "journal" not in made_store(*arguments).err
