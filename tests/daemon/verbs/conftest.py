"""Conversations whose replies a test says beforehand, and which end where the model ends them."""

from __future__ import annotations

from typing import Any

import pytest
from torpor.tests.daemon.conversing_rig import script  # noqa: F401 - a fixture of every test here


@pytest.fixture
def rig(open_rig: Any) -> Any:
    return open_rig(endless=False)
