"""A system text with a clock: what was read before it stays, and the model reads each hour once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torpor.daemon.chat.folds import REQUEST
from torpor.daemon.sessions.transcripts import message_of
from torpor.snapshot.checkpoints import CHECKPOINT_TOKENS
from torpor.tests.daemon.conversing_rig import assistant, converse, ledger, result_of, user
from torpor.tests.daemon.models.template_families import MISTRAL, STRICT, Family, write_family
from torpor.tests.daemon.session_rig import Rigged, as_killed

CALL = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'


def told_at(hour: int, build: int = 1) -> dict[str, Any]:
    text = f"You are a helper.\nCurrent time: {hour}:00\nBuild {build} of it.\nBe brief."
    return dict(message_of("system", text))


@pytest.fixture
def rig(open_rig: Any) -> Any:
    return open_rig(endless=False, volatile=("^Build ",))


def text_of(rig: Rigged, name: str = "a") -> str:
    return str(rig.model.tokenizer.decode(ledger(rig, name)))


async def test_each_request_reads_what_is_new_and_a_clock_that_moved(rig: Rigged) -> None:
    said: list[Any] = []
    for number, hour in enumerate((1, 2, 2, 3)):
        said.append(user(f"q{number}"))
        held = len(ledger(rig)) if number else 0
        measured = await rig.service.measure("a", [told_at(hour), *said])
        told = await converse(rig, [told_at(hour), *said], f"a{number}")
        assert told.session == "torpor://default/a"
        assert told.prefilled_tokens == told.token_count - len(told.tokens) - held
        assert (measured.tokens, measured.cached_tokens) == (told.token_count - len(told.tokens), held)
        said.append(assistant(told.text))
    text = text_of(rig)
    assert text.index("Be brief.") < text.index("Current time: 1:00\nBuild 1 of it.") < text.index("q0")
    assert text.index("a0") < text.index("Current time: 2:00") < text.index("q1") < text.index("Current time: 3:00")
    assert [text.count(f"Current time: {hour}") for hour in (1, 2, 3)] == [1, 1, 1]
    *_, why = (await rig.service.why("a")).requests
    assert (why.outcome, why.volatile) == ("hit", ("Current time: 3:00", "Build 1 of it."))
    recalled = (await rig.service.recall("a")).messages
    assert [each.content for each in recalled if each.role == "system"][1:] == [
        f"Current time: {hour}:00\nBuild 1 of it." for hour in (1, 2, 3)
    ]


async def test_a_request_that_wants_none_moved_reads_its_system_text_as_it_is(rig: Rigged) -> None:
    await converse(rig, [told_at(1), user("q")], "a", volatile="")
    assert "a helper.\nCurrent time: 1:00\nBuild 1 of it.\nBe" in text_of(rig)
    told = await converse(rig, [told_at(2), user("q"), assistant("a"), user("on")], "b", volatile="")
    assert told.session != "torpor://default/a"
    # A client of the socket tells its lines itself.
    told = await converse(rig, [told_at(2), user("q"), assistant("a"), user("on")], "b", volatile="It rains.")
    assert "It rains." in text_of(rig, told.session.rpartition("/")[2])


@pytest.mark.one_in(1)
@pytest.mark.parametrize("sleeps", [False, True])
async def test_it_goes_on_between_tools_behind_a_kill_and_behind_a_sleep(
    open_rig: Any, store: Path, sleeps: bool
) -> None:
    said: list[Any] = [user("q")]
    async with open_rig(endless=False) as rig:
        held = (await converse(rig, [told_at(1), *said], CALL)).token_count
        if sleeps:
            await rig.sleep("a")
        killed = as_killed(store)
    async with open_rig(store=killed, endless=False) as rig:
        said += [assistant(CALL), result_of("c", "found")]
        for hour, reply in ((2, CALL), (2, "so"), (3, "end")):
            measured = await rig.service.measure("a", [told_at(hour), *said])
            told = await converse(rig, [told_at(hour), *said], reply)
            prompt = told.token_count - len(told.tokens)
            assert (told.session, told.prefilled_tokens) == ("torpor://default/a", prompt - held)
            assert not sleeps or (measured.tokens, measured.cached_tokens) == (prompt, held)
            held = told.token_count
            said += [assistant(reply), result_of("c", "more") if reply == CALL else user("on")]
        text = text_of(rig)
        assert [text.count(f"Current time: {hour}") for hour in (1, 2, 3)] == [1, 1, 1]
        assert text.index("found") < text.index("time: 2:00") < text.index("more") < text.index("time: 3:00")


async def test_the_same_question_an_hour_later_is_a_branch_of_its_own(rig: Rigged) -> None:
    said = [user("q" * 300), assistant("a"), user("on")]
    await converse(rig, [told_at(1), *said[:1]], "a")
    held = len(ledger(rig))
    await converse(rig, [told_at(2), *said], "b")
    for hour, reply in ((3, "c"), (3, "d")):
        measured = await rig.service.measure("a", [told_at(hour), *said])
        told = await converse(rig, [told_at(hour), *said], reply)
        assert told.session != "torpor://default/a"
        assert measured.tokens == told.token_count - len(told.tokens)
        assert told.prefilled_tokens <= measured.tokens - held
        text = text_of(rig, told.session.rpartition("/")[2])
        assert [f"time: {each}" in text for each in (1, 2, 3)] == [True, False, True]


async def test_instructions_behind_an_answer_have_volatile_lines_too(rig: Rigged) -> None:
    for number, (hour, after) in enumerate(((1, None), (2, 0), (2, 1))):
        instructions = told_at(hour)["content"]
        place = {"after": f"{after:032x}", "instructions": instructions} if after is not None else {}
        opening = [] if after is not None else [{**told_at(hour), "instructed": len(instructions)}]
        told = await converse(rig, [*opening, user(f"q{number}")], f"a{number}", answer_id=f"{number:032x}", **place)
        assert told.session == "torpor://default/a"
    text = text_of(rig)
    assert [text.count(each) for each in ("Be brief.", "time: 1:00", "time: 2:00", "<|im_start|>")] == [1, 1, 1, 9]
    recalled = (await rig.service.recall("a")).messages
    assert all(each.instructed == len(each.content) for each in recalled if each.role == "system")


@pytest.mark.one_in(1)
@pytest.mark.parametrize("family", [MISTRAL, STRICT], ids=lambda each: each.name)
async def test_a_template_that_refuses_a_later_system_text_shows_them_as_a_users(
    open_rig: Any, tmp_path: Path, model_writer: Any, family: Family
) -> None:
    async with open_rig(write_family(tmp_path / "model", family, model_writer), endless=False) as rig:
        said, held = [user("q0")], 0
        for number in range(3):
            told = await converse(rig, [told_at(number), *said], f"a{number}")
            assert told.session == "torpor://default/a"
            assert told.prefilled_tokens == told.token_count - len(told.tokens) - held
            held = told.token_count
            said += [assistant(told.text), user(f"q{number + 1}")]
        text = text_of(rig)
        order = [text.index(each) for at in range(3) for each in (f"time: {at}:00", f"q{at}")]
        assert order == sorted(order)


async def test_marks_of_a_client_stand_where_they_stood(open_kind: Any) -> None:
    async with open_kind("mamba2", endless=False) as rig:
        said = [told_at(1), user("q" * 700)]
        await converse(rig, said, "a", checkpoints=(2,))
        (mark,) = [at for at in rig.live("a").state.checkpoints.positions if at % CHECKPOINT_TOKENS]
        assert mark > 700


async def test_a_fold_keeps_them_with_its_tail(rig: Rigged) -> None:
    said = [user("q" * 300), assistant("a"), user("on"), assistant("b")]
    await converse(rig, [told_at(1), *said[:1]], "a")
    held = len(ledger(rig))
    await converse(rig, [told_at(2), *said[:3]], "b")
    folded = await rig.service.fold("a", name="b", summary="So far.", tail=len(ledger(rig)) - held)
    asked = [told_at(2), user(REQUEST), assistant("So far."), *said[2:], user("and")]
    told = await converse(rig, asked, "c", name="b")
    assert told.session == "torpor://default/b"
    assert told.prefilled_tokens == told.token_count - len(told.tokens) - folded.token_count
    assert [text_of(rig, "b").count(f"time: {hour}:00") for hour in (1, 2)] == [0, 1]


async def test_why_names_the_setting_that_would_have_saved_a_reading(open_rig: Any) -> None:
    def told_of(mood: str, manner: str = "") -> dict[str, Any]:
        return dict(message_of("system", f"{mood}\nYou are a helper.{manner}\n" + "Be brief. " * 40))

    async with open_rig(endless=False, prefix_reuse="exact") as rig:
        for opening, setting in (
            (told_of("Mood: (good)"), ""),
            (told_of("Mood: (bad)"), r"volatile = ['^Mood: \(']"),
            (told_of("Mood: (so)", " Still."), ""),
        ):
            told = await converse(rig, [opening, user("q")], "a")
            (why,) = (await rig.service.why(told.session)).requests
            assert (why.outcome, why.remedy or "") == ("none", "") if not setting else why.remedy.endswith(setting)
