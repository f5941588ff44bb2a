"""Forget: nothing of a session is left in the store's files, and the report proves it or says what is in the way."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
from blake3 import blake3
from torpor.memvid.answers import MaintenanceReport
from torpor.memvid.errors import HeadReplayed, NoSpace, SessionNotFound
from torpor.memvid.folder.folder import StoreFolder
from torpor.memvid.format.blocks import BlockDraft
from torpor.memvid.format.pack_writer import PackWriter
from torpor.memvid.maintenance import forgetting
from torpor.memvid.maintenance.repack_plan import CLEARING, RepackPolicy
from torpor.memvid.recovery.mending import Mending
from torpor.memvid.store import Store
from torpor.memvid.uri import SessionUri
from torpor.tests.memvid import store_making as making
from torpor.tests.memvid.cut_off import stores_cut_off
from torpor.tests.memvid.store_making import FORK_URI, frame_in, pack_of, put, reopened, require_awake, sleep, turn

SECRET = SessionUri("default", "a-name-that-nobody-may-find")


def secret(store: Store, token_count: int = 600, *, seed: int = 5) -> None:
    sleep(store, token_count, uri=SECRET, seed=seed)


def files_with(path: str | Path, text: bytes) -> list[str]:
    return [str(file) for file in Path(path).rglob("*") if file.is_file() and text in file.read_bytes()]


def require_gone(store: Store, *, seed: int = 5, token_count: int = 600, shared: int = 0) -> None:
    """No file has the session's name, or 16 bytes of a slot or of the tokens, in it."""
    path = store.path
    store.close()
    assert files_with(path, SECRET.name.encode()) == []
    for block in making.expected(token_count, seed=seed)[shared:]:
        for slot in block:
            assert files_with(path, slot[:16]) == []
    assert files_with(path, making.token_ids(token_count - 8, 8, seed)) == []


def require_no_keys_left(store: Store, *, seed: int = 5, token_count: int = 512) -> None:
    """No file has 16 bytes of a span's keys and values in it: a stripped fork has the tokens."""
    for block in making.expected(token_count, seed=seed)[:-1]:
        for slot in block:
            assert files_with(store.path, slot[:16]) == []
    store.close()


def codes(report: MaintenanceReport) -> dict[str, str]:
    return {Path(finding.path).name: finding.code for finding in report.problems}


def test_nothing_of_a_forgotten_session_is_left_and_others_are_whole(store: Store) -> None:
    sleep(store)
    for seed in (5, 5, 5):
        secret(store, seed=seed)
    store.tag(SECRET, 1, "secret-tag")
    store.acknowledge([turn(store, 20, uri=SECRET), turn(store, 20)])
    for top in ("", "packs", "journal"):
        put(Path(store.path, top, "0123456789abcdef.tmp"), SECRET.name.encode())
    before = making.names(store.path)
    with Store.open(store.path, writable=False) as beside:
        assert beside.forget(SECRET, dry_run=True).problems == ()
    plan = store.forget(SECRET, dry_run=True)
    assert (making.names(store.path), len(store.versions(SECRET))) == (before, 3)
    report = store.forget(SECRET)
    assert report.problems == plan.problems == ()
    assert report.bytes_freed == pytest.approx(plan.bytes_freed)
    require_awake(store, 300)
    assert store.has_turns(making.URI)
    require_gone(store)


@pytest.mark.parametrize("what", ["session", "version"])
def test_blocks_of_what_was_deleted_in_packs_that_others_need_go_too(store: Store, what: str) -> None:
    """A fork needs the first blocks of a pack: the rest of it is nobody's."""
    secret(store, 600)
    sleep(store, 512, uri=FORK_URI, seed=5)
    store.delete_session(SECRET) if what == "session" else store.delete_version(SECRET, 1)
    with pytest.raises(SessionNotFound):
        store.versions(SECRET) or store.require_session(SECRET)
    report = store.forget(SECRET)
    assert report.problems == ()
    require_awake(store, 512, uri=FORK_URI, seed=5)
    require_gone(store, shared=2)


