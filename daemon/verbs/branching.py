"""Handlers for trees of branches."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from ...memvid.answers import VersionInfo
from ...memvid.disk.clock import now_ns
from ...memvid.errors import SessionNotFound
from ...memvid.format.manifest import require_session_map
from ...memvid.store import Receipt
from ...memvid.units import format_bytes
from ...memvid.uri import SessionUri, parse_reference
from ...snapshot.forking import share
from ..api import branching as api
from ..api.constraints import FREE
from ..api.limits import MAX_LOGITS_BYTES, MAX_SEED
from ..api.sampling import Sampling
from ..api.session import Origin, SessionInfo
from ..branches.ranking import measured, ranked
from ..branches.sleeping import dress_in, map_of, map_of_root, planted_in
from ..branches.stepping import walk
from ..branches.trees import BIAS_BYTES, MATCHER_BYTES, Branch
from ..engine import generation
from ..engine.generation import PREFILL_CHUNK_TOKENS
from ..engine.guiding import Bias, logits_of
from ..engine.sampler import initial_key
from ..errors import InvalidBranches, InvalidSampling, StaleStep
from ..events import accounts
from ..events.accounts import Work
from ..events.events import SessionCreated
from ..memory.line import Use
from ..models.grammars import AnswerForm
from ..parts.parts import Parts
from ..residency import listing
from ..sessions.rereading import LastRead
from ..sessions.sessions import Session, Stay
from ..tasks.cancellation import in_any_case, require_wanted, to_the_end
from ..tasks.pieces import SESSIONS_AT_ONCE, Pieces, in_pieces
from ..versions.orders import WakeOrder
from ..versions.writing import Terms
from ..views.stored import info_of_stored
from ..views.trees import TREE, Planted
from .answering import answers


@answers(api.TreeRequest, queued=True)
async def tree(parts: Parts, request: api.TreeRequest) -> api.BranchInfo:
    """Raises SessionNotFound, AmbiguousVersion, MemoryBudgetExceeded, and the errors of a wake."""
    parts.door.require_open()
    row = await _version_to_plant(parts, request.session)
    return info_of(await (_plant_session(parts, request) if row is None else _plant_version(parts, row, request)))


async def _version_to_plant(parts: Parts, session: str) -> VersionInfo | None:
    """The version that is named, or that has the session's whole tree; None for the session as it stands."""
    named = (await parts.sessions.named_by_number(session, look=True)).require_whole()
    if named.row is not None:
        return named.row
    uri = named.uri
    awake, row = parts.sessions.awake, parts.store.disk.find_session(uri)
    if row is None or parts.store.disk.has_turns(uri):
        return None
    if (live := awake.get(uri)) is not None and (live.dirty or live.is_mere_look or live.durable is None):
        return None
    return row if TREE in await _session_map(parts, row) else None


async def _session_map(parts: Parts, row: VersionInfo) -> Mapping[str, Any]:
    """The session map of a version."""

    def look() -> Mapping[str, Any]:
        with parts.store.disk.open_session(row.uri, row.version) as reader:
            return reader.manifest.session

    return await parts.store.on_io(look)


async def _plant_session(parts: Parts, request: api.TreeRequest) -> Branch:
    async with AsyncExitStack() as planting:
        awake = parts.sessions.woken(request.session, request.emit, create=False)
        async with awake as (use, live), _room_beside(parts, use, live.resident_bytes):
            return await planting.enter_async_context(parts.sessions.forest.planting(await _copy_of(parts, live)))


async def _plant_version(parts: Parts, row: VersionInfo, request: api.TreeRequest) -> Branch:
    async with AsyncExitStack() as planting:
        async with _woken_apart(parts, row, request) as live:
            root = await planting.enter_async_context(parts.sessions.forest.planting(live))
        kept = await _session_map(parts, row)
        if TREE in kept:
            await _dress(parts, root, kept)
            await _grow_again(parts, row, request, root, planted_in(kept))
        return root


