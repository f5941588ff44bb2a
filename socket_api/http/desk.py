"""What all routes of one server share."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from starlette.requests import Request

from ...daemon.api.process import StatusRequest
from ...daemon.api.verb import R, Verb
from ...daemon.api.verbs import VERBS
from ..server.dispatch import Backend
from .access import Access
from .bodies import Bodies
from .limits import HttpLimits
from .metrics import Counters
from .work import Works


@dataclass
class Desk:
    """The parts of one server over a service."""

    backend: Backend
    access: Access
    limits: HttpLimits = field(default_factory=HttpLimits)
    started_s: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.works = Works(self.backend)
        self.bodies = Bodies(self.limits)
        self.counters = Counters()
        self.counters.working.set_function(lambda: len(self.works))
        self._default_model: str | None = None

    async def ask(self, request: Request, verb: Verb[Any, R], params: Mapping[str, Any]) -> R:
        """Carry out a verb for the caller of a request, whose body has been read. Raises InvalidRequest, HttpRefused,
        ClientLeft, and as the service."""
        asked = await request.state.caller.request_of(verb, params)
        return await self.works.answer(verb, asked, request.receive)

    async def default_model(self) -> str:
        """The name of the first model, which is the same as long as the daemon runs."""
        if self._default_model is None:
            status = await self.backend.ask(VERBS["status"], StatusRequest())
            self._default_model = status.models[0].name
        return self._default_model


def desk_of(request: Request) -> Desk:
    """The desk of the server that got a request."""
    desk: Desk = request.app.state.desk
    return desk


def in_path(request: Request, name: str) -> str:
    """What the path of a request names. Its escapes are read here alone: paths are matched with them, so that a name
    may have a slash (`app.py`)."""
    return unquote(request.path_params[name])
