"""A version that misses a pack: refused whole, woken up to where it is whole, and whole once the pack is back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torpor.memvid.errors import BlockMissing, CorruptBundle
from torpor.tests.daemon.damage_rig import damage
from torpor.tests.daemon.session_rig import Rigged, tokens_of


async def two_versions(rig: Rigged, store: Path) -> Path:
    """A session that slept twice; the pack that its second version wrote."""
    await rig.asleep("agent", tokens_of(1, 600))
    first = set((store / "packs").iterdir())
    await rig.wake("agent")
    await rig.write("agent", 200)
    await rig.sleep("agent")
    (pack,) = set((store / "packs").iterdir()) - first
    return pack


async def test_a_version_without_its_last_pack_wakes_up_to_where_it_is_whole_and_is_whole_again_with_it(
    rig: Rigged, store: Path, tmp_path: Path
) -> None:
    """Without a command."""
    pack = await two_versions(rig, store)
    whole = await rig.woken_fingerprint("agent")
    await rig.sleep("agent")
    expected = await rig.woken_fingerprint("agent", at_token=512)
    await rig.sleep("agent")
    pack.rename(tmp_path / pack.name)
    rig.service._parts.store.disk._core.look_again()
    with pytest.raises(BlockMissing) as refused:
        await rig.wake("agent")
    assert refused.value.details["whole_up_to"] == 512
    assert "--at 512" in refused.value.message
    found = await rig.woken_fingerprint("agent", at_token=512)
    assert (found.tokens, found.kv) == (expected.tokens, expected.kv)
    await rig.sleep("agent")
    with pytest.raises(BlockMissing):
        await rig.wake("agent", at_token=513)
    (tmp_path / pack.name).rename(pack)
    assert await rig.woken_fingerprint("agent") == whole


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", ["plain", "gemma3_text", "lfm2"])
async def test_a_version_is_stripped_in_the_midst_of_a_family_and_others_go_on(
    open_kind: Callable[..., Any], kind: str
) -> None:
    """A fork shares its blocks with what is stripped: they stay, and so does the stripped version as far as they go."""
    async with open_kind(kind) as rig:
        await rig.asleep("base", tokens_of(1, 600))
        await rig.service.fork("base", name="child")
        before = await rig.woken_fingerprint("child")
        await rig.sleep("child")
        await rig.service.maintain("strip", session="base")
        woken = await rig.wake("child")
        assert woken.tokens_prefilled == 0
        assert await rig.fingerprint("child") == before


@pytest.mark.parametrize("kind", ["plain", "gemma3_text", "lfm2"])
async def test_a_version_without_the_record_of_its_end_wakes_at_the_token_before(
    open_kind: Callable[..., Any], store: Path, kind: str
) -> None:
    """The advice of the refusal, and that of `verify`, can be followed. In which calls its tokens were read stood in
    that record, so state that cannot be cut by token is computed in other calls, within the tolerance."""
    async with open_kind(kind) as rig:
        await rig.asleep("agent", tokens_of(1, 600))
        expected = await rig.woken_fingerprint("agent", at_token=599)
        await rig.sleep("agent")
        damage(store, "agent", kind="state")
        rig.service._parts.store.disk.repair()
        with pytest.raises(BlockMissing) as refused:
            await rig.wake("agent")
        assert refused.value.details["whole_up_to"] == 599
        (damaged,) = rig.service._parts.store.disk.verify(deep=False).damaged
        assert damaged.whole_up_to == 599
        woken = await rig.wake("agent", at_token=599)
        found = await rig.fingerprint("agent")
        assert found.tokens == expected.tokens
        assert found == expected if kind == "plain" else woken.tokens_prefilled == 599 - 512


@pytest.mark.one_in(1)
@pytest.mark.parametrize(("first", "at"), [(576, 512), (100, 448)], ids=["at the end of a call", "within a call"])
async def test_a_stripped_version_without_a_block_s_tokens_wakes_at_those_before_and_computes_them_again(
    rig: Rigged, store: Path, first: int, at: int
) -> None:
    """So `verify` says it. What was read in a call that went past the last token before is not computed again."""
    await rig.read("agent", tokens_of(1, first))
    await rig.service.append("agent", tokens=tokens_of(2, 700))
    await rig.sleep("agent")
    await rig.service.maintain("strip", session="agent")
    damage(store, "agent", span=2, head=True)
    rig.service._parts.store.disk._core.look_again()
    (damaged,) = rig.service._parts.store.disk.verify(deep=True).damaged
    assert (damaged.whole_up_to, damaged.is_stripped) == (512, True)
    if at < 512:
        with pytest.raises(CorruptBundle):
            await rig.wake("agent", at_token=512)
    woken = await rig.wake("agent", at_token=at)
    assert woken.token_count == at <= woken.tokens_prefilled
