"""`/v1/responses` by OpenAI's own client, against a real daemon on the demo model."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from torpor.tests.socket_api.http.serving import QUESTIONS, Served, serving

if TYPE_CHECKING:
    import openai


def asked(client: openai.OpenAI, *, stream: bool, **options: Any) -> Any:
    """A response, told whole or in events."""
    options = {"model": "demo", "max_output_tokens": 12, **options}
    if not stream:
        return client.responses.create(**options)
    with client.responses.create(**options, stream=True) as events:
        *_, last = events
    return last.response


@pytest.mark.one_in(1)
def test_ten_turns_survive_a_kill_both_resent_and_named_by_the_response_before(short_path: Path) -> None:
    """T9: each turn finds all of the ones before, also behind a `kill -9` and on the other address. What was said is
    told again from its tokens."""
    items: list[Any] = [{"role": "developer", "content": "You are terse."}]
    held, named_held, named = 0, 0, []
    with contextlib.ExitStack() as running:
        now = running.enter_context(serving(short_path))
        for at, question in enumerate(QUESTIONS):
            if at == 5:
                now.daemon.end(kill=True)
                now = running.enter_context(serving(short_path))
            items.append({"role": "user", "content": question})
            with now.openai(on_unix=at % 2 == 1) as client:
                told = asked(client, stream=at % 3 == 0, input=items, store=False)
                before = named[-1].id if named else None
                named.append(
                    asked(
                        client,
                        stream=at % 3 == 1,
                        input=question.replace("os", "sys"),
                        instructions="Be brief.",
                        previous_response_id=before,
                    )
                )
                assert named[-1].previous_response_id == before
            items += [each.to_dict() for each in told.output]
            for usage, was in ((told.usage, held), (named[-1].usage, named_held)):
                found = usage.input_tokens_details
                again = was if at == 5 else 0  # A kill costs what no full block has.
                assert (found.cached_tokens, found.recomputed_tokens) == (was - again, again)
                assert found.cached_tokens + found.cache_write_tokens == usage.input_tokens
            held, named_held = told.usage.total_tokens, named[-1].usage.total_tokens
        with now.openai() as client:
            require_all_told_again(client, named)


def require_all_told_again(client: openai.OpenAI, named: list[Any]) -> None:
    for before, each in zip([None, *named], named, strict=False):
        again = client.responses.retrieve(each.id)
        assert (again.status, again.output, again.created_at) == ("incomplete", each.output, each.created_at)
        assert again.previous_response_id == (before.id if before else None)
        assert again.usage is not None
        counts = ("input_tokens", "output_tokens", "total_tokens")
        assert [getattr(again.usage, name) for name in counts] == [getattr(each.usage, name) for name in counts]
    first, second = (client.responses.input_items.list(each.id, order="asc").data for each in named[:2])
    assert (
        [each.content[0].text for each in first + second]
        == [  # type: ignore[union-attr]
            question.replace("os", "sys") for question in QUESTIONS[:2]
        ]
    )


@pytest.mark.one_in(1)
def test_an_old_response_is_forked_and_a_deleted_one_is_gone(served: Served) -> None:
    import openai

    with served.openai() as client:
        first = asked(client, stream=False, input="What is a set?")
        second = asked(client, stream=False, input="And a list?", previous_response_id=first.id)
        other = asked(client, stream=True, input="And a dict?", previous_response_id=first.id)
        known = other.usage.input_tokens_details
        assert known.cached_tokens + known.recomputed_tokens == first.usage.total_tokens, (
            "the last may be computed again"
        )
        third = asked(client, stream=False, input="And then?", previous_response_id=second.id)
        known = third.usage.input_tokens_details
        assert known.cached_tokens + known.recomputed_tokens == second.usage.total_tokens, (
            "the last may be computed again"
        )
        client.responses.delete(second.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(second.id)
        with pytest.raises(openai.BadRequestError, match="send the whole dialogue") as unknown:
            asked(client, stream=True, input="On.", previous_response_id=second.id)
        assert unknown.value.code == "previous_response_not_found"
        assert client.responses.retrieve(third.id).previous_response_id == first.id
        counted = client.responses.input_tokens.count(model="demo", input="On.", previous_response_id=third.id)
        on = asked(client, stream=False, input="On.", previous_response_id=third.id)
        assert counted.input_tokens == on.usage.input_tokens


@pytest.mark.one_in(1)
@pytest.mark.parametrize("stream", [False, True])
def test_a_response_that_is_not_stored_cannot_be_retrieved_and_its_items_still_find_its_session(
    served: Served, stream: bool
) -> None:
    import openai

    with served.openai() as client:
        items: list[Any] = [{"role": "user", "content": f"What is a frozenset, {stream}?"}]
        first = asked(client, stream=stream, input=items, store=False)
        assert first.store is False
        for ask in (client.responses.retrieve, client.responses.input_items.list, client.responses.delete):
            with pytest.raises(openai.NotFoundError):
                ask(first.id)
        with pytest.raises(openai.BadRequestError, match="never given or not stored"):
            asked(client, stream=False, input="On.", previous_response_id=first.id)
        items += [*(each.to_dict() for each in first.output), {"role": "user", "content": "And then?"}]
        second = asked(client, stream=stream, input=items, store=False)
        assert second.usage.input_tokens_details.cached_tokens == first.usage.total_tokens
        # A stored response behind it stands behind no response that anybody could name, and has all items before it.
        items += [*(each.to_dict() for each in second.output), {"role": "user", "content": "So?"}]
        third = asked(client, stream=stream, input=items)
        again = client.responses.retrieve(third.id)
        assert (again.output, again.previous_response_id) == (third.output, None)
        listed = client.responses.input_items.list(third.id, order="asc").data
        texts = [each.content[0].text for each in listed]  # type: ignore[union-attr]
        assert texts == [
            *(items[0]["content"], first.output_text, "And then?"),
            *(second.output_text, "So?"),
        ]
        named: Any = [{"type": "item_reference", "id": listed[0].id}, {"role": "user", "content": "Again."}]
        assert asked(client, stream=False, input=named).status == "incomplete"


@pytest.mark.one_in(1)
def test_what_clients_make_of_items_on_the_way_still_hits(served: Served) -> None:
    """Ids dropped or made anew, and blanks around an answer, as opencode, pi and LangChain do."""
    tool: Any = {"type": "function", "name": "look", "description": "Looks.", "parameters": {"type": "object"}}
    call = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"path": ".", "all": true}'}
    result = {"type": "function_call_output", "call_id": "c1", "output": "a file"}
    items: list[Any] = [{"role": "user", "content": "look"}, call, result]
    with served.openai() as client:
        told = asked(client, stream=False, input=items, tools=[tool])
        items = [
            items[0],
            {**call, "call_id": "d1", "arguments": '{"path":".","all":true}'},
            {**result, "call_id": "d1"},
        ]
        text = f"\n{told.output_text} "
        items += [{"role": "assistant", "content": [{"type": "output_text", "text": text}]}]
        again = asked(client, stream=True, input=[*items, {"role": "user", "content": "and?"}], tools=[tool])
        assert again.usage.input_tokens_details.cached_tokens == told.usage.total_tokens


@pytest.mark.one_in(1)
def test_references_in_place_of_the_assistants_items_read_only_what_is_new(served: Served) -> None:
    """As the AI SDK writes them: the user's messages in full, a reference for each item of the model."""
    tool: Any = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}
    items: list[Any] = [{"role": "user", "content": "What is in the folder?"}]
    with served.openai() as client:
        told = asked(client, stream=False, input=items, tools=[tool], tool_choice="required", max_output_tokens=60)
        for at in range(2):
            call = next((each for each in told.output if each.type == "function_call"), None)
            assert (call is not None) == (at == 0)
            items += [{"type": "item_reference", "id": each.id} for each in told.output]
            output = [{"type": "function_call_output", "call_id": call.call_id, "output": "a"}] if call else []
            items += output or [{"role": "user", "content": "And then?"}]
            held = told.usage.total_tokens
            told = asked(client, stream=at == 0, input=items, tools=[tool], tool_choice="none")
            assert told.usage.input_tokens_details.cached_tokens == held


