"""What all replicas tell, as one answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import httpx2
import pytest
from starlette.types import Message
from torpor.errors import TorporError
from torpor.socket_api.cluster.door import Door
from torpor.socket_api.cluster.everywhere import labelled
from torpor.socket_api.cluster.passing import REPLICA_HEADER, Order
from torpor.socket_api.errors import ReplicaLost
from torpor.socket_api.tokens import Tokens

FIRST = """\
# HELP torpor_sessions Sessions.
# TYPE torpor_sessions gauge
torpor_sessions 2
# HELP torpor_tokens_total Tokens.
# TYPE torpor_tokens_total counter
torpor_tokens_total{model="demo"} 5
"""


class Several:
    """Replicas that answer each path with what they have for it."""

    def __init__(self, **answers: Mapping[str, Any]) -> None:
        self.answers = answers
        self.asked: list[tuple[str, str]] = []
        self.under_way = 0

    async def answer(self, order: Order) -> AsyncGenerator[Message]:
        name = order.at or next(iter(self.answers))
        order.why.update(dict.fromkeys(self.answers, "why"))
        self.asked.append((name, order.scope["path"]))
        assert self.under_way == 0, "Ray loses calls beside each other of one request"
        self.under_way += 1
        await asyncio.sleep(0)
        self.under_way -= 1
        found = self.answers[name][order.scope["path"]]
        if isinstance(found, TorporError):
            raise found
        status, body = found if isinstance(found, tuple) else (200, found)
        data = (body if isinstance(body, str) else json.dumps(body)).encode()
        headers = [(REPLICA_HEADER.encode(), f"{name}; why".encode())]
        yield {"type": "http.response.start", "status": status, "headers": headers}
        yield {"type": "http.response.body", "body": data}


def ask(replicas: Several, path: str, folder: Any) -> httpx2.Response:
    tokens = Tokens(folder / "tokens")
    tokens.make()

    async def get() -> httpx2.Response:
        headers = {"authorization": f"Bearer {tokens.token_of('default')}"}
        transport = httpx2.ASGITransport(Door(replicas, tokens.path))
        async with httpx2.AsyncClient(transport=transport, base_url="http://any.host", headers=headers) as client:
            return await client.get(path)

    return asyncio.run(get())


def having(*sessions: str) -> dict[str, Any]:
    return {"/v1/status": {"pid": len(sessions)}, "/v1/sessions": {"sessions": list(sessions)}, "/metrics": FIRST}


def test_the_cluster_is_told_by_its_replicas(tmp_path: Any) -> None:
    told = ask(Several(b=having("x"), a=having("y", "z")), "/v1/cluster", tmp_path).json()
    assert told == {
        "replicas": [
            {"replica": "a", "status": {"pid": 2}, "sessions": ["y", "z"]},
            {"replica": "b", "status": {"pid": 1}, "sessions": ["x"]},
        ]
    }


def test_a_session_is_listed_once_where_it_is_awake_or_newest(tmp_path: Any) -> None:
    def info(name: str, state: str, version: int | None) -> dict[str, Any]:
        return {"session": name, "state": state, "version": version}

    one = {"/v1/sessions": {"sessions": [info("a", "awake", None), info("b", "asleep", 1), info("d", "asleep", 1)]}}
    two = {"/v1/sessions": {"sessions": [info("a", "asleep", 3), info("b", "asleep", 2), info("c", "asleep", 1)]}}
    told = ask(Several(one=one, two=two), "/v1/sessions", tmp_path).json()["sessions"]
    assert [tuple(each.values()) for each in told] == [
        ("a", "awake", None),
        ("b", "asleep", 2),
        ("c", "asleep", 1),
        ("d", "asleep", 1),
    ]


def test_one_that_dies_meanwhile_is_left_out(tmp_path: Any) -> None:
    told = ask(
        Several(a=having(), b=dict.fromkeys(("/v1/status", "/v1/sessions"), ReplicaLost("gone"))),
        "/v1/cluster",
        tmp_path,
    )
    assert [each["replica"] for each in told.json()["replicas"]] == ["a"]


@pytest.mark.parametrize("path", ["/v1/cluster", "/metrics"])
def test_a_refusal_is_passed_on_and_nobody_else_asked(path: str, tmp_path: Any) -> None:
    refusing = dict.fromkeys(("/v1/status", "/metrics"), (403, {"error": "no"}))
    replicas = Several(a=refusing, b=having())
    told = ask(replicas, path, tmp_path)
    assert (told.status_code, told.json()) == (403, {"error": "no"})
    assert {name for name, _ in replicas.asked} == {"a"}


def test_metrics_name_their_replica_and_a_family_is_told_once(tmp_path: Any) -> None:
    text = ask(Several(a=having(), b=having()), "/metrics", tmp_path).text
    assert text == labelled({"a": FIRST, "b": FIRST})
    assert text.splitlines() == [
        "# HELP torpor_sessions Sessions.",
        "# TYPE torpor_sessions gauge",
        'torpor_sessions{replica="a"} 2',
        'torpor_sessions{replica="b"} 2',
        "# HELP torpor_tokens_total Tokens.",
        "# TYPE torpor_tokens_total counter",
        'torpor_tokens_total{model="demo",replica="a"} 5',
        'torpor_tokens_total{model="demo",replica="b"} 5',
    ]
