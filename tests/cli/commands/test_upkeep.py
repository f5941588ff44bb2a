"""The commands that look after a store, on real stores with no daemon: they take the lock, do it, and tell."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from torpor.memvid.disk.durable import TempFile
from torpor.memvid.store import Store
from torpor.tests.cli.cli_rig import MadeStore, Torpor, flip
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


def names(path: Path) -> list[tuple[str, int]]:
    """The manifests, packs and marks of a store: what no plan may change."""
    kept = [*path.glob("versions/*"), *path.glob("packs/*"), *path.glob("marks.json"), *path.glob("damaged/*")]
    return sorted((str(file.relative_to(path)), file.stat().st_size) for file in kept)


def versions(torpor: Torpor, made: MadeStore, session: str = "agent") -> list[int]:
    document = torpor("show", session, "--store", made.path, "--json").document
    return [version["version"] for version in document["versions"]]


@pytest.mark.parametrize("arguments", OPERATIONS)
def test_each_operation_leaves_a_sound_store_and_a_plan_of_it_changes_nothing(
    made_store: MadeStore, arguments: tuple[str, ...]
) -> None:
    before = names(made_store.path)
    plan = made_store(*arguments, "--dry-run", "--json")
    assert (plan.status, plan.document["dry_run"]) == (0, True)
    assert names(made_store.path) == before
    ran = made_store(*arguments, "--json")
    assert (ran.status, ran.document["ok"]) == (0, True)
    assert ran.document["operation"] == arguments[0]
    assert made_store("verify", "--deep").status == 0
    assert made_store(*arguments).status in (0, 4), "asking again is safe"


@pytest.mark.parametrize("arguments", [*OPERATIONS, ("tag", "agent", "x"), ("pin", "agent"), ("rm", "agent", "--yes")])
def test_a_store_that_somebody_writes_is_locked(made_store: MadeStore, arguments: tuple[str, ...]) -> None:
    with Store.open(made_store.path, writable=True):
        assert made_store(*arguments).status == 11


@pytest.mark.parametrize("dry_run", [True, False])
def test_a_ctrl_c_says_what_became_of_the_work(
    made_store: MadeStore, monkeypatch: pytest.MonkeyPatch, dry_run: bool
) -> None:
    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("torpor.memvid.operations.carry_out", interrupted)
    ran = made_store("repack", *(["--dry-run"] if dry_run else []))
    assert (ran.status, "the same command does the rest" in ran.err) == (130, not dry_run)


@pytest.mark.parametrize("command", [("ls",), ("du",), ("verify",), ("repack",), ("repack", "--dry-run"), ("repair",)])
def test_a_folder_that_is_no_store_is_left_as_it_is_and_another_one_is_asked_for(
    torpor: Torpor, short_path: Path, command: tuple[str, ...]
) -> None:
    shared, mine = short_path / "shared", short_path / "mine"
    for folder in (shared, mine):
        folder.mkdir()
        (folder / "letter.txt").write_text("dear store")
    shared.chmod(0o1777)
    refused = torpor(*command, "--store", shared)
    assert (refused.status, "choose a folder of your own" in refused.err, "chmod" in refused.err) == (1, True, False)
    refused = torpor(*command, "--store", mine)
    assert (refused.status, "There is no store at" in refused.err) == (10, True)
    assert {path.name for path in (*shared.iterdir(), *mine.iterdir())} == {"letter.txt"}


@pytest.mark.parametrize(("damage", "status"), [("missing", 10), ("damaged", 6)])
def test_repair_makes_the_file_of_a_store_again(made_store: MadeStore, damage: str, status: int) -> None:
    file = made_store.path / "store.json"
    before = file.read_bytes()
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(before.replace(b"uuid", b"uuie"))
    for command in (("ls",), ("verify",), ("repack",), ("show", "agent")):
        refused = made_store(*command)
        assert (refused.status, "torpor repair --store" in refused.err) == (status, True)
    plan = made_store("repair", "--dry-run", "--json").document
    told = [(action["kind"], action["path"]) for action in plan["actions"]]
    assert told == [("rewrite", str(file))]
    assert not file.exists() or file.read_bytes() != before
    assert made_store("repair", "--json").document["actions"] == plan["actions"]
    assert file.read_bytes() == before
    assert made_store("verify", "--deep").status == 0
    assert [path.name for path in made_store.path.glob("damaged/*")] == ["store.json"] * (damage == "damaged")


@pytest.mark.parametrize("folder", ["packs", "versions"])
def test_a_folder_of_the_store_that_is_lost_is_made_anew_and_filled_from_a_backup(
    made_store: MadeStore, short_path: Path, folder: str
) -> None:
    assert made_store("backup", short_path / "copy").status == 0
    lost = made_store.path / folder
    shutil.rmtree(lost)
    refused = made_store("ls", "--json").error["error"]["message"]
    assert f"make it anew (`mkdir {lost}`), and let `torpor repair --from FOLDER --store" in refused
    lost.mkdir()
    assert made_store("repair", "--from", short_path / "copy").status == 0
    assert made_store("verify", "--deep").status == 0
    assert versions(made_store.torpor, made_store) == [1, 2]


def test_an_import_of_what_is_not_there_is_a_wrong_input_as_for_append(made_store: MadeStore) -> None:
    refused = made_store("import", made_store.path / "nothing.mvb", "--json")
    assert (refused.status, refused.error["error"]["code"]) == (2, "unreadable_input")


@pytest.mark.parametrize("kind", ["folder", "pipe", "device"])
def test_an_import_of_what_is_no_file_is_a_wrong_input(made_store: MadeStore, short_path: Path, kind: str) -> None:
    source = Path(os.devnull) if kind == "device" else short_path / kind
    if kind == "folder":
        source.mkdir()
    elif kind == "pipe":
        os.mkfifo(source)
    refused = made_store("import", source, "--json")
    assert (refused.status, refused.error["error"]["code"]) == (2, "unreadable_input")


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


def test_an_export_replaces_a_file_only_when_it_is_told_to(made_store: MadeStore, short_path: Path) -> None:
    target = short_path / "x.mvb"
    target.write_text("mine")
    refused = made_store("export", "agent", target)
    assert (refused.status, target.read_text()) == (2, "mine")
    assert f"{target} is there already and is left as it is. Name another file, or let --overwrite" in refused.err
    assert made_store("export", "agent", target, "--overwrite").status == 0
    assert made_store("import", target, "--as", "copy").status == 0
    folder = made_store("export", "agent", short_path, "--overwrite")
    assert (folder.status, "is no file that could be replaced. Name another." in folder.err) == (2, True)


def test_an_export_to_standard_output_is_refused_and_writes_no_file_of_that_name(
    made_store: MadeStore, short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(short_path)
    refused = made_store("export", "agent", "-")
    assert (refused.status, "cannot write to standard output" in refused.err) == (2, True)
    assert not (short_path / "-").exists()
    assert made_store("export", "agent", "./-").status == 0
    assert (short_path / "-").exists()


def test_an_import_under_the_name_of_another_session_is_refused_and_leaves_that_one(
    made_store: MadeStore, short_path: Path
) -> None:
    file = short_path / "agent.mvb"
    made_store("export", "agent@1", file)
    other = made_store("ls", "--json").document["sessions"]
    name = next(one["session"] for one in other if one["name"] != "agent")
    before = made_store("show", name, "--json").document
    refused = made_store("import", file, "--as", name, "--json")
    assert (refused.status, refused.error["error"]["code"]) == (2, "name_taken")
    assert made_store("show", name, "--json").document == before
    nameless = made_store("import", file, "--as", "")
    assert (nameless.status, "Leave it out to take the session under its own." in nameless.err) == (2, True)
    assert made_store("import", file, "--as", "copy").status == 0
    again = made_store("import", file, "--as", "copy")
    assert (again.status, "is there already as version 1" in again.out) == (0, True)
    assert made_store("import", file, "--as", "agent").status == 0, "its own name"


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


@pytest.mark.parametrize(
    "command",
    [
        ("prune", "agent@1", "--keep-last", "1"), ("repack", "agent@1"),
        ("forget", "agent@1", "--yes"), ("sleep", "other", "agent@1"), ("verify", "agent@1"), ("du", "agent@1"),
        ("untag", "agent@1", "x"), ("append", "agent@1", "text"), ("generate", "agent@1"), ("chat", "agent@1", "text"),
    ],
)  # fmt: skip
def test_what_works_on_whole_sessions_says_so_of_a_version(torpor: Torpor, command: tuple[str, ...]) -> None:
    """Before it looks for a daemon or a store: there is none here."""
    refused = torpor(*command)
    assert (refused.status, f"{command[0]} takes a session without a version: agent." in refused.err) == (2, True)
    assert ("Name the session alone: all its versions are checked." in refused.err) == (command[0] == "verify")


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("prune", "--keep-days", "0"), "--keep-days takes a number of days above 0"),
        (("prune", "--keep-days", "nan"), "--keep-days takes a number of days above 0"),
        (("prune", "--keep-last", "x"), "'--keep-last': it must be a valid integer. See torpor prune --help."),
        (("wake", ""), "'' is not a valid name: use"),
        (("sleep", ""), "'' is not a valid name: use"),
        (("tag", "agent", ""), "'' is not a valid tag: use"),
        (("generate", "agent", "--stop", ""), "--stop takes a text of 1 to 256 characters"),
    ],
)
def test_a_value_that_no_daemon_takes_is_refused_in_words_of_the_command_line(
    torpor: Torpor, daemon: ServerThread, command: tuple[str, ...], said: str
) -> None:
    refused = torpor(*command)
    assert (refused.status, said in refused.err) == (2, True), refused.err
    assert not daemon.service.calls


def test_to_forget_what_is_forgotten_is_told_as_a_session_that_is_not_there(made_store: MadeStore) -> None:
    assert made_store("forget", "agent", "--yes").status == 0
    again = made_store("forget", "agent", "--yes")
    assert (again.status, again.out) == (4, "")
    assert "Nothing of it is in the store." in again.err
    failed = made_store("forget", "agent", "--yes", "--json")
    assert (failed.status, json.loads(failed.err)["error"]["code"]) == (4, "session_not_found")


def test_to_forget_a_name_that_was_mistyped_fails_and_says_which_come_close(made_store: MadeStore) -> None:
    ran = made_store("forget", "agnet", "--yes")
    assert (ran.status, ran.out) == (4, "")
    assert "torpor://default/agent" in ran.err
    assert made_store("show", "agent").status == 0


def test_to_forget_a_name_that_was_mistyped_says_so_where_bytes_go_that_nothing_needs(made_store: MadeStore) -> None:
    pack = next(made_store.path.glob("packs/*.mvp"))
    with Store.open(made_store.path, writable=True) as store:
        copy = making.copy_pack(store, pack)
    ran = made_store("forget", "agnet", "--yes")
    assert (ran.status, copy.exists()) == (0, False)
    assert "there was no session agnet: what went are bytes that no session needs" in ran.err.replace("\n", " ")
    assert "there was no session" not in made_store("forget", "agent", "--yes").err


def test_prune_tells_what_goes_and_keeps_what_is_marked(torpor: Torpor, made_store: MadeStore) -> None:
    assert made_store("tag", "agent@1", "first").status == 0
    plan = made_store("prune", "--keep-last", "1", "--dry-run")
    assert "tagged first" in plan.out
    made_store("prune", "--keep-last", "1")
    assert versions(torpor, made_store) == [1, 2]
    assert made_store("untag", "agent", "first").status == 0
    made_store("prune", "--keep-last", "1")
    assert versions(torpor, made_store) == [2]
    assert made_store("verify", "--deep").status == 0


def test_a_mark_is_shown_and_names_its_version(made_store: MadeStore) -> None:
    made_store("tag", "agent@1", "first")
    made_store("pin", "agent")
    document = made_store("show", "agent@first", "--json").document
    assert (document["info"]["version"], document["info"]["token_count"]) == (1, 300)
    assert [(each["tags"], each["pinned"]) for each in document["versions"]] == [(["first"], False), ([], True)]
    assert "(pinned)" in made_store("show", "agent").out
    assert made_store("tag", "agent@2", "first").status == 2
    assert made_store("tag", "agent@2", "first", "--move").out.endswith("first, pinned\n")
    assert made_store("untag", "agent", "nothing").status == 4
    assert made_store("tag", "agent", "0123456789").status == 2
    assert made_store("show", "agent@9").status == 4


def test_a_forget_that_could_not_look_everywhere_says_where_and_ends_with_status_6(made_store: MadeStore) -> None:
    (made_store.path / "old.tar.gz").write_bytes(b"who knows")
    plan = made_store("forget", "agent", "--dry-run")
    assert (plan.status, "old.tar.gz" in plan.out, "not proven" in plan.err) == (0, True, False)
    ran = made_store("forget", "agent", "--yes")
    assert (ran.status, "old.tar.gz" in ran.out, "not proven" in ran.err) == (6, True, True)
    again = made_store("forget", "agent", "--yes", "--json")
    assert (again.status, again.document["ok"], again.document["problems"][0]["code"]) == (6, False, "cannot_be_told")
    (made_store.path / "old.tar.gz").unlink()
    done = made_store("forget", "agent", "--yes")
    assert (done.status, "Nothing of it is in the store." in done.err) == (4, True)


def test_repair_gives_nothing_up_and_says_with_status_6_what_is_not_whole(
    torpor: Torpor, made_store: MadeStore
) -> None:
    made_store.flip(1)
    ran = made_store("repair", "--json")
    assert (ran.status, [action["kind"] for action in ran.document["actions"]]) == (6, ["copy", "move"])
    (problem,) = ran.document["problems"]
    assert "Version 2 of torpor://default/agent is whole up to token 256" in problem["message"]
    assert versions(torpor, made_store) == [1, 2]
    again = made_store("repair")
    assert (again.status, again.out.endswith("nothing to mend; 1 problem\n")) == (6, True)
    assert made_store("verify").status == 6


@pytest.mark.parametrize("what", ["manifest", "pack"])
def test_repair_takes_what_is_missing_from_a_backup(made_store: MadeStore, tmp_path: Path, what: str) -> None:
    assert made_store("backup", tmp_path / "copy").status == 0
    (made_store.manifests if what == "manifest" else made_store.packs)[1].unlink()
    plan = made_store("repair", "--from", tmp_path / "copy", "--dry-run")
    assert (plan.status, "nothing done yet" in plan.out) == (0, True)
    assert made_store("verify").status == 6
    ran = made_store("repair", "--from", tmp_path / "copy")
    folder = "versions" if what == "manifest" else "packs"
    assert (ran.status, f"{tmp_path}/copy/{folder}." in ran.out) == (0, True)
    assert made_store("verify", "--deep").status == 0


def test_repair_from_what_is_no_folder_is_wrong_usage(made_store: MadeStore) -> None:
    ran = made_store("repair", "--from", made_store.manifests[0])
    assert (ran.status, "--from takes a folder" in ran.err) == (2, True)


def test_while_a_manifest_is_missing_no_pack_goes_and_repack_says_why(made_store: MadeStore) -> None:
    made_store.manifests[0].unlink()
    before = names(made_store.path)
    ran = made_store("repack")
    assert (ran.status, "no pack was touched; 1 problem" in ran.out) == (6, True)
    assert str(made_store.manifests[0]) in ran.out
    assert names(made_store.path) == before


def test_a_strip_keeps_the_tokens_frees_the_rest_and_is_done_once(made_store: MadeStore) -> None:
    before = made_store("du", "other", "--json").document["sessions"][0]["exclusive_bytes"]
    ran = made_store("strip", "other", "--json").document
    assert [action["kind"] for action in ran["actions"]] == ["strip", "rewrite"]
    (other,) = made_store("du", "other", "--json").document["sessions"]
    assert (other["exclusive_bytes"] < before, other["stripped_versions"]) == (True, 1)
    assert made_store("strip", "other").out == "other is stripped already\n"
    assert made_store("strip", "nobody").status == 4


def test_a_strip_of_one_version_leaves_the_others(made_store: MadeStore) -> None:
    assert made_store("strip", "agent@1").status == 0
    told = made_store("show", "agent", "--json").document["versions"]
    assert [version["stripped"] for version in told] == [True, False]


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
    assert made_store("du", "nobody").status == 4


def test_du_does_not_claim_to_know_all_that_was_written_today(made_store: MadeStore) -> None:
    before = made_store("du", "--json").document["written_today_bytes"]
    (made_store.path / "index.sqlite").unlink()
    with Store.open(made_store.path, writable=True):
        pass  # makes it anew
    assert made_store("du", "--json").document["written_today_bytes"] < before
    assert "0 B at least: what the index has counted" in made_store("du").out


def test_du_and_export_work_beside_the_stores_writer(made_store: MadeStore, short_path: Path) -> None:
    with Store.open(made_store.path, writable=True):
        assert made_store("du").status == 0
        assert made_store("export", "agent", short_path / "a.mvb").status == 0


# --- export and import


def test_an_exported_version_is_imported_as_the_same_bundle(
    torpor: Torpor, made_store: MadeStore, short_path: Path
) -> None:
    file, other = short_path / "agent.mvb", short_path / "other-store"
    exported = made_store("export", "agent@2", file, "--json").document
    assert exported["token_count"] == 600
    assert exported["file_bytes"] == file.stat().st_size
    with Store.open(other, writable=True):
        pass
    imported = torpor("import", file, "--store", other, "--json").document
    assert imported["bundle_id"] == exported["bundle_id"]
    assert imported["session"] == "torpor://default/agent"
    assert torpor("verify", "--deep", "--store", other).status == 0
    renamed = torpor("import", file, "--as", "copy", "--store", other, "--json").document
    assert renamed["session"] == "torpor://default/copy"
    assert torpor("show", "copy", "--store", other, "--json").document["info"]["token_count"] == 600


def test_an_import_says_where_a_newer_version_stays_the_one_that_wakes(made_store: MadeStore, tmp_path: Path) -> None:
    target = tmp_path / "first"
    assert made_store("export", "agent@1", target).status == 0
    ran = made_store("import", target)
    assert "is there already as version 1" in ran.out
    assert "version 2 is newer, so the next wake gives that one\n" in ran.err
    fresh = made_store("import", target, "--as", "fresh")
    assert (fresh.status, fresh.err) == (0, "")


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


def test_a_file_that_is_there_is_not_written_over(made_store: MadeStore, short_path: Path) -> None:
    file = short_path / "precious"
    file.write_text("precious")
    assert made_store("export", "agent", file).status != 0
    assert file.read_text() == "precious"


def test_a_damaged_file_is_not_imported(made_store: MadeStore, short_path: Path) -> None:
    file = short_path / "agent.mvb"
    made_store("export", "agent", file)
    flip(file, file.stat().st_size // 2)
    shutil.copytree(made_store.path, short_path / "before")
    assert made_store("import", file, "--as", "copy").status == 6
    assert made_store("show", "copy").status == 4
    assert names(made_store.path) == names(short_path / "before")
    assert made_store("import", short_path / "none").status != 0


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


@pytest.mark.parametrize("beside_a_daemon", [False, True])
def test_a_backup_copies_the_store_once_and_then_what_is_new(
    torpor: Torpor, made_store: MadeStore, daemon: ServerThread, short_path: Path, beside_a_daemon: bool
) -> None:
    daemon.service.store = str(made_store.path)
    ask = torpor if beside_a_daemon else made_store
    folder = short_path / "copy"
    ran = ask("backup", folder)
    assert (ran.status, "done" in ran.out, "copied" in ran.out) == (0, True, True)
    assert torpor("verify", "--deep", "--store", folder).status == 0
    again = ask("backup", folder, "--json")
    assert (again.status, again.document["actions"], again.document["bytes_written"]) == (0, [], 0)
    assert "all of it is there already" in ask("backup", folder).out
    inside = ask("backup", made_store.path / "copy", "--json")
    assert (inside.status, inside.error["error"]["code"]) == (2, "target_in_store")


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


def test_a_backup_of_a_damaged_store_tells_what_is_not_in_it(made_store: MadeStore, short_path: Path) -> None:
    made_store.manifests[1].write_bytes(b"nothing")
    ran = made_store("backup", short_path / "copy", "--json")
    assert (ran.status, ran.document["ok"]) == (6, False)
    assert [problem["path"] for problem in ran.document["problems"]] == [str(made_store.manifests[1])]
