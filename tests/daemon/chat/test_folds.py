"""A fold: the full session stays as it was, and a smaller one goes on from a summary and its last turns."""

from __future__ import annotations

import asyncio
import gc
import re
from pathlib import Path
from typing import Any

import pytest
from torpor.daemon.chat.folds import REQUEST, tail_start
from torpor.daemon.errors import (
    ContextOverflow,
    EmptyContext,
    GenerationFailed,
    InvalidFold,
    SessionExists,
    TranscriptDiverged,
)
from torpor.daemon.sessions.encoding import Place
from torpor.daemon.sessions.transcripts import TextMap, message_of
from torpor.memvid.errors import SessionNotFound
from torpor.tests.daemon.conversing_rig import (
    SYSTEM,
    assistant,
    cold,
    ledger,
    reply_with,
    send,
    talk,
    tell,
    user,
    with_template,
)
from torpor.tests.daemon.session_rig import END, Gate, Rigged, given_up, listening, tokens_of

SUMMARY = "We chose SQLite."
HEAD = [SYSTEM, user(REQUEST), assistant(SUMMARY)]


async def fold(rig: Rigged, **order: Any) -> Any:
    asked = {"summary": SUMMARY, **order} if "summarize" not in order else order
    return await rig.service.fold("a", name="b", **asked)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("turns", "slack"), [(0, 0), (1, 0), (2, 0), (2, 7), (3, 0)])
async def test_a_fold_is_the_conversation_that_its_template_gives(rig: Rigged, turns: int, slack: int) -> None:
    """System text, summary, and as many of the last turns as fit into the tail; the next turn follows as in any."""
    await rig.service.create("a", labels=["x"])
    messages = await talk(rig, 5, opening=[SYSTEM])
    old = ledger(rig)
    ends = [turn.end for turn in rig.live("a").chat.text_map.turns if turn.role == "assistant"]
    tail = len(old) - ends[-1 - turns]
    result = await fold(rig, tail=tail + slack)
    kept = messages[len(messages) - 2 * turns :]
    assert ledger(rig, "b") == cold(rig, [*HEAD, *kept])
    assert (result.tail_tokens, result.token_count) == (tail, len(ledger(rig, "b")))
    assert ledger(rig, "b")[len(ledger(rig, "b")) - tail :] == old[len(old) - tail :]
    assert (rig.live("b").labels, rig.live("b").chat.text_map.end) == (("x",), len(ledger(rig, "b")))
    await tell(rig, "next", "b", reply="ok")
    assert ledger(rig, "b") == cold(rig, [*HEAD, *kept, user("next"), assistant("ok")])


async def test_the_full_session_sleeps_as_it_was_and_the_new_one_names_it(rig: Rigged) -> None:
    await talk(rig, 3)
    was = await rig.fingerprint("a")
    result = await fold(rig, labels=["y"])
    assert not rig.is_awake("a")
    origin = result.folded_from
    assert (origin.session, origin.version, origin.tokens) == ("torpor://default/a", 1, len(was.tokens))
    for _ in range(2):
        shown = await rig.service.show("b")
        assert (shown.provenance.folded_from, shown.provenance.forked_from, shown.info.labels) == (origin, None, ("y",))
        assert [(each.bundle_id, each.parent) for each in shown.versions] == [(result.bundle_id, origin.bundle_id)]
        await rig.sleep("b")  # and from the disk it says the same
    assert await rig.woken_fingerprint("a") == was
    await rig.wake("b")
    assert rig.live("b").durable.version == 1, "it was durable when the fold was done"


@pytest.mark.parametrize("own_system", [True, False])
async def test_a_fold_takes_transcripts_of_what_it_is(rig: Rigged, own_system: bool) -> None:
    await rig.service.create("a", system=SYSTEM["content"] if own_system else None)
    messages = await talk(rig, 4, opening=[] if own_system else [SYSTEM])
    ends = [turn.end for turn in rig.live("a").chat.text_map.turns if turn.role == "assistant"]
    await fold(rig, tail=len(ledger(rig)) - ends[1])
    reply_with(rig, "ok")
    said = [*(HEAD[1:] if own_system else HEAD), *messages[-4:], user("next")]
    result = await send(rig, said, "b")
    assert (result.rewound_to, result.prefilled_tokens < 60) == (None, True)
    assert ledger(rig, "b") == cold(rig, [*HEAD, *messages[-4:], user("next"), assistant("ok")])


