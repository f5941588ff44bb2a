"""The model, its optimiser and one training step; checkpoints that a later run takes up again."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten, tree_map, tree_unflatten
from mlx_lm.models import qwen3

from . import quick


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the weights, together with the data; lengths are in tokens."""

    seed: int = 20240607
    vocab_size: int = 4096
    hidden_size: int = 256
    layers: int = 6
    intermediate_size: int = 768
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    rope_theta: float = 50_000.0
    context: int = 8192
    steps: int = 1050
    horizon: int = 1050  # the steps that the cosine is laid out for; 0 for `steps`
    cooldown: int = 160  # the last steps, over which the rate falls to nearly zero from wherever it is
    warmup: int = 40
    decay: float = 0.6  # the last share of the horizon, over which the rate falls along a cosine
    rows: int = 8  # sequences in a step of the shortest length
    length: int = 512
    matrix_rate: float = 0.02  # Muon's, for the matrices of the blocks
    other_rate: float = 3e-3  # AdamW's, for the embedding and the norms
    weight_decay: float = 0.1  # AdamW's
    clip: float = 1.0
    # (every n steps, length), while the rate falls; a later pair goes before an earlier one.
    long_lengths: tuple[tuple[int, int], ...] = ((4, 2048), (16, 4096), (64, 8192))


def build_model(recipe: Recipe) -> qwen3.Model:
    """A fresh model in float32, seeded; both projections into the residual stream start at zero."""
    mx.random.seed(recipe.seed)
    model = qwen3.Model(qwen3.ModelArgs.from_dict(model_config(recipe)))
    model.model.embed_tokens.weight = mx.random.normal((recipe.vocab_size, recipe.hidden_size)) * 0.02
    for layer in model.layers:
        layer.self_attn.o_proj.weight = mx.zeros_like(layer.self_attn.o_proj.weight)
        layer.mlp.down_proj.weight = mx.zeros_like(layer.mlp.down_proj.weight)
    mx.eval(model.parameters())
    return model


