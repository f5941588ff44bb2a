"""The tools of MCP are the rows of their verbs, and `torpor mcp` brings them to a running daemon."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from mcp.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client
from torpor.daemon.api.events import NEVER_SENT
from torpor.daemon.api.verb import Verb
from torpor.records import Result
from torpor.socket_api.mcp.tools import TOOLS, server_of
from torpor.tests.socket_api.real_daemon import RealDaemon


async def _no_daemon(request: Any, verb: Verb[Any, Any], params: Mapping[str, Any]) -> Result:
    raise AssertionError("nothing is asked")


def test_a_tool_has_the_fields_of_its_verb_with_their_bounds() -> None:
    async def listed() -> dict[str, Any]:
        async with Client(server_of(_no_daemon)) as client:
            return {each.name: each for each in (await client.list_tools()).tools}

    tools = asyncio.run(listed())
    assert tools.keys() == TOOLS.keys()
    for name, verb in TOOLS.items():
        taken = tools[name].input_schema["properties"]
        assert taken.keys() == {each.name for each in fields(verb.request)} - NEVER_SENT
        assert tools[name].description
    fork = tools["fork"].input_schema
    assert fork["required"] == ["session", "name"]
    assert fork["properties"]["name"]["maxLength"] == fork["properties"]["session"]["maxLength"] > 0


@pytest.mark.one_in(1)
def test_a_program_talks_with_the_daemon_over_standard_streams(short_path: Path, daemon: RealDaemon) -> None:
    """T9: a session over MCP is the one that every other client has."""
    command = ["-m", "torpor.cli.main", "mcp", "--socket", str(short_path / "t.sock"), "--namespace", "team"]

    async def use() -> None:
        async with Client(stdio_client(StdioServerParameters(command=sys.executable, args=command))) as client:
            down = await client.call_tool("list", {})
            assert down.is_error
            assert down.content[0].text.endswith("(daemon_unreachable)")  # type: ignore[union-attr]
            (short_path / "t.sock").symlink_to(daemon.socket)
            said = {"session": "a", "message": "hello", "create": True, "max_tokens": 4}
            answer = json.loads((await client.call_tool("chat", said)).content[0].text)  # type: ignore[union-attr]
            assert (answer["session"], answer["finish_reason"]) == ("torpor://team/a", "length")
            assert "tokens" not in answer
            wrong = await client.call_tool("chat", {"session": "a", "mesage": "x"})
            assert wrong.content[0].text == (  # type: ignore[union-attr]
                "mesage: there is no such field; leave it out. (invalid_request)"
            )

    asyncio.run(use())
