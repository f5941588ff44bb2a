"""What the daemon alone knows of blocks: what is in memory, what was said since, and whose the tokens are."""

from __future__ import annotations

import asyncio
import threading

import pytest
from torpor.daemon.errors import ServiceClosed
from torpor.daemon.views.blocks import blocks_of
from torpor.daemon.views.ledgers import Present
from torpor.memvid.errors import SessionNotFound
from torpor.memvid.store import Store
from torpor.tests.daemon.conversing_rig import SYSTEM, assistant, converse, send, user
from torpor.tests.daemon.session_rig import Rigged, tokens_of, until


async def test_the_blocks_of_an_awake_session_are_in_memory_as_far_as_they_are_unchanged(rig: Rigged) -> None:
    await rig.asleep("agent", tokens_of(1, 600))
    asleep = await rig.service.blocks("agent")
    assert (asleep.rest, {each.resident for each in asleep.blocks}) == ((), {False})
    await rig.wake("agent")
    awake = await rig.service.blocks("agent")
    assert (awake.rest, {each.resident for each in awake.blocks}) == ((), {True})
    await rig.service.append("agent", tokens=tokens_of(2, 9))
    later = await rig.service.blocks("agent")
    assert (later.token_count, later.common_tokens) == (600, 600)
    assert [(each.start, each.end) for each in later.rest] == [(600, 609)]
    assert [(each.kind, each.resident) for each in later.blocks] == [*([("span", True)] * 3), ("state", False)]
    await rig.sleep("agent")
    await rig.wake("agent@1", at_token=300)
    look = await rig.service.blocks("agent@1")
    assert [each.resident for each in look.blocks] == [True, False, False, False]
    assert (look.common_tokens, look.rest) == (600, ()), "a version that is named is told whole"


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
        found = blocks_of(beside, Present.of_version(beside.resolve_version("a")))
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


async def test_a_look_ends_at_its_next_block_once_nobody_waits_for_it(
    rig: Rigged, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rig.asleep("agent", tokens_of(1, 600))
    asked, go_on = list[int](), threading.Event()

    def waiting() -> None:
        asked.append(1)
        assert go_on.wait(20)

    monkeypatch.setattr(rig.service._parts.door, "require_working", waiting)
    look = asyncio.ensure_future(rig.service.blocks("agent", deep=True))
    await until(lambda: bool(asked))
    look.cancel()
    with pytest.raises(asyncio.CancelledError):
        await look
    go_on.set()
    await until(lambda: not rig.service._parts.store.versions.threads._reads)
    assert len(asked) == 1


async def test_the_blocks_of_a_session_end_where_it_left_its_version(rig: Rigged) -> None:
    """Wherever that is, however often it went back, and for each version that it may have left."""
    await rig.asleep("agent", tokens_of(1, 600))
    for at, more in ((300, 40), (9, 32), (256, 1)):
        await rig.wake("agent@1", at_token=at)
        look = await rig.service.blocks("agent")
        assert (look.version, look.common_tokens, look.rest) == (1, at, ())
        await rig.service.append("agent", tokens=tokens_of(at, more))
        found = await rig.service.blocks("agent")
        assert (found.version, found.common_tokens, found.token_count) == (1, at, 600)
        assert [(each.start, each.end) for each in found.rest] == [(at, at + more)]
        assert max(each.start for each in found.blocks) < at
        assert {each.resident for each in found.blocks} == {True}, "also the one in whose midst it left"
        whole = (await rig.service.blocks("agent@1")).blocks
        assert [each.resident for each in whole] == [each.start + each.tokens <= at for each in whole]
        assert (await rig.service.contents("agent")).token_count == at + more
        before = await rig.service.blocks("agent@1")
        assert (before.common_tokens, before.rest, len(before.blocks)) == (600, (), 4)
        await rig.sleep("agent")
        kept = await rig.service.blocks("agent")
        assert (kept.token_count, kept.common_tokens, kept.rest) == (at + more, at + more, ())


async def test_a_transcript_that_took_a_session_back_leaves_its_blocks_there(rig: Rigged) -> None:
    await converse(rig, [SYSTEM, user("Who are you?")], "A fox.")
    await rig.sleep("a")
    said = await send(rig, [SYSTEM, user("Who is it?")], reply="A bear of the woods.", on_divergence="rewind")
    found, held = await rig.service.blocks("a"), (await rig.service.contents("a")).token_count
    assert found.common_tokens == said.rewound_to < found.token_count
    assert [each.start for each in found.rest] == [said.rewound_to]
    assert found.rest[-1].end == held
    assert sum(found.blocks[0].holds.values()) == found.common_tokens
