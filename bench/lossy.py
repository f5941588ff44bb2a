"""What keys and values in 8 or 4 bits cost: how much worse text is predicted behind them, and what they save.

The demo model reads the beginning of long files that it was never trained on (the held-out files of its card), and
the session is put to sleep exact. It is then quantized to 8 bits, and, from the exact version again, to 4. Each of the
three versions is woken and reads the following 512 tokens of the file; its predictions of them are compared:

- bits per byte and perplexity of the text;
- how far the log-probability of each token that came is off, at the mean and at most;
- how often the likeliest token is another one; the divergence of the whole distribution (KL, in nats).

These are the same on each run. Sizes are of files on the disk; times (a whole wake; a whole quantising, which reads,
proves, writes, flushes and reads back) are of this machine, and of whatever else ran on it.
"""

from __future__ import annotations

import asyncio
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

# In this order: torpor chooses the BLAS that MLX, which is imported after it, will use.
# isort: off
from torpor.daemon.models.models import DEMO_MODEL_FOLDER
from torpor.daemon.options.serve_options import ServeOptions
from torpor.daemon.service import Service
import mlx.core as mx
import numpy as np
from demo_model import data
from figures import label_at_end, parser_for, plotted, save
from machine import spread
# isort: on

LENGTHS = (2048, 4096, 7168)
QUICK_LENGTHS = (512,)
FOLLOWING = 512
DOCUMENTS = 4
KEPT = ("exact", "8 bits", "4 bits")
_MIB = 2**20


@dataclass
class Version:
    """One version of one document's session, as it was woken.

    log_probabilities: float64 `[FOLLOWING, vocabulary]`; disk_bytes: all that a wake of it reads, as files hold it;
    quantising_s: 0 for the exact one.
    """

    log_probabilities: np.ndarray
    disk_bytes: int
    wake_s: float
    quantising_s: float


@dataclass
class Losses:
    """What each way of keeping lost, document by document, at one length of context."""

    tokens: int
    documents: list[str] = field(default_factory=list)
    found: dict[str, list[dict[str, float]]] = field(default_factory=lambda: {kept: [] for kept in KEPT})

    def figures(self) -> dict[str, Any]:
        """Means over the documents; the largest difference is the largest of all."""
        return {"tokens": self.tokens, "documents": self.documents, "kept": {k: _summed(self.found[k]) for k in KEPT}}


def _summed(rows: Sequence[dict[str, float]]) -> dict[str, Any]:
    def mean(name: str) -> float:
        return statistics.fmean(row[name] for row in rows)

    means = ("bits_per_byte", "nats_per_token", "mean_difference", "top_1_agreement", "divergence")
    return {
        **{name: mean(name) for name in means},
        "perplexity": math.exp(mean("nats_per_token")),
        "largest_difference": max(row["largest_difference"] for row in rows),
        "disk_bytes": mean("disk_bytes"),
        "share_of_exact": mean("disk_bytes_over_exact"),
        "wake_seconds": spread([row["wake_s"] for row in rows]),
        "quantising_seconds": spread([row["quantising_s"] for row in rows]),
    }


def ignore(_event: object) -> None:
    """For events that are not measured."""


async def measure(lengths: Sequence[int], documents: int, parent: Path | None) -> list[Losses]:
    """Everything, on a store of its own in `parent` (the folder for temporary files, unless told)."""
    with tempfile.TemporaryDirectory(prefix="torpor-bench-", dir=parent) as folder:
        service = await Service.open(ServeOptions(store=Path(folder) / "store", prefix_reuse="off", scrub_rate=0))
        try:
            texts = held_out(service, max(lengths) + FOLLOWING + 1, documents)
            results = [Losses(length) for length in lengths]
            for name, tokens in texts:
                for losses in results:
                    print(f"{name}: {losses.tokens} tokens", file=sys.stderr, flush=True)
                    await measure_document(service, losses, name, tokens)
            return results
        finally:
            await service.close()


def held_out(service: Service, at_least: int, count: int) -> list[tuple[str, list[int]]]:
    """The longest files that the model was not trained on, with their tokens.

    Raises:
        SystemExit: this machine's library is not the one that the model was trained on, or has too few long files.
    """
    card = json.loads((DEMO_MODEL_FOLDER / "training.json").read_text(encoding="utf-8"))
    corpus = data.collect(card["recipe"]["seed"])
    if corpus.description["held_out_digest"] != card["data"]["held_out_digest"]:
        sys.exit(f"The model was trained on the library of Python {card['data']['python']}; use that one.")
    model = service._parts.models.shelf.place(None).model
    found = []
    for file in sorted(corpus.held_out, key=lambda each: -len(each.text)):
        tokens = model.encode_plain(file.text, opening=True)
        if len(tokens) >= at_least and len(found) < count:
            found.append((file.module, tokens))
    if not found:
        sys.exit(f"No held-out file has {at_least} tokens.")
    return found


