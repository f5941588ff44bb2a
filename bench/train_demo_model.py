#!/usr/bin/env python3
"""Trains the small model that Torpor ships, on the text that comes with Python itself.

    python bench/train_demo_model.py                      train from scratch, export when done
    python bench/train_demo_model.py --minutes 30         train for half an hour, leave a checkpoint
    python bench/train_demo_model.py --resume             go on from the newest checkpoint
    python bench/train_demo_model.py --export             write the best weights so far as a model folder
    python bench/train_demo_model.py --evaluate           compute the shipped model's figures again

Everything a run writes is under --out: the prepared data (`data/`), the newest checkpoint, the best weights
by held-out loss, and at the end the model folder (`model/`). To ship it, add --install.

The same seed, library and machine give the same weights, whether or not the run was interrupted. A run that
is resumed before its learning rate begins to fall may be given more --steps: until then they change nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from demo_model.machine import device_name, prepare_cpu

prepare_cpu()  # before anything imports mlx

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402
from demo_model import data, evaluate, export, quick  # noqa: E402
from demo_model.train import Documents, Recipe, Trainer, batch_at, checkpoints  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = ROOT / "daemon" / "demo_model"
WINDOWS = (512, 2048, 8192)
# Two evaluations of the same weights on other hardware differ by less than this many bits per byte.
TOLERANCE = 0.002
# Builds of zlib differ in how hard they search.
COMPRESSOR_TOLERANCE = 0.05


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; answers the exit status."""
    options = parser().parse_args(arguments)
    console = Console(stderr=True)
    if options.evaluate:
        return reevaluate(options.model, console)
    recipe = dataclasses.replace(Recipe(), seed=options.seed)
    if options.steps != recipe.steps:  # the default's last steps were cut to the time there was
        recipe = dataclasses.replace(recipe, steps=options.steps, horizon=0, cooldown=0)
    run = Run(recipe, options.out, console)
    if options.resume or options.export:
        run.resume()
    elif checkpoints(options.out):
        console.print(f"{options.out} holds a checkpoint: give --resume to go on from it, or another --out")
        return 2
    if not options.export and not run.train(options.minutes):
        return 0
    run.export(options.out / "model")
    if options.install:
        export.copy_folder(options.out / "model", options.model)
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    shape = argparse.RawDescriptionHelpFormatter
    made = argparse.ArgumentParser(description=__doc__, formatter_class=shape)
    made.add_argument("--steps", type=int, default=Recipe.steps, help="steps in all (default: %(default)s)")
    made.add_argument("--minutes", type=float, default=math.inf, help="stop after so long, with a checkpoint")
    made.add_argument("--seed", type=int, default=Recipe.seed, help="of weights, split and order (%(default)s)")
    made.add_argument("--out", type=Path, default=ROOT / "build" / "demo-model", help="default: build/demo-model")
    made.add_argument("--model", type=Path, default=SHIPPED, help="the model folder to evaluate or install into")
    made.add_argument("--resume", action="store_true", help="go on from the newest checkpoint under --out")
    made.add_argument("--export", action="store_true", help="train no further: write the best weights so far")
    made.add_argument("--install", action="store_true", help="copy the exported folder over --model")
    made.add_argument("--evaluate", action="store_true", help="print --model's figures as JSON, compare its card")
    return made