async def test_a_tail_that_begins_inside_a_turn_is_matched_by_no_text(rig: Rigged) -> None:
    messages = await talk(rig, 2)
    old = ledger(rig)
    result = await fold(rig, tail=5)
    assert (result.tail_tokens, ledger(rig, "b")[-5:]) == (5, old[-5:])
    assert rig.live("b").chat.text_map.end == len(ledger(rig, "b")) - 5
    with pytest.raises(TranscriptDiverged):
        await send(rig, [*HEAD[1:], messages[-1], user("next")], "b")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("opening", [[SYSTEM], []])
@pytest.mark.parametrize("rewound", [False, True])
@pytest.mark.parametrize("turns", [1, 2, 3])
async def test_the_turns_of_a_transcript_that_came_in_one_request_are_whole_in_the_tail(
    rig: Rigged, turns: int, rewound: bool, opening: list[Any]
) -> None:
    await rig.service.create("a")
    if rewound:
        await talk(rig, 1, opening=opening)
    said = [message for at in range(4) for message in (user(f"question {at}"), assistant(f" noted {at}"))]
    await send(rig, [*opening, *said, user("And now?")], on_divergence="rewind" if rewound else "refuse", reply="ok")
    kept = [*said[len(said) - 2 * (turns - 1) :], user("And now?"), assistant("ok")]
    tail = len(cold(rig, [*HEAD, *kept])) - len(cold(rig, HEAD))
    await fold(rig, tail=tail + 3)
    head = HEAD if opening else HEAD[1:]
    assert ledger(rig, "b") == cold(rig, [*head, *kept])
    again = await send(rig, [*head, *kept, user("next")], "b", reply="fine")
    assert (again.rewound_to, again.prefilled_tokens < 40) == (None, True)
    assert ledger(rig, "b") == cold(rig, [*head, *kept, user("next"), assistant("fine")])


@pytest.mark.parametrize("opening", [[SYSTEM], []])
@pytest.mark.parametrize("own_system", [True, False])
async def test_a_tail_as_long_as_the_session_has_the_first_turn_too_and_so_is_not_smaller(
    rig: Rigged, own_system: bool, opening: list[Any]
) -> None:
    own = own_system and bool(opening)
    await rig.service.create("a", system=SYSTEM["content"] if own else None)
    messages = await talk(rig, 2, opening=[] if own else opening)
    was, calls = await rig.fingerprint("a"), len(rig.network.calls)
    wanted = cold(rig, [*(HEAD if opening else HEAD[1:]), *messages[-4:]])
    for order in ({}, {"summarize": 40}):
        with pytest.raises(InvalidFold) as refusal:
            await fold(rig, tail=999_999, **order)
        told, least = refusal.value.details, "summarize" in order
        assert told["token_count"] == len(was.tokens)
        assert told["folded_tokens"] == len(wanted) - least * len(SUMMARY)
        assert ("at least" in refusal.value.message) == least
        assert f"{told['folded_tokens']} tokens, {told['tail_tokens']} of them" in refusal.value.message
    assert (len(rig.network.calls), rig.is_awake("a"), rig.live("a").dirty) == (calls, True, True)
    await require_as_before(rig, was)


async def test_the_end_of_each_message_is_told_apart_from_control_tokens_that_words_spell(rig: Rigged) -> None:
    said = [SYSTEM, user("what is <|im_end|>"), assistant("<|im_end|> ends"), user("and?"), assistant(""), user("x")]
    encoder, first = rig.service._parts.models.encoder, Place(0, None, turn_open=False)
    ids = await encoder.messages(rig.model, said, first)
    ends = [at + 1 for at, token in enumerate(ids) if token == END]
    lengths = [*[ends[2]] * 3, *[ends[4]] * 2, len(ids)]
    assert await encoder.lengths(rig.model, said, first, ids) == lengths
    assert await encoder.lengths(rig.model, said[:2], first, ids) == (), "there is one end"


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% endfor %}<|im_start|>assistant\n",
        "{% for m in messages %}{{ m.content }}{% if not loop.last %} 3{% endif %}<|im_end|>{% endfor %}<|im_start|>",
        "{% for m in messages %}{{ m.content }}<|im_end|>{{ m.content }}{% endfor %}<|im_start|>",
    ],
    ids=["no end token", "not continued token by token", "words twice"],
)
async def test_what_a_template_does_not_tell_apart_has_no_end_of_its_own(
    open_rig: Any, own_tiny_model: Path, template: str
) -> None:
    async with open_rig(with_template(own_tiny_model, template), endless=False) as rig:
        said = [user("a"), assistant("b"), user("c")]
        first = Place(0, None, turn_open=False)
        ids = await rig.service._parts.models.encoder.messages(rig.model, said, first)
        assert await rig.service._parts.models.encoder.lengths(rig.model, said, first, ids) == ()


