"""A session that begins as a dialogue does is a cache: whatever keeps it from answering, the dialogue is read anew."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from torpor.daemon.errors import EngineBusy, MemoryBudgetExceeded, MemoryBusy, ServiceClosed
from torpor.errors import TorporError
from torpor.memvid.errors import StoreError
from torpor.snapshot.errors import NotEnoughMemory
from torpor.tests.daemon.conversing_rig import SYSTEM, assistant, cold, converse, ledger, names, user, with_template
from torpor.tests.daemon.damage_rig import damage
from torpor.tests.daemon.session_rig import FullDisk, Rigged, as_killed, broken_at, until

TEXT = "".join(chr(97 + at % 26) for at in range(600))
SAID = [SYSTEM, user(TEXT)]
BEHIND = [*SAID, assistant("eins"), user("two")]


@asynccontextmanager
async def used_by_a_client(rig: Rigged, name: str) -> AsyncIterator[asyncio.Task[None]]:
    """The task of a request that holds the session and does not end."""
    ended = asyncio.Event()

    async def hold() -> None:
        with rig.service._parts.queue.admitted("normal"):
            async with rig.service._parts.sessions.residency.turns.take(rig.service._parts.sessions.resolve(name)):
                await ended.wait()

    task = asyncio.ensure_future(hold())
    await until(
        lambda: rig.service._parts.sessions.residency.turns.users(rig.service._parts.sessions.resolve(name)) > 0
    )
    try:
        yield task
    finally:
        ended.set()
        await asyncio.wait({task})


async def begun(rig: Rigged, *, asleep: bool = True) -> None:
    await converse(rig, SAID, "eins")
    if asleep:
        await rig.sleep("a")


async def require_anew(rig: Rigged, messages: list[Any], **options: Any) -> None:
    """The dialogue is answered in a session of its own, twice, and its next turn stands there."""
    told = await converse(rig, messages, "zwei", **options)
    name = told.session.rpartition("/")[2]
    assert name.startswith("a-")
    assert ledger(rig, name) == cold(rig, [*messages, assistant("zwei")])
    assert (await converse(rig, messages, "zwei", **options)).text == "zwei"
    on = await converse(rig, [*messages, assistant("zwei"), user("on")], "ja", **options)
    assert (on.session, on.prefilled_tokens < 60) == (told.session, True)


@pytest.mark.one_in(1)
@pytest.mark.parametrize("messages", [SAID, BEHIND], ids=["the same again", "its next turn"])
async def test_a_dialogue_is_read_anew_where_the_session_is_damaged(
    rig: Rigged, store: Path, messages: list[Any]
) -> None:
    await begun(rig)
    damage(store, "a", span=0)
    await require_anew(rig, messages)


async def test_a_dialogue_is_read_anew_where_the_session_is_of_another_state_of_the_model(
    open_rig: Any, own_tiny_model: Path
) -> None:
    async with open_rig(own_tiny_model, endless=False) as rig:
        template = rig.model.tokenizer.chat_template
        await begun(rig)
    with_template(own_tiny_model, template + "{# changed #}")
    async with open_rig(own_tiny_model, endless=False) as rig:
        await require_anew(rig, BEHIND)
        assert "a" in await names(rig)


async def test_a_dialogue_is_read_anew_where_a_fork_has_no_room(rig: Rigged, monkeypatch: pytest.MonkeyPatch) -> None:
    await begun(rig)
    await converse(rig, BEHIND, "zwei")
    disk = FullDisk(monkeypatch)
    told = await converse(rig, SAID, "uno")
    assert (told.text, disk.refused) == ("uno", 1)
    assert ledger(rig, told.session.rpartition("/")[2]) == cold(rig, [*SAID, assistant("uno")])
    disk.free()


@pytest.mark.one_in(1)
@pytest.mark.parametrize("error", [MemoryBudgetExceeded, MemoryBusy, NotEnoughMemory, EngineBusy, ServiceClosed])
async def test_a_dialogue_is_not_read_anew_where_the_daemon_has_no_room_for_its_session(
    rig: Rigged, monkeypatch: pytest.MonkeyPatch, error: type[TorporError]
) -> None:
    """A new session would need as much, and read all of it."""
    await begun(rig)

    async def refused(*_: object) -> None:
        raise error("There is no room now.")

    with monkeypatch.context() as patch:
        patch.setattr(rig.service._parts.sessions.residency, "bring_back", refused)
        with pytest.raises(error):
            await converse(rig, BEHIND, "zwei")
    assert await names(rig) == {"a"}
    told = await converse(rig, BEHIND, "zwei")
    assert (told.session, told.prefilled_tokens < 60) == ("torpor://default/a", True)


@pytest.mark.one_in(1)
async def test_a_dialogue_is_read_anew_where_so_many_wait_for_the_session(rig: Rigged) -> None:
    await begun(rig, asleep=False)
    for _ in range(2):  # all begin together, and then all begin alike
        told = await asyncio.gather(*(converse(rig, SAID, max_tokens=2) for _ in range(40)))
        assert len({each.session for each in told}) == 40
        assert len({each.tokens for each in told}) == 1


@pytest.mark.one_in(1)
@pytest.mark.parametrize("messages", [SAID, BEHIND], ids=["the same again", "its next turn"])
async def test_nobody_waits_for_the_answer_of_another_client(rig: Rigged, messages: list[Any]) -> None:
    await begun(rig, asleep=False)
    async with used_by_a_client(rig, "a"):
        await require_anew(rig, messages)


async def test_a_request_that_was_given_up_and_the_daemons_own_work_are_waited_for(rig: Rigged) -> None:
    """They end soon, and the session is the client's own."""
    await begun(rig, asleep=False)
    held, uri = asyncio.Event(), rig.service._parts.sessions.resolve("a")
    async with rig.service._parts.sessions.residency.turns.take(uri):  # of no request
        asking = asyncio.ensure_future(converse(rig, BEHIND, "zwei"))
        await until(lambda: rig.service._parts.sessions.residency.turns.users(uri) == 2)
    assert (await asking).session == "torpor://default/a"

    async def leave_slowly() -> None:
        with rig.service._parts.queue.admitted("normal"):
            async with rig.service._parts.sessions.residency.turns.take(uri):
                try:
                    await asyncio.Event().wait()
                finally:
                    await held.wait()

    leaving = asyncio.ensure_future(leave_slowly())
    await until(lambda: rig.service._parts.sessions.residency.turns.is_busy(uri))
    leaving.cancel()
    asking = asyncio.ensure_future(converse(rig, [*BEHIND, assistant("zwei"), user("three")], "drei"))
    await until(lambda: rig.service._parts.sessions.residency.turns.users(uri) == 2)
    held.set()
    assert (await asking).session == "torpor://default/a"
    assert leaving.cancelled()
    assert await names(rig) == {"a"}


