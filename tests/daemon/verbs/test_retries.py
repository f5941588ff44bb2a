"""A client that left in the midst of an answer sends the same request again: it goes on from there."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from torpor.daemon.api.events import ProgressEvent, TokenEvent
from torpor.daemon.api.records import NamedSampling
from torpor.daemon.api.sampling import Sampling, TokenBias
from torpor.daemon.errors import GenerationFailed
from torpor.daemon.tasks.cancellation import LeftMidway
from torpor.tests.daemon.conversing_rig import (
    SYSTEM,
    THINKS,
    TOOLS,
    assistant,
    cold,
    converse,
    ledger,
    names,
    reply_with,
    result_of,
    tell,
    two_calls,
    user,
    with_template,
)
from torpor.tests.daemon.session_rig import END, MODEL, Rigged

pytestmark = pytest.mark.usefixtures("short_calls")

LONG = "".join(chr(97 + at % 26) for at in range(700))


@pytest.fixture
def long_model(own_tiny_model: Path) -> Path:
    """The tiny model with a context for a long prompt."""
    path = own_tiny_model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": 32_768}))
    return own_tiny_model


async def leave_in(rig: Rigged, messages: Sequence[Any], *, read: int = 0, written: int = 0, **options: Any) -> Any:
    """Ask, and leave once so many tokens were read or written by this request; gives what stays. Before each call the
    model waits until the service knows of the one before it: on a busy machine a short answer would end before."""
    seen, loop, before = 0, asyncio.get_running_loop(), rig.network.before

    def on_event(event: Any) -> None:
        nonlocal seen
        if isinstance(event, ProgressEvent) and event.stage == "prefill" and read and event.done >= read:
            task.cancel()
        if isinstance(event, TokenEvent) and event.token is not None:
            seen += 1
            if written and seen >= written:
                task.cancel()

    async def hear() -> None:
        for _ in range(40):  # from future to future an event goes, and then a cancellation, a turn each
            await asyncio.sleep(0)

    def wait(*call: Any) -> None:
        asyncio.run_coroutine_threadsafe(hear(), loop).result(20)
        before(*call)

    rig.network.before = wait
    task = asyncio.ensure_future(converse(rig, messages, on_event=on_event, **options))
    with pytest.raises(asyncio.CancelledError) as left:
        await task
    rig.network.before = before
    return left.value


async def test_of_a_message_that_was_read_in_part_whole_blocks_stay(rig: Rigged) -> None:
    said = [SYSTEM, user(LONG)]
    whole = rig.model.encode(rig.model.render(said, True), opening=False)
    left = await leave_in(rig, said, read=512)
    assert isinstance(left, LeftMidway)
    assert (left.was_read, left.token_count) == (False, 512)
    assert ledger(rig) == whole[:512]
    assert rig.live("a").state.is_consistent
    told = await converse(rig, said, "ja")
    assert (told.session, told.text) == ("torpor://default/a", "ja")
    assert told.prefilled_tokens == len(whole) - 512
    assert ledger(rig) == cold(rig, [*said, assistant("ja")])
    assert await names(rig) == {"a"}


@pytest.mark.one_in(1)
@pytest.mark.parametrize("place", ["after", "at_end", "whole"])
async def test_of_a_message_that_was_read_whole_before_the_client_left_nothing_is_read_twice(
    rig: Rigged, place: str
) -> None:
    """It left before the first token of the answer."""
    answer_id = "ab" * 16
    said = [SYSTEM, user("one"), assistant("eins")]
    await converse(rig, said[:2], "eins", answer_id=answer_id)
    at: dict[str, Any] = {"after": {"after": answer_id}, "at_end": {"at_end": True}, "whole": {}}[place]
    new = [*said, user(LONG)] if place == "whole" else [user(LONG)]
    whole = rig.model.encode(rig.model.render([*said, user(LONG)], True), opening=False)
    left = await leave_in(rig, new, read=len(whole) - len(ledger(rig)), **at)
    assert isinstance(left, LeftMidway)
    assert (left.was_read, left.tokens, ledger(rig)) == (True, (), whole)
    told = await converse(rig, new, "ja", **at)
    assert (told.prefilled_tokens, told.session) == (0, "torpor://default/a")
    assert ledger(rig) == cold(rig, [*said, user(LONG), assistant("ja")])
    assert await names(rig) == {"a"}


async def test_what_was_read_with_breaks_is_the_same_to_the_bit(rig: Rigged) -> None:
    said = [SYSTEM, user(LONG)]
    for read in (256, 300):
        await leave_in(rig, said, read=read)
    await converse(rig, said, "ja")
    await rig.service.chat("alone", messages=said, max_tokens=1, create=True)
    broken, alone = rig.live("a").state, rig.live("alone").state
    count = len(alone.tokens) - 1
    assert list(broken.passes.between(0, count)) == list(alone.passes.between(0, count))
    reply_with(rig, "ja")
    await rig.service.chat("b", messages=said, max_tokens=60, create=True)
    assert await rig.fingerprint("a") == await rig.fingerprint("b")


@pytest.mark.one_in(1)
@pytest.mark.parametrize("tokens", [4_000, pytest.param(20_000, marks=pytest.mark.heavy)])
async def test_a_long_prefill_that_is_cut_ten_times_ends(open_rig: Any, long_model: Path, tokens: int) -> None:
    async with open_rig(long_model, endless=False) as rig:
        said = [user("".join(chr(97 + at % 26) for at in range(tokens)))]
        computed: list[int] = []
        rig.network.before = lambda _number, given, _cache: computed.append(given.shape[1])
        for at in range(10):
            await leave_in(rig, said, read=tokens // 11 + at, max_tokens=1)
        told = await converse(rig, said, max_tokens=1)
        assert told.session == "torpor://default/a"
        prompt = told.token_count - len(told.tokens)
        assert prompt > tokens
        again = sum(computed) - prompt - len(told.tokens)
        assert 0 < again < 2_560
        assert await names(rig) == {"a"}


async def test_an_answer_that_was_cut_off_is_told_again_and_goes_on(rig: Rigged) -> None:
    said = [SYSTEM, user("one")]
    reply_with(rig, "eins zwei drei")
    await leave_in(rig, said, written=5)
    held = ledger(rig)
    asked = rig.model.encode(rig.model.render(said, True), opening=False)
    drawn = rig.model.encode("eins zwei drei", opening=False)
    rig.script[:] = [*drawn[len(held) - len(asked) :], END]
    rig.network.reset()
    heard: list[Any] = []
    told = await converse(rig, said, on_event=heard.append)
    assert (told.text, told.session) == ("eins zwei drei", "torpor://default/a")
    assert "".join(each.text for each in heard if isinstance(each, TokenEvent)) == "eins zwei drei"
    assert (told.prefilled_tokens, told.finish_reason) == (0, "stop")
    assert len(rig.network.calls) == len(ledger(rig)) - len(held)
    assert ledger(rig) == cold(rig, [*said, assistant("eins zwei drei")])
    again = await converse(rig, [*said, assistant(told.text), user("two")], "ja")
    assert again.session == told.session
    assert ledger(rig) == cold(rig, [*said, assistant(told.text), user("two"), assistant("ja")])


async def test_with_logprobs_an_answer_that_was_cut_off_begins_anew(rig: Rigged) -> None:
    """The logits of what it had written are gone."""
    said = [SYSTEM, user("one")]
    reply_with(rig, LONG)
    await leave_in(rig, said, written=5, logprobs=1, max_tokens=900)
    told = await converse(rig, said, "eins zwei", logprobs=1)
    assert (told.text, len(told.logprobs), len(told.tokens)) == ("eins zwei", 10, 10)
    assert told.session != "torpor://default/a"
    again = await converse(rig, [*said, assistant("eins zwei"), user("two")], "ja")
    assert again.session == told.session


@pytest.mark.one_in(1)
@pytest.mark.parametrize("seeded", [True, False])
async def test_a_drawn_answer_goes_on_as_it_would_have(open_rig: Any, seeded: bool) -> None:
    """By its own seed: behind a sleep, and in the next process, too."""
    sampling = Sampling(temperature=0.9, seed=7) if seeded else Sampling(temperature=0.9)
    said = [user("one")]
    async with open_rig() as rig:
        await leave_in(rig, said, name="cut", written=20, sampling=sampling)
        await leave_in(rig, said, name="cut", written=30, sampling=sampling)
        await rig.sleep("cut")
    async with open_rig() as rig:
        told = await converse(rig, said, name="cut", sampling=sampling)
        assert told.session == "torpor://default/cut"
    async with open_rig() as rig:
        by_its_seed = Sampling(temperature=0.9, seed=told.seed)
        assert (await converse(rig, said, name="whole", sampling=by_its_seed)).tokens == told.tokens


@pytest.mark.one_in(1)
async def test_without_a_seed_each_answer_is_another_and_tells_its_seed(open_rig: Any) -> None:
    said, drawing = [user("one")], Sampling(temperature=0.9)
    async with open_rig() as rig:
        first, second = [await converse(rig, said, sampling=drawing) for _ in range(2)]
        assert first.tokens != second.tokens
        assert first.seed != second.seed
        again = await converse(rig, said, sampling=Sampling(temperature=0.9, seed=first.seed))
        assert (again.tokens, again.seed) == (first.tokens, first.seed)
        assert rig.live("a").sampling == Sampling(), "the session keeps its own"
        assert (await converse(rig, said, name="greedy")).seed is None


async def test_a_seed_that_the_session_was_given_draws_its_answers(rig: Rigged) -> None:
    drawn = []
    for name in "ab":
        await rig.service.create(name, sampling=Sampling(temperature=0.9, seed=7))
        drawn.append(await converse(rig, [user("one")], name=name, at_end=True))
    assert drawn[0].tokens == drawn[1].tokens
    assert drawn[0].seed is None


async def test_it_goes_on_after_a_sleep_and_in_the_next_process(open_rig: Any) -> None:
    said, later = [user(LONG)], [user("one")]
    async with open_rig(endless=False) as rig:
        await leave_in(rig, said, read=300)
        reply_with(rig, "eins zwei")
        await leave_in(rig, later, name="b", written=4)
        await rig.sleep("a")
    async with open_rig(endless=False) as rig:
        told = await converse(rig, said, "ja")
        assert (told.session, ledger(rig)) == ("torpor://default/a", cold(rig, [*said, assistant("ja")]))
        assert told.prefilled_tokens == told.token_count - len(told.tokens) - 256
        rig.script[:] = rig.model.encode("zwei", opening=False)[1:]
        told = await converse(rig, later, name="b", max_tokens=60)
        assert told.session == "torpor://default/b"
        assert told.text.startswith("eins")


async def test_another_request_forks_where_the_message_began_and_harms_nothing(rig: Rigged) -> None:
    before = [SYSTEM, user("one"), assistant("eins")]
    await converse(rig, before[:2], "eins")
    await leave_in(rig, [*before, user(LONG)], read=256)
    held = ledger(rig)
    other = await converse(rig, [*before, user("two")], "zwei")
    fork = other.session.rpartition("/")[2]
    assert fork.startswith("a-")
    assert ledger(rig, fork) == cold(rig, [*before, user("two"), assistant("zwei")])
    assert ledger(rig) == held
    told = await converse(rig, [*before, user(LONG)], "drei")
    assert told.session == "torpor://default/a"
    assert ledger(rig) == cold(rig, [*before, user(LONG), assistant("drei")])


async def test_other_sampling_or_another_name_is_another_request(rig: Rigged) -> None:
    said = [user("one")]
    reply_with(rig, "eins zwei drei")
    await leave_in(rig, said, written=5)
    for options in ({"sampling": Sampling(temperature=0.5)}, {"name": "b"}, {"max_tokens": 50}):
        told = await converse(rig, said, "uno", **options)
        assert (told.text, told.session == "torpor://default/a") == ("uno", False)


async def test_one_new_message_comes_behind_what_is_whole(rig: Rigged) -> None:
    before = [SYSTEM, user("one"), assistant("eins")]
    await converse(rig, before[:2], "eins")
    await leave_in(rig, [*before, user(LONG)], read=256)
    told = await tell(rig, "two", reply="zwei")
    assert told.text == "zwei"
    assert ledger(rig) == cold(rig, [*before, user("two"), assistant("zwei")])


async def test_a_failure_leaves_nothing_of_what_was_read(rig: Rigged) -> None:
    rig.network.fail_at(9, layers_grown=1)
    with pytest.raises(GenerationFailed):
        await converse(rig, [user(LONG)])
    rig.network.reset()
    assert await names(rig) == set()
    told = await converse(rig, [user(LONG)], "ja")
    assert told.prefilled_tokens == told.token_count - len(told.tokens)


@pytest.mark.one_in(1)
@pytest.mark.parametrize("kind", ["gemma3", "mamba2"])
async def test_a_model_of_whole_state_keeps_what_it_has_a_checkpoint_of(open_kind: Any, kind: str) -> None:
    async with open_kind(kind, endless=False) as rig:
        said = [user(LONG + LONG)]
        await leave_in(rig, said, read=600, max_tokens=3)
        held = len(ledger(rig))
        assert held in (512, 1024)
        assert rig.live("a").state.is_consistent
        told = await converse(rig, said, max_tokens=3)
        prompt = told.token_count - len(told.tokens)
        assert told.prefilled_tokens == prompt - held
        await rig.service.chat("b", messages=said, max_tokens=3, create=True)
        assert (await rig.fingerprint("a")).kv == (await rig.fingerprint("b")).kv


@pytest.mark.parametrize("leaves", [{"read": 300}, {"written": 4}], ids=["in its message", "in its answer"])
async def test_a_request_behind_an_answer_goes_on_too(rig: Rigged, leaves: dict[str, int]) -> None:
    await converse(rig, [user("one")], "eins", answer_id="11" * 16)
    before, asked = ledger(rig), {"after": "11" * 16, "max_tokens": 9}
    await leave_in(rig, [user(LONG)], **leaves, **asked)
    held = ledger(rig)
    assert len(held) > len(before)
    told = await converse(rig, [user(LONG)], answer_id="22" * 16, **asked)
    assert told.session == "torpor://default/a"
    assert ledger(rig)[: len(held)] == held
    assert ledger(rig)[: len(before)] == before
    told = await converse(rig, [user("two")], "zwei", after="22" * 16)
    assert told.session == "torpor://default/a"


@pytest.mark.parametrize("leaves", [{"read": 300}, {"written": 4}], ids=["in its message", "in its answer"])
async def test_a_request_that_takes_an_opened_turn_back_goes_on_too(
    open_rig: Any, long_model: Path, leaves: dict[str, int]
) -> None:
    """It stands before that turn the second time, too, and not behind an empty answer."""
    said = [user("one"), assistant("eins"), user(LONG)]
    async with open_rig(with_template(long_model, THINKS)) as rig:
        await rig.service.append("a", messages=said[:1], create=True)
        await leave_in(rig, said[1:], **leaves, at_end=True, max_tokens=9)
        measured = await rig.service.measure("a", said[1:], at_end=True, max_tokens=9)
        told = await converse(rig, said[1:], at_end=True, max_tokens=9)
        opened = rig.model.encode(rig.model.render(said, True), opening=False)
        assert ledger(rig)[: len(opened)] == opened
        assert told.token_count - len(told.tokens) == measured.tokens == len(opened)


async def test_messages_are_appended_behind_a_request_that_was_given_up_in_its_message(rig: Rigged) -> None:
    await converse(rig, [user("one")], "eins")
    whole = ledger(rig)
    await leave_in(rig, [user(LONG)], read=300, at_end=True)
    assert len(ledger(rig)) > len(whole) + 200
    await rig.service.append("a", messages=[user("two")])
    assert [each.content for each in (await rig.service.recall("a")).messages] == ["one", "eins", "two"]
    assert len(ledger(rig)) < len(whole) + 200


@pytest.mark.one_in(1)
@pytest.mark.parametrize("asleep", [False, True], ids=["awake", "asleep"])
@pytest.mark.parametrize("leaves", [{"read": 300}, {"written": 4}], ids=["in its message", "in its answer"])
async def test_a_request_that_is_asked_again_has_the_size_that_it_had(
    rig: Rigged, leaves: dict[str, int], asleep: bool
) -> None:
    """Another one stands behind what was read of it, unless that is a part of a message."""
    asked: dict[str, Any] = {"at_end": True, "tools": TOOLS, "instructions": "Be brief."}
    await converse(rig, [user("one")], "eins")
    sizes = [await rig.service.measure("a", [user(text)], **asked) for text in (LONG, "two")]
    await leave_in(rig, [user(LONG)], **leaves, **asked, max_tokens=9)
    if asleep:
        await rig.service.sleep("a")
    given = {**asked, "max_tokens": 9}
    again, other = [await rig.service.measure("a", [user(text)], **given) for text in (LONG, "two")]
    for changed in ({"max_tokens": 8}, {"sampling": NamedSampling(temperature=0.5)}, {"stop": ("x",)}, {"logprobs": 1}):
        more = await rig.service.measure("a", [user(LONG)], **{**given, **changed})
        assert more.tokens == sizes[0].tokens if "read" in leaves else more.tokens > again.tokens
    assert (again.tokens, again.cached_tokens > sizes[0].cached_tokens) == (sizes[0].tokens, True)
    assert other.tokens == sizes[1].tokens if "read" in leaves else other.tokens > again.tokens
    told = await converse(rig, [user(LONG)], **asked, max_tokens=9)
    assert told.token_count - len(told.tokens) == again.tokens


async def test_the_first_request_of_a_session_says_its_system_text_again_when_it_is_asked_again(rig: Rigged) -> None:
    asked: dict[str, Any] = {"at_end": True, "instructions": "Be brief."}
    await rig.service.create("a", system="You are in a test.", model=MODEL)
    size = await rig.service.measure("a", [user("one")], **asked)
    await leave_in(rig, [user("one")], written=4, **asked, max_tokens=9)
    held = ledger(rig)
    assert (await rig.service.measure("a", [user("one")], **asked, max_tokens=9)).tokens == size.tokens
    told = await converse(rig, [user("one")], **asked, max_tokens=9)
    assert (told.token_count - len(told.tokens), ledger(rig)[: len(held)]) == (size.tokens, held)
    texts = [each.content for each in (await rig.service.recall("a")).messages]
    assert texts[:2] == ["Be brief.\n\nYou are in a test.", "one"]


@pytest.mark.parametrize("results", [("b",), ("d", "c"), ("b", "c")], ids=["late", "not in order", "both"])
async def test_a_request_with_results_of_any_calls_is_known_when_it_is_asked_again(
    rig: Rigged, results: Sequence[str]
) -> None:
    said = [user("q"), two_calls("a", "b"), user("wait"), two_calls("c", "d")]
    await rig.service.append("a", messages=said, create=True)
    again = [*(result_of(each, "the same") for each in results), user("on")]
    size = await rig.service.measure("a", again, at_end=True)
    await leave_in(rig, again, written=4, at_end=True, max_tokens=9)
    held = ledger(rig)
    assert (await rig.service.measure("a", again, at_end=True, max_tokens=9)).tokens == size.tokens
    other = [*(result_of("a", "the same") for _ in results), user("on")]
    assert (await rig.service.measure("a", other, at_end=True, max_tokens=9)).tokens > size.tokens
    told = await converse(rig, again, at_end=True, max_tokens=9)
    assert (told.token_count - len(told.tokens), ledger(rig)[: len(held)]) == (size.tokens, held)
    await leave_in(rig, again, written=4, at_end=True, max_tokens=9)
    told = await converse(rig, other, at_end=True, max_tokens=9)
    messages = (await rig.service.recall("a")).messages
    by_id = {call.id: call.arguments["at"] for each in messages for call in each.tool_calls}
    answered = [by_id[each.tool_call_id] for each in messages if each.role == "tool"]
    assert answered[-len(results) :] == ["a"] * len(results)


async def test_penalties_count_what_is_written_of_an_answer_that_goes_on(rig: Rigged) -> None:
    few = [TokenBias(token, 100.0) for token in range(64, 69)]
    asked: dict[str, Any] = {"sampling": Sampling(frequency_penalty=2.0, logit_bias=few), "max_tokens": 20}
    whole = await rig.service.converse("whole", [user("one")], **asked)
    await rig.service.delete("whole")
    await leave_in(rig, [user("one")], written=3, **asked)
    begun = len(ledger(rig)) - (whole.token_count - len(whole.tokens))
    await rig.service.sleep("a")
    rig.network.reset()
    told = await converse(rig, [user("one")], **asked)
    assert (told.tokens, told.prefilled_tokens, 0 < begun < 20) == (whole.tokens, 0, True)
