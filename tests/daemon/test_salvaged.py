"""What a repair salvaged of a damaged snapshot wakes, goes on, and sleeps again: one token is computed, and told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torpor.daemon.api.session import Look, Salvaged
from torpor.daemon.engine import generation
from torpor.daemon.engine.sampler import BY_PLACE
from torpor.memvid import Store
from torpor.memvid.errors import SessionNotFound
from torpor.memvid.format.blocks import BLOCK_TOKENS
from torpor.snapshot.caches import arrays_of
from torpor.tests.daemon.session_rig import MODEL, SAMPLED, Rigged, flip, tokens_of

import mlx.core as mx  # isort: skip  # after torpor, which chooses the BLAS


def damage_last_block(store: Path, name: str = "a") -> None:
    """Flip a bit in the last span of a session's only version, and repair the store."""
    with Store.open(store, writable=True) as opened:
        (row,) = [row for row in opened.iter_sessions() if row.uri.name == name]
        hex_id = row.bundle_id.hex()
        file = store / "bundles" / hex_id[:2] / f"{hex_id}.mvb"
        with opened.open_session(row.uri) as reader:
            span = next(entry for entry in reversed(reader.entries) if entry.kind == "span")
            with reader.holding(span) as frames:
                frame = frames.frame_of(span.id)
        flip(file, frame.offset + frame.frame_bytes - 80)
        report = opened.repair()
        assert [action.kind for action in report.actions] == ["salvage", "quarantine"]


async def kv_of(rig: Rigged, count: int) -> list[bytes]:
    """The bytes of keys and values of the first tokens of session a, layer by layer."""

    def look() -> list[bytes]:
        found = []
        for cache in rig.live("a").state.caches:
            for array in arrays_of([cache]):
                plain = mx.contiguous(array[..., :count, :]).view(mx.uint8)
                mx.eval(plain)
                found.append(bytes(memoryview(plain)))
        return found

    return await rig.service.engine.call(look)


async def begin(rig: Rigged) -> list[bytes]:
    """A session of 600 tokens asleep; the KV of its first 512."""
    await rig.read("a", tokens_of(1, 600), sampling=SAMPLED)
    kv = await kv_of(rig, 512)
    await rig.sleep("a")
    return kv


async def test_a_salvaged_session_wakes_with_its_kv_bit_for_bit_and_one_token_computed(
    open_rig: Any, store: Path
) -> None:
    async with open_rig() as rig:
        kv = await begin(rig)
    damage_last_block(store)
    async with open_rig() as rig:
        report = await rig.wake("a")
        assert (report.tokens_prefilled, rig.network.calls) == (1, [1])
        assert await kv_of(rig, 512) == kv
        woken = await rig.fingerprint("a")
        assert woken.tokens == tuple(tokens_of(1, 512))
        assert set(woken.offsets) == {512}
        assert woken.random_key == BY_PLACE
        assert woken.logits is not None


async def test_a_salvaged_session_goes_on_and_sleeps_with_a_state_of_its_own(open_rig: Any, store: Path) -> None:
    async with open_rig() as rig:
        await begin(rig)
    damage_last_block(store)
    async with open_rig() as rig:
        await rig.wake("a")
        await rig.service.append("a", tokens=[7])
        before = await rig.fingerprint("a")
        receipt = await rig.sleep("a")
        assert (receipt.version, receipt.blocks_new, receipt.blocks_reused) == (3, 2, 2)
        report = await rig.wake("a")
        assert report.tokens_prefilled == 0
        assert await rig.fingerprint("a") == before
        tokens, _, _ = await rig.write("a", 20)
        assert len(tokens) == 20


@pytest.mark.one_in(2)
@pytest.mark.parametrize("awake", [False, True])
async def test_a_salvaged_session_is_no_source_of_a_prefix(open_rig: Any, store: Path, awake: bool) -> None:
    """What was computed anew at its end stands in no record of calls."""
    async with open_rig() as rig:
        await begin(rig)
    damage_last_block(store)
    for policy in ("exact", "longest"):
        async with open_rig(prefix_reuse=policy) as rig:
            await rig.service.reuse.learned()
            if awake:
                await rig.wake("a")
            await rig.service.create("b")
            found = await rig.service.append("b", tokens=tokens_of(1, 600))
            assert found.cached_tokens == 0
            await rig.service.delete("b")