@pytest.mark.one_in(1)
def test_what_stands_before_a_reference_is_read(served: Served) -> None:
    """An edited or shortened history, and a developer's message, are no other dialogue's state."""
    with served.openai() as client:
        first = asked(client, stream=False, input="My name is Bob. " * 20)
        behind = [{"type": "item_reference", "id": first.output[-1].id}, {"role": "user", "content": "Who am I?"}]
        said = {"role": "assistant", "content": first.output_text}
        for before in (
            [{"role": "user", "content": "My name is Alice."}],
            [{"role": "developer", "content": "Speak Latin."}, {"role": "user", "content": "My name is Bob. " * 20}],
            [],
        ):
            named = asked(client, stream=False, input=[*before, *behind])
            whole = asked(client, stream=False, input=[*before, said, behind[-1]])
            assert named.usage.input_tokens_details.cached_tokens < 20
            assert (named.usage.input_tokens, named.output_text) == (whole.usage.input_tokens, whole.output_text)


def test_the_items_of_an_answer_find_its_session_whatever_the_request_is_called(served: Served) -> None:
    with served.openai() as client:
        names = [{"x-torpor-session": "by-item"}, {}, {"x-session-id": "another"}]
        items: list[Any] = [{"role": "user", "content": "What is a tuple?"}]
        sessions = set()
        for headers in names:
            answer = client.responses.with_raw_response.create(
                model="demo", max_output_tokens=8, input=items, store=False, extra_headers=headers
            )
            sessions.add(answer.headers["x-torpor-session"])
            items += [*(each.to_dict() for each in answer.parse().output), {"role": "user", "content": "And then?"}]
        assert sessions == {"torpor://default/by-item"}


@pytest.mark.one_in(1)
def test_a_stream_and_a_whole_answer_say_the_same(served: Served) -> None:
    """QC3."""
    with served.openai() as client:
        told = [asked(client, stream=stream, input="What is a list?") for stream in (True, False)]
        stop = {"stop": told[0].output_text[-6:]}
        with client.responses.stream(model="demo", input="What is a list?", extra_body=stop) as events:
            assert told[0].output_text == events.get_final_response().output_text + stop["stop"]
    assert told[0].output_text == told[1].output_text
    assert told[0].usage.total_tokens == told[1].usage.total_tokens
