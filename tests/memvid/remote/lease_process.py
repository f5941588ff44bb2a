"""A process that holds a session in a shared folder whenever it can, and says when it might have answered.

    python -m torpor.tests.memvid.remote.lease_process SHARED STORE NAME LOG

LOG gets a line for each moment at which the lease counted: the clock before and after it was asked, the epoch, the
name, and the version that was told by then, or `-`. It is killed from outside.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path
from typing import Final

from torpor.memvid.disk.clock import running_s
from torpor.memvid.errors import LeaseLost, RemoteError
from torpor.memvid.folder.folder import StoreFolder
from torpor.memvid.folder.seen_heads import SeenHeads
from torpor.memvid.folder.store_file import load_store_uuid, open_existing_root
from torpor.memvid.remote.folder_objects import FolderObjects
from torpor.memvid.remote.heads import Heads, Party
from torpor.memvid.remote.leases import Lease, Watch, take
from torpor.memvid.uri import SessionUri

URI: Final = SessionUri("work", "notes")
LEASE_S: Final = 1
_POLL_S: Final = 0.01


def main(shared: str, store: str, name: str, log: str) -> None:
    root_fd = open_existing_root(store)
    folder = StoreFolder(store, root_fd, load_store_uuid(root_fd, store))
    heads = Heads(FolderObjects(shared, Path(shared).as_uri()), SeenHeads(folder))
    watch = Watch(Party.of(folder, name), running_s)
    log_fd = os.open(log, os.O_WRONLY | os.O_APPEND)
    while True:
        with contextlib.suppress(RemoteError):
            _answer(take(heads, URI, watch, lease_s=LEASE_S), name, log_fd)
        time.sleep(_POLL_S)


def _answer(lease: Lease, name: str, log_fd: int) -> None:
    """Raises LeaseLost."""
    told = "-"
    while True:
        before_s = running_s()
        with contextlib.suppress(LeaseLost):  # it may count again
            lease.require()
            line = f"{before_s!r} {running_s()!r} {lease.epoch} {name} {told}\n"
            os.write(log_fd, line.encode())
            told = "-"
        if lease.due_s == 0:
            bundle_id = os.urandom(32).hex()
            lease.change(lambda head, bundle_id=bundle_id: head.with_version(bundle_id))  # type: ignore[misc]
            told = bundle_id
        time.sleep(_POLL_S)


if __name__ == "__main__":
    main(*sys.argv[1:])
