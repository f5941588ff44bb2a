"""What branches read, draw and commit: steps for the engine, for several branches at once.

Reading and committing are all or nothing: if one branch fails, the others go back. Writing commits token by token, as a
session does. Callers hold the tree, and have the memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ...snapshot.caches import truncate
from ...snapshot.forking import fork
from ...snapshot.state import LiveState
from ..api.branching import BranchText, Produced
from ..api.events import OnEvent, ProgressEvent, TokenEvent
from ..engine import generation
from ..engine.asking import Decode
from ..engine.channels import Piece
from ..engine.constrained import Constrained
from ..engine.engine import Engine, Steps, WritingSteps
from ..engine.generation import WriteOrder, Written
from ..engine.logprobs import Logprobs
from ..engine.sampler import initial_key
from ..engine.text import TextStream
from ..errors import InvalidConstraint
from ..models.grammars import Matcher
from ..models.models import LoadedModel
from ..tasks.cancellation import in_any_case, settled
from .trees import Branch

Result = TypeVar("Result")


class Stepping:
    """Lets branches step on the engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def copies(self, source: LiveState, model: LoadedModel, count: int) -> list[LiveState]:
        """Copies of a state, `count` of them. Their draws follow from seed and place."""
        return [await self._engine.call(lambda: _copy(self._engine, source, model)) for _ in range(count)]

    async def read(self, texts: Sequence[tuple[Branch, Sequence[int]]], emit: OnEvent) -> None:
        """Let branches read tokens: all, or none of them. Raises GenerationFailed."""
        _revoke([branch for branch, _ in texts])
        loop, undo = asyncio.get_running_loop(), await self._undo([branch for branch, _ in texts])
        total, done = sum(len(tokens) for _, tokens in texts), [0] * len(texts)

        def tell(at: int, count: int) -> None:
            done[at] = count
            emit(ProgressEvent("prefill", sum(done), total))

        def reading(at: int) -> Steps[None]:
            branch, tokens = texts[at]

            def on_tokens(count: int, _: int) -> None:
                loop.call_soon_threadsafe(tell, at, count)

            return generation.read(branch.live.model, branch.live.state, tokens, on_tokens)

        await self._all_or_none([self._engine.run(reading(at)) for at in range(len(texts))], undo)
        for branch, _ in texts:
            branch.guide.replaced, branch.guide.answer_at, branch.step = None, branch.position, branch.step + 1

    async def produce(self, branches: Sequence[Branch], logprobs: int | None, *, logits: bool) -> list[Produced]:
        """What each would draw. Raises InvalidConstraint, GenerationFailed."""
        draws = [await self._engine.call(partial(_produced, each, logprobs)) for each in branches]
        if not logits:
            return draws
        return [replace(each, logits=branch.logits().to_send()) for branch, each in zip(branches, draws, strict=True)]

    async def set_logits(self, branches: Sequence[Branch], values: NDArray[np.float32]) -> None:
        """Let branches draw from other logits at this step."""
        _revoke(branches)
        given = await self._engine.call(lambda: _evaluated(mx.array(values)))
        for branch in branches:
            branch.guide.replaced, branch.step = given, branch.step + 1

    async def commit(self, tokens: Sequence[tuple[Branch, int]]) -> None:
        """Append a token to each branch: to all, or to none. Runs to its end.

        Raises:
            InvalidConstraint: a constraint does not allow it. GenerationFailed: the model failed."""
        # Grammars are walked on the engine's thread: it has the stack for them.
        matchers = await self._engine.call(lambda: [_accepted(branch, token) for branch, token in tokens])
        _revoke([branch for branch, _ in tokens])
        undo = await self._undo([branch for branch, _ in tokens])
        new_logits = await self._all_or_none(
            [self._engine.run(_decode(branch, token), writes=True) for branch, token in tokens], undo
        )

        def enter() -> None:
            for (branch, token), logits in zip(tokens, new_logits, strict=True):
                state = branch.live.state
                branch.guide.commit(branch.head(), token)
                state.tokens.append(token)
                state.last_logits = logits

        await self._engine.call(enter)
        for (branch, token), matcher in zip(tokens, matchers, strict=True):
            branch.matcher, branch.step = matcher, branch.step + 1
            if matcher is not None:
                branch.accepted.append(token)

    async def advance(
        self, branches: Sequence[Branch], max_tokens: int, stop: tuple[str, ...], logprobs: int | None, emit: OnEvent
    ) -> list[BranchText]:
        """Let branches write. If one fails, all stop, and each has the tokens that it has committed. Raises
        InvalidConstraint, GenerationFailed."""
        _revoke(branches)
        writings = [_Writing.of(branch, max_tokens, stop, logprobs) for branch in branches]
        loop = asyncio.get_running_loop()
        works = [self._engine.run(each.steps(loop, emit), writes=True) for each in writings]
        try:
            await _together(works)
        finally:
            await in_any_case(self._engine.call(partial(_end, writings)))
        return [each.text() for each in writings]

    async def _undo(self, branches: Sequence[Branch]) -> list[Callable[[], None]]:
        return await self._engine.call(lambda: [_undo(branch) for branch in branches])

    async def _all_or_none(
        self, works: Sequence[Coroutine[Any, Any, Result]], undo: Sequence[Callable[[], None]]
    ) -> list[Result]:
        try:
            return await _together(works)
        except BaseException:

            def put_back() -> None:
                for each in undo:
                    each()

            await in_any_case(self._engine.call(put_back))
            raise


