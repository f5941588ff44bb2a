"""Answers are plain data with the field names of the wire, so that the server can hand them on as they are."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
from torpor.tests.daemon.session_rig import SAMPLED, tokens_of


async def test_every_answer_is_plain_data(open_rig: Any) -> None:
    async with open_rig() as rig:
        service = rig.service
        events: list[Any] = []
        answers: list[Any] = [await service.create("a", sampling=SAMPLED, labels=["x"])]
        answers.append(await service.append("a", tokens=tokens_of(1, 300), on_event=events.append))
        answers.append(await service.generate("a", max_tokens=2, prove=True, on_event=events.append))
        answers.append(await service.chat("a", message="hi", max_tokens=2, on_event=events.append))
        answers.append(await service.sleep("a", on_event=events.append))
        answers += await service.list_sessions()
        answers.append(await service.show("a"))
        answers.append(await service.wake("a", on_event=events.append))
        answers += await service.list_sessions()
        answers.append(await service.show("a"))
        answers.append(await service.status())
        answers.append(await service.delete("a"))
        await service.create("b")
        await service.append("b", tokens=[1])
        answers.append(await service.close())
    kinds = {type(answer).__name__ for answer in answers}
    assert len(kinds) == 9
    assert {type(event).__name__ for event in events} == {"ProgressEvent", "TokenEvent"}
    for answer in [*answers, *events]:
        with pytest.raises(FrozenInstanceError):
            answer.more = 1
        json.dumps(dataclasses.asdict(answer), allow_nan=False)
