"""What becomes of a request that was carried out, and is cancelled while its answer is made ready."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from torpor.daemon.api.branching import BranchesRequest, BranchesResult, BranchInfo
from torpor.daemon.api.sampling import Sampling
from torpor.daemon.api.verbs import VERBS
from torpor.socket_api.server.dispatch import call

ROOT = BranchInfo(1, None, (), 3, 3, 0, Sampling(), 0, False, 0, None, 64)


def test_what_was_done_is_answered_as_done_gm7() -> None:
    done = asyncio.Event()

    class Backend:
        async def ask(self, *_: Any) -> BranchesResult:
            done.set()
            return BranchesResult(tuple(replace(ROOT, branch=number) for number in range(1, 1025)))

    async def cancelled() -> dict[str, Any]:
        unused: Any = None
        backend: Any = Backend()
        work = asyncio.ensure_future(call(backend, unused, VERBS["branches"], BranchesRequest(), unused, unused))
        await done.wait()
        await asyncio.sleep(0)
        assert not work.done(), "a long answer is made ready in pieces"
        work.cancel()
        return await work

    assert len(asyncio.run(cancelled())["branches"]) == 1024