@dataclass(slots=True)
class _Writing:
    """One branch as it writes. before: its matcher, as it stood."""

    branch: Branch
    order: WriteOrder
    written: Written
    before: Matcher | None

    @classmethod
    def of(cls, branch: Branch, max_tokens: int, stop: tuple[str, ...], logprobs: int | None) -> _Writing:
        matcher = None if branch.matcher is None else branch.matcher.copy()
        order = WriteOrder(
            max_tokens, branch.live.sampling, stop, matcher=matcher, logprobs=logprobs, guide=branch.guide
        )
        return cls(branch, order, Written(), branch.matcher)

    def steps(self, loop: asyncio.AbstractEventLoop, emit: OnEvent) -> WritingSteps[None]:
        live, number = self.branch.live, self.branch.number

        def on_token(token: int | None, piece: Piece) -> None:
            logprobs = self.written.logprobs_of(token)
            event = TokenEvent(token, piece.text, piece.channel, piece.call, logprobs, number)
            loop.call_soon_threadsafe(emit, event)

        return generation.write(live.model, live.state, self.order, self.written, on_token)

    def end(self) -> None:
        """Let the branch stand behind what was committed, whatever came after that."""
        for token in self.written.tokens if self.before is not None else ():
            assert self.before is not None
            self.before.accept(token)
            self.branch.accepted.append(token)
        self.branch.step += len(self.written.tokens)

    def text(self) -> BranchText:
        facts = self.written.facts(self.order)
        names = ("text", "tokens", "finish_reason", "stopped_by", "logprobs")
        told = {name: facts[name] for name in names}
        return BranchText(branch=self.branch.number, position=self.branch.position, **told)


def _end(writings: Sequence[_Writing]) -> None:
    for each in writings:
        each.end()


def walk(matcher: Matcher, tokens: Sequence[int]) -> None:
    """Let a matcher go on behind tokens. On the engine's thread. Raises InvalidConstraint: it does not allow them."""
    for token in tokens:
        if not matcher.accept(token):
            raise InvalidConstraint("A constraint does not allow what it allowed before.", reason="another grammar")


def _copy(engine: Engine, source: LiveState, model: LoadedModel) -> LiveState:
    engine.release(source)
    copy = fork(source, model.branch_caches())
    copy.last_logits = source.last_logits  # evaluated, and never written to
    copy.random_key, copy.computed_tokens = initial_key(), source.computed_tokens
    return copy


def _undo(branch: Branch) -> Callable[[], None]:
    """A function that puts a branch back to where it stands now, also where a batch has given it other caches."""
    state = branch.live.state
    if not branch.live.model.layout.by_token:
        return state.kept()
    end, passes, logits, computed = len(state.tokens), state.passes.copy(), state.last_logits, state.computed_tokens

    def put_back() -> None:
        truncate(state.caches, end)
        del state.tokens[end:]
        state.passes, state.last_logits, state.computed_tokens = passes, logits, computed

    return put_back


def _decode(branch: Branch, token: int) -> WritingSteps[mx.array]:
    """The logits behind a token; the caches have it, the ledger not yet."""
    live = branch.live
    model, state = live.model, live.state
    position = len(state.tokens)
    by_token = model.layout.by_token
    takes = not by_token and state.checkpoints.is_due(position + 1)

    def keep(logits: mx.array) -> None:
        generation.take_checkpoint(model, state, position + 1, token, logits)

    # Windows and recurrences can be put back only where they are in no batch.
    return (yield Decode(model, state, token, not by_token, keep if takes else None))


def _accepted(branch: Branch, token: int) -> Matcher | None:
    """The branch's matcher behind a token. Raises InvalidConstraint: it does not go on so."""
    if branch.matcher is None:
        return None
    matcher = branch.matcher.copy()
    if not matcher.allowed()[token] or not matcher.accept(token):
        raise InvalidConstraint(
            f"Branch {branch.number} is held to a constraint that does not allow token {token} here.",
            reason="the token is not allowed here",
        )
    return matcher


def _produced(branch: Branch, logprobs: int | None) -> Produced:
    live = branch.live
    state, model, head = live.state, live.model, branch.head()
    matcher = None if branch.matcher is None else branch.matcher.copy()
    bound = None if matcher is None else Constrained(matcher, model, state.tokens, None)
    order = WriteOrder(1, live.sampling, guide=branch.guide)
    token = generation.next_draw(state, order, Written(bound=bound)).token
    ends = token in model.end_tokens
    stream = TextStream(model.tokenizer, state.tokens)
    return Produced(
        branch=branch.number,
        step=branch.step,
        token=token,
        text="" if ends else stream.push(token) + stream.finish(),
        ends=ends,
        logprob=None if logprobs is None else Logprobs(model, logprobs).of(head, token),
        entropy=None if logprobs is None else entropy_of(head),
    )


def entropy_of(logits: mx.array) -> float:
    """Of the next token by float32 logits `[vocabulary]`, in nats."""
    wide = np.asarray(logits).astype(np.float64)
    shares = np.exp(wide - np.max(wide))
    shares /= shares.sum()
    some = shares[shares > 0]
    return max(0.0, float(-(some * np.log(some)).sum()))


def _revoke(branches: Sequence[Branch]) -> None:
    for branch in branches:
        branch.revoke()


def _evaluated(array: mx.array) -> mx.array:
    mx.eval(array)
    return array


async def _together(works: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """The results of works that run at once. If one fails or the caller is cancelled, the others are stopped, and have
    ended when this raises."""
    # No TaskGroup: where one work fails, it leaves the caller's task with a cancellation that no caller asked for.
    tasks = [asyncio.ensure_future(work) for work in works]
    if not tasks:
        return []
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        failed = next((task for task in tasks if task.done() and not task.cancelled() and task.exception()), None)
        if failed is None:
            return [task.result() for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            await settled(task)
    raise failed.exception() or AssertionError  # of a task that has failed