def model_config(recipe: Recipe) -> dict[str, Any]:
    """The architecture as ``config.json`` states it."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": recipe.hidden_size,
        "num_hidden_layers": recipe.layers,
        "intermediate_size": recipe.intermediate_size,
        "num_attention_heads": recipe.heads,
        "num_key_value_heads": recipe.kv_heads,
        "head_dim": recipe.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": recipe.rope_theta,
        "max_position_embeddings": recipe.context,
        "vocab_size": recipe.vocab_size,
        "tie_word_embeddings": True,
    }


def rate_factor(recipe: Recipe, step: int) -> float:
    """The share of the full learning rate at ``step``: warm-up, plateau, half a cosine, the cool-down.

    Until the fall begins it does not depend on how many steps there will be, so that a run resumed with
    more steps before then is the run that was started with that many.
    """
    last = recipe.steps - recipe.cooldown
    if recipe.cooldown and step > last:
        left = max(0.01, (recipe.steps - step) / recipe.cooldown)
        return left * rate_factor(recipe, last)
    begin = decay_start(recipe)
    if step < recipe.warmup:
        return (step + 1) / recipe.warmup
    if step < begin:
        return 1.0
    done = (step - begin) / max(1, (recipe.horizon or recipe.steps) - begin)
    return 0.01 + 0.99 * 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))


def plan(recipe: Recipe, step: int) -> tuple[float, tuple[int, int]]:
    """What the lengths of a run decide about ``step``: its learning rate's factor and its batch's shape."""
    return rate_factor(recipe, step), batch_shape(recipe, step)


def decay_start(recipe: Recipe) -> int:
    """The step at which the learning rate begins to fall, and long sequences join in."""
    return max(recipe.warmup, round((recipe.horizon or recipe.steps) * (1.0 - recipe.decay)))


def batch_shape(recipe: Recipe, step: int) -> tuple[int, int]:
    """(rows, length) of the batch of ``step``; the long ones come while the rate falls."""
    length = recipe.length
    if step >= decay_start(recipe):
        for every, candidate in recipe.long_lengths:
            if step % every == every - 1:
                length = candidate
    return max(2, recipe.rows * recipe.length // length), length


def batch_at(recipe: Recipe, documents: Documents, step: int) -> np.ndarray[Any, Any]:
    """The tokens of ``step``: int32 (rows, length + 1), a pure function of the recipe, the data and ``step``.

    Each epoch puts the documents in a new order end to end and cuts that stream into sequences taken in
    a new order. The epoch is counted in steps of the shortest length, whatever the length of this one.
    """
    rows, length = batch_shape(recipe, step)
    per_epoch = max(1, documents.tokens // (recipe.rows * recipe.length))
    epoch, within = divmod(step, per_epoch)
    stream = documents.stream(recipe.seed, epoch)
    sequences = (len(stream) - 1) // length
    if sequences < 1:
        raise ValueError(f"the training text holds {len(stream)} tokens, fewer than one sequence of {length}")
    order = np.random.default_rng((recipe.seed, epoch, length)).permutation(sequences)
    picks = order[np.arange(within * rows, (within + 1) * rows) % sequences]
    return np.stack([stream[pick * length : pick * length + length + 1] for pick in picks])


class Documents:
    """Tokenised documents: ``flat`` (uint16, all tokens end to end) and ``ends`` (where each one ends)."""

    def __init__(self, flat: np.ndarray[Any, Any], ends: np.ndarray[Any, Any]) -> None:
        self.flat = flat
        self.parts = np.split(flat, ends[:-1])
        self._kept: tuple[tuple[int, int], np.ndarray[Any, Any]] | None = None

    @property
    def tokens(self) -> int:
        """How many tokens there are in all."""
        return len(self.flat)

    def stream(self, seed: int, epoch: int) -> np.ndarray[Any, Any]:
        """All documents end to end in the order of ``epoch``; int32 (tokens,)."""
        if self._kept is None or self._kept[0] != (seed, epoch):
            order = np.random.default_rng((seed, epoch)).permutation(len(self.parts))
            self._kept = (seed, epoch), np.concatenate([self.parts[i] for i in order]).astype(np.int32)
        return self._kept[1]


class Trainer:
    """A model under training: ``step()`` makes one update, ``save()`` and ``restore()`` carry it over."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.model = build_model(recipe)
        self.on_cpu = mx.default_device() == mx.Device(mx.cpu)
        self.streams = working_streams()
        self.optimizer = build_optimizer(recipe)
        self.optimizer.init(self.model.trainable_parameters())
        self.done = 0
        self._state = [self.model.state, self.optimizer.state]
        self._step = mx.compile(self._update, inputs=self._state, outputs=self._state)

    def step(self, batch: np.ndarray[Any, Any]) -> tuple[float, float]:
        """Makes one update with ``batch`` (rows, length + 1); answers (nats per token, gradient norm)."""
        factor = rate_factor(self.recipe, self.done)
        for optimizer, rate in zip(self.optimizer.optimizers, optimizer_rates(self.recipe), strict=True):
            optimizer.learning_rate = mx.array(rate * factor)
        with quick.installed(self.on_cpu):
            loss, norm = self._step(mx.array(batch))
        mx.eval(loss, norm, self._state)
        self.done += 1
        return number(loss), number(norm)

    def loss(self, batch: np.ndarray[Any, Any]) -> float:
        """Mean nats per token of ``batch`` (rows, length + 1) under the weights as they are."""
        with quick.installed(self.on_cpu):
            return number(self._loss(mx.array(batch)))

    def _update(self, batch: mx.array) -> tuple[mx.array, mx.array]:
        share = batch.shape[0] // len(self.streams)
        results = []
        for index, stream in enumerate(self.streams):
            with mx.stream(stream):
                part = batch[index * share : (index + 1) * share]
                results.append(nn.value_and_grad(self.model, self._loss)(part))
        loss = sum((result[0] for result in results), mx.array(0.0)) / len(results)
        gradients = tree_map(lambda *parts: sum(parts[1:], parts[0]) / len(parts), *[g for _, g in results])
        gradients, norm = optim.clip_grad_norm(gradients, self.recipe.clip)
        self._apply(gradients)
        return loss, norm

    def _loss(self, batch: mx.array) -> mx.array:
        targets = batch[:, 1:].reshape(-1)
        if self.on_cpu:
            hidden = self.model.model(batch[:, :-1]).reshape(-1, self.recipe.hidden_size)
            return quick.token_losses(hidden, self.model.model.embed_tokens.weight, targets).mean()
        logits: mx.array = self.model(batch[:, :-1]).reshape(-1, self.recipe.vocab_size).astype(mx.float32)
        mean: mx.array = nn.losses.cross_entropy(logits, targets).mean()
        return mean

    def _apply(self, gradients: dict[str, Any]) -> None:
        # What Optimizer.update does, with the Newton-Schulz iterations spread over the streams.
        parts = self.optimizer._split_dictionary(gradients)
        for index, (optimizer, part) in enumerate(zip(self.optimizer.optimizers, parts, strict=True)):
            with mx.stream(self.streams[index % len(self.streams)]):
                self.model.update(optimizer.apply_gradients(part, self.model.parameters()))

    def save(self, folder: Path, record: dict[str, Any]) -> None:
        """Writes a checkpoint under ``folder`` that appears whole or not at all; drops the one before it."""
        target = folder / f"checkpoint-{self.done:07d}"
        partial = folder / f"checkpoint-{self.done:07d}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        mx.save_safetensors(str(partial / "model.safetensors"), dict(tree_flatten(self.model.parameters())))
        mx.save_safetensors(str(partial / "optimizer.safetensors"), dict(tree_flatten(self.optimizer.state)))
        state = {"step": self.done, "recipe": asdict(self.recipe), "record": record}
        (partial / "state.json").write_text(json.dumps(state), encoding="utf-8")
        shutil.rmtree(target, ignore_errors=True)
        os.replace(partial, target)
        for old in checkpoints(folder):
            if old != target:
                shutil.rmtree(old, ignore_errors=True)

    def restore(self, folder: Path) -> dict[str, Any]:
        """Takes up the newest checkpoint under ``folder``; answers the record saved with it."""
        found = checkpoints(folder)
        if not found:
            raise FileNotFoundError(f"no checkpoint under {folder}: start without --resume")
        state = json.loads((found[-1] / "state.json").read_text(encoding="utf-8"))
        self._check_recipe(state["recipe"], state["step"])
        self.model.load_weights(str(found[-1] / "model.safetensors"))
        saved: Any = mx.load(str(found[-1] / "optimizer.safetensors"))
        restored = tree_unflatten(list(saved.items()))
        for optimizer, part in zip(self.optimizer.optimizers, restored["states"], strict=True):
            optimizer.state = part
        self.done = int(state["step"])
        self._state[:] = [self.model.state, self.optimizer.state]
        self._step = mx.compile(self._update, inputs=self._state, outputs=self._state)
        record: dict[str, Any] = state["record"]
        return record

    def _check_recipe(self, saved: dict[str, Any], step: int) -> None:
        ours = json.loads(json.dumps(asdict(self.recipe)))
        free = set()
        if all(plan(self.recipe, number) == plan(Recipe(**saved), number) for number in range(step)):
            free = {"steps", "horizon", "cooldown", "decay", "long_lengths"}
        wrong = sorted(key for key in ours if key not in free and ours[key] != saved.get(key))
        if wrong:
            raise ValueError(f"the checkpoint was made with other settings of {', '.join(wrong)}")


