"""The daemon tells what it has in memory, and messages apart that were read in one go."""

from __future__ import annotations

import pytest
from torpor.daemon.api.contents import Contents
from torpor.tests.daemon.conversing_rig import SYSTEM, assistant, converse, user
from torpor.tests.daemon.session_rig import Rigged

SAID = [SYSTEM, user("Who are you?"), assistant("A fox."), user("Where is it?")]


def roles_of(found: Contents) -> list[tuple[str, int]]:
    return [(passage.role, passage.end) for passage in found.passages]


async def test_messages_are_told_apart_where_the_model_proves_their_words(rig: Rigged) -> None:
    await converse(rig, SAID, "In the woods.")
    for _ in ("awake", "asleep"):
        together, apart = await rig.service.contents("a"), await rig.service.contents("a", apart=True)
        assert [role for role, _ in roles_of(together)] == ["system+user+assistant", "user", "assistant"]
        assert [role for role, _ in roles_of(apart)] == ["system", "user", "assistant", "user", "assistant"]
        assert [each for each in roles_of(apart) if each in roles_of(together)] == roles_of(together)[1:]
        texts = ["".join(passage.text or "" for passage in found.passages) for found in (together, apart)]
        assert texts[0] == texts[1]
        for passage, said in zip(apart.passages, [*SAID, assistant("In the woods.")], strict=True):
            assert said["content"] in (passage.text or "")
            each = await rig.service.contents("a", start=passage.start, end=passage.end)
            assert "".join(part.text or "" for part in each.passages) == passage.text
        await rig.sleep("a")


async def test_an_awake_session_is_compared_as_it_is_in_memory(rig: Rigged) -> None:
    await converse(rig, SAID, "In the woods.")
    await rig.service.fork("a", "b")
    await rig.service.append("b", text=" And then?")
    found = await rig.service.difference("a", "b")
    assert (found.one.changed, found.other.changed, found.one.differs_at) == (False, True, None)
    assert (found.common_tokens, found.facts) == (found.one.token_count, ())
    assert found.other.text is not None
    assert " And then?" in found.other.text


@pytest.mark.parametrize("text", ["a", "a@1"])
async def test_a_manifest_is_that_of_the_version(rig: Rigged, text: str) -> None:
    await converse(rig, SAID, "In the woods.")
    receipt = await rig.sleep("a")
    found = await rig.service.contents(text, manifest=True)
    assert (found.bundle_id, found.passages) == (receipt.bundle_id, ())
    assert f'"block_tokens": {receipt.token_count}' in (found.manifest or "")
