"""Handlers for sleep, save, wake, its plan, and warm."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import replace

from ...errors import TorporError
from ...memvid.answers import Finding
from ...memvid.errors import LeaseHeld, RemoteError, RemoteUnclear, RemoteUnreachable
from ...memvid.uri import VERSION_MARK, SessionUri, names_version, session_in
from ..api import waking as api
from ..api.events import OnEvent
from ..api.forking import ForkRequest
from ..api.remote import PullRequest
from ..disk.maintenance import MAX_PROBLEMS_TOLD
from ..errors import SessionAwake
from ..events.events import SleepCause
from ..memory.line import Use
from ..parts.parts import Parts
from ..residency import listing
from ..residency.planning import require_as_ordered
from ..tasks.cancellation import to_the_end
from ..versions.orders import WakeOrder
from .answering import answers
from .forking import fork
from .remote import pull, push_in_turn, require_remote


@answers(api.SleepRequest)
async def sleep(parts: Parts, request: api.SleepRequest) -> api.SleepResult:
    """Raises EmptyContext, NoSpace and the store's other refusals; the session then stays awake. NoRemote: it is as it
    was."""
    return await _keep(parts, request, stays=False)


@answers(api.SaveRequest)
async def save(parts: Parts, request: api.SaveRequest) -> api.SleepResult:
    """Raises as `sleep`; the session then is as it was."""
    return await _keep(parts, request, stays=True)


@answers(api.WakeRequest, queued=True)
async def wake(parts: Parts, request: api.WakeRequest) -> api.WakeResult:
    """Raises:
    SessionNotFound: there is no such session, or it has no such version.
    AmbiguousVersion: several versions fit the text behind the `@`.
    SessionAwake: the session is awake with another version or position, or here, and a fork is asked for.
    NoSuchPosition: the version has fewer tokens.
    CanaryFailed: the state does not compute the same as when it slept.
    IdentityMismatch, OwnerMismatch, CorruptBlock, ...: refused; nothing live has changed.
    LeaseHeld: another machine has it, and did not give it in time. SessionExists: one has the name of the fork.
    """
    try:
        return await _wake(parts, request, asking=request.emit if request.fork is None else None)
    except (LeaseHeld, RemoteUnreachable, RemoteUnclear) as error:
        if request.fork is None:
            raise
        return await _wake_fork(parts, request, request.fork, error)


async def _wake(parts: Parts, request: api.WakeRequest, asking: OnEvent | None) -> api.WakeResult:
    """asking: as of `Residency.hold`."""
    started = time.monotonic()
    brought = await parts.sessions.bring_if_missing(request.session, asking=asking)
    uri, order = await _order_of(parts, request)
    async with parts.sessions.residency.turn(uri) as use:
        taken = await parts.sessions.residency.hold(uri, asking=asking) or brought
        live = parts.sessions.awake.get(use.uri)
        if live is None:
            woken = await _bring_back(parts, use, order, request.emit, started)
        else:
            _require_no_fork(uri, request.fork)
            require_as_ordered(live, order, parts.store.standing.find_row(use.uri, order.version))
            unreadable = await parts.store.on_io(parts.store.disk.unreadable)
            newest, seconds = parts.store.disk.find_session(use.uri), time.monotonic() - started
            woken = listing.wake_result(live, newest, seconds=seconds, already_awake=True, unreadable=unreadable)
        if taken is None:
            return woken
        fetched = woken.bytes_fetched + taken.bytes_fetched
        return replace(woken, came_from=taken.came_from, waited_seconds=taken.seconds, bytes_fetched=fetched)


async def _wake_fork(parts: Parts, request: api.WakeRequest, name: str, refused: RemoteError) -> api.WakeResult:
    """Go on under another name. If only its wake fails, the fork is there."""
    source, at = request.session, request.version
    name_alone = session_in(source)
    if isinstance(refused, LeaseHeld):
        with suppress(TorporError):  # then it is the newest version that is here
            pulled = await pull(parts, PullRequest(name_alone))
            if pulled.bytes_written and not names_version(source):
                at = at or pulled.version  # and not what is awake here, which may be older
    if not parts.sessions.is_here(source):
        raise refused
    if at is not None:
        source = f"{name_alone}{VERSION_MARK}{at}{source.removeprefix(name_alone)}"
    await fork(parts, ForkRequest(source, name, at_token=request.at_token, on_event=request.on_event))
    woken = await _wake(parts, api.WakeRequest(name, strict=request.strict, on_event=request.on_event), asking=None)
    return replace(woken, remote_problem=_why_forked(require_remote(parts).url, refused))


def _require_no_fork(uri: SessionUri, name: str | None) -> None:
    """Of a session that is awake here. Raises SessionAwake: a wake makes no fork of it, and one is asked for."""
    if name is not None:
        raise SessionAwake(
            f"{uri} is awake here, so this wake makes no fork of it. `torpor fork {uri} {name}` does.", session=str(uri)
        )


def _why_forked(url: str, refused: RemoteError) -> Finding:
    """Without what to do, which was done."""
    if isinstance(refused, LeaseHeld):
        return Finding(url, refused.code, f"{refused.details['session']} is awake on {refused.details['machine']}.")
    return Finding.of(url, refused.__cause__ if isinstance(refused.__cause__, RemoteError) else refused)


@answers(api.PlanWakeRequest, told=False)
async def plan_wake(parts: Parts, request: api.PlanWakeRequest) -> api.WakePlanResult:
    """Raises the errors of `wake` before it reads a block. ModelNotLoaded: the model was never loaded."""
    await parts.sessions.bring_if_missing(request.session)
    uri, order = await _order_of(parts, request)
    async with parts.sessions.residency.turn(uri):
        plan = await parts.sessions.planning.plan(uri, order)
        unreadable = await parts.store.on_io(parts.store.disk.unreadable)
        return replace(plan, unreadable=tuple(unreadable[:MAX_PROBLEMS_TOLD]))


@answers(api.WarmRequest, queued=True)
async def warm(parts: Parts, request: api.WarmRequest) -> api.WarmResult:
    """Raises SessionNotFound: a named session is missing; then none is woken."""
    parts.door.require_open()
    uris = [parts.sessions.resolve(session) for session in request.sessions]
    return await parts.sessions.labels.warm(uris, request.label, request.namespace, request.emit)


async def _order_of(parts: Parts, request: api.WakingRequest) -> tuple[SessionUri, WakeOrder]:
    """The session to wake, and its version and place: those of its name, or the request's own."""
    named = await parts.sessions.named_by_number(request.session)
    version = request.version if named.row is None else named.row.version
    return named.uri, WakeOrder(version, named.place(request.at_token), request.strict)


