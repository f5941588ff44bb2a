"""Stands between a client and the daemon, as a proxy: makes a model call a tool, keeps answers short, and notes usage.

The demo model calls no tool by itself, and comes to no end; clients have no switch for either. So this sets
`tool_choice` on a request, or holds its answer to a few texts. The rest passes as it came. Clients know one address,
also while the daemon behind it is killed and started again.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx2
import uvicorn
from serving import Daemon
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

MOST_TOKENS = 300
"""Of an answer; clients ask for up to 32,000."""

BLOCK = 256
"""Tokens of a block of a session's file."""

A_FEW = 8
"""Tokens by which two questions of one length differ."""

ANSWER = {"type": "string", "enum": ["Yes.", "No.", "It has twelve lines."]}
"""The texts of answers that are no calls."""

_DROPPED = ("content-length", "transfer-encoding", "connection", "content-encoding")
_CEILINGS = {
    "/v1/chat/completions": ("max_completion_tokens", "max_tokens"),
    "/v1/responses": ("max_output_tokens",),
    "/v1/messages": ("max_tokens",),
}


@dataclass
class Exchange:
    """A request for an answer, and what came back of which daemon."""

    daemon: Daemon
    path: str
    headers: Mapping[str, str]
    body: dict[str, Any]
    status: int
    session: str
    ignored: str
    said: bytearray = field(default_factory=bytearray)

    @property
    def events(self) -> list[Any]:
        """The data of a stream's events, or the one body."""
        if not self.said.lstrip().startswith((b"data:", b"event:")):
            return [json.loads(self.said)]
        lines = bytes(self.said).decode().splitlines()
        return [json.loads(line[5:]) for line in lines if line.startswith("data:") and line[5:].strip() != "[DONE]"]

    @property
    def usage(self) -> Usage:
        """The tokens of the answer, by the words of its API."""
        found: dict[str, Any] = {}
        for event in self.events:
            for holder in (event, event.get("message"), event.get("response")):
                found |= (holder.get("usage") if isinstance(holder, dict) else None) or {}
        assert found, f"no usage on {self.path}: {bytes(self.said[-300:])!r}"
        if self.path == "/v1/messages":
            details, cached, written = found, found["cache_read_input_tokens"], found["output_tokens"]
            computed = found["input_tokens"] + found["cache_creation_input_tokens"]
        else:
            many = "input" if "input_tokens" in found else "prompt"
            details = found[f"{many}_tokens_details"]
            cached = details["cached_tokens"]
            computed = found[f"{many}_tokens"] - cached
            written = found["output_tokens" if many == "input" else "completion_tokens"]
        again = details.get("recomputed_tokens", 0)
        return Usage(cached, again, computed - again, written)


@dataclass(frozen=True)
class Usage:
    """Tokens of a prompt that a session had, and for which nothing was computed; that it had, and that were computed
    again; that were read for the first time; and tokens that were written."""

    cached: int
    recomputed: int
    read: int
    written: int

    @property
    def known(self) -> int:
        """Those that the session had before."""
        return self.cached + self.recomputed

    @property
    def held(self) -> int:
        """The session's tokens behind the answer."""
        return self.known + self.read + self.written


class Front:
    """The proxy, on a loopback port and on a Unix socket. daemon: where requests go to, now. calls: the tool that the
    next request is made to call. ends: the tool that every other request is made to call, for clients whose turns end
    with a call. arguments: those that calls of a tool have, by its name, in place of any that the model makes up; in
    all requests of a conversation, for its tools are a part of it."""

    def __init__(self, folder: Path) -> None:
        self.daemon: Daemon
        self.calls: str | None = None
        self.ends: str | None = None
        self.arguments: dict[str, dict[str, Any]] = {}
        self.exchanges: list[Exchange] = []
        self.socket = folder / "front.sock"
        routes = [Route("/{path:path}", self._pass_on, methods=["GET", "POST", "HEAD", "DELETE"])]
        port = socket.create_server(("127.0.0.1", 0))
        on_unix = socket.socket(socket.AF_UNIX)
        on_unix.bind(str(self.socket))
        self.url = f"http://127.0.0.1:{port.getsockname()[1]}"
        config = uvicorn.Config(Starlette(routes=routes), log_level="warning", lifespan="off")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._server.serve([port, on_unix])))
        self._thread.start()

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(timeout=20)

    @property
    def token(self) -> str:
        return self.daemon.token

    async def _pass_on(self, request: Request) -> StreamingResponse:
        raw = await request.body()
        path = request.url.path
        body = json.loads(raw) if raw and path in _CEILINGS else {}
        if body:
            self._change(path, body)
            raw = json.dumps(body, ensure_ascii=False).encode()
        headers = {name: value for name, value in request.headers.items() if name not in ("host", *_DROPPED)}
        if request.scope.get("client") is None or request.scope["server"][1] is None:  # came by the Unix socket
            client = httpx2.AsyncClient(transport=httpx2.AsyncHTTPTransport(uds=str(self.daemon.socket)), timeout=300)
            url = "http://localhost"
        else:
            client, url = httpx2.AsyncClient(timeout=300), self.daemon.url
        asked = client.build_request(
            request.method, url + path, content=raw, headers=headers, params=request.query_params
        )
        answer = await client.send(asked, stream=True)
        told = {name: value for name, value in answer.headers.items() if name not in _DROPPED}
        exchange = Exchange(
            self.daemon,
            path,
            headers,
            body,
            answer.status_code,
            told.get("x-torpor-session", ""),
            told.get("x-torpor-ignored", ""),
        )
        if body:
            self.exchanges.append(exchange)

        async def pieces() -> AsyncIterator[bytes]:
            try:
                async for piece in answer.aiter_bytes():
                    exchange.said += piece
                    yield piece
            finally:
                await answer.aclose()
                await client.aclose()

        return StreamingResponse(pieces(), answer.status_code, told)

    def _change(self, path: str, body: dict[str, Any]) -> None:
        """Make an answer a call, if the next one is to be, or one of a few texts, and bound it."""
        for tool in (each.get("function", each) for each in body.get("tools") or ()):
            if (given := self.arguments.get(tool.get("name"))) is not None:
                tool["parameters"] = {
                    "type": "object",
                    "properties": {name: {"enum": [value]} for name, value in given.items()},
                    "required": list(given),
                }
        if body.get("tools") and (called := self.calls or self.ends) is not None:
            body |= _CALLING[path](called)
            self.calls = None
        else:
            body |= _WORDED[path]
        ceilings = _CEILINGS[path]
        given = next((name for name in ceilings if name in body), ceilings[0])
        body[given] = min(MOST_TOKENS, body.get(given) or MOST_TOKENS)
        if body.get("stream") and path == "/v1/chat/completions":
            body["stream_options"] = {**(body.get("stream_options") or {}), "include_usage": True}


