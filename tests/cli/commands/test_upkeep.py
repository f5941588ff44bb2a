"""The commands that look after a store, on real stores with no daemon: they take the lock, do it, and tell."""

from __future__ import annotations

import dataclasses
import errno
import os
from pathlib import Path
from typing import Any

import pytest
from torpor.memvid.disk.durable import TempFile
from torpor.memvid.store import Store
from torpor.memvid.units import format_bytes
from torpor.memvid.uri import SessionUri
from torpor.tests.cli.cli_rig import MadeStore, Torpor
from torpor.tests.memvid import store_making as making
from torpor.tests.socket_api.server_rig import ServerThread

OPERATIONS = [
    ("repack",),
    ("repack", "agent", "--cold-after-days", "1"),
    ("strip", "agent@1"),
    ("prune", "--keep-last", "1"),
    ("repair",),
    ("forget", "other", "--yes"),
]


@pytest.mark.parametrize("dry_run", [True, False])
def test_a_ctrl_c_says_what_became_of_the_work(
    made_store: MadeStore, monkeypatch: pytest.MonkeyPatch, dry_run: bool
) -> None:
    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("torpor.memvid.operations.carry_out", interrupted)
    ran = made_store("repack", *(["--dry-run"] if dry_run else []))
    assert (ran.status, "the same command does the rest" in ran.err) == (130, not dry_run)


@pytest.mark.parametrize("beside_a_daemon", [False, True])
@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("tensors", "is a safetensors file, such as `torpor export-kv` writes for other tools. "),
        ("text", "is no exported session, or one whose beginning is damaged. "),
        ("word", "is no exported session, or one whose beginning is damaged. "),
    ],
)
def test_an_import_of_what_no_export_wrote_says_what_it_is_and_copies_nothing(
    torpor: Torpor,
    made_store: MadeStore,
    short_path: Path,
    daemon: ServerThread,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    what: str,
    beside_a_daemon: bool,
) -> None:
    source = short_path / "source"
    if kind == "tensors":
        assert made_store("export-kv", "agent", source).status == 0
    else:
        source.write_text("hello" * (1 if kind == "word" else 1000))
    monkeypatch.setattr(TempFile, "append", lambda *_: pytest.fail("it was copied"))
    daemon.service.store = str(made_store.path)
    ask = torpor if beside_a_daemon else made_store
    refused = ask("import", source)
    assert refused.status == 6
    assert f"{source} {what}Only a file that `torpor export` has written can be imported." in refused.err


