"""Each field of each verb reaches the service over every front, as it was given. The sessions are not there, so most is
refused: that comes back alike, too."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import pytest
from mcp.client import Client
from torpor.daemon.api.events import NEVER_SENT
from torpor.daemon.api.records import Request
from torpor.daemon.api.sampling import Sampling
from torpor.daemon.api.verb import Verb
from torpor.daemon.api.verbs import VERBS
from torpor.errors import TorporError
from torpor.records import Result
from torpor.socket_api.mcp.tools import TOOLS, server_of
from torpor.socket_api.wire.checking import load_request
from torpor.tests.socket_api.fronts.fronts_rig import FRONTS, OF_THE_PROCESS, ROUTE_OF, Front, given

SAID = [{"role": "user", "content": "hi"}]
ADD = {"name": "add", "description": "adds", "parameters": {"type": "object", "properties": {"a": {}}}}
ANSWER = "a1" * 16
OF = {"session": "nobody"}
NEW = {"create": True, "model": "nobody", "labels": ["x", "y"], "unnamed": True}
LATER = {"priority": "background"}
DRAWN = {
    "sampling": Sampling(0.5, 0.25, 3, 0.125, 1.5, 2**64 - 1, 0.5, -0.5, [{"token": 9, "bias": -1.5}, {"token": 10}])
}
HELD = {"constraint": {"regex": "a+"}, "logprobs": 2, "stop": ["END", "STOP"], "max_tokens": 7, **DRAWN}
OFFERED = {"tools": [ADD], "template_arguments": {"enable_thinking": False, "more": [1, {"a": None}]}}
CHOSEN = {"tool_choice": {"mode": "required", "names": ["add"]}}
DIALOGUE: dict[str, Any] = {**OF, "messages": SAID, "model": "nobody", **HELD, **OFFERED, **CHOSEN}
BEHIND = {**OF, "messages": SAID, "after": ANSWER, "instructions": "Be brief."}
AT_END = {**OF, "messages": SAID, "at_end": True}
STEERED = {"steer": [{"token": 11, "bias": 0.5}, {"token": 12}]}

ASKED: dict[str, list[dict[str, Any]]] = {
    "create": [
        {**OF, "model": "demo", "system": "Hi.", "labels": ["x"], "durability": "none", **DRAWN, **OFFERED},
        {**OF, "unnamed": True},
    ],
    "append": [
        {**OF, "text": "x", **NEW, **LATER},
        {**OF, "tokens": [0, 7, 2**32 - 1], "durable": True},
        {**OF, "messages": SAID, "certain": True},
    ],
    "generate": [{**OF, **NEW, **LATER, **HELD, "text": "x", "raw": True, "prove": True}, {**OF, "tokens": [1, 2]}],
    "chat": [
        {**OF, **NEW, **LATER, **HELD, "message": "hi", "role": "tool", "prove": True},
        {**OF, "messages": SAID, "on_divergence": "rewind", **OFFERED, **CHOSEN},
    ],
    "converse": [
        {**DIALOGUE, **LATER, "answer_id": ANSWER, "durable": True, "volatile": "", "labels": ["x"]},
        {**DIALOGUE, "checkpoints": [1], "keep_awake_s": 1.5, "unnamed": True},
        BEHIND,
        AT_END,
    ],
    "measure": [{**DIALOGUE, "volatile": "It is 12:00."}, BEHIND, AT_END],
    "recall": [OF, {"answer_id": ANSWER, "namespace": "lab"}],
    "disown": [{"answer_id": ANSWER, "namespace": "lab"}],
    "list": [{"namespace": "lab"}],
    "show": [OF],
    "history": [{"sessions": ["nobody", "no one"], "namespace": "lab", "since_ns": 2**60, "limit": 7}],
    "why": [OF],
    "blocks": [{**OF, "deep": True}],
    "causes": [{"since": "2h", "by": "session", "namespace": "lab"}],
    "difference": [{**OF, "other": "nobody~1", "tokens": True}],
    "contents": [{**OF, "start": 3, "end": 7, "most": 2, "tokens": True, "apart": True, "manifest": True}],
    "set": [{**OF, "labels": ["x"], **DRAWN}],
    "sleep": [OF, {**OF, "remote": True}],
    "save": [{**OF, "remote": True}],
    "wake": [{**OF, "version": 3, "at_token": 7, "strict": True, "fork": "other"}],
    "plan_wake": [{**OF, "version": 3, "at_token": 7, "strict": True}],
    "fork": [{**OF, "name": "new", "at_token": 7, "labels": ["x"], "unnamed": True}],
    "fold": [
        {**OF, "name": "new", "summary": "short", "tail": 2, "labels": ["x"], **LATER},
        {**OF, "name": "new", "summarize": 9},
    ],
    "warm": [{"sessions": ["nobody", "no one"]}, {"sessions": "nobody"}, {"label": "none", "namespace": "lab"}],
    "usage": [{"namespace": "lab"}],
    "stats": [{"label": "none", "namespace": "lab"}],
    "clear": [{"label": "none", "namespace": "lab", "dry_run": True}],
    "delete": [OF],
    "mark": [{**OF, "tag": "a", "move": True}, {**OF, "untag": "a"}, {**OF, "pinned": False}],
    "analyze": [{**OF, "kind": "probe", "labels": ["a", "b"]}],
    "maintain": [
        {"operation": "prune", **OF, "keep_last": 3, "keep_days": 7.5, "dry_run": True},
        {"operation": "repack", **OF, "cold_after_days": 30},
        {"operation": "quantize", **OF, "bits": 8},
        {"operation": "repack", "remote": True},
    ],
    "push": [OF],
    "pull": [OF],
    "remote": [{"namespace": "another"}],
    "import_bundle": [{"bundle_id": "ab" * 32, "session": "other"}],
    "status": [{}],
    "load_model": [{"model": "nobody"}],
    "unload_model": [{"model": "nobody"}],
    "tree": [{**OF, **LATER}],
    "branch": [{"branch": 3, "count": 2, "seeds": [1, 2**64 - 1], **LATER}],
    "prefill": [{"readings": [{"branch": 3, "text": "x"}, {"branch": 4, "tokens": [1]}], **LATER}],
    "produce": [{"branches": [3, 4], "logprobs": 2, "logits": True, **LATER}],
    "commit": [{"commits": [{"branch": 3, "token": 9, "step": 1}, {"branch": 4, "token": 9}], **LATER}],
    "advance": [{"branches": [3], "max_tokens": 7, "stop": ["END"], "logprobs": 2, **LATER}],
    "diverge": [
        {
            "branch": 3,
            "count": 2,
            "max_tokens": 7,
            "seeds": [1, 2],
            "by": "client",
            "stop": ["A"],
            "logprobs": 2,
            **LATER,
        }
    ],
    "guide": [
        {"branches": [3], **DRAWN, **STEERED, "constraint": {"lark": 'start: "a"'}},
        {"branches": [3], "free": True, "logits": b"\x00" * 16},
    ],
    "prune": [{"branches": [3], "subtree": True}],
    "retain": [{"branch": 3}],
    "keep": [{"branch": 3, "name": "new", "labels": ["x"], "subtree": True, **LATER}],
    "branches": [{"branch": 3}],
}
CASES = [(front, verb) for verb in ASKED for front in FRONTS if front != "http" or verb in ROUTE_OF]


@pytest.mark.parametrize(("front", "verb"), CASES, indirect=["front"])
def test_each_field_reaches_the_service_as_it_was_given(front: Front, there: Front, verb: str) -> None:
    for options in ASKED[verb]:
        if front.name == "http" and ROUTE_OF[verb].names_session and "session" not in options:
            continue  # what is of no session has no route
        with contextlib.suppress(TorporError):
            getattr(front, VERBS[verb].attribute)(**options)
        if verb == "create" and "nobody" in {each.name for each in there.list_sessions().sessions}:
            there.delete("nobody")


def test_each_field_of_a_tool_of_mcp_reaches_its_verb() -> None:
    reached: list[Request] = []

    async def ask(_: object, verb: Verb[Any, Any], params: Mapping[str, Any]) -> Result:
        reached.append(load_request(verb, params))
        raise TorporError("No.")

    async def use() -> None:
        async with Client(server_of(ask)) as client:
            for name in TOOLS:
                for options in ASKED[name]:
                    wanted = given(VERBS[name].request(**options))
                    told = await client.call_tool(name, json.loads(json.dumps(wanted)))
                    assert [given(each) for each in reached] == [wanted], told
                    reached.clear()

    asyncio.run(use())


def test_no_field_of_a_verb_is_left_out() -> None:
    assert not VERBS.keys() - OF_THE_PROCESS - ASKED.keys(), "give it a row of ASKED"
    for name, verb in VERBS.items():
        if name not in OF_THE_PROCESS:
            asked = {field for options in ASKED[name] for field in options}
            assert asked == {each.name for each in fields(verb.request)} - NEVER_SENT, f"ASKED[{name!r}]"
