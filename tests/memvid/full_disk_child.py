"""A store on a file system with so many bytes free, for `test_full_disk.py`: run by root of a mount namespace.

    python tests/memvid/full_disk_child.py FOLDER KIB...

For each number of KiB a new file system is mounted over FOLDER, and its index is lost. A JSON line says of each
operation `ok`, or what it raised.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torpor.memvid import StoreError
from torpor.memvid.store import Store
from torpor.tests.memvid.store_making import OTHER_URI, URI, contents, remove_index, sleep

MOUNT_KIB = 1024
CHUNK = 4096


def main(folder: Path, free_kib: int) -> dict[str, str]:
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
        print(json.dumps(main(Path(sys.argv[1]), int(argument))), flush=True)
