"""An answer that is held to a grammar matches it to its last character: greedy and sampled, alone and in batches. What
cannot be held to is refused before anything has changed."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from typing import Any

import pytest
from torpor.daemon.api.constraints import Constraint, ToolChoice
from torpor.daemon.api.sampling import Sampling
from torpor.daemon.errors import InvalidConstraint
from torpor.daemon.models import grammars
from torpor.daemon.models.grammars import Grammars
from torpor.tests.daemon.session_rig import END, Rigged, cancelled, ignore, reply_with, tokens_of, until

END_TEXT = "<|endoftext|>"
HOT = Sampling(temperature=3.0)
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["kind", "age"],
    "additionalProperties": False,
}
PET = Constraint(json_schema=json.dumps(SCHEMA))
PET_TEXT = re.compile(r'\{"kind": "(cat|dog)", "age": [1-9]?[0-9]\}')


async def generated(rig: Rigged, name: str, constraint: Constraint, **options: Any) -> Any:
    options = {"max_tokens": 200, "on_event": ignore} | options
    return await rig.service.generate(name, constraint=constraint, **options)


ENDING = (
    (PET, PET_TEXT.pattern),
    (Constraint(regex=r"[a-f]{3}-[0-9]{2}(x|yy)"), r"[a-f]{3}-[0-9]{2}(x|yy)"),
    (Constraint(lark='start: "a" b "."\nb: "(" c ")"\nc: "(" "0" ")" | "1"'), r"a\((\(0\)|1)\)\."),
)


@pytest.mark.one_in(1)
async def test_an_answer_matches_and_ends_where_the_grammar_does(open_rig: Any) -> None:
    async with open_rig(endless=False) as rig:
        await rig.read("a", tokens_of(1, 20))
        for sampling in (Sampling(), HOT, Sampling(1.5, top_p=0.3, top_k=4, repetition_penalty=1.3)):
            for constraint, expected in ENDING:
                result = await generated(rig, "a", constraint, sampling=sampling)
                assert re.fullmatch(expected, result.text)
                assert result.finish_reason == "stop"
                assert list(result.tokens) == rig.model.encode(result.text, opening=False)


FIXED: tuple[tuple[dict[str, Any], Any], ...] = (
    ({"const": f"a {END_TEXT} b"}, f"a {END_TEXT} b"),
    ({"enum": [END_TEXT * 2]}, END_TEXT * 2),
    ({"const": {"\u00e9": [END_TEXT]}}, {"\u00e9": [END_TEXT]}),
    ({**SCHEMA, "properties": {END_TEXT: {"type": "null"}}, "required": [END_TEXT]}, {END_TEXT: None}),
)


@pytest.mark.parametrize(("schema", "value"), FIXED)
async def test_fixed_words_that_spell_a_control_token_are_written_as_plain_text(
    rig: Rigged, schema: dict[str, Any], value: Any
) -> None:
    await rig.read("a", tokens_of(1, 20))
    result = await generated(rig, "a", Constraint(json_schema=json.dumps(schema)))
    assert json.loads(result.text) == value
    assert END not in result.tokens


async def test_a_control_token_that_a_grammar_names_is_written_as_that(rig: Rigged) -> None:
    await rig.read("a", tokens_of(1, 20))
    special = next(token for token in rig.model.tokenizer.all_special_ids if token not in rig.model.end_tokens)
    result = await generated(rig, "a", Constraint(lark=f'start: "a" <[{special}]> "b"'))
    assert special in result.tokens


async def test_an_answer_that_is_cut_says_so(rig: Rigged) -> None:
    await rig.read("a", tokens_of(1, 20))
    result = await generated(rig, "a", PET, max_tokens=5)
    assert (result.finish_reason, result.text) == ("length", '{"kin')


async def test_an_end_token_comes_only_where_the_grammar_may_end(open_rig: Any) -> None:
    async with open_rig(endless=False) as rig:
        await rig.read("a", tokens_of(1, 20))
        rig.network.after = lambda _, logits: logits + 90.0 * (_mx().arange(logits.shape[-1]) == END)
        result = await generated(rig, "a", Constraint(regex="ab+"))
        assert (result.text, result.finish_reason) == ("ab", "stop")


def _mx() -> Any:
    import mlx.core as mx

    return mx


async def test_a_batch_holds_each_of_its_answers_to_its_own_grammar(open_rig: Any) -> None:
    async with open_rig(batch=4) as rig:
        names = [f"s{number}" for number in range(4)]
        await rig.read_own(names, 30)
        wanted = [Constraint(regex=f"{number}[a-z]{{40}}{number}") for number in range(3)]
        work = [generated(rig, name, each, sampling=HOT) for name, each in zip(names, wanted, strict=False)]
        free = rig.service.generate("s3", max_tokens=60, sampling=HOT)
        *held, free_one = await asyncio.gather(*work, free)
        assert all(re.fullmatch(each.regex or "", found.text) for each, found in zip(wanted, held, strict=True))
        assert len(free_one.tokens) == 60
        assert rig.service._parts.models.engine.batched_tokens > 0


async def test_a_constraint_that_allows_all_changes_no_token(rig: Rigged) -> None:
    await rig.read_each(("free", "held"), tokens_of(1, 20), sampling=Sampling(0.9, seed=3))
    free = await rig.service.generate("free", max_tokens=20)
    assert END not in free.tokens, "a grammar ends with it, this model does not"
    held = await generated(rig, "held", Constraint(lark="start: <[0-258]>*"), max_tokens=20)
    assert held.tokens == free.tokens
    assert await rig.fingerprint("held") == await rig.fingerprint("free")


REFUSED = (
    (Constraint(json_schema="{"), "not JSON"),
    (Constraint(json_schema="[1]"), "it is no schema"),
    (Constraint(json_schema="false"), "it allows no value"),
    (Constraint(json_schema='{"items": {"format": ["date"]}}'), "the schema: its items: 'format' has to be a text"),
    (Constraint(json_schema="[" * 60_000), "not JSON"),
    (Constraint(json_schema='{"type": "nothing"}'), "nothing"),
    (Constraint(json_schema='{"$ref": "http://localhost:1/schema.json"}'), "does not fetch"),
    (Constraint(json_schema='{"$ref": "file:///etc/passwd"}'), "does not fetch"),
    (Constraint(json_schema='{"type": "array", "contains": {}}'), "the schema: .*contains"),
    (Constraint(json_schema='{"properties": {"a": {"items": {"not": {}}}}}'), "property 'a': its items: .*not"),
    (Constraint(json_schema='{"type": "integer", "minimum": 2, "maximum": 1}'), "Unsatisfiable"),
    (Constraint(json_schema='{"$ref": "#"}'), "constraint|asked"),
    (Constraint(regex="[a"), "unclosed"),
    (Constraint(regex=r"(a)\1"), "backreferences"),
    (Constraint(regex=r"[^\s\S]"), "NoExtension"),
    (Constraint(lark="start: missing"), "missing"),
    (Constraint(lark="start: A\nA: " + " & ".join(["/a/"] * 10)), "more than 8 '&'"),
    (
        Constraint(json_schema='{"items": {"type": "integer", "multipleOf": 99991}}'),
        "its items: without .*'multipleOf' is above",
    ),
    (Constraint(lark="start: start"), "NoExtension"),
    (Constraint(lark="start: " + '"a"{0,100}' * 1400), "too big"),
    (Constraint(lark="start: " + "(" * 8000 + '"a"' + ")" * 8000), "nested"),
)


async def test_what_cannot_be_compiled_is_refused_and_changes_nothing(rig: Rigged) -> None:
    await rig.read("a", tokens_of(1, 20))
    before = await rig.fingerprint("a")
    for constraint, reason in REFUSED:
        with pytest.raises(InvalidConstraint, match=reason) as refused:
            await generated(rig, "a", constraint, text="more")
        assert len(refused.value.message) < 700
        assert await rig.fingerprint("a") == before
    assert (await generated(rig, "a", PET)).finish_reason == "stop"


async def test_neither_the_loop_nor_the_engine_waits_for_a_compiler(
    open_rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled, has_begun, may_end = grammars._compiled, threading.Event(), threading.Event()

    def slow(*arguments: Any) -> Any:
        has_begun.set()
        assert may_end.wait(20)
        return compiled(*arguments)

    monkeypatch.setattr(grammars, "_compiled", slow)
    async with open_rig() as rig:
        await rig.read_each(("a", "b"), tokens_of(1, 20))
        held = asyncio.ensure_future(generated(rig, "a", PET, max_tokens=1))
        await until(has_begun.is_set)
        assert len((await rig.service.generate("b", max_tokens=4)).tokens) == 4
        assert not held.done()
        may_end.set()
        await held


async def test_a_grammar_is_compiled_once_and_let_go_with_its_model(
    rig: Rigged, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rig.read("a", tokens_of(1, 20))
    for _ in range(3):
        await generated(rig, "a", PET)
    assert len(rig.model.grammars._compiled) == 1
    facts = rig.model.without_weights()
    assert isinstance(facts.grammars, Grammars)
    assert facts.grammars is not rig.model.grammars


async def test_many_grammars_are_not_all_kept(rig: Rigged) -> None:
    await rig.read("a", tokens_of(1, 5))
    for number in range(20):
        await generated(rig, "a", Constraint(regex=f"a{number}"))
    assert len(rig.model.grammars._compiled) == 16


async def test_a_cancelled_answer_leaves_the_next_one_its_own_grammar(rig: Rigged) -> None:
    await rig.read("a", tokens_of(1, 20))
    begun = asyncio.ensure_future(generated(rig, "a", Constraint(regex="[a-c]{150}")))
    await until(lambda: len(rig.live("a").state.tokens) > 25)
    begun.cancel()
    await cancelled(begun)
    assert PET_TEXT.fullmatch((await generated(rig, "a", PET)).text)


# --- calls


LOOK = {
    "name": "look",
    "description": "",
    "parameters": {
        "type": "object",
        "properties": {"at": {"enum": ["sky", "sea"]}, "for": {"type": "boolean"}},
        "required": ["at", "for"],
    },
}
WAIT = {"name": "wait", "description": "", "parameters": None}


async def answered(rig: Rigged, choice: ToolChoice | None, **options: Any) -> Any:
    asked = {"messages": [{"role": "user", "content": "hi"}], "tools": (LOOK, WAIT), "create": True, "max_tokens": 300}
    return await rig.service.chat("c", tool_choice=choice, **(asked | options))


@pytest.mark.one_in(1)
@pytest.mark.parametrize("sampling", [Sampling(), HOT])
async def test_a_required_call_is_one_of_the_offered_tools(rig: Rigged, sampling: Sampling) -> None:
    for names in ((), ("look",), ("wait",)):
        result = await answered(rig, ToolChoice("required", names), sampling=sampling, on_divergence="rewind")
        (call,) = result.tool_calls
        assert (result.text, result.finish_reason) == ("", "tool_calls")
        assert call.name in (names or ("look", "wait"))
        assert call.arguments == {} if call.name == "wait" else call.arguments["at"] in ("sky", "sea")


async def test_a_call_that_cannot_be_forced_is_refused(rig: Rigged) -> None:
    not_that = {**LOOK, "parameters": {"type": "object", "not": {}}}
    for names, options, reason in (
        (("jump",), {}, "'jump'"),
        ((), {"tools": ()}, "the conversation has none"),
        ((), {"tools": (not_that,)}, "not"),
    ):
        with pytest.raises(InvalidConstraint, match=reason):
            await answered(rig, ToolChoice("required", names), **options)


async def test_a_model_that_may_call_nothing_writes_no_mark_of_a_call(rig: Rigged) -> None:
    script = "<tool_call>"
    reply_with(rig, script * 3, end=False)
    result = await answered(rig, ToolChoice("none"), max_tokens=30)
    assert (result.tool_calls, result.text[:10]) == ((), "<tool_call")
    assert script not in result.text


async def test_strict_tools_are_held_to_their_schema_and_the_text_around_is_free(rig: Rigged) -> None:
    reply_with(rig, 'so: <tool_call>\n{"name": "look", "arguments": {"at": "moon"', end=False)
    result = await answered(rig, ToolChoice(strict=("look", "wait")), max_tokens=140)
    assert result.text.startswith("so:")
    assert result.tool_calls[0].arguments["at"] in ("sky", "sea")


@pytest.mark.one_in(1)
async def test_an_answer_with_tools_and_a_schema_is_a_call_or_of_the_schema(rig: Rigged) -> None:
    seen = set()
    for seed in range(5):
        sampling = Sampling(4.0, seed=seed)
        result = await answered(rig, None, constraint=PET, sampling=sampling, on_divergence="rewind")
        assert PET_TEXT.fullmatch(result.text) if result.text else len(result.tool_calls) == 1
        seen.add(bool(result.text))
    assert seen == {True, False}
