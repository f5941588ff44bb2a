"""What computed a snapshot is kept with it."""

from __future__ import annotations

import importlib.metadata
from typing import Any

from session_rig import tokens_of
from torpor.daemon.backend import describe
from torpor.memvid.uri import SessionUri


def test_the_facts_name_versions_device_and_blas() -> None:
    facts = describe()
    assert facts["mlx"] == importlib.metadata.version("mlx")
    assert set(facts) == {"mlx", "mlx_lm", "device", "blas"}
    assert all(facts.values())


async def test_every_snapshot_says_what_computed_it(open_rig: Any) -> None:
    async with open_rig() as rig:
        await rig.read("a", tokens_of(1, 10))
        await rig.sleep("a")
        with rig.service._store.open_session(SessionUri.parse("torpor://default/a")) as reader:
            assert reader.manifest.session["backend"] == describe()
