"""A file that is exported, as a version or as tensors, is whole or not there, and the store is as it was."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torpor.memvid import errors
from torpor.memvid.store import Store
from torpor.memvid.uri import SessionUri
from torpor.tests.memvid import store_making as making
from torpor.tests.memvid.store_making import OTHER_URI, URI, meanwhile, sleep

Export = Callable[..., Any]
EXPORTS: dict[str, Export] = {"a version": Store.export_session, "tensors": Store.export_tensors}
of_both = pytest.mark.parametrize("export", EXPORTS.values(), ids=EXPORTS)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out" / "agent"


def left(target: Path) -> dict[str, str]:
    """What is in the folder, and what it says."""
    return {file.name: file.read_text() for file in target.parent.iterdir()}


@of_both
def test_a_version_is_named_by_its_number_and_what_is_not_there_is_refused(
    store: Store, target: Path, export: Export
) -> None:
    first = sleep(store, 300)
    sleep(store, 600, before=first)
    before = making.tree(store.path)
    with Store.open(store.path, writable=False) as reader:
        assert export(reader, URI, 1, target).bundle_id == first.bundle_id
    for uri, version in ((URI, 9), (OTHER_URI, None), (SessionUri("default", "nobody"), 1)):
        with pytest.raises(errors.SessionNotFound):
            export(store, uri, version, target.with_name("other"))
    assert os.listdir(target.parent) == [target.name]
    assert making.tree(store.path) == before


@of_both
def test_nothing_is_exported_into_the_store(store: Store, tmp_path: Path, export: Export) -> None:
    sleep(store, 300)
    place = Path(store.path)
    (tmp_path / "link").symlink_to(place / "packs")
    before = making.tree(place)
    for inside in (place / "x", place / "packs" / "x", place / "versions" / "x", tmp_path / "link" / "x"):
        for replacing in (False, True):
            with pytest.raises(errors.UnsafePath):
                export(store, URI, None, inside, replacing=replacing)
    assert making.tree(place) == before
    export(store, URI, None, tmp_path / "x")  # beside it is allowed


@of_both
def test_a_file_that_is_there_is_left_unless_it_shall_be_replaced(store: Store, target: Path, export: Export) -> None:
    sleep(store, 300)
    target.write_text("mine")
    with pytest.raises(errors.TargetExists):
        export(store, URI, None, target)
    assert left(target) == {target.name: "mine"}
    export(store, URI, None, target, replacing=True)
    assert target.stat().st_size > 1000
    target.unlink()
    target.mkdir()
    with pytest.raises(errors.TargetExists):
        export(store, URI, None, target, replacing=True)


@of_both
@pytest.mark.parametrize("replacing", [False, True])
def test_a_damaged_block_is_told_and_nothing_is_exported(
    store: Store, target: Path, export: Export, replacing: bool
) -> None:
    receipt = sleep(store, 300)
    making.spoil(store, receipt, 0)
    if replacing:
        target.write_text("mine")
    with pytest.raises(errors.CorruptBlock) as refusal:
        export(store, URI, None, target, replacing=replacing)
    assert refusal.value.path == str(making.pack_of(store, receipt))
    assert left(target) == ({target.name: "mine"} if replacing else {})


@of_both
@pytest.mark.parametrize("replacing", [False, True])
@pytest.mark.parametrize(
    ("call", "at", "failure", "kind"),
    [
        ("write", 1, errno.ENOSPC, errors.NoSpace),
        ("write", 2, errno.EIO, errors.StoreIoError),
        ("fsync", 1, errno.EIO, errors.DurabilityLost),
        ("fsync", 2, errno.EIO, errors.DurabilityLost),
    ],
)
def test_what_fails_leaves_what_was_there_and_the_store_writes_on(
    store: Store,
    target: Path,
    export: Export,
    call: str,
    at: int,
    failure: int,
    kind: type[errors.StoreError],
    replacing: bool,
) -> None:
    """It may lie on another disk than the store. A file is flushed before it has its name, and its folder behind that:
    then nothing brings back what was replaced."""
    sleep(store, 600)
    if replacing:
        target.write_text("mine")
    has_its_name, there = (call, at) == ("fsync", 2), list[bool]()

    def fail(*_: object) -> None:
        there.append(target.exists() and target.stat().st_size > 4)
        raise OSError(failure, "injected")

    name = {Store.export_session: "writev", Store.export_tensors: "pwrite"}[export] if call == "write" else call
    with meanwhile(os, name, fail, at=at), pytest.raises(kind) as refusal:
        export(store, URI, None, target, replacing=replacing)
    assert there == [has_its_name]
    if failure == errno.ENOSPC:
        assert refusal.value.message.startswith(f"No room for {target}")
        assert "Free some space there" in refusal.value.message, "and not in the store"
    if has_its_name and replacing:
        assert os.listdir(target.parent) == [target.name]
    else:
        assert left(target) == ({target.name: "mine"} if replacing else {})
    assert call != "fsync" or ("removed" in refusal.value.message) != replacing
    assert store._core.writable
    sleep(store, 700)
