"""Prefix reuse: a new session begins with what another has read, to the bit as if it had read it itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torpor.daemon.prefixes.reuse import _MOST_SOURCES, PrefixReuse, read_alike
from torpor.snapshot.passes import Passes
from torpor.snapshot.restore import Filling
from torpor.tests.daemon.session_rig import SAMPLED, Gate, Rigged, broken_at, cancelled, manifest_of, tokens_of

pytestmark = pytest.mark.usefixtures("short_calls")

KINDS = ["plain", "gemma3_text", "lfm2", "deepseek_v3"]
TEXT = tokens_of(1, 1300)


@pytest.fixture
def open_kind(open_kind: Any) -> Any:
    return partial(open_kind, prefix_reuse="exact")


async def read(rig: Rigged, name: str, tokens: list[int], **create: Any) -> Any:
    await rig.service.create(name, **create)
    return await rig.service.append(name, tokens=tokens)


async def control(open_kind: Callable[..., Any], kind: str, tokens: list[int]) -> tuple[Any, Any]:
    """What a session becomes that nobody read anything for, and what it writes."""
    async with open_kind(kind, prefix_reuse="off") as rig:
        assert (await read(rig, "x", tokens, sampling=SAMPLED)).cached_tokens == 0
        found = await rig.fingerprint("x"), await rig.write("x", 8)
        await rig.service.delete("x")
        return found


@pytest.fixture
def rig(open_rig: Any) -> Any:
    return open_rig(prefix_reuse="exact")


@pytest.mark.parametrize("where", ["awake", "asleep", "after a restart"])
@pytest.mark.one_in(12)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_session_that_found_a_prefix_is_to_the_bit_what_it_would_have_been(
    open_kind: Callable[..., Any], kind: str, where: str
) -> None:
    """QX1, MS5: keys, values, logits and all that is written from there; the source is as it was."""
    other = [*TEXT[:1100], *tokens_of(2, 300)]
    expected = await control(open_kind, kind, other)
    async with open_kind(kind) as rig:
        await rig.read("source", TEXT)
        before = await rig.fingerprint("source")
        if where != "awake":
            await rig.sleep("source")
        if where != "after a restart":
            await check(rig, other, expected, before)
    if where == "after a restart":
        async with open_kind(kind) as rig:
            await rig.service._parts.sessions.reuse.learned()
            await check(rig, other, expected, before)


async def check(rig: Rigged, other: list[int], expected: tuple[Any, Any], source: Any) -> None:
    found = await read(rig, "new", other, sampling=SAMPLED)
    assert found.cached_tokens in (512, 1024, 1088), "whole calls, and whole blocks where it comes from the store"
    assert found.cached_tokens + found.prefilled_tokens == found.tokens_added == len(other)
    assert await rig.fingerprint("new") == expected[0]
    assert await rig.write("new", 8) == expected[1]
    await rig.sleep_and_wake("new")
    assert await rig.woken_fingerprint("source") == source


@pytest.mark.one_in(2)
@pytest.mark.parametrize("asleep", [False, True])
async def test_qx6_of_a_text_that_is_known_whole_the_end_is_read_all_the_same(rig: Rigged, asleep: bool) -> None:
    await rig.read("a", TEXT)
    expected = await rig.fingerprint("a")
    if asleep:
        await rig.sleep("a")
    found = await read(rig, "b", TEXT)
    assert (found.cached_tokens, found.prefilled_tokens) == (1299, 1)
    status = await rig.service.status()
    assert (status.prefix_hits, status.prefix_misses, status.cached_tokens) == (1, 1, 1299)
    again = await rig.fingerprint("b")
    assert (again.tokens, again.kv, again.logits) == (expected.tokens, expected.kv, expected.logits)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("asleep", [False, True])
async def test_what_was_read_in_other_calls_is_taken_over_only_where_that_was_asked_for(
    open_rig: Any, asleep: bool
) -> None:
    for policy, cached in (("exact", 256), ("longest", 1299), ("off", 0)):
        async with open_rig(prefix_reuse=policy) as rig:
            await rig.read(policy, TEXT[:300], labels=(policy,))
            await rig.service.append(policy, tokens=TEXT[300:])
            if asleep:
                await rig.sleep(policy)
            assert (await read(rig, f"{policy}-2", TEXT)).cached_tokens == cached
            await rig.service.delete(policy)
            await rig.service.delete(f"{policy}-2")


@pytest.mark.one_in(2)
async def test_ms1_never_across_namespaces(rig: Rigged) -> None:
    await rig.read("torpor://mine/a", TEXT)
    assert (await read(rig, "torpor://yours/a", TEXT)).cached_tokens == 0
    assert (await read(rig, "torpor://mine/b", TEXT)).cached_tokens == 1299


@pytest.mark.one_in(2)
async def test_a_session_that_is_gone_or_damaged_is_no_source_and_no_error(rig: Rigged, store: Path) -> None:
    """GM8 in part: what was deleted is not found any more; what cannot be read is a miss."""
    await rig.read("a", TEXT)
    await rig.service.delete("a")
    assert (await read(rig, "b", TEXT)).cached_tokens == 0
    slept = await rig.sleep("b")
    manifest_of(store, slept.bundle_id).unlink()
    assert (await read(rig, "c", TEXT)).cached_tokens == 0
    assert (await read(rig, "d", TEXT)).cached_tokens == 1299


async def test_qc9_a_reading_that_fails_behind_a_prefix_leaves_the_session_empty(rig: Rigged) -> None:
    await rig.read("a", TEXT)
    await rig.service.create("b")
    await broken_at(rig, 1, rig.service.append("b", tokens=TEXT))
    rig.network.reset()
    assert not rig.live("b").state.tokens
    assert rig.live("b").state.is_consistent
    assert (await rig.service.append("b", tokens=TEXT)).cached_tokens == 1299


async def test_a_request_that_is_given_up_while_a_prefix_is_read_waits_for_the_threads_that_fill_memory(
    rig: Rigged, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, fill, ended = Gate(), Filling.run, []

    def hold_then_fill(*args: Any, **options: Any) -> None:
        gate.pass_through()
        fill(*args, **options)
        ended.append(True)

    await rig.asleep("a", TEXT)
    await rig.service.create("b")
    monkeypatch.setattr(Filling, "run", hold_then_fill)
    asking = asyncio.ensure_future(rig.service.append("b", tokens=TEXT))
    await gate.reached()
    asking.cancel()
    await asyncio.sleep(0)
    gate.open()
    await cancelled(asking)
    assert ended, "the file was closed under the thread that reads it"
    monkeypatch.undo()
    assert (rig.live("b").state.tokens.tolist(), rig.live("b").state.is_consistent) == ([], True)
    assert (await rig.service.append("b", tokens=TEXT)).cached_tokens == 1299


async def test_ms11_what_a_failed_reading_had_is_not_given_to_others(rig: Rigged) -> None:
    await rig.service.create("a")
    await broken_at(rig, 3, rig.service.append("a", tokens=TEXT))
    rig.network.reset()
    assert (await read(rig, "b", TEXT)).cached_tokens == 0


@pytest.mark.one_in(2)
async def test_lossy_sessions_are_no_sources(open_rig: Any, quantisable_model: Path) -> None:
    async with open_rig(quantisable_model, prefix_reuse="exact") as rig:
        await rig.asleep("a", TEXT)
        await rig.service.maintain(operation="quantize", session="a", bits=8)
        assert (await read(rig, "b", TEXT)).cached_tokens == 0
        assert (await rig.service.why("b")).requests[-1].not_taken == "other_bits"
        await rig.service.delete("b")
        await rig.wake("a")
        assert (await read(rig, "c", TEXT)).cached_tokens == 0


async def test_a_session_that_was_woken_at_an_earlier_token_gives_only_what_was_read_in_whole_calls(
    rig: Rigged,
) -> None:
    """Its last call was cut, so a new session of so many tokens would have read them in another one."""
    await rig.asleep("a", TEXT)
    await rig.wake("a", at_token=300)
    await rig.write("a", 3)
    await rig.sleep("a")
    assert (await read(rig, "b", [*TEXT[:300], *tokens_of(5, 1)])).cached_tokens == 256


@pytest.mark.one_in(2)
async def test_ms5_many_borrow_at_once_while_the_source_goes_on_and_goes(rig: Rigged) -> None:
    await rig.read("control", TEXT)
    expected = await rig.fingerprint("control")
    await rig.service.delete("control")
    await rig.read("source", TEXT)
    *found, _, _ = await asyncio.gather(
        *(read(rig, f"b{number}", TEXT) for number in range(8)), rig.write("source", 6), rig.service.delete("source")
    )
    assert {each.cached_tokens for each in found} <= {0, 1299}
    assert found[0].cached_tokens == 1299, "the first, at least, found the source there"
    for number in range(8):
        got = await rig.fingerprint(f"b{number}")
        assert (got.tokens, got.kv, got.logits) == (expected.tokens, expected.kv, expected.logits)


def test_reading_alike_ends_at_the_first_call_that_differs() -> None:
    passes = Passes()
    for size in (256, 256, 87, 1, 1):
        passes.add(size)
    alike = [(256, False), (256, False), (256, False), (31, False), (1, True)]
    assert read_alike(passes, iter(alike), 800) == 512
    assert read_alike(passes, iter(alike), 511) == 256
    assert read_alike(passes, iter([(255, False), (1, True)]), 256) == 0
    assert read_alike(passes, iter([(256, False)]), 601) == 256


async def test_what_is_deleted_while_its_ledger_is_learned_is_found_by_nobody(
    open_rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_rig(prefix_reuse="exact") as rig:
        await rig.asleep("a", TEXT, labels=["x"])
    gate, real = Gate(), PrefixReuse._ledger_of

    def held(*order: Any) -> bytes:
        ledger = real(*order)
        gate.pass_through()
        return ledger

    monkeypatch.setattr(PrefixReuse, "_ledger_of", held)
    async with open_rig(prefix_reuse="exact") as rig:
        await gate.reached()
        assert len((await rig.service.clear(label="x")).sessions) == 1
        gate.open()
        await rig.service._parts.sessions.reuse.learned()
        assert (len(rig.service._parts.sessions.reuse._tree), rig.service._parts.sessions.reuse._tree.node_count) == (
            0,
            0,
        )


@pytest.mark.one_in(5)
@pytest.mark.parametrize("slept", [False, True])
@pytest.mark.parametrize("verb", ["delete", "forget", "clear"])
async def test_sessions_that_are_gone_stand_before_no_source_that_is_there_gm8(
    rig: Rigged, verb: str, slept: bool
) -> None:
    """As many are gone as are asked before a text is read after all; of those that end alike the latest is first."""
    await read(rig, "kept", TEXT)
    gone = [f"gone-{number}" for number in range(_MOST_SOURCES)]
    for name in gone:
        await read(rig, name, TEXT, labels=["old"])
        if slept:
            await rig.sleep(name)
    if verb == "clear":
        await rig.service.clear(label="old")
    for name in gone if verb != "clear" else ():
        if verb == "delete":
            await rig.service.delete(name)
        else:
            await rig.service.maintain(operation="forget", session=name)
    assert (await read(rig, "new", TEXT)).cached_tokens == 1299


async def test_what_comes_from_the_store_brings_no_record_of_the_other_session(open_kind: Callable[..., Any]) -> None:
    """They lie in its bundle, which may go: what is asked for at an earlier token has records of its own."""
    async with open_kind("lfm2") as rig:
        await read(rig, "source", TEXT)
        await rig.sleep("source")
        found = await read(rig, "b", [*TEXT[:1100], *tokens_of(2, 300)])
        assert found.cached_tokens >= 256
        positions = rig.live("b").state.checkpoints.positions
        assert all(position > found.cached_tokens for position in positions), positions


@pytest.mark.one_in(2)
async def test_a_source_that_is_gone_from_the_store_is_not_asked_again(rig: Rigged) -> None:
    await rig.asleep("a", TEXT)
    source = rig.service._parts.sessions.resolve("a")
    await asyncio.to_thread(rig.service._parts.store.disk.delete_session, source)
    assert (await read(rig, "b", TEXT)).cached_tokens == 0
    assert source not in rig.service._parts.sessions.reuse._tree
