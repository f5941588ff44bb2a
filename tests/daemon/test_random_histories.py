"""A session to which anything happens, in any order, is bit for bit one that never sleeps.

T11, BR26, QX7, QC9, MS2, MS4. The other tests of exactness each try one thing; here one thing comes behind another, as
it does in a life: a reading that fails behind a wake at an earlier token, a sleep behind a cancellation, and so on. A
seed gives the whole history; whatever is found tells it with all that was done until then, so that it happens again.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import random
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from torpor.daemon.engine import generation
from torpor.daemon.engine.engine import Steps
from torpor.daemon.engine.generation import WriteOrder, Written
from torpor.daemon.errors import GenerationFailed
from torpor.daemon.models.models import LoadedModel
from torpor.snapshot.caches import can_truncate, truncate
from torpor.snapshot.checkpoints import DEFAULT_BUDGET_BYTES
from torpor.snapshot.kinds import leaves
from torpor.snapshot.state import LiveState
from torpor.tests.daemon.session_rig import SAMPLED, Fingerprint, Rigged, fingerprint_of, given_up

KINDS = [
    "qwen3",  # cut by token
    "quantised",
    "longcat_flash_ngram",
    "minimax_m3_vl",
    "gemma3_text",  # windows beside plain caches
    "llama4",  # chunks
    "lfm2",  # recurrences beside plain caches
    "falcon_h1",
    "recurrent_gemma",  # recurrences and windows
    "mamba2",  # recurrences alone
    "deepseek_v41",  # windows, pooled groups, and what is open of one
]
SESSION = "s"
CONTEXT_TOKENS = 2000  # of the 2,048 of the models; behind LONG_TOKENS a history goes back
LONG_TOKENS = 1900
# Behind the first checkpoint, so that wakes have one to go on from; in calls that begin and end inside of blocks, so
# that one that is cut at an earlier token may compute other bits than lie in a full block.
FIRST_READINGS = (46, 554)
# Around windows (32), groups of them, blocks (256), and the distances of checkpoints.
EDGES = (1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 255, 256, 257, 511, 512, 513, 767, 768, 1023, 1024, 1025, 1536)
READINGS = (1, 1, 2, 3, 5, 16, 31, 32, 33, 60, 64, 65, 100, 255, 256, 257)
WRITINGS = (1, 2, 7, 30, 70)
CALLS = (1, 1, 2, 2, 3, 5)
TROUBLES = ("given up", "failing before", "failing after", "giving NaN", "failing in a layer")


class History:
    """What happens to one session, drawn at random, and beside it a control: a state that never sleeps.

    versions: what the control was when each version was made. log: what has happened.
    """

    control: LiveState

    def __init__(self, rig: Rigged, seed: int) -> None:
        self.rig = rig
        self.versions: dict[int, LiveState] = {}
        self.log: list[str] = []
        self._is_look = False  # at an earlier token or version, since when nothing has been read or written
        self._seed = seed
        self._chance = random.Random(seed)
        self._deeds: dict[Callable[[], Awaitable[None]], int] = {
            self._read: 5,
            self._write: 4,
            self._read_in_trouble: 4,
            self._write_in_trouble: 3,
            self._sleep_and_wake: 5,
            self._wake_earlier: 4,
            self._sleep: 1,
        }

    @property
    def live(self) -> LiveState:
        """The session's state in memory."""
        return self.rig.live(SESSION).state

    async def begin(self, *readings: int) -> None:
        """A new session that has read so many tokens at a time."""
        with self._telling():
            await self.rig.service.create(SESSION, sampling=SAMPLED)
            key = self.live.random_key
            self.control = await self._on_engine(lambda: self.rig.model.new_state(key))
            for count in readings:
                await self._read(count=count)
                await self._compare()

    async def go_on(self, operations: int) -> None:
        """That many things happen; after each of them the session is the control, and at last every version still is
        what it was made of."""
        with self._telling():
            for _ in range(operations):
                await self._next_deed()()
                await self._compare()
            await self._wake_every_version()

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        """Whatever is found is told with what happened until then."""
        try:
            yield
        except Exception as error:
            error.add_note(f"seed {self._seed}: {'; '.join(self.log)}")
            raise

    def _next_deed(self) -> Callable[[], Awaitable[None]]:
        if len(self.control.tokens) > LONG_TOKENS:
            return self._wake_earlier
        return self._chance.choices(list(self._deeds), list(self._deeds.values()))[0]

    # --- what happens

    async def _read(self, trouble: str | None = None, count: int = 0) -> None:
        before = len(self.control.tokens)
        drawn = self._chance.choice((*READINGS, self._chance.randint(1, 300), self._chance.randint(1, 700)))
        tokens = self._chance.choices(range(256), k=min(count or drawn, CONTEXT_TOKENS - before))
        self.log.append(f"read {len(tokens)} {trouble or ''}".strip())
        await self._ask(lambda: self.rig.service.append(SESSION, tokens=tokens), trouble)
        if len(self.live.tokens) > before:  # then all of them (QX7), or the two will differ
            self._is_look = False
            await self._control_does(generation.read(self.rig.model, self.control, tokens, lambda *_: None))

    async def _write(self, trouble: str | None = None) -> None:
        before = len(self.control.tokens)
        count = min(self._chance.choice(WRITINGS), CONTEXT_TOKENS - before)
        self.log.append(f"write {count} {trouble or ''}".strip())
        await self._ask(lambda: self.rig.service.generate(SESSION, max_tokens=count), trouble)
        written = len(self.live.tokens) - before  # what was committed before it failed stays (QC9)
        assert 0 <= written <= count
        assert trouble or written == count
        self._is_look &= not written
        order = WriteOrder(written, SAMPLED)
        await self._control_does(generation.write(self.rig.model, self.control, order, Written(), lambda *_: None))

    async def _read_in_trouble(self) -> None:
        await self._read(self._chance.choice(TROUBLES))

    async def _write_in_trouble(self) -> None:
        await self._write(self._chance.choice(TROUBLES))

    async def _sleep(self) -> None:
        """Where it is awake. Whoever asks it for something wakes it."""
        if not self.rig.is_awake(SESSION):
            return
        self.log.append(f"sleep at {len(self.control.tokens)}")
        receipt = await self.rig.sleep(SESSION)
        if self._is_look:  # which makes no version: the session is again what its last one is
            assert receipt.version in self.versions
            self._is_look = False
            self.control = self.versions[max(self.versions)]
        held = self.control
        if receipt.version not in self.versions:
            assert receipt.token_count == len(held.tokens)
            self.versions[receipt.version] = held
        self.control = await self._on_engine(lambda: copy.deepcopy(held))

    async def _sleep_and_wake(self) -> None:
        await self._sleep()
        report = await self._wake()
        assert (report.tokens_prefilled, report.canary) == (0, "same_bits")

    async def _wake_earlier(self) -> None:
        """One of the last versions, at any of its tokens (MS2, MS4)."""
        await self._sleep()
        two = self._chance.choices(list(self.versions)[-4:], k=2)
        version = max(two, key=lambda each: len(self.versions[each].tokens))  # else histories stay short
        whole = self.versions[version]
        at = self._earlier_than(len(whole.tokens))
        await self._wake(version=version, at_token=at)
        self.control = await self._on_engine(lambda: taken_back(self.rig.model, whole, at))
        is_cut = at < len(whole.tokens)
        self._is_look = is_cut or version != max(self.versions)
        if is_cut:
            self.control.random_key = self.live.random_key  # only where a record is does the session have its key
            await self._compare()
            if self._chance.random() < 0.7:  # else it is forgotten, and what was computed again is never kept
                await self._write()

    def _earlier_than(self, count: int) -> int:
        """Some token of that many: as often a late one as any, so that there often are checkpoints before it."""
        edges = [edge for edge in EDGES if edge <= count]
        drawn = (self._chance.choice(edges), self._chance.choice(edges[-4:]), self._chance.randint(1, count))
        return self._chance.choice((*drawn, max(1, count - 1), count))

    async def _wake(self, **order: int) -> Any:
        self.log.append(" ".join(["wake", *(f"{name}={number}" for name, number in order.items())]))
        report = await self.rig.wake(SESSION, **order)
        assert report.canary in ("same_bits", "not_run")
        return report

    async def _wake_every_version(self) -> None:
        await self._sleep()
        for version, control in list(self.versions.items()):
            await self._wake(version=version)
            self.control = control
            await self._compare()
            await self.rig.sleep(SESSION)

    # --- how it is asked for and what it comes to

    async def _ask(self, request: Callable[[], Awaitable[Any]], trouble: str | None) -> None:
        """Make a request of the session, in some trouble or in none. It may be over before the trouble comes."""
        if trouble is None:
            await request()
            return
        if not self.rig.is_awake(SESSION):
            await self._wake()
        self.rig.network.reset()
        call = self._chance.choice(CALLS)
        with contextlib.suppress(GenerationFailed, asyncio.CancelledError), self._breaking(trouble, call):
            await (given_up(self.rig, request(), call) if trouble == "given up" else request())

    @contextlib.contextmanager
    def _breaking(self, trouble: str, call: int) -> Iterator[None]:
        """The model breaks at its call of that number; one of its layers, at its own."""
        network = self.rig.network
        able = [cache for _, cache in leaves(self.live.caches) if hasattr(cache, "update_and_fetch")]
        layer = self._chance.choice(able) if able else None
        try:
            if trouble == "failing before":
                network.before = lambda now, *_: fail_at(call, now)
            elif trouble == "failing after":
                network.after = lambda now, logits: fail_at(call, now) or logits
            elif trouble == "giving NaN":
                network.after = lambda now, logits: logits * float("nan") if now >= call else logits
            elif trouble == "failing in a layer" and layer:
                layer.update_and_fetch = failing_at(call, layer.update_and_fetch)
            yield
        finally:
            network.reset()
            if layer:
                vars(layer).pop("update_and_fetch", None)

    async def _compare(self) -> None:
        """What the session holds, where it is awake, is what the control holds."""
        if not self.rig.is_awake(SESSION):
            return
        live, control = self.live, self.control
        one_span = live.is_consistent
        assert one_span, "ledger, caches and passes describe different spans"
        assert list(live.passes) == list(control.passes), "read in other calls than the control"
        found, wanted = await self._on_engine(lambda: (fingerprint_of(live), fingerprint_of(control)))
        names = [field.name for field in dataclasses.fields(Fingerprint)]
        assert [name for name in names if getattr(found, name) != getattr(wanted, name)] == []

    async def _control_does(self, steps: Steps[None]) -> None:
        await self.rig.service._parts.models.engine.run(steps)  # which decodes what they write

    async def _on_engine(self, function: Callable[[], Any]) -> Any:
        return await self.rig.service._parts.models.engine.call(function)


