"""What the commands say of turns that the journal alone has, and of damage to it."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_rig import MadeStore, Torpor
from torpor.memvid.store import Store
from torpor.memvid.uri import SessionUri
from torpor.tests.memvid import store_making as making


def test_a_look_at_the_files_tells_of_turns_that_stand_in_the_journal_alone(
    torpor: Torpor, made_store: MadeStore, tmp_path: Path
) -> None:
    new = SessionUri("work", "new")
    with Store.open(made_store.path, writable=True) as store:
        store.acknowledge([making.turn(store, 5), making.turn(store, 5, uri=new)])
        for command in (("ls",), ("backup", str(tmp_path / "backup"))):
            ran = torpor(*command, "--store", made_store.path)
            assert (ran.status, ran.err.count("in the journal alone")) == (0, 1)
            assert "default/agent, work/new" in ran.err
        for session, is_told in (("agent", True), ("other", False)):
            ran = torpor("export", session, str(tmp_path / f"{session}.mvb"), "--store", made_store.path)
            assert (ran.status, "in the journal alone" in ran.err) == (0, is_told)
        assert "in the journal alone" in torpor("show", "work/new", "--store", made_store.path).err
        assert torpor("ls", "work", "--store", made_store.path, "--json").document["journalled"] == [str(new)]
        assert "No sessions" not in torpor("ls", "work", "--store", made_store.path).err
        assert "journal of turns" in torpor("du", "--store", made_store.path).out
    assert "work/new" in torpor("ls", "--store", made_store.path).err
    torpor("gc", "--store", made_store.path)
    ran = torpor("ls", "--store", made_store.path)
    assert "work/new" in ran.out
    assert "journal" not in ran.err


@pytest.mark.parametrize("arguments", [("gc",), ("gc", "--json"), ("tag", "agent", "x"), ("pin", "agent", "--json")])
def test_damage_to_the_journal_is_told_by_the_command_that_finds_it(
    torpor: Torpor, made_store: MadeStore, arguments: tuple[str, ...]
) -> None:
    with Store.open(made_store.path, writable=True) as store:
        store.acknowledge([making.turn(store, 5)])
    journal = made_store.path / "journal" / "turns.mvj"
    data = bytearray(journal.read_bytes())
    data[100] ^= 1
    journal.write_bytes(data)
    ran = torpor(*arguments, "--store", made_store.path)
    assert ran.status == 0
    assert "corrupt_journal" in ran.err
    assert "hold no record" in ran.err
    assert "journal" not in torpor(*arguments, "--store", made_store.path).err