async def _bring_back(parts: Parts, use: Use, order: WakeOrder, emit: OnEvent, started: float) -> api.WakeResult:
    try:
        return await parts.sessions.residency.bring_back(use, order, emit, started)
    except asyncio.CancelledError:
        if use.woken is None or use.uri not in parts.sessions.awake:
            raise
        return use.woken  # the wake ran to its end


async def _keep(parts: Parts, request: api.SleepRequest, *, stays: bool) -> api.SleepResult:
    """Make a session durable. stays: leave it where it is, in memory or not."""
    started = time.monotonic()
    asked = require_remote(parts) if request.remote else None
    async with parts.sessions.residency.turn(parts.sessions.resolve(request.session)) as use:
        receipt = await to_the_end(_keep_in_turn(parts, use.uri, request.emit, started, stays=stays))
        if asked is None:
            return receipt
        try:
            return replace(receipt, remote=await push_in_turn(parts, use.uri))
        except TorporError as error:  # it is durable here, and that receipt is not to be lost
            return replace(receipt, remote_problem=_why_not_there(asked.url, use.uri, error))


async def _keep_in_turn(
    parts: Parts, uri: SessionUri, emit: OnEvent, started: float, *, stays: bool
) -> api.SleepResult:
    live, standing = parts.sessions.awake.get(uri), parts.store.standing
    if live is None:
        await parts.store.journal.replay(uri)
        row = standing.require_row(uri)
        receipt = await parts.store.on_io(lambda: listing.receipt_of_asleep(parts.store.disk, row))
        return api.SleepResult.of(receipt, seconds=0.0, already_asleep=True)
    looked_at = len(live.state.tokens) if live.is_mere_look else None
    cause: SleepCause = "save" if stays else "asked"
    receipt = await parts.store.putting_away.put_away(live, emit, cause, stays=stays)
    if receipt.bytes_written:
        return api.SleepResult.of(receipt, seconds=time.monotonic() - started)
    row = standing.require_row(uri)
    if row.bundle_id != receipt.bundle_id:
        receipt = await parts.store.on_io(lambda: listing.receipt_of_asleep(parts.store.disk, row))
    return api.SleepResult.of(receipt, seconds=0.0, looked_at=looked_at)


def _why_not_there(url: str, uri: SessionUri, error: TorporError) -> Finding:
    message = f"{uri} is durable here; in the remote it may not be. {error.message} `torpor push {uri}` tries it again."
    return Finding(url, error.code, message)
