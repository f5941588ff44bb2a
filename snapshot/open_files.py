"""Keeps the limit of open files as the process has it.

As `mlx_lm` is imported, it sets that to 2,048 of 4,096: where fewer are allowed the import fails, and where more are,
they are gone for good. The daemon sees to that limit itself.
"""

from __future__ import annotations

import importlib
import resource


def import_mlx_lm() -> None:
    """Import `mlx_lm`, with nothing done to the limit of open files."""
    set_limit = resource.setrlimit

    def set_others(which: int, limits: tuple[int, int], /) -> None:
        if which != resource.RLIMIT_NOFILE:
            set_limit(which, limits)

    resource.setrlimit = set_others
    try:
        importlib.import_module("mlx_lm")
    finally:
        resource.setrlimit = set_limit
