"""A store in a folder of its own for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from torpor.memvid.folder.folder import StoreFolder
from torpor.memvid.store import Store
from torpor.tests.memvid.store_making import new_folder


@pytest.fixture
def store_path(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(store_path: Path) -> Iterator[Store]:
    with Store.open(store_path, writable=True) as opened:
        yield opened


@pytest.fixture
def folder(store_path: Path) -> Iterator[StoreFolder]:
    """A store's folder, without a store that is open in it."""
    opened = new_folder(store_path)
    yield opened
    opened.close()