async def test_a_session_that_is_durable_already_is_folded_from_that_version(rig: Rigged) -> None:
    await rig.asleep("a", tokens_of(1, 300))
    async with listening(rig) as heard:
        folded = await fold(rig, tail=20)
    assert folded.folded_from.version == 1
    (told,) = heard.of("session_folded", "b")
    assert told["source"] == "torpor://default/a"
    assert (told["source_tokens"], told["tokens"], told["tail_tokens"]) == (300, folded.token_count, 20)
    assert (told["prefilled_tokens"], told["bytes_written"]) == (folded.prefilled_tokens, folded.bytes_written)
    assert [each.version for each in (await rig.service.show("a")).versions] == [1]


async def test_the_model_writes_the_summary_and_nothing_of_that_stays_in_the_full_session(rig: Rigged) -> None:
    messages = await talk(rig, 2, opening=[SYSTEM])
    was, known = await rig.fingerprint("a"), rig.live("a").chat.text_map
    reply_with(rig, f"<think>hm</think>\n\n{SUMMARY}")
    pieces: list[Any] = []
    result = await rig.service.fold("a", name="b", summarize=60, on_event=pieces.append)
    assert result.summary == SUMMARY
    assert SUMMARY in "".join(getattr(piece, "text", "") for piece in pieces)
    asked = rig.model.encode(f"\n<|im_start|>user\n{REQUEST}<|im_end|>\n<|im_start|>assistant\n", opening=False)
    assert rig.network.calls[:2] == [len(asked) - 1, 1], "at the end of the context, once"
    assert ledger(rig, "b") == cold(rig, HEAD)
    await rig.wake("a")
    assert (await rig.fingerprint("a"), rig.live("a").chat.text_map) == (was, known)
    reply_with(rig, "ok")
    assert (await send(rig, [*messages, user("next")])).rewound_to is None


async def test_a_session_that_is_no_chat_begins_with_the_summarys_text(rig: Rigged) -> None:
    tokens = tokens_of(1, 400)
    await rig.read("a", tokens)
    result = await fold(rig, tail=50)
    assert ledger(rig, "b") == rig.model.encode(f"{SUMMARY}\n\n", opening=False) + tokens[-50:]
    assert (result.tail_tokens, rig.live("b").chat.turn_open) == (50, False)


async def test_an_answer_that_was_cut_short_is_closed_in_the_fold_as_it_was(rig: Rigged) -> None:
    await send(rig, [user("hi " * 50)], max_tokens=5, reply="never stops")
    reply_with(rig, "ok")
    await send(rig, [user("hi " * 50), assistant("never"), user("so?")])
    first = rig.live("a").chat.text_map.turns[1].end
    await fold(rig, tail=len(ledger(rig)) - first)
    assert ledger(rig, "b") == cold(rig, [*HEAD[1:], user("so?"), assistant("ok")])


def test_a_tail_begins_with_a_turn_where_the_text_map_has_one_there() -> None:
    known = TextMap()
    for at, role in enumerate(("user", "assistant", "user", "assistant")):
        known = known.extended([message_of(role, "x")], start=10 * at, end=10 * at + 10)
    starts = {tail: tail_start(known, 40, tail) for tail in (0, 5, 19, 20, 25, 39, 40, 99)}
    assert starts == {0: 40, 5: 35, 19: 21, 20: 20, 25: 20, 39: 20, 40: 20, 99: 20}, "never with the system text"
    assert [tail_start(known, 40, tail, first=5) for tail in (34, 35, 99)] == [20, 5, 5]
    assert tail_start(TextMap(), 40, 15) == 25


def test_no_tail_begins_where_words_end_that_were_read_together_with_what_follows() -> None:
    said = [message_of(role, "x") for role in ("user", "assistant", "user")]
    assert tail_start(TextMap().extended(said, start=0, end=30), 40, 20) == 20
    assert tail_start(TextMap().extended(said, start=0, end=30, lengths=[22, 22, 30]), 40, 20) == 22