def test_what_others_share_stays_and_is_told(store: Store) -> None:
    secret(store, 600)
    sleep(store, 512, uri=FORK_URI, seed=5)
    report = store.forget(SECRET)
    assert [(action.session, action.reason) for action in report.actions if action.kind == "keep"] == [
        (str(FORK_URI), "It keeps 2 blocks that this session has, too.")
    ]
    require_awake(store, 512, uri=FORK_URI, seed=5)
    require_gone(store, shared=2)


def test_versions_and_turns_that_name_the_session_are_told(store: Store) -> None:
    secret(store)
    making.write(store, [], 0, uri=FORK_URI, session={"forked_from": {"session": str(SECRET)}})
    report = store.forget(SECRET)
    assert [action.session for action in report.actions if action.kind == "keep"] == [str(FORK_URI)]
    assert "origin" in report.actions[-1].reason


@pytest.mark.parametrize("beside", [False, True])
def test_turns_in_a_journal_that_was_put_back_go_too(store: Store, beside: bool) -> None:
    store.acknowledge([turn(store, 7, uri=SECRET, seed=5)])
    journal = Path(store._core.journal.path)
    data = journal.read_bytes()
    journal.unlink()
    store = reopened(store)  # which has written it anew
    store.delete_session(SECRET)
    secret(store)
    journal.parent.mkdir(exist_ok=True)
    if beside:
        store.acknowledge([turn(store, 3, uri=making.OTHER_URI)])
    put(journal.with_name("back"), data)
    journal.with_name("back").rename(journal)
    if beside:
        store.acknowledge([turn(store, 4, uri=making.OTHER_URI)])
    assert files_with(store.path, SECRET.name.encode())
    assert store.forget(SECRET).problems == ()
    require_gone(store)


def test_a_file_in_the_place_of_the_journal_that_is_not_told_from_one_with_turns_is_told(store: Store) -> None:
    secret(store)
    journal = Path(store._core.journal.path)
    journal.parent.mkdir(mode=0o700, exist_ok=True)
    with making.meanwhile(
        forgetting, "find_remains", lambda: put(journal, b"a journal of " + SECRET.name.encode() + b" from elsewhere")
    ):
        problems = store.forget(SECRET).problems
    assert [each.path for each in problems] == [str(journal)]


def test_an_unknown_session_is_told_apart_from_a_forgotten_one(store: Store) -> None:
    secret(store)
    with pytest.raises(SessionNotFound) as refusal:
        store.forget(making.OTHER_URI)
    assert "Nothing of it is in the store" in refusal.value.message
    require_awake(store, 600, uri=SECRET, seed=5)


def test_a_session_that_somebody_reads_is_told_and_goes_with_its_reader(store: Store) -> None:
    secret(store)
    with store.open_session(SECRET):
        report = store.forget(SECRET)
        assert set(codes(report).values()) == {forgetting.STILL_OPEN}
    with pytest.raises(SessionNotFound, match="Nothing of it is in the store"):
        store.forget(SECRET)
    require_gone(store)


@pytest.mark.parametrize("who", ["reader", "sleep"])
def test_keys_and_values_that_somebody_uses_and_a_stripped_fork_shares_are_told(store: Store, who: str) -> None:
    """Of such a block the fork needs the header alone."""
    secret(store)
    made = sleep(store, 600, uri=FORK_URI, seed=5)
    store.strip(FORK_URI)
    with store.open_session(SECRET) if who == "reader" else store._core.pinning() as user:
        if isinstance(user, int):  # as a sleep that refers to them, and fails in the end
            store._core.pins.extend(user, [entry.id for entry in made.entries])
        report = store.forget(SECRET)
        assert set(codes(report).values()) == {forgetting.STILL_OPEN}
    assert store.forget(SECRET).problems == ()
    assert making.ledger(store, FORK_URI) == making.token_ids(0, 600, 5)
    require_no_keys_left(store)


def test_a_stripped_session_whose_blocks_have_no_keys_is_in_no_forgets_way(store: Store) -> None:
    """As a recurrent model's: a span has tokens, and the state has all else."""
    spans = [BlockDraft("span", at, making.token_ids(at, 256), []) for at in (0, 256)]
    making.write(store, [*spans, making.state(512)], 512)
    store.strip(making.URI)
    secret(store)
    assert store.forget(SECRET).problems == ()
    assert making.ledger(store) == making.token_ids(0, 512)
    require_gone(store)


