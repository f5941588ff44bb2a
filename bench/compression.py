"""What each codec makes of KV, and how fast: stored bytes over raw bytes, compressing and decompressing, in one run.

Three samples, each cut into slots of 256 tokens as a block has them:

- the demo model's KV after it read real text, in the dtype that it computes in here;
- the same KV rounded to bfloat16: what a model in half precision keeps after reading a text;
- the KV of a model in the shape of Qwen3-0.6B (28 layers, 8 KV heads of 128) with random weights, after random tokens.
  It is computed in float32 and rounded to bfloat16, because half precision is slow on a CPU; the vocabulary is cut
  down, which only the embedding sees.

The codecs: a plain copy of the bytes; zstd on byte planes as the store writes and reads them, with every check and
checksum; and blosc2 where it is installed, with its byte and its bit shuffle before zstd, on one thread and without
any checksum, at the compression levels that stand for the same zstd levels. torpor does not need blosc2 and never
installs it.

Rounds are interleaved, so that what else the machine does meets all alike, and medians reported. Every codec gives
back every slot to the bit before anything is timed. Nothing else should run on the machine.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

# In this order: torpor chooses the BLAS that MLX, which is imported after it, will use.
# isort: off
from torpor.daemon.models.models import DEMO_MODEL_FOLDER, DEMO_MODEL_NAME, load_model
from torpor.memvid.format.blocks import BLOCK_TOKENS, DTYPE_BYTES, SlotSpec
from torpor.memvid.format.codecs import decode_into, encode_slot
from torpor.snapshot.digests import DigestCache
import mlx.core as mx
import numpy as np
from mlx_lm.models import qwen3
from mlx_lm.models.cache import make_prompt_cache
from figures import OURS, panels, parser_for, rounds_of, save
from machine import spread
# isort: on

ROUNDS = 7
LEVELS = (1, 3, 9)
TEXT_TOKENS = 4096
RANDOM_TOKENS = 512
_BLOSC_LEVELS = {1: 1, 3: 2, 9: 5}
"""blosc2's compression levels for these zstd levels: it takes twice its own, less one."""

Store = Callable[[bytes, str], Any]
Restore = Callable[[Any, bytearray, str], None]


@dataclass(frozen=True, slots=True)
class Sample:
    """Slots of one dtype."""

    name: str
    dtype: str
    slots: list[bytes]

    @property
    def raw_bytes(self) -> int:
        """Of all slots."""
        return sum(map(len, self.slots))


@dataclass(frozen=True, slots=True)
class Way:
    """One codec: what it makes of a slot, how many bytes that is, and how it comes back into memory."""

    name: str
    store: Store
    restore: Restore


@dataclass
class Result:
    """One codec on one sample; seconds for all slots, a value a round."""

    way: Way
    stored_bytes: int = 0
    store: list[float] = field(default_factory=list)
    restore: list[float] = field(default_factory=list)

    def figures(self, raw_bytes: int, beside: Result) -> dict[str, Any]:
        """Ratio, speeds, and the speeds over another codec's, round by round."""
        return {
            "stored_over_raw": self.stored_bytes / raw_bytes,
            "compress_mb_s": spread([raw_bytes / seconds / 1e6 for seconds in self.store]),
            "decompress_mb_s": spread([raw_bytes / seconds / 1e6 for seconds in self.restore]),
            f"compress_speed_over_{beside.way.name}": spread(_over(beside.store, self.store)),
            f"decompress_speed_over_{beside.way.name}": spread(_over(beside.restore, self.restore)),
        }


def _over(others: list[float], own: list[float]) -> list[float]:
    return [other / mine for other, mine in zip(others, own, strict=True)]


def ways() -> list[Way]:
    """The codecs that can be measured here; the first is the one that the others stand beside."""
    return [Way("planes", _store, _restore), Way("copy", lambda slot, _: bytearray(slot), _copy_back), *_blosc_ways()]


