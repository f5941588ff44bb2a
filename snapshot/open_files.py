"""Keeps the limit of open files as the process has it."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def limit_kept() -> Iterator[None]:
    """Meanwhile nothing changes the limit of open files.

    As `mlx_lm` is imported, it sets that to 2,048 of 4,096: where fewer are allowed the import fails, and where more
    are, they are gone for good. The daemon sees to that limit itself.
    """
    set_limit = resource.setrlimit

    def set_others(which: int, limits: tuple[int, int], /) -> None:
        if which != resource.RLIMIT_NOFILE:
            set_limit(which, limits)

    resource.setrlimit = set_others
    try:
        yield
    finally:
        resource.setrlimit = set_limit
