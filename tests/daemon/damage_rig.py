"""Damaging the files of sessions that sleep, and what is told of them: shared by the tests of what mends them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from torpor.memvid.store import Store
from torpor.memvid.uri import SessionUri
from torpor.tests.daemon.session_rig import flip, tokens_of, until

TEXT = tokens_of(1, 1300)


def damage(
    store: Path,
    name: str,
    *,
    span: int = -1,
    kind: str = "span",
    head: bool = False,
    padding: bool = False,
    version: int | None = None,
) -> None:
    """Flip a bit in a block of a session's newest version, or of that one: in its bytes, in the tokens of its header,
    or behind what a wake reads of it."""
    with (
        Store.open(store, writable=False) as opened,
        opened.open_session(SessionUri("default", name), version) as reader,
    ):
        entry = [each for each in reader.entries if each.kind == kind][span]
        with reader.holding(entry, stripped=head) as frames:
            frame, path = frames.heads.get(entry.id) or frames.frame_of(entry.id), Path(frames.path)
    if padding:
        flip(path, frame.offset + frame.frame_bytes - 1)
    else:
        flip(path, frame.offset + frame.head_bytes + (-40 if head else 80))


async def told(heard: Any, name: str, count: int = 1) -> list[dict[str, Any]]:
    await until(lambda: len(heard.of(name)) >= count)
    found: list[dict[str, Any]] = heard.of(name)
    return found


async def mend(rig: Any, name: str = "a") -> None:
    """What the scrub does with a session in whose files it finds faults."""
    uri, service = SessionUri("default", name), rig.service
    report = await asyncio.to_thread(service._parts.store.disk.verify, uri, deep=True)
    assert not report.ok
    service._parts.store.to_heal[uri] = report
    await service._parts.upkeep.healing.piece(uri)
