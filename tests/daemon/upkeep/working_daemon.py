"""A daemon on the demo model whose agent works without a pause, for somebody to kill.

`working_daemon.py DIGESTS STORE`: behind each long turn short ones follow at once until less than two blocks of what
was acknowledged are in no version. So that comes while the agent works, or never. Then a line tells the tokens that are
acknowledged and those that stand in blocks, and the next turn begins. The last turn takes long.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import torpor
from torpor.daemon.upkeep import loop
from torpor.memvid.format.blocks import BLOCK_TOKENS
from torpor.tests.daemon.session_rig import MODEL, open_rigged, tokens_of

DEMO = Path(torpor.__file__).parent / "daemon" / "demo_model"
LONG_TURNS = (560, 300)
SHORT_TURN = 20
MOST_SHORT_TURNS = 40


async def _work(digests: Path, store: Path) -> None:
    loop.REST = 0  # type: ignore[misc]  # it is of the time that a write took, and a test is of none
    async with open_rigged(store, {MODEL: str(DEMO)}, digests, close=False) as rig:
        await rig.service.create("agent")
        live = rig.live("agent")

        def left() -> int:
            return len(live.state.tokens) - (live.durable.block_tokens if live.durable else 0)

        for turn, count in enumerate(LONG_TURNS):
            await rig.service.append("agent", tokens=tokens_of(turn, count))
            for more in range(MOST_SHORT_TURNS):
                if left() < 2 * BLOCK_TOKENS:
                    break
                await rig.service.append("agent", tokens=tokens_of(100 + more, SHORT_TURN))
            print(len(live.state.tokens), len(live.state.tokens) - left(), flush=True)
        await rig.service.generate("agent", max_tokens=4000)


if __name__ == "__main__":
    asyncio.run(_work(Path(sys.argv[1]), Path(sys.argv[2])))