async def test_the_greedy_words_of_a_salvaged_session_are_those_of_one_that_read_as_much(
    open_rig: Any, store: Path
) -> None:
    async with open_rig() as rig:
        await rig.read("a", tokens_of(1, 600))
        await rig.read("short", tokens_of(1, 512))
        wanted, _, _ = await rig.write("short", 20)
        await rig.sleep("a")
    damage_last_block(store)
    async with open_rig() as rig:
        result = await rig.service.generate("a", max_tokens=20)
        assert result.tokens == wanted


async def test_a_salvaged_session_is_listed_and_shown(open_rig: Any, store: Path) -> None:
    async with open_rig() as rig:
        await begin(rig)
    damage_last_block(store)
    async with open_rig() as rig:
        detail = await rig.service.show("a")
        assert (detail.info.token_count, detail.info.version, detail.info.model) == (512, 2, MODEL)
        assert [info.token_count for info in await rig.service.list_sessions() if info.name == "a"] == [512]


SAVED = Salvaged(512, 600)


async def test_a_salvaged_session_says_how_much_was_saved_whatever_wakes_it(open_rig: Any, store: Path) -> None:
    async with open_rig() as rig:
        await begin(rig)
        await rig.asleep("sound", tokens_of(2, 600))
    damage_last_block(store)
    async with open_rig() as rig:
        told = {info.name: info.salvaged for info in await rig.service.list_sessions()}
        assert told == {"a": SAVED, "sound": None}
        assert (await rig.service.show("a")).info.salvaged == SAVED
        assert (await rig.wake("a")).salvaged == SAVED
        assert (await rig.wake("sound")).salvaged is None
        assert (await rig.service.show("a")).info.salvaged == SAVED, "awake too"
        assert (await rig.wake("a")).salvaged == SAVED, "whoever comes later"
        await rig.sleep("a")
        appended = await rig.service.append("a", tokens=[7])
        assert appended.woken.salvaged == SAVED


@pytest.mark.one_in(2)
async def test_what_goes_on_from_a_salvaged_session_says_so_too(open_rig: Any, store: Path) -> None:
    async with open_rig() as rig:
        await begin(rig)
    damage_last_block(store)
    async with open_rig() as rig:
        await rig.service.append("a", tokens=tokens_of(3, 100))
        await rig.sleep("a")
    async with open_rig() as rig:
        assert [info.salvaged for info in await rig.service.list_sessions()] == [SAVED]
        written = await rig.service.generate("a", max_tokens=1)
        assert (written.woken.salvaged, written.woken.version) == (SAVED, 3)
        await rig.sleep("a")
        await rig.service.fork("a", name="branch")
        assert (await rig.wake("branch")).salvaged == SAVED
        earlier = await rig.service.wake("a", at_token=300)
        assert earlier.salvaged is None, "it was cut back to where nothing is lost"


async def begin_and_damage(open_rig: Any, store: Path) -> tuple[Path, bytes]:
    """A session asleep of which the beginning was salvaged; the file of its own version, and what it held."""
    async with open_rig() as rig:
        await begin(rig)
    (file,) = store.glob("bundles/*/*.mvb")
    whole = file.read_bytes()
    damage_last_block(store)
    return file, whole


async def put_back(rig: Rigged, file: Path, whole: bytes) -> None:
    file.write_bytes(whole)
    file.chmod(0o600)
    report = await rig.service.maintain(operation="repair")
    assert report.problems == ()


async def bring_back(open_rig: Any, store: Path, *, change: bool) -> tuple[int, list[int]]:
    """Damage session a, wake what was salvaged, put its file back, repair, stop: tokens of the newest version, and the
    numbers of all."""
    file, whole = await begin_and_damage(open_rig, store)
    async with open_rig() as rig:
        await rig.wake("a")
        if change:
            await rig.service.append("a", tokens=[7])
        await put_back(rig, file, whole)
        assert (await rig.service.close()).failed == {}
    with Store.open(store, writable=False) as opened:
        (row,) = opened.iter_sessions()
        return row.token_count, [one.version for one in opened.versions(row.uri)]


