"""Conversations whose replies a test says beforehand: shared by the tests of chats and folds."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torpor.daemon.engine import generation
from torpor.daemon.models.chat_template import NO_ROOT, Root
from torpor.daemon.sessions.transcripts import message_of
from torpor.tests.daemon.session_rig import END, MODEL, Rigged, ignore

SYSTEM = message_of("system", "Be brief.")
TOOLS = ({"name": "look", "description": "Looks.", "parameters": {"type": "object"}},)


@pytest.fixture(autouse=True)
def script(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens that are drawn next, whatever the logits are; when they are used up, the model decides."""
    tokens: list[int] = []
    real = generation.draw

    def draw(*given: Any, **more: Any) -> Any:
        drawn = real(*given, **more)
        return replace(drawn, token=tokens.pop(0)) if tokens else drawn

    monkeypatch.setattr(generation, "draw", draw)
    monkeypatch.setattr(Rigged, "script", tokens, raising=False)
    return tokens


def reply_with(rig: Rigged, reply: str | Sequence[int]) -> None:
    """Make the next turn this text, or these tokens, closed by the end token, and count the network's calls anew."""
    tokens = rig.model.encode(reply, opening=False) if isinstance(reply, str) else reply
    rig.script[:] = [*tokens, END]
    rig.network.reset()


THINKS = (  # opens an answer with thinking, and shows it without
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


def with_template(folder: Path, template: str) -> Path:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    return folder


@asynccontextmanager
async def thinking(open_rig: Any, **options: Any) -> AsyncIterator[Rigged]:
    """A model that tells its thinking apart."""
    async with open_rig(endless=False, **options) as rig:
        place = rig.service._parts.models.shelf.places[MODEL]
        marks = ("<think>", "</think>")
        ids = tuple(tuple(place.model.encode(mark, opening=False)) for mark in marks)
        place.model = replace(place.model, marks=replace(place.model.marks, reasoning=marks, reasoning_ids=ids))
        yield rig


def user(text: str) -> dict[str, str]:
    return dict(message_of("user", text))


def assistant(text: str) -> dict[str, str]:
    return dict(message_of("assistant", text))


def two_calls(*ids: str) -> dict[str, Any]:
    """An answer with calls that differ in nothing that is shown but their ids and arguments."""
    return {**assistant(""), "tool_calls": [{"name": "look", "arguments": {"at": each}, "id": each} for each in ids]}


def called(name: str, **arguments: Any) -> dict[str, Any]:
    return dict(message_of("assistant", "", [{"name": name, "arguments": arguments, "id": "c"}]))


def result_of(call_id: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "content": text, "tool_call_id": call_id}


def ledger(rig: Rigged, name: str = "a") -> list[int]:
    return list(rig.live(name).state.tokens)


async def send(rig: Rigged, messages: Sequence[Any], name: str = "a", **options: Any) -> Any:
    """A transcript to a session, which is made if there is none. reply: what the answer will be."""
    return await _chat(rig, name, messages=messages, **options)


async def tell(rig: Rigged, message: str, name: str = "a", **options: Any) -> Any:
    """One message, as `send`."""
    return await _chat(rig, name, message=message, **options)


async def _chat(rig: Rigged, name: str, *, reply: str | Sequence[int] | None = None, **options: Any) -> Any:
    if reply is not None:
        reply_with(rig, reply)
    return await rig.service.chat(name, **({"create": True, "max_tokens": 60, "on_event": ignore} | options))


async def converse(rig: Rigged, messages: Sequence[Any], reply: str = "", name: str = "a", **options: Any) -> Any:
    if reply:
        reply_with(rig, reply)
    return await rig.service.converse(name, messages, **({"max_tokens": 60, "on_event": ignore} | options))


async def names(rig: Rigged) -> set[str]:
    return {info.name for info in await rig.service.list_sessions()}


async def talk(rig: Rigged, turns: int, name: str = "a", opening: Sequence[Any] = ()) -> list[Any]:
    """A conversation by transcripts; the messages that were sent and answered."""
    messages = [*opening]
    for number in range(turns):
        messages.append(user(f"question {number}?"))
        reply_with(rig, f"answer {number}")
        messages.append(assistant((await send(rig, messages, name)).text))
    return messages


def cold(rig: Rigged, messages: Sequence[Any], root: Root = NO_ROOT) -> list[int]:
    """The tokens of the whole conversation rendered at once, but for the line break that belongs to the next turn."""
    return rig.model.encode(rig.model.render(messages, False, root), opening=False)[:-1]
