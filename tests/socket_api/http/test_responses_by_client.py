"""`/v1/responses` by OpenAI's own client, against a real daemon on the demo model."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import openai
import pytest

from .test_clients import QUESTIONS, Served, folder, served, serving

__all__ = ["folder", "served"]


def asked(client: openai.OpenAI, *, stream: bool, **options: Any) -> Any:
    """A response, told whole or in events."""
    options = {"model": "demo", "max_output_tokens": 12, **options}
    if not stream:
        return client.responses.create(**options)
    with client.responses.create(**options, stream=True) as events:
        *_, last = events
    return last.response


def test_ten_turns_that_are_sent_again_each_time_survive_a_kill(folder: Path) -> None:
    """T9: each turn finds all of the ones before, also behind a `kill -9` and on the other address."""
    items: list[Any] = [{"role": "developer", "content": "You are terse."}]
    held = 0
    with contextlib.ExitStack() as running:
        now = running.enter_context(serving(folder))
        for at, question in enumerate(QUESTIONS):
            if at == 5:
                now.daemon.end(kill=True)
                now = running.enter_context(serving(folder))
            items.append({"role": "user", "content": question})
            with now.openai(on_unix=at % 2 == 1) as client:
                told = asked(client, stream=at % 3 == 0, input=items, store=False)
            items += [each.to_dict() for each in told.output]
            details = told.usage.input_tokens_details
            assert details.cached_tokens == held
            assert details.cached_tokens + details.cache_write_tokens == told.usage.input_tokens
            held = told.usage.total_tokens


def test_a_stream_and_a_whole_answer_say_the_same(served: Served) -> None:
    """QC3."""
    with served.openai() as client:
        told = [asked(client, stream=stream, input="What is a list?") for stream in (True, False)]
        stop = {"stop": told[0].output_text[-6:]}
        with client.responses.stream(model="demo", input="What is a list?", extra_body=stop) as events:
            assert told[0].output_text == events.get_final_response().output_text + stop["stop"]
    assert told[0].output_text == told[1].output_text
    assert told[0].usage.total_tokens == told[1].usage.total_tokens


def test_errors_come_out_as_the_clients_own(served: Served) -> None:
    with served.openai() as client:
        with pytest.raises(openai.NotFoundError, match="No model is served as 'gpt'"):
            client.responses.create(model="gpt", input="hello")
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError, match="maximum context length is 8192 tokens") as overflow:
                asked(client, stream=stream, input="word " * 10_000)
            assert overflow.value.code == "context_length_exceeded"
