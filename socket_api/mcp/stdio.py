"""`torpor mcp`: a bridge from a program that speaks MCP on our standard streams to the daemon's socket.

Each call has a connection of its own, so a daemon that was started anew serves the next one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mcp.server.stdio import stdio_server

from ...daemon.api.verb import Verb
from ...records import Result
from ..client.aclient import AsyncClient
from ..wire.checking import load_request
from .tools import server_of


def serve(socket: Path | None, namespace: str | None) -> None:
    """Serve until standard input ends."""

    async def ask(_: Any, verb: Verb[Any, Any], params: Mapping[str, Any]) -> Result:
        request = load_request(verb, params)
        async with AsyncClient(socket, namespace=namespace, timeout_s=None) as client:
            found: Result = await client.ask(verb, request)
            return found

    async def run() -> None:
        server = server_of(ask)
        async with stdio_server() as (reading, writing):
            await server.run(reading, writing, server.create_initialization_options())

    asyncio.run(run())
