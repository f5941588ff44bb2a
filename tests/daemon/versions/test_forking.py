"""Forks: they share what they began with, and neither side ever sees what the other does (BR7, BR8, BR9, BR14)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from torpor.daemon.api.session import Origin
from torpor.daemon.errors import EmptyContext, SessionExists
from torpor.daemon.versions.forking import ForkOrder
from torpor.daemon.views.stored import origin_of, provenance_in
from torpor.memvid.errors import BundleMissing, InvalidUri, SessionNotFound
from torpor.memvid.store import Store
from torpor.memvid.uri import SessionUri
from torpor.snapshot.errors import NoSuchPosition
from torpor.tests.daemon.session_rig import SAMPLED, Rigged, fingerprint_of, manifest_of, tokens_of

KINDS = ["plain", "gemma3_text", "lfm2", "deepseek_v3"]


async def fork(rig: Rigged, session: str, name: str, at: int | None = None, **options: Any) -> Any:
    return await rig.service.fork(session, name=name, at_token=at, **options)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kind", KINDS)
async def test_br8_br9_a_fork_goes_on_as_its_source_would_and_neither_sees_the_other(
    open_kind: Callable[..., Any], kind: str
) -> None:
    """Bit for bit: keys, values, logits and the random key are those of the source; what each writes is its own."""
    async with open_kind(kind) as rig:
        await rig.read("control", tokens_of(1, 600), sampling=SAMPLED)
        await rig.read("base", tokens_of(1, 600), sampling=SAMPLED)
        made = await fork(rig, "base", "child")
        assert (made.token_count, made.tokens_prefilled, made.forked_from.tokens) == (600, 0, 600)
        before = await rig.fingerprint("base")
        assert await rig.write("child", 20) == await rig.write("control", 20)
        assert await rig.fingerprint("base") == before, "what the fork wrote did not reach its source"
        woken_child = await rig.fingerprint("child")
        await rig.write("base", 5, text="another way")
        await rig.sleep("base")
        assert await rig.fingerprint("child") == woken_child
        await rig.sleep_and_wake("child")
        assert await rig.fingerprint("child") == await rig.fingerprint("control")


@pytest.mark.one_in(7)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("at", [1, 255, 256, 300, 599])
async def test_a_fork_at_an_earlier_token_is_what_a_session_was_that_had_read_no_more(
    open_kind: Callable[..., Any], kind: str, at: int
) -> None:
    async with open_kind(kind) as rig:
        await rig.read("base", tokens_of(1, 600))
        made = await fork(rig, "base", "child", at)
        assert made.token_count == made.forked_from.tokens == at
        await rig.sleep("base")
        await rig.wake("base", at_token=at)
        assert not rig.is_awake("child")
        await rig.wake("child")
        child, base = await rig.fingerprint("child"), await rig.fingerprint("base")
        assert (child.tokens, child.kv, child.offsets, child.logits) == (
            base.tokens,
            base.kv,
            base.offsets,
            base.logits,
        )
        assert rig.live("base").durable.block_tokens == 600


@pytest.mark.one_in(2)
async def test_br7_a_fork_writes_no_key_and_no_value(rig: Rigged, store: Path) -> None:
    base = await rig.asleep("base", tokens_of(1, 2000))
    first = await fork(rig, "base", "child-0")
    for number in range(1, 20):
        await fork(rig, "base", f"child-{number}")
    assert first.blocks_new == 0
    assert first.blocks_reused == base.blocks_new
    assert first.bytes_written < 4096 + 100 * first.blocks_reused < base.bytes_written / 100
    assert (
        sum(row.bundle_bytes for row in rig.service._parts.store.disk.iter_sessions()) < base.bytes_written + 20 * 8192
    )


async def test_a_fork_of_a_fork_costs_its_own_tail(rig: Rigged) -> None:
    base = await rig.asleep("base", tokens_of(1, 1024))
    await fork(rig, "base", "child")
    await rig.write("child", 10)
    slept = await rig.sleep("child")
    grandchild = await fork(rig, "child", "grandchild")
    assert slept.bytes_written < base.bytes_written / 4
    assert grandchild.blocks_new == 0
    assert grandchild.forked_from == Origin("torpor://default/child", 2, slept.bundle_id, 1034)


async def test_br14_a_fork_lives_on_when_its_source_is_deleted(rig: Rigged) -> None:
    await rig.read("base", tokens_of(1, 600))
    await fork(rig, "base", "child")
    expected = await rig.fingerprint("base")
    await rig.service.delete("base")
    await rig.service.maintain(operation="repack")
    assert await rig.woken_fingerprint("child") == expected
    assert rig.service._parts.store.disk.verify(deep=True).ok


async def test_a_fork_begins_with_what_an_awake_session_has_read_since_it_slept(rig: Rigged) -> None:
    await rig.asleep("base", tokens_of(1, 300))
    await rig.write("base", 7)
    made = await fork(rig, "base", "child")
    assert (made.token_count, made.forked_from.version) == (307, 2)
    assert rig.is_awake("base"), "it was put to sleep for the fork, and goes on"
    assert not rig.live("base").dirty
    again = await fork(rig, "base", "child-2")
    assert again.forked_from.version == 2, "nothing has changed, so there is no other version"


async def test_a_fork_of_a_session_that_is_awake_at_an_earlier_token_begins_there(rig: Rigged) -> None:
    await rig.asleep("base", tokens_of(1, 600))
    await rig.wake("base", at_token=300)
    assert (await fork(rig, "base", "child")).token_count == 300
    assert len(rig.live("base").state.tokens) == 300


async def test_a_fork_of_an_earlier_version_begins_with_it(rig: Rigged) -> None:
    await rig.asleep("base", tokens_of(1, 300))
    await rig.write("base", 7)
    await rig.sleep("base")
    await rig.service.mark("base@1", tag="before")
    for reference in ("base@1", "base@before"):
        name = reference.replace("@", "-")
        made = await fork(rig, reference, name)
        assert (made.token_count, made.forked_from.version) == (300, 1)


async def test_a_fork_says_where_it_comes_from_and_has_labels_of_its_own(rig: Rigged) -> None:
    slept = await rig.asleep("base", tokens_of(1, 300), labels=("mother",))
    origin = Origin("torpor://default/base", 1, slept.bundle_id, 300)
    for name, labels, expected in (("a", None, ("mother",)), ("b", ("x", "y"), ("x", "y")), ("c", (), ())):
        await fork(rig, "base", name, labels=labels)
        asleep = await rig.service.show(name)
        await rig.write(name, 1)
        awake = await rig.service.show(name)
        await rig.sleep(name)
        later = await rig.service.show(name)
        assert [each.provenance.forked_from for each in (asleep, awake, later)] == [origin] * 3
        assert [each.info.labels for each in (asleep, awake, later)] == [expected] * 3
    assert (await rig.service.show("base")).provenance.forked_from is None


async def test_what_cannot_be_forked_is_refused_and_nothing_is_left(rig: Rigged) -> None:
    await rig.read("base", tokens_of(1, 300))
    await rig.service.create("empty")
    await rig.read("there", tokens_of(2, 5))
    with pytest.raises(EmptyContext):
        await fork(rig, "empty", "child")
    with pytest.raises(SessionExists):
        await fork(rig, "base", "there")
    with pytest.raises(SessionExists):
        await fork(rig, "base", "base")
    with pytest.raises(SessionNotFound):
        await fork(rig, "nobody", "child")
    with pytest.raises(SessionNotFound):
        await fork(rig, "base@9", "child")
    with pytest.raises(InvalidUri):
        await fork(rig, "base", "no name")
    for at in (0, 301):
        with pytest.raises(NoSuchPosition):
            await fork(rig, "base", "child", at)
    assert [each.name for each in await rig.service.list_sessions()] == ["base", "empty", "there"]
    assert rig.live("base").state.tokens


async def test_a_fork_whose_source_lost_its_manifest_is_refused(rig: Rigged, store: Path) -> None:
    slept = await rig.asleep("base", tokens_of(1, 300))
    manifest_of(store, slept.bundle_id).unlink()
    with pytest.raises(BundleMissing):
        await fork(rig, "base", "child")
    assert [each.name for each in await rig.service.list_sessions()] == ["base"]


async def test_forks_in_a_circle_do_not_wait_for_each_other(rig: Rigged) -> None:
    """Each takes the turns of two sessions; were they taken in the order in which they are named, two would block."""
    await rig.read("a", tokens_of(1, 300))
    await rig.read("b", tokens_of(2, 300))
    busy = [rig.write(name, 3) for name in "ab"]  # so that some wait for the turn of each
    forks = [fork(rig, *pair) for pair in (("a", "b"), ("b", "a")) * 4]
    answers = (await asyncio.wait_for(asyncio.gather(*busy, *forks, return_exceptions=True), 30))[2:]
    assert all(isinstance(answer, SessionExists) for answer in answers)


async def test_many_forks_at_once_of_a_session_that_writes_each_begin_with_a_version_of_it(rig: Rigged) -> None:
    await rig.read("base", tokens_of(1, 300))
    _, *made = await asyncio.gather(rig.write("base", 12), *(fork(rig, "base", f"c{number}") for number in range(6)))
    whole = rig.live("base").state.tokens
    for number, each in enumerate(made):
        await rig.wake(f"c{number}")
        child = rig.live(f"c{number}").state
        assert child.tokens == whole[: each.token_count]
        assert fingerprint_of(child).logits is not None


async def test_a_fork_needs_no_model_but_for_an_earlier_token(rig: Rigged, tmp_path: Path) -> None:
    await rig.asleep("base", tokens_of(1, 300))
    rig.network.fail_at(1)
    assert (await fork(rig, "base", "child")).token_count == 300


async def test_an_origin_that_a_stranger_wrote_is_refused_by_name(rig: Rigged) -> None:
    await rig.asleep("base", tokens_of(1, 300))
    store: Store = rig.service._parts.store.disk
    row = next(store.iter_sessions())
    sound = asdict(origin_of(row, 300))
    for wrong in ("base", [], sound | {"tokens": -1}, sound | {"version": 0}, sound | {"more": 1}, {"session": "a"}):
        with pytest.raises(ValueError, match="origin"):
            provenance_in({"forked_from": wrong})
    assert provenance_in({"forked_from": sound}).forked_from == ForkOrder(row, row.uri).origin


async def test_threat_37_what_was_acknowledged_by_a_clock_before_1970_wakes(
    open_rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever way a session begins, the time of it is one that a wake takes."""
    monkeypatch.setattr("time.time_ns", lambda: -5)
    async with open_rig() as rig:
        await rig.asleep("base", tokens_of(1, 600))
        await fork(rig, "base", "child")
        await fork(rig, "base", "younger", 300)
        for name, count in {"base": 600, "child": 600, "younger": 300}.items():
            woken = await rig.wake(name)
            assert woken.token_count == count
            with rig.service._parts.store.disk.open_session(SessionUri("default", name)) as reader:
                assert reader.manifest.session["created_ns"] == 0