async def _grow_again(
    parts: Parts, row: VersionInfo, request: api.TreeRequest, root: Branch, stored: Sequence[Planted]
) -> None:
    """Give a root the branches of its stored tree."""
    branches = [root]
    for at, each in enumerate(stored, start=1):
        require_wanted()
        found = next((one for one in parts.store.disk.versions(each.uri) if one.bundle_id == each.bundle_id), None)
        if found is None:
            raise SessionNotFound(
                f"Branch {at} of the tree {row.uri} is version {each.version} of {each.uri}, which is not stored. "
                "Begin a tree on each of the other branches, by its name.",
                session=str(each.uri),
            )
        parent = branches[each.parent]
        async with _woken_apart(parts, found, request) as live:
            await parts.models.engine.call(partial(share, live.state, parent.live.state))
            branches.append(parts.sessions.forest.fork(parent, live))
            await parts.sessions.forest.settle(parent, branches[-1])
        await _dress(parts, branches[-1], await _session_map(parts, found))
    parts.sessions.forest.count_given(*branches)


async def _dress(parts: Parts, branch: Branch, kept: Mapping[str, Any]) -> None:
    """Give a branch what the session map of its version says. Raises MalformedSnapshot."""
    model = branch.live.model
    dress = dress_in(kept, model.layout.vocabulary)
    matcher = await parts.models.encoder.matcher(model, AnswerForm(dress.constraint, FREE))
    if matcher is not None:
        await parts.models.engine.call(partial(walk, matcher, dress.accepted))
    dress.put_on(branch, matcher)


@asynccontextmanager
async def _woken_apart(parts: Parts, row: VersionInfo, request: api.TreeRequest) -> AsyncIterator[Session]:
    """A version as a session that nobody finds, with memory for it until it is counted elsewhere."""
    async with parts.sessions.residency.turn(row.uri) as use, parts.sessions.residency.room_to_wake(use, row) as model:
        order = WakeOrder(row.version, cause="fork")
        woken = await to_the_end(parts.store.waking.wake(row.uri, order, model, request.emit))
        live = woken.session
        if live.unread is not None:
            await parts.store.waking.read_on(live)
        live.state.random_key = await parts.models.engine.call(initial_key)
        await parts.models.engine.call(partial(live.model.begin_branch, live.state))
        yield live


@asynccontextmanager
async def _room_beside(parts: Parts, use: Use, wanted: int) -> AsyncIterator[None]:
    """Room for a branch, for a request that holds the turn of a session, too."""
    with parts.models.memory.waiting_for_another(use, lambda: True):
        async with parts.sessions.forest.room(wanted):
            yield


async def _copy_of(parts: Parts, live: Session) -> Session:
    """The same session with a state of its own."""
    (state,) = await parts.sessions.stepping.copies(live.state, live.model, 1)
    return replace(live, state=state)


@answers(api.BranchRequest, queued=True)
async def branch(parts: Parts, request: api.BranchRequest) -> api.BranchesResult:
    """Raises BranchNotFound, TooManyBranches, MemoryBudgetExceeded; then there is no new branch."""
    working = parts.sessions.forest.working([request.branch])
    async with working as (parent,), _forked(parts, parent, request.count, request.seeds) as children:
        return api.BranchesResult(await _told(parts, children))


@asynccontextmanager
async def _forked(parts: Parts, parent: Branch, count: int, seeds: Sequence[int]) -> AsyncIterator[list[Branch]]:
    """Children of a branch. They are gone if the work with them raises."""
    parts.sessions.forest.require_places(parent.tree, count)
    children: list[Branch] = []
    try:
        async with parts.sessions.forest.room((count + 1) * parent.fork_bytes):
            states = await parts.sessions.stepping.copies(parent.live.state, parent.live.model, count)
            for at, state in enumerate(states):
                drawing = parent.live.sampling.changed(Sampling(seed=seeds[at]) if seeds else None)
                children.append(parts.sessions.forest.fork(parent, replace(parent.live, state=state, sampling=drawing)))
            await parts.sessions.forest.settle(parent, *children)  # its tail has become a run for them
        require_wanted()
        yield children
    except BaseException:
        await in_any_case(parts.sessions.forest.prune(children))
        await parts.sessions.forest.settle(parent)  # its tail has become a run for them
        raise


