"""T16: what any supported release of mlx-lm held when it was slept wakes in this one, bit for bit."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torpor.memvid.store import Store
from torpor.tests.snapshot.growers import GROWERS, Run
from torpor.tests.snapshot.release_fixtures import FOLDER, IDENTITY, READ, URI, digest_of, file_of
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
    assert set(json.loads((folder / "held.json").read_text())) == set(GROWERS)


@pytest.mark.parametrize("kind", GROWERS)
@pytest.mark.parametrize("release", RELEASES, ids=lambda folder: folder.name)
def test_a_fixture_wakes_with_all_that_it_held_and_goes_on_t16(
    tmp_path: Path, pool: ThreadPoolExecutor, release: Path, kind: str
) -> None:
    with Store.open(tmp_path / "store", writable=True) as store:
        store.import_file(release / file_of(kind))
        run = Run(GROWERS[kind], mx.float32)
        run.state = Shelf(store, URI, IDENTITY, pool).take(run.layout(), run.fresh())
    assert digest_of(run) == json.loads((release / "held.json").read_text())[kind]
    control = Run(GROWERS[kind], mx.float32)
    for count in (*READ, 1, 5):
        control.read(count)
    for count in (1, 5):
        run.read(count)
    assert digest_of(run) == digest_of(control)
