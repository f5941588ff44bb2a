"""On a full disk what is there can be read and deleted: the index lives in memory, and a delete writes nothing.

A program of root in a mount namespace tries it: this file, as `test_full_disk.py FOLDER KIB...`. For each number of KiB
it mounts a new file system over FOLDER, with a store that has lost its index and so much room. A JSON line says of each
operation `ok`, or what it raised.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torpor.memvid.errors import StoreError
from torpor.memvid.store import Store
from torpor.tests.memvid.store_making import OTHER_URI, URI, contents, remove_index, sleep

FREE_KIB = (0, 4, 8, 16, 64)
MOUNT_KIB = 1024
CHUNK = 4096
OPERATIONS = ("list", "wake", "delete", "wake again", "close")


def namespace() -> list[str]:
    """How to run a program that may mount; empty where this user or system does not allow it."""
    command = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"])]
    tried = [*command, "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    if shutil.which("unshare") is None or subprocess.run(tried, capture_output=True, check=False).returncode:
        return []
    return command


def test_reading_and_deleting_work_however_little_a_disk_has_free(tmp_path: Path) -> None:
    command = namespace()
    if not command:
        pytest.skip("no file system can be mounted here")
    sizes = [str(size) for size in FREE_KIB]
    done = subprocess.run([*command, sys.executable, __file__, str(tmp_path), *sizes], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for size, line in zip(sizes, done.stdout.splitlines(), strict=True):
        assert json.loads(line) == {**dict.fromkeys(OPERATIONS, "ok"), "left": OTHER_URI.name}, f"{size} KiB"


def tried(folder: Path, free_kib: int) -> dict[str, str]:
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={MOUNT_KIB}k", "tmpfs", str(folder)], check=True)
    path = folder / "store"
    with Store.open(path, writable=True) as store:
        sleep(store, 600)
        sleep(store, 600, uri=OTHER_URI, seed=1)
    remove_index(path)
    with open(folder / "filling", "wb", buffering=0) as filling:
        while free_bytes(folder) > free_kib * 1024:
            filling.write(bytes(CHUNK))
    found: dict[str, str] = {}

    def attempt(name: str, work: Callable[[], Any]) -> None:
        try:
            work()
            found[name] = "ok"
        except StoreError as error:
            found[name] = error.code

    store = Store.open(path, writable=True)
    attempt("list", lambda: list(store.iter_sessions()))
    attempt("wake", lambda: read(store))
    attempt("delete", lambda: store.delete_session(URI))
    attempt("wake again", lambda: read(store))
    attempt("close", store.close)
    with Store.open(path, writable=True) as again:
        found["left"] = " ".join(row.uri.name for row in again.iter_sessions())
    return found


def read(store: Store) -> None:
    with store.open_session(OTHER_URI) as reader:
        contents(reader)


def free_bytes(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


if __name__ == "__main__":
    for argument in sys.argv[2:]:
        print(json.dumps(tried(Path(sys.argv[1]), int(argument))), flush=True)
