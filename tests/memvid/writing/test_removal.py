"""What nothing needs goes, and while it is not known what a version needs, nothing does, whoever asks."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torpor.memvid import errors
from torpor.memvid.folder.retention import Retention
from torpor.memvid.maintenance.repack_plan import CLEARING
from torpor.memvid.store import Store
from torpor.tests.memvid import store_making as making
from torpor.tests.memvid.store_making import FORK_URI, OTHER_URI, URI, manifest_path, names, reopened, sleep

REMOVALS: dict[str, Callable[[Store], Any]] = {
    "delete": lambda store: store.delete_session(URI),
    "delete a version": lambda store: store.delete_version(URI, 1),
    "prune": lambda store: store.prune(Retention(keep_last=1)),
    "forget": lambda store: store.forget(URI),
    "strip": lambda store: store.strip(URI),
    "repack": lambda store: store.repack(policy=CLEARING),
}
DAMAGES = ("missing", "missing now", "flipped")
MORE_DAMAGES = ("cut", "link", "fifo", "folder", "another")


@pytest.mark.parametrize(
    ("removal", "damage"),
    [*itertools.product(REMOVALS, DAMAGES), *(("delete", damage) for damage in MORE_DAMAGES)],
)
def test_while_a_manifest_cannot_be_read_no_pack_goes_and_that_is_told(
    store: Store, tmp_path: Path, removal: str, damage: str
) -> None:
    """It is a fork's, which needs blocks of the session that goes. Once it is back all is whole, and all that was kept
    goes.
    now: while the store is open."""
    first = sleep(store, 600)
    fork = sleep(store, 900, uri=OTHER_URI, before=first)
    sleep(store, 700, seed=4)
    spare = making.pack_of(store, sleep(store, uri=FORK_URI, seed=9))
    unneeded = spare.read_bytes()
    store.delete_session(FORK_URI)
    file = manifest_path(store, fork.bundle_id)
    away = Path(shutil.copy2(file, tmp_path / "away"))
    if damage.startswith("missing"):
        file.unlink()
    elif damage == "another":
        shutil.copy2(manifest_path(store, first.bundle_id), file)
    else:
        making.HARMS[damage](file, tmp_path / "aside")
    making.put(spare, unneeded)
    if damage == "missing now":
        store._core.look_again()
    else:
        store = reopened(store, anew=damage != "missing")
        assert [finding.path for finding in store.opening.unreadable] == [str(file)]
    with store:
        packs = {name for name in names(store.path) if name.startswith("packs")}
        told = REMOVALS[removal](store).problems
        assert {problem.path for problem in told} == {str(file)}
        assert packs <= names(store.path)
        if damage.startswith("missing"):
            with pytest.raises(errors.BundleMissing, match="is missing"):
                store.open_session(OTHER_URI)
    shutil.rmtree(file) if damage == "folder" else file.unlink(missing_ok=True)
    away.rename(file)
    with reopened(store) as store:
        making.require_awake(store, 900, uri=OTHER_URI)
        for uri in {row.uri for row in store.iter_sessions()}:
            assert store.delete_session(uri).problems == ()
        assert store.repack().problems == ()
        assert names(store.path) == set()
