"""The configuration file of a daemon: TOML, with the keys of `daemon/options`. Unknown keys are refused.

memory_budget = "12GiB"
idle_sleep = "15min"
on_model_change = "reload"

[models.qwen]
path = "~/models/Qwen3-0.6B"
pin = true

[cluster]
replicas = 4
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

from ...places import expanded
from ..api.limits import MAX_MODEL_CHARS
from ..errors import InvalidConfiguration
from .serve_options import CLUSTER_OPTIONS, MODEL_OPTIONS, SERVE_OPTIONS, Declared, ModelOptions

MAX_CONFIG_BYTES: Final = 256 * 1024
"""Room for a thousand models. A longer file is refused before it is read."""

_MODELS: Final = "models"
_CLUSTER: Final = "cluster"
_OF_FILE: Final = {key: each for key, each in SERVE_OPTIONS.items() if each.option.changes is not None}


@dataclass(frozen=True, slots=True)
class Configuration:
    """The content of a file: the options in it by their keys, models by their names, and what it says of a cluster."""

    options: Mapping[str, Any] = field(default_factory=dict)
    models: Mapping[str, ModelOptions] = field(default_factory=dict)
    cluster: Mapping[str, Any] = field(default_factory=dict)


class _Wrong(ValueError):
    """The fault at a key, as a sentence without its full stop."""

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(problem)
        self.key = key


def read_configuration(path: Path) -> Configuration:
    """Read a configuration; folders in it are relative to the file.

    Raises InvalidConfiguration: it is missing, too long, not TOML, or has an unknown key or value. Names the field."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise _invalid(path, f"cannot be read: {error.strerror or error}") from error
    if len(raw) > MAX_CONFIG_BYTES:
        raise _invalid(path, f"is longer than {MAX_CONFIG_BYTES // 1024} KiB")
    try:
        content = tomllib.loads(raw.decode())
    except (ValueError, RecursionError) as error:  # of TOML, of UTF-8
        raise _invalid(path, f"is not TOML: {error}") from error
    try:
        tables, beside = _table(_MODELS, content.pop(_MODELS, {})), _beside(path.absolute().parent)
        models = {name: _model(f"{_MODELS}.{name}", name, table, beside) for name, table in tables.items()}
        cluster = _values(f"{_CLUSTER}.", _table(_CLUSTER, content.pop(_CLUSTER, {})), CLUSTER_OPTIONS)
        return Configuration(_values("", content, _OF_FILE, tables=(_MODELS, _CLUSTER)), models, cluster)
    except _Wrong as wrong:
        raise _invalid(path, f"is wrong at {wrong.key}: {wrong}", field=wrong.key) from None


def require_aliases(aliases: Iterable[tuple[str, str]], served: Iterable[str]) -> None:
    """Raise InvalidConfiguration unless each alias stands for a model that is served."""
    names = list(served)
    for alias, name in aliases:
        if name not in names:
            raise InvalidConfiguration(
                f"aliases: {alias!r} stands for {name!r}, and only {', '.join(map(repr, names))} are served. Give it "
                "the name of a model.",
                field="aliases",
            )


def _model(place: str, name: str, table: object, beside: Callable[[str], str]) -> ModelOptions:
    if not 1 <= len(name) <= MAX_MODEL_CHARS:
        raise _Wrong(place, f"a model's name has 1 to {MAX_MODEL_CHARS} characters")
    values = _values(f"{place}.", _table(place, table), MODEL_OPTIONS)
    if "path" not in values:
        raise _Wrong(f"{place}.path", "it is missing; give a folder, or a name on the hub")
    model = ModelOptions(**values)
    if model.fuse and model.adapter is None:
        raise _Wrong(place, "fuse is for an adapter, and there is none")
    if "kv_group" in values and model.kv_bits is None:
        raise _Wrong(place, "kv_group is for kv_bits, and there are none. Give both, or neither")
    return replace(model, path=beside(model.path), adapter=model.adapter and beside(model.adapter))


def _table(place: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _Wrong(place, "it must be a table")
    return value


def _values(
    prefix: str, table: Mapping[str, Any], options: Mapping[str, Declared], tables: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The values of a table. tables: the names of tables that may stand in it."""
    values = {}
    for key, value in table.items():
        if key not in options:
            raise _Wrong(f"{prefix}{key}", _unknown(key, sorted((*options, *tables))))
        try:
            values[key] = options[key].kind.read(value)
        except ValueError as error:
            raise _Wrong(f"{prefix}{key}", str(error)) from None
    return values


def _unknown(key: str, keys: list[str]) -> str:
    """The message for an unknown key: where it belongs, or the closest key and all keys."""
    if key in _OF_FILE:
        return "it is for the whole daemon: it belongs at the top of the file, above the first table"
    if key in MODEL_OPTIONS and key not in keys:
        return "it is of a model: it belongs in that one's table, [models.NAME]"
    if key in CLUSTER_OPTIONS and key not in keys:
        return "it is of a cluster: it belongs in the table [cluster]"
    if key == "deterministic":  # of `torpor serve` alone, where it stands for another option
        return "it can be said on the command line alone; here write batch = 1"
    if key in SERVE_OPTIONS:
        return f"it can be said on the command line alone, with {SERVE_OPTIONS[key].flag}"
    close = get_close_matches(key, keys, n=1)
    meant = f"; {close[0]} is, if that was meant" if close else ""
    return f"this key is not known{meant}. The keys here are {', '.join(keys)}"


def _beside(folder: Path) -> Callable[[str], str]:
    def absolute(source: str) -> str:
        path = expanded(source)
        if path.is_absolute():
            return str(path)
        is_of_hub = source.count("/") == 1 and not source.startswith(".") and not (folder / path).exists()
        return source if is_of_hub else str(folder / path)

    return absolute


def _invalid(path: Path, why: str, **details: object) -> InvalidConfiguration:
    return InvalidConfiguration(f"The configuration {path} {why}.", path=str(path), **details)
