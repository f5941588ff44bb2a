"""Which daemon a command asks: the one on the socket, unless a store was named that it does not serve."""

from __future__ import annotations

from pathlib import Path

import pytest
from torpor.tests.cli.cli_rig import MadeStore, Torpor
from torpor.tests.socket_api.server_rig import ServerThread


@pytest.fixture
def another_store(made_store: MadeStore, daemon: ServerThread, monkeypatch: pytest.MonkeyPatch) -> MadeStore:
    """A store that $TORPOR_STORE names, and that the daemon which runs does not serve."""
    monkeypatch.setenv("TORPOR_STORE", str(made_store.path))
    return made_store


@pytest.mark.parametrize("words", [("append", "notes", "one"), ("sleep", "notes"), ("wake", "notes"), ("stats",)])
def test_what_needs_a_daemon_refuses_one_of_another_store_than_the_variable_names(
    torpor: Torpor, daemon: ServerThread, another_store: MadeStore, words: tuple[str, ...]
) -> None:
    ran = torpor(*words, "--json")
    assert (ran.status, ran.error["error"]["code"]) == (2, "invalid_usage")
    assert ran.error["error"]["message"] == (
        f"The daemon on {daemon.socket_path} serves the store /store, but $TORPOR_STORE names {another_store.path}."
        " Unset TORPOR_STORE to use this daemon, or name the socket of another one with --socket."
    )
    assert not daemon.service.sessions


def test_a_stop_does_not_end_the_daemon_of_another_store(
    torpor: Torpor, daemon: ServerThread, another_store: MadeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = torpor("stop")
    assert (ran.status, "serves the store /store" in " ".join(ran.err.split())) == (2, True)
    monkeypatch.delenv("TORPOR_STORE")
    assert torpor("ls", "--json").document["source"] == "daemon", "it goes on"


@pytest.mark.parametrize("command", ["ls", "verify", "du"])
def test_what_needs_no_daemon_reads_the_store_that_the_variable_names(
    torpor: Torpor, another_store: MadeStore, command: str
) -> None:
    ran = torpor(command, "--json")
    assert (ran.status, ran.document["store"]) == (0, str(another_store.path))
    assert not ran.document.get("problems"), "the daemon of the other store has not ended"


def test_a_show_an_export_and_a_backup_are_of_the_store_that_the_variable_names(
    torpor: Torpor, daemon: ServerThread, another_store: MadeStore, tmp_path: Path
) -> None:
    assert torpor("show", "agent", "--json").document["source"] == "store"
    assert torpor("export", "agent", tmp_path / "agent.mvb").status == 0
    ran = torpor("backup", tmp_path / "copy")
    assert (ran.status, "default/agent" in torpor("ls", "--store", tmp_path / "copy").out) == (0, True)


def test_a_tag_and_a_plan_are_of_the_store_that_the_variable_names(
    torpor: Torpor, daemon: ServerThread, another_store: MadeStore
) -> None:
    assert torpor("tag", "agent", "here").status == 0
    assert "here" in torpor("show", "agent", "--store", another_store.path).out
    assert torpor("repack", "--dry-run").status == 0
    assert not [name for name, _ in daemon.service.calls if name in ("mark", "maintain")]


@pytest.mark.parametrize("words", [("ls",), ("verify",), ("tag", "agent", "here")])
def test_a_daemon_that_was_named_is_not_passed_over_for_the_store_that_the_variable_names(
    torpor: Torpor, daemon: ServerThread, another_store: MadeStore, words: tuple[str, ...]
) -> None:
    ran = torpor(*words, "--socket", daemon.socket_path)
    assert (ran.status, "but $TORPOR_STORE names" in " ".join(ran.err.split())) == (2, True)


def test_the_same_store_by_another_name_is_the_daemons(
    torpor: Torpor, daemon: ServerThread, made_store: MadeStore, short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = short_path / "link"
    link.symlink_to(made_store.path)
    monkeypatch.setenv("TORPOR_STORE", f"{link}/../link")
    daemon.service.store = str(made_store.path)
    assert torpor("append", "notes", "one").status == 0
    assert torpor("ls", "--json").document["source"] == "daemon"