@answers(api.PrefillRequest, queued=True)
async def prefill(parts: Parts, request: api.PrefillRequest) -> api.BranchesResult:
    """Raises BranchNotFound, InvalidBranches, InvalidTokens, ContextOverflow, GenerationFailed,
    MemoryBudgetExceeded."""
    async with parts.sessions.forest.working([each.branch for each in request.readings]) as branches:
        texts = []
        for each, reading in zip(branches, request.readings, strict=True):
            model = each.live.model
            ids = list(reading.tokens or ())
            if reading.text is not None:
                ids = await parts.models.encoder.plain(model, reading.text, opening=not each.position)
            await in_pieces(generation.require_valid(model, ids))
            texts.append((each, ids))
        async with _growing(parts, "read", [(each, len(ids)) for each, ids in texts]):
            await parts.sessions.stepping.read(texts, request.emit)
        for each in branches:
            each.live.chat = replace(each.live.chat, turn_open=False)
        return api.BranchesResult(await _told(parts, branches))


@answers(api.ProduceRequest, queued=True)
async def produce(parts: Parts, request: api.ProduceRequest) -> api.ProduceResult:
    """Raises BranchNotFound, InvalidBranches, EmptyContext, InvalidConstraint, GenerationFailed."""
    async with parts.sessions.forest.working(request.branches) as branches:
        _require_read(branches)
        if request.logits and branches:
            _require_tellable(len(branches), 4 * branches[0].live.model.layout.vocabulary)
        found = await parts.sessions.stepping.produce(branches, request.logprobs, logits=request.logits)
        return api.ProduceResult(tuple(found))


@answers(api.CommitRequest, queued=True)
async def commit(parts: Parts, request: api.CommitRequest) -> api.BranchesResult:
    """Raises BranchNotFound, InvalidBranches, EmptyContext, InvalidTokens, StaleStep, InvalidConstraint,
    ContextOverflow, GenerationFailed, MemoryBudgetExceeded."""
    async with parts.sessions.forest.working([each.branch for each in request.commits]) as branches:
        _require_read(branches)
        for each, wanted in zip(branches, request.commits, strict=True):
            await in_pieces(generation.require_valid(each.live.model, [wanted.token]))
            _require_step(each, wanted.step)
        async with _growing(parts, "write", [(each, 1) for each in branches]):
            tokens = [(each, wanted.token) for each, wanted in zip(branches, request.commits, strict=True)]
            await to_the_end(parts.sessions.stepping.commit(tokens))
        return api.BranchesResult(await _told(parts, branches))


@answers(api.AdvanceRequest, queued=True)
async def advance(parts: Parts, request: api.AdvanceRequest) -> api.AdvanceResult:
    """Raises BranchNotFound, InvalidBranches, EmptyContext, InvalidConstraint, ContextOverflow, GenerationFailed,
    MemoryBudgetExceeded. What events told of is committed all the same."""
    async with parts.sessions.forest.working(request.branches) as branches:
        _require_read(branches)
        async with _growing(parts, "write", [(each, request.max_tokens) for each in branches]):
            stop = tuple(request.stop)
            written = await parts.sessions.stepping.advance(
                branches, request.max_tokens, stop, request.logprobs, request.emit
            )
        return api.AdvanceResult(tuple(written))


