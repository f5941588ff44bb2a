"""Ten turns with a real instruct model, SmolLM2-135M-Instruct: calls that match their schema, and answers in words.

It runs where `TORPOR_SMOLLM2` names a folder with that model as mlx-lm loads it.
"""

from __future__ import annotations

import json
import os
import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from torpor.tests.socket_api.http.serving import serving

FOLDER = os.environ.get("TORPOR_SMOLLM2", "")
QUESTIONS = [
    *(
        "What is the capital of France?",
        "How warm is it in Paris?",
        "Name three fruits.",
        "And how warm is it in Rome?",
    ),
    *("What is a cat?", "Tell me of the weather in Oslo.", "What do bees make?", "Is Madrid warm today?"),
    *("Say thanks.", "What is it like in Berlin?"),
]
UNITS = ["celsius", "fahrenheit"]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "pattern": "^[A-Z][a-z]{2,11}$"},
                "unit": {"enum": UNITS},
                "days": {"type": "integer", "minimum": 1, "maximum": 7},
            },
            "required": ["city", "unit", "days"],
            "additionalProperties": False,
        },
    },
}


@pytest.mark.heavy
@pytest.mark.timeout(1200)
@pytest.mark.skipif(not Path(FOLDER, "config.json").is_file(), reason="TORPOR_SMOLLM2 names no folder with the model")
def test_ten_turns_with_a_real_model_have_valid_calls_and_readable_answers(short_path: Path) -> None:
    """A tool is called in each second turn, and the daemon is killed after the fifth; nothing is read twice."""
    messages: list[Any] = [{"role": "system", "content": "You are a helpful assistant. Answer in one sentence."}]
    held = 0

    def ask(now: Any, **more: Any) -> Any:
        nonlocal held
        with now.openai() as client:
            answer = client.with_options(timeout=300).chat.completions.create(
                model="smollm2", messages=messages, tools=[WEATHER], max_tokens=60, temperature=0, **more
            )
        assert answer.usage.prompt_tokens_details.cached_tokens == held
        held = answer.usage.total_tokens
        message = answer.choices[0].message
        messages.append(message.to_dict())
        print(f"{answer.usage.prompt_tokens} tokens, {message.content!r} {message.tool_calls or ''}")
        return message

    with ExitStack() as running:
        now = running.enter_context(serving(short_path, "--model", f"smollm2={FOLDER}"))
        for turn, question in enumerate(QUESTIONS):
            if turn == len(QUESTIONS) // 2:
                now.daemon.end(kill=True)
                now = running.enter_context(serving(short_path, "--model", f"smollm2={FOLDER}"))
            messages.append({"role": "user", "content": question})
            if turn % 2:
                (call,) = ask(now, tool_choice={"type": "function", "function": {"name": "weather"}}).tool_calls
                given = json.loads(call.function.arguments)
                assert list(given) == ["city", "unit", "days"]
                assert re.fullmatch("[A-Z][a-z]{2,11}", given["city"])
                assert given["unit"] in UNITS
                assert given["days"] in range(1, 8)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": "Sunny, 21 degrees."})
            said = ask(now, tool_choice="none").content
            words = re.findall(r"[A-Za-z']+", said)
            assert len(words) >= 2
            assert sum(map(len, words)) > 0.6 * len(said), "mostly words"
            assert "<|" not in said
