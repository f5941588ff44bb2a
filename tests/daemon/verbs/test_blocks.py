"""What the daemon alone knows of blocks: what is in memory, what was said since, and whose the tokens are."""

from __future__ import annotations

import pytest
from torpor.daemon.errors import ServiceClosed
from torpor.daemon.views.blocks import blocks_of
from torpor.memvid.errors import SessionNotFound
from torpor.memvid.store import Store
from torpor.tests.daemon.conversing_rig import SYSTEM, assistant, converse, user
from torpor.tests.daemon.session_rig import Rigged, tokens_of


async def test_the_blocks_of_an_awake_session_are_in_memory_as_far_as_they_are_unchanged(rig: Rigged) -> None:
    await rig.asleep("agent", tokens_of(1, 600))
    asleep = await rig.service.blocks("agent")
    assert (asleep.memory_tokens, {each.resident for each in asleep.blocks}) == (None, {False})
    await rig.wake("agent")
    awake = await rig.service.blocks("agent")
    assert (awake.memory_tokens, {each.resident for each in awake.blocks}) == (600, {True})
    await rig.service.append("agent", tokens=tokens_of(2, 9))
    later = await rig.service.blocks("agent")
    assert (later.token_count, later.memory_tokens) == (600, 609)
    assert [(each.kind, each.resident) for each in later.blocks] == [*([("span", True)] * 3), ("state", False)]
    assert later.journal_tokens in (0, 9), "by the durability of the daemon"
    await rig.sleep("agent")
    await rig.wake("agent@1", at_token=300)
    look = await rig.service.blocks("agent@1")
    assert [each.resident for each in look.blocks] == [True, False, False, False]
    assert look.memory_tokens == 300


async def test_a_session_without_a_version_has_no_blocks_and_it_is_said_how_it_gets_one(rig: Rigged) -> None:
    await rig.read("agent", tokens_of(1, 40))
    with pytest.raises(SessionNotFound, match="torpor save"):
        await rig.service.blocks("agent")


async def test_the_messages_of_a_chat_are_told_by_their_roles(rig: Rigged) -> None:
    await rig.service.create("agent")
    await rig.service.chat("agent", "hello", max_tokens=3)
    await rig.sleep("agent")
    first = (await rig.service.blocks("agent")).blocks[0]
    assert list(first.holds) == ["user", "assistant"]
    assert sum(first.holds.values()) == first.tokens


async def test_messages_that_were_read_in_one_go_are_told_apart_where_the_model_is_in_memory(rig: Rigged) -> None:
    said = [SYSTEM, user("Who are you?"), assistant("A fox."), user("Where is it?")]
    await converse(rig, said, "In the woods.")
    await rig.sleep("a")
    first = (await rig.service.blocks("a")).blocks[0]
    apart = await rig.service.contents("a", apart=True)
    tokens = dict.fromkeys(first.holds, 0)
    for passage in apart.passages:
        tokens[passage.role or ""] += passage.end - passage.start
    assert (first.holds, list(first.holds)) == (tokens, ["system", "user", "assistant"])
    with Store.open(rig.service._parts.store.disk.path, writable=False) as beside:
        found = blocks_of(beside, beside.resolve_version("a"))
        assert list(found.blocks[0].holds) == ["system+user+assistant", "user", "assistant"]


async def test_a_stop_does_not_wait_until_every_byte_is_read(rig: Rigged, monkeypatch: pytest.MonkeyPatch) -> None:
    await rig.asleep("agent", tokens_of(1, 600))
    door, asked = rig.service._parts.door, [0]

    def stopping_at_the_third() -> None:
        asked[0] += 1
        if asked[0] == 3:
            raise ServiceClosed("The daemon is stopping.")

    monkeypatch.setattr(door, "require_working", stopping_at_the_third)
    assert len((await rig.service.blocks("agent")).blocks) == 4
    with pytest.raises(ServiceClosed):
        await rig.service.blocks("agent", deep=True)
    assert asked == [3]
