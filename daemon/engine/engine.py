"""The one thread that owns MLX.

Work comes as *steps*: a generator that does a bounded piece (one prefill chunk) between two yields. To generate, it
yields a `Decode` with the next token for its state, and is sent the logits. The engine decodes the tokens of all
generating jobs in one round, as a batch where it can. A job whose caller leaves is closed at its next yield, where its
state is consistent by construction. The caller waits for that, so only the engine touches the session until then.

Rounds of tokens and pieces of other work share the thread by time: a long prefill slows the streams of others down and
never stops them. Pieces of different jobs take turns. Tokens get half of the time. If more jobs wait for a piece than
generate, all jobs get equal shares, but tokens at least a quarter: a job that ends its prefill soon joins the batch of
the others, which costs less than generating alone first.

Jobs of background requests stand back (`admission.py`): their pieces run when no other job has work. Their tokens are
decoded then, or in a batch of others where that needs no extra model call.

Streams of MLX are thread-local: an evaluated array may be used on any thread, a lazy one only here.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Any, Final, TypeVar

import mlx.core as mx

from ...snapshot.state import LiveState
from ..errors import GenerationFailed, ServiceClosed
from ..models.grammars import roomy_stack
from ..tasks.cancellation import settled
from .admission import Request, current
from .asking import Decode
from .decoding import Decoder, lost

Result = TypeVar("Result")


class Soon:
    """A step that is nearly done yields this: its next piece comes before those of other waiting jobs."""


SOON: Final = Soon()
Steps = Generator[Soon | None, None, Result]
WritingSteps = Generator[Decode | None, mx.array, Result]
AnySteps = Steps[Result] | WritingSteps[Result]

MOST_PIECES_TO_TOKENS: Final = 3.0
"""The most seconds that pieces get for each second of tokens, however many jobs wait."""

_MOST_LEAD_S: Final = 10.0
"""The most lead of pieces: after a piece of an hour, in a stopped process, other pieces do not wait for an hour."""

_MOST_OWED_S: Final = 0.05
"""The most time owed to pieces after a round of tokens. The longest gap of a stream is this and the last piece begun in
it. Without it, after a round of one second three prefills could run for three seconds."""


class _Job:
    """Steps, and the future and event loop that wait for their result.

    decode: the token they wait for; None while they wait for their turn. outcome: its result. writes: the state that
    they generate on. settlement: their end, value and error.
    request: their request. passed_s: the engine's `_ahead_s` when they last did not stand back.
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
        """Do one piece with the outcome of the awaited token; go on to the end after the last token."""
        try:
            if self.cancelled and self.outcome is None:  # a token that was read is committed first
                self.steps.close()
                self.settlement = None, None
            elif isinstance(self.outcome, BaseException):
                self._ask(self.steps.throw(self._taken()))
            else:
                self._ask(self.steps.send(self._taken()))
            self.writes = self.decode.state if self.decode is not None else self.writes
        except StopIteration as end:
            self.settlement = end.value, None
        except BaseException as error:  # noqa: BLE001 - an error of a step belongs to its caller, not to the engine
            self.settlement = None, _failure_of(error)

    def _ask(self, what: Decode | Soon | None) -> None:
        self.decode = what if isinstance(what, Decode) else None
        self.is_soon = what is SOON

    def _taken(self) -> Any:
        outcome, self.outcome = self.outcome, None
        return outcome

    def settle(self) -> None:
        """Give the caller the result. The job must not keep the error: its frames refer to the job."""
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


def _failure_of(error: BaseException) -> Exception:
    """What the caller is told. Its traceback is without the catching frame: that refers to the job, and the job to the
    error. That frame has no name for the failure either: from Python 3.12 on the steps' frames refer to it."""
    if not isinstance(error, Exception):  # a SystemExit of a model's code must not end the event loop that waits
        return RuntimeError(f"A step ended with {error!r}.")
    return error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)


def _pieces_to_tokens(turns: Sequence[_Job], writing: Sequence[_Job]) -> float:
    """Seconds of pieces for each second of tokens."""
    return min(MOST_PIECES_TO_TOKENS, max(1.0, len(turns) / len(writing)))


class Engine:
    """Runs steps on a thread of its own until `stop`.

    decoder: decodes the tokens of generating jobs. clock: seconds, by which jobs share the thread.
    """

    def __init__(self, decoder: Decoder | None = None, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._decoder = decoder or Decoder()
        self._clock = clock
        self._turns: deque[_Job] = deque()
        self._writing: list[_Job] = []
        self._lead_s = 0.0  # seconds that pieces have had beyond their share
        self._ahead_s = 0.0  # seconds of work done before the jobs that stand back
        self._inbox: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="torpor-engine", daemon=True)
        with roomy_stack():  # it walks grammars
            self._thread.start()

    async def run(self, steps: AnySteps[Result], *, writes: bool = False) -> Result:
        """Run steps on the engine thread, in turns with others, and give their result.

        writes: the steps ask for a token at once, so they join the next round of tokens, before waiting pieces.

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
        """Take a state's caches out of a batch for now; for code on the engine thread that reads them."""
        self._decoder.release([state])

    @property
    def batched_tokens(self) -> int:
        """Tokens decoded in batches: several sessions in one model call."""
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
        """Do one piece or one round of tokens, of jobs that do not stand back while there are any."""
        ahead = {job for job in (*self._turns, *self._writing) if not self._stands_back(job)}
        turns = [job for job in self._turns if not ahead or job in ahead]
        writing = [job for job in self._writing if not ahead or job in ahead]
        for job in (*self._turns, *self._writing):
            job.request.waits |= bool(ahead) and job not in ahead
        if not (turns and writing):
            self._lead_s = 0.0
        start = self._clock()
        if writing and (not turns or self._lead_s > 0):
            served = self._decode_round(writing)
            seconds = self._clock() - start
            self._lead_s -= seconds * _pieces_to_tokens(turns, writing)
        elif turns:
            served = self._do_piece(turns[0])
            seconds = self._clock() - start
            self._lead_s += seconds
        else:
            return
        self._lead_s = max(-_MOST_OWED_S, min(_MOST_LEAD_S, self._lead_s))
        for job in served:
            job.request.stood_back_s += self._ahead_s - job.passed_s
            job.passed_s = self._ahead_s + (seconds if ahead else 0.0)
        self._ahead_s += seconds if ahead else 0.0

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
        """Decode one token for each chosen job, and for others that fit the batch; returns all of these."""
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
        """Decode their tokens, and those of others that fit the batch. Returns the jobs that were decoded."""
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
        except BaseException as error:  # noqa: BLE001 - no error may end the thread that all jobs need
            why = f"{type(error).__name__}: {error}"
        return [
            GenerationFailed(f"The engine could not decode: {why}.", position=len(each.state.tokens))
            for each in (*asked, *along)
        ]

    def _sort(self, jobs: Sequence[_Job]) -> None:
        """Put each job in its next queue. A job that has ended gets its result once its state is out of the batch."""
        self._release([job for job in jobs if job.settlement is not None or job.decode is None])
        for job in jobs:
            if job.settlement is not None:
                if job.writes is not None and job.writes.is_lost:  # the state that it wrote is gone
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
        """Append new jobs to the queue of turns; wait only when there is no work."""
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