def test_an_export_to_standard_output_is_refused_and_writes_no_file_of_that_name(
    made_store: MadeStore, short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(short_path)
    refused = made_store("export", "agent", "-")
    assert (refused.status, "cannot write to standard output" in refused.err) == (2, True)
    assert not (short_path / "-").exists()
    assert made_store("export", "agent", "./-").status == 0
    assert (short_path / "-").exists()


def test_an_import_of_another_stores_session_of_the_same_name_is_refused_with_what_takes_it(
    made_store: MadeStore, short_path: Path
) -> None:
    file = short_path / "theirs.mvb"
    with Store.open(short_path / "theirs", writable=True) as theirs:
        first = making.sleep(theirs, 600, seed=3)
        making.sleep(theirs, 700, before=making.sleep(theirs, 650, before=first, seed=3), seed=3)
        theirs.export_session(making.URI, 3, file)
    before = made_store("show", "agent", "--json").document
    refused = made_store("import", file)
    assert (refused.status, "(`--as NAME`)" in refused.err) == (2, True)
    assert made_store("show", "agent", "--json").document == before
    assert made_store("import", file, "--as", "theirs").status == 0


# --- du


def test_du_tells_each_sessions_part_and_the_whole(made_store: MadeStore) -> None:
    document = made_store("du", "--json").document
    assert [each["session"] for each in document["sessions"]] == ["torpor://default/agent", "torpor://default/other"]
    assert document["file_bytes"] == sum(file.stat().st_size for file in made_store.path.rglob("*") if file.is_file())
    assert document["version_bytes"] == sum(file.stat().st_size for file in made_store.manifests)
    assert document["pack_bytes"] == sum(file.stat().st_size for file in made_store.packs)
    text = made_store("du").out
    assert "default/agent" in text
    assert "on disk" in text
    only = made_store("du", "agent", "--json").document
    assert [each["session"] for each in only["sessions"]] == ["torpor://default/agent"]
    assert only["together"]["alone_bytes"] == only["sessions"][0]["alone_bytes"]
    assert "together" not in made_store("du", "agent").out
    both = made_store("du", "agent", "other", "--json").document
    assert both["sessions"] == document["sessions"]
    assert both["together"]["sessions"] == ["torpor://default/agent", "torpor://default/other"]
    assert both["together"]["alone_bytes"] == document["alone_bytes"] + document["shared_bytes"]
    assert "together" in made_store("du", "agent", "other").out
    assert document["together"] is None
    assert made_store("du", "nobody").status == 4


def test_du_tells_who_shares_what(made_store: MadeStore) -> None:
    assert made_store("du", "--json").document["shared_by"] == []
    with Store.open(made_store.path, writable=True) as store:
        base = making.sleep(store, 700, uri=SessionUri("default", "one"), seed=9)
        making.sleep(store, 900, uri=SessionUri("default", "two"), seed=9, before=base)
    (part,) = made_store("du", "--json").document["shared_by"]
    assert part["session_count"] == 2
    line = f"{format_bytes(part['size_bytes'])}\tdefault/two, default/one\n"
    assert line in made_store("du").out
    assert line.replace("two, default/one", "one, default/two") in made_store("du", "one").out
    assert "BY" not in made_store("du", "other").out


# --- export and import


def test_an_import_that_was_interrupted_says_that_asking_again_is_safe_and_it_is(
    made_store: MadeStore, short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = short_path / "agent.mvb"
    made_store("export", "agent", file)
    whole = Store.import_file

    def interrupted(self: Store, *arguments: Any, **options: Any) -> Any:
        whole(self, *arguments, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Store, "import_file", interrupted)
        ran = made_store("import", file, "--as", "copy")
    assert (ran.status, "may have ended all the same" in ran.err) == (130, True)
    again = made_store("import", file, "--as", "copy")
    assert again.status == 0
    assert "is there already as version 1" in again.out
    assert made_store("import", file, "--as", "copy", "--json").document["version"] == 1


@pytest.mark.parametrize(
    ("number", "advice"),
    [(errno.EROFS, "Mount its file system for writing, or choose another"), (errno.EACCES, "Give user ")],
)
@pytest.mark.parametrize("command", [("repack",), ("tag", "agent", "x"), ("repair",), ("serve",)])
def test_a_store_that_cannot_be_written_says_so_and_what_still_can_be_done(
    made_store: MadeStore,
    monkeypatch: pytest.MonkeyPatch,
    command: tuple[str, ...],
    number: int,
    advice: str,
) -> None:
    """Whoever writes opens the lock for it first: as on a file system that is mounted for reading."""
    real = os.open

    def refuse(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) and options.get("dir_fd") is not None:
            raise OSError(number, os.strerror(number))
        return real(path, flags, *rest, **options)

    monkeypatch.setattr(os, "open", refuse)
    ran = made_store(*command)
    assert ran.status == 1
    assert f"{made_store.path}/lock: {os.strerror(number)}. {advice}" in ran.err
    assert "choose another store (--store, $TORPOR_STORE). Without that it can be looked at" in ran.err
    assert made_store("ls").status == 0
    assert made_store("verify").status == 0


def test_a_place_where_no_store_can_be_made_says_so(
    torpor: Torpor, short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.mkdir

    def refuse(path: Any, *rest: Any, **options: Any) -> None:
        if Path(path) == short_path / "new":
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        real(path, *rest, **options)

    monkeypatch.setattr(os, "mkdir", refuse)
    ran = torpor("serve", "--store", short_path / "new")
    assert "Mount its file system for writing, or choose another place for the store (--store" in ran.err


def test_a_backup_names_the_awake_sessions_of_which_it_has_not_all(
    torpor: Torpor, made_store: MadeStore, daemon: ServerThread, short_path: Path
) -> None:
    daemon.service.store = str(made_store.path)
    for name, text in {"slept": "some text", "one": "some text", "two": "some text", "empty": ""}.items():
        daemon.do(lambda name=name: daemon.service.create(session=name))
        found = daemon.service.sessions[name]
        found.info = dataclasses.replace(found.info, token_count=len(text))
    assert torpor("sleep", "slept").status == 0
    ran = torpor("backup", short_path / "copy")
    assert (ran.status, "freed" in ran.out) == (0, False)
    assert "not in it  what 2 awake sessions read and wrote" in ran.err
    assert ran.err.endswith("torpor sleep default/one default/two\n")
    assert torpor("sleep", "one", "two").status == 0
    assert torpor("backup", short_path / "copy").err == ""
