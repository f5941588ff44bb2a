"""The server put together, for `torpor serve`.

Owns the printed lines. The only module of this layer that makes a service.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from ..daemon.api.process import ShutdownResult
from ..daemon.config.configuring import ConfigFile
from ..daemon.config.settings import settings_of
from ..daemon.events.bus import Bus
from ..daemon.events.events import Event, ModelDownloadProgress
from ..daemon.options.serve_options import ServeOptions
from ..daemon.service import Service
from .server.notifying import tell_supervisor
from .server.serving import serve_until_signal
from .wire.address import default_socket_path

if TYPE_CHECKING:
    from .http.server import HttpServer

_LOG_FORMAT: Final = "%(asctime)s %(levelname)s %(message)s"
"""A line of the daemon's log begins with the time."""


OnDownload = Callable[[str, int, int], None]
"""Takes the name of a model, how many bytes of it are there, and how many it has."""


def run(
    given: Mapping[str, Any],
    *,
    as_json: bool = False,
    on_ready: Callable[[], None] = lambda: None,
    on_download: OnDownload = lambda model, done, total: None,
) -> None:
    """Serve until SIGTERM, SIGINT, SIGHUP or a client's `shutdown`, in this process and thread. With a configuration
    file, SIGHUP reloads that instead.

    given: the options of the command line, as `settings_of` takes them. as_json: print one JSON object a line.
    on_ready: called when it answers. on_download: called while a model is downloaded before that; with as_json a line
    is printed instead.

    Raises:
        TorporError: it could not start, or stopped with sessions that it could not put to sleep.
    """

    logging.basicConfig(format=_LOG_FORMAT)
    config, store = given.get("config"), given.get("store")
    warnings: tuple[str, ...] = ()
    budget = ""
    http: HttpServer | None = None

    async def open_service() -> Service:
        nonlocal http, warnings, budget
        settings = settings_of(given)
        http = _http_server(settings.options)
        bus = Bus()
        async with bus.telling(ModelDownloadProgress.name, tell_download):
            service = await Service.open(settings.options, models=settings.models, bus=bus)
        if config is not None:
            service.follow(ConfigFile(config, lambda: settings_of(given)), settings)
        if http is not None:
            service.tell_http(http.info)
        warnings, budget = service.warnings, service.budget
        for warning in warnings:
            print(f"torpor serve: warning: {warning}", file=sys.stderr, flush=True)
        return service

    def tell_download(event: Event) -> None:
        assert isinstance(event, ModelDownloadProgress)
        tell_supervisor("EXTEND_TIMEOUT_USEC=60000000")  # a minute more for the start, each time
        if as_json:
            _print("", {"event": "download", **event.facts()}, as_json=True)
        else:
            on_download(event.model, event.done_bytes, event.total_bytes)

    def tell_ready(socket: str) -> None:
        on_ready()
        sentence = f"torpor serves {store or 'the default store'} on {socket} (pid {os.getpid()}); stop it with Ctrl-C"
        facts = {"event": "ready", "socket": socket, "pid": os.getpid(), "warnings": len(warnings)}
        facts["budget"] = budget
        told = [] if http is None else http.addresses()
        _print("\n".join([sentence, *told, budget]), facts | ({"http": told} if told else {}), as_json=as_json)

    def on_stopped(report: ShutdownResult) -> None:
        _print(describe_stop(report), {"event": "stopped", **asdict(report)}, as_json=as_json)

    serve_until_signal(
        open_service,
        given.get("socket") or default_socket_path(),
        on_ready=tell_ready,
        on_stopped=on_stopped,
        rereads=config is not None,
        find_doors=lambda: () if http is None else (http,),
    )


def _http_server(options: ServeOptions) -> HttpServer | None:
    """The HTTP server that the options ask for. Raises as that does."""
    if options.http is None and options.http_socket is None:
        return None
    # Imported here: who does not ask for HTTP pays nothing for it (tests/socket_api/http/test_imports.py).
    from .http.server import HttpServer

    return HttpServer(socket_path=options.http_socket, port=options.http, inspector=not options.no_inspector)


def describe_stop(report: ShutdownResult) -> str:
    """The report as a sentence."""
    slept, empty = len(report.slept), len(report.empty)
    sentence = f"torpor stopped; {slept} {'session was' if slept == 1 else 'sessions were'} put to sleep"
    if ledgers := len(report.ledgers):
        sentence += f"; {ledgers} kept only as ledgers, to be read again at the next use"
    if empty:
        sentence += f"; {empty} had read nothing and {'is' if empty == 1 else 'are'} gone"
    if unsent := len(report.unsent):
        sentence += f"; the remote may lack the newest version of {unsent}"
    return "\n".join([sentence, *(f"  {session}: {reason}" for session, reason in report.ledgers.items())])


def _print(sentence: str, document: Mapping[str, object], *, as_json: bool) -> None:
    try:
        print(json.dumps(document) if as_json else sentence, flush=True)
    except OSError:  # no reader: the daemon must still serve and stop
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, sys.stdout.fileno())
        os.close(silence)
