"""Sleep and wake through the store: exact bytes, versions, deltas, and every refusal before something is written."""

from __future__ import annotations

import dataclasses
import errno
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torpor.memvid import errors
from torpor.memvid.folder.retention import Retention
from torpor.memvid.folder.scrub_mark import ScrubMark
from torpor.memvid.folder.store_file import _FORMAT
from torpor.memvid.format.blocks import BlockDraft, SlotDraft, SlotSpec
from torpor.memvid.format.identity import Identity
from torpor.memvid.format.journal import JournalRecord
from torpor.memvid.recovery.restoring import restore_store_file
from torpor.memvid.store import Store
from torpor.memvid.uri import SessionUri
from torpor.tests.memvid import store_making as making
from torpor.tests.memvid.store_making import OTHER_URI, URI, drafts, names, require_awake, sleep, span, tree, write

SPEC = SlotSpec("0.k", "kv.k/1", "bfloat16", (2, 10, 4))
NOT_CONTIGUOUS = SlotDraft(SlotSpec("x", "state.x/1", "uint8", (4,)), [memoryview(bytes(8))[::2]])
UUID = "1b671a64-40d5-491e-99b0-da01ff1f3341"


# --- exactness


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("token_count", [0, 1, 255, 256, 257, 600])
def test_promise_2_a_wake_gives_the_very_bytes_that_slept(store: Store, token_count: int, compressed: bool) -> None:
    sleep(store, token_count, compressed=compressed)
    require_awake(store, token_count)


def test_a_receipt_tells_what_was_written(store: Store) -> None:
    receipt = sleep(store, 300)
    with store.open_session(URI) as reader:
        assert reader.bundle_id == receipt.bundle_id
        assert reader.entries == receipt.entries
        assert reader.manifest.session == {"model": "demo", "labels": ["test"], "sampling": {"temperature": 0.5}}
        assert reader.manifest.identity == making.IDENTITY
    assert (receipt.version, receipt.token_count, receipt.blocks_new, receipt.blocks_reused) == (1, 300, 3, 0)
    files = [making.manifest_path(store, receipt.bundle_id), *making.packs_of(store, receipt)]
    assert len(files) == len(names(store.path)) == 2
    assert receipt.bytes_written == sum(file.stat().st_size for file in files)
    assert receipt.logical_bytes == sum(len(slot) for block in making.expected(300) for slot in block)
    row = store.require_session(URI)
    assert (row.model, row.labels, row.bundle_bytes) == ("demo", ("test",), receipt.bytes_written)


def test_compressible_slots_take_less_room_and_the_rest_stays_raw(store: Store) -> None:
    flat = SlotSpec("flat", "state.x/1", "uint8", (4096,))
    noise = SlotSpec("noise", "state.x/1", "uint8", (4096,))
    noisy = making.raw_bytes(4096)
    block = BlockDraft(
        "state", 0, b"", [SlotDraft(flat, [memoryview(bytes(4096))]), SlotDraft(noise, [memoryview(noisy)])]
    )
    receipt = write(store, [block], 0, compressed=True)
    assert 4096 < receipt.bytes_written < 6500
    with store.open_session(URI) as reader:
        assert reader.read_slot(reader.entries[0], 0) == bytes(4096)
        assert reader.read_slot(reader.entries[0], 1) == noisy


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(0, 700),
    st.integers(0, 3),
    st.booleans(),
    st.lists(st.tuples(st.sampled_from(["uint8", "float32"]), st.integers(0, 50), st.integers(1, 9)), max_size=4),
)
def test_any_session_survives(
    tmp_path_factory: pytest.TempPathFactory,
    tokens: int,
    layers: int,
    compressed: bool,
    extra: list[tuple[str, int, int]],
) -> None:
    blocks = drafts(tokens, layers=layers)
    slots, raws = [], []
    for number, (dtype, size, cuts) in enumerate(extra):
        spec = SlotSpec(f"x{number}", "state.x/1", dtype, (size,))
        raw = memoryview(making.raw_bytes(spec.size_bytes, number))
        raws.append(bytes(raw))
        slots.append(SlotDraft(spec, [raw[at : at + cuts] for at in range(0, len(raw), cuts)]))
    blocks[-1] = BlockDraft("state", tokens, b"", slots)  # one state record at a position, no more
    with Store.open(tmp_path_factory.mktemp("any") / "store", writable=True) as store:
        write(store, blocks, tokens, compressed=compressed)
        with store.open_session(URI) as reader:
            assert reader.tokens() == making.token_ids(0, tokens)
            last = reader.entries[-1]
            assert [bytes(reader.read_slot(last, slot)) for slot in range(len(raws))] == raws


