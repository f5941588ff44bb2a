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


@pytest.mark.one_in(1)
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


TOLD_BY: dict[str, Callable[[Store], object]] = {
    "a tag": lambda store: store.tag(URI, 1, "good"),
    "a pin": lambda store: store.pin(URI, 1),
    "turns": lambda store: store.acknowledge([making.turn(store, 5)]),
}
ADVICE = {"a tag": f"torpor untag {URI} good", "a pin": f"torpor unpin {URI}@{{}}", "turns": ""}
WAYS_BACK: dict[str, Callable[[Store, Path], object]] = {
    "put back": lambda store, aside: shutil.copy(*aside.glob("versions/*"), Path(store.path, "versions")),
    "import": lambda store, aside: store.import_file(aside / "exported"),
    "repair": lambda store, aside: store.repair(sources=[aside]),
}


@pytest.mark.parametrize("way", WAYS_BACK)
@pytest.mark.parametrize("told_by", TOLD_BY)
def test_a_version_of_which_no_index_tells_is_missing_keeps_its_packs_and_comes_back(
    store: Store, tmp_path: Path, told_by: str, way: str
) -> None:
    """A tag, a pin or turns behind it are all that is left of it. Where no turns are the session has gone on."""
    first = sleep(store, 300)
    shutil.copytree(store.path, tmp_path / "aside")
    store.export_session(URI, 1, tmp_path / "aside" / "exported")
    has_turns = told_by == "turns"
    if not has_turns:
        sleep(store, 900, before=sleep(store, 600, before=first))
    TOLD_BY[told_by](store)
    file = manifest_path(store, first.bundle_id)
    file.unlink()
    packs = {name for name in names(store.path) if name.startswith("packs")}
    with reopened(store, anew=True) as store:
        (told,) = store.repair().problems
        assert str(file) in told.message
        assert ADVICE[told_by].format(first.bundle_id[:12]) in told.message
        assert told in (store.opening.journal if has_turns else store.opening.unreadable)
        assert told in store.verify(deep=False).findings
        assert str(file) in {problem.path for problem in store.repack(policy=CLEARING).problems}
        if not has_turns:
            assert told in store.verify(URI, deep=False).findings
            assert str(file) in {problem.path for problem in store.prune(Retention(keep_last=1)).problems}
        assert packs <= names(store.path)
        WAYS_BACK[way](store, tmp_path / "aside")
        making.require_awake(store, 300, version=1)
    with reopened(store) as store:
        assert store.opening.unreadable == ()
        assert making.ledger(store) == making.token_ids(0, 305 if has_turns else 900)
        assert store.verify(deep=True).findings == ()