async def test_a_failure_behind_the_choice_of_the_session_is_the_clients(rig: Rigged) -> None:
    await begun(rig, asleep=False)
    await broken_at(rig, 1, converse(rig, BEHIND))
    assert await names(rig) == {"a"}


async def test_a_client_that_names_an_answer_is_told_what_keeps_its_session(rig: Rigged, store: Path) -> None:
    answer = "ab" * 16
    await converse(rig, SAID, "eins", answer_id=answer)
    await rig.sleep("a")
    damage(store, "a", span=0)
    with pytest.raises(StoreError):
        await converse(rig, [user("two")], "zwei", after=answer)
    assert await names(rig) == {"a"}


@pytest.mark.one_in(1)
@pytest.mark.parametrize("repairs", [True, False])
@pytest.mark.parametrize("folder", ["versions", "packs"])
async def test_a_new_dialogue_takes_no_name_of_versions_that_cannot_be_woken(
    rig: Rigged, store: Path, repairs: bool, folder: str
) -> None:
    await begun(rig)
    for file in (store / folder).iterdir():
        file.rename(file.with_suffix(".away"))
    if repairs:
        await rig.service.maintain("repair")
    for said in ([user("another")], [user("a third")]):
        told = await converse(rig, said, "ja")
        assert told.session.startswith("torpor://default/a-")


