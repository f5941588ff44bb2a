"""The settings of a daemon: those of its configuration file, and over them those of its command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..errors import InvalidConfiguration, UnknownModel
from ..memory.model_registry import ModelChoice
from ..models.adapters import AdapterChoice
from ..models.models import DEMO_MODEL_FOLDER, DEMO_MODEL_NAME, KvChoice
from ..options.configuration import Configuration, read_configuration, require_aliases
from ..options.serve_options import MODEL_OPTIONS, SERVE_OPTIONS, ModelOptions, ServeOptions


@dataclass(frozen=True, slots=True)
class Settings:
    """How each model is served, by name, and the options of the whole daemon."""

    models: Mapping[str, ModelChoice]
    options: ServeOptions = field(default_factory=ServeOptions)


def settings_of(command_line: Mapping[str, Any]) -> Settings:
    """Read the file, if there is one. command_line: its values, by the names of its options; options of models by the
    models' names, with an empty name for the only one.

    Raises:
        InvalidConfiguration: the file is wrong, or options do not go together.
        UnknownModel: an option is for a model that is not served.
    """
    path: Path | None = command_line.get("config")
    file = Configuration() if path is None else read_configuration(path)
    values = {**file.options, **{name: value for name, value in command_line.items() if name in SERVE_OPTIONS}}
    options = ServeOptions(**values)
    if options.remote is None and (options.remote_key is not None or options.remote_key_command is not None):
        raise InvalidConfiguration(
            "There is a key of a remote, and no remote. Name it (`--remote URL`; `remote` in the file), or leave out "
            "the key.",
            option="--remote",
        )
    choices = {}
    for at, (name, model) in enumerate(_models_of(command_line, file).items()):
        policy = options.load if model.load is None or "load" in command_line else model.load
        choices[name] = ModelChoice(
            model.path,
            None if model.adapter is None else AdapterChoice(model.adapter, model.fuse),
            None if model.kv_bits is None else KvChoice(model.kv_bits, model.kv_group),
            at_start=policy == "start" or (policy == "first" and (not at or model.pin)),
            pinned=model.pin,
            ttl_s=options.model_ttl if model.ttl is None or "model_ttl" in command_line else model.ttl,
        )
    require_aliases(options.aliases, choices)
    return Settings(choices, options)


def _models_of(command_line: Mapping[str, Any], file: Configuration) -> dict[str, ModelOptions]:
    """The models of the command line replace those of the file; its options of a model win over the model's table."""
    named = {name: ModelOptions(path=path) for name, path in command_line.get("model", {}).items()} or dict(file.models)
    models = named or {DEMO_MODEL_NAME: ModelOptions(path=str(DEMO_MODEL_FOLDER))}
    over: dict[str, dict[str, Any]] = {name: {} for name in models}
    for key, option in MODEL_OPTIONS.items():
        values = command_line.get(option.name, {}) if option.is_named and key != "path" else {}
        for name, value in values.items():
            over[_require_served(option.flag, name, value, models)][key] = value
    return {name: _with(name, model, over[name], command_line) for name, model in models.items()}


def _with(name: str, model: ModelOptions, over: dict[str, Any], command_line: Mapping[str, Any]) -> ModelOptions:
    """A model with its options of the command line: an adapter brings its own fuse, and bits their own group."""
    if "adapter" in over:
        over["fuse"] = command_line.get("fuse", False)
    if "kv_bits" in over:
        over.setdefault("kv_group", MODEL_OPTIONS["kv_group"].default)
    model = replace(model, **over)
    if "kv_group" in over and model.kv_bits is None:
        raise InvalidConfiguration(
            f"--kv-group is for --kv-bits, and {name!r} has none. Give both, or neither.", option="--kv-group"
        )
    return model


def _require_served(flag: str | None, name: str, value: object, models: Mapping[str, ModelOptions]) -> str:
    """The name of a served model; an empty name means the only one."""
    names = ", ".join(map(repr, models))
    if not name and len(models) == 1:
        return next(iter(models))
    if not name:
        raise InvalidConfiguration(
            f"{flag} {value} does not say for which model: {names} are served. Write {flag} NAME={value} for each that "
            "it is for.",
            option=flag,
        )
    if name not in models:
        raise UnknownModel(
            f"{flag} is for {name!r}, and no such model is to be served, only {names}. Give it the name of a model.",
            model=name,
            served=list(models),
        )
    return name
