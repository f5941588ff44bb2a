"""Which thread does what in a sleep and a wake, and what they leave when they fail half-way."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torpor.daemon.errors import ContextOverflow, InvalidTokens
from torpor.daemon.versions import writing
from torpor.errors import TorporError
from torpor.memvid.disk.durable import TempFile
from torpor.memvid.errors import BlockMissing, Corruption, NoSpace, ReadBackFailed, StoreIoError
from torpor.memvid.store import Store
from torpor.snapshot import memory, restore
from torpor.snapshot.capture import StateSource
from torpor.snapshot.memory import SpanSource
from torpor.snapshot.restore import Filling
from torpor.snapshot.state import LiveState
from torpor.tests.daemon.session_rig import (
    UNREADABLE,
    Gate,
    Rigged,
    broken_at,
    flip,
    hold_calls,
    make_unreadable,
    tokens_of,
    until,
)


async def test_mlx_is_touched_on_the_engine_thread_alone_and_disks_on_others(
    open_rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, str] = {}

    def note(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def noting(*args: Any, **options: Any) -> Any:
            seen[name] = threading.current_thread().name.rstrip("_0123456789")
            return original(*args, **options)

        monkeypatch.setattr(owner, name, noting)

    note(writing, "cut")
    note(Store, "write_bundle")
    note(Store, "open_session")
    note(restore, "plan_wake")
    note(restore, "allocate")
    note(restore.Filling, "run")
    note(restore.Filling, "_fill_spans")
    note(restore.Filling, "assemble")
    async with open_rig() as rig:
        await rig.woken("a", tokens_of(1, 300))
    assert seen == {
        "cut": "torpor-engine",
        "write_bundle": "torpor-write",
        "open_session": "asyncio",
        "plan_wake": "asyncio",
        "allocate": "torpor-engine",
        "run": "asyncio",
        "_fill_spans": "torpor-fill",
        "assemble": "torpor-engine",
    }


async def held_write(rig: Rigged, monkeypatch: pytest.MonkeyPatch) -> tuple[asyncio.Task[Any], Gate]:
    """A sleep of session a that stands between its cut and its writing."""
    gate = hold_calls(monkeypatch, Store, "write_bundle")
    sleeping = asyncio.ensure_future(rig.sleep("a"))
    await gate.reached()
    return sleeping, gate


async def test_others_generate_while_a_session_is_being_written(rig: Rigged, monkeypatch: pytest.MonkeyPatch) -> None:
    await rig.read_each(("a", "b", "control"), tokens_of(1, 300))
    before = await rig.fingerprint("a")
    sleeping, gate = await held_write(rig, monkeypatch)
    assert await rig.write("b", 20) == await rig.write("control", 20)
    gate.open()
    await sleeping
    assert await rig.woken_fingerprint("a") == before


async def test_sleeps_that_wait_for_each_other_do_not_keep_a_wake_waiting(
    rig: Rigged, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rig.read_each(("a", "b", "c", "asleep"), tokens_of(1, 300))
    await rig.sleep("asleep")
    sleeping, gate = await held_write(rig, monkeypatch)
    waiting = [asyncio.ensure_future(rig.sleep(name)) for name in ("b", "c")]
    await asyncio.wait_for(rig.wake("asleep"), timeout=60)
    assert not sleeping.done()
    gate.open()
    await asyncio.gather(sleeping, *waiting)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("folder", ["versions", "packs"])
@pytest.mark.parametrize("damage", ["flipped", "gone", *UNREADABLE])
async def test_a_session_sleeps_even_if_what_it_would_refer_to_is_damaged_or_gone_or_not_to_be_read(
    rig: Rigged, store: Path, monkeypatch: pytest.MonkeyPatch, damage: str, folder: str
) -> None:
    """All of it is in memory: it is written anew, and wakes whole."""
    await rig.read_each(("a", "control"), tokens_of(1, 600))
    await rig.sleep("a")
    await rig.wake("a")
    (path,) = (store / folder).iterdir()
    if damage == "gone":
        path.unlink()
    elif damage in UNREADABLE:
        make_unreadable(path, damage, monkeypatch)
    else:
        flip(path, 20)
    for name in ("a", "control"):
        await rig.write(name, 3)
    receipt = await rig.sleep("a")
    assert receipt.token_count == 603
    if folder == "packs":
        assert receipt.blocks_reused == 0
    assert await rig.woken_fingerprint("a") == await rig.fingerprint("control")


async def test_a_disk_that_fails_to_write_is_asked_once(rig: Rigged, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what cannot be read is done without."""
    await rig.woken("a", tokens_of(1, 600))
    await rig.write("a", 3)
    asked: list[int] = []

    def fail(*_: Any) -> Any:
        asked.append(1)
        raise StoreIoError("Cannot write: input/output error.", errno=errno.EIO, action="write", path="x")

    with monkeypatch.context() as patched:
        patched.setattr(TempFile, "append", fail)
        with pytest.raises(StoreIoError):
            await rig.sleep("a")
    assert len(asked) == 1
    assert (await rig.sleep("a")).token_count == 603