def test_a_version_that_comes_meanwhile_is_told(store: Store) -> None:
    secret(store)
    with making.meanwhile(forgetting, "find_remains", lambda: secret(store, 300)):
        report = store.forget(SECRET)
    assert set(codes(report).values()) == {forgetting.NOT_FORGOTTEN}
    assert store.forget(SECRET).problems == ()
    require_gone(store)


def test_a_version_that_is_being_written_is_told(store: Store) -> None:
    secret(store)
    with store._core.next_version(SECRET):
        report = store.forget(SECRET)
    assert codes(report) == {"versions": forgetting.STILL_OPEN}


def test_a_dry_run_of_a_session_with_a_damaged_manifest_says_what_the_forget_then_does(store: Store) -> None:
    """That goes too, so what it needs, which nobody can tell, keeps nothing."""
    sleep(store)
    secret(store, 300)
    secret(store)
    making.flip(making.manifest_path(store, store.versions(SECRET)[0].bundle_id), 100)
    store = reopened(store)
    plan, report = store.forget(SECRET, dry_run=True), store.forget(SECRET)
    assert (plan.bytes_freed, plan.problems, report.problems) == (report.bytes_freed, (), ())
    require_gone(store)


def test_an_unreadable_pack_is_told(store: Store) -> None:
    secret(store)
    pack = making.pack_of(store, sleep(store))
    making.flip(pack, 3)
    report = store.forget(SECRET)
    assert codes(report) == {pack.name: forgetting.CANNOT_BE_TOLD}


def test_what_repair_moved_away_goes_if_it_is_the_sessions_and_is_told_if_nobody_can_say(store: Store) -> None:
    secret(store)
    other = sleep(store)
    damaged = Path(store.path, "damaged")
    damaged.mkdir(mode=0o700)
    manifest = making.manifest_path(store, store.versions(SECRET)[0].bundle_id)
    for file in (manifest, Path(store.path, store.index.packs_of(store.open_session(SECRET).entries[0].id)[0])):
        shutil.copy(file, damaged)
    for file in (making.manifest_path(store, other.bundle_id), making.pack_of(store, other)):
        shutil.copy(file, damaged / f"{file.name}.2")
    put(damaged / "marks.json", b"{}")
    put(damaged / "torn.mvp", b"torn")
    put(damaged / "store.json", SECRET.name.encode())
    for file in damaged.iterdir():
        file.chmod(0o600)
    store = reopened(store)
    report = store.forget(SECRET)
    assert codes(report) == {"torn.mvp": forgetting.CANNOT_BE_TOLD, "store.json": forgetting.CANNOT_BE_TOLD}
    assert len(list(damaged.iterdir())) == 5
    (damaged / "store.json").unlink()
    require_gone(store)


def test_strangers_in_the_folder_are_told_and_stay(store: Store) -> None:
    secret(store)
    pack = Path(store.path, store.index.packs_of(store.open_session(SECRET).entries[0].id)[0])
    for place in (".", "packs"):
        shutil.copy(pack, Path(store.path, place, "copy.mvp"))
    Path(store.path, "notes").mkdir()
    store = reopened(store)
    report = store.forget(SECRET)
    assert codes(report) == {"copy.mvp": forgetting.NOT_FORGOTTEN, "notes": forgetting.CANNOT_BE_TOLD}
    assert Path(store.path, "copy.mvp").exists()
    store.close()


@pytest.mark.parametrize("folder", ["incoming", "damaged"])
def test_a_folder_in_which_others_may_write_is_told_and_all_else_goes(store: Store, folder: str) -> None:
    secret(store)
    place = Path(store.path, folder)
    place.mkdir(mode=0o700)
    place.chmod(0o770)
    assert codes(store.repack()).keys() == ({"incoming"} & {folder})
    assert codes(store.forget(SECRET)).keys() == {folder}
    place.chmod(0o700)
    require_gone(store)


