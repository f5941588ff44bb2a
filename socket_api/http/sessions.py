"""Sessions over HTTP: verbs of the daemon as plain JSON.

A route is a row of a table. The body of a request has the fields of the verb's record, but for the session, which the
path names; the answer is the verb's record, for a client of one namespace without what the store has of all in common
(`common_store.py`). A name in a path may be percent-encoded: `team%2Fnotes`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from types import MappingProxyType
from typing import Any, Final, get_args, get_type_hints

from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ...daemon.api.verb import Verb
from ...daemon.api.verbs import VERBS
from ...daemon.tasks.pieces import in_pieces
from ..server.wire_map import wire_map
from ..wire.checking import listed, params_of_json
from ..wire.common_store import without_others
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
        result = await desk.ask(request, route.verb, params)
        values = await in_pieces(wire_map(route.verb, result))
        bound_to = request.state.caller.bound_to
        return JSONResponse(values if bound_to is None else without_others(values, bound_to))


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