def working_streams() -> list[mx.Stream]:
    """Two streams on the CPU, where mlx runs each in a thread of its own; elsewhere the device's own."""
    device = mx.default_device()
    if device == mx.Device(mx.cpu):
        return [mx.new_stream(device) for _ in range(2)]
    return [mx.default_stream(device)]


def number(scalar: mx.array) -> float:
    """The value of a float array of no dimensions."""
    return float(np.array(scalar))


def checkpoints(folder: Path) -> list[Path]:
    """The whole checkpoints under ``folder``, oldest first."""
    return sorted(path for path in folder.glob("checkpoint-*") if path.is_dir() and path.suffix != ".partial")


def optimizer_rates(recipe: Recipe) -> Iterable[float]:
    """The full learning rates of the optimisers that ``build_optimizer`` joins, in their order."""
    return recipe.matrix_rate, recipe.matrix_rate, recipe.other_rate


def build_optimizer(recipe: Recipe) -> optim.MultiOptimizer:
    """Muon for the matrices of the blocks (two of them, so that two streams can share it), AdamW for the rest."""

    def matrices(remainder: int) -> Callable[[str, mx.array], bool]:
        def chosen(path: str, weight: mx.array) -> bool:
            return weight.ndim == 2 and ".layers." in path and int(path.split(".")[2]) % 2 == remainder

        return chosen

    muons = [optim.Muon(recipe.matrix_rate, momentum=0.95, weight_decay=0.0) for _ in range(2)]
    adam = optim.AdamW(recipe.other_rate, betas=[0.9, 0.98], weight_decay=recipe.weight_decay, bias_correction=True)
    return optim.MultiOptimizer([*muons, adam], [matrices(0), matrices(1)])