async def measure_document(service: Service, losses: Losses, name: str, tokens: list[int]) -> None:
    """One document at one length: exact, in 8 bits, in 4 bits."""
    context, following = tokens[: losses.tokens], tokens[losses.tokens : losses.tokens + FOLLOWING + 1]
    await service.create(session="reader")
    await service.append(session="reader", tokens=context, on_event=ignore)
    await service.sleep(session="reader", on_event=ignore)
    versions = {"exact": await woken(service, 1, following, 0.0)}
    for bits in (8, 4):
        await service.wake(session="reader", version=1, on_event=ignore)
        await service.sleep(session="reader", on_event=ignore)  # the exact one is the last again
        started = time.perf_counter()
        report = await service.maintain(operation="quantize", session="reader", bits=bits)
        seconds = time.perf_counter() - started
        assert not report.problems
        versions[f"{bits} bits"] = await woken(service, report.actions[0].version or 0, following, seconds)
    await service.delete(session="reader")
    text_bytes = len(service._parts.models.shelf.place(None).model.decode(following[1:]).encode())
    losses.documents.append(name)
    for kept, version in versions.items():
        row = compared(versions["exact"], version, following[1:], text_bytes)
        row["disk_bytes_over_exact"] = version.disk_bytes / versions["exact"].disk_bytes
        losses.found[kept].append(row)


async def woken(service: Service, version: int, following: list[int], quantising_s: float) -> Version:
    """Wake one version, and read what follows; the session is then as it was, asleep."""
    started = time.perf_counter()
    report = await service.wake(session="reader", version=version, on_event=ignore)
    wake_s = time.perf_counter() - started
    session = service._parts.sessions.residency.awake.pop(next(iter(service._parts.sessions.residency.awake)))
    assert session.durable is not None
    index = service._parts.store.disk.index
    sizes, held = index.pack_sizes(), index.packs_with([entry.id for entry in session.durable.entries])
    disk_bytes = sum(sizes[name] for name in held)
    model = session.model

    def read() -> np.ndarray:
        logits = model.run(following[:-1], session.state.caches)[0].astype(mx.float32)
        mx.eval(logits)
        return np.array(logits)

    logits = (await service._parts.models.engine.call(read)).astype(np.float64)
    logits -= logits.max(axis=-1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    assert report.canary == "same_bits"
    return Version(logits, disk_bytes, wake_s, quantising_s)


def compared(exact: Version, other: Version, came: list[int], text_bytes: int) -> dict[str, float]:
    """One version beside the exact one, by the tokens that came."""
    at = np.arange(len(came)), np.array(came)
    told, wanted = other.log_probabilities[at], exact.log_probabilities[at]
    difference = np.abs(told - wanted)
    spread_out = np.exp(exact.log_probabilities) * (exact.log_probabilities - other.log_probabilities)
    same = exact.log_probabilities.argmax(axis=-1) == other.log_probabilities.argmax(axis=-1)
    return {
        "bits_per_byte": float(-told.sum() / math.log(2) / text_bytes),
        "nats_per_token": float(-told.mean()),
        "mean_difference": float(difference.mean()),
        "largest_difference": float(difference.max()),
        "top_1_agreement": float(same.mean()),
        "divergence": float(spread_out.sum(axis=-1).mean()),
        "disk_bytes": float(other.disk_bytes),
        "wake_s": other.wake_s,
        "quantising_s": other.quantising_s,
    }


def report(results: list[Losses], out: Path) -> None:
    """JSON, plot, and a table for a person."""
    document = save("lossy", {"following": FOLLOWING, "lengths": [each.figures() for each in results]}, out)
    plot(document, out / "lossy.png")
    head = "tokens   kept     bits/byte  perplexity  mean |Δ|  max |Δ|  top-1    KL"
    print(f"{head}        MiB  share  wake s  quantize s")
    for each in document["lengths"]:
        for kept, row in each["kept"].items():
            print(
                f"{each['tokens']:>6}   {kept:7} {row['bits_per_byte']:10.4f} {row['perplexity']:11.3f}"
                f" {row['mean_difference']:9.4f} {row['largest_difference']:8.3f} {row['top_1_agreement']:7.2%}"
                f" {row['divergence']:8.5f} {row['disk_bytes'] / _MIB:8.1f} {row['share_of_exact']:6.3f}"
                f" {row['wake_seconds']['median']:7.3f} {row['quantising_seconds']['median']:9.3f}"
            )


def plot(document: dict[str, Any], path: Path) -> None:
    """Mean difference of a log-probability over the share of the disk."""
    with plotted(path, document, "What keys and values in few bits cost in exactness, and save on the disk", 9) as axes:
        for kept, colour in (("8 bits", "tab:blue"), ("4 bits", "tab:red")):
            tokens = [each["tokens"] for each in document["lengths"]]
            rows = [each["kept"][kept] for each in document["lengths"]]
            share = statistics.fmean(row["share_of_exact"] for row in rows)
            label = f"{kept}: {share:.0%} of the disk"
            for key, style, what in (("mean_difference", "o-", "mean"), ("largest_difference", "o--", "most")):
                differences = [row[key] for row in rows]
                axes.plot(tokens, differences, style, color=colour)
                label_at_end(axes, tokens, differences, f"{label}, {what}", colour)
        axes.set(
            xlabel="tokens of context, demo model, held-out text",
            ylabel="difference of a log-probability, nats",
            yscale="log",
        )
        axes.margins(x=0.3)


def main() -> None:
    """Measure and report."""
    parser = parser_for(__doc__, 1)
    parser.add_argument("--lengths", type=int, nargs="+", help="tokens of context")
    parser.add_argument("--documents", type=int, help="how many held-out files")
    options = parser.parse_args()
    lengths = sorted(options.lengths or (QUICK_LENGTHS if options.quick else LENGTHS))
    documents = options.documents or (1 if options.quick else DOCUMENTS)
    report(asyncio.run(measure(lengths, documents, options.folder)), options.out)
    print(f"figures and plot in {options.out}")


if __name__ == "__main__":
    main()