def test_what_others_need_of_a_damaged_file_that_goes_is_kept(store: Store) -> None:
    """The second fault strikes the copy that the repair went by."""
    secret(store, 512)
    receipt = sleep(store, 256, uri=FORK_URI, seed=5)
    pack = pack_of(store, receipt)
    with store.open_session(SECRET) as reader:
        making.spoil_frame(pack, frame_in(pack, reader.entries[1].id))
    store.repair()
    copy = pack_of(store, receipt)
    making.spoil_frame(copy, frame_in(copy, receipt.entries[0].id))
    store = reopened(store)
    plan, report = store.forget(SECRET, dry_run=True), store.forget(SECRET)
    for one in (plan, report):
        assert [action.kind for action in one.actions if action.kind in ("copy", "remove")][-2:] == ["copy", "remove"]
    assert list(Path(store.path, "damaged").iterdir()) == []
    require_awake(store, 256, uri=FORK_URI, seed=5)
    store.close()


def test_what_another_session_needs_of_a_damaged_file_is_not_kept_once_that_one_is_forgotten(store: Store) -> None:
    secret(store, 512)
    receipt = sleep(store, 256, uri=FORK_URI, seed=5)
    pack = pack_of(store, receipt)
    shutil.copytree(pack.parent, Path(store.path, "damaged"))
    making.spoil_frame(pack, frame_in(pack, receipt.entries[0].id))
    with making.meanwhile(Mending, "_written", lambda: store.forget(FORK_URI)):
        assert codes(store.forget(SECRET)).get(pack.name) == "store_busy"
    assert list(Path(store.path, "damaged").iterdir()) == []
    assert files_with(store.path, making.expected(256, seed=5)[0][1][:16]) == []


@pytest.mark.parametrize("read", [False, True])
def test_what_a_stripped_fork_needs_of_a_damaged_file_is_its_headers(store: Store, read: bool) -> None:
    """The file goes, also while somebody reads the session: nobody reads there."""
    secret(store, 512)
    made = store.require_session(SECRET)
    with store.open_session(SECRET) as reader:
        entries = reader.entries
    making.write(store, [], 512, uri=FORK_URI, parent=made.bundle_id, reused=entries)
    pack = Path(store.path, store.index.packs_of(entries[1].id)[0])
    making.spoil_frame(pack, frame_in(pack, entries[1].id))
    store.repair()
    store.strip(FORK_URI)
    with store.open_session(SECRET) if read else contextlib.nullcontext():
        assert (store.forget(SECRET).problems == ()) != read
        assert list(Path(store.path, "damaged").iterdir()) == []
    assert read is False or store.forget(SECRET).problems == ()
    assert making.ledger(store, FORK_URI) == making.token_ids(0, 512, 5)
    require_no_keys_left(store)


@pytest.mark.parametrize("fate", ["stripped", "deleted"])
def test_a_damaged_bundle_of_another_session_has_no_keys_of_its_own_once_that_needs_none(
    store: Store, tmp_path: Path, fate: str
) -> None:
    """Its manifest keeps only what was handed over to become a version."""
    secret(store, 512)
    sleep(store, 512, uri=FORK_URI, seed=5)
    store.export_session(FORK_URI, None, tmp_path / "exported")
    store.strip(FORK_URI) if fate == "stripped" else store.delete_session(FORK_URI)
    for place in ("damaged", "incoming"):
        Path(store.path, place).mkdir(mode=0o700)
        shutil.copy(tmp_path / "exported", Path(store.path, place, f"{'a' * 64}.mvb"))
    (tmp_path / "exported").unlink()
    assert store.forget(SECRET).problems == ()
    assert [place for place in ("damaged", "incoming") if list(Path(store.path, place).iterdir())] == ["incoming"]
    store.close()


def test_the_only_part_of_a_block_that_others_need_stays_and_is_told(store: Store, tmp_path: Path) -> None:
    """In the backup another slot of the block is damaged: the two together are whole."""
    secret(store, 512)
    receipt = sleep(store, 256, uri=FORK_URI, seed=5)
    store.backup(tmp_path / "backup")
    pack, block = pack_of(store, receipt), receipt.entries[0].id
    making.spoil_frame(pack, frame_in(pack, block))
    with Store.open(tmp_path / "backup", writable=True) as copy:
        other = pack_of(copy, receipt)
        frame = frame_in(other, block)
        making.flip(other, frame.offset + frame.frame_bytes - 70)
    store.repair()
    plan, report = store.forget(SECRET, dry_run=True), store.forget(SECRET)
    assert codes(plan) == codes(report) == {pack.name: forgetting.NOT_FORGOTTEN}
    assert store.repair(sources=[tmp_path / "backup"]).problems == ()
    require_awake(store, 256, uri=FORK_URI, seed=5)
    assert store.forget(SECRET).problems == ()
    require_awake(store, 256, uri=FORK_URI, seed=5)
    require_gone(store, token_count=512, shared=1)


