"""Writing durably: the exact order of steps, and what each failure of the system means (threats 30 to 33; T3, T4)."""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
from torpor.memvid import errors
from torpor.memvid.errors import BlockMissing, DurabilityLost, NoSpace, ReadBackFailed, StoreError, StoreIoError
from torpor.memvid.exchange.incoming import hand_over
from torpor.memvid.format.blocks import BlockDraft
from torpor.memvid.index.index import Index
from torpor.memvid.store import Store
from torpor.tests.memvid import store_making as making
from torpor.tests.memvid.store_making import OTHER_URI, URI, pack_of, reopened, require_awake, sleep, tree


def files(store: Store) -> dict[str, bytes]:
    """All manifests and packs, and what lies beside them."""
    return tree(store.path, "versions/*") | tree(store.path, "packs/*")


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the store asks of the system, in order, one word a step."""
    seen: list[str] = []

    def record(module: object, name: str, say: Callable[..., str]) -> None:
        real = getattr(module, name)

        def spy(*args: object, **kwargs: object) -> object:
            seen.append(say(*args, **kwargs))
            return real(*args, **kwargs)

        monkeypatch.setattr(module, name, spy)

    def flush(fd: int) -> str:
        place = Path(f"/proc/self/fd/{fd}").resolve()
        return f"flush {place.name}" if place.is_dir() else f"flush a file in {place.parent.name}"

    def named(name: str) -> str:
        return {"mvm": "manifest", "mvp": "pack"}.get(name[-3:], name)

    record(os, "writev", lambda *_: "write")
    record(os, "pwrite", lambda *_: "write header")
    record(os, "fsync", flush)
    record(os, "rename", lambda old, new, **_: named(new))
    record(os, "unlink", lambda name, **__: f"remove {named(name)}")
    record(os, "preadv", lambda *_: "read")
    record(Index, "add", lambda *_: "index row")
    record(Index, "drop", lambda *_: "drop rows")
    return seen


def without_repeats(steps: list[str]) -> list[str]:
    """Reads left out, and of several writes one after another all but the first."""
    told = [step for step in steps if step != "read"]
    return [step for number, step in enumerate(told) if step != "write" or told[number - 1] != "write"]


ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc to tell files from folders")


@ON_LINUX
def test_t3_the_order_of_a_sleep_is_pack_flushed_and_read_back_manifest_flushed_names_row(
    store: Store, steps: list[str]
) -> None:
    """The flushes cannot be seen by killing a process, so their order is pinned here (promise 1). There are four."""
    sleep(store, 300)
    assert without_repeats(steps) == [
        "write", "write header", "flush a file in packs", "write", "flush a file in versions", "pack", "flush packs",
        "manifest", "flush versions", "index row",
    ]  # fmt: skip
    assert "read" in steps[steps.index("flush a file in packs") : steps.index("pack")]


@ON_LINUX
def test_t3_the_order_of_a_delete_is_index_file_rows_manifests_packs(store: Store, steps: list[str]) -> None:
    """Each is certain before the next: the copy of the index, which would tell of it, then the oldest version first."""
    sleep(store, 600, before=sleep(store, 300))
    store = reopened(store)
    del steps[:]
    with store:
        store.delete_session(URI)
        assert without_repeats(steps)[:12] == [
            "remove index.sqlite", "deletes.1", "flush store", "drop rows", "remove manifest", "flush versions",
            "drop rows", "remove manifest", "flush versions", "remove pack", "remove pack", "flush packs",
        ]  # fmt: skip


@ON_LINUX
def test_store_json_is_flushed_before_the_store_is_used(tmp_path: Path, steps: list[str]) -> None:
    Store.open(tmp_path / "new", writable=True).close()
    last = len(steps) - 1 - steps[::-1].index("write")
    assert steps[last:][:2] == ["write", "flush a file in new"]
    assert "flush new" in steps[last + 2 :]


OPEN = os.open


def failing(
    code: int,
    real: Callable[..., object],
    *,
    after: int,
    first: Callable[..., object] | None = None,
    once: bool = False,
) -> Callable[..., object]:
    """A system call that works `after` times, then fails, for ever or once; just before, `first` may do a part of its
    work."""
    calls = 0

    def call(*args: object, **kwargs: object) -> object:
        nonlocal calls
        if code == errno.ENOSPC and real is OPEN and not args[1] & os.O_CREAT:  # type: ignore[operator]
            return real(*args, **kwargs)  # a full disk opens what is there
        calls += 1
        if calls <= after or (once and calls > after + 1 + (first is not None)):
            return real(*args, **kwargs)
        if first is not None and calls == after + 1:
            return first(*args, **kwargs)
        raise OSError(code, os.strerror(code))

    return call


def a_part(fd: int, buffers: list[memoryview]) -> int:
    """What a full disk first takes."""
    return os.write(fd, buffers[0][:10])


CALLS = ("open", "writev", "pwrite", "preadv", "rename", "dup")
FAILURES = [
    *(("writev", code, NoSpace, once) for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) for once in (False, True)),
    *(("pwrite", errno.ENOSPC, NoSpace, once) for once in (False, True)),
    *((call, errno.ENOSPC, NoSpace, once) for call in ("open", "rename") for once in (False, True)),
    *((call, code, StoreIoError, False) for call in CALLS for code in (errno.EIO, errno.EROFS, errno.EMFILE)),
    ("dup", errno.EMFILE, StoreIoError, True),
    ("fsync", errno.EIO, DurabilityLost, True),
]
FLUSHES = 4
UNREAD = (BlockMissing, None)
"""Where a sleep cannot open what it goes on from, its state can still sleep whole."""


@pytest.mark.one_in(1)
@pytest.mark.parametrize(("call", "code", "kind", "once"), FAILURES)
def test_threats_30_31_t4_a_sleep_in_which_a_call_fails_is_refused_in_a_typed_way_and_changes_nothing(
    store: Store, call: str, code: int, kind: type[StoreError], once: bool
) -> None:
    """Of a new session, and of a version that goes on. Then the store goes on too; behind a failed flush, of which each
    is told, once it was opened again."""
    first = sleep(store, 300)
    before, rows, refusals = files(store), store.versions(URI), set[tuple[type[StoreError], object]]()
    for number in range(20):
        after, goes_on = number // 2, bool(number % 2)
        part = a_part if call == "writev" and kind is NoSpace else None
        failure = failing(code, getattr(os, call), after=after, first=part, once=once)
        try:
            with mock.patch.object(os, call, failure):
                sleep(store, 600, before=first) if goes_on else sleep(store, 300, uri=OTHER_URI, seed=number + 1)
        except StoreError as error:
            refusals.add((type(error), error.details.get("errno")))
        else:
            store.delete_version(URI, 2) if goes_on else store.delete_session(OTHER_URI)
        if kind is DurabilityLost:
            assert store._core.writable == (number >= 2 * FLUSHES), "no failed flush is acknowledged"
            store = reopened(store)
        assert files(store) == before
        assert (store.versions(URI), store.find_session(OTHER_URI)) == (rows, None)
        assert not store._core.pins.blocks()
        assert store.index.pack_sizes().keys() == {name for name in making.names(store.path) if name[:5] == "packs"}
    assert {(kind, code)} <= refusals <= {(kind, code), UNREAD}
    with store:
        require_awake(store, 300)
        assert sleep(store, 600, before=first).version == 2
        require_awake(store, 600)


def full_disk(path: Path) -> os.statvfs_result:
    status = os.statvfs(path)
    return os.statvfs_result((status.f_bsize, 4096, status.f_blocks, 9, 9, *tuple(status)[5:]))


def hand_over_one(store: Store, folder: Path) -> int:
    hand_over(store.path, str(folder / "other.mvp"))
    return (folder / "other.mvp").stat().st_size


WORKS: dict[str, Callable[[Store, Path], int]] = {
    "sleep": lambda store, _: sleep(store, 1500, uri=OTHER_URI, seed=1).bytes_written,
    "compress": lambda store, _: sleep(store, 1500, uri=OTHER_URI, seed=1, compressed=True).bytes_written,
    "import": lambda store, folder: store.import_file(folder / "other.mvp").bytes_written,
    "hand over": hand_over_one,
    "export": lambda store, folder: store.export_session(URI, 2, folder / "mine.mvp").file_bytes,
    "export-kv": lambda store, folder: store.export_tensors(URI, 2, folder / "mine.safetensors").file_bytes,
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("after", [0, 1, 4])
@pytest.mark.parametrize("work", WORKS)
def test_a_full_disk_tells_what_it_has_free_and_what_the_whole_work_needs(
    store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, work: str, after: int
) -> None:
    """Not what the next piece needs: who frees that much only meets the next refusal."""
    with Store.open(tmp_path / "elsewhere", writable=True) as elsewhere:
        sleep(elsewhere, 1500, uri=OTHER_URI, seed=1)
        elsewhere.export_session(OTHER_URI, 1, tmp_path / "other.mvp")
    sleep(store, 1500, before=sleep(store, 1300))
    with monkeypatch.context() as patch:
        call = "pwrite" if work == "export-kv" and after else "writev"
        after = 0 if work == "hand over" else after  # it has but one write of this size
        patch.setattr(os, call, failing(errno.ENOSPC, getattr(os, call), after=after))
        patch.setattr(os, "fstatvfs", lambda _: full_disk(tmp_path))
        with pytest.raises(NoSpace) as refusal:
            WORKS[work](store, tmp_path)
    found = re.search(r" This needs about ([0-9.]+) KiB, and ([0-9.]+) KiB are free there\.", refusal.value.message)
    assert found is not None, refusal.value.message
    needed, free = float(found[1]), float(found[2])
    assert (free > 36) == (after > 0)  # what was written of it goes with it
    written = WORKS[work](store, tmp_path) / 1024
    assert 0.95 * written < needed < 1.05 * written


def test_a_quota_is_no_full_disk_and_tells_no_room(
    store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", failing(errno.EDQUOT, os.writev, after=0))
        patch.setattr(os, "fstatvfs", lambda _: full_disk(tmp_path))
        with pytest.raises(NoSpace) as refusal:
            sleep(store, 600)
    assert "needed_bytes" not in refusal.value.details
    assert "free there" not in refusal.value.message


def test_where_the_rest_cannot_be_measured_a_full_disk_is_still_no_space(store: Store) -> None:
    """The rest of a session holds what cannot be kept; that the disk is full came first."""

    def blocks() -> Iterator[BlockDraft]:
        yield making.span(0, 256)
        raise errors.InvalidDraft("The rest is no number.")

    with mock.patch.object(os, "writev", failing(errno.ENOSPC, os.writev, after=0)), pytest.raises(NoSpace) as refusal:
        making.write(store, blocks(), 512)
    assert "needed_bytes" not in refusal.value.details


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.EROFS, "Read-only file system. Mount its file system for writing."),
        (errno.EACCES, "Permission denied. Give user 0, as whom this runs, the right to write there."),
        (errno.EIO, "Input/output error."),
    ],
)
def test_what_may_not_be_written_says_what_to_do(store: Store, number: int, advice: str) -> None:
    advice = advice.replace("user 0", f"user {os.geteuid()}")
    with mock.patch.object(os, "writev", failing(number, os.writev, after=0)), pytest.raises(StoreIoError) as refusal:
        sleep(store, 300)
    assert refusal.value.message.endswith(f": {advice}")
    assert refusal.value.errno == number


def test_threat_32_writes_that_take_a_byte_at_a_time_are_completed(store: Store) -> None:
    real_writev, real_preadv = os.writev, os.preadv

    def short_write(fd: int, buffers: list[memoryview]) -> int:
        return real_writev(fd, [buffers[0][:7]])

    def short_read(fd: int, buffers: list[memoryview], offset: int) -> int:
        return real_preadv(fd, [buffers[0][:11]], offset)

    with (
        mock.patch.object(os, "writev", short_write),
        mock.patch.object(os, "pwrite", lambda fd, data, offset, real=os.pwrite: real(fd, data[:5], offset)),
        mock.patch.object(os, "preadv", short_read),
    ):
        sleep(store, 30)
        require_awake(store, 30)
    require_awake(store, 30)
    assert store.verify(deep=True).ok


def test_what_does_not_read_back_is_not_published(store: Store) -> None:
    """restic's habit: decode what was encoded before anyone relies on it. Here memory changes under the writer."""
    sleep(store, 300)
    before = files(store)
    real = os.writev

    def altered(fd: int, buffers: list[memoryview]) -> int:
        if len(buffers) < 4:
            return real(fd, buffers)
        changed = [bytes(buffer) for buffer in buffers]
        changed[2] = bytes([changed[2][0] ^ 1]) + changed[2][1:]  # of the first head's keys
        return real(fd, changed)

    with (
        mock.patch.object(os, "writev", altered),
        pytest.raises(ReadBackFailed, match="store is as it was") as refusal,
    ):
        sleep(store, 600)
    assert refusal.value.cause == "corrupt_block"
    assert files(store) == before
    require_awake(store, 300)


def test_a_read_that_fails_is_typed_and_names_the_file(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    receipt = sleep(store, 300)
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", failing(errno.EIO, os.preadv, after=0))
        with pytest.raises(StoreIoError) as refusal, store.open_session(URI) as reader:
            reader.tokens()
    assert (refusal.value.errno, refusal.value.path) == (errno.EIO, str(pack_of(store, receipt)))
    require_awake(store, 300)
