"""`torpor models`: the served models, and which are in memory; load a model, unload one."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, Literal

from ...daemon.api.process import ModelInfo
from ...memvid.units import format_bytes, format_count
from ..errors import InvalidUsage
from ..reach.daemon_link import connect, progress_of
from ..reach.options import JsonOption, SocketOption, argument
from ..view.formatting import format_seconds
from ..view.output import Output, plain, rows_table

ActionArgument = Annotated[
    Literal["load", "unload"] | None, argument("[load|unload]", "Load the model NAME, or unload it.")
]
NameArgument = Annotated[str | None, argument("NAME", "Which model is to be loaded or unloaded.")]


def models(
    action: ActionArgument = None, name: NameArgument = None, socket: SocketOption = None, as_json: JsonOption = False
) -> None:
    """The first request that needs a model loads it. A model that no request uses gives its memory to others; options
    of [cyan]torpor serve[/] say which stay. Unloading puts a model's sessions to sleep first, and is refused while a
    request uses it.

    [bold]Examples[/]

    [cyan]torpor models[/]
    [cyan]torpor models load qwen[/]
    [cyan]torpor models unload qwen[/]
    """
    if (action is None) != (name is None):
        raise InvalidUsage("Give load or unload together with the NAME of a model, or neither to list them.")
    output = Output(as_json=as_json)
    with connect(socket) as client:
        listed: tuple[ModelInfo, ...]
        if name is None:
            listed = client.status().models
        elif action == "load":
            with progress_of(output, "download") as on_event:
                listed = (client.load_model(name, on_event=on_event),)
        else:
            with output.progress("unloading"):
                listed = (client.unload_model(name),)
    if as_json:
        output.document("models", {"models": [asdict(model) for model in listed]})
        return
    output.show(render_models(listed))
    for model in listed:
        if model.problem is not None:
            output.remark(f"[yellow]{plain(model.name)}[/]: {plain(model.problem)}")
        if model.changed:
            changed = ", ".join(model.changed)
            output.remark(
                f"[yellow]{plain(model.name)}[/]: its files have changed since they were loaded ({plain(changed)}); put"
                f" them back, or take them: torpor models unload {plain(model.name)}"
            )


def render_models(listed: tuple[ModelInfo, ...]) -> Any:
    """Draw the models, a row each."""
    right = ("MEMORY", "SESSIONS")
    table = rows_table(
        "MODEL", "STATE", "MEMORY", "SESSIONS", "LAST USED", "PATH", right=right, whole=("MODEL", "STATE")
    )
    for model in listed:
        table.add_row(
            plain(model.name),
            _state(model),
            format_bytes(model.weights_bytes) if model.weights_bytes else "–",
            format_count(model.sessions_awake) if model.sessions_awake else "–",
            f"{format_seconds(model.idle_s)} ago" if model.loads else "–",
            plain(model.path),
        )
    return table


def _state(model: ModelInfo) -> str:
    if model.loading:
        return "[yellow]loading[/]"
    state = "[green]loaded[/]" if model.resident else "[blue]not loaded[/]"
    if model.pinned:
        return f"{state}, pinned"
    if model.ttl_s is None or not model.resident:
        return state
    return f"{state}, unloaded after {format_seconds(model.ttl_s)} unused"
