"""On a full disk what is there can be read and deleted: the index goes on in memory, and gets a file once there is room
for all that it takes."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torpor.memvid import Store
from torpor.memvid.errors import StoreIoError
from torpor.memvid.index import index
from torpor.tests.memvid import full_disk_child
from torpor.tests.memvid.faults import vfs
from torpor.tests.memvid.store_making import OTHER_URI, URI, require_awake, sleep

FREE_KIB = (0, 48, 56, 64, 72, 80, 96)
OPERATIONS = ("list", "wake", "gc", "delete", "wake again", "close")


def namespace() -> list[str]:
    """How to run a program that may mount; empty where this user or system does not allow it."""
    command = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"])]
    tried = [*command, "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    if shutil.which("unshare") is None or subprocess.run(tried, capture_output=True, check=False).returncode:
        return []
    return command


def test_reading_and_deleting_work_however_little_a_disk_has_free(tmp_path: Path) -> None:
    """With 56 to 80 KiB a new index fitted, and SQLite's -shm file beside it did not: nothing worked any more."""
    command = namespace()
    if not command:
        pytest.skip("no file system can be mounted here; what SQLite would say on one is simulated below")
    sizes = [str(size) for size in FREE_KIB]
    done = subprocess.run(
        [*command, sys.executable, full_disk_child.__file__, str(tmp_path), *sizes], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    for size, line in zip(sizes, done.stdout.splitlines(), strict=True):
        assert json.loads(line) == {**dict.fromkeys(OPERATIONS, "ok"), "left": OTHER_URI.name}, f"{size} KiB"


class FullFile(sqlite3.Connection):
    """A connection to a file that is asked something for the first time when the disk is full."""

    def execute(self, sql: str, *args: Any) -> sqlite3.Cursor:
        if sql.startswith("SELECT"):
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorcode = sqlite3.SQLITE_IOERR  # type: ignore[misc]
            raise error
        return super().execute(sql, *args)


def test_an_index_stays_in_memory_until_its_file_answers(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    first = sleep(store, 300)
    sleep(store, 300, uri=OTHER_URI, seed=1)
    store.index.go_on_in_memory()
    connect = sqlite3.connect
    with monkeypatch.context() as patch:
        patch.setattr(sqlite3, "connect", lambda path, **options: connect(path, factory=FullFile, **options))
        for attempt in (store.gc, lambda: require_awake(store, 300), lambda: store.delete_session(OTHER_URI)):
            store._core._next_mending = 0.0
            attempt()
            assert not store.index.has_file
        with pytest.raises(StoreIoError, match="disk I/O error"):
            store.index.return_to_file()
    store.index.return_to_file()
    assert store.index.has_file
    assert [row.bundle_id for row in store.versions(URI)] == [first.bundle_id]


def test_the_index_has_no_file_that_is_mapped_into_memory(store: Store, store_path: Path) -> None:
    """A page of it for which a full disk has no block would end the process."""
    sleep(store, 300)
    store.index.go_on_in_memory()
    store.index.return_to_file()
    sleep(store, 300, uri=OTHER_URI)
    assert {path.name for path in store_path.glob("index.sqlite-*")} == {"index.sqlite-wal", "index.sqlite-sums"}


@pytest.mark.skipif(bool(vfs.unavailable()), reason=vfs.unavailable())
def test_an_index_takes_its_place_without_another_write(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite would write that it has a log, and a journal of that first: a full disk has no room for one."""
    sleep(store, 300)
    store.index.go_on_in_memory()
    put_in_place, in_place = index.put_in_place, list[bool]()

    def put(*args: Any) -> None:
        put_in_place(*args)
        in_place.append(True)

    def full(name: str, _args: tuple[Any, ...], run: Callable[[], Any]) -> Any:
        if in_place and name == "write":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return run()

    monkeypatch.setattr(index, "put_in_place", put)
    with vfs.asking(full):
        store.index.return_to_file()
    assert in_place == [store.index.has_file]
