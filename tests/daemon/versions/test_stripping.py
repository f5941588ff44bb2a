"""Stripped sessions: their keys and values are gone, their ledger is not, and the next use reads it again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torpor.daemon.errors import SessionAwake
from torpor.memvid.uri import SessionUri
from torpor.tests.daemon.session_rig import SAMPLED, Rigged, tokens_of

AGENT = SessionUri("default", "agent")
KINDS = ["plain", "gemma3_text", "lfm2", "deepseek_v3"]


def bytes_of(store: Path) -> int:
    """Bytes of all packs of a store."""
    return sum(each.stat().st_size for each in (store / "packs").iterdir())


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_stripped_session_reads_its_ledger_again_in_the_same_calls_and_goes_on_to_the_bit(
    open_kind: Callable[..., Any], kind: str
) -> None:
    async with open_kind(kind) as rig:
        for name in ("control", "agent"):
            await rig.read(name, tokens_of(1, 600), sampling=SAMPLED)
            await rig.write(name, 9)
        await rig.sleep("agent")
        await rig.service.maintain("strip", session="agent")
        woken = await rig.wake("agent")
        assert woken.token_count == 609
        assert await rig.fingerprint("agent") == await rig.fingerprint("control")
        assert woken.provenance.recomputed is None, "the logits behind what was read again are those that were stored"
        assert await rig.write("agent", 20) == await rig.write("control", 20)


async def test_what_is_read_again_is_told_and_makes_the_stripped_version_whole(rig: Rigged, store: Path) -> None:
    await rig.asleep("agent", tokens_of(1, 600))
    before = bytes_of(store)
    report = await rig.service.maintain("strip", session="agent")
    assert report.bytes_freed > 0
    assert bytes_of(store) < before // 4
    assert report.problems == ()
    plan = await rig.service.plan_wake("agent")
    assert (plan.restored_tokens, plan.computed_tokens, plan.bytes_to_read) == (0, 600, 0)
    woken = await rig.wake("agent")
    assert woken.tokens_prefilled == 600
    await rig.sleep("agent")
    store_now = rig.service._parts.store.disk
    assert store_now.require_session(AGENT).version == 2
    for version in (1, 2):
        with store_now.open_session(AGENT, version) as reader:
            assert reader.whole_up_to() == 600
    assert store_now.verify(deep=True).ok


async def test_of_a_session_that_sleeps_one_version_is_stripped_and_what_others_share_stays(rig: Rigged) -> None:
    await rig.woken("agent", tokens_of(1, 600))
    with pytest.raises(SessionAwake):
        await rig.service.maintain("strip", session="agent")
    await rig.write("agent", 5)
    await rig.sleep("agent")
    await rig.service.maintain("strip", session="agent@1")
    woken = await rig.wake("agent")
    assert woken.tokens_prefilled == 0
    await rig.sleep("agent")
    with rig.service._parts.store.disk.open_session(AGENT, 1) as reader:
        assert reader.whole_up_to() == 512, "its last block is none of version 2"
        assert len(reader.tokens()) == 4 * 600


@pytest.mark.one_in(1)
@pytest.mark.parametrize("at", [100, 512, 599])
async def test_a_look_and_a_fork_of_a_stripped_session_are_what_they_were(rig: Rigged, at: int) -> None:
    await rig.read("base", tokens_of(1, 600))
    await rig.sleep("base")
    expected = await rig.woken_fingerprint("base", at_token=at)
    await rig.sleep("base")
    await rig.service.maintain("strip", session="base")
    found = await rig.woken_fingerprint("base", at_token=at)
    assert (found.tokens, found.kv, found.logits) == (expected.tokens, expected.kv, expected.logits)
    await rig.sleep("base")
    made = await rig.service.fork("base", name="child")
    assert (made.token_count, made.tokens_prefilled) == (600, 600)