async def test_a_salvaged_session_that_only_woke_gives_way_to_the_one_it_was_saved_from(
    open_rig: Any, store: Path
) -> None:
    assert await bring_back(open_rig, store, change=False) == (600, [1])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("first", ["list", "show"])
async def test_a_session_that_gave_way_is_listed_and_shown_as_the_one_it_was_saved_from(
    open_rig: Any, store: Path, first: str
) -> None:
    file, whole = await begin_and_damage(open_rig, store)
    async with open_rig() as rig:
        await rig.wake("a")
        await put_back(rig, file, whole)
        if first == "list":
            (info,) = await rig.service.list_sessions()
        else:
            info = (await rig.service.show("a")).info
        assert (info.state, info.version, info.token_count, info.salvaged) == ("asleep", 1, 600, None)


async def test_a_session_that_went_on_is_listed_as_awake_where_what_it_woke_from_gave_way(
    open_rig: Any, store: Path
) -> None:
    file, whole = await begin_and_damage(open_rig, store)
    async with open_rig() as rig:
        await rig.service.append("a", tokens=[7])
        await put_back(rig, file, whole)
        (info,) = await rig.service.list_sessions()
        assert (info.state, info.token_count, info.salvaged) == ("awake", 513, SAVED)
        assert (await rig.service.show("a")).info.token_count == 513


@pytest.mark.one_in(2)
@pytest.mark.parametrize("end", ["sleep", "stop"])
async def test_a_mere_look_at_a_salvaged_session_makes_no_version_that_would_hide_the_fuller_one(
    open_rig: Any, store: Path, end: str
) -> None:
    file, whole = await begin_and_damage(open_rig, store)
    async with open_rig() as rig:
        await rig.wake("a")
        if end == "sleep":
            receipt = await rig.sleep("a")
            assert (receipt.version, receipt.bytes_written) == (2, 0)
        assert (await rig.service.close()).slept == ()
    async with open_rig() as rig:
        await put_back(rig, file, whole)
        report = await rig.wake("a")
        assert (report.version, report.token_count) == (1, 600)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("end", ["use", "sleep", "stop"])
@pytest.mark.parametrize("left", [False, True])
async def test_a_look_at_an_earlier_token_of_what_was_salvaged_is_not_dropped_when_the_version_comes_back(
    open_rig: Any, store: Path, end: str, left: bool
) -> None:
    """Nothing goes on from another place than the one that was asked for, and no look stands before the version."""
    file, whole = await begin_and_damage(open_rig, store)
    async with open_rig() as rig:
        look = (await rig.wake("a", at_token=100)).look
        assert look == Look(2, 100, 2, 512)
        if left:
            await rig.service.residency._put_away_unasked(rig.service.resolve("a"), "pressure")
        await put_back(rig, file, whole)
        look, info = Look(2, 100, 1, 600), (await rig.service.list_sessions())[0]
        assert (info.state, info.token_count, info.look) == ("asleep" if left else "awake", 100, look)
        if end == "sleep":
            slept = await rig.sleep("a")
            assert (slept.version, slept.token_count, slept.looked_at) == (1, 600, 100)
        elif end == "stop":
            assert (await rig.service.close()).slept == ()
        elif left:
            with pytest.raises(SessionNotFound, match="look at version 2, token 100"):
                await rig.service.append("a", tokens=[7])
        else:
            assert (await rig.service.append("a", tokens=[7])).branched == look
    if end != "use":
        async with open_rig() as rig:
            assert (await rig.wake("a")).token_count == 600


async def test_a_salvaged_session_that_went_on_is_a_version_of_its_own(open_rig: Any, store: Path) -> None:
    assert await bring_back(open_rig, store, change=True) == (513, [1, 3])


