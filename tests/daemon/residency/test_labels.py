"""All sessions of a label at once: figures, waking ahead of need, and clearing away without a trace."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torpor.memvid.errors import NoSpace, SessionNotFound
from torpor.memvid.store import Store
from torpor.tests.daemon.session_rig import Rigged, flip, listening, packs, tokens_of, until

ONE, TWO, THREE = tokens_of(1, 600), tokens_of(2, 600), tokens_of(3, 600)


async def read(rig: Rigged, name: str, tokens: list[int], *labels: str) -> Any:
    await rig.service.create(name, labels=labels)
    return await rig.service.append(name, tokens=tokens)


async def warm(rig: Rigged, *names: str, **options: Any) -> dict[str, Any]:
    result = await rig.service.warm(sessions=names, **options)
    return {each.info.name: each for each in result.sessions}


# --- stats


async def test_figures_are_those_of_the_listing_by_label_and_together(rig: Rigged) -> None:
    await read(rig, "a", ONE, "x")
    await read(rig, "b", TWO, "x", "y")
    await read(rig, "lab/c", THREE, "y")
    await read(rig, "d", [1, 2], *())
    await rig.sleep("b")
    infos = {info.name: info for info in await rig.service.list_sessions()}
    told = await rig.service.stats()
    assert [(each.label, each.sessions, each.awake, each.tokens) for each in told.labels] == [
        ("x", 2, 1, 1200),
        ("y", 2, 1, 1200),
    ]
    assert (told.total.label, told.total.sessions, told.total.awake, told.total.tokens) == (None, 4, 3, 1802)
    assert told.total.resident_bytes == sum(info.resident_bytes for info in infos.values())
    assert told.labels[0].written_bytes == infos["b"].written_bytes > 0
    (lab,) = (await rig.service.stats(namespace="lab")).labels
    assert (lab.label, lab.sessions) == ("y", 1)
    one = await rig.service.stats(label="x")
    assert one.total.sessions == one.labels[0].sessions == 2
    none = await rig.service.stats(label="nobody has it")
    assert (none.total.sessions, none.labels[0].tokens) == (0, 0)


# --- warm


async def test_a_warm_session_is_what_was_stored_and_the_second_warm_is_a_hit(open_rig: Any) -> None:
    """GM10: the second answer carries the persisted labels, and the hit count is one more."""
    async with open_rig() as rig:
        await read(rig, "a", ONE, "x", "kept")
        before = await rig.fingerprint("a")
        await rig.sleep("a")
    async with open_rig() as rig, listening(rig) as heard:
        first = (await warm(rig, "a"))["a"]
        assert (first.hit, first.left, first.hits, first.info.state) == (False, None, 0, "awake")
        second = (await warm(rig, label="x"))["a"]
        assert (second.hit, second.left, second.hits) == (True, None, 1)
        assert second.info == replace(first.info, used_ns=second.info.used_ns), "a warm is a use"
        assert second.info.labels == ("x", "kept")
        assert await rig.fingerprint("a") == before
        assert (await warm(rig, "a", label="kept"))["a"].hits == 2, "named twice, it is one"
        assert (await rig.service.stats(label="x")).total.hits == 2
        woken = await rig.service.append("a", tokens=[1])
        assert woken.woken is None
        assert [each["cause"] for each in heard.of("wake_ended", "a")] == ["warm"]


async def test_a_prefix_that_is_taken_over_is_a_hit_of_its_source(open_rig: Any) -> None:
    async with open_rig(prefix_reuse="exact") as rig:
        await read(rig, "a", ONE, "x")
        assert (await read(rig, "b", ONE, "y")).cached_tokens > 0
        assert [each.hits for each in (await rig.service.stats()).labels] == [1, 0]


async def test_warming_takes_free_memory_only_and_the_last_used_first(open_rig: Any, weights: int) -> None:
    """Nobody who is awake goes to sleep for what nobody has asked for."""
    names = ["a", "b", "c", "d"]
    async with open_rig() as rig:
        for name in names:
            await read(rig, name, tokens_of(1, 200), "x")
            await rig.sleep(name)
    async with open_rig(memory_budget=weights + 700_000) as rig, listening(rig) as heard:
        await rig.wake("a")
        found = await warm(rig, label="x")
        assert list(found) == ["a", "d", "c", "b"]
        assert {name: each.left for name, each in found.items() if each.left} == {
            name: "no_room" for name in found if not rig.is_awake(name)
        }
        assert found["a"].hit
        assert rig.is_awake("a")
        assert rig.is_awake("d")
        assert not rig.is_awake("b")
        assert heard.of("eviction_planned") == heard.of("sleep_began") == heard.of("memory_awaited") == []
        memory = (await rig.service.status()).memory
        assert memory.weights_bytes + memory.sessions_bytes + memory.reserved_bytes <= memory.budget_bytes
        assert memory.reserved_bytes == 0


async def test_one_that_cannot_be_woken_is_left_and_the_others_are_not(rig: Rigged, store: Path) -> None:
    await read(rig, "a", ONE, "x")
    await rig.sleep("a")
    (file,) = packs(store)
    await read(rig, "b", TWO, "x")
    await rig.sleep("b")
    flip(file, file.stat().st_size // 2)
    found = await warm(rig, label="x")
    assert (found["a"].left, found["b"].left) == ("corrupt_block", None)
    with pytest.raises(SessionNotFound):
        await warm(rig, "b", "nobody")
    assert await warm(rig, label="nobody has it") == {}


# --- clear


@pytest.mark.one_in(3)
@pytest.mark.parametrize("where", ["awake", "asleep", "both"])
async def test_what_is_cleared_is_nowhere_and_the_others_are_untouched(open_rig: Any, store: Path, where: str) -> None:
    """GM8: memory, disk, prefixes and counters of the label are gone; the next lookup misses, and others hit."""
    async with open_rig(prefix_reuse="exact") as rig:
        await read(rig, "a", ONE, "x")
        await read(rig, "b", TWO, "x", "y")
        await read(rig, "c", THREE, "y")
        if where != "awake":
            for name in ("a", "b", "c"):
                await rig.sleep(name)
        if where == "both":
            await rig.wake("a")
        await warm(rig, "a", "c")
        hits = {each.label: each.hits for each in (await rig.service.stats()).labels}

        told = await rig.service.clear(label="x", dry_run=True)
        assert (set(told.sessions), told.bytes_freed) == ({"torpor://default/a", "torpor://default/b"}, 0)
        assert told.tokens == 1200
        assert len(await rig.service.list_sessions()) == 3, "a dry run changes nothing"

        cleared = await rig.service.clear(label="x")
        assert (set(cleared.sessions), cleared.failed, cleared.problems) == (set(told.sessions), {}, ())
        assert (cleared.bytes_freed > 0) == (where != "awake")
        assert [info.name for info in await rig.service.list_sessions()] == ["c"]
        assert not rig.service._parts.sessions.residency.turns.in_use()
        assert (await read(rig, "d", ONE)).cached_tokens == 0
        assert (await read(rig, "e", TWO)).cached_tokens == 0
        assert (await read(rig, "f", THREE)).cached_tokens > 0
        figures = (await rig.service.stats()).labels
        assert [(each.label, each.hits) for each in figures] == [("y", hits["y"] + 1)]
        await read(rig, "a", [1, 2, 3], "x")
        assert (await rig.service.stats(label="x")).total.hits == 0, "another of that name begins with none"
        assert (await rig.service.clear(label="nobody has it")).sessions == ()
    with Store.open(store, writable=False) as opened:
        assert opened.verify(deep=True).ok
        assert {row.uri.name for row in opened.iter_sessions()} == {"a", "c", "d", "e", "f"}


async def test_a_clear_stays_in_its_namespace(rig: Rigged) -> None:
    await read(rig, "a", [1], "x")
    await read(rig, "lab/b", [1], "x")
    assert (await rig.service.clear(label="x", namespace="lab")).sessions == ("torpor://lab/b",)
    assert [info.name for info in await rig.service.list_sessions()] == ["a"]


async def test_a_session_in_use_is_cleared_when_its_turn_has_come(rig: Rigged) -> None:
    await read(rig, "a", [1, 2], "x")
    gate = rig.network.hold_at(1)
    busy = asyncio.create_task(rig.service.append("a", tokens=[1]))
    await gate.reached()
    clearing = asyncio.create_task(rig.service.clear(label="x"))
    await until(
        lambda: rig.service._parts.sessions.residency.turns.users(rig.service._parts.sessions.resolve("a")) == 2
    )
    gate.open()
    assert (await busy).token_count == 3
    assert (await clearing).sessions == ("torpor://default/a",)


async def test_what_cannot_be_deleted_is_told_and_stays(rig: Rigged, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        await read(rig, name, [1, 2], "x")
        await rig.sleep(name)
    delete = type(rig.service._parts.store.disk).delete_session

    def refuse(store: Any, uri: Any) -> Any:
        if uri.name == "a":
            raise NoSpace("no room")
        return delete(store, uri)

    with monkeypatch.context() as patch:
        patch.setattr(type(rig.service._parts.store.disk), "delete_session", refuse)
        told = await rig.service.clear(label="x")
    assert (told.sessions, told.failed) == (("torpor://default/b",), {"torpor://default/a": "no_space: no room"})
    assert [info.name for info in await rig.service.list_sessions()] == ["a"]