@answers(api.DivergeRequest, queued=True)
async def diverge(parts: Parts, request: api.DivergeRequest) -> api.DivergeResult:
    """Raises BranchNotFound, EmptyContext, TooManyBranches, InvalidSampling, and as `advance`; then there is no new
    branch."""
    async with parts.sessions.forest.working([request.branch]) as (parent,):
        _require_read([parent])
        _require_drawn(parent, request.count)
        generation.require_room(parent.live.model, parent.position, request.max_tokens, "branch")
        own = parent.live.sampling.seed
        seeds = request.seeds or [(own + at) % (MAX_SEED + 1) for at in range(1, request.count + 1)]
        async with _forked(parts, parent, request.count, seeds) as children:
            async with _growing(parts, "write", [(each, request.max_tokens) for each in children]):
                stop = tuple(request.stop)
                texts = await parts.sessions.stepping.advance(
                    children, request.max_tokens, stop, request.logprobs, request.emit
                )
            require_wanted()
            measures = [measured(request.by, parent.guide, each.guide) for each in children]
            order = ranked([each.finish_reason == "length" for each in texts], request.by, measures)
            losers = order[1:] if request.by != "client" else []
            await in_any_case(parts.sessions.forest.prune([children[at] for at in losers]))
            return api.DivergeResult(
                tuple(api.Attempt(**vars(texts[at]), kept=at not in losers, measure=measures[at]) for at in order)
            )


@answers(api.GuideRequest)
async def guide(parts: Parts, request: api.GuideRequest) -> api.BranchesResult:
    """Raises BranchNotFound, InvalidBranches, InvalidSampling, InvalidTokens, InvalidConstraint, InvalidLogits,
    EmptyContext, MemoryBudgetExceeded."""
    async with parts.sessions.forest.working(request.branches) as branches:
        if not branches:
            return api.BranchesResult(())
        model = branches[0].live.model
        if request.steer:
            await in_pieces(generation.require_valid(model, [each.token for each in request.steer]))
        changed = [each.live.drawing(request.sampling) for each in branches]
        matcher = await parts.models.encoder.matcher(model, AnswerForm(request.constraint, FREE))
        steer, logits = None if request.steer is None else Bias.of(request.steer), None
        if request.logits is not None:
            _require_read(branches)
            logits = logits_of(request.logits, model.layout.vocabulary)
        # One for all branches, so it is in memory once; a place in a constraint each has for itself.
        wanted = sum(each.nbytes for each in (steer, logits) if each is not None)
        wanted += BIAS_BYTES * len(request.sampling.logit_bias if request.sampling is not None else ())
        async with parts.sessions.forest.room(wanted + (0 if matcher is None else MATCHER_BYTES * len(branches))):
            if logits is not None:
                await parts.sessions.stepping.set_logits(branches, logits)
            for each, sampling in zip(branches, changed, strict=True):
                each.live.sampling = sampling
                each.guide.steer = each.guide.steer if steer is None else steer
                if request.free or matcher is not None:
                    each.accepted.clear()
                    each.constraint, each.matcher = request.constraint, None if matcher is None else matcher.copy()
            parts.sessions.forest.count_given(*branches)
        return api.BranchesResult(await _told(parts, branches))


@answers(api.PruneRequest)
async def prune(parts: Parts, request: api.PruneRequest) -> api.PruneResult:
    """Raises BranchNotFound, InvalidBranches, BranchHasChildren."""
    async with parts.sessions.forest.working(request.branches, gone_is_fine=True) as branches:
        going = parts.sessions.forest.prunable(branches, subtree=request.subtree)
        numbers = tuple(each.number for each in going)
        return api.PruneResult(numbers, await to_the_end(parts.sessions.forest.prune(going)))


@answers(api.RetainRequest)
async def retain(parts: Parts, request: api.RetainRequest) -> api.BranchInfo:
    """Raises BranchNotFound."""
    async with parts.sessions.forest.working([request.branch]) as (kept,):
        await to_the_end(parts.sessions.forest.retain(kept))
        return info_of(kept)


