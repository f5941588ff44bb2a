"""A service on the demo model in this process, and the fronts through which it is asked: itself, both clients, and HTTP
where that has the verb.

`Front` checks each call: what was given has reached the service, and what the service told, answered or refused has
come back. So a test only says what it asks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import pytest
from torpor.daemon.api.events import NEVER_SENT, Reporting, WorkEvent
from torpor.daemon.api.process import ShutdownRequest, SubscribeRequest
from torpor.daemon.api.records import Request
from torpor.daemon.api.sampling import Sampling
from torpor.daemon.api.verb import Blocking, R, Verb
from torpor.daemon.api.verbs import VERBS, DaemonVerbs
from torpor.daemon.options.serve_options import ServeOptions
from torpor.daemon.service import Service
from torpor.errors import TorporError
from torpor.socket_api.errors import RemoteError
from torpor.socket_api.http.server import HttpServer
from torpor.socket_api.http.sessions import ROUTES
from torpor.socket_api.server.server import ApiServer
from torpor.socket_api.wire.checking import load_request, reader_of_result
from torpor.tests.socket_api.both_clients import connected
from torpor.tests.socket_api.http.http_rig import UnixConnection, asked
from torpor.tests.socket_api.server_rig import LoopThread, quick

FRONTS = ("service", "blocking", "awaited", "http")
OF_THE_PROCESS = {each.name for each in VERBS.values() if each.request in (ShutdownRequest, SubscribeRequest)}
ROUTE_OF = {each.verb.name: each for each in ROUTES}
_ONE_OR_MORE = ("sessions", "stop")
_BY_METHOD = {each.attribute: each for each in VERBS.values()}
COVERED: dict[str, set[str]] = {name: set() for name in FRONTS}
"""The verbs that a contract asks for, over each front."""


def contract(*verbs: str) -> pytest.MarkDecorator:
    """Run a test over every front that has these verbs: it asks for them by `front`, and for others by `there`."""
    over = [each for each in FRONTS if each != "http" or set(verbs) <= ROUTE_OF.keys()]
    for each in over:
        COVERED[each].update(verbs)
    return pytest.mark.parametrize("front", over, indirect=True)


@dataclass
class Exchange:
    """What reached the service, and what it did with it."""

    request: Request
    events: list[WorkEvent] = field(default_factory=list)
    answer: object = None
    error: TorporError | None = None


class Whole(LoopThread):
    """A service, and a server on each kind of socket."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.exchanges: list[Exchange] = []
        super().__init__()

    async def start(self) -> None:
        self.service = await Service.open(ServeOptions(store=self.folder / "store"))
        self._ask, self.service.ask = self.service.ask, self._watched  # type: ignore[method-assign]
        self.server = ApiServer(self.service, self.folder / "t.sock", limits=quick())
        self.http = HttpServer(socket_path=self.folder / "h.sock", tokens_path=self.folder / "tokens")
        await self.server.start()
        await self.http.start(self.service)

    async def _watched(self, verb: Verb[Any, R], request: Request) -> R:
        exchange = Exchange(request)
        self.exchanges.append(exchange)
        if isinstance(request, Reporting):
            emit = request.emit

            def tell(event: WorkEvent) -> None:
                exchange.events.append(event)
                emit(event)

            request = request.told_to(tell)
        try:
            answer = await self._ask(verb, request)
        except TorporError as error:
            exchange.error = error
            raise
        exchange.answer = answer
        return answer

    def stop(self) -> None:
        self.do(self.http.stop)
        self.do(self.service.close)
        super().stop()


class InProcess(DaemonVerbs, Blocking):
    """The service itself."""

    def __init__(self, whole: Whole) -> None:
        self._whole = whole

    def ask(self, verb: Verb[Any, R], request: Request) -> R:
        """Carry it out on the service's loop, as a record."""
        record = load_request(verb, given(request))
        if isinstance(request, Reporting):
            record = record.told_to(request.emit)
        answer: R = self._whole.do(lambda: self._whole.service.ask(verb, record))
        return answer


