"""What a session says of where it comes from is what was written, or nothing that anybody believes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torpor.cli.reach.files import Files
from torpor.daemon.api.session import Origin, Provenance, Recomputed
from torpor.daemon.views.stored import map_of_provenance, provenance_in
from torpor.memvid.store import Receipt, Store
from torpor.tests.memvid.store_making import URI, flip, manifest_path, pack_of, sleep

AGAIN = Recomputed(3, 512, 88, True)
ORIGIN = Origin("torpor://default/a", 3, "ab" * 32, 1500)


@pytest.mark.parametrize(
    "provenance",
    [
        Provenance(),
        Provenance(recomputed=AGAIN),
        Provenance(recomputed=replace(AGAIN, damaged=False)),
        Provenance(forked_from=ORIGIN),
        Provenance(folded_from=ORIGIN, recomputed=AGAIN, elsewhere_tokens=7),
    ],
)
def test_it_is_kept_as_it_is(provenance: Provenance) -> None:
    assert provenance_in(map_of_provenance(provenance)) == replace(provenance, slept_by={})


def test_the_entries_are_those_that_were_kept_when_each_was_alone() -> None:
    told = map_of_provenance(Provenance(forked_from=ORIGIN, recomputed=AGAIN, elsewhere_tokens=7))
    again = {"version": 3, "start": 512, "tokens": 88, "same_logits": True}
    origin = {"session": "torpor://default/a", "version": 3, "bundle_id": "ab" * 32, "tokens": 1500}
    assert told == {"elsewhere": 7, "forked_from": origin, "recomputed": again}


def test_the_first_part_that_was_computed_again_is_the_one_to_tell_of() -> None:
    later = replace(AGAIN, version=9)
    assert Provenance().computed_again(None).recomputed is None
    assert Provenance().computed_again(AGAIN).computed_again(later).recomputed == AGAIN


def test_before_its_first_token_a_session_has_its_origin_alone() -> None:
    woken = Provenance(ORIGIN, None, AGAIN, 7, {"device": "cpu"})
    assert woken.begun_anew() == Provenance(ORIGIN)


@pytest.mark.parametrize(
    "change",
    [
        {"version": 0},
        {"version": True},
        {"start": -1},
        {"tokens": 0},
        {"tokens": 2**40},
        {"same_logits": 1},
        {"start": "512"},
        {"damaged": 0},
        {"more": 1},
    ],
)
def test_what_nobody_wrote_is_refused(change: dict[str, Any]) -> None:
    kept = map_of_provenance(Provenance(recomputed=AGAIN))
    with pytest.raises(ValueError, match="recomputed"):
        provenance_in({"recomputed": {**kept["recomputed"], **change}})


@pytest.mark.parametrize("stored", [[], "x", {"version": 1}])
@pytest.mark.parametrize("key", ["recomputed", "forked_from", "folded_from"])
def test_other_shapes_are_refused(key: str, stored: object) -> None:
    with pytest.raises(ValueError, match=r"recomputed|origin"):
        provenance_in({key: stored})


# --- what is damaged


@pytest.mark.parametrize(
    ("damage", "codes", "tells"),
    [
        (lambda path, receipt: None, [], True),
        (lambda path, receipt: flip(manifest_path(path, receipt.bundle_id), 100), ["bundle_mismatch"], False),
        (lambda path, receipt: manifest_path(path, receipt.bundle_id).unlink(), ["bundle_missing"], False),
        (lambda path, receipt: pack_of(path, receipt).unlink(), ["block_missing"], True),
    ],
    ids=["sound", "manifest", "no manifest", "no pack"],
)
def test_of_a_damaged_version_all_is_told_that_is_known(
    tmp_path: Path, damage: Callable[[Store, Receipt], None], codes: list[str], tells: bool
) -> None:
    with Store.open(tmp_path / "store", writable=True) as store:
        receipt = sleep(store, 300)
        damage(store, receipt)
        told = Files(store).show(str(URI))
    assert (told.info.token_count, told.info.version, len(told.versions)) == (300, 1, 1)
    assert (told.damaged, [each.code for each in told.problems]) == (bool(codes), codes)
    assert bool(told.identity) == tells
    assert bool(told.layers) == (not codes)