@answers(api.KeepRequest, queued=True)
async def keep(parts: Parts, request: api.KeepRequest) -> SessionInfo:
    """Raises BranchNotFound, EmptyContext, SessionExists, MemoryBudgetExceeded, LimitExceeded, and the errors of the
    journal and of a sleep; then there is no session."""
    uri = parse_reference(request.name)
    async with parts.sessions.forest.working([request.branch]) as (kept,):
        if request.subtree:
            return await _keep_tree(parts, kept, request)
        _require_read([kept])
        parts.store.standing.require_new(uri)
        async with parts.sessions.residency.turn(uri) as use:
            await parts.sessions.residency.hold(uri)
            async with _room_beside(parts, use, kept.live.resident_bytes):
                parts.store.standing.require_new(uri)
                try:
                    copy = await _copy_of(parts, kept.live)
                finally:
                    await parts.sessions.forest.settle(kept)
                live = _session_of(copy, uri, request)
                await parts.models.engine.call(partial(live.model.settle_form, live.state))
                require_session_map(live.to_map())
                parts.sessions.awake.admit(live)
                parts.models.memory.settle(use)
            try:
                await parts.sessions.acknowledge(uri, durable=True)
            except BaseException:
                await in_any_case(parts.sessions.delete_session(uri))
                raise
            parts.bus.publish(SessionCreated(uri, live.model.name))
            parts.sessions.reuse.note(live)
            return listing.info_of_awake(live, parts.store.disk.find_session(uri))


@answers(api.BranchesRequest, told=False)
async def branches(parts: Parts, request: api.BranchesRequest) -> api.BranchesResult:
    """Raises BranchNotFound."""
    parts.door.require_open()
    forest = parts.sessions.forest
    trees = forest.trees() if request.branch is None else [forest.find(request.branch).tree]
    found = [each for tree in trees for each in tree.root.subtree()]
    return api.BranchesResult(await _told(parts, sorted(found, key=lambda each: each.number)))


async def _told(parts: Parts, branches: Sequence[Branch]) -> tuple[api.BranchInfo, ...]:
    """Branches as answers show them, in this order, without those that are pruned meanwhile. A cancellation is ignored:
    what was done is told."""

    def pieces() -> Pieces[tuple[api.BranchInfo, ...]]:
        forest, found = parts.sessions.forest, list[api.BranchInfo]()
        for start in range(0, len(branches), SESSIONS_AT_ONCE):
            if start:
                yield
            found += [info_of(each) for each in branches[start : start + SESSIONS_AT_ONCE] if forest.holds(each)]
        return tuple(found)

    return await in_any_case(in_pieces(pieces()))


def info_of(branch: Branch) -> api.BranchInfo:
    return api.BranchInfo(
        branch=branch.number,
        parent=None if branch.parent is None else branch.parent.number,
        children=tuple(child.number for child in branch.children),
        position=branch.position,
        fork_head=branch.fork_head,
        step=branch.step,
        sampling=branch.live.sampling,
        steered_tokens=len(branch.guide.steer),
        constrained=branch.matcher is not None,
        measured_tokens=branch.guide.measured,
        mean_logprob=branch.guide.mean_logprob,
        resident_bytes=branch.live.resident_bytes,
    )


async def _keep_tree(parts: Parts, kept: Branch, request: api.KeepRequest) -> SessionInfo:
    """Put a branch and all below it to sleep: the root's version, which names the others, comes last, and with it the
    tree is kept. What a crash leaves before it are sessions of their own."""
    branches = sorted(kept.subtree(), key=lambda each: each.number)
    _require_read(branches)
    uri = parse_reference(request.name)
    uris = [uri, *(SessionUri(uri.namespace, f"{uri.name}.{at}") for at in range(1, len(branches)))]
    # Each with checkpoints of its own: a sleep lets go of those that it has written.
    states = [replace(each.live.state, checkpoints=each.live.state.checkpoints.copy()) for each in branches]
    sleepers = [
        _session_of(replace(each.live, state=state), named, request)
        for each, state, named in zip(branches, states, uris, strict=True)
    ]
    async with AsyncExitStack() as turns:
        for named in uris:
            parts.store.standing.require_new(named)
            await turns.enter_async_context(parts.sessions.residency.turn(named))
            await parts.sessions.residency.hold(named)
            parts.store.standing.require_new(named)
        try:
            kept_below = []
            for branch, each in zip(branches[1:], sleepers[1:], strict=True):
                receipt = await _slept(parts, each, map_of(branch), request)
                kept_below.append((each.uri, receipt.version, receipt.bundle_id))
            await _slept(parts, sleepers[0], map_of_root(branches, kept_below), request)
        except BaseException:
            for each in sleepers:
                if each.durable is not None:
                    await in_any_case(parts.sessions.delete_session(each.uri))
            raise
    for named in uris:
        await parts.sessions.learn_words(named)
    row = parts.store.standing.require_row(uri)
    return info_of_stored(row, row.bundle_bytes, kept.live.sampling)


