"""The generator says the same for a number, and reaches all that its page promises."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from typing import Any

from jsonschema import Draft202012Validator
from torpor.tests.dialogues.generator import ALL, MARKS, NUMBERS, PLAIN, Dialogue, Reach, dialogue

SEEDS = range(400)
WIDE = {seed: dialogue(seed, ALL) for seed in SEEDS}


def strings_in(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [each for item in value.values() for each in strings_in(item)]
    return [each for item in value for each in strings_in(item)] if isinstance(value, list | tuple) else []


def numbers_in(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [each for item in value.values() for each in numbers_in(item)]
    if isinstance(value, list | tuple):
        return [each for item in value for each in numbers_in(item)]
    return [value] if isinstance(value, int | float) and not isinstance(value, bool) else []


def calls_in(found: Dialogue) -> list[dict[str, Any]]:
    return [call for message in found.messages for call in message.get("tool_calls", ())]


def test_a_number_always_makes_the_same_dialogue() -> None:
    for seed in (1, 17, 2**70):
        assert dialogue(seed, ALL) == dialogue(seed, ALL)
        assert list(dialogue(seed).requests()) == list(dialogue(seed).requests())
    assert len({json.dumps(each.messages) for each in WIDE.values()}) == len(SEEDS)


def test_its_texts_quote_every_mark_and_have_every_plane() -> None:
    texts = [each for found in WIDE.values() for each in strings_in(found.messages)]
    said = "".join(texts)
    assert [mark for mark in MARKS if mark not in said] == []
    assert {ord(each) >> 16 for each in said} == set(range(17))
    assert any(0xD800 <= ord(each) < 0xE000 for each in said)
    assert "" in texts
    assert any(each != each.strip() for each in texts)


def test_calls_have_values_of_their_schemas_and_results_name_them() -> None:
    numbers: set[float] = set()
    for seed in SEEDS:
        found = dialogue(seed)
        schemas = {each["name"]: each["parameters"] for each in found.tools}
        for call in calls_in(found):
            Draft202012Validator(schemas[call["name"]]).validate(call["arguments"])
            numbers |= set(numbers_in(call["arguments"]))
        ids = [call["id"] for call in calls_in(found)]
        assert [each["tool_call_id"] for each in found.messages if each["role"] == "tool"] == ids
        assert all(len(each) == 9 for each in ids)
    assert numbers >= set(NUMBERS)


def test_a_dialogue_waits_for_an_answer_and_so_does_each_of_its_requests() -> None:
    kinds: Counter[str] = Counter()
    for found in WIDE.values():
        assert found.messages[-1]["role"] != "assistant"
        requests = list(found.requests())
        kinds.update(each.kind for each in requests)
        assert all(each.messages[-1]["role"] != "assistant" for each in requests)
        assert [each.messages for each in requests if each.kind == "turn"][-1] == found.messages
    assert all(kinds[each] > 20 for each in ("turn", "retry", "edit", "again"))


def test_what_is_out_of_reach_is_not_said() -> None:
    for seed in SEEDS:
        found = dialogue(seed, Reach(neighbours=False))
        roles = [each["role"] for each in found.messages]
        assert "system" not in roles[1:]
        assert all(one != other for one, other in pairwise(roles) if one != "tool")
        json.dumps(found.messages, ensure_ascii=False).encode()  # raises if there is half a pair
    assert all(isinstance(call["arguments"], dict) for seed in SEEDS for call in calls_in(dialogue(seed, PLAIN)))
    assert any(not isinstance(call["arguments"], dict) for found in WIDE.values() for call in calls_in(found))
    assert any(each["content"] is None for found in WIDE.values() for each in found.messages)
    assert any(abs(each) > 2**64 for found in WIDE.values() for each in numbers_in(found.messages) if each % 1 == 0)
