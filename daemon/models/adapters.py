"""LoRA and DoRA adapters on a model, attached by mlx-lm beside the weights or fused into them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx.utils import tree_unflatten
from mlx_lm.utils import load_adapters

from ...places import expanded
from ...snapshot.adapter_files import AdapterSettings, load_settings, tensor_names
from ..errors import AdapterMismatch, AdapterUnavailable

# Of mlx-lm's report of a mismatch: the first line tells the fault, the next ones name tensors.
_REPORT_LINES = 3
_FACTORS = ("lora_a", "lora_b", "m")


@dataclass(frozen=True, slots=True)
class AdapterChoice:
    """The adapter of a model. fused: added to its weights once, instead of at each step."""

    source: str
    fused: bool = False


def folder_of(choice: AdapterChoice, model: str) -> Path:
    """The adapter's folder. Raises AdapterUnavailable: there is none."""
    path = expanded(choice.source)
    if choice.source and path.exists() and not path.is_dir():
        raise AdapterUnavailable(
            f"{choice.source!r} is a file, and the adapter of model {model!r} is a folder. Give the one that mlx-lm "
            "trained it into.",
            model=model,
            source=choice.source,
        )
    if not path.is_dir():
        raise AdapterUnavailable(
            f"There is no adapter folder {choice.source!r} for model {model!r}. Give the folder that mlx-lm trained it "
            "into.",
            model=model,
            source=choice.source,
        )
    return path.resolve()


def attach(network: Any, folder: Path, *, model: str, fused: bool) -> AdapterSettings:
    """Give a network the adapter in `folder`, without evaluating its weights. Runs on the engine thread. Fused weights
    are those that `mlx_lm.fuse` makes, in their stored type.

    Raises:
        AdapterFilesMissing: the folder is not complete, or not in mlx-lm's form.
        AdapterMismatch: the adapter was made for another model, or is not whole.
    """
    settings = load_settings(folder)
    names = tensor_names(folder)
    try:
        load_adapters(network, str(folder))
    except Exception as error:  # mlx-lm raises any error for a foreign configuration or weights
        lines = [line.strip() for line in str(error).splitlines()[:_REPORT_LINES]]
        raise AdapterMismatch(
            f"The adapter in {folder} does not fit model {model!r}: {' '.join(lines) or type(error).__name__}. "
            "Give the model that it was trained on.",
            model=model,
            path=str(folder),
        ) from error
    _require_whole(network, names, folder, model)
    if fused and settings.kind != "full":
        network.update_modules(
            tree_unflatten(
                [(name, module.fuse()) for name, module in network.named_modules() if hasattr(module, "fuse")]
            )
        )
    network.eval()
    return settings


def _require_whole(network: Any, names: frozenset[str], folder: Path, model: str) -> None:
    """Refuse an adapter with missing factors: mlx-lm would leave those at random numbers, lost after a restart."""
    wanted = {
        f"{name}.{factor}"
        for name, module in network.named_modules()
        if "lora_a" in module
        for factor in _FACTORS
        if factor in module
    }
    missing = sorted(wanted - names)
    if missing:
        raise AdapterMismatch(
            f"The adapter in {folder} has no weights for {len(missing)} of the {len(wanted)} factors that its "
            f"configuration asks for in model {model!r}; the first is {missing[0]}. Give the whole adapter, with the "
            "configuration that it was trained with.",
            model=model,
            path=str(folder),
            missing=missing[:100],
        )
