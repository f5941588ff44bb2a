"""Equal beginnings that arrive together are read once, and each session is what it would have been alone."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from torpor.daemon.errors import GenerationFailed
from torpor.tests.daemon.conversing_rig import converse, script, user  # noqa: F401
from torpor.tests.daemon.session_rig import MODEL, Gate, Rigged, cancelled, reply_with, tokens_of, until

pytestmark = pytest.mark.usefixtures("short_calls")

TEXT = tokens_of(1, 1500)
NAMES = "abcdef"


def reading(rig: Rigged, name: str, tokens: list[int], **options: Any) -> asyncio.Task[Any]:
    append = rig.service.append(name, tokens=tokens, create=True, **options)
    return asyncio.ensure_future(append)


async def begun(
    rig: Rigged, names: str, tokens: list[int], *, at: int = 2, **options: Any
) -> tuple[asyncio.Task[Any], Gate]:
    """A reading of the first session, which stands in a model call; there are the others, too."""
    for name in names:
        await rig.service.create(name)
    gate = rig.network.hold_at(at)
    task = reading(rig, names[0], tokens, **options)
    await gate.reached()
    return task, gate


async def all_wait(rig: Rigged, count: int) -> None:
    """So many hold the turn of their session; those that came first have found out whom to wait for."""
    await until(lambda: len(rig.service._parts.sessions.residency.turns.in_use()) == count)
    for _ in range(50):
        await asyncio.sleep(0)


@pytest.fixture
def rig(open_rig: Any) -> Any:
    return open_rig(prefix_reuse="exact")


async def test_a_new_session_that_is_left_while_its_beginning_is_taken_over_is_gone(rig: Rigged) -> None:
    await rig.read("first", TEXT)
    await rig.sleep("first")
    gate = rig.network.hold_at(1)  # all but the last tokens are taken over; those are read
    task = reading(rig, "new", TEXT, labels=("nightly",), model=MODEL)
    await gate.reached()
    assert rig.is_awake("new")
    task.cancel()
    await asyncio.sleep(0)
    gate.open()
    await cancelled(task)
    assert [each.name for each in await rig.service.list_sessions()] == ["first"]
    told = await reading(rig, "new", TEXT, labels=("nightly",))
    assert told.cached_tokens > 1000
    assert (await rig.service.show("new")).info.labels == ("nightly",)


@pytest.mark.one_in(1)
@pytest.mark.parametrize("kind", ["plain", "gemma3_text"])
async def test_six_equal_prompts_are_read_once(open_kind: Any, open_rig: Any, kind: str) -> None:
    options: dict[str, Any] = {"prefix_reuse": "exact", "endless": True}
    opened = open_rig(**options) if kind == "plain" else open_kind(kind, **options)
    async with opened as rig:
        told = await asyncio.gather(*(reading(rig, name, TEXT) for name in NAMES))
        read = sum(each.prefilled_tokens for each in told)
        assert read == len(TEXT) + 5 * (1 if kind == "plain" else len(TEXT) - 1024)
        if kind == "plain":
            assert sum(rig.network.calls) == read
        found = [await rig.fingerprint(name) for name in NAMES]
        answers = [await rig.write(name, 8) for name in NAMES]
        await rig.service.create("alone")
        rig.service._parts.sessions.reuse._policy = "off"
        await rig.service.append("alone", tokens=TEXT)
        assert found == [await rig.fingerprint("alone")] * 6
        assert answers == [await rig.write("alone", 8)] * 6


async def test_six_equal_requests_of_clients_are_read_once(open_rig: Any) -> None:
    async with open_rig(prefix_reuse="exact", endless=False) as rig:
        reply_with(rig, "ja")
        said = [user("x" * 1_500)]
        told = await asyncio.gather(*(converse(rig, said, name=name, max_tokens=1) for name in NAMES))
        prompt = told[0].token_count - 1
        assert sorted(each.prefilled_tokens for each in told) == [1] * 5 + [prompt]


async def test_what_is_only_alike_at_first_is_shared_so_far_and_at_the_next_block(open_rig: Any) -> None:
    async with open_rig(prefix_reuse="exact", endless=False) as rig:
        common = "x" * 600
        long, short = [user(common + "y" * 1_200)], [user(common + "z" * 100)]
        first = asyncio.ensure_future(converse(rig, long, name="long", max_tokens=1))
        second = asyncio.ensure_future(converse(rig, short, name="short", max_tokens=1))
        told = await second
        assert not first.done(), "it does not wait for the end of the other"
        assert told.cached_tokens in (576, 512)
        await first


async def test_none_waits_for_more_than_it_has_to_read(rig: Rigged) -> None:
    first, gate = await begun(rig, "ls", [*TEXT[:300], *tokens_of(2, 1_500)])
    second = reading(rig, "s", [*TEXT[:300], *tokens_of(3, 10)])
    await all_wait(rig, 2)
    gate.open()
    told = await second
    assert (told.cached_tokens, first.done()) == (0, False)
    await first


@pytest.mark.one_in(1)
@pytest.mark.parametrize("how", ["left", "failed"])
async def test_if_the_first_one_ends_early_the_next_one_reads_for_the_others(rig: Rigged, how: str) -> None:
    first, gate = await begun(rig, NAMES, TEXT, at=5)
    others = [reading(rig, name, TEXT) for name in "bcdef"]
    await all_wait(rig, 6)
    if how == "failed":
        rig.network.after = lambda _number, _logits: 1 / 0
    else:
        first.cancel()
        await asyncio.sleep(0)
    gate.open()
    with pytest.raises(GenerationFailed if how == "failed" else asyncio.CancelledError):
        await first
    rig.network.reset()
    told = await asyncio.gather(*others)
    assert sorted(each.prefilled_tokens for each in told) == [1] * 4 + [len(TEXT)]
    assert sum(rig.network.calls) == len(TEXT) + 4
    assert len({await rig.fingerprint(name) for name in "bcdef"}) == 1


async def test_one_that_waits_may_leave(rig: Rigged) -> None:
    first, gate = await begun(rig, "abc", TEXT)
    second, third = reading(rig, "b", TEXT), reading(rig, "c", TEXT)
    await all_wait(rig, 3)
    second.cancel()
    await cancelled(second)
    gate.open()
    assert [(await each).prefilled_tokens for each in (first, third)] == [len(TEXT), 1]
    assert rig.live("b").state.tokens[:].tolist() == []


async def test_one_in_the_background_is_lifted_by_one_that_waits_for_it(rig: Rigged) -> None:
    first, gate = await begun(rig, "ab", TEXT, priority="background")
    second = reading(rig, "b", TEXT)
    await all_wait(rig, 2)
    assert rig.service._parts.queue.info().waiting >= 1
    assert rig.service._parts.queue.info().background == 0
    gate.open()
    assert [(await each).cached_tokens for each in (first, second)] == [0, len(TEXT) - 1]


@pytest.mark.one_in(1)
@pytest.mark.parametrize(("policy", "spaces"), [("off", "default"), ("exact", "other")])
async def test_nothing_is_shared_where_nothing_may_be(open_rig: Any, policy: str, spaces: str) -> None:
    async with open_rig(prefix_reuse=policy) as rig:
        told = await asyncio.gather(reading(rig, "a", TEXT), reading(rig, f"{spaces}/b", TEXT))
        assert [each.prefilled_tokens for each in told] == [len(TEXT)] * 2