class Run:
    """One training run: its data, its trainer and the record of its losses."""

    def __init__(self, recipe: Recipe, out: Path, console: Console) -> None:
        self.recipe, self.out, self.console = recipe, out, console
        self.described = data.prepare(out / "data", recipe.seed, recipe.vocab_size)
        self.documents = data.load_documents(out / "data")
        self.held_out = data.load_held_out(out / "data")
        self.tokenizer = Tokenizer.from_file(str(out / "data" / "tokenizer.json"))
        self.windows = held_out_windows(data.tokenise(self.tokenizer, [file.text for file in self.held_out]), recipe)
        self.trainer = Trainer(recipe)
        self.record: dict[str, Any] = {"steps": [], "held_out": [], "seconds": 0.0, "tokens": 0}

    def resume(self) -> None:
        """Takes up the newest checkpoint."""
        self.record = self.trainer.restore(self.out)
        self.console.print(f"resumed at step {self.trainer.done}")

    def train(self, minutes: float, every: int = 100) -> bool:
        """Trains to the last step or for ``minutes``; answers whether it came to the end."""
        deadline = time.monotonic() + 60 * minutes
        with progress_bar(self.console) as bar:
            task = bar.add_task("training", total=self.recipe.steps, completed=self.trainer.done)
            while self.trainer.done < self.recipe.steps and time.monotonic() < deadline:
                self.step()
                bar.update(task, completed=self.trainer.done, description=self.summary())
                if self.trainer.done % every == 0:
                    self.checkpoint()
        if not self.record["held_out"] or self.record["held_out"][-1][0] != self.trainer.done:
            self.checkpoint()
        return self.trainer.done >= self.recipe.steps

    def step(self) -> None:
        """One update, and its row in the record: step, loss, gradient norm, length, seconds."""
        number, begun = self.trainer.done, time.perf_counter()
        batch = batch_at(self.recipe, self.documents, number)
        loss, norm = self.trainer.step(batch)
        seconds = time.perf_counter() - begun
        if not math.isfinite(loss):
            raise SystemExit(f"the loss of step {number} is not finite: lower the learning rates and start again")
        rows, length = batch.shape[0], batch.shape[1] - 1
        self.record["steps"].append([number, round(loss, 4), round(norm, 3), length, round(seconds, 2)])
        self.record["seconds"] += seconds
        self.record["tokens"] += rows * length

    def summary(self) -> str:
        """What the progress bar says: losses and throughput."""
        recent = self.record["steps"][-20:]
        loss = sum(row[1] for row in recent) / len(recent)
        held = f", held out {self.record['held_out'][-1][1]:.3f}" if self.record["held_out"] else ""
        rate = self.recipe.rows * self.recipe.length * len(recent) / sum(row[4] for row in recent)
        return f"loss {loss:.3f}{held}, {rate:,.0f} tokens/s"

    def checkpoint(self) -> None:
        """Measures the held-out loss, keeps the weights if they are the best so far, saves everything."""
        loss = self.held_out_loss()
        best = min((row[1] for row in self.record["held_out"]), default=math.inf)
        self.record["held_out"].append([self.trainer.done, loss, round(self.record["seconds"], 1)])
        if loss <= best:
            partial = self.out / "best.partial.safetensors"
            mx.save_safetensors(str(partial), export.weights_of(self.trainer.model))
            os.replace(partial, self.out / "best.safetensors")
        self.trainer.save(self.out, self.record)
        self.console.print(f"step {self.trainer.done}: {self.summary()}")

    def held_out_loss(self) -> float:
        """Mean nats per token over the sampled held-out windows."""
        rows = self.recipe.rows
        batches = [self.windows[start : start + rows] for start in range(0, len(self.windows), rows)]
        return sum(self.trainer.loss(batch) * len(batch) for batch in batches) / len(self.windows)

    def export(self, folder: Path) -> None:
        """Writes the best weights as a model folder with figures, card and plot."""
        best = self.out / "best.safetensors"
        if best.exists():
            self.trainer.model.load_weights(str(best))
        export.export_model(folder, self.recipe, export.weights_of(self.trainer.model), self.tokenizer)
        told = json.loads(json.dumps(self.told(folder)))  # as the file will say it
        export.write_json(folder / "training.json", told)
        export.write_card(folder, told)
        export.plot_losses(folder / "loss.png", self.record["steps"], self.record["held_out"], self.recipe.length)
        self.console.print(f"wrote {folder}: {told['figures']['model']['bits_per_byte']:.4f} bits per byte")

    def told(self, folder: Path) -> dict[str, Any]:
        """What ``training.json`` says."""
        best = min(self.record["held_out"], key=lambda row: float(row[1]))
        names = ("mlx", "mlx-lm", "numpy", "tokenizers")
        return {
            "recipe": dataclasses.asdict(self.recipe),
            "data": self.described,
            "device": device_name(),
            "versions": {name: importlib.metadata.version(name) for name in names},
            "parameters": export.parameter_count(export.weights_of(self.trainer.model)),
            "weights_bytes": (folder / "model.safetensors").stat().st_size,
            "steps_done": self.trainer.done,
            "best_step": best[0],
            "tokens": self.record["tokens"],
            "seconds": round(self.record["seconds"]),
            "tokens_per_second": round(self.record["tokens"] / max(1e-9, self.record["seconds"])),
            "held_out_nats_per_token": [[row[0], round(row[1], 4)] for row in self.record["held_out"]],
            "training_nats_per_token": thinned(self.record["steps"]),
            "figures": figures(folder, self.held_out, self.documents, self.training_bytes(), self.console),
        }

    def training_bytes(self) -> list[int]:
        """How often each byte value occurs in the training text."""
        return byte_counts(self.tokenizer, np.bincount(self.documents.flat, minlength=self.recipe.vocab_size))


