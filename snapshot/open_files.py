"""Keeps the process's limit of open files."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def limit_kept() -> Iterator[None]:
    """During the block nothing changes the limit of open files.

    The import of `mlx_lm` sets it to 2,048 of 4,096: if fewer are allowed the import fails, and if more are, they are
    lost for good. The daemon sets that limit itself.
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
