"""Handlers for create, set, list and show."""

from __future__ import annotations

from dataclasses import replace

from ...memvid.answers import VersionInfo
from ...memvid.uri import parse_reference
from ..api.creating import CreateRequest, ListRequest, SetRequest, ShowRequest
from ..api.session import ListResult, SessionDetail, SessionInfo, SessionState
from ..errors import SessionAwake
from ..parts.parts import Parts
from ..residency import listing
from ..sessions.sessions import Session
from ..tasks.pieces import in_pieces
from ..views.stored import written_bytes_of
from .answering import answers


@answers(CreateRequest, queued=True)
async def create(parts: Parts, request: CreateRequest) -> SessionInfo:
    """Raises InvalidUri, SessionExists, UnknownModel, InvalidSampling; InvalidDraft, LimitExceeded for a session that
    could never sleep; the errors of the model's load."""
    uri = parse_reference(request.session)
    parts.models.place_for(request.model)  # before the remote has a head of it
    async with parts.sessions.residency.turn(uri) as use:
        await parts.sessions.residency.hold(uri)
        parts.store.standing.require_new(uri)
        return listing.info_of_awake(await parts.sessions.begin(use, uri, request))


@answers(SetRequest, queued=True)
async def set_sampling(parts: Parts, request: SetRequest) -> SessionInfo:
    """Raises InvalidSampling, and the errors of a wake. SessionAwake: it is only looked at."""
    async with parts.sessions.woken(request.session, request.emit, create=False) as (_, live):
        require_no_look(parts, live)
        if request.sampling is not None:
            await parts.sessions.exchanges.change_sampling(live, request.sampling)
        if request.labels is not None and tuple(request.labels) != live.labels:
            live.labels, live.dirty = tuple(request.labels), True
        written_bytes = written_bytes_of(parts.store.disk.versions(live.uri))
        return listing.info_of_awake(live, parts.store.disk.find_session(live.uri), written_bytes)


def require_no_look(parts: Parts, live: Session) -> None:
    """Raises SessionAwake: the session is only looked at."""
    if (look := parts.sessions.look(live)) is not None:
        raise SessionAwake(
            f"{live.uri} is awake for a look at version {look.version}, token {look.token_count}, and a look changes "
            "nothing. Put it to sleep and ask again, to change its newest version; or fork it, and change the fork.",
            session=str(live.uri),
            version=look.version,
        )


@answers(ListRequest, told=False)
async def list_sessions(parts: Parts, request: ListRequest) -> ListResult:
    parts.door.require_open()
    infos = await in_pieces(parts.sessions.roll.infos(request.namespace))
    if branches := parts.sessions.forest.standing_on():
        infos = [replace(each, branches=branches[each.session]) if each.session in branches else each for each in infos]
    return ListResult(tuple(infos))


@answers(ShowRequest, told=False)
async def show(parts: Parts, request: ShowRequest) -> SessionDetail:
    """Raises SessionNotFound, AmbiguousVersion."""
    named = (await parts.sessions.named(request.session, look=True)).require_whole()
    if named.row is not None:
        return await _detail(parts, named.row, "stored")
    uri = named.uri
    async with parts.sessions.residency.turn(uri):
        rows = parts.store.disk.versions(uri)
        versions = await parts.store.on_io(lambda: parts.store.disk.versions_to_show(uri))
        live = parts.sessions.awake.get(uri)
        if live is not None:
            detail = listing.detail_of_awake(live, rows, versions)
        else:
            detail = await _detail(parts, parts.store.standing.require_row(uri), "asleep")
        return replace(detail, info=parts.sessions.roll.placed(uri, detail.info))


async def _detail(parts: Parts, row: VersionInfo, state: SessionState) -> SessionDetail:
    model = parts.models.shelf.loaded_of(row)
    return await parts.store.on_io(lambda: listing.detail_of_version(parts.store.disk, row, model, state))
