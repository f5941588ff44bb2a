"""The inspector: a page at `/` of the loopback port that shows what the memory of agents holds, shares and costs.

Owns its files, which are open to all as they tell nothing, and the sign-in. `torpor inspect` asks for a code with the
user's token, and opens the page with it in the fragment, which no browser sends or keeps; the page gives the code for
the token, once and soon. Every figure of the page comes from the routes of other programs, with that token.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ..errors import HttpRefused
from ..tokens import digest_of
from .access import token_in
from .requests import in_path
from .sign_in import CODE_LASTS_S
from .work import desk_of

FOLDER: Final = Path(__file__).with_name("inspector")
FILES_PATH: Final = "/inspector/"
LINK_PATH: Final = f"{FILES_PATH}link"
TOKEN_PATH: Final = f"{FILES_PATH}token"

_TYPES: Final[Mapping[str, str]] = MappingProxyType(
    {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
)
_POLICY: Final = "; ".join(
    (
        *("default-src 'none'", "script-src 'self'", "style-src 'self'", "img-src 'self'", "connect-src 'self'"),
        *("base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"),
        *("require-trusted-types-for 'script'", "trusted-types 'none'"),
    )
)
HEADERS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "content-security-policy": _POLICY,
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
        "cache-control": "no-cache",
    }
)
"""Of each file: nothing from elsewhere, no text that becomes a script, and no frame around it."""


@dataclass(frozen=True, slots=True)
class File:
    """A file of the page. tag: it changes with the content."""

    content: bytes
    kind: str
    tag: str


@cache
def files() -> Mapping[str, File]:
    """The files of the page by their names."""
    found = {}
    for path in sorted(FOLDER.iterdir()):
        if kind := _TYPES.get(path.suffix):
            content = path.read_bytes()
            found[path.name] = File(content, kind, f'"{hashlib.sha256(content).hexdigest()[:32]}"')
    return MappingProxyType(found)


def routes() -> list[Route]:
    """The files, and the two steps of the sign-in."""
    return [
        Route(LINK_PATH, _link, methods=["POST"]),
        Route(TOKEN_PATH, _token, methods=["POST"]),
        Route(f"{FILES_PATH}{{name}}", _file),
    ]


def is_asked(request: Request) -> bool:
    """Whether a browser asks for the page: `/` for HTML, and not from the Unix socket."""
    asks = request.method == "GET" and request.url.path == "/" and "text/html" in request.headers.get("accept", "")
    return asks and not request.state.connection.on_unix


def is_open(request: Request) -> bool:
    """Whether a request needs no token: it asks for the page or a file of it, or brings a code."""
    path = request.url.path
    return is_asked(request) or path == TOKEN_PATH or (request.method == "GET" and path.startswith(FILES_PATH))


def page(request: Request) -> Response:
    """The page itself."""
    return _sent(request, "index.html")


async def _file(request: Request) -> Response:
    return _sent(request, in_path(request, "name"))


def _sent(request: Request, name: str) -> Response:
    file = files().get(name)
    if file is None:
        raise HttpRefused("The inspector has no such file.", status=404)
    headers = {**HEADERS, "etag": file.tag, "vary": "accept"}
    if request.headers.get("if-none-match") == file.tag:
        return Response(status_code=304, headers=headers)
    return Response(file.content, headers=headers, media_type=file.kind)


async def _link(request: Request) -> Response:
    """Give a code for the caller's token, which only a caller with a token has."""
    codes = desk_of(request).codes
    if codes is None or request.state.caller.namespace is None:
        raise HttpRefused("The inspector is on the port of HTTP, and not on the Unix socket.", status=404)
    code = codes.make(digest_of(token_in(request.headers)))
    return JSONResponse({"code": code, "seconds": CODE_LASTS_S})


async def _token(request: Request) -> Response:
    """Give the token for a code."""
    desk = desk_of(request)
    async with desk.bodies.read(request) as body:
        code = body.get("code")
    digest = desk.codes.take(code) if desk.codes is not None and isinstance(code, str) else None
    found = None if digest is None else desk.access.with_digest(digest)
    if found is None:
        raise HttpRefused(
            "This link was used already, or is too old: it is good for one sign-in within two minutes. `torpor inspect`"
            " makes a new one.",
            status=401,
        )
    namespace, token = found
    return JSONResponse({"token": token, "namespace": namespace}, headers={"cache-control": "no-store"})