def test_a_slot_of_many_buffers_is_written_and_filled_whole(store: Store) -> None:
    """More buffers than one system call takes."""
    spec = SlotSpec("wide", "state.x/1", "uint8", (3000,))
    raw = memoryview(making.raw_bytes(3000))
    write(store, [BlockDraft("state", 0, b"", [SlotDraft(spec, [raw[at : at + 1] for at in range(3000)])])], 0)
    target = memoryview(bytearray(3000))
    with store.open_session(URI) as reader:
        reader.read_slots_into(reader.entries[0], [(0, [target[at : at + 1] for at in range(3000)])])
    assert target == raw


# --- versions and deltas


def test_promise_5_a_later_sleep_writes_only_what_is_new(store: Store) -> None:
    first = sleep(store, 2000)
    second = sleep(store, 2100, before=first)
    assert second.blocks_reused == 7
    assert second.bytes_written < first.bytes_written / 4
    assert second.logical_bytes > first.logical_bytes
    require_awake(store, 2100)


@pytest.mark.one_in(2)
def test_a_reader_of_many_packs_keeps_few_files_open(store: Store) -> None:
    making.sleep_each(store, *(blocks * 256 for blocks in range(1, 62)), layers=1)
    with store.open_session(URI) as reader:
        before = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
        reader.tokens()
        after = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
        assert after - before <= 49
    require_awake(store, 61 * 256, layers=1)


def test_progress_counts_new_tokens(store: Store) -> None:
    steps: list[tuple[int, int]] = []
    write(store, drafts(600), 600, on_progress=lambda done, total: steps.append((done, total)))
    assert steps == [(256, 600), (512, 600), (600, 600)]


# --- refusals: nothing is written


@pytest.mark.parametrize(
    ("blocks", "token_count"),
    [
        pytest.param([span(0, 10)], 11, id="fewer tokens than promised"),
        pytest.param([span(0, 10)], 9, id="more tokens than promised"),
        pytest.param([span(256, 10)], 10, id="a start that is not 0"),
        pytest.param([span(0, 256), span(512, 10)], 266, id="a gap"),
        pytest.param([span(0, 100), span(100, 10)], 110, id="a short span in the middle"),
        pytest.param([span(0, 257)], 257, id="a span of 257 tokens"),
        pytest.param([span(0, 10), making.state(9)], 10, id="a state record elsewhere"),
        pytest.param([dataclasses.replace(span(0, 10), tokens=b"abc")], 10, id="a third of a token"),
        pytest.param([dataclasses.replace(span(0, 10), kind="code")], 10, id="an unknown kind"),
        pytest.param([dataclasses.replace(span(0, 10), slots=list(span(0, 10).slots) * 2)], 10, id="a slot twice"),
        pytest.param([dataclasses.replace(span(0, 10), slots=[SlotDraft(SPEC, [])])], 10, id="no bytes"),
        pytest.param([BlockDraft("state", 0, b"", [NOT_CONTIGUOUS])], 0, id="a buffer with holes"),
        pytest.param([], -1, id="a negative number of tokens"),
        pytest.param([], 1 << 63, id="2^63 tokens"),
    ],
)  # fmt: skip
def test_threat_8_a_session_that_contradicts_itself_is_refused(
    store: Store, blocks: list[BlockDraft], token_count: int
) -> None:
    sleep(store, 5)
    before = names(store.path)
    with pytest.raises((errors.InvalidDraft, errors.LimitExceeded)):
        write(store, blocks, token_count)
    assert names(store.path) == before
    require_awake(store, 5)


@pytest.mark.parametrize(
    "session",
    [
        {"labels": "text"},
        {"labels": [""]},
        {"labels": ["x"] * 300},
        {"blob": bytes((4 << 20) + 1)},
        {"object": object()},
        {1: 2},
    ],
    ids=["labels", "an empty label", "300 labels", "4 MiB", "an object", "a key"],
)
@pytest.mark.parametrize("late", [False, True])
def test_a_session_map_outside_its_limits_is_refused(store: Store, session: dict[str, object], late: bool) -> None:
    with pytest.raises((errors.InvalidDraft, errors.LimitExceeded)):
        write(store, drafts(10), 10, session=(lambda: session) if late else session)
    assert not list(store.iter_sessions())
    assert names(store.path) == set()


def test_reused_blocks_without_a_parent_are_refused(store: Store) -> None:
    one = sleep(store, 600)
    with pytest.raises(errors.InvalidDraft, match="parent"):
        write(store, [span(256, 4)], 260, reused=one.entries[:1])
    assert len(store.versions(URI)) == 1


