"""`/mcp`: sessions as tools of MCP, over streamable HTTP without transport sessions.

The package of MCP is imported at the first request, on another thread, because that takes a second. Host, Origin and
token were checked before (`access.py`), so the package's own check is off: it would refuse clients of the Unix socket.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.types import Message, Send

from ...daemon.api.verb import Verb
from ...errors import TorporError
from ...records import Result
from ..errors import ExtraMissing, HttpRefused
from .connections import MAX_BODY_BYTES
from .errors import told_to
from .requests import ClientLeft
from .work import Desk, desk_of

PATH = "/mcp"
_ESCAPED = 6
"""Bytes of a character in the JSON that is made of a body, at most; the body itself was read within its own bound."""


async def mcp(request: Request, send: Send) -> None:
    """Answer a request. Raises ExtraMissing, and the errors of a body."""
    desk = desk_of(request)
    async with desk.bodies.read(request) as body:
        manager = await asyncio.to_thread(_new_manager, desk, request.state.caller.bound_to)
        unread = [json.dumps(body).encode()]

        async def receive() -> Message:
            if unread:
                return {"type": "http.request", "body": unread.pop(), "more_body": False}
            return await request.receive()

        async with manager.run():  # of this request alone, so that it leaves nothing behind
            await manager.handle_request(request.scope, receive, send)


def _new_manager(desk: Desk, namespace: str | None) -> Any:
    try:
        from mcp.server.streamable_http_manager import StreamableHTTPSessionManager

        from ..mcp.tools import server_of
    except ModuleNotFoundError as error:
        raise ExtraMissing(
            f"{PATH} needs the package {error.name}, which is not installed: pip install 'torpor[mcp]', and start the"
            " daemon again.",
            extra="mcp",
        ) from error

    async def ask(request: Request, verb: Verb[Any, Any], params: Mapping[str, Any]) -> Result:
        order = await request.state.caller.request_of(verb, params)
        try:
            result: Result = await desk.works.answer(verb, order, request.receive)
        except ClientLeft:  # the package would log it as a fault of ours
            raise HttpRefused("The client has left.", status=408) from None
        except TorporError as error:
            raise told_to(request.state.caller, error) from error
        return result

    # Whole answers: for a stream the package leaves a task in the loop that never ends.
    return StreamableHTTPSessionManager(
        server_of(ask, namespace),
        stateless=True,
        json_response=True,
        max_request_body_size=_ESCAPED * MAX_BODY_BYTES,
    )
