"""What the canary costs of a sleep and a wake, for a model that is cut by token and one that is not.

The demo model's caches are cut by token: its canary is the last token run again at wake, and nothing at sleep. The
other is made here with random weights in the shape of LFM2-350M's first six layers (convolutions beside attention):
there a token is run at sleep, one at each checkpoint, and one at wake. For each length of context: seconds of a
sleep until its receipt, of a wake, and of the canary within it; beside them the seconds of one token that the woken
session writes, which is what a canary is.

Medians are reported. Nothing else should run on the machine.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

# In this order: torpor chooses the BLAS that MLX, which is imported after it, will use.
# isort: off
from torpor.daemon.models.models import DEMO_MODEL_FOLDER
from torpor.daemon.api.events import WorkEvent
from torpor.daemon.options.serve_options import ServeOptions
from torpor.daemon.service import Service
import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models import lfm2
from figures import label_at_end, parser_for, plotted, rounds_of, save
from machine import spread
# isort: on

LENGTHS = (512, 2048, 7680)
QUICK_LENGTHS = (256, 512)
ROUNDS = 5
HYBRID = {
    "model_type": "lfm2",
    "hidden_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "norm_eps": 1e-5,
    "conv_bias": False,
    "conv_L_cache": 3,
    "block_dim": 1024,
    "block_ff_dim": 4608,
    "block_multiple_of": 256,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
    "full_attn_idxs": [2, 5],
    "rope_theta": 1000000.0,
}
_MILLI = 1000.0


def ignore(_: WorkEvent) -> None:
    pass


def hybrid_model(folder: Path) -> Path:
    """A model folder of the hybrid shape with random weights and the demo model's tokenizer."""
    shutil.copytree(DEMO_MODEL_FOLDER, folder)
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    config = {**HYBRID, "vocab_size": vocabulary}
    (folder / "config.json").write_text(json.dumps(config))
    mx.random.seed(0)
    network = lfm2.Model(lfm2.ModelArgs.from_dict(config))
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(network.parameters())), {"format": "mlx"})
    return folder


async def one_round(service: Service, name: str, tokens: list[int], seconds: dict[str, list[float]]) -> None:
    """A session reads, sleeps, wakes and writes a token."""
    await service.create(session=name)
    await service.append(session=name, tokens=tokens, on_event=ignore)
    started = time.perf_counter()
    await service.sleep(session=name, on_event=ignore)
    seconds["sleep"].append(time.perf_counter() - started)
    started = time.perf_counter()
    report = await service.wake(session=name, on_event=ignore)
    seconds["wake"].append(time.perf_counter() - started)
    seconds["canary"].append(report.canary_seconds)
    started = time.perf_counter()
    await service.generate(session=name, max_tokens=1, on_event=ignore)
    seconds["token"].append(time.perf_counter() - started)
    await service.delete(session=name)


async def measure(model: Path, lengths: tuple[int, ...], rounds: int, folder: Path) -> list[dict[str, Any]]:
    """For each length the seconds."""
    service = await Service.open(
        ServeOptions(store=folder, prefix_reuse="off", scrub_rate=0),
        models={"m": str(model)},
        digest_cache=folder / "digests.json",
    )
    found = []
    try:
        for length in lengths:
            seconds: dict[str, list[float]] = {what: [] for what in ("sleep", "wake", "canary", "token")}
            tokens = [at % 250 for at in range(length)]
            for number in range(rounds + 1):
                into = seconds if number else {what: [] for what in seconds}  # the first warms up
                await one_round(service, f"s{length}-{number}", tokens, into)
            found.append({"tokens": length, "seconds": {what: spread(values) for what, values in seconds.items()}})
            print_line(found[-1])
    finally:
        await service.close()
    return found


def print_line(at: dict[str, Any]) -> None:
    taken = {what: each["median"] * _MILLI for what, each in at["seconds"].items()}
    print(
        f"{at['tokens']:>6} tokens: sleep {taken['sleep']:.1f} ms; wake {taken['wake']:.1f}, of which the canary "
        f"{taken['canary']:.1f}; one token {taken['token']:.1f} ms",
        flush=True,
    )


def draw(document: dict[str, Any], path: Path) -> None:
    with plotted(path, document, "The share of the canary in a wake") as axes:
        for (model, lengths), colour in zip(document["models"].items(), ("tab:blue", "tab:red"), strict=False):
            tokens = [at["tokens"] for at in lengths]
            for what, style in (("wake", "-o"), ("canary", "--s")):
                taken = [at["seconds"][what]["median"] * _MILLI for at in lengths]
                axes.plot(tokens, taken, style, color=colour)
                label_at_end(axes, tokens, taken, f"{model}, {what}", colour)
        axes.set(xlabel="tokens of context", ylabel="ms", ylim=(0, None))
        axes.margins(x=0.3)


def main() -> int:
    options = parser_for(__doc__, ROUNDS).parse_args()
    lengths = QUICK_LENGTHS if options.quick else LENGTHS
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        models = {"demo": DEMO_MODEL_FOLDER, "hybrid": hybrid_model(Path(scratch) / "hybrid")}
        figures = {}
        for name, model in models.items():
            print(name)
            folder = Path(scratch) / f"stores-{name}"
            folder.mkdir()
            figures[name] = asyncio.run(measure(model, lengths, rounds_of(options), folder))
    document = save("canary", {"models": figures}, options.out)
    draw(document, options.out / "canary.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