def test_a_reused_block_of_another_identity_is_refused(store: Store) -> None:
    one = sleep(store, 600)
    other = Identity((("weights", "other"),))
    with pytest.raises(errors.InvalidDraft) as refusal:
        write(store, [span(256, 4)], 260, reused=one.entries[:1], identity=other, parent=one.bundle_id)
    assert {item["field"] for item in refusal.value.mismatched_fields} == {"compute_dtype", "weights"}


# --- blocks that are there already


def test_a_hundred_sessions_of_one_beginning_cost_one_beginning_and_a_hundred_tails(store: Store) -> None:
    base = sleep(store, 2560, layers=1)
    before = sum((Path(store.path) / name).stat().st_size for name in names(store.path))
    for number in range(100):
        fork = write(
            store,
            [*drafts(2560, layers=1)[:-1], span(2560, 1, seed=number, layers=1)],
            2561,
            uri=SessionUri("fork", str(number)),
        )
        assert (fork.blocks_new, fork.blocks_reused) == (1, 10)
    after = sum((Path(store.path) / name).stat().st_size for name in names(store.path))
    assert after - before < 100 * 3000
    assert before > base.logical_bytes > 80_000


def test_a_damaged_block_is_written_again_and_not_referred_to(store: Store) -> None:
    """What a pack holds by name only would be lost with the memory that is about to be freed."""
    base = sleep(store, 600)
    making.spoil(store, base, 1)
    same = sleep(store, 600, uri=OTHER_URI)
    assert (same.blocks_new, same.blocks_reused) == (1, 3)
    require_awake(store, 600, uri=OTHER_URI)
    require_awake(store, 600)  # and heals the other one


def test_a_pack_that_is_damaged_in_all_blocks_is_replaced_by_a_sound_one_of_the_same_name(store: Store) -> None:
    base = sleep(store, 600)
    pack = making.pack_of(store, base)
    making.spoil(store, base, 0, 1, 2, 3)
    same = sleep(store, 600, uri=OTHER_URI)
    assert (same.blocks_new, making.packs_of(store, same)) == (4, [pack])
    require_awake(store, 600)
    require_awake(store, 600, uri=OTHER_URI)


def test_an_unknown_session_is_refused_by_name(store: Store) -> None:
    sleep(store, 10)
    with pytest.raises(errors.SessionNotFound) as refusal:
        store.open_session(SessionUri("default", "agnet"))
    assert refusal.value.suggestions == ["torpor://default/agent"]
    with pytest.raises(errors.SessionNotFound, match="it has version 1\\."):
        store.open_session(URI, version=7)
    with pytest.raises(errors.SessionNotFound):
        store.delete_session(OTHER_URI)
    with pytest.raises(errors.SessionNotFound):
        store.delete_version(URI, 2)


def test_a_session_whose_manifest_cannot_be_read_may_be_there_and_is_once_it_is_put_back(store: Store) -> None:
    damaged = making.manifest_path(store, sleep(store, 10).bundle_id)
    whole = making.flip(damaged, 200)
    with making.reopened(store, anew=True) as opened:
        for ask in (
            lambda: opened.resolve("agent"),
            lambda: opened.resolve_version("agent"),
            lambda: opened.open_session(URI),
        ):
            with pytest.raises(errors.SessionNotFound, match=f"may be its: .*{damaged.name}") as refusal:
                ask()
            assert ("more" in refusal.value.message, refusal.value.path) == (False, str(damaged))
        damaged.write_bytes(whole)
        assert opened.resolve("agent") == URI
        with opened.open_session(URI) as reader:
            assert reader.manifest.block_tokens == 10
        with pytest.raises(errors.SessionNotFound) as refusal:
            opened.resolve("another")
        assert "cannot be read" not in refusal.value.message


# --- opening


def test_a_store_that_is_not_there_is_not_made_by_reading(store_path: Path) -> None:
    with pytest.raises(errors.NoStore):
        Store.open(store_path, writable=False)
    assert not store_path.exists()


@pytest.mark.parametrize("below", ["", "store"])
def test_a_file_where_a_store_should_be_made_is_said_to_be_one_and_kept(tmp_path: Path, below: str) -> None:
    file = tmp_path / "notes.md"
    file.write_text("mine")
    with pytest.raises(errors.NotAStore, match="there is a file, not a folder"):
        Store.open(file / below, writable=True)
    with pytest.raises(errors.StoreError):
        Store.open(file / below, writable=False)
    assert file.read_text() == "mine"


