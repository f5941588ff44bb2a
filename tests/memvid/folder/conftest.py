"""A store's folder, without a store that is open in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from torpor.memvid.folder.folder import StoreFolder
from torpor.memvid.folder.store_file import open_or_make_root
from torpor.memvid.recovery.opening import create_store


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[StoreFolder]:
    path = str(tmp_path / "store")
    root_fd = open_or_make_root(path)
    opened = StoreFolder(path, root_fd, create_store(root_fd, path))
    yield opened
    opened.close()
