"""`torpor ensure`: a daemon that answers, started if there is none."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ...daemon.options.serve_options import GIVEN_OPTIONS
from ...memvid.disk.location import default_store_path
from ...places import default_log_path
from ...socket_api.client.client import Client
from ...socket_api.errors import DaemonUnreachable
from ...socket_api.wire.address import default_socket_path
from ..errors import DaemonStartFailed, InvalidUsage
from ..exit_codes import OK
from ..reach import background
from ..reach.daemon_link import connect, find_ended_daemon, nobody_is_there
from ..reach.options import JsonOption, takes
from ..view.downloads import downloads_on
from ..view.output import Output, plain
from . import last_options
from .serve import LogOption, remark_on_start
from .serve_parameters import arguments_of, given_of, options_of


@takes(options_of("model", "config", "store", "socket"))
def ensure(log: LogOption = None, as_json: JsonOption = False, **values: Any) -> int:
    """Two at once start one. --config and --log hold only for a daemon that is started. A daemon that runs without a
    model of --model is an error. Other settings of [cyan]torpor serve[/] can stand in the file of --config. After a
    crash the daemon starts with the options that it had, but for those given here. Where the start fails, nothing is
    left running.

    [bold]Examples[/]

    [cyan]torpor ensure[/]
    [cyan]torpor ensure --config torpor.toml --json | jq .started[/]
    """
    output, given = Output(as_json=as_json), given_of(values)
    config = given.get("config")
    daemon, started = find_or_start(output, given, log)
    with daemon:
        if not started:
            told = daemon.status().config
            is_its_own = config and told and _is_same(str(config), told.path)
            ignored = {"--config": None if is_its_own else config, "--log": log}
            _tell_what_is_ignored(output, [option for option, value in ignored.items() if value])
        return _tell(output, daemon, started=started)


def find_or_start(
    output: Output, given: Mapping[str, Any], log: Path | None = None, unless_given: Mapping[str, Any] | None = None
) -> tuple[Client, bool]:
    """A daemon that answers and serves the models of `given`, and whether it was started for that.

    given: options of a daemon. log: of one that is started. unless_given: its options where neither `given` names them,
    nor a daemon that ended without a stop had others, nor a file may have them.

    Raises:
        DaemonStartFailed: none answers, and none could be started.
        InvalidUsage: one runs without a model that is given, or has its name for another one.
    """
    log = (log or default_log_path()).absolute()
    socket, store = given.get("socket") or default_socket_path(), given.get("store")
    with _one_at_a_time(log):
        daemon = _find(socket, store)
        if daemon is None:
            had: dict[str, Any] = {}
            if ended := find_ended_daemon(socket, restarting=True):
                output.remark(f"[yellow]{plain(ended.message)}[/]")
                had = last_options.recall(socket)
                _tell_what_it_had(output, had, given)
            more = {} if "config" in {**had, **given} else unless_given or {}
            options = {"store": default_store_path(), **more, **had, **given, "socket": socket}
            try:
                with downloads_on(output) as on_download:
                    begun = background.start(arguments_of(options), log, on_download)
                remark_on_start(output, begun)
                return connect(socket, store=store), True
            except DaemonStartFailed:
                daemon = _find(socket, store)  # another start was first
                if daemon is None:
                    raise
    try:
        require_served(daemon, given.get("model") or {})
    except InvalidUsage:
        daemon.close()
        raise
    return daemon, False


def require_served(daemon: Client, models: Mapping[str, str]) -> None:
    """Raises InvalidUsage: the daemon runs without one of these models, or has its name for another one."""
    status = daemon.status()
    for name, source in models.items():
        served = status.model_named(name)
        if served is not None and _is_of(source, served.path):
            continue
        there = ", ".join(f"{each.name}={each.path}" for each in status.models)
        raise InvalidUsage(
            f"The daemon on {daemon.socket_path} serves {there}, and --model names {name}={source}. Leave --model out"
            " to use this daemon. To have the model, stop the daemon first (`torpor stop`), then run this again.",
            model=name,
        )


def _is_of(source: str, path: str) -> bool:
    """Whether a model is served from this folder, or is this one of the hub: a folder in the hub's cache has its
    name."""
    is_of_hub = f"models--{source.replace('/', '--')}" in Path(path).parts
    return source == path or is_of_hub or _is_same(source, path)


def _is_same(path: str, other: str) -> bool:
    return os.path.realpath(path) == os.path.realpath(other)


def _tell_what_it_had(output: Output, had: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    shown = GIVEN_OPTIONS.keys() - {"socket", "store", *given}
    options = {name: value for name, value in had.items() if name in shown}
    if options:
        output.remark(f"[dim]it starts with the options that it had:[/] {plain(shlex.join(arguments_of(options)))}")
    if gone := sorted(had.keys() - GIVEN_OPTIONS.keys()):
        names = ", ".join(f"--{name.replace('_', '-')}" for name in gone)
        output.remark(f"[yellow]not taken over[/]: {plain(names)}. It had them from another release of Torpor.")


def _tell_what_is_ignored(output: Output, options: list[str]) -> None:
    if options:
        output.remark(
            f"[yellow]not taken over[/]: {', '.join(options)}. Options hold only for a daemon that is started. To have"
            " them, stop the daemon first ([cyan]torpor stop[/]), then run this again."
        )


def _find(socket: Path, store: Path | None) -> Client | None:
    try:
        return connect(socket, store=store)
    except DaemonUnreachable as error:
        if nobody_is_there(error):
            return None
        raise


@contextlib.contextmanager
def _one_at_a_time(log: Path) -> Iterator[None]:
    """A second command waits until the first one's daemon answers or has failed to start."""
    descriptor = background.open_log(log)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _tell(output: Output, daemon: Client, *, started: bool) -> int:
    status = daemon.status()
    facts = {"socket": str(daemon.socket_path), "pid": status.pid, "store": status.store, "started": started}
    if output.as_json:
        output.document("ensure", facts)
    else:
        serves = f"torpor serves {plain(status.store)} on {plain(str(daemon.socket_path))} (pid {status.pid})"
        output.line(f"{serves}, {'started now' if started else 'as it did before'}")
    return OK.number