async def _slept(parts: Parts, live: Session, tree: Mapping[str, Any], request: api.KeepRequest) -> Receipt:
    terms = Terms(may_wait=True, branch=tree)
    return await to_the_end(parts.store.versions.sleep(live, request.emit, cause="save", terms=terms))


def _session_of(copy: Session, uri: SessionUri, request: api.KeepRequest) -> Session:
    """A copy of a branch as a session of its own: new, with no version yet."""
    return replace(
        copy,
        uri=uri,
        labels=copy.labels if request.labels is None else tuple(request.labels),
        created_ns=now_ns(),
        durability=None,
        unnamed=False,
        durable=None,
        unchanged_tokens=0,
        dirty=True,
        rewound=False,
        provenance=replace(copy.provenance, recomputed=None, forked_from=_origin_of(copy)),
        interrupted=None,
        last_read=LastRead(),
        stay=Stay(),
    )


def _origin_of(copy: Session) -> Origin | None:
    """What a branch has of the version of its tree's session; what that came from, where it has nothing of one."""
    durable, tokens = copy.durable, min(copy.unchanged_tokens, len(copy.state.tokens))
    if durable is None or not tokens:
        return copy.provenance.forked_from
    return Origin(str(copy.uri), durable.version, durable.bundle_id, tokens)


def _require_read(branches: Sequence[Branch]) -> None:
    for each in branches:
        each.head()


def _require_drawn(parent: Branch, count: int) -> None:
    """Raises InvalidSampling: all attempts would be the same."""
    if count > 1 and parent.live.sampling.temperature == 0:
        raise InvalidSampling(
            f"At temperature 0 all {count} attempts would be the same, whatever their seeds. Give branch "
            f"{parent.number} a temperature with guide first, for example 0.8.",
            branch=parent.number,
        )


def _require_tellable(count: int, logits_bytes: int) -> None:
    """Raises InvalidBranches: one answer cannot have the logits of so many branches."""
    if count * logits_bytes > MAX_LOGITS_BYTES:
        raise InvalidBranches(
            f"The logits of {count} branches are {format_bytes(count * logits_bytes)}, and an answer has "
            f"at most {format_bytes(MAX_LOGITS_BYTES)}. Ask for those of at most {MAX_LOGITS_BYTES // logits_bytes} at "
            "a time.",
            limit=MAX_LOGITS_BYTES // logits_bytes,
        )


def _require_step(branch: Branch, step: int | None) -> None:
    if step not in (None, branch.step):
        raise StaleStep(
            f"The token for branch {branch.number} was drawn at step {step}, and the branch stands at step "
            f"{branch.step}. Produce again, and commit that token.",
            branch=branch.number,
            step=branch.step,
        )


@asynccontextmanager
async def _growing(parts: Parts, work: Work, wanted: Sequence[tuple[Branch, int]]) -> AsyncIterator[None]:
    """Let branches grow by so many tokens at most, and the request's account know by how many they did. Raises
    ContextOverflow: one has no room for them."""
    for each, count in wanted:
        generation.require_room(each.live.model, each.position, count, "branch")
    bytes_more = sum(each.live.growth_of(PREFILL_CHUNK_TOKENS)(each.position + count) for each, count in wanted)
    bytes_more += sum(each.matcher_bytes(count) - each.matcher_bytes() for each, count in wanted)
    async with parts.sessions.forest.room(bytes_more):
        before, began = sum(each.position for each, _ in wanted), time.monotonic()
        try:
            yield
        finally:
            if wanted and (account := accounts.current.get()) is not None:
                grown = sum(each.position for each, _ in wanted) - before
                account.did(work, wanted[0][0].live.uri, grown, time.monotonic() - began)
            await parts.sessions.forest.settle(*(each for each, _ in wanted))
