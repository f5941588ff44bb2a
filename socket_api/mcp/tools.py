"""The tools: one for each of some verbs, made of its row.

A tool's name is the verb's, its arguments are the fields of the request, and its answer is the result as JSON. Does not
know how a verb is asked.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from mcp.server.lowlevel import Server
from mcp.shared.exceptions import MCPError
from mcp_types import (
    INVALID_PARAMS,
    CallToolRequestParams,
    CallToolResult,
    ListToolsResult,
    PaginatedRequestParams,
    TextContent,
    Tool,
)

from ... import __version__
from ...daemon.api.verb import Verb
from ...daemon.api.verbs import VERBS
from ...errors import TorporError
from ...records import Result
from ..wire.checking import params_of_json, reader_of_result
from ..wire.common_store import without_others
from ..wire.schemas import Schemas, object_of

Ask = Callable[[Any, Verb[Any, Any], Mapping[str, Any]], Awaitable[Result]]
"""Asks a verb with its parameters, and raises TorporError. The first argument is what the transport knows of the
request."""

TOOLS: Final = {
    name: VERBS[name] for name in ("list", "show", "append", "chat", "sleep", "save", "wake", "fork", "why")
}
_INSTRUCTIONS: Final = (
    "Torpor keeps the memory of local language-model agents. A session is one agent's context; its name is the argument"
    " `session`. append and chat with create=true begin one. sleep puts it on disk, and its next use wakes it."
)
_LEFT_OUT: Final = {"tokens"}
"""Of results, beside what the store has of all namespaces: ids of tokens, which say nothing to an agent."""


def server_of(ask: Ask, namespace: str | None = None) -> Server[Any]:
    """A server of MCP whose tools ask verbs. namespace: the only one that its client may be told of; None for all."""

    async def call(context: Any, params: CallToolRequestParams) -> CallToolResult:
        verb = TOOLS.get(params.name)
        if verb is None:
            raise MCPError(INVALID_PARAMS, f"There is no tool {params.name!r:.100}. There are {', '.join(TOOLS)}.")
        try:
            result = await ask(context.request, verb, params_of_json(verb, params.arguments or {}))
        except TorporError as error:
            return _told(f"{error.message} ({error.code})", is_error=True)
        told = reader_of_result(verb).dump_python(result, mode="json", exclude=_LEFT_OUT, exclude_none=True)
        return _told(json.dumps(without_others(told, namespace), ensure_ascii=False, separators=(",", ":")))

    async def list_tools(context: Any, params: PaginatedRequestParams | None) -> ListToolsResult:
        return ListToolsResult(tools=[_tool(each) for each in TOOLS.values()])

    return Server(
        "torpor", version=__version__, instructions=_INSTRUCTIONS, on_list_tools=list_tools, on_call_tool=call
    )


def _told(text: str, *, is_error: bool = False) -> CallToolResult:
    return CallToolResult(content=[TextContent(type="text", text=text)], is_error=is_error)


def _tool(verb: Verb[Any, Any]) -> Tool:
    schemas = Schemas("$defs")
    taken = object_of(schemas.fields_of(verb.request))
    return Tool(
        name=verb.name,
        description=inspect.cleandoc(verb.request.__doc__ or ""),
        input_schema=taken | ({"$defs": schemas.shared} if schemas.shared else {}),
    )
