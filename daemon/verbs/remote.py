"""Handlers for the remote."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ...memvid.errors import SessionNotFound
from ...memvid.uri import SessionUri, parse_reference
from ..api import remote as api
from ..api.events import ignore
from ..disk.maintenance import MAX_PROBLEMS_TOLD
from ..errors import NoRemote
from ..parts.parts import Parts
from ..tasks.cancellation import to_the_end
from .answering import answers

if TYPE_CHECKING:
    from ...memvid.remote.sessions import Found
    from ..disk.remote import Remote


@answers(api.RemoteRequest, told=False)
async def remote(parts: Parts, request: api.RemoteRequest) -> api.RemoteSessionsResult:
    """Raises NoRemote, and RemoteError."""
    asked = require_remote(parts)
    found, problems = await asked.run(lambda: asked.sessions.listed(request.namespace))
    told, problems = tuple(map(_told, found)), problems[:MAX_PROBLEMS_TOLD]
    return api.RemoteSessionsResult(asked.url, told, tuple(problems), asked.sessions.is_sealed)


@answers(api.PushRequest)
async def push(parts: Parts, request: api.PushRequest) -> api.PushResult:
    """Raises:
    NoRemote, SessionNotFound, EmptyContext, the errors of a save.
    LeaseHeld, Diverged, RemoteError: it is not there. It is as it was here.
    """
    require_remote(parts)
    uri = parts.sessions.resolve(request.session)
    async with parts.sessions.residency.turn(uri):
        return await push_in_turn(parts, uri)


@answers(api.PullRequest)
async def pull(parts: Parts, request: api.PullRequest) -> api.PullResult:
    """Raises NoRemote; SessionNotFound: the remote has no version of it; Diverged; RemoteError; the errors of an
    import."""
    asked, begun = require_remote(parts), time.monotonic()
    uri = parse_reference(request.session)
    async with parts.sessions.residency.turn(uri):
        head = await asked.head(uri)
        if head is None or head.newest is None:
            raise SessionNotFound(
                f"The remote has no version of {uri}. List what it has with `torpor ls --remote`.",
                session=str(uri),
                suggestions=[],
            )
        pulled = await asked.pull(head)
    row = parts.store.standing.require_row(uri)
    return api.PullResult(
        session=str(uri),
        version=row.version,
        bundle_id=row.bundle_id,
        url=asked.url,
        bytes_written=0 if pulled is None else pulled.bytes_written,
        seconds=time.monotonic() - begun,
        ahead=row.bundle_id != head.newest,
    )


def _told(found: Found) -> api.RemoteSession:
    head = found.head
    place: api.Place = "free" if head.holder is None else "asleep" if head.holder.asleep else "held"
    return api.RemoteSession(
        session=str(head.uri),
        place=place,
        machine=None if head.holder is None else head.holder.party.machine,
        versions=len(head.versions),
        bundle_id=head.newest,
        here=found.here,
        ours=found.ours,
        epoch=head.epoch,
    )


async def push_in_turn(parts: Parts, uri: SessionUri) -> api.PushResult:
    """Send the newest version of a session whose turn the caller has. Raises as `push`."""
    asked, uploading, begun = require_remote(parts), parts.upkeep.uploading, time.monotonic()
    assert uploading is not None
    await parts.sessions.residency.hold(uri)
    if (live := parts.sessions.awake.get(uri)) is not None:
        await to_the_end(parts.store.putting_away.keep_changed(live, ignore, "save"))
    pushed = await uploading.push(uri, again=True)
    row = parts.store.standing.require_row(uri)
    if live is None:
        await asked.release(uri)
    return api.PushResult(
        session=str(uri),
        version=row.version,
        bundle_id=row.bundle_id,
        url=asked.url,
        blocks=0 if pushed is None else pushed.sent.blocks,
        blocks_sent=0 if pushed is None else pushed.sent.blocks_sent,
        bytes_sent=0 if pushed is None else pushed.sent.bytes_sent,
        seconds=time.monotonic() - begun,
    )


def require_remote(parts: Parts) -> Remote:
    """The daemon's remote. Raises NoRemote."""
    if parts.store.remote is None:
        raise NoRemote("The daemon has no remote. Start it with `torpor serve --remote URL`.")
    return parts.store.remote