@pytest.mark.one_in(3)
@pytest.mark.parametrize("use", ["wake", "sleep", "write"])
async def test_a_session_that_gave_way_is_used_as_the_one_it_was_saved_from(
    open_rig: Any, store: Path, use: str
) -> None:
    file, whole = await begin_and_damage(open_rig, store)
    async with open_rig() as rig:
        await rig.wake("a")
        await put_back(rig, file, whole)
        if use == "wake":
            assert (await rig.wake("a")).token_count == 600
        elif use == "sleep":
            assert (await rig.sleep("a")).version == 1
        else:
            await rig.write("a", 1)
            assert len(rig.live("a").state.tokens) == 601


async def test_a_session_whose_state_alone_is_damaged_on_disk_keeps_the_one_in_memory(rig: Rigged, store: Path) -> None:
    """What was salvaged of its own version is less than what is awake, and no reason to give way."""
    await begin(rig)
    await rig.write("a", 5)
    await rig.sleep_and_wake("a")
    wanted = await rig.fingerprint("a")
    opened = rig.service.store
    (row,) = opened.versions(rig.live("a").uri)[-1:]
    file = store / "bundles" / row.bundle_id.hex()[:2] / f"{row.bundle_id.hex()}.mvb"
    with opened.open_session(row.uri) as reader:
        state = next(entry for entry in reader.entries if entry.kind == "state")
        with reader.holding(state) as frames:
            frame = frames.frame_of(state.id)
    flip(file, frame.offset + frame.head_bytes + 5)
    report = await rig.service.maintenance.run(rig.service.store.repair)  # as where nothing can be healed
    assert "salvage" in [action.kind for action in report.actions]
    await rig.sleep_and_wake("a")
    assert await rig.fingerprint("a") == wanted


async def test_a_session_that_was_rolled_back_is_not_rolled_forward_where_its_version_is_lost(
    open_rig: Any, store: Path
) -> None:
    async with open_rig() as rig:
        await rig.asleep("a", tokens_of(1, 300))
        await rig.service.append("a", tokens=tokens_of(2, 300))
        await rig.sleep("a")
        await rig.wake("a", 1)
        rig.live("a").dirty = True  # as if it had been changed: it goes on from there
        lost = (await rig.sleep("a")).bundle_id
        await rig.wake("a")
        (store / "bundles" / lost[:2] / f"{lost}.mvb").unlink()
        await rig.service.maintenance.run(rig.service.store.repair)  # as where nothing can be healed
        assert (await rig.service.close()).slept == ("torpor://default/a",)
    async with open_rig() as rig:
        assert (await rig.wake("a")).token_count == 300


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", ["lfm2", "gemma3_text", "mamba2"])
@pytest.mark.parametrize("checkpointed", [True, False], ids=["with a checkpoint", "without"])
async def test_what_was_salvaged_of_windows_and_recurrences_is_computed_from_the_nearest_checkpoint(
    open_kind: Any, store: Path, kind: str, checkpointed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last block of 600 tokens is bad: what is left is 512, at the end of which there is a checkpoint, or none.

    How they were read is lost with the last record, so they are read in calls of a block, as the control is here.
    """
    monkeypatch.setattr(generation, "PREFILL_CHUNK_TOKENS", BLOCK_TOKENS)
    tokens = tokens_of(1, 600)
    async with open_kind(kind) as rig:
        await rig.read("a", tokens, sampling=SAMPLED)
        if not checkpointed:
            rig.live("a").state.checkpoints.cut(0)
        await rig.read("control", tokens[:512], sampling=SAMPLED)
        wanted = await rig.fingerprint("control")
        await rig.sleep("a")
    damage_last_block(store)
    async with open_kind(kind) as rig:
        report = await rig.wake("a")
        assert report.token_count == 512
        assert report.tokens_prefilled == (0 if checkpointed else 512)
        assert await rig.fingerprint("a") == wanted
        await rig.service.append("a", tokens=[1, 2, 3])
        again = await rig.fingerprint("a")
        await rig.sleep("a")
        assert (await rig.wake("a")).tokens_prefilled == 0
        assert await rig.fingerprint("a") == again
