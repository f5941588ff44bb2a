"""Torpor inside a program: no daemon, no socket. Which of three lines does the model go on from the most surely?

    python examples/embedded.py

Each line is read by a branch of its own, on the memory of what all have read. A function ranks them by their logits,
which it reads where they lie. The best branch is kept as a session, and a second opening of the store wakes it.
"""

from __future__ import annotations

import asyncio
import heapq
import tempfile
from pathlib import Path

from torpor.daemon.api.branching import BranchReading
from torpor.daemon.branches.views import LogitsView
from torpor.daemon.options.serve_options import ServeOptions
from torpor.daemon.service import Service

READ = 'def add(left, right):\n    """Add two numbers."""\n    return left + right\n\n\ndef double(value):\n'
LINES = ("    return value *", "    value = value", "    if")


def lead(logits: LogitsView) -> float:
    """How far the likeliest token is before the next one. A view that is used after this returns raises."""
    first, second = heapq.nlargest(2, logits)
    return first - second


async def keep_surest(store: Path) -> str:
    """Let each line be read, and keep the surest as the session `surest`. Gives that line."""
    service = await Service.open(ServeOptions(store=store))
    try:
        await service.append("read", text=READ, create=True)
        root = (await service.tree("read")).branch
        branches = [each.branch for each in (await service.branch(root, count=len(LINES))).branches]
        await service.prefill([BranchReading(each, text=line) for each, line in zip(branches, LINES, strict=True)])
        leads = [await service.with_logits(each, lead) for each in branches]
        best = max(range(len(LINES)), key=lambda at: leads[at])
        await service.keep(branches[best], "surest")
        return LINES[best]
    finally:
        await service.close()  # every session sleeps, and all branches end


async def go_on(store: Path) -> str:
    """What the kept session writes, in another process perhaps."""
    service = await Service.open(ServeOptions(store=store))
    try:
        return (await service.generate("surest", max_tokens=8)).text
    finally:
        await service.close()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        print("surest: ", asyncio.run(keep_surest(store)).strip())
        print("goes on:", repr(asyncio.run(go_on(store))))


if __name__ == "__main__":
    main()