async def test_a_new_dialogue_takes_no_name_of_a_session_that_only_the_journal_has(open_rig: Any, store: Path) -> None:
    async with open_rig(endless=False) as rig:
        await begun(rig, asleep=False)
        killed = as_killed(store)
    async with open_rig(store=killed, endless=False) as rig:
        told = await converse(rig, [user("another")], "ja")
        assert told.session.startswith("torpor://default/a-")
        assert (await converse(rig, BEHIND, "zwei")).session == "torpor://default/a"


async def test_a_name_of_the_greatest_length_has_a_group_too(rig: Rigged) -> None:
    name = "n" * 128
    first = await converse(rig, [user("one")], "eins", name)
    told = await converse(rig, [user("other")], "ja", name)
    assert first.session.endswith(f"/{name}")
    assert told.session.rpartition("/")[2][:119] == name[:119]
    on = await converse(rig, [user("other"), assistant("ja"), user("on")], "ja", name)
    assert on.session == told.session


async def test_two_that_fork_a_look_at_once_have_two_names(rig: Rigged) -> None:
    await begun(rig)
    await rig.wake("a", at_token=300)
    rig.script.clear()
    told = await asyncio.gather(*(converse(rig, BEHIND, name="b", max_tokens=2) for _ in range(2)))
    assert {told[0].session, told[1].session} > {"torpor://default/b"}
    assert all(each.prefilled_tokens < 300 for each in told), "they are forks"


@pytest.mark.one_in(1)
@pytest.mark.usefixtures("short_calls")
@pytest.mark.parametrize("asleep", [False, True])
async def test_a_fork_at_an_early_answer_wins_over_no_far_longer_beginning(open_rig: Any, asleep: bool) -> None:
    """Of two dialogues that have an answer in common, and most of the long message behind it."""
    opening = [SYSTEM, user("one"), assistant("eins")]
    long, other = ([*opening, user(TEXT * 2 + end)] for end in ("this", "that"))
    async with open_rig(endless=False, prefix_reuse="exact") as rig:
        await converse(rig, long, "zwei", "whole")
        await converse(rig, opening[:2], "eins", "short")
        if asleep:
            await rig.sleep("whole")
        told = await converse(rig, other, "drei")
        assert told.cached_tokens >= 768
        assert ledger(rig) == cold(rig, [*other, assistant("drei")])
        if asleep:
            await rig.sleep(told.session.rpartition("/")[2])
        fork = await converse(rig, [*opening, user("short")], "vier", "b")
        assert (fork.cached_tokens, fork.prefilled_tokens < 40) == (0, True), "the answer is all that is common"


@pytest.mark.one_in(1)
@pytest.mark.usefixtures("short_calls")
@pytest.mark.parametrize("asleep", [False, True])
async def test_a_far_longer_beginning_wins_where_it_is_a_fork_itself(open_rig: Any, asleep: bool) -> None:
    """Of three dialogues that have an answer in common, two of them most of the long message behind it: the second is a
    fork of the first, so no new session reads in its calls."""
    opening = [SYSTEM, user("one"), assistant("eins")]
    long, other = ([*opening, user(TEXT * 2 + end)] for end in ("this", "that"))
    async with open_rig(endless=False, prefix_reuse="exact") as rig:
        await converse(rig, opening[:2], "eins", "short")
        first = await converse(rig, long, "zwei", "b")
        assert first.session != "torpor://default/short"
        if asleep:
            for name in sorted(await names(rig)):
                await rig.sleep(name)
        told = await converse(rig, other, "drei", "c")
        assert told.prefilled_tokens < 300
        fork = told.session.rpartition("/")[2]
        assert ledger(rig, fork) == cold(rig, [*other, assistant("drei")])
        again = await converse(rig, [*opening, user("short")], "vier", "d")
        assert again.prefilled_tokens < 40, "the answer is all that is common"
