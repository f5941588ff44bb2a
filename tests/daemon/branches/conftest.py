"""What tests of branches share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
from torpor.daemon.models import sharing
from torpor.daemon.models.sharing import Sharing

from mlx.utils import tree_flatten  # isort: skip  # after torpor, which chooses the BLAS

_FOUND: dict[tuple[tuple[int, ...], ...], Sharing] = {}


@pytest.fixture(autouse=True)
def _tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """How the branches of a model share memory and calls is tried once for all tests. That it is found right is the
    matter of tests/daemon/models/test_sharing.py."""
    settle = Sharing.settle

    def settle_once(self: Sharing, network: Any, new_caches: Callable[[], list[Any]], *about: Any) -> None:
        shapes = tuple(value.shape for _, value in tree_flatten(network.parameters()))
        if shapes not in _FOUND:
            settle(self, network, new_caches, *about)
            if self.in_rounds:
                _FOUND[shapes] = self
            return
        sharing.install(network)
        for each in fields(Sharing):
            setattr(self, each.name, getattr(_FOUND[shapes], each.name))

    monkeypatch.setattr(Sharing, "settle", settle_once)
