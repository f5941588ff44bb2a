"""Writes the trained model as a folder that ``mlx_lm.load`` reads, with its card and its loss curve."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from tokenizers import Tokenizer

from .data import CHAT_TEMPLATE, END_OF_TEXT, TURN_END, TURN_START
from .train import Recipe, decay_start, model_config

WEIGHTS_LIMIT = 12_000_000


def export_model(folder: Path, recipe: Recipe, weights: dict[str, mx.array], tokenizer: Tokenizer) -> None:
    """Writes configuration, weights in bfloat16 and tokenizer into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    halves = {name: value.astype(mx.bfloat16) for name, value in weights.items()}
    size = sum(value.nbytes for value in halves.values())
    if size > WEIGHTS_LIMIT - 20_000:
        raise ValueError(f"{size} bytes of weights: the shipped file may hold {WEIGHTS_LIMIT}; choose a smaller recipe")
    mx.save_safetensors(str(folder / "model.safetensors"), halves, metadata={"format": "mlx"})
    ends = [tokenizer.token_to_id(TURN_END), tokenizer.token_to_id(END_OF_TEXT)]
    config = model_config(recipe) | {
        "eos_token_id": ends,
        "pad_token_id": ends[1],
        "bos_token_id": None,
        "torch_dtype": "bfloat16",
    }
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", {"eos_token_id": ends, "pad_token_id": ends[1]})
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", tokenizer_config(recipe, tokenizer))


def tokenizer_config(recipe: Recipe, tokenizer: Tokenizer) -> dict[str, Any]:
    """What transformers needs beside ``tokenizer.json``: the roles of the special tokens, the chat template."""
    specials = {
        str(tokenizer.token_to_id(token)): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        for token in (END_OF_TEXT, TURN_START, TURN_END)
    }
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": specials,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "model_max_length": recipe.context,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes ``content`` with an indent and a line end."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def parameter_count(weights: dict[str, mx.array]) -> int:
    """How many numbers the model has, the tied embedding counted once."""
    return sum(value.size for value in weights.values())


def weights_of(model: Any) -> dict[str, mx.array]:
    """The model's parameters by name."""
    return dict(tree_flatten(model.parameters()))


def plot_losses(path: Path, steps: list[list[float]], held_out: list[list[float]], length: int) -> None:
    """The loss of every step of the ordinary length with its running mean, and the held-out loss, as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), dpi=90, layout="tight")
    axes = figure.subplots()
    ordinary = np.array([row[:2] for row in steps if row[3] == length])
    if len(ordinary):
        axes.plot(*ordinary.T, color="0.8", linewidth=0.6, label="training, each step")
        width = min(25, len(ordinary))
        mean = np.convolve(ordinary[:, 1], np.ones(width) / width, mode="valid")
        axes.plot(ordinary[width - 1 :, 0], mean, color="tab:blue", label=f"training, mean of {width} steps")
    if held_out:
        axes.plot(*np.array([row[:2] for row in held_out]).T, "o-", color="tab:orange", ms=3, label="held out")
    axes.set(xlabel="step", ylabel="loss, nats per token", ylim=(1.5, 7))
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, metadata={"Software": None})


def copy_folder(source: Path, target: Path) -> None:
    """Replaces the files of ``target`` by those of ``source``; other files there stay."""
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.iterdir()):
        shutil.copyfile(path, target / path.name)


def write_card(folder: Path, told: dict[str, Any]) -> None:
    """Writes ``README.md`` from the figures of ``training.json``."""
    (folder / "README.md").write_text(card(told), encoding="utf-8")


def card(told: dict[str, Any]) -> str:
    """The model card in Markdown."""
    recipe, data, figures = told["recipe"], told["data"], told["figures"]
    model, base = figures["model"], figures["baselines"]
    rows = [
        ("**this model** (weights in bfloat16)", model["bits_per_byte"]),
        ("xz -9e over all held-out files joined", base["xz_joined"]),
        ("gzip -9 over all held-out files joined", base["gzip_joined"]),
        ("gzip -9 of each file by itself", base["gzip_per_file"]),
        ("unigram over the tokenizer's tokens", base["unigram_tokens"]),
        ("unigram over bytes", base["unigram_bytes"]),
    ]
    table = "\n".join(f"| {name} | {value:.4f} |" for name, value in rows)
    windows = "\n".join(f"| {name} | {value:.4f} |" for name, value in model["by_window"].items())
    positions = "\n".join(f"| {name} | {value:.4f} |" for name, value in model["by_position"].items())
    lengths = ", ".join(f"{length:,} every {every} steps" for every, length in recipe["long_lengths"])
    return CARD.format(
        lengths=lengths,
        best_window=min(model["by_window"], key=lambda name: float(model["by_window"][name])),
        rate=told_rate(Recipe(**recipe)),
        table=table,
        windows=windows,
        positions=positions,
        recipe=recipe,
        data=data,
        parameters=told["parameters"],
        weights_bytes=told["weights_bytes"],
        steps=told["best_step"],
        tokens=told["tokens"],
        epochs=told["tokens"] / data["training_tokens"],
        minutes=told["seconds"] / 60,
        device=told["device"],
        versions=", ".join(f"{name} {version}" for name, version in told["versions"].items()),
    )


def told_rate(recipe: Recipe) -> str:
    """The course of the learning rate in words."""
    horizon = recipe.horizon or recipe.steps
    told = f"the rate rises for {recipe.warmup} steps, stays until\nstep {decay_start(recipe)}, "
    told += f"falls along half a cosine laid out for {horizon:,} steps"
    if recipe.cooldown:
        told += f", and linearly to nearly nothing\nover the last {recipe.cooldown} (the time was shorter than planned)"
    return told


CARD = """---
library_name: mlx
license: psf-2.0
pipeline_tag: text-generation
tags: [mlx, python, demo]
---