def test_where_no_folder_can_be_made_the_system_says_why(store_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As below /proc, where the system says so of what no file is in the way of."""

    monkeypatch.setattr(
        os, "mkdir", mock.Mock(side_effect=FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "x"))
    )
    with pytest.raises(
        errors.NotAStore, match=r"cannot be made there \(No such file or directory\)\. Choose another folder"
    ):
        Store.open(store_path, writable=True)


@pytest.mark.parametrize("bad", ["x\0y", "\ud800", "a/" * 3000, "x" * 5000], ids=["null", "surrogate", "deep", "long"])
def test_a_path_that_no_file_can_have_is_refused_by_all_who_take_one(store: Store, tmp_path: Path, bad: str) -> None:
    sleep(store, 10)
    path = f"{tmp_path}/{bad}"
    for ask in (
        lambda: Store.open(path, writable=True),
        lambda: Store.open(path, writable=False),
        lambda: store.backup(path),
        lambda: store.export_session(URI, None, path),
        lambda: store.export_tensors(URI, None, path),
        lambda: store.import_file(path),
        lambda: store.repair(sources=[path]),
        lambda: restore_store_file(path),
    ):
        with pytest.raises(errors.StoreIoError, match="no path that a file can have") as refusal:
            ask()
        str(refusal.value.details["path"]).encode()
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_a_store_and_its_files_are_private(store: Store) -> None:
    receipt = sleep(store, 10)
    path = Path(store.path)
    folders = [path, *(item for item in path.rglob("*") if item.is_dir())]
    assert {item.stat().st_mode & 0o777 for item in folders} == {0o700}
    files = [item for item in path.rglob("*") if item.is_file()]
    assert {making.manifest_path(store, receipt.bundle_id), *making.packs_of(store, receipt)} <= {*files}
    assert {item.stat().st_mode & 0o077 for item in files} == {0}


def test_a_new_store_has_all_that_every_store_has(store: Store) -> None:
    assert {file.name for file in Path(store.path).iterdir()} == {
        "store.json",
        "lock",
        "versions",
        "packs",
        "marks.json",
    }


def test_a_folder_with_other_things_in_it_does_not_become_a_store(store_path: Path) -> None:
    store_path.mkdir()
    (store_path / "thesis.txt").write_text("important")
    with pytest.raises(errors.NotAStore):
        Store.open(store_path, writable=True)
    assert tree(store_path) == {"thesis.txt": b"important"}


NOT_STORE_FILES = {
    "empty": b"",
    "another map": b"{}",
    "a list": b"[1]",
    "cut": b"{",
    "without a digest": b'{"format":"torpor.store","uuid":"x","version":2}\n',
    "too long": b"x" * 5000,
    "no uuid": _FORMAT.encode({}),
    "a uuid that is none": _FORMAT.encode({"uuid": "x"}),
    "a uuid in another form": _FORMAT.encode({"uuid": f"{{{UUID.upper()}}}"}),
    "a uuid that is a number": _FORMAT.encode({"uuid": 7}),
    "an unknown key": _FORMAT.encode({"uuid": UUID, "more": 1}),
    "version 0": replace(_FORMAT, version=0).encode({"uuid": UUID}),
    "a later version of another format": replace(_FORMAT, name="shop", version=3).encode({}),
}


def require_refused(path: Path, kind: type[errors.StoreError], match: str | None = None) -> None:
    """Nobody opens the store, and it is not touched."""
    before = tree(path)
    for writable in (True, False):
        with pytest.raises(kind, match=match):
            Store.open(path, writable=writable)
    assert tree(path) == before


@pytest.mark.parametrize("data", NOT_STORE_FILES.values(), ids=NOT_STORE_FILES)
def test_a_store_json_that_is_not_valid_is_refused(store: Store, store_path: Path, data: bytes) -> None:
    sleep(store, 5)
    store.close()
    (store_path / "store.json").write_bytes(data)
    require_refused(store_path, errors.CorruptStoreFile, r"store\.json is damaged.*torpor repair")


def test_a_store_json_of_something_else_where_no_version_is_is_no_store(store_path: Path) -> None:
    store_path.mkdir()
    (store_path / "store.json").write_bytes(b"{}")
    require_refused(store_path, errors.NotAStore)


def test_threat_23_a_store_of_a_later_version_is_refused_and_not_touched(store: Store, store_path: Path) -> None:
    sleep(store, 5)
    store.close()
    (store_path / "store.json").write_bytes(replace(_FORMAT, version=3).encode({"uuid": UUID, "new": [1]}))
    require_refused(store_path, errors.UnsupportedFormat)


@pytest.mark.parametrize("with_versions", [True, False])
def test_a_store_without_its_store_json_is_not_made_anew(store: Store, store_path: Path, with_versions: bool) -> None:
    if with_versions:
        sleep(store, 5)
    store.close()
    (store_path / "store.json").unlink()
    if with_versions:
        require_refused(store_path, errors.NotAStore, r"store\.json is missing")
    else:  # as a making that was cut off leaves it
        with Store.open(store_path, writable=True) as again:
            sleep(again, 5)
            assert not again.marks(URI)


@pytest.mark.parametrize("name", ["versions", "packs"])
@pytest.mark.parametrize("writable", [True, False])
def test_a_store_without_one_of_its_folders_is_refused(
    store: Store, store_path: Path, name: str, writable: bool
) -> None:
    sleep(store, 5)
    store.close()
    (store_path / name).rename(store_path.parent / "away")
    with pytest.raises(errors.NotAStore, match="Put it back from a backup"):
        Store.open(store_path, writable=writable)
    (store_path.parent / "away").rename(store_path / name)
    with Store.open(store_path, writable=writable) as again:
        require_awake(again, 5)


def test_a_closed_store_is_closed(store: Store) -> None:
    sleep(store, 5)
    reader = store.open_session(URI)
    store.close()
    store.close()
    for ask in (
        lambda: reader.read_header(reader.entries[0]),
        lambda: reader.tokens(),
        lambda: store.open_session(URI),
        lambda: store.versions(URI),
        lambda: store.marks(URI),
        lambda: store.unreadable(),
    ):
        with pytest.raises(errors.StoreClosed):
            ask()
    reader.close()
    with pytest.raises(errors.StoreClosed):
        reader.read_header(reader.entries[0])


TURN = JournalRecord(OTHER_URI, {"model": "demo"}, None, None, 0, making.IDENTITY)
CHANGES: dict[str, Callable[[Store], object]] = {
    "sleep": lambda store: sleep(store, 6),
    "acknowledge": lambda store: store.acknowledge([TURN]),
    "delete": lambda store: store.delete_session(URI),
    "delete a version": lambda store: store.delete_version(URI, 1),
    "forget": lambda store: store.forget(URI),
    "prune": lambda store: store.prune(Retention(keep_last=1)),
    "drop stand-ins": lambda store: store.drop_stand_ins(URI),
    "strip": lambda store: store.strip(URI),
    "tag": lambda store: store.tag(URI, 1, "second"),
    "untag": lambda store: store.untag(URI, "first"),
    "pin": lambda store: store.pin(URI, 1),
    "unpin": lambda store: store.unpin(URI, "00" * 32),
    "import": lambda store: store.import_file(f"{store.path}/../exported"),
    "adopt": lambda store: store.adopt_incoming("00" * 32),
    "repack": lambda store: store.repack(),
    "repair": lambda store: store.repair(),
    "remember a look": lambda store: store.save_scrub_mark(ScrubMark(b"", 1, 1)),
    "write the diary": lambda store: (store.diary.say({}, URI, {}), store.write_diary()),
}
"""All that changes a store; a file was exported beside it."""
NOT_WRITABLE = {
    "read-only": errors.ReadOnlyStore,
    "closed": errors.StoreClosed,
    "lost a flush": errors.DurabilityLost,
}


@pytest.mark.parametrize("kind", NOT_WRITABLE)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_no_change_is_made_where_nothing_may_be_written(
    store: Store, change: Callable[[Store], object], kind: str
) -> None:
    sleep(store, 300)
    store.tag(URI, 1, "first")
    store.export_session(URI, None, f"{store.path}/../exported")
    with Store.open(store.path, writable=False) as beside:
        if kind == "closed":
            store.close()
        elif kind == "lost a flush":
            with pytest.raises(errors.DurabilityLost), store._core.committing():
                raise errors.DurabilityLost("the first", path="there")
        before = tree(store.path)
        with pytest.raises(NOT_WRITABLE[kind]) as refusal:
            change(beside if kind == "read-only" else store)
        assert tree(store.path) == before
        require_awake(beside, 300)
    if kind == "lost a flush":
        assert refusal.value.message.endswith(": the first")
        assert refusal.value.path == "there"
        assert not store._core.writable
        require_awake(store, 300)


def test_a_clock_before_1970_does_not_stop_a_sleep_and_two_of_one_moment_are_two(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.time_ns", lambda: -1)
    first = sleep(store, 10)
    store.delete_version(URI, first.version)
    again = sleep(store, 10)
    assert (again.version, again.bundle_id) == (1, first.bundle_id), (
        "nothing of the first one is left to be confused with"
    )
    third = write(store, drafts(10), 10, uri=URI)
    assert third.bundle_id != again.bundle_id
    require_awake(store, 10)