def drain(steps: Steps[None]) -> None:
    for _ in steps:
        pass


def fail_at(call: int, now: int) -> None:
    if now == call:
        raise RuntimeError("the model broke")


def failing_at(call: int, update: Callable[..., Any]) -> Callable[..., Any]:
    """An update of a cache that fails at its call of that number: the layers before it have grown by then."""
    calls = iter(range(1, 10**6))

    def failing(*arguments: Any, **options: Any) -> Any:
        fail_at(call, next(calls))
        return update(*arguments, **options)

    return failing


def taken_back(model: LoadedModel, whole: LiveState, at: int) -> LiveState:
    """A control of its first `at` tokens: cut back where its caches can be, and else read from nothing, in the calls
    that had read it."""
    if at == len(whole.tokens):
        return copy.deepcopy(whole)
    if not can_truncate(whole.caches, at):
        state = model.new_state(whole.random_key)
        drain(generation.replay(model, state, whole.tokens[:at], list(whole.passes.between(0, at))))
        return state
    state = copy.deepcopy(whole)
    truncate(state.caches, at)
    del state.tokens[at:]
    state.passes = state.passes.cut_back(at)
    generation.find_logits(model, state)
    return state


# --- the tests


@pytest.fixture(autouse=True)
def _same_chunks_on_every_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "PREFILL_CHUNK_TOKENS", 256)


