"""Handlers for the store: operations, marks, imports, analyses, figures and deletes."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ...memvid.answers import Action, DeleteReport, MaintenanceReport, MarkedVersion, UsageReport
from ...memvid.errors import InvalidPolicy, SessionNotFound
from ...memvid.exchange.incoming import owner_of
from ...memvid.folder.marks import require_id
from ...memvid.operations import Order, set_mark
from ...memvid.units import format_plural
from ...memvid.uri import SessionUri, names_version, parse_reference
from ...snapshot.lossy_kinds import BITS
from ..api import store as api
from ..api.waking import SleepResult
from ..disk.maintenance import bounded
from ..errors import SessionAwake, SessionExists
from ..memory.line import Use
from ..models.models import LoadedModel
from ..parts.parts import Parts
from ..tasks.cancellation import to_the_end
from ..versions.quantising import report_of
from .answering import answers
from .remote import require_remote

if TYPE_CHECKING:
    from ..disk.remote import Dropped


@answers(api.MaintainRequest)
async def maintain(parts: Parts, request: api.MaintainRequest) -> MaintenanceReport:
    """Raises:
    SessionNotFound, InvalidPolicy, CorruptMarks, and the store's other refusals.
    SessionAwake: the session is to be quantized or stripped, and is awake.
    NoRemote, RemoteError: the remote is to be freed.
    """
    parts.door.require_open()
    return bounded(await _maintain(parts, request))


async def _maintain(parts: Parts, request: api.MaintainRequest) -> MaintenanceReport:
    if request.operation == "quantize":
        if request.session is None or request.bits not in BITS:  # else asked in this process
            raise InvalidPolicy(f"Name a session, and keep it in {' or '.join(map(str, BITS))} bits.", field="bits")
        return await _quantize(parts, request.session, request.bits, dry_run=request.dry_run)
    if request.operation == "forget" and request.session is not None:
        uri = parse_reference(request.session)  # one that is gone may have left bytes to erase
        return await to_the_end(_forget_everywhere(parts, uri, dry_run=request.dry_run))
    if request.operation == "repack" and request.remote:
        require_remote(parts)
        assert parts.upkeep.collecting is not None
        report, _ = await to_the_end(parts.upkeep.collecting.collect(dry_run=request.dry_run))
        return report
    if request.operation == "strip" and request.session is None:
        return await parts.upkeep.run(parts.store.room.plan)
    if request.operation == "strip" and request.session is not None:
        named = (await parts.sessions.named(request.session)).require_whole()
        version = None if named.row is None else named.row.bundle_id
        return await _strip(parts, named.uri, version, dry_run=request.dry_run)
    uri_or_all = None if request.session is None else parts.store.disk.resolve(request.session)
    order = Order(
        request.operation, uri_or_all, request.dry_run, request.keep_last, request.keep_days, request.cold_after_days
    )
    if request.operation == "repair":
        return await _repair(parts, dry_run=request.dry_run)
    return await to_the_end(parts.upkeep.carry_out(order))


@answers(api.UsageRequest, told=False)
async def usage(parts: Parts, request: api.UsageRequest) -> UsageReport:
    """Raises the errors of a count."""
    parts.door.require_open()
    report = await parts.upkeep.measuring.report()
    if request.namespace is None:
        return report
    ours = f"torpor://{request.namespace}/"
    shared = [
        replace(part, sessions=tuple(each for each in part.sessions if each.startswith(ours)))
        for part in report.shared_by
    ]
    return replace(
        report,
        sessions=tuple(each for each in report.sessions if each.session.startswith(ours)),
        shared_by=tuple(part for part in shared if part.sessions),
    )


@answers(api.MarkRequest)
async def mark(parts: Parts, request: api.MarkRequest) -> MarkedVersion:
    """Raises SessionNotFound, AmbiguousVersion, InvalidTag, TagTaken, MarkNotFound, CorruptMarks."""
    parts.door.require_open()
    marking = partial(
        set_mark,
        parts.store.disk,
        request.session,
        tag=request.tag,
        untag=request.untag,
        pinned=request.pinned,
        move=request.move,
    )
    return await to_the_end(parts.store.on_writer(marking))


@answers(api.ImportRequest)
async def import_bundle(parts: Parts, request: api.ImportRequest) -> SleepResult:
    """Raises:
    SessionExists: a session of that name is awake.
    NameTaken: the store has other versions of a session of that name. LeaseHeld: another machine has one awake.
    Corruption, and the store's other refusals; the store is then as it was.
    """
    started = time.monotonic()
    parts.door.require_open()
    handed = require_id(request.bundle_id)
    wanted = None if request.session is None else parse_reference(request.session)
    owner = wanted if wanted is not None else await parts.store.on_io(partial(owner_of, parts.store.disk.path, handed))
    async with parts.sessions.residency.turn(owner):
        if owner in parts.sessions.awake:
            raise SessionExists(
                f"{owner} is there, and awake. Import under another name; or put it to sleep first, where this is a "
                "version of its own that is missing.",
                session=str(owner),
            )
        await parts.sessions.residency.hold(owner)
        adopting = partial(parts.store.disk.adopt_incoming, handed, as_uri=wanted)
        receipt = await to_the_end(parts.store.room.after(lambda: parts.upkeep.run(adopting)))
        await parts.sessions.learn_words(owner)
    return SleepResult.of(receipt, seconds=time.monotonic() - started)


@answers(api.AnalyzeRequest)
async def analyze(parts: Parts, request: api.AnalyzeRequest) -> api.AnalysisResult:
    """Raises:
    SessionNotFound: also if the session is awake and has never slept. AmbiguousVersion.
    MalformedSnapshot, and the errors of a damaged bundle.
    """
    started = time.monotonic()
    row = await parts.sessions.stored(request.session)
    artifact = await parts.upkeep.analyst.analyze(row, kind=request.kind, labels=request.labels, emit=request.emit)
    live = parts.sessions.awake.get(row.uri)
    return api.AnalysisResult(
        session=row.session,
        version=row.version,
        bundle_id=row.bundle_id,
        token_count=row.block_tokens,
        awake_tokens=len(live.state.tokens) if live is not None else None,
        artifact=artifact,
        seconds=time.monotonic() - started,
    )


@answers(api.StatsRequest, told=False)
async def stats(parts: Parts, request: api.StatsRequest) -> api.StatsResult:
    parts.door.require_open()
    return await parts.sessions.labels.stats(request.label, request.namespace)


@answers(api.DeleteRequest)
async def delete(parts: Parts, request: api.DeleteRequest) -> DeleteReport:
    """Raises SessionNotFound, AmbiguousVersion. SessionAwake: a session is awake at the version that is to go."""
    parts.door.require_open()
    try:
        named = (await parts.sessions.named(request.session)).require_whole()
        uri, row = named.uri, named.row
    except SessionNotFound:
        if names_version(request.session):
            raise
        uri, row = parse_reference(request.session), None  # the remote has it, perhaps
    async with parts.sessions.residency.turn(uri):
        if row is not None:
            return await to_the_end(parts.sessions.delete_version(uri, row.bundle_id))
        return await to_the_end(parts.sessions.delete_session(uri))


@answers(api.ClearRequest)
async def clear(parts: Parts, request: api.ClearRequest) -> api.ClearResult:
    parts.door.require_open()
    return await parts.sessions.labels.clear(request.label, request.namespace, dry_run=request.dry_run)


async def _forget_everywhere(parts: Parts, uri: SessionUri, *, dry_run: bool) -> MaintenanceReport:
    """The remote comes first: what is cut off then is here still, and can be forgotten again. Its packs come last."""
    collecting = parts.upkeep.collecting
    async with parts.sessions.residency.turn(uri):
        report, dropped = await _forget(parts, uri, dry_run=dry_run)
    if collecting is None or dropped is None:
        return report
    report = await collecting.forgotten(uri, report, dropped)
    if dry_run:
        return report
    said = await parts.upkeep.run(partial(parts.store.disk.forget_what_was_said, uri))  # the remote was asked since
    return replace(report, problems=tuple(dict.fromkeys([*report.problems, *said.problems])))


async def _forget(parts: Parts, uri: SessionUri, *, dry_run: bool) -> tuple[MaintenanceReport, Dropped | None]:
    """The report of the store, and what became of the session in the remote."""
    remote, dropped = parts.store.remote, None
    if not dry_run:
        await parts.sessions.writing_behind.let_go(uri)
        await parts.sessions.writing_behind.settled()
        parts.sessions.tell_no_more(uri)
    if remote is not None and parts.upkeep.collecting is not None:
        dropped = await (parts.upkeep.collecting.foresee(uri) if dry_run else remote.drop(uri, forgetting=True))
    try:
        report = await parts.upkeep.carry_out(Order("forget", uri, dry_run))
    except SessionNotFound:
        if uri not in parts.sessions.awake and not (dropped and (dropped.is_there or dropped.problems)):
            raise
        report = MaintenanceReport("forget", dry_run)  # the session has never slept, or is in the remote alone
    live = parts.sessions.awake.get(uri)
    if not dry_run:
        parts.sessions.forget(uri)  # only now, as in `delete_session`
        said = await parts.upkeep.run(partial(parts.store.disk.forget_what_was_said, uri))
        report = replace(report, problems=tuple(dict.fromkeys([*report.problems, *said.problems])))
    if live is not None:
        reason = f"the awake session, {format_plural(len(live.state.tokens), 'token')}, leaves memory"
        report = replace(report, actions=(Action("remove", "", str(uri), None, 0, reason), *report.actions))
    return report, dropped


async def _repair(parts: Parts, *, dry_run: bool) -> MaintenanceReport:
    """Repair the store, compute again what versions lack then, and tell of what is lacking still."""
    parts.door.require_working()
    repairing = partial(parts.store.disk.repair, dry_run=dry_run)
    report = await to_the_end(parts.upkeep.run(repairing))
    if dry_run:
        return await parts.upkeep.healing.foresee(report)
    if report.problems and (healed := await parts.upkeep.healing.heal()):
        report = replace(report, actions=(*report.actions, *healed))
        report = report.then(await to_the_end(parts.upkeep.run(repairing)))
    return report


async def _strip(parts: Parts, uri: SessionUri, version: str | None, *, dry_run: bool) -> MaintenanceReport:
    """Let the keys and values of a sleeping session go, or of one version of it."""
    async with parts.sessions.residency.turn(uri):
        if uri in parts.sessions.awake:
            raise SessionAwake(f"{uri} is awake; put it to sleep first.", session=str(uri))
        if not dry_run:
            await parts.sessions.writing_behind.let_go(uri)
        return await to_the_end(parts.upkeep.carry_out(Order("strip", uri, dry_run, version=version)))


async def _quantize(parts: Parts, session: str, bits: int, *, dry_run: bool) -> MaintenanceReport:
    """Keep a session in fewer bits, as its next version."""
    uri, receipt = parts.sessions.resolve(session), None
    async with parts.sessions.residency.turn(uri) as use:
        if uri in parts.sessions.awake:
            raise SessionAwake(f"{uri} is awake; put it to sleep first.", session=str(uri))
        if not dry_run:  # the version below covers the turns of a state that was lost
            await parts.store.journal.replay(uri)
        row = parts.store.standing.require_row(uri)
        plan = await parts.store.quantising.mark_on(row)
        plan = plan or await parts.store.quantising.plan(row, bits, await _facts(parts, row.model, use))
        if plan.left is None and not dry_run:
            async with parts.sessions.residency.room_to_wake(use, row, times=2) as model:
                receipt = await to_the_end(parts.store.quantising.carry_out(plan, bits, model))
    return report_of(plan, bits, receipt, dry_run=dry_run)


async def _facts(parts: Parts, name: str, use: Use) -> LoadedModel | None:
    """The facts of a model, loaded if it never was; None if it is not served."""
    if name not in parts.models.shelf:
        return None
    known = parts.models.shelf.facts(name)
    if known is None:
        async with parts.models.loading.using(name, use) as known:
            pass
    return known
