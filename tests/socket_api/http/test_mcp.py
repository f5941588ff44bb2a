"""MCP over HTTP: the real client, on both addresses and with both generations of the protocol."""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import Awaitable, Callable
from typing import Any

import httpx2
import pytest
from mcp.client import Client
from mcp.client.streamable_http import streamable_http_client
from torpor.tests.socket_api.http.http_rig import Begin, HttpThread

PATH = "/mcp"


def with_client(server: HttpThread, use: Callable[[Client], Awaitable[Any]], *, on_unix: bool, mode: Any) -> Any:
    """What `use` gives with a client, on a loop of its own."""

    async def run() -> Any:
        transport = httpx2.AsyncHTTPTransport(uds=str(server.socket_path)) if on_unix else None
        headers = {} if on_unix else {"authorization": f"Bearer {server.token}"}
        url = f"http://localhost{PATH}" if on_unix else f"http://127.0.0.1:{server.port}{PATH}"
        async with (
            httpx2.AsyncClient(transport=transport, headers=headers, timeout=20) as http,
            Client(streamable_http_client(url, http_client=http), mode=mode) as client,
        ):
            return await use(client)

    return asyncio.run(run())


@pytest.mark.one_in(1)
@pytest.mark.parametrize("mode", ["2026-07-28", "legacy"])
@pytest.mark.parametrize("on_unix", [True, False])
def test_a_session_is_talked_with_put_to_sleep_and_listed(server: HttpThread, on_unix: bool, mode: Any) -> None:
    async def use(client: Client) -> list[str]:
        await client.call_tool("chat", {"session": "a", "message": "hello", "create": True})
        await client.call_tool("sleep", {"session": "a"})
        listed, missing = await client.call_tool("list", {}), await client.call_tool("show", {"session": "b"})
        assert missing.is_error
        assert not listed.is_error
        return [each.text for answer in (listed, missing) for each in answer.content]

    listed, missing = with_client(server, use, on_unix=on_unix, mode=mode)
    assert '"state":"asleep"' in listed
    assert missing.endswith("(session_not_found)")


def test_a_token_names_the_only_namespace_whose_sessions_a_tool_reaches(server: HttpThread) -> None:
    async def use(client: Client) -> Any:
        return await client.call_tool("show", {"session": "other/a"})

    refused = with_client(server, use, on_unix=False, mode="legacy")
    assert refused.is_error
    assert "This token is for the sessions of default alone" in refused.content[0].text


@pytest.mark.parametrize("mode", ["2026-07-28", "legacy"])
def test_a_client_that_leaves_ends_its_call(server: HttpThread, mode: Any) -> None:
    """Threat 45."""
    server.service.hold()

    async def use(client: Client) -> None:
        asked = asyncio.create_task(client.call_tool("append", {"session": "a", "text": "a b c", "create": True}))
        while not server.server.works:
            await asyncio.sleep(0.005)
        asked.cancel()

    with_client(server, use, on_unix=True, mode=mode)
    server.wait_until(lambda: server.server.works == 0)


def test_a_stop_ends_a_call_with_a_sentence(begin: Begin) -> None:
    server = begin()
    server.service.hold()

    async def use(client: Client) -> Any:
        asked = asyncio.create_task(client.call_tool("append", {"session": "a", "text": "a b c", "create": True}))
        while not server.server.works:
            await asyncio.sleep(0.005)
        server.do(server.server.quiesce)
        return await asked

    ended = with_client(server, use, on_unix=True, mode="2026-07-28")
    assert ended.content[0].text.endswith("(shutting_down)")


def test_a_body_is_bounded_as_on_each_route(server: HttpThread) -> None:
    """Threats 41, 42."""
    headers = {"content_type": "application/json", "accept": "application/json, text/event-stream"}
    assert server.ask("POST", PATH, b"[" * 100_000, **headers).status == 400
    assert server.ask("POST", PATH, b"{}", **headers).status == 400
    assert server.ask("GET", PATH).status == 405
    assert server.ask("POST", PATH, {}, origin="http://evil.example", **headers).status == 403


def test_without_its_package_it_is_told_what_to_install(server: HttpThread, monkeypatch: pytest.MonkeyPatch) -> None:
    imports = builtins.__import__

    def without(name: str, *args: Any, **options: Any) -> Any:
        if name.split(".")[0] == "mcp":
            raise ModuleNotFoundError("No module named 'mcp'", name="mcp")
        return imports(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    refused = server.ask("POST", PATH, {"jsonrpc": "2.0", "id": 1, "method": "ping"})
    assert (refused.status, refused.json["error"]["code"]) == (501, "extra_missing")
    assert "pip install 'torpor[mcp]'" in refused.json["error"]["message"]
