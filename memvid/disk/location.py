"""Where the store is when no setting says: one answer for the daemon and for every tool that inspects."""

from __future__ import annotations

import os
from pathlib import Path

from ...places import expanded, user_folder

STORE_VARIABLE = "TORPOR_STORE"


def default_store_path() -> Path:
    """$TORPOR_STORE if it is set, else the user's data folder of this platform. Creates nothing."""
    return named_store_path() or user_folder("data") / "store"


def named_store_path() -> Path | None:
    """$TORPOR_STORE; None if it is not set."""
    chosen = os.environ.get(STORE_VARIABLE)
    return expanded(chosen) if chosen else None