@pytest.mark.parametrize("folder", ["versions", "packs"])
async def test_what_an_unchanged_session_relies_on_is_looked_at_before_its_memory_is_freed(
    rig: Rigged, store: Path, folder: str
) -> None:
    await rig.woken("a", tokens_of(1, 600))
    live = rig.live("a")
    assert await rig.service._parts.store.versions.is_kept(live)
    (path,) = (store / folder).iterdir()
    path.write_bytes(path.read_bytes()[:-1])
    assert not await rig.service._parts.store.versions.is_kept(live)
    path.unlink()
    assert not await rig.service._parts.store.versions.is_kept(live)


async def test_a_session_that_is_being_written_is_held_until_it_is_durable(
    rig: Rigged, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threat 50: a request that comes meanwhile waits, and then wakes what was written."""
    await rig.read_each(("a", "control"), tokens_of(1, 300))
    sleeping, gate = await held_write(rig, monkeypatch)
    writing = asyncio.ensure_future(rig.write("a", 5))
    await rig.write("control", 5)
    assert not writing.done()
    gate.open()
    await asyncio.gather(sleeping, writing)
    assert await rig.fingerprint("a") == await rig.fingerprint("control")


async def test_a_cut_belongs_to_its_moment_even_if_the_cache_went_on_gm12(
    rig: Rigged, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine writes on in the very cache whose cut is waiting for the disk; the bundle has the bytes of the cut."""
    await rig.read_each(("a", "control"), tokens_of(1, 300))
    sleeping, gate = await held_write(rig, monkeypatch)
    live = rig.live("a")

    def go_on() -> None:
        import mlx.core as mx

        rig.model.extend([1, 2, 3, 4, 5], live.state)
        mx.eval([cache.state[:2] for cache in live.state.caches])
        for cache in live.state.caches:
            cache.trim(290)
        rig.model.extend([9] * 20, live.state)
        mx.eval([cache.state[:2] for cache in live.state.caches])

    await rig.service._parts.models.engine.call(go_on)
    gate.open()
    assert (await sleeping).token_count == 300
    assert await rig.woken_fingerprint("a") == await rig.fingerprint("control")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("step", ["allocate", "assemble"])
async def test_memory_that_cannot_be_had_fails_the_wake_and_nothing_else_threat_59(
    rig: Rigged, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def fail(*_args: Any) -> Any:
        raise MemoryError("no memory left")

    await rig.read_each(("a", "b", "control"), tokens_of(1, 300))
    await rig.sleep("a")
    monkeypatch.setattr(restore if step == "allocate" else restore.Filling, step, fail)
    with pytest.raises(MemoryError):
        await rig.wake("a")
    monkeypatch.undo()
    assert not rig.is_awake("a")
    assert not rig.service._parts.store.disk._core.pins.blocks(), "the reader was closed"
    assert await rig.write("b", 20) == await rig.write("control", 20)
    assert (await rig.wake("a")).token_count == 300


async def test_progress_is_told_on_the_event_loop(rig: Rigged) -> None:
    await rig.read("a", tokens_of(1, 600))
    threads = set()
    for verb in (rig.service.sleep, rig.service.wake):
        await verb(session="a", on_event=lambda _: threads.add(threading.current_thread().name))
    assert threads == {"MainThread"}


async def test_a_wake_takes_no_turn_of_the_engine_but_two_short_ones(rig: Rigged) -> None:
    """Reading and hashing leave the engine to the sessions that write."""
    await rig.read_each(("a", "b"), tokens_of(1, 600))
    await rig.sleep("a")
    calls = 0
    run = rig.service._parts.models.engine.run

    async def counting(steps: Any) -> Any:
        nonlocal calls
        calls += 1
        return await run(steps)

    rig.service._parts.models.engine.run = counting  # type: ignore[method-assign]
    await rig.service.wake("a")
    assert calls == 2


@pytest.mark.parametrize(
    ("first", "tries"), [(BlockMissing("A block was deleted."), 2), (ReadBackFailed("It does not read back."), 1)]
)
async def test_a_first_sleep_whose_found_block_was_deleted_under_it_is_written_once_more(
    rig: Rigged, monkeypatch: pytest.MonkeyPatch, first: Corruption, tries: int
) -> None:
    asked: list[int] = []
    write = Store.write_bundle

    def refuse_first(store: Store, draft: Any) -> Any:
        asked.append(len(list(draft.blocks)) if not asked else 0)
        if len(asked) == 1:
            raise first
        return write(store, draft)

    await rig.read("a", tokens_of(1, 300))
    before = await rig.fingerprint("a")
    with monkeypatch.context() as patch:
        patch.setattr(Store, "write_bundle", refuse_first)
        if tries == 1:
            with pytest.raises(ReadBackFailed):
                await rig.sleep("a")
        else:
            assert (await rig.sleep("a")).version == 1
    assert len(asked) == tries
    await rig.sleep_and_wake("a")
    assert await rig.fingerprint("a") == before


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", ["plain", "gemma3_text", "lfm2"])
async def test_the_memory_of_a_session_is_free_as_soon_as_it_sleeps(open_kind: Any, kind: str) -> None:
    """Not only when a garbage collection comes by: a cycle of references, as a kept exception makes, would hold it."""
    async with open_kind(kind) as rig:
        with counting_states() as states:
            await rig.read("a", tokens_of(1, 300))
            for round_ in range(3):  # a first version, one that refers to it, and a wake that changed nothing
                await rig.sleep("a")
                await until(lambda: states() == 0)  # threads let go a moment after they have answered
                await rig.wake("a")
                await until(lambda: states() > 0)
                if round_ < 2:
                    await rig.write("a", 5, text="more")


@pytest.mark.parametrize("by", ["model", "disk"])
async def test_the_memory_of_a_wake_that_failed_is_free_once_its_error_has_been_told(
    rig: Rigged, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    def fill_some_and_fail(filling: Filling, *_args: Any, **_options: Any) -> None:
        raise ReadBackFailed(f"after {len(filling.plan.tokens)} bytes of tokens")

    await rig.asleep("a", tokens_of(1, 300))
    rig.network.reset()
    if by == "model":
        rig.network.fail_at(1)
    else:
        monkeypatch.setattr(Filling, "run", fill_some_and_fail)
    with counting_states() as states:
        code = await failing_wake(rig)
        await until(lambda: states() == 0)
        assert memory.granted_bytes() == 0, "nor is it kept from other wakes"
    assert code == ("generation_failed" if by == "model" else "read_back_failed")


async def failing_wake(rig: Rigged) -> str | None:
    try:
        await rig.wake("a")
    except TorporError as error:
        return error.code
    return None


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", ["plain", "gemma3_text", "lfm2"])
async def test_of_wakes_that_end_well_nothing_is_kept_from_others(
    open_kind: Any, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    granted = []
    grant = memory.grant

    def noted(size_bytes: int) -> memory.Grant:
        found = grant(size_bytes)
        granted.append((found, size_bytes))
        return found

    monkeypatch.setattr(memory, "grant", noted)
    async with open_kind(kind) as rig:
        for name in ("a", "b"):
            await rig.asleep(name, tokens_of(1, 300))
        await asyncio.gather(rig.wake("a"), rig.wake("b"))
        assert [size > 0 and found.unfilled_bytes for found, size in granted] == [0, 0], "each byte was told as filled"


async def failing_append(rig: Rigged) -> None:
    rig.network.reset()
    await broken_at(rig, 1, rig.service.append("a", tokens=[1, 2, 3]))
    rig.network.reset()


async def failing_generation(rig: Rigged) -> None:
    rig.network.reset()
    await broken_at(rig, 3, rig.write("a", 5))
    rig.network.reset()


async def refused_request(rig: Rigged) -> None:
    with pytest.raises(InvalidTokens):
        await rig.service.append("a", tokens=[10**6])
    with pytest.raises(ContextOverflow):
        await rig.write("a", 10**6)


async def failing_sleep(rig: Rigged) -> None:
    await rig.write("a", 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Store, "write_bundle", no_room)
        with pytest.raises(NoSpace):
            await rig.sleep("a")


def no_room(_store: Store, draft: Any) -> None:
    raise NoSpace(f"no room for {len(list(draft.blocks))} blocks")


@pytest.mark.one_in(5)
@pytest.mark.parametrize("fail", [failing_append, failing_generation, refused_request, failing_sleep])
@pytest.mark.parametrize("end", ["sleep", "delete"])
@pytest.mark.parametrize("kind", ["plain", "gemma3_text"])
async def test_what_failed_in_a_session_keeps_nothing_of_it_once_it_has_gone(
    open_kind: Any, fail: Callable[[Rigged], Awaitable[None]], end: str, kind: str
) -> None:
    """An error that holds a frame that holds it, as a job or a task has it, would keep gigabytes in an idle daemon."""
    async with open_kind(kind) as rig:
        with counting_states() as states:
            await rig.read("a", tokens_of(1, 300))
            await fail(rig)
            await (rig.sleep("a") if end == "sleep" else rig.service.delete("a"))
            await until(lambda: states() == 0)


@contextlib.contextmanager
def counting_states() -> Iterator[Callable[[], int]]:
    """How many new states, or views of one, something refers to, while no garbage collection is made."""

    def is_state(each: object) -> bool:
        known = type(each)
        return known in (LiveState, SpanSource, StateSource, Filling) or known.__module__ == "mlx_lm.models.cache"

    def found() -> list[Any]:
        return [each for each in gc.get_objects() if is_state(each)]

    gc.collect()
    others = found()
    known = {id(each) for each in others}
    gc.disable()
    try:
        yield lambda: sum(id(each) not in known for each in found())
    finally:
        gc.enable()
