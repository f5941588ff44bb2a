"""An index and files of different moments (a backup put back, a copy of a store in use): no removal loses anything."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from torpor.memvid.folder.retention import Retention
from torpor.memvid.index.index import INDEX_FILE
from torpor.memvid.maintenance.repack_plan import RepackPolicy
from torpor.memvid.store import Store
from torpor.tests.memvid.store_making import FORK_URI, URI, put, remove_index, require_awake, sleep, sleep_each

NEWEST = Retention(keep_last=1)
FEW_PACKS = RepackPolicy(max_packs=1)
SMALL = {"layers": 1, "heads": 1, "dim": 1}


def tokens_of(version: int) -> int:
    return 256 * version + 40


@pytest.fixture
def moments(tmp_path: Path) -> tuple[Path, list[Path]]:
    """A store of five versions, the third tagged, and its copies: before and after a repack."""
    path = tmp_path / "store"
    with Store.open(path, writable=True) as store:
        sleep_each(store, *map(tokens_of, range(1, 6)), **SMALL)
        store.tag(URI, 3, "kept")
    shutil.copytree(path, tmp_path / "before")
    with Store.open(path, writable=True) as store:
        assert store.repack(policy=FEW_PACKS).actions
    shutil.copytree(path, tmp_path / "after")
    return path, [tmp_path / "before", tmp_path / "after"]


REMOVALS: dict[str, tuple[Callable[[Store], object], list[int]]] = {
    "prune": (lambda store: store.prune(NEWEST), [3, 5]),
    "forget": (lambda store: store.forget(URI), []),
    "delete": (lambda store: store.delete_session(URI), []),
    "delete a version": (lambda store: store.delete_version(URI, 4), [1, 2, 3, 5]),
    "repack": (lambda store: store.repack(policy=FEW_PACKS), [1, 2, 3, 4, 5]),
}


@pytest.mark.one_in(1)
@pytest.mark.parametrize(("removal", "kept"), REMOVALS.values(), ids=REMOVALS)
@pytest.mark.parametrize(("packs", "index"), [*itertools.product((0, 1, 2), (0, 1, None))])
def test_no_removal_takes_what_a_version_needs_whatever_the_index_and_the_packs_are_of(
    moments: tuple[Path, list[Path]],
    packs: int,
    index: int | None,
    removal: Callable[[Store], object],
    kept: list[int],
) -> None:
    """packs: those of before the repack, of after it, or both. index: of before, of after, or none."""
    path, copies = moments
    shutil.rmtree(path / "packs")
    (path / "packs").mkdir(mode=0o700)
    for copy in copies if packs == 2 else [copies[packs]]:
        for pack in (copy / "packs").iterdir():
            shutil.copy2(pack, path / "packs")
    if index is None:
        remove_index(path)
    else:
        put(path / INDEX_FILE, (copies[index] / INDEX_FILE).read_bytes())
    with Store.open(path, writable=True) as store:
        assert store.opening.unreadable == ()
        with store.open_session(URI, 3) as third:
            sleep(store, tokens_of(3), uri=FORK_URI, before=third, **SMALL)  # type: ignore[arg-type]
        removal(store)
        for version in kept:
            require_awake(store, tokens_of(version), version=version, **SMALL)
        require_awake(store, tokens_of(3), uri=FORK_URI, **SMALL)
        assert [row.version for row in store.versions(URI)] == kept
    with Store.open(path, writable=True) as again:
        assert again.opening.unreadable == ()
        for version in kept:
            require_awake(again, tokens_of(version), version=version, **SMALL)
        require_awake(again, tokens_of(3), uri=FORK_URI, **SMALL)


def test_packs_put_back_under_a_running_daemon_change_nothing(moments: tuple[Path, list[Path]]) -> None:
    path, copies = moments
    with Store.open(path, writable=True) as store:
        for pack in (copies[0] / "packs").iterdir():
            shutil.copy2(pack, path / "packs")
        store._core.look_again()
        for version in range(1, 6):
            require_awake(store, tokens_of(version), version=version, **SMALL)
        store.delete_session(URI)
        left = [*(path / "packs").iterdir()]
        store.repack(policy=FEW_PACKS)
        assert [*(path / "packs").iterdir()] == [], left
