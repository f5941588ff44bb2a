"""Sessions over HTTP: verbs of the daemon as plain JSON.

A route is a row of a table. The body of a request has the fields of the verb's record, but for the session, which the
path names; the answer is the verb's record, for a client of one namespace without what the store has of all in common
(`common_store.py`). A client that accepts server-sent events is told how far a long one is (`reporting.py`). A name in
a path may be percent-encoded: `team%2Fnotes`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from types import MappingProxyType
from typing import Any, Final, get_args, get_type_hints

from pydantic_core import to_json
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...daemon.api.verb import Verb
from ...daemon.api.verbs import VERBS
from ...daemon.tasks.pieces import NAMES_AT_ONCE, Pieces, in_pieces
from ..server.wire_map import wire_map
from ..wire.checking import listed, params_of_json
from ..wire.common_store import without_others
from .reporting import Reports, wants_reports
from .requests import in_path
from .work import desk_of

PATH: Final = "/v1/sessions"
_NUMBER: Final = re.compile(r"[0-9]{1,19}", re.ASCII)
_SWITCH: Final[Mapping[str, bool]] = MappingProxyType({"true": True, "false": False})
_HISTORY_PATH: Final = "/v1/history"


@dataclass(frozen=True, slots=True)
class SessionRoute:
    """A verb, and where it is asked. of_all: its answer tells of all namespaces, so the owner alone gets it."""

    method: str
    path: str
    verb: Verb[Any, Any]
    of_all: bool = False

    @property
    def names_session(self) -> bool:
        """Whether the path names the session."""
        return "{session}" in self.path


ROUTES: Final = (
    SessionRoute("GET", PATH, VERBS["list"]),
    SessionRoute("POST", PATH, VERBS["create"]),
    SessionRoute("GET", f"{PATH}/{{session}}", VERBS["show"]),
    SessionRoute("DELETE", f"{PATH}/{{session}}", VERBS["delete"]),
    SessionRoute("GET", f"{PATH}/{{session}}/why", VERBS["why"]),
    SessionRoute("GET", f"{PATH}/{{session}}/blocks", VERBS["blocks"]),
    SessionRoute("GET", f"{PATH}/{{session}}/contents", VERBS["contents"]),
    SessionRoute("GET", f"{PATH}/{{session}}/difference", VERBS["difference"]),
    SessionRoute("GET", f"{PATH}/{{session}}/analysis", VERBS["analyze"], of_all=True),
    SessionRoute("GET", _HISTORY_PATH, VERBS["history"]),
    SessionRoute("GET", "/v1/why", VERBS["causes"]),
    SessionRoute("GET", "/v1/status", VERBS["status"], of_all=True),
    SessionRoute("GET", "/v1/usage", VERBS["usage"], of_all=True),
    SessionRoute("POST", f"{PATH}/{{session}}/mark", VERBS["mark"]),
    SessionRoute("POST", f"{PATH}/{{session}}/maintain", VERBS["maintain"], of_all=True),
    *(
        SessionRoute("POST", f"{PATH}/{{session}}/{name}", VERBS[name])
        for name in ("set", "sleep", "save", "wake", "fork", "fold")
    ),
)


def routes() -> list[Route]:
    """The table, as routes of the server."""
    return [Route(each.path, partial(_answer, each), methods=[each.method]) for each in ROUTES]


async def _answer(route: SessionRoute, request: Request) -> Response:
    desk = desk_of(request)
    if route.of_all:
        request.state.caller.require_owner()
    async with desk.bodies.read(request) as body:
        params = params_of_json(route.verb, body)
        if route.method == "GET":
            params |= _asked_in(request.query_params, route.verb)
        if route.names_session:
            params["session"] = in_path(request, "session")
        order = await request.state.caller.request_of(route.verb, params)
        told = partial(_told, route, request)
        if wants_reports(request, order):
            return Reports(request, route.verb, order, told)
        answer = await told(await desk.works.answer(route.verb, order, request.receive))
        return Response(answer, media_type="application/json")


async def _told(route: SessionRoute, request: Request, result: Any) -> bytes:
    values = await in_pieces(wire_map(route.verb, result))
    return await in_pieces(_json_of(values, request.state.caller.bound_to))


def _json_of(values: dict[str, Any], bound_to: str | None) -> Pieces[bytes]:
    """An answer as who is bound to a namespace may know it; None: all of it. Streams wait meanwhile, so long lists are
    made piece by piece."""

    def told(value: Any) -> Any:
        return value if bound_to is None else without_others(value, bound_to)

    long = {name: each for name, each in values.items() if isinstance(each, list | tuple) and len(each) > NAMES_AT_ONCE}
    short = told({name: () if name in long else each for name, each in values.items()})
    if short is None:
        return b"null"
    written = []
    for name, value in short.items():
        text = to_json(value)
        if name in long:
            parts = []
            for start in range(0, len(long[name]), NAMES_AT_ONCE):
                parts.append(to_json(told(long[name][start : start + NAMES_AT_ONCE]))[1:-1])
                yield
            text = b"[" + b",".join(parts) + b"]"
        written.append(to_json(name) + b":" + text)
    return b"{" + b",".join(written) + b"}"


def _asked_in(query: QueryParams, verb: Verb[Any, Any]) -> dict[str, Any]:
    """What a query asks for. It is all text: a list comes item by item, and a switch is `true` or `false`."""
    lists, kinds = listed(verb), _kinds_of(verb)
    asked: dict[str, Any] = {}
    for name, text in query.items():
        if name in lists:
            asked[name] = tuple(query.getlist(name))
        elif bool in kinds.get(name, ()):
            asked[name] = _SWITCH.get(text, text)
        else:
            asked[name] = int(text) if int in kinds.get(name, ()) and _NUMBER.fullmatch(text) else text
    return asked


@cache
def _kinds_of(verb: Verb[Any, Any]) -> Mapping[str, tuple[Any, ...]]:
    """The types that each field of a request may have."""
    hints = get_type_hints(verb.request)
    return {name: (kind, *get_args(kind)) for name, kind in hints.items()}