@pytest.mark.parametrize("damaged", [False, True])
def test_a_manifest_of_it_in_an_exported_file_among_the_packs_goes(store: Store, tmp_path: Path, damaged: bool) -> None:
    secret(store, 512)
    store.export_session(SECRET, None, tmp_path / "exported")
    sleep(store, 512, uri=FORK_URI, seed=5)
    pack = Path(store.path, store.index.packs_of(store.open_session(SECRET).entries[0].id)[0])
    shutil.copy(tmp_path / "exported", pack)
    if damaged:
        making.flip(pack, pack.read_bytes().index(str(SECRET).encode()))
    (tmp_path / "exported").unlink()
    store = reopened(store)
    report = store.forget(SECRET)
    require_awake(store, 512, uri=FORK_URI, seed=5)
    if damaged:
        assert codes(report) == {pack.name: forgetting.CANNOT_BE_TOLD}
        return
    assert report.problems == ()
    store.close()
    assert files_with(store.path, SECRET.name.encode()) == []


def test_a_forget_that_was_cut_off_is_finished_by_another(store: Store, tmp_path: Path) -> None:
    secret(store, 600)
    secret(store, 900)
    sleep(store, 512, uri=FORK_URI, seed=5)
    for again in stores_cut_off(store, tmp_path / "cut", lambda: store.forget(SECRET)):
        require_awake(again, 512, uri=FORK_URI, seed=5)
        with contextlib.suppress(SessionNotFound):
            assert again.forget(SECRET).problems == ()
        require_awake(again, 512, uri=FORK_URI, seed=5)
        require_gone(again, shared=2, token_count=600)


def test_the_index_keeps_no_name_of_a_deleted_row(store: Store) -> None:
    for number in range(40):
        sleep(store, 4, uri=SessionUri("default", f"many-{number}"), seed=number)
    secret(store)
    store = reopened(store)
    store.index._connection.execute("PRAGMA secure_delete = OFF")  # as SQLite is built elsewhere
    store.forget(SECRET)
    store = reopened(store)
    assert len(list(store.iter_sessions())) == 40
    require_gone(store)


def test_a_repack_under_way_brings_nothing_back(store: Store) -> None:
    secret(store, 600)
    sleep(store, 512, uri=FORK_URI, seed=5)
    with making.meanwhile(forgetting, "repack_packs", lambda: store.repack(policy=CLEARING)):
        assert store.forget(SECRET).problems == ()
    require_gone(store, shared=2)


def test_a_pack_that_is_being_written_since_before_the_delete_is_told(store: Store) -> None:
    """A repack has copied the session's blocks. A kill would leave them in its temporary file."""
    secret(store, 512)
    secret(store, 600)
    reports: list[MaintenanceReport] = []
    with making.meanwhile(PackWriter, "finish", lambda: reports.append(store.forget(SECRET)), after=True):
        store.repack(SECRET, policy=RepackPolicy(max_packs=1))
    assert [(Path(one.path).suffix, one.code) for one in reports[0].problems] == [(".tmp", forgetting.STILL_OPEN)]
    with pytest.raises(SessionNotFound, match="Nothing of it is in the store"):
        store.forget(SECRET)
    require_gone(store)


@pytest.mark.parametrize("read", [False, True])
def test_a_pack_that_is_begun_behind_the_delete_gets_nothing_of_the_session(
    store: Store, monkeypatch: pytest.MonkeyPatch, read: bool
) -> None:
    """The step of the repack is older, and the packs are open still. Somebody may read the session."""
    secret(store, 512)
    secret(store, 600)
    monkeypatch.setattr(PackWriter, "add_copy", making.refusing(AssertionError("It is copied.")))
    with contextlib.ExitStack() as stack:
        for name in store._core.folder.list_packs():
            stack.enter_context(store._core.files.holding(name))
        if read:
            stack.enter_context(store.open_session(SECRET))
        stack.enter_context(making.meanwhile(StoreFolder, "new_temp", lambda: store.forget(SECRET)))
        assert store.repack(SECRET, policy=RepackPolicy(max_packs=1)).problems == ()
    require_gone(store)