_CHAT, _RESPONSES, _MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
_CALLING: dict[str, Callable[[str], dict[str, Any]]] = {
    _CHAT: lambda name: {"tool_choice": {"type": "function", "function": {"name": name}}},
    _RESPONSES: lambda name: {"tool_choice": {"type": "function", "name": name}},
    _MESSAGES: lambda name: {"tool_choice": {"type": "tool", "name": name}},
}
_NAMED = {"type": "json_schema", "name": "answer", "schema": ANSWER}
_WORDED: dict[str, dict[str, Any]] = {
    _CHAT: {
        "tool_choice": "none",
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": ANSWER}},
    },
    _RESPONSES: {"tool_choice": "none", "text": {"format": _NAMED}},
    _MESSAGES: {
        "tool_choice": {"type": "none"},
        "output_config": {"format": {"type": "json_schema", "schema": ANSWER}},
    },
}


def require_nothing_read_twice(exchanges: list[Exchange]) -> None:
    """Each answer finds all of the ones before in the session, and only what is new is read. A kill costs two blocks
    and the last turn at most, which are computed again."""
    held = 0
    for at, exchange in enumerate(exchanges):
        assert exchange.status == 200, bytes(exchange.said)
        usage = exchange.usage
        print(f"answer {at}: {usage}")
        assert usage.known == held, f"answer {at} of {len(exchanges)}: {usage}, and {held} tokens were held"
        held = usage.held
    require_little_computed_again(exchanges)


def require_little_computed_again(exchanges: list[Exchange]) -> None:
    """The last token of what a fork has in common, and behind a kill two blocks and what was read and written last."""
    for before, exchange in pairwise(exchanges):
        is_killed = exchange.daemon is not before.daemon
        most = 2 * BLOCK + before.usage.read + before.usage.written if is_killed else 1
        assert exchange.usage.recomputed <= most, f"{exchange.usage}, behind {before.usage}"


def require_reads_do_not_grow(exchanges: list[Exchange], settled: int) -> None:
    """For a client that words a part of its history anew: what it reads stays what it was in the first turns, while
    the history grows, also over a kill. settled: the requests of these turns."""
    usages = []
    for exchange in exchanges:
        assert exchange.status == 200, bytes(exchange.said)
        usages.append(exchange.usage)
        print(f"answer {len(usages) - 1}: {usages[-1]}")
    require_little_computed_again(exchanges)
    most = max(usage.read for usage in usages[1:settled]) + A_FEW
    assert all(usage.read <= most for usage in usages[settled:]), f"up to {most} tokens were read at first"


def calls_in(exchanges: list[Exchange]) -> Iterator[str]:
    """The names of the tools that answers called."""
    for exchange in exchanges:
        for event in exchange.events:
            yield from _calls_of(event)


def _calls_of(event: Any) -> Iterator[str]:
    for choice in event.get("choices", ()):
        for call in (choice.get("message") or choice.get("delta") or {}).get("tool_calls") or ():
            if call["function"].get("name"):
                yield call["function"]["name"]
    done = event.get("item") if event.get("type") == "response.output_item.done" else None
    started = event.get("content_block") if event.get("type") == "content_block_start" else None
    for block in (done, started, *(event.get("output") or ()), *(event.get("content") or ())):
        if isinstance(block, dict) and block.get("type") in ("function_call", "tool_use"):
            yield block["name"]
