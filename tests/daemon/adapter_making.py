"""Small adapters with random weights, in the form in which mlx-lm trains them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RANK = 4


def write_adapter(folder: Path, model: Path, *, kind: str = "lora", scale: float = 10.0, seed: int = 1) -> Path:
    """An adapter of the last two layers of the model in that folder."""
    import torpor.snapshot  # noqa: F401  # chooses the BLAS before MLX is imported

    import mlx.core as mx  # isort: skip
    import mlx_lm
    from mlx.utils import tree_flatten
    from mlx_lm.tuner.utils import linear_to_lora_layers

    parameters = {"rank": RANK, "scale": scale, "dropout": 0.1, "keys": ["self_attn.k_proj", "mlp.up_proj"]}
    network: Any = mlx_lm.load(str(model))[0]
    network.freeze()
    linear_to_lora_layers(network, 2, parameters, use_dora=kind == "dora")
    mx.random.seed(seed)
    weights = {
        name: value * 1.1 if name.endswith(".m") else mx.random.normal(value.shape) * 0.1
        for name, value in tree_flatten(network.trainable_parameters())
    }
    folder.mkdir(parents=True)
    mx.save_safetensors(str(folder / "adapters.safetensors"), weights)
    config = {"fine_tune_type": kind, "num_layers": 2, "lora_parameters": parameters, "learning_rate": 1e-5}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def edit_config(folder: Path, **changes: object) -> None:
    """Change the adapter's configuration; what is named of its `lora_parameters` is changed there."""
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text())
    for name, value in changes.items():
        (config["lora_parameters"] if name in config["lora_parameters"] else config)[name] = value
    path.write_text(json.dumps(config))
