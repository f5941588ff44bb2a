"""`torpor config`: the settings of a daemon, and where each is from; and whether a file of them is sound."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from ...daemon.options.configuration import Configuration, read_configuration, require_aliases
from ...daemon.options.serve_options import MODEL_OPTIONS, SERVE_OPTIONS, Declared, ModelOptions
from ...memvid.disk.location import STORE_VARIABLE, default_store_path
from ...memvid.units import format_plural
from ...socket_api.wire.address import SOCKET_VARIABLE, default_socket_path
from ..errors import InvalidUsage
from ..reach.daemon_link import find_daemon
from ..reach.options import JsonOption, SocketOption, argument
from ..view.output import Output, plain
from ..view.table import rows_table
from . import last_options

ActionArgument = Annotated[
    Literal["show", "check"], argument("show|check", "Show what holds, or only read a file and say what is wrong.")
]
FileArgument = Annotated[
    Path | None, argument("FILE", "A file as of `torpor serve --config`, if not that of the daemon.")
]
_LINE: Final = "command line"
_DEFAULT: Final = "default"


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting: its key as in a file, `models.NAME.` before it if it is of a model; its value, None for none; where
    it is from: `command line`, the path of a file, a variable of the environment, or `default`."""

    key: str
    value: Any
    told: str
    source: str


def config(
    action: ActionArgument, file: FileArgument = None, socket: SocketOption = None, as_json: JsonOption = False
) -> None:
    """Show lists the settings of the daemon on this socket, as it was started; of one that would start with FILE, if
    none runs, or FILE is named. Each has where it is from: the command line, the file, the environment, or the default.
    Check reads a file as a start would, and starts nothing. What is wrong is named with its key, and is status 2.

    [bold]Examples[/]

    [cyan]torpor config show[/]
    [cyan]torpor config check torpor.toml[/]
    [cyan]torpor config show --json | jq '.settings[] | .key, .source'[/]
    """
    output = Output(as_json=as_json)
    had = {} if file is not None else last_options.recall(socket or default_socket_path())
    path = file or (Path(had["config"]) if isinstance(had.get("config"), str) else None)
    if action == "check" and path is None:
        raise InvalidUsage("There is no file to check: no daemon runs with one. Name it: `torpor config check FILE`.")
    content = Configuration() if path is None else read_configuration(path)
    settings = [*_of_places(had, socket), *_of_daemon(had, content, path), *_of_models(had, content, path)]
    missing = list(_missing_folders(content))
    if action == "check":
        _require_sound(content, path, missing)
    pending = _pending(socket) if file is None else None
    if as_json:
        told = [{"key": each.key, "value": each.value, "source": each.source} for each in settings]
        output.document("config", {"file": path and str(path), "settings": told, "pending": pending})
    elif action == "check":
        count, models = len(content.options), len(content.models)
        output.line(f"{plain(path)} is sound: {format_plural(count, 'setting')}, {format_plural(models, 'model')}")
    else:
        _show(output, settings, pending)


def _of_places(had: Mapping[str, Any], socket: Path | None) -> Iterator[Setting]:
    """The two paths that no file has."""
    for key, variable, default in (
        ("store", STORE_VARIABLE, default_store_path()),
        ("socket", SOCKET_VARIABLE, socket or default_socket_path()),
    ):
        value = str(had.get(key) or default)
        said = f"${variable}" if os.environ.get(variable) == value else _DEFAULT if value == str(default) else _LINE
        yield Setting(key, value, value, _LINE if key == "socket" and socket is not None else said)


def _of_daemon(had: Mapping[str, Any], content: Configuration, path: Path | None) -> Iterator[Setting]:
    for key, option in SERVE_OPTIONS.items():
        if option.option.changes is not None:
            yield _setting(key, option, (had, option.name), (content.options, key), path)


def _of_models(had: Mapping[str, Any], content: Configuration, path: Path | None) -> Iterator[Setting]:
    """The settings of each model that are not left out."""
    named: Mapping[str, Any] = had.get("model") or {}
    for name in named or content.models:
        table = {} if named else _of_record(content.models[name])
        for key, option in MODEL_OPTIONS.items():
            given = named if key == "path" else had.get(option.name) or {}
            line = given if isinstance(given, Mapping) else {name: given}
            setting = _setting(f"models.{name}.{key}", option, (line, name), (table, key), path)
            if setting.source != _DEFAULT:
                yield setting


def _of_record(model: ModelOptions) -> dict[str, Any]:
    return {each.name: getattr(model, each.name) for each in fields(model) if getattr(model, each.name) != each.default}


def _setting(
    key: str,
    option: Declared,
    line: tuple[Mapping[str, Any], str],
    file: tuple[Mapping[str, Any], str],
    path: Path | None,
) -> Setting:
    for (values, name), source in ((line, _LINE), (file, str(path))):
        if name in values:
            value = values[name]
            return Setting(key, value, _told(option, value), source)
    default = (
        None
        if option.option.unless is not None or not isinstance(option.default, str | int | float)
        else (option.default)
    )
    return Setting(key, default, option.left_out.replace("`", "") or "–", _DEFAULT)


def _told(option: Declared, value: Any) -> str:
    try:
        return option.kind.told(value)
    except (TypeError, ValueError):  # of another release
        return str(value)


def _missing_folders(content: Configuration) -> Iterator[str]:
    """What is wrong with the models of a file: their folders are not there. A name on the hub is not looked up."""
    for name, model in content.models.items():
        for key, place in (("path", model.path), ("adapter", model.adapter)):
            if place is not None and os.path.isabs(place) and not Path(place).is_dir():
                yield f"models.{name}.{key}: there is no folder {place}"


def _require_sound(content: Configuration, path: Path | None, missing: list[str]) -> None:
    if content.models:
        require_aliases(content.options.get("aliases", ()), content.models)
    if missing:
        raise InvalidUsage(f"The configuration {path} is wrong at {'; '.join(missing)}.", path=str(path))


def _pending(socket: Path | None) -> dict[str, Any] | None:
    """What the daemon that runs says of its file; None if it has none, or none runs."""
    daemon = find_daemon(socket)
    if daemon is None:
        return None
    with daemon:
        told = daemon.status().config
        return None if told is None else asdict(told)


def _show(output: Output, settings: list[Setting], pending: Mapping[str, Any] | None) -> None:
    table = rows_table("SETTING", "VALUE", "FROM", whole=("SETTING",), first_to_go=("FROM",))
    for each in settings:
        is_said = each.source != _DEFAULT
        table.add_row(
            plain(each.key),
            plain(each.told) if is_said else f"[dim]{plain(each.told)}[/]",
            plain(each.source) if is_said else f"[dim]{each.source}[/]",
        )
    output.show(table)
    if pending and pending["problem"]:
        output.remark(f"[yellow]the daemon goes on with what the file said before:[/] {plain(pending['problem'])}")
    if pending and pending["waits_for_restart"]:
        waiting = ", ".join(pending["waits_for_restart"])
        output.remark(f"[yellow]from the next start on[/] ([cyan]torpor restart[/]): {plain(waiting)}")