@pytest.mark.parametrize("seed", [3])
@pytest.mark.one_in(11)
@pytest.mark.parametrize("kind", KINDS)
async def test_whatever_happens_to_a_session_it_is_one_that_never_slept_t11(
    open_kind: Any, kind: str, seed: int
) -> None:
    async with open_kind(kind) as rig:
        history = History(rig, seed)
        await history.begin(*FIRST_READINGS)
        await history.go_on(45)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("seed", [3])
async def test_so_it_is_where_checkpoints_are_let_go_for_want_of_room(open_kind: Any, seed: int) -> None:
    async with open_kind("recurrent_gemma") as rig:
        make_room_for_one_checkpoint(rig)
        history = History(rig, seed)
        await history.begin(1300)
        assert history.live.checkpoints.positions == (1024,), "the distance has doubled"
        await history.go_on(45)


@pytest.mark.heavy
@pytest.mark.timeout(0)
@pytest.mark.parametrize("seed", [1, 2, 4])
@pytest.mark.parametrize("kind", KINDS)
async def test_so_it_is_after_many_more_things(open_kind: Any, kind: str, seed: int) -> None:
    async with open_kind(kind) as rig:
        history = History(rig, seed)
        await history.begin(*FIRST_READINGS)
        await history.go_on(250)


def make_room_for_one_checkpoint(rig: Rigged) -> None:
    """The records of the model count as so large that the budget of a session holds one."""
    model = rig.model
    first, *others = model.layout.entries
    larger = dataclasses.replace(first, record_bytes=DEFAULT_BUDGET_BYTES * 2 // 3)
    layout = dataclasses.replace(model.layout, entries=(larger, *others))
    rig.model = dataclasses.replace(model, layout=layout)