class OverHttp(DaemonVerbs, Blocking):
    """The rows of `/v1/sessions`, as a client writes them."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket

    def ask(self, verb: Verb[Any, R], request: Request) -> R:
        """Ask by the row of the verb."""
        route, params = ROUTE_OF[verb.name], given(request)
        path = route.path
        if route.names_session:
            path = path.replace("{session}", quote(params.pop("session"), safe=""))
        if route.method == "GET" and params:
            query = {name: json.dumps(value) if isinstance(value, bool) else value for name, value in params.items()}
            path, params = f"{path}?{urlencode(query, doseq=True)}", {}
        connection = UnixConnection(self._socket)
        try:
            told = asked(connection, route.method, path, json.dumps(params).encode())
        finally:
            connection.close()
        if told.status != 200:
            raise RemoteError(told.json["error"]["code"], told.json["error"]["message"])
        answer: R = reader_of_result(verb).validate_json(told.body)
        return answer


class Front:
    """A way to ask the service, on which each call is checked."""

    def __init__(self, name: str, caller: Any, whole: Whole) -> None:
        self.name = name
        self._caller = caller
        self._whole = whole

    def __getattr__(self, verb: str) -> Callable[..., Any]:
        return lambda *args, **options: self._asked(verb, args, options)

    def _asked(self, verb: str, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
        wanted = _BY_METHOD[verb].request(*args, **options)
        events: list[WorkEvent] = []
        tells = isinstance(wanted, Reporting) and self.name != "http"
        before = len(self._whole.exchanges)
        try:
            answer = getattr(self._caller, verb)(*args, **options, **({"on_event": events.append} if tells else {}))
        except TorporError as error:
            self._check_refusal(error, wanted, self._whole.exchanges[before:])
            raise
        exchange = self._whole.exchanges[before]
        assert given(exchange.request) == given(wanted), "another request reached the service"
        assert answer == exchange.answer, "another answer came back"
        assert not tells or events == exchange.events, "other events came back"
        return answer

    def _check_refusal(self, error: TorporError, wanted: Request, exchanges: Sequence[Exchange]) -> None:
        assert exchanges, f"no request reached the service: {error}"
        exchange = exchanges[0]
        assert given(exchange.request) == given(wanted), "another request reached the service"
        assert exchange.error is not None, "the service has refused nothing"
        assert (error.code, error.message) == (exchange.error.code, exchange.error.message)
        assert self.name == "http" or plain(error.details) == plain(exchange.error.details)

    def refusal(self, verb: str, *args: Any, **options: Any) -> str:
        """The code with which a request is refused."""
        with pytest.raises(TorporError) as refusal:
            getattr(self, verb)(*args, **options)
        return refusal.value.code


@contextmanager
def front_of(name: str, whole: Whole) -> Iterator[Front]:
    """A front by its name."""
    if name in ("blocking", "awaited"):
        with connected(whole.folder / "t.sock", name, timeout_s=60) as client:
            yield Front(name, client, whole)
    else:
        yield Front(name, InProcess(whole) if name == "service" else OverHttp(whole.folder / "h.sock"), whole)


def given(request: Request) -> dict[str, Any]:
    """What of a request is not as it is left out, in the form in which it arrives."""
    left_out = {each.name: each.default for each in fields(request) if each.name not in NEVER_SENT}
    values = {name: plain(getattr(request, name)) for name in left_out}
    values |= {name: (values[name],) for name in _ONE_OR_MORE if isinstance(values.get(name), str)}
    return {name: value for name, value in values.items() if value != left_out[name]}


def plain(value: Any) -> Any:
    """A value as maps and tuples."""
    if isinstance(value, Sampling):
        return value.named()
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in value.items()}
    if is_dataclass(value):
        found = {each.name: getattr(value, each.name) for each in fields(value)}
        return {each.name: plain(found[each.name]) for each in fields(value) if found[each.name] != each.default}
    if isinstance(value, list | tuple):
        return tuple(map(plain, value))
    return value
