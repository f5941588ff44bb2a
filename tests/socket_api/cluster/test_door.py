"""The door and a replica behind it, without Ray: a request comes to the replica, and its answer back, as it is."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
from torpor.daemon.api.conversing import ConverseRequest
from torpor.daemon.api.reading import GenerateResult
from torpor.socket_api.cluster.door import Door
from torpor.socket_api.cluster.passing import REPLICA_HEADER, Order
from torpor.socket_api.cluster.placing import Wanted
from torpor.socket_api.cluster.replica import Replica
from torpor.socket_api.errors import ReplicaLost
from torpor.socket_api.tokens import Tokens
from torpor.tests.socket_api.fake_service import FakeService

ASKED = {"model": "fake", "messages": [{"role": "user", "content": "hello"}]}


class Service(FakeService):
    """One with full names, that knows what is awake."""

    async def _converse(self, request: ConverseRequest) -> GenerateResult:
        return await super()._converse(replace(request, session=request.session.removeprefix("default/")))

    def is_awake(self, session: str) -> bool:
        return session.removeprefix("torpor://default/") in self.sessions


class Rig:
    """A door, a replica, and what was passed on."""

    def __init__(self, folder: Path) -> None:
        self.tokens = Tokens(folder / "tokens")
        self.tokens.make()
        self.service = Service()
        self.replica = Replica(self.service, "r", self.tokens.path)  # type: ignore[arg-type]
        self.orders: list[Order] = []
        self.before: Callable[[], None] = lambda: None
        self.door = Door(self, self.tokens.path)

    async def answer(self, order: Order) -> AsyncGenerator[Any]:
        self.orders.append(order)
        order.why["r"] = "because"
        self.before()
        async for message in self.replica.answer(order):
            yield message

    @asynccontextmanager
    async def client(self) -> AsyncIterator[httpx2.AsyncClient]:
        headers = {"authorization": f"Bearer {self.tokens.token_of('default')}"}
        transport = httpx2.ASGITransport(self.door)
        async with httpx2.AsyncClient(transport=transport, base_url="http://any.host", headers=headers) as client:
            yield client


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


async def post(rig: Rig, path: str = "/v1/chat/completions", body: Any = ASKED, **headers: str) -> httpx2.Response:
    async with rig.client() as client:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await client.post(path, json=body, headers=named)


def test_an_answer_comes_back_with_the_replica_and_the_reason(rig: Rig) -> None:
    answer = asyncio.run(post(rig))
    assert (answer.status_code, answer.headers[REPLICA_HEADER]) == (200, "r; because")
    assert answer.json()["choices"][0]["message"]["role"] == "assistant"


def test_a_stream_comes_back_whole(rig: Rig) -> None:
    lines = asyncio.run(post(rig, body={**ASKED, "stream": True})).text.splitlines()
    assert lines[0].startswith("data:")
    assert "data: [DONE]" in lines


def test_the_next_turn_is_wanted_where_the_first_was(rig: Rig) -> None:
    async def talk() -> None:
        await post(rig)
        more = [*ASKED["messages"], {"role": "assistant", "content": "?"}, {"role": "user", "content": "and?"}]
        await post(rig, body={**ASKED, "messages": more})

    asyncio.run(talk())
    first, then = (order.wanted for order in rig.orders)
    assert (first.session, first.was_at) == (None, None)
    assert then.was_at == "r"
    assert then.session is not None


def test_a_session_of_another_replica_is_woken_here_first(rig: Rig) -> None:
    asyncio.run(post(rig, x_session_id="elsewhere"))
    asked = [(name, values.get("session")) for name, values in rig.service.calls]
    assert asked[0] == ("wake", "torpor://default/elsewhere")


def test_a_verb_of_a_session_says_itself_whether_it_wakes(rig: Rig) -> None:
    asyncio.run(post(rig, path="/v1/sessions/elsewhere/fork", body={"name": "other"}))
    assert rig.orders[0].wanted.session == "torpor://default/elsewhere"
    assert "wake" not in [name for name, _ in rig.service.calls]


@pytest.mark.parametrize(
    ("path", "error"),
    [("/v1/chat/completions", ("server_error", "replica_lost")), ("/v1/messages", ("overloaded_error", None))],
)
def test_a_replica_that_dies_before_its_answer_is_told_in_the_clients_api(
    rig: Rig, path: str, error: tuple[str, str | None]
) -> None:
    def die() -> None:
        raise ReplicaLost("gone")

    rig.before = die
    answer = asyncio.run(post(rig, path=path))
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert (answer.json()["error"]["type"], answer.json()["error"].get("code")) == error


def test_who_has_no_token_has_no_key_and_is_refused(rig: Rig) -> None:
    answer = asyncio.run(post(rig, x_session_id="notes", authorization="Bearer wrong"))
    assert answer.status_code == 401
    assert rig.orders[0].wanted.session is None


def test_a_body_that_is_no_json_is_refused_by_the_replica(rig: Rig) -> None:
    async def ask() -> httpx2.Response:
        async with rig.client() as client:
            return await client.post("/v1/chat/completions", content=b"{")

    answer = asyncio.run(ask())
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request")


def test_who_stops_reading_has_left(rig: Rig) -> None:
    async def leave() -> None:
        rig.service.open_gate.clear()  # no token comes
        body = json.dumps({**ASKED, "stream": True}).encode()
        scope = {"http_version": "1.1", "method": "POST", "scheme": "http", "path": "/v1/chat/completions"}
        headers = [(b"authorization", f"Bearer {rig.tokens.token_of('default')}".encode())]
        scope |= {"raw_path": b"/v1/chat/completions", "query_string": b"", "headers": headers}
        key = Order(scope, body, wanted=Wanted(), brings=True)
        answer = rig.replica.answer(key)
        asking = asyncio.ensure_future(anext(answer))
        while not rig.service.running:
            await asyncio.sleep(0.005)
        asking.cancel()
        await asyncio.wait({asking})
        await answer.aclose()
        assert (rig.service.running, rig.service.cancelled) == (0, 1)

    asyncio.run(leave())
