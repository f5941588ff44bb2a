"""`torpor serve`: become the daemon. The one command that loads MLX, and only once it is called."""

from __future__ import annotations

import contextlib
import gc
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from ...daemon.options.serve_options import GIVEN_OPTIONS
from ...memvid.disk.location import default_store_path
from ...memvid.units import format_plural
from ...places import default_log_path
from ...socket_api.wire.address import default_socket_path
from ...socket_api.wire.listener import require_free
from ..errors import InvalidUsage
from ..exit_codes import OK
from ..reach import background
from ..reach.options import JsonOption, option, takes
from ..view.downloads import downloads_on
from ..view.output import Output, plain
from . import last_options
from .serve_parameters import arguments_of, given_of, options_of

DetachOption = Annotated[bool, option("--detach -d", "Start it in the background, and return when it answers.")]


LogOption = Annotated[
    Path | None, option("--log PATH", "Where a detached daemon writes. Default: what torpor doctor names.")
]


DeterministicOption = Annotated[
    bool,
    option(
        "--deterministic",
        "Each session decodes alone: replies are to the bit those of a daemon that serves no other session.",
        rich_help_panel="Memory and turns",
    ),
]


@takes(options_of(*GIVEN_OPTIONS))
def serve(
    deterministic: DeterministicOption = False,
    detach: DetachOption = False,
    log: LogOption = None,
    as_json: JsonOption = False,
    **values: Any,
) -> int:
    """With no --model it serves the small model that comes with Torpor, as [cyan]demo[/]. Stopping puts every session
    to sleep first. With --detach it runs in the background, and this command returns once it answers. With --json it
    writes one line when it is ready and one when it has stopped, and two a second while it downloads a model. Sessions
    that do not fit into --memory-budget sleep, and wake when they are asked for. Idle models are unloaded for others,
    and loaded when they are needed. If a budget of the store refuses a sleep, its session stays awake. Deleting is
    never refused. At a stop only --keep-free refuses a sleep, and the session's ledger is kept then. A session wakes
    only on the very model, adapter and precision it slept with.

    [bold]Examples[/]

    [cyan]torpor serve --detach[/]
    [cyan]torpor serve --model qwen=~/models/Qwen3-0.6B --store ~/agents/store[/]
    [cyan]torpor serve --model small=~/m/small --model large=~/m/large --pin small[/]
    [cyan]torpor serve --model qwen=~/m/Qwen3-0.6B --adapter qwen=~/adapters/support[/]
    """
    if deterministic and values.get("batch") not in (None, 1):
        raise InvalidUsage("--deterministic is --batch 1; give one of them.", option="--deterministic")
    if log is not None and not detach:
        raise InvalidUsage("--log is for --detach; without it, redirect the output yourself.", option="--log")
    given = given_of(values)
    store, socket = given.get("store") or default_store_path(), given.get("socket") or default_socket_path()
    given |= {"store": store, "socket": socket, **({"batch": 1} if deterministic else {})}
    require_free(socket)  # the daemon looks again, but only once MLX is loaded
    if detach:
        log = log or default_log_path()
        _serve_in_background(arguments_of(given), store, log, as_json=as_json)
        return OK.number
    # Imported here: at the top of the module it would load MLX for every command (test_hygiene.py).
    with _nothing_collected():
        from ...socket_api.main import run

    with contextlib.ExitStack() as at_end:

        def remember() -> None:
            last_options.remember(socket, given)
            at_end.callback(last_options.drop, socket)

        on_download = at_end.enter_context(downloads_on(Output(as_json=as_json)))
        run(given, as_json=as_json, on_ready=remember, on_download=on_download)
    return OK.number


def _serve_in_background(arguments: list[str], store: Path, log: Path, *, as_json: bool) -> None:
    output = Output(as_json=as_json)
    with downloads_on(output) as on_download:
        begun = background.start(arguments, log.absolute(), on_download)
    if as_json:
        output.document(
            "serve",
            {
                "socket": begun.socket,
                "pid": begun.process.pid,
                "log": str(begun.log),
                "warnings": begun.warnings,
                "http": list(begun.http),
            },
        )
    else:
        is_default = begun.socket == str(default_socket_path())
        stop = "torpor stop" if is_default else f"torpor stop --socket {shlex.quote(begun.socket)}"
        serves = f"torpor serves {plain(str(store))} on {plain(begun.socket)} (pid {begun.process.pid})"
        output.line(f"{serves}; end it with {plain(stop)}")
        for address in begun.http:
            output.line(plain(address))
        output.line(f"it writes to {plain(begun.log)}")
    remark_on_start(output, begun)


def remark_on_start(output: Output, begun: background.Started) -> None:
    """Say what the store may hold, and where the warnings of a start stand, if there are any."""
    output.remark(f"[dim]{plain(begun.budget)}[/]")
    if begun.warnings:
        output.remark(
            f"[yellow]{format_plural(begun.warnings, 'warning')}[/] about the store or the models, in"
            f" {plain(begun.log)}; torpor verify tells what is still wrong with the store, and what to do"
        )


@contextlib.contextmanager
def _nothing_collected() -> Iterator[None]:
    """Keep the objects of these imports out of garbage collection: there are hundreds of thousands, and they stay. A
    daemon is ready a tenth of a second sooner, and no request waits while they are scanned."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