# --- refusals


async def test_a_fold_without_one_summary_a_place_or_a_source_is_refused(rig: Rigged) -> None:
    await rig.read("a", tokens_of(1, 9))
    await rig.service.create("empty")
    for order in ({}, {"summary": "x", "summarize": 5}, {"summary": ""}):
        with pytest.raises(InvalidFold):
            await rig.service.fold("a", name="b", **order)
    with pytest.raises(EmptyContext):
        await rig.service.fold("empty", name="b", summary="x")
    for name in ("a", "empty"):
        with pytest.raises(SessionExists):
            await rig.service.fold("a", name=name, summary="x")
    with pytest.raises(SessionNotFound):
        await rig.service.fold("nobody", name="b", summary="x")
    assert rig.is_awake("a")


async def test_a_summary_that_is_none_makes_no_session(rig: Rigged) -> None:
    await talk(rig, 3)
    was = await rig.fingerprint("a")
    reply_with(rig, "<think>hm")
    with pytest.raises(InvalidFold, match="no summary"):
        await fold(rig, summarize=20)
    await require_as_before(rig, was)


@pytest.mark.parametrize("is_chat", [True, False])
async def test_a_fold_is_smaller_than_its_session_or_refused_before_anything_is_read(
    rig: Rigged, is_chat: bool
) -> None:
    await rig.service.create("a")
    if is_chat:
        await talk(rig, 3)
    else:
        await rig.service.append("a", tokens=tokens_of(1, 100))
    was, calls = await rig.fingerprint("a"), len(rig.network.calls)
    with pytest.raises(InvalidFold) as refusal:
        await fold(rig, summary="x" * 500)
    room = 500 - refusal.value.details["folded_tokens"] + len(was.tokens)
    with pytest.raises(InvalidFold, match=f"would have {len(was.tokens)} tokens.*which has {len(was.tokens)},"):
        await fold(rig, summary="x" * room)
    assert (len(rig.network.calls), rig.is_awake("a"), rig.live("a").dirty) == (calls, True, True)
    await require_as_before(rig, was)
    assert (await fold(rig, summary="x" * (room - 1))).token_count == len(was.tokens) - 1


@pytest.mark.one_in(1)
async def test_a_summary_that_the_model_writes_too_long_makes_no_session(rig: Rigged) -> None:
    await talk(rig, 3)
    was = await rig.fingerprint("a")
    reply_with(rig, "x" * 200)
    with pytest.raises(InvalidFold, match="not be smaller") as refusal:
        await fold(rig, summarize=300)
    told = refusal.value.details
    assert (told["token_count"], told["folded_tokens"] > 200) == (len(was.tokens), True)
    await require_as_before(rig, was)


async def test_no_room_for_the_summary_is_an_overflow_with_both_sizes(rig: Rigged) -> None:
    await send(rig, [user("x" * 1900)], reply="ok")
    was = await rig.fingerprint("a")
    with pytest.raises(ContextOverflow, match="torpor fold") as refusal:
        await send(rig, [user("x" * 1900), assistant("ok"), user("y" * 100)], max_tokens=60)
    assert refusal.value.details["token_count"] == len(was.tokens)
    with pytest.raises(ContextOverflow):
        await fold(rig, summarize=100)
    await require_as_before(rig, was)
    assert (await fold(rig)).token_count < 100, "with a summary that is given it can be folded"


@pytest.mark.one_in(2)
@pytest.mark.parametrize("is_chat", [True, False])
async def test_a_context_without_room_for_the_summary_has_it_written_of_what_is_before_the_tail(
    rig: Rigged, is_chat: bool
) -> None:
    """To the last token full, and folded all the same: nothing is in neither."""
    context = rig.model.context_tokens
    await rig.service.create("a")
    if is_chat:
        reply_with(rig, "x" * 100)
        while context - len(ledger(rig)) > 260:
            await tell(rig, "y" * 60)
    else:
        await rig.service.append("a", tokens=tokens_of(1, context))
    was, old = await rig.fingerprint("a"), ledger(rig)
    places = rig.live("a").chat.text_map.places
    reply_with(rig, SUMMARY)
    with pytest.raises(ContextOverflow, match="tail of") as refusal:
        await fold(rig, summarize=300, tail=0)
    assert refusal.value.details["context_tokens"] == context
    await require_as_before(rig, was)
    tail = int(re.findall(r"tail of (\d+) tokens", refusal.value.message)[0])
    with pytest.raises(ContextOverflow):
        await fold(rig, summarize=300, tail=tail - 1)
    result = await fold(rig, summarize=300, tail=tail)
    assert (result.summary, result.tail_tokens) == (SUMMARY, tail)
    assert ledger(rig, "b")[-tail:] == old[-tail:]
    assert not is_chat or len(old) - tail in places, "behind a whole turn"
    assert await rig.woken_fingerprint("a") == was


