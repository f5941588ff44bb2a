"""The one thread that owns MLX.

Work comes as *steps*: a generator that does a bounded piece (one prefill chunk) between two yields. A step that writes
yields a `Decode`, the token that its state is to read next, and is sent the logits: the engine reads the tokens of all
that write in one round, a batch where it can. A job whose caller goes away is closed at its next yield, where its state
is consistent by construction; the caller waits for that, so nothing else touches a session while the engine still does.

Rounds of tokens and pieces of other work share the thread by time where both have something to do: so a long prefill
slows the streams of others down, and never stops them; and among the pieces jobs take turns. Tokens get half of the
time, and less where more jobs wait for a piece than write, each as much as the other, down to a quarter: who has read
soon writes in one batch with the others, which costs less than to write alone first.

Jobs of background requests stand back (`admission.py`): their pieces are done where no other job has anything to do,
and their tokens are read then, or along with those of others where that takes no call of its own.

Streams of MLX are thread-local: an evaluated array may be used on any thread, a lazy one only here.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from types import TracebackType
from typing import Any, Final, TypeVar

import mlx.core as mx

from ...snapshot.state import LiveState
from ..errors import GenerationFailed, ServiceClosed
from .admission import Request, current
from .cancellation import settled
from .decoding import Decode, Decoder, lost

Result = TypeVar("Result")


class Soon:
    """What a step yields that is nearly done: the next piece before those of others that wait for their turn."""


SOON: Final = Soon()
Steps = Generator[Soon | None, None, Result]
WritingSteps = Generator[Decode, mx.array, Result]
AnySteps = Steps[Result] | WritingSteps[Result]

MOST_PIECES_TO_TOKENS: Final = 3.0
"""How much of the thread's time pieces get at most to that of tokens, however many wait for one."""

_MOST_LEAD_S: Final = 10.0
"""How far ahead pieces may come: after one that took an hour, as where the process was stopped in it, the others do not
wait for an hour."""

_MOST_OWED_S: Final = 0.05
"""How much time pieces may be owed after a round of tokens: so much, and the piece in which it ends, is the longest gap
of a stream. Without a bound, one round that took a second would let three reads have three of them."""


class _Job:
    """Steps with the future that waits for their result, on the loop where it waits.

    decode: what they wait for; None where they wait for their turn. outcome: what came of it. writes: the state that
    they are writing to. settlement: how they ended, value and error.
    request: whose they are. passed_s: what the engine's `_ahead_s` was when they last did not stand back.
    """

    __slots__ = (
        "begins_writing",
        "cancelled",
        "decode",
        "future",
        "is_soon",
        "loop",
        "outcome",
        "passed_s",
        "request",
        "settlement",
        "steps",
        "writes",
    )

    def __init__(self, steps: AnySteps[Any], loop: asyncio.AbstractEventLoop, *, begins_writing: bool) -> None:
        self.steps: Generator[Decode | Soon | None, Any, Any] = steps
        self.is_soon = False
        self.loop = loop
        self.begins_writing = begins_writing
        self.request: Request = current()
        self.request.waits = True
        self.passed_s = 0.0
        self.future: asyncio.Future[Any] = loop.create_future()
        self.cancelled = False
        self.decode: Decode | None = None
        self.outcome: mx.array | BaseException | None = None
        self.writes: LiveState | None = None
        self.settlement: tuple[object, BaseException | None] | None = None

    def advance(self) -> None:
        """Do one piece, given what came of the token that was waited for; to the end if that was the last one."""
        try:
            if self.cancelled and self.outcome is None:  # a token that has been read is committed before
                self.steps.close()
                self.settlement = None, None
            elif isinstance(self.outcome, BaseException):
                self._ask(self.steps.throw(self._taken()))
            else:
                self._ask(self.steps.send(self._taken()))
            self.writes = self.decode.state if self.decode is not None else self.writes
        except StopIteration as end:
            self.settlement = end.value, None
        except BaseException as error:  # noqa: BLE001 - whatever a step raises belongs to its caller, not to the engine
            # A SystemExit out of a model's code must end that request, not the event loop that waits for it.
            failure = error if isinstance(error, Exception) else RuntimeError(f"A step ended with {error!r}.")
            self.settlement = None, error.with_traceback(_below(error)) if failure is error else failure

    def _ask(self, what: Decode | Soon | None) -> None:
        self.decode = what if isinstance(what, Decode) else None
        self.is_soon = what is SOON

    def _taken(self) -> Any:
        outcome, self.outcome = self.outcome, None
        return outcome

    def settle(self) -> None:
        """Tell the waiting caller. An error has the frames of the engine, and these have the job, so it must not
        have it."""
        assert self.settlement is not None
        self.loop.call_soon_threadsafe(_deliver, self.future, *self.settlement)
        del self.settlement, self.future