def _store(slot: bytes, dtype: str) -> bytes:
    spec = SlotSpec("slot", "kv.k/1", dtype, (len(slot) // DTYPE_BYTES[dtype],))
    encoded = encode_slot([memoryview(slot)], spec)
    return slot if encoded is None else b"".join(encoded[0])


def _restore(stored: bytes, target: bytearray, dtype: str) -> None:
    if len(stored) == len(target):
        target[:] = stored
    else:
        decode_into(stored, [memoryview(target)], DTYPE_BYTES[dtype], "slot")


def _copy_back(stored: bytearray, target: bytearray, _dtype: str) -> None:
    target[:] = stored


def _blosc_ways() -> list[Way]:
    try:
        blosc2: Any = importlib.import_module("blosc2")
    except ImportError:
        return []
    return [
        _blosc(blosc2, shuffle, level, f"blosc2-{shuffle.lower()}-{level}")
        for shuffle in ("SHUFFLE", "BITSHUFFLE")
        for level in LEVELS
    ]


def _blosc(blosc2: Any, shuffle: str, level: int, name: str) -> Way:
    settings = {
        "codec": blosc2.Codec.ZSTD,
        "clevel": _BLOSC_LEVELS[level],
        "filters": [getattr(blosc2.Filter, shuffle)],
        "nthreads": 1,
    }

    def store(slot: bytes, dtype: str) -> bytes:
        stored: bytes = blosc2.compress2(slot, typesize=DTYPE_BYTES[dtype], **settings)
        return stored

    def restore(stored: bytes, target: bytearray, _dtype: str) -> None:
        blosc2.decompress2(stored, dst=target, nthreads=1)

    return Way(name, store, restore)


def blosc_version() -> str:
    """For the report."""
    try:
        return str(importlib.import_module("blosc2").__version__)
    except ImportError:
        return "not installed"


def samples(text_tokens: int, random_tokens: int, layers: int) -> list[Sample]:
    """All samples, computed here and now."""
    text = _demo_caches(text_tokens)
    random = _random_caches(random_tokens, layers)
    return [
        _sample(f"demo model, {text_tokens} tokens of text", text, None),
        _sample("the same in bfloat16", text, mx.bfloat16),
        _sample(f"random Qwen3-0.6B shape, {layers} layers, {random_tokens} tokens", random, mx.bfloat16),
    ]


def _demo_caches(count: int) -> list[Any]:
    import argparse as source
    import inspect

    with tempfile.TemporaryDirectory(prefix="torpor-bench-") as folder:
        model = load_model(DEMO_MODEL_NAME, str(DEMO_MODEL_FOLDER), DigestCache(Path(folder) / "digests.json"))
    tokens = model.encode(inspect.getsource(source), opening=True)[:count]
    if len(tokens) < count:
        raise SystemExit(f"The text has {len(tokens)} tokens, not {count}: repeating it would flatter every codec.")
    return _read(model.network, tokens)


def _random_caches(count: int, layers: int) -> list[Any]:
    mx.random.seed(0)
    shape = qwen3.ModelArgs(
        model_type="qwen3",
        hidden_size=1024,
        num_hidden_layers=layers,
        intermediate_size=3072,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        max_position_embeddings=40_960,
        vocab_size=8192,
        tie_word_embeddings=True,
    )
    return _read(qwen3.Model(shape), mx.random.randint(0, 8192, (count,)).tolist())


def _read(network: Any, tokens: list[int]) -> list[Any]:
    caches = make_prompt_cache(network)
    for start in range(0, len(tokens), BLOCK_TOKENS):
        network(mx.array(tokens[start : start + BLOCK_TOKENS])[None], cache=caches)
        mx.eval([cache.state for cache in caches])
    return caches


def _sample(name: str, caches: list[Any], dtype: mx.Dtype | None) -> Sample:
    """Keys and values of each layer, a slot for each 256 tokens: `[heads, 256, dim]`."""
    slots: list[bytes] = []
    for cache in caches:
        for array in cache.state[:2]:
            kept = array[0] if dtype is None else array[0].astype(dtype)
            starts = range(0, kept.shape[1], BLOCK_TOKENS)
            slots += [_bytes_of(kept[:, start : start + BLOCK_TOKENS]) for start in starts]
    kept_dtype = str(dtype or caches[0].state[0].dtype).removeprefix("mlx.core.")
    return Sample(name, kept_dtype, slots)


def _bytes_of(array: mx.array) -> bytes:
    width = {2: mx.uint16, 4: mx.uint32}[array.dtype.size]
    return np.array(mx.contiguous(array).view(width)).tobytes()


def measure(sample: Sample, found: list[Way], rounds: int) -> list[Result]:
    """All rounds of one sample."""
    results = [Result(way) for way in found]
    kept: dict[str, list[Any]] = {}
    for result in results:
        kept[result.way.name] = [result.way.store(slot, sample.dtype) for slot in sample.slots]
        result.stored_bytes = sum(map(_stored_bytes, kept[result.way.name]))
        _require_restored(result.way, sample, kept[result.way.name])
    targets = [bytearray(len(slot)) for slot in sample.slots]
    for number in range(rounds):
        for at in range(len(results)):
            result = results[(at + number) % len(results)]  # each is once the first, once the last
            one_round(result, sample, kept[result.way.name], targets)
    return results


def one_round(result: Result, sample: Sample, kept: list[Any], targets: list[bytearray]) -> None:
    """Each slot compressed, and what was kept of each decompressed into memory that is there."""
    store, restore, dtype = result.way.store, result.way.restore, sample.dtype
    started = time.perf_counter()
    for slot in sample.slots:
        store(slot, dtype)
    stored = time.perf_counter()
    for piece, target in zip(kept, targets, strict=True):
        restore(piece, target, dtype)
    result.store.append(stored - started)
    result.restore.append(time.perf_counter() - stored)


def _stored_bytes(stored: Any) -> int:
    return len(stored[1]) if isinstance(stored, tuple) else len(stored)


def _require_restored(way: Way, sample: Sample, kept: list[Any]) -> None:
    for slot, piece in zip(sample.slots, kept, strict=True):
        target = bytearray(len(slot))
        way.restore(piece, target, sample.dtype)
        if target != slot:
            raise SystemExit(f"{way.name} did not give back what it was given.")


def report(measured: list[tuple[Sample, list[Result]]], out: Path) -> None:
    """The figures as JSON and as a plot, and a table for a person."""
    blosc = blosc_version()
    figures = {
        "device": str(mx.default_device()),
        "blosc2": blosc,
        "samples": [
            {
                "sample": sample.name,
                "dtype": sample.dtype,
                "slots": len(sample.slots),
                "slot_bytes": len(sample.slots[0]),
                "codecs": {each.way.name: each.figures(sample.raw_bytes, results[0]) for each in results},
            }
            for sample, results in measured
        ],
    }
    document = save("compression", figures, out)
    print(f"blosc2: {blosc}")
    for each in document["samples"]:
        print(f"\n{each['sample']}: {each['slots']} slots of {each['slot_bytes']} bytes, {each['dtype']}")
        print(f"{'codec':22} {'stored/raw':>10} {'compress MB/s':>24} {'decompress MB/s':>24}")
        for name, found in each["codecs"].items():
            speeds = [_with_range(found[key]) for key in ("compress_mb_s", "decompress_mb_s")]
            print(f"{name:22} {found['stored_over_raw']:>10.4f} {speeds[0]:>24} {speeds[1]:>24}")
    plot(document, out / "compression.png")


def _with_range(speed: dict[str, float]) -> str:
    return f"{speed['median']:.0f} ({speed['lowest']:.0f}-{speed['highest']:.0f})"


_SPEEDS = (500, 1000, 2000, 4000)


def plot(document: dict[str, Any], path: Path) -> None:
    """Each codec's first level, a panel for each sample: from the speed of compressing to that of decompressing."""
    level, samples = f"-{LEVELS[0]}", document["samples"]
    smallest = min(found["stored_over_raw"] for each in samples for found in each["codecs"].values())
    title = f"Compressed keys and values take {smallest:.0%} of their bytes at best"
    with panels(path, document, title, (1, len(samples)), (11, 3.6), sharex=True, sharey=True) as grid:
        for axes, each in zip(grid, samples, strict=True):
            codecs = {name: found for name, found in each["codecs"].items() if name.endswith(level)}
            for height, found in enumerate(codecs.values()):
                speeds = [found[key]["median"] for key in ("compress_mb_s", "decompress_mb_s")]
                axes.plot(speeds, [height] * 2, "-", color=OURS, linewidth=0.8)
                axes.plot(speeds[0], height, "o", speeds[1], height, "x", color=OURS, markersize=5)
                axes.annotate(
                    f"{found['stored_over_raw']:.0%}",
                    (max(speeds), height),
                    xytext=(8, -3),
                    textcoords="offset points",
                    fontsize=8,
                )
            axes.set_yticks(range(len(codecs)), list(codecs), fontsize=8)
            axes.set_title(f"{each['sample']} ({each['dtype']})", fontsize=8)
            axes.set(xlabel="MB/s: compressed (o), decompressed (x)", xscale="log")
            axes.minorticks_off()
            axes.set_xticks(_SPEEDS, [f"{speed:,}" for speed in _SPEEDS])
            axes.margins(x=0.25, y=0.15)


def main() -> None:
    """Measure and report."""
    parser = parser_for(__doc__, ROUNDS)
    options = parser.parse_args()
    text, random, layers = (512, BLOCK_TOKENS, 2) if options.quick else (TEXT_TOKENS, RANDOM_TOKENS, 28)
    measured = [(sample, measure(sample, ways(), rounds_of(options))) for sample in samples(text, random, layers)]
    report(measured, options.out)
    print(f"\nfigures and plot in {options.out}")


if __name__ == "__main__":
    main()
