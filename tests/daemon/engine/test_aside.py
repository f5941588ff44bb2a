"""Threads that compute beside the engine end with who has them."""

from __future__ import annotations

import asyncio
import threading

from torpor.daemon.engine.aside import Aside

import mlx.core as mx  # isort: skip  # after torpor, which chooses the BLAS


async def test_threads_that_wait_are_gone_once_they_are_closed() -> None:
    """A process that ends as soon as its service is closed would abort while one of them lets go of its stream."""
    aside, both = Aside("torpor-aside"), threading.Barrier(2, timeout=30)

    def work() -> float:
        both.wait()
        return float(mx.ones(3).sum())

    assert await asyncio.gather(aside.run(work, RuntimeError), aside.run(work, RuntimeError)) == [3.0, 3.0]
    aside.close()
    assert [each for each in threading.enumerate() if each.name == "torpor-aside"] == []