def test_a_version_that_comes_behind_the_look_goes_too_and_a_forks_turns_behind_it_stay(store: Store) -> None:
    sleep(store, 300)

    def come() -> None:
        sleep(store, 600)
        behind = dataclasses.replace(making.turn(store, 5), uri=FORK_URI, newest=None, held=512)
        store.acknowledge([behind])

    with making.meanwhile(forgetting._Forget, "delete", come):
        report = store.forget(making.URI)
    assert report.problems == ()
    assert store.versions(making.URI) == []
    assert making.ledger(store, FORK_URI) == making.token_ids(0, 512) + making.token_ids(600, 5)
    store = making.reopened(store)
    assert (store.opening.journal, store.verify(deep=True).findings) == ((), ())
    store.close()


def test_how_new_its_head_in_a_remote_was_is_forgotten_also_of_a_session_that_is_not_here(store: Store) -> None:
    core, url = store._core, "s3://bucket"
    core.seen_heads.ask(url)
    digest = blake3(str(SECRET).encode()).hexdigest(16).encode()
    for uri in (SECRET, FORK_URI):
        core.seen_heads.note(url, uri, 7)
    core.seen_heads.save()
    assert files_with(store.path, digest) == [f"{store.path}/heads.json"]
    for dry_run in (True, False):
        report = store.forget(SECRET, dry_run=dry_run)
        assert [action.path for action in report.actions] == [f"{store.path}/heads.json"]
        assert report.problems == ()
    assert files_with(store.path, digest) == []
    assert core.seen_heads.newest(url, SECRET) == 0
    with pytest.raises(HeadReplayed):
        core.seen_heads.require_new(url, FORK_URI, 6, core.seen_heads.newest(url, FORK_URI))
    with pytest.raises(SessionNotFound):
        store.forget(SECRET)


@pytest.mark.parametrize("asked", ["s3://other", None])
def test_a_remote_that_is_not_asked_and_had_the_session_is_told(store: Store, asked: str | None) -> None:
    """Of a store without a daemon, of a daemon without its remote, and of one with another remote."""
    secret(store)
    seen = store._core.seen_heads
    seen.note("s3://bucket", SECRET, 7)
    if asked is not None:
        seen.ask(asked)
    for dry_run in (True, False):
        assert codes(store.forget(SECRET, dry_run=dry_run)) == {"heads.json": "cannot_be_told"}
    secret(store)
    assert store.delete_session(SECRET).problems == (), "what was known of the remote went with the forget"
    secret(store)
    seen.note("s3://bucket", SECRET, 7)
    (problem,) = store.delete_session(SECRET).problems
    assert (problem.code, f"had {SECRET} when" in problem.message) == ("cannot_be_told", True)
    secret(store)
    seen.ask("s3://bucket")
    assert store.delete_session(SECRET).problems == ()


def test_a_file_that_takes_no_change_is_told_and_the_next_forget_tries_again(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret(store)
    store._core.seen_heads.ask("s3://bucket")
    store._core.seen_heads.note("s3://bucket", SECRET, 7)
    store._core.seen_heads.save()
    with monkeypatch.context() as broken:
        broken.setattr(store._core.seen_heads, "_write", Mock(side_effect=NoSpace("It is full.")))
        assert codes(store.forget(SECRET)) == {"heads.json": "not_forgotten"}
    report = store.forget(SECRET)
    assert ([Path(action.path).name for action in report.actions], report.problems) == (["heads.json"], ())
    require_gone(store)


@pytest.mark.parametrize("damage", [b"", b"{}", b"\x00" * 100])
def test_a_damaged_file_of_heads_is_in_no_ones_way(damage: bytes, store: Store) -> None:
    secret(store)
    put(Path(store.path, "heads.json"), damage)
    assert store.forget(SECRET).problems == ()
