"""A LoRA or DoRA adapter in the form that mlx-lm trains and loads, read from its folder.

Only those settings of `adapter_config.json` count that change a computation: kind, rank, scale, and the layers. Dropout
does not (a served model drops nothing), and the path does not.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from ..tokenizer_files import digest_of
from . import tensor_list
from .digests import DigestCache
from .errors import AdapterFilesMissing, ModelFilesMissing
from .model_files import load_object

CONFIG_FILE: Final = "adapter_config.json"
WEIGHTS_FILE: Final = "adapters.safetensors"
KINDS: Final = ("lora", "dora", "full")
"""The kinds that mlx-lm trains. `full` has whole weights instead of factors: it cannot be fused."""

Kind = Literal["lora", "dora", "full"]
# for a value of a wrong type or range
_SHOWN_CHARS = 60


@dataclass(frozen=True, slots=True)
class AdapterSettings:
    """rank and scale: None for `full`. layers: how many, counted from the last. keys: modules, None for all."""

    kind: Kind
    rank: int | None
    scale: float | None
    layers: int
    keys: tuple[str, ...] | None


def load_settings(folder: Path) -> AdapterSettings:
    """Read an adapter's settings. Raises AdapterFilesMissing: the folder or a file of it is missing, or lacks a
    setting."""
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (folder / name).is_file():
            raise AdapterFilesMissing(
                f"{folder} has no {name}. Give a folder in the form of mlx-lm: {CONFIG_FILE} and {WEIGHTS_FILE}.",
                path=str(folder),
                file=name,
            )
    try:
        config = load_object(folder / CONFIG_FILE)
    except ModelFilesMissing as error:
        raise AdapterFilesMissing(error.message, path=str(folder), file=CONFIG_FILE) from error
    kind = config.get("fine_tune_type", "lora")
    if kind not in KINDS:
        raise _unreadable(folder, f"its fine_tune_type is {repr(kind)[:_SHOWN_CHARS]}, not one of {', '.join(KINDS)}")
    if kind == "full":
        return AdapterSettings("full", None, None, 0, None)
    parameters = config.get("lora_parameters")
    if not isinstance(parameters, dict):
        raise _unreadable(folder, "it has no lora_parameters")
    keys = parameters.get("keys")
    if keys is not None and not (isinstance(keys, list) and all(isinstance(key, str) for key in keys)):
        raise _unreadable(folder, "keys of its lora_parameters is not a list of names")
    return AdapterSettings(
        kind,
        rank=_integer(folder, parameters, "rank", lowest=1),
        scale=_number(folder, parameters, "scale"),
        layers=_integer(folder, config, "num_layers", lowest=-1),
        keys=None if keys is None else tuple(sorted(set(keys))),
    )


def identify_adapter(settings: AdapterSettings, folder: Path, *, fused: bool, digests: DigestCache) -> str:
    """The adapter as a part of an identity: kind, rank, scale, `fused` or `unfused`, and a digest of its weights and
    settings. `full HEX` for whole weights. Raises ModelFilesChanging: the weights are being written to."""
    weights = digests.digest(folder / WEIGHTS_FILE)
    digest = digest_of(
        [settings.kind, settings.rank, settings.scale, settings.layers, settings.keys and list(settings.keys), weights]
    )
    if settings.kind == "full":
        return f"full {digest}"
    fusing = "fused" if fused else "unfused"
    return f"{settings.kind} rank={settings.rank} scale={settings.scale} {fusing} {digest}"


def tensor_names(folder: Path) -> frozenset[str]:
    """The names of the adapter's tensors, from the list at the beginning of its weights. Raises AdapterFilesMissing: it
    is no such file, or is cut off."""
    file = folder / WEIGHTS_FILE
    try:
        return tensor_list.tensor_names(file)
    except tensor_list.NotWhole as error:
        raise AdapterFilesMissing(
            f"The adapter's weights cannot be read: {file} {error}. Copy the adapter anew from where it was trained.",
            path=str(file),
        ) from error
    except OSError as error:
        raise AdapterFilesMissing(f"{file} cannot be read: {error.strerror or error}.", path=str(file)) from error


def _integer(folder: Path, settings: dict[str, Any], name: str, *, lowest: int) -> int:
    value = settings.get(name)
    if type(value) is not int or value < lowest:
        raise _unreadable(folder, f"its {name} is {repr(value)[:_SHOWN_CHARS]}, not a whole number from {lowest}")
    return value


def _number(folder: Path, settings: dict[str, Any], name: str) -> float:
    value = settings.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        raise _unreadable(folder, f"its {name} is {repr(value)[:_SHOWN_CHARS]}, not a number")
    return float(value)


def _unreadable(folder: Path, why: str) -> AdapterFilesMissing:
    return AdapterFilesMissing(f"The adapter in {folder} cannot be read: {why}.", path=str(folder))
