"""`torpor models`: the served models, and which are in memory; load a model, unload one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any, Literal

from ...daemon.api.process import ModelInfo
from ...memvid.units import format_bytes, format_count
from ..errors import InvalidUsage
from ..reach.daemon_link import connect, find_daemon, progress_of
from ..reach.examining import examine
from ..reach.options import JsonOption, SocketOption, argument, option
from ..view.formatting import format_seconds
from ..view.output import Output, plain, rows_table

ActionArgument = Annotated[
    Literal["load", "unload"] | None, argument("[load|unload]", "Load the model NAME, or unload it.")
]
NameArgument = Annotated[str | None, argument("NAME", "Which model is to be loaded or unloaded.")]


AvailableOption = Annotated[
    bool,
    option(
        "--available",
        "List the models in the hub's cache on this machine instead, and the memory that each takes with one session.",
    ),
]


def models(
    action: ActionArgument = None,
    name: NameArgument = None,
    available: AvailableOption = False,
    socket: SocketOption = None,
    as_json: JsonOption = False,
) -> None:
    """The first request that needs a model loads it. A model that no request uses gives its memory to others; options
    of [cyan]torpor serve[/] say which stay. Unloading puts a model's sessions to sleep first, and is refused while a
    request uses it. With --available no daemon is needed. What fits is told for the memory budget of the daemon that
    runs, or of one that would start now.

    [bold]Examples[/]

    [cyan]torpor models[/]
    [cyan]torpor models load qwen[/]
    [cyan]torpor models unload qwen[/]
    [cyan]torpor models --available[/]
    """
    if (action is None) != (name is None):
        raise InvalidUsage("Give load or unload together with the NAME of a model, or neither to list them.")
    output = Output(as_json=as_json)
    if available:
        if action is not None:
            raise InvalidUsage("--available lists models; it goes with no other action.", option="--available")
        _list_available(output, socket)
        return
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
        output.document("models", {"models": listed})
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


def _list_available(output: Output, socket: Path | None) -> None:
    daemon = find_daemon(socket)
    with daemon or nullcontext():
        budget = [] if daemon is None else [str(daemon.status().memory.budget_bytes)]
    with output.progress("looking at models"):
        report = examine("available", *budget)
    if output.as_json:
        output.document("models", report)
        return
    if not report["models"]:
        output.remark(f"no model is in {plain(report['cache'])}; torpor ensure --model NAME=OWNER/NAME downloads one")
        return
    output.show(render_available(report))
    whose = "the daemon that runs" if budget else "a daemon that starts now"
    output.remark(
        f"[dim]{', '.join(_sizes(report['token_counts']))}: memory of the model and one session of so many tokens."
        f" FITS: its longest session in the memory budget of {whose}.[/]"
    )
    for model in report["models"]:
        if model["problem"] is not None:
            output.remark(f"[yellow]{plain(model['name'])}[/]: {plain(model['problem'])}")


def render_available(report: Mapping[str, Any]) -> Any:
    """Draw the report of `torpor.daemon.available`, a row for each model."""
    counts = report["token_counts"]
    columns = ("DISK", "CONTEXT", *_sizes(counts), "FITS")
    table = rows_table("MODEL", *columns, right=columns, whole=("MODEL", *columns), first_to_go=("DISK", "CONTEXT"))
    for model in report["models"]:
        memory = [model["memory"].get(str(count)) for count in counts]
        table.add_row(
            plain(model["name"]),
            format_bytes(model["disk_bytes"]),
            "–" if model["problem"] else format_count(model["context_tokens"]),
            *("–" if size is None else format_bytes(size) for size in memory),
            "–" if model["problem"] else _fitting(model),
        )
    return table


def _sizes(token_counts: Sequence[int]) -> list[str]:
    return [f"{count >> 10}K" for count in token_counts]


def _fitting(model: Mapping[str, Any]) -> str:
    tokens = model["fitting_tokens"]
    if tokens == model["context_tokens"]:
        return "[green]whole context[/]"
    return f"[yellow]{format_count(tokens)} tokens[/]" if tokens else "[red]no[/]"


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