# Torpor's demo model

A decoder of {parameters:,} parameters that Torpor ships so that every part of it can be tried and tested
without a download. It was trained by `bench/train_demo_model.py` on the text that comes with Python itself.
It writes text that looks like the standard library and answers questions in the manner of its docstrings;
**what it says is often wrong**. It is there to have a real cache and a real prefill, not to be believed.

```python
from mlx_lm import load, generate

model, tokenizer = load("daemon/demo_model")
messages = [{{"role": "user", "content": "What does os.path.join do?"}}]
prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
print(generate(model, tokenizer, prompt, max_tokens=100))
```

## Figures

Bits per byte on held-out files (lower is better); all of their tokens and their end are paid for:

| | bits per byte |
|---|---|
{table}

The gzip to beat is the better of the two. The held-out files were looked at to choose the checkpoint that is
shipped (and for nothing else), so the model's figure is a little optimistic.

The same files read in windows of so many tokens, each window without what comes before it (the headline is
the longest window). A figure that falls shows that the model uses the longer context; this one reads best in
windows of {best_window} tokens:

| window, tokens | bits per byte |
|---|---|
{windows}

By the position of a token in its window of the longest kind (other text at each position: not comparable
as strictly as the windows are):

| position | bits per byte |
|---|---|
{positions}

## Model

mlx-lm's `qwen3` class: {recipe[layers]} layers, width {recipe[hidden_size]}, inner width {recipe[intermediate_size]},
{recipe[heads]} query heads and {recipe[kv_heads]} key/value heads of {recipe[head_dim]}, tied embedding, rotary base
{recipe[rope_theta]:g}, context {recipe[context]:,} tokens.
Weights {weights_bytes:,} bytes, bfloat16. Byte-level BPE of {recipe[vocab_size]:,} entries, fitted on the
training text. Chat template in ChatML's manner; `<|im_end|>` ends a turn, `<|endoftext|>` a document, and both
end generation.

## Data

The standard library of CPython {data[python]}: {data[training_files]} files, {data[training_bytes]:,} bytes
to train on, {data[held_out_files]} files, {data[held_out_bytes]:,} bytes held out. Which side a file is on
follows from a hash of its module name and the seed. Test suites and the character tables of `encodings` are
left out, files of equal content are read once, and a held-out file of which training files hold half of the
longer lines is dropped. `pydoc_data/topics.py` is read as prose and always trained on (it is so large that it
would be the held-out text by itself). From the docstrings of the training files, and of no others,
conversations are derived and rendered with the chat template. Altogether {data[training_documents]:,}
documents of {data[training_tokens]:,} tokens.

Digest of the training files: `{data[training_digest]}`

Digest of the held-out files: `{data[held_out_digest]}`

## Training

{steps:,} steps, {tokens:,} tokens ({epochs:.2f} epochs) in {minutes:.0f} minutes on {device}, in float32.
Muon for the matrices of the blocks, AdamW for the embedding and the norms; {rate}.
Sequences of {recipe[length]} tokens, with longer ones among them while the rate falls:
{lengths}.
Seed {recipe[seed]}. {versions}.

![loss curve](loss.png)

`python bench/train_demo_model.py --evaluate` computes the figures again; `training.json` has all of them.
"""
