"""`torpor serve`: become the daemon. The one command whose process loads MLX, and only once it is called."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..memvid.location import default_store_path
from ..socket_api.address import default_socket_path
from .errors import InvalidUsage
from .options import JsonOption, SocketOption

ModelsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--model",
        metavar="NAME=PATH",
        show_default=False,
        help="Serve the model in this folder (or of this hub name) as NAME. Can be repeated; the first is the default.",
    ),
]
ServedStoreOption = Annotated[
    Path | None,
    typer.Option("--store", metavar="PATH", show_default=False, help="Folder of the store, if not $TORPOR_STORE."),
]


def serve(
    model: ModelsOption = None,
    store: ServedStoreOption = None,
    socket: SocketOption = None,
    as_json: JsonOption = False,
) -> None:
    """Serve sessions on a Unix socket, in the foreground, until Ctrl-C or SIGTERM.

    With no --model it serves the small model that comes with Torpor, as [cyan]demo[/]. Stopping puts every session to
    sleep first. With --json it writes one line when it is ready and one when it has stopped.

    [bold]Examples[/]

    [cyan]torpor serve[/]
    [cyan]torpor serve --model qwen=~/models/Qwen3-0.6B --store ~/agents/store[/]
    """
    models = _named_models(model or [])
    # Here and nowhere else the command line becomes the daemon; at the top of the module the import would load MLX
    # for every command (test_hygiene.py).
    from ..socket_api.main import ServeOptions, run

    run(
        ServeOptions(
            store=store or default_store_path(),
            socket=socket or default_socket_path(),
            models=models,
            json=as_json,
        )
    )


def _named_models(given: list[str]) -> dict[str, str]:
    models: dict[str, str] = {}
    for text in given:
        name, separator, path = text.partition("=")
        if not (name and separator and path):
            raise InvalidUsage(f"--model takes NAME=PATH, not {text!r}.", option="--model")
        if name in models:
            raise InvalidUsage(f"--model names {name!r} twice.", option="--model", name=name)
        models[name] = str(Path(path).expanduser()) if path.startswith("~") else path
    return models