@pytest.mark.one_in(2)
@pytest.mark.usefixtures("short_calls")
@pytest.mark.parametrize("at", ["summary", "new session"])
@pytest.mark.parametrize("how", ["fails", "is cancelled"])
async def test_a_fold_that_does_not_come_to_its_end_leaves_no_session_and_the_old_one_whole(
    rig: Rigged, at: str, how: str
) -> None:
    await talk(rig, 3, opening=[user("x" * 400), assistant("ok")])
    was = await rig.fingerprint("a")
    reply_with(rig, SUMMARY)
    order = {"summarize": 40} if at == "summary" else {"summary": SUMMARY * 20}
    number = 5 if at == "summary" else 2
    if how == "fails":
        rig.network.fail_at(number)
        with pytest.raises(GenerationFailed):
            await fold(rig, **order)
    else:
        with pytest.raises(asyncio.CancelledError):
            await given_up(rig, fold(rig, **order), number)
    await require_as_before(rig, was)
    reply_with(rig, "ok")
    assert (await fold(rig)).folded_from.tokens == len(was.tokens)
    assert END in ledger(rig, "b")


async def require_as_before(rig: Rigged, was: Any) -> None:
    """The session that was to be folded is what it was, and there is no other."""
    rig.network.reset()
    assert [info.name for info in await rig.service.list_sessions()] == ["a"]
    if not rig.is_awake("a"):
        await rig.wake("a")
    assert await rig.fingerprint("a") == was


async def test_a_fold_that_is_given_up_when_it_has_just_become_durable_leaves_no_session(
    rig: Rigged, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rig.read("a", tokens_of(1, 600))
    gate, real, written = Gate(), rig.service._parts.store.disk.write_bundle, []

    def hold(draft: Any) -> Any:
        receipt = real(draft)
        written.append(receipt.uri.name)
        if receipt.uri.name == "b":
            gate.pass_through()
        return receipt

    monkeypatch.setattr(rig.service._parts.store.disk, "write_bundle", hold)
    task = asyncio.create_task(fold(rig, tail=100))
    await gate.reached()
    task.cancel()
    await asyncio.sleep(0)
    gate.open()
    await asyncio.wait([task])
    assert task.cancelled()
    assert written == ["a", "b"]
    assert [info.name for info in await rig.service.list_sessions()] == ["a"]
    assert (await fold(rig, tail=100)).tail_tokens == 100


@pytest.mark.parametrize("wanted", [{"summarize": 30}, {"summary": "It was short."}], ids=["asked", "given"])
async def test_a_fold_that_waits_for_memory_keeps_no_weights_of_a_model_that_is_unloaded_for_others(
    opened: Any, monkeypatch: pytest.MonkeyPatch, wanted: dict[str, Any]
) -> None:
    """Whichever of its sessions waits: the full one for its summary, or the new one."""
    async with opened() as rig:
        await rig.service.create("a", model="one")
        await rig.service.append("a", tokens=tokens_of(1, 100))
        residency, real = rig.service._parts.sessions.residency, rig.service._parts.sessions.residency.room_for
        counted: list[int] = []

        async def wait_behind_another(use: Any, count: int, emit: Any) -> Any:
            if not counted:
                await residency.memory.give_way(use, residency.awake[use.uri], grows=True)
                await residency.memory._unload("one", "pressure", residency.memory.look_again)
                gc.collect()
                counted.append(rig.service._parts.models.shelf.weights_bytes())
            return await real(use, count, emit)

        monkeypatch.setattr(residency, "room_for", wait_behind_another)
        result = await rig.service.fold("a", name="b", tail=10, **wanted)
        assert counted == [0]
        assert result.tail_tokens == 10
