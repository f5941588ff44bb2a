"""T16: what any supported release of mlx-lm held when it was slept wakes in this one, bit for bit."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torpor.memvid.store import Store
from torpor.tests.snapshot.growers import GROWERS, Run
from torpor.tests.snapshot.release_fixtures import (
    FOLDER,
    IDENTITY,
    READ,
    URI,
    digest_of,
    file_of,
    held_of,
    write_missing,
)
from torpor.tests.snapshot.stored_rig import Shelf

import mlx.core as mx  # isort: skip  # after torpor, which chooses the BLAS

RELEASES = sorted(FOLDER.iterdir())


@pytest.fixture(autouse=True)
def on_a_cpu() -> Iterator[None]:
    """As the fixtures were: a GPU quantizes to other last bits."""
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    yield
    mx.set_default_device(before)


def test_there_are_fixtures_of_the_installed_release_for_every_kind() -> None:
    folder = FOLDER / f"mlx-lm-{importlib.metadata.version('mlx-lm')}"
    if folder not in RELEASES:
        pytest.skip("another release of mlx-lm is installed than those that fixtures were written with")
    missing = GROWERS.keys() - held_of(folder).keys()
    assert not missing, f"run tests/snapshot/release_fixtures.py, which writes the bundle of {', '.join(missing)}"


def test_a_bundle_of_a_new_kind_is_written_beside_those_that_stay(tmp_path: Path) -> None:
    folder = tmp_path / "release"
    shutil.copytree(RELEASES[-1], folder)
    held, before = held_of(folder), {each.name: each.stat().st_mtime_ns for each in folder.iterdir()}
    new = file_of("plain")
    (folder / new).unlink()
    (folder / "held.json").write_text(json.dumps({kind: each for kind, each in held.items() if kind != "plain"}))
    write_missing(folder)
    assert held_of(folder) == held
    after = {each.name: each.stat().st_mtime_ns for each in folder.iterdir()}
    assert after.keys() == before.keys()
    assert {name for name in after if after[name] != before[name]} == {new, "held.json"}


@pytest.mark.parametrize("kind", GROWERS)
@pytest.mark.parametrize("release", RELEASES, ids=lambda folder: folder.name)
def test_a_fixture_wakes_with_all_that_it_held_and_goes_on_t16(
    tmp_path: Path, pool: ThreadPoolExecutor, release: Path, kind: str
) -> None:
    with Store.open(tmp_path / "store", writable=True) as store:
        store.import_file(release / file_of(kind))
        run = Run(GROWERS[kind], mx.float32)
        run.state = Shelf(store, URI, IDENTITY, pool).take(run.layout(), run.fresh())
    assert digest_of(run) == held_of(release)[kind]
    control = Run(GROWERS[kind], mx.float32)
    for count in (*READ, 1, 5):
        control.read(count)
    for count in (1, 5):
        run.read(count)
    assert digest_of(run) == digest_of(control)