def held_out_windows(documents: Documents, recipe: Recipe, share: int = 6) -> np.ndarray[Any, Any]:
    """Every ``share``-th window of the held-out tokens, (windows, length + 1), to follow the training with."""
    width = recipe.length + 1
    whole = len(documents.flat) // width * width
    windows: np.ndarray[Any, Any] = documents.flat[:whole].reshape(-1, width).astype(np.int32)
    return windows[::share]


def byte_counts(tokenizer: Tokenizer, token_counts: np.ndarray[Any, Any]) -> list[int]:
    """How often each byte value occurs in text of which the tokens occur ``token_counts`` times."""
    values = byte_values()
    counts = [0] * 256
    for token, times in enumerate(token_counts):
        piece = tokenizer.id_to_token(token) or ""
        if piece not in data.SPECIAL_TOKENS:
            for character in piece:
                counts[values[character]] += int(times)
    return counts


def byte_values() -> dict[str, int]:
    """The byte that each character of a byte-level BPE vocabulary stands for."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [value for value in range(256) if value not in set(plain)]
    return {chr(v): v for v in plain} | {chr(256 + index): value for index, value in enumerate(others)}


def thinned(steps: list[list[float]], width: int = 20) -> list[list[float]]:
    """[last step, mean loss] for each run of ``width`` steps."""
    groups = [steps[start : start + width] for start in range(0, len(steps), width)]
    return [[group[-1][0], round(sum(row[1] for row in group) / len(group), 4)] for group in groups]


def figures(
    folder: Path, held_out: list[data.SourceFile], documents: Documents, counted: list[int], console: Console
) -> dict[str, Any]:
    """The model folder's bits per byte, computed in float32, beside the baselines'."""
    from mlx_lm import load

    model, _ = load(str(folder))[:2]
    model.set_dtype(mx.float32)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    by_window: dict[str, float] = {}
    longest: dict[str, Any] = {}
    with progress_bar(console) as bar, quick.installed(mx.default_device() == mx.Device(mx.cpu)):
        for window in WINDOWS:
            task = bar.add_task(f"evaluating, windows of {window}", total=len(held_out))

            def moved(done: int, _: int, task: Any = task) -> None:
                bar.update(task, completed=done)

            longest = evaluate.model_bits(model, tokenizer, held_out, window, moved)
            by_window[str(window)] = round(longest["bits_per_byte"], 4)
    token_counts = np.bincount(documents.flat, minlength=tokenizer.get_vocab_size()).tolist()
    base = evaluate.baselines(tokenizer, held_out, counted, token_counts)
    return {
        "model": longest | {"bits_per_byte": by_window[str(WINDOWS[-1])], "by_window": by_window},
        "baselines": {name: round(value, 4) for name, value in base.items()},
    }


def reevaluate(folder: Path, console: Console) -> int:
    """Prints the figures of a model folder on this machine's library beside those of its card."""
    told = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    corpus = data.collect(told["recipe"]["seed"])
    same = all(corpus.description[key] == told["data"][key] for key in ("held_out_digest", "training_digest"))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    documents = data.tokenise(tokenizer, data.training_texts(corpus, told["recipe"]["seed"]))
    counted = byte_counts(tokenizer, np.bincount(documents.flat, minlength=tokenizer.get_vocab_size()))
    found = figures(folder, list(corpus.held_out), documents, counted, console)
    agrees = agree(found, told["figures"])
    report = {"figures": found, "card": told["figures"], "same_data_as_card": same, "agrees_with_card": agrees}
    if not same:
        report["note"] = (
            f"the card is about Python {told['data']['python']}'s library; this machine has another "
            f"({corpus.description['python']}): some of these held-out files may have been trained on"
        )
    report["data"] = corpus.description
    print(json.dumps(report, indent=2))
    return 0 if agrees or not same else 1


def agree(found: dict[str, Any], card: dict[str, Any]) -> bool:
    """Whether the figures are those of the card, up to what other hardware and another zlib may change."""
    if abs(found["model"]["bits_per_byte"] - card["model"]["bits_per_byte"]) > TOLERANCE:
        return False
    return all(
        abs(value - card["baselines"][name]) <= (TOLERANCE if name.startswith("unigram") else COMPRESSOR_TOLERANCE)
        for name, value in found["baselines"].items()
    )


def progress_bar(console: Console) -> Progress:
    """A bar with the description first; nothing moves where the output is no terminal."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    return Progress(*columns, console=console, refresh_per_second=2)


if __name__ == "__main__":
    sys.exit(main())
