"""Sessions whose name nobody chose, as clients of HTTP begin them, and how they come to have one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torpor.daemon.api.session import SessionInfo
from torpor.memvid.index.index import INDEX_FILE
from torpor.memvid.uri import SessionUri
from torpor.tests.daemon.session_rig import Rigged, as_killed, tokens_of

SAID = [{"role": "user", "content": "Hello."}]


async def listed(rig: Rigged) -> dict[str, SessionInfo]:
    return {each.name: each for each in await rig.service.list_sessions()}


async def converse(rig: Rigged, *messages: dict[str, Any], **options: Any) -> Any:
    return await rig.service.converse("key", messages or SAID, max_tokens=4, unnamed=True, **options)


async def test_that_nobody_named_a_session_lasts_until_somebody_does(open_rig: Callable[..., Any], store: Path) -> None:
    async with open_rig(endless=False) as rig:
        first = await converse(rig)
        assert (await listed(rig))["key"].unnamed
        later = [*SAID, {"role": "assistant", "content": first.text}, {"role": "user", "content": "More."}]
        await converse(rig, *later)
        killed = as_killed(store)
        await rig.sleep("key")
        assert (await listed(rig))["key"].unnamed
        await rig.wake("key")
        await rig.service.set("key", labels=["mine"])
        assert rig.live("key").unnamed, "a label is no name"
        await rig.service.append("key", text="Mine.")
        assert not rig.live("key").unnamed
        await rig.service.append("key", text="Its.", unnamed=True)
        assert not rig.live("key").unnamed, "named for good"
    async with open_rig() as rig:
        assert not (await listed(rig))["key"].unnamed
        await rig.wake("key", version=1)
        await rig.service.append("key", text="From before it had a name.", unnamed=True)
        await rig.sleep("key")
        assert not (await listed(rig))["key"].unnamed
    async with open_rig(store=killed) as rig:
        assert (await listed(rig))["key"].unnamed, "a turn of the journal tells it"


@pytest.mark.parametrize("verb", ["generate", "chat", "append"])
async def test_what_makes_a_session_by_a_name_names_it(open_rig: Callable[..., Any], verb: str) -> None:
    said = {"message": "Hi."} if verb == "chat" else {"text": "Hi."}
    said |= {} if verb == "append" else {"max_tokens": 1}
    async with open_rig() as rig:
        for unnamed in (True, False):
            await getattr(rig.service, verb)(f"s{unnamed}", create=True, unnamed=unnamed, **said)
        assert [rig.live(f"s{unnamed}").unnamed for unnamed in (True, False)] == [True, False]
        await getattr(rig.service, verb)("sTrue", **said)
        assert not rig.live("sTrue").unnamed


async def test_what_is_made_of_a_session_that_nobody_named_has_a_name(
    open_rig: Callable[..., Any], store: Path
) -> None:
    async with open_rig(endless=False) as rig:
        await rig.service.append("key", tokens=tokens_of(1, 300), create=True, unnamed=True)
        for name, at in (("whole", None), ("part", 100)):
            await rig.service.fork("key", name=name, at_token=at)
        await rig.service.fold("key", name="fold", summary="Short.")
        tree = await rig.service.tree("key")
        await rig.service.keep(tree.branch, name="kept")
        await converse(rig, {"role": "user", "content": "Hi."}, answer_id="ab" * 16)
        await converse(rig, {"role": "user", "content": "On."}, after="ab" * 16)
        other = await converse(rig, {"role": "user", "content": "Or so."}, after="ab" * 16)
        found = {name: info.unnamed for name, info in (await listed(rig)).items()}
        fork_of_converse = SessionUri.parse(other.session).name
        own = {fork_of_converse, "key", *(name for name in found if name.startswith("key-"))}
        assert {name for name, unnamed in found.items() if unnamed} == own
        assert found.keys() - own == {"whole", "part", "fold", "kept"}
        assert found[fork_of_converse]
    (store / INDEX_FILE).unlink()
    async with open_rig() as rig:
        assert {name: info.unnamed for name, info in (await listed(rig)).items()} == found, "by the manifests"