def _deliver(future: asyncio.Future[Any], value: object, error: BaseException | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(value)


def _below(error: BaseException) -> TracebackType | None:
    """Where an error was raised, without the frame that caught it: it has the job, and the job the error."""
    return error.__traceback__ and error.__traceback__.tb_next


def _pieces_to_tokens(turns: Sequence[_Job], writing: Sequence[_Job]) -> float:
    """Seconds that pieces get for each of tokens."""
    return min(MOST_PIECES_TO_TOKENS, max(1.0, len(turns) / len(writing)))


class Engine:
    """Runs steps on a thread of its own until `stop`.

    decoder: who reads the tokens of those that write. clock: seconds, by which the thread is shared.
    """

    def __init__(self, decoder: Decoder | None = None, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._decoder = decoder or Decoder()
        self._clock = clock
        self._turns: deque[_Job] = deque()
        self._writing: list[_Job] = []
        self._lead_s = 0.0  # by how much pieces have had more than their share of the time
        self._ahead_s = 0.0  # the time of all that was done before those that stand back
        self._inbox: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="torpor-engine", daemon=True)
        self._thread.start()

    async def run(self, steps: AnySteps[Result], *, writes: bool = False) -> Result:
        """The result of the steps, which run on the engine thread, taking turns with those of others.

        writes: they ask for a token at once, so they begin with the next round of tokens, before work that waits.

        When the awaiting task is cancelled, the steps are closed at their next yield, and only then does the
        cancellation go on.

        Raises:
            ServiceClosed: the engine has been stopped.
        """
        if self._stopped:
            steps.close()
            raise ServiceClosed("The daemon is stopping; try again when it is back.")
        job = _Job(steps, asyncio.get_running_loop(), begins_writing=writes)
        future = job.future
        self._inbox.put(job)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            job.cancelled = True
            await settled(future)
            raise
        finally:
            del job, future  # the error, whose frames have this one, would hold itself

    async def call(self, function: Callable[[], Result]) -> Result:
        """The result of one short function, run on the engine thread between the steps of others."""

        def steps() -> Steps[Result]:
            yield from ()  # makes this a generator, of one piece
            return function()

        return await self.run(steps())

    def release(self, state: LiveState) -> None:
        """Have a state's caches out of a batch for now; for what runs on the engine thread and reads them."""
        self._decoder.release([state])

    @property
    def batched_tokens(self) -> int:
        """Tokens that sessions have read beside each other, in one model call."""
        return self._decoder.batched_tokens

    def stop(self) -> None:
        """Let the jobs at hand finish, then end the thread. Idempotent."""
        if not self._stopped:
            self._stopped = True
            self._inbox.put(None)
        self._thread.join()

    def _run(self) -> None:
        accepting = True
        while accepting or self._turns or self._writing:
            accepting = self._take_in(accepting=accepting)
            self._do_next()
        # Without this as the thread's last act, the interpreter aborts at exit in some runs.
        mx.clear_streams()

    def _do_next(self) -> None:
        """One piece, or one round of tokens: of those that do not stand back, as long as there are any."""
        ahead = {job for job in (*self._turns, *self._writing) if not self._stands_back(job)}
        turns = [job for job in self._turns if not ahead or job in ahead]
        writing = [job for job in self._writing if not ahead or job in ahead]
        for job in (*self._turns, *self._writing):
            job.request.waits |= bool(ahead) and job not in ahead
        if not (turns and writing):
            self._lead_s = 0.0
        begun = self._clock()
        if writing and (not turns or self._lead_s > 0):
            served = self._decode_round(writing)
            taken = self._clock() - begun
            self._lead_s -= taken * _pieces_to_tokens(turns, writing)
        elif turns:
            served = self._do_piece(turns[0])
            taken = self._clock() - begun
            self._lead_s += taken
        else:
            return
        self._lead_s = max(-_MOST_OWED_S, min(_MOST_LEAD_S, self._lead_s))
        for job in served:
            job.request.stood_back_s += self._ahead_s - job.passed_s
            job.passed_s = self._ahead_s + (taken if ahead else 0.0)
        self._ahead_s += taken if ahead else 0.0

    def _stands_back(self, job: _Job) -> bool:
        return not job.cancelled and job.request.stands_back(self._ahead_s - job.passed_s)

    def _do_piece(self, job: _Job) -> list[_Job]:
        for other in self._turns:
            other.request.waits = other is not job
        self._turns.remove(job)
        job.advance()
        self._sort([job])
        return [job]

    def _decode_round(self, chosen: Sequence[_Job]) -> list[_Job]:
        """One token for each of the chosen, and for others that can be read along; all these are the result."""
        for job in chosen:
            job.request.waits = False
        beginning = [job for job in self._writing if job.decode is None]
        for job in beginning:
            self._writing.remove(job)
            job.advance()
        self._sort(beginning)
        jobs = [job for job in self._writing if job in chosen]
        others = [job for job in self._writing if job not in chosen]
        given_up = [job for job in jobs if job.cancelled]
        going_on = [job for job in jobs if not job.cancelled]
        self._release(given_up)
        served = self._read(going_on, others if going_on else [])
        done = [*given_up, *served]
        self._writing = [job for job in self._writing if job not in done]
        for job in done:
            job.advance()
        self._sort(done)
        return served

    def _read(self, jobs: Sequence[_Job], others: Sequence[_Job]) -> list[_Job]:
        """Have their tokens read, those of the others where that can be done along; whose were read."""
        served = []
        asked, along = [[job.decode for job in each if job.decode is not None] for each in (jobs, others)]
        for job, outcome in zip((*jobs, *others), self._decoded(asked, along), strict=True):
            if outcome is not None:
                job.outcome, job.request.waits = outcome, False
                served.append(job)
            del outcome  # an error, whose frames have this one, would hold itself
        return served

    def _decoded(self, asked: Sequence[Decode], along: Sequence[Decode]) -> Sequence[mx.array | BaseException | None]:
        try:
            return self._decoder.decode(asked, along)
        except BaseException as error:  # noqa: BLE001 - whatever it is, it must not end the thread that all depend on
            why = f"{type(error).__name__}: {error}"
        return [
            GenerationFailed(f"The engine could not decode: {why}.", position=len(each.state.tokens))
            for each in (*asked, *along)
        ]

    def _sort(self, jobs: Sequence[_Job]) -> None:
        """Where each goes from here. Who has ended is told when its state is its own again."""
        self._release([job for job in jobs if job.settlement is not None or job.decode is None])
        for job in jobs:
            if job.settlement is not None:
                if job.writes is not None and job.writes.is_lost:  # what it wrote is nowhere any more
                    job.settlement = None, lost(job.writes)
                job.settle()
            elif job.decode is not None:
                self._writing.append(job)
            elif job.is_soon:
                self._turns.appendleft(job)
            else:
                self._turns.append(job)

    def _release(self, jobs: Sequence[_Job]) -> None:
        if states := [job.writes for job in jobs if job.writes is not None]:
            self._decoder.release(states)

    def _take_in(self, *, accepting: bool) -> bool:
        """Move what has arrived to the end of the turn; wait only when there is nothing to do."""
        while accepting:
            try:
                job = self._inbox.get(block=not self._turns and not self._writing)
            except queue.Empty:
                break
            if job is None:
                return False
            job.passed_s = self._ahead_s
            (self._writing if job.begins_writing else self._turns).append(job)
        return accepting
