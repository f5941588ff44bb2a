"""Rot is found while nobody wants anything, and healed: what was damaged is computed again, the rest is as it was."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torpor.daemon.api.session import Recomputed
from torpor.daemon.engine.admission import current
from torpor.daemon.errors import ServiceClosed, SessionExists, UnknownModel
from torpor.daemon.upkeep import healing
from torpor.daemon.upkeep.scrubbing import ScrubPolicy, seconds_ahead
from torpor.memvid.errors import BlockMissing, CorruptBlock
from torpor.memvid.store import Store
from torpor.memvid.uri import SessionUri
from torpor.snapshot.passes import UNREPEATABLE, Passes
from torpor.tests.daemon.damage_rig import TEXT, damage, mend, told
from torpor.tests.daemon.session_rig import (
    SAMPLED,
    Rigged,
    Writing,
    listening,
    make_unreadable,
    manifest_of,
    packs,
    tokens_of,
    until,
)

QUICK = ScrubPolicy(bytes_per_s=1 << 40, idle_s=0.05, round_s=0.05)
KINDS = ["plain", "gemma3_text", "lfm2"]


def damage_of(store: Path) -> list[str]:
    with Store.open(store, writable=False) as opened:
        return [finding.code for finding in opened.verify(deep=True).findings]


# --- decisions


@pytest.mark.parametrize(
    ("done", "passed", "rate", "ahead"), [(0, 0.0, 8, 0.0), (80, 1.0, 8, 9.0), (8, 5.0, 8, 0.0), (16, 2.0, 8, 0.0)]
)
def test_what_was_read_too_fast_is_waited_for(done: int, passed: float, rate: int, ahead: float) -> None:
    assert seconds_ahead(done, passed, rate) == ahead


def test_reading_goes_on_where_a_call_had_ended() -> None:
    passes = Passes()
    for size in (99, 1, 256, 256, 1):
        passes.add(size)
    assert [passes.whole_calls(position) for position in (0, 98, 99, 256, 356, 512, 613)] == [
        0, 0, 99, 100, 356, 356, 613,
    ]  # fmt: skip


def test_a_token_that_was_read_beside_those_of_others_counts_as_one() -> None:
    passes = Passes()
    for size in (256, UNREPEATABLE, UNREPEATABLE, 100):
        passes.add(size)
    assert [passes.whole_calls(position) for position in (257, 258, 300, 358)] == [257, 258, 258, 358]


# --- healing


@pytest.mark.one_in(2)
async def test_what_is_computed_again_stands_back_for_whoever_wants_something(
    open_rig: Any, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    again = healing.read_again

    def watched(*args: Any) -> Any:
        seen.append(current().stands_back())
        return again(*args)

    monkeypatch.setattr(healing, "read_again", watched)
    async with open_rig() as rig:
        await rig.asleep("a", TEXT)
    damage(store, "a", span=0)
    async with open_rig(scrub=QUICK) as rig, listening(rig) as heard:
        await told(heard, "session_healed")
    assert seen == [True]


@pytest.mark.parametrize("span", [0, 2, -1])
@pytest.mark.one_in(9)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_flipped_bit_is_found_and_what_it_took_is_computed_again_to_the_bit(
    open_kind: Callable[..., Any], kind: str, span: int, store: Path
) -> None:
    async with open_kind(kind) as rig:
        await rig.read("a", TEXT, sampling=SAMPLED)
        await rig.write("a", 7)
        before = await rig.fingerprint("a")
        await rig.sleep("a")
        expected = await rig.write("a", 5)
        await rig.service.delete("a")
        await rig.read("a", TEXT, sampling=SAMPLED)
        await rig.write("a", 7)
        slept = await rig.sleep("a")
    damage(store, "a", span=span)
    async with open_kind(kind, scrub=QUICK) as rig, listening(rig) as heard:
        (healed,) = await told(heard, "session_healed")
        (repaired,) = await told(heard, "store_repaired")
        woken = await rig.wake("a")
        assert woken.token_count == slept.token_count == len(before.tokens)
        assert await rig.fingerprint("a") == before
        assert woken.tokens_prefilled == 0
        assert woken.version == healed["version"] == 2
        tokens = healed["recomputed_tokens"]
        assert woken.provenance.recomputed == Recomputed(1, 1307 - tokens, tokens, True)
        assert healed["same_logits"] is True
        assert (repaired["copied"], repaired["moved"]) == (1, 1)
        assert await rig.write("a", 5) == expected
        status = (await rig.service.status()).scrub
        assert (status.damaged, status.healed, status.unhealed) == (1, 1, 0)
        assert status.bytes_read > 0
        assert status.last_ns is not None
        assert heard.of("damage_found", "a")[0]["findings"] >= 1
    assert damage_of(store) == [], "the damaged version is mended too, out of the same blocks"


@pytest.mark.one_in(2)
@pytest.mark.usefixtures("short_calls")
async def test_only_what_stands_behind_the_damage_is_computed(open_rig: Any, store: Path) -> None:
    async with open_rig() as rig:
        await rig.asleep("a", TEXT)
    damage(store, "a", span=3)
    async with open_rig(scrub=QUICK) as rig, listening(rig) as heard:
        (healed,) = await told(heard, "session_healed")
    assert healed["recomputed_tokens"] == 1300 - 768


@pytest.mark.one_in(2)
@pytest.mark.usefixtures("short_calls")
async def test_what_was_read_in_calls_that_no_block_begins_with_is_the_same_to_the_bit(
    open_rig: Any, store: Path
) -> None:
    async with open_rig() as rig:
        await rig.read("a", TEXT[:100])
        await rig.service.append("a", tokens=TEXT[100:])
        before = await rig.fingerprint("a")
        await rig.sleep("a")
    damage(store, "a", span=3)
    async with open_rig(scrub=QUICK) as rig, listening(rig) as heard:
        (healed,) = await told(heard, "session_healed")
        await told(heard, "store_repaired")
        assert (healed["same_logits"], healed["recomputed_tokens"]) == (True, 1300 - 740), (
            "from the call that has token 768, the first damaged one"
        )
        assert await rig.woken_fingerprint("a") == before
    assert damage_of(store) == []


@pytest.mark.one_in(1)
async def test_what_a_wake_finds_damaged_is_healed_before_its_round_has_come(open_rig: Any, store: Path) -> None:
    rare = ScrubPolicy(1 << 40, idle_s=0.05, round_s=3600.0)
    async with open_rig(scrub=rare) as rig, listening(rig) as heard:
        await until(lambda: rig.service._parts.bus.quiet_s() > 0.1)  # of an empty store no round begins
        await rig.read("a", TEXT)
        before = await rig.fingerprint("a")
        await rig.sleep("a")
        await told(heard, "session_scrubbed")
        damage(store, "a")
        with pytest.raises(CorruptBlock):
            await rig.wake("a")
        await told(heard, "session_healed")
        await told(heard, "store_repaired")
        assert (await rig.wake("a")).provenance.recomputed is not None
        assert await rig.fingerprint("a") == before
        assert len(heard.of("session_scrubbed")) == 2


@pytest.mark.one_in(2)
async def test_the_damaged_bytes_are_kept(open_rig: Any, store: Path) -> None:
    async with open_rig() as rig:
        await rig.asleep("a", TEXT)
    damage(store, "a")
    (file,) = packs(store)
    damaged = file.read_bytes()
    async with open_rig(scrub=QUICK) as rig, listening(rig) as heard:
        await told(heard, "session_healed")
    assert [path.read_bytes() for path in store.glob("damaged/*")] == [damaged]


@pytest.mark.one_in(2)
async def test_forks_that_share_the_damaged_block_are_whole_with_it(open_rig: Any, store: Path) -> None:
    async with open_rig() as rig:
        await rig.asleep("a", TEXT)
        await rig.service.fork("a", name="b")
        await rig.service.append("b", tokens=[1, 2, 3])
        before = await rig.fingerprint("b")
        await rig.sleep("b")
    damage(store, "a", span=1)
    async with open_rig(scrub=QUICK) as rig, listening(rig) as heard:
        await told(heard, "session_healed")
        assert await rig.woken_fingerprint("b") == before
        assert (await rig.wake("a")).token_count == 1300
        assert len(heard.of("session_healed")) == 1
    assert damage_of(store) == []


@pytest.mark.one_in(2)
async def test_a_damaged_ledger_is_told_in_each_round_and_repaired_once(open_rig: Any, store: Path) -> None:
    """What cannot be computed again: the session is whole up to there, and the damaged file is kept."""
    async with open_rig() as rig:
        await rig.asleep("a", TEXT)
    damage(store, "a", span=2, head=True)
    async with open_rig(scrub=QUICK) as rig, listening(rig) as heard:
        failed = await told(heard, "heal_failed", 3)
        assert {each["code"] for each in failed} == {"block_missing"}
        (repaired,) = heard.of("store_repaired")
        assert (repaired["copied"], repaired["moved"], repaired["problems"]) == (1, 1, 1)
        with pytest.raises(BlockMissing, match="whole up to token 512") as refused:
            await rig.wake("a")
        assert refused.value.details["whole_up_to"] == 512
        assert (await rig.wake("a", at_token=512)).token_count == 512
        status = (await rig.service.status()).scrub
        assert status.healed == 0
        assert status.unhealed >= 3
    assert len(list(store.glob("damaged/*"))) == 1


@pytest.mark.one_in(2)
async def test_a_damaged_end_record_costs_one_token_and_no_more(open_rig: Any, store: Path) -> None:
    async with open_rig() as rig:
        await rig.asleep("a", TEXT)
    damage(store, "a", kind="state")
    async with open_rig(scrub=QUICK) as rig, listening(rig) as heard:
        assert (await told(heard, "heal_failed"))[0]["code"] == "not_recomputable"
        assert (await rig.wake("a", at_token=1299)).token_count == 1299


async def test_what_harms_no_version_is_repaired_once_and_told_as_no_damage(open_rig: Any, store: Path) -> None:
    async with open_rig() as rig:
        await rig.asleep("a", TEXT)
    damage(store, "a", kind="state", padding=True)
    async with open_rig(scrub=QUICK) as rig, listening(rig) as heard:
        await told(heard, "store_repaired")
        await told(heard, "session_scrubbed", 3)
        assert len(heard.of("store_repaired")) == 1
        assert heard.of("damage_found") == heard.of("heal_failed") == []
    assert damage_of(store) == []


async def test_a_file_that_the_system_refuses_is_told_in_each_round_and_no_repair_tries_it_again(
    open_rig: Any, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_rig() as rig:
        await rig.asleep("a", TEXT)
    readable = make_unreadable(packs(store)[0], "hard link", monkeypatch)
    async with open_rig(scrub=QUICK) as rig, listening(rig) as heard:
        await told(heard, "damage_found", 3)
        assert len(heard.of("store_repaired")) == 1
        readable()
        assert (await rig.wake("a")).token_count == 1300


@pytest.mark.one_in(2)
async def test_what_cannot_be_healed_now_is_tried_in_each_round(
    open_rig: Any, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_rig() as rig:
        await rig.asleep("a", TEXT)
    damage(store, "a")
    async with open_rig(scrub=QUICK) as rig, listening(rig) as heard:

        def unknown(*_args: Any, **_options: Any) -> Any:
            raise UnknownModel("it is not served now")

        monkeypatch.setattr(rig.service._parts.sessions.residency, "room_to_wake", unknown)
        assert (await told(heard, "heal_failed", 2))[0]["code"] == "unknown_model"
        assert len(heard.of("store_repaired")) == 1
        monkeypatch.undo()
        await told(heard, "session_healed")
    assert damage_of(store) == []


async def test_a_session_that_is_awake_is_not_touched_and_loses_nothing(open_rig: Any, store: Path) -> None:
    async with open_rig(scrub=QUICK) as rig, listening(rig) as heard:
        await rig.woken("a", TEXT)
        before = await rig.fingerprint("a")
        await asyncio.to_thread(damage, store, "a")
        await told(heard, "store_repaired")
        assert heard.of("session_healed") == heard.of("heal_failed") == []
        assert rig.is_awake("a")
        assert await rig.fingerprint("a") == before
        woken = await rig.sleep_and_wake("a")
        assert (woken.token_count, woken.tokens_prefilled) == (1300, 0)
        assert await rig.fingerprint("a") == before


def copied(store: Path) -> Path:
    """What a kill would leave now."""
    copy = store.with_name("left_by_a_kill")
    shutil.copytree(store, copy)
    return copy


@pytest.mark.one_in(13)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("block", "written"),
    [({"span": 0}, 0), ({"span": 1}, 0), ({"span": 2, "head": True}, 0), ({"kind": "state"}, 0), ({"span": 1}, 3)],
)
async def test_what_an_awake_session_has_acknowledged_is_durable_again(
    open_kind: Callable[..., Any], store: Path, kind: str, block: dict[str, Any], written: int
) -> None:
    async with open_kind(kind) as rig, listening(rig) as heard:
        await rig.read("a", TEXT, sampling=SAMPLED)
        await rig.write("a", 7)
        await rig.sleep_and_wake("a")
        if written:
            await rig.write("a", written)
        before = await rig.fingerprint("a")
        await asyncio.to_thread(damage, store, "a", **block)
        await mend(rig)
        left = copied(store)
        assert heard.of("session_healed") == heard.of("heal_failed") == [], "nothing was computed"
        assert rig.is_awake("a")
        assert await rig.fingerprint("a") == before
    async with open_kind(kind, store=left) as rig:
        woken = await rig.wake("a")
        assert (woken.version, woken.token_count, woken.tokens_prefilled) == (2, 1307 + written, 0)
        assert await rig.fingerprint("a") == before
    if not written:
        assert damage_of(left) == [], "the damaged version is mended too, out of the same blocks"


async def test_an_awake_session_that_cannot_be_kept_now_is_kept_another_time(
    rig: Rigged, store: Path, full_disk: Any
) -> None:
    async with listening(rig) as heard:
        await rig.woken("a", TEXT)
        damage(store, "a", span=1)
        disk = full_disk()
        await mend(rig)
        disk.free()
        await until(lambda: len(heard.of("heal_failed")) == 1)
        assert heard.of("heal_failed")[0]["code"] == "no_space"
        assert [row.version for row in rig.service._parts.store.disk.versions(SessionUri("default", "a"))] == [1]
        await mend(rig)
        assert (await rig.service.show("a")).info.version == 2


@pytest.mark.one_in(2)
async def test_where_there_is_no_room_for_what_was_computed_again_nothing_is_lost(
    rig: Rigged, store: Path, full_disk: Any
) -> None:
    await rig.asleep("a", TEXT)
    damage(store, "a", span=1)
    disk = full_disk()
    await mend(rig)
    disk.free()
    await mend(rig)
    assert (await rig.wake("a")).token_count == 1300


@pytest.mark.one_in(2)
@pytest.mark.parametrize("writes", [False, True])
async def test_the_full_session_behind_an_earlier_token_is_healed_and_stays_the_newest(
    rig: Rigged, store: Path, writes: bool
) -> None:
    async with listening(rig) as heard:
        await rig.read("a", TEXT)
        before = await rig.fingerprint("a")
        await rig.sleep("a")
        await rig.wake("a", at_token=700)
        if writes:
            await rig.write("a", 2)
        damage(store, "a", span=1)
        await mend(rig)
        await told(heard, "session_healed")
        assert len(rig.live("a").state.tokens) == 700 + 2 * writes
        row = rig.service._parts.store.disk.find_session(SessionUri("default", "a"))
        assert (row.version, row.block_tokens) == (2, 1300)
        await rig.sleep("a")
        woken = await rig.wake("a", 2)
        assert woken.token_count == 1300
        assert await rig.fingerprint("a") == before
        assert (await rig.service.show("a")).versions[-1].token_count == (702 if writes else 1300)


@pytest.mark.one_in(2)
async def test_an_earlier_version_that_is_awake_does_not_stand_for_the_newest(rig: Rigged, store: Path) -> None:
    await rig.asleep("a", TEXT[:300])
    await rig.service.append("a", tokens=TEXT[300:])
    before = await rig.fingerprint("a")
    await rig.sleep("a")
    await rig.wake("a", 1)
    damage(store, "a", span=3)
    await mend(rig)
    assert len(rig.live("a").state.tokens) == 300, "still at what was looked at"
    woken = await rig.sleep_and_wake("a")
    assert (woken.version, woken.token_count) == (3, 1300), "healed, not what was looked at"
    assert woken.provenance.recomputed is not None
    assert await rig.fingerprint("a") == before


@pytest.mark.one_in(2)
@pytest.mark.parametrize("other_awake", [False, True])
async def test_damage_in_another_session_waits_for_its_own_turn(open_rig: Any, store: Path, other_awake: bool) -> None:
    async with open_rig() as rig:
        for seed, name in enumerate("ab"):
            await rig.asleep(name, tokens_of(seed, 1300))
        if other_awake:
            await rig.wake("b")
        damage(store, "a", span=1)
        damage(store, "b", span=1)
        await mend(rig, "a")
        await mend(rig, "b")
        left = copied(store)
    async with open_rig(store=left) as rig:
        assert [(await rig.wake(name)).token_count for name in "ab"] == [1300, 1300]
    assert damage_of(left) == []


# --- when, and how fast


@pytest.mark.one_in(2)
async def test_it_reads_only_while_nobody_wants_anything(open_rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_rig(scrub=ScrubPolicy(1 << 40, idle_s=0.2, round_s=0.0)) as rig, listening(rig) as heard:
        await rig.asleep("a", TEXT)
        rig.network.reset()
        await rig.read("b", [1, 2, 3])
        gate = rig.network.hold_at(1)
        busy = asyncio.create_task(rig.service.append("b", tokens=[1]))
        await gate.reached()
        heard.clear()
        before = (await rig.service.status()).scrub.sessions
        await until(lambda: rig.service._parts.bus.quiet_s() == 0.0)
        scrub = rig.service._parts.store.scrub
        read, pieces = scrub._read, list[object]()
        monkeypatch.setattr(scrub, "_read", lambda steps: (pieces.append(steps), read(steps))[1])
        for _ in range(60):
            await asyncio.sleep(0.01)
        assert len(pieces) <= 1, "but for one that had begun"
        assert (await rig.service.status()).scrub.sessions <= before + 1, "but for one that it was reading"
        gate.open()
        await busy
        heard.clear()
        await told(heard, "session_scrubbed")


@pytest.mark.one_in(5)
async def test_it_goes_on_with_the_next_session_after_a_restart(open_rig: Any) -> None:
    """But for the one at which it was stopped, no session comes twice before all have come once."""
    names = [f"s{number}" for number in range(6)]
    slow = ScrubPolicy(20_000, idle_s=0.0, round_s=3600.0)
    seen: list[str] = []
    async with open_rig() as rig:
        for name in names:
            await rig.asleep(name, tokens_of(1, 30))
    async with open_rig(scrub=slow) as rig, listening(rig, names=["session_scrubbed"]) as heard:
        await told(heard, "session_scrubbed", 2)
        seen += [str(notice.event.session)[-2:] for notice in heard[1:]]
    async with open_rig(scrub=slow) as rig, listening(rig, names=["session_scrubbed"]) as heard:
        await until(lambda: {*seen, *(str(notice.event.session)[-2:] for notice in heard[1:])} == set(names))
        assert not rig.service._parts.store.scrub._left
        assert rig.service._parts.store.scrub._seconds_to_round() > 0, "the round is done, and the next one is not due"
    assert len(seen) + len(heard) - 1 <= 7


@pytest.mark.one_in(2)
async def test_a_healing_gives_the_time_of_its_writing_to_a_stop_and_nothing_is_cut_for_it(
    rig: Rigged, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rig.asleep("a", TEXT)
    await rig.read("awake", tokens_of(2, 40))
    await asyncio.to_thread(damage, store, "a", span=1)
    writing = Writing(monkeypatch, "a")
    repairing = asyncio.ensure_future(rig.service.maintain(operation="repair"))
    beginning = await writing.meets_a_stop(rig)
    with pytest.raises(ServiceClosed):
        await repairing
    await beginning
    assert writing.begun == ["a", "awake"]
    assert {each.token_count for each in await rig.service.list_sessions()} == {1300, 40}


async def test_a_stop_waits_for_no_slow_reading(open_rig: Any) -> None:
    async with open_rig() as rig:
        await rig.asleep("a", TEXT)
    async with open_rig(scrub=ScrubPolicy(1, idle_s=0.0, round_s=0.0)) as rig:
        await until(
            lambda: rig.service._parts.store.scrub._mark.begun_ns > 0 and not rig.service._parts.store.scrub._left
        )
        async with asyncio.timeout(20):
            await rig.service.close()
        assert rig.service._parts.store.scrub._sessions == 0, "it would have taken days"


async def test_without_a_policy_nothing_is_read(rig: Rigged) -> None:
    assert (await rig.service.status()).scrub is None


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", KINDS)
async def test_damage_before_a_ledger_of_a_session_that_went_back_becomes_part_of_the_ledger(
    open_kind: Callable[..., Any], store: Path, kind: str
) -> None:
    """Where no record tells what its state was there, the ledger alone says what came of it: nothing is lost."""
    async with open_kind(kind, stop_within=0) as rig:
        await rig.asleep("a", TEXT)
        await rig.wake("a", at_token=600)
        await rig.service.append("a", tokens=tokens_of(9, 40))
        had = list(rig.live("a").state.tokens)
        assert list((await rig.service.close()).ledgers)
    await asyncio.to_thread(damage, store, "a", span=1)
    async with open_kind(kind) as rig, listening(rig) as heard:
        await mend(rig)
        assert heard.of("heal_failed") == []
        if kind == "plain":  # others have records, and are healed from these
            assert [(each["tokens"], each["unread_tokens"]) for each in heard.of("ledger_kept")] == [(640, 384)]
        (info,) = await rig.service.list_sessions()
        assert info.token_count == 640
        woken = await rig.wake("a")
        assert woken.token_count == 640
        assert list(rig.live("a").state.tokens) == had
        await rig.sleep("a")


@pytest.mark.one_in(2)
async def test_a_look_at_the_end_of_a_state_stays_one_when_what_it_looks_at_is_healed(
    open_rig: Any, store: Path
) -> None:
    async with open_rig(stop_within=0) as rig:
        await rig.woken("a", TEXT)
        await rig.service.append("a", tokens=tokens_of(9, 40))
        assert list((await rig.service.close()).ledgers)
    async with open_rig() as rig, listening(rig) as heard:
        assert (await rig.wake("a", at_token=1300)).token_count == 1300
        await asyncio.to_thread(damage, store, "a", span=1)
        await mend(rig)
        assert rig.live("a").is_mere_look, "no version holds just that"
        assert (await told(heard, "session_healed"))[0]["tokens"] == 1340, "those that a wake gives"
        made = await rig.service.fork("a", name="b")
        assert made.token_count == 1300
        assert (await rig.service.append("a", tokens=[7])).token_count == 1301


@pytest.mark.one_in(2)
async def test_a_repair_that_somebody_asks_for_heals_what_it_cannot_mend(rig: Rigged, store: Path) -> None:
    await rig.read("a", TEXT)
    before = await rig.fingerprint("a")
    await rig.sleep("a")
    await rig.service.fork("a", name="b")
    await asyncio.to_thread(damage, store, "a", span=1)
    dry = await rig.service.maintain(operation="repair", dry_run=True)
    assert {action.session for action in dry.actions if action.kind == "heal"} == {
        "torpor://default/a",
        "torpor://default/b",
    }
    done = await rig.service.maintain(operation="repair")
    assert done.problems == ()
    for name in "ab":
        assert (await rig.wake(name)).token_count == 1300
        assert await rig.fingerprint(name) == before


async def test_no_new_session_takes_the_name_of_one_whose_manifest_is_not_there(rig: Rigged, store: Path) -> None:
    slept = await rig.asleep("a", TEXT)
    manifest = manifest_of(store, slept.bundle_id)
    whole = manifest.read_bytes()
    manifest.unlink()
    result = await rig.service.maintain(operation="repair")
    assert [each.code for each in result.problems] == ["bundle_missing"]
    await rig.read("other", [1, 2])
    for begin in (rig.service.create("a"), rig.service.fork("other", name="a")):
        with pytest.raises(SessionExists):
            await begin
    manifest.write_bytes(whole)
    manifest.chmod(0o400)
    assert (await rig.wake("a")).token_count == 1300
    await rig.service.delete("a")
    await rig.service.create("a")
