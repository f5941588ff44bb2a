"""Branches of one past that write side by side, beside mlx-lm on copies of that past.

In one process, taking turns, for 1 to 32 branches of some thousand tokens:

- *Torpor*: the daemon's own service. A tree is begun on a session, forked, and its branches `advance`: each draws by a
  seed of its own at temperature 1, is measured, and tells its tokens.
- *mlx-lm*: the same network, and one `BatchGenerator` for which the past was copied for each row (that is how it begins
  with a past); its sampler draws for all rows at once. One branch stands beside `generate_step` on a plain cache.

The models: the demo model, which has read a text; and two of the 28 layers of the Qwen3-0.6B shape with a fourteenth of
its vocabulary, so that each part keeps its share of the work. Its weights, keys and values are random, of unit variance
(float32 on a CPU, bfloat16 on a GPU), and no text is read. No model has an end token here, so all write as much.

Then the memory of the branches, what a fork takes, the same work through the socket of a daemon in a process of its
own, and whether a branch reads on, sleeps and wakes as fast as a session that shares nothing.

Seconds are by the clock; processor seconds are of all threads. The BLAS has as many threads as the daemon's: all cores,
unless OPENBLAS_NUM_THREADS says otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parent))

# In this order: torpor chooses the BLAS that MLX, which is imported after it, will use.
# isort: off
from torpor.daemon.api.branching import BranchReading
from torpor.daemon.api.sampling import Sampling
from torpor.daemon.memory.model_registry import ModelChoice
from torpor.daemon.models.models import DEMO_MODEL_FOLDER
from torpor.daemon.options.serve_options import ServeOptions
from torpor.daemon.service import Service
from torpor.snapshot.blas import library_in_use
from torpor.snapshot.caches import arrays_of
from torpor.memvid.limits import MIB
from torpor.snapshot.kind import copied
from torpor.snapshot.runs import SEGMENT_TOKENS
from torpor.socket_api import Client
import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.generate import BatchGenerator, generate_step, generation_stream
from mlx_lm.models import qwen3
from mlx_lm.models.cache import KVCache
from mlx_lm.sample_utils import make_sampler
from figures import PEER, label_at_end, panels, parser_for, rounds_of, save
from machine import spread
from tree import serving
# isort: on

LENGTHS: Final = (1000, 4000, 16_000)
DEMO_LENGTHS: Final = (1000, 4000, 7000)
COUNTS: Final = (1, 2, 4, 8, 16, 32)
ROUNDS: Final = 5
PARTS: Final = ("speed", "memory", "forks", "socket", "around")
TOKENS: Final = 16
"""Each branch writes so many in its turn; half of them where a turn takes long."""

_LONG_ROWS: Final = 16 * 4000
"""A turn takes long from so many tokens on, all rows together."""

FORKED, FORKS, WRITTEN = 8, 15, 64
"""Branches whose memory and whose way through the socket are measured; forks that are timed at each length; tokens that
a branch writes for its memory, and over the socket."""

READ: Final = 512
"""Tokens that are read on behind a past."""

_FAR: Final = 4000
"""Longer pasts are not read through a socket, nor by a plain session."""

_QUICK: Final = {"tokens": [300], "branches": [1, 3]}

GOALS: Final = {
    ("qwen3", 1): {1000: 0.95, 4000: 1.1, 16_000: 1.6},
    ("qwen3", 8): {1000: 1.2, 4000: 2.4, 16_000: 4.5},
    ("qwen3", 16): {4000: 3.0},
    ("demo", 1): {1000: 0.95, 4000: 1.1},
    ("demo", 8): {1000: 1.2, 4000: 2.3},
}
"""How many times as fast as mlx-lm, by model, branches and tokens."""

_MILLI: Final = 1000.0
_SHADES: Final = ("#9ecae1", "#4292c6", "#08519c")
"""Torpor's blue, the darker the longer the past."""

_APART: Final = 1.15
_TICKS: Final = (0.5, 1, 2, 4, 8, 16)
_SAMPLING: Final = Sampling(1.0, seed=1)
_QWEN3: Final[dict[str, Any]] = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "num_hidden_layers": 2,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "vocab_size": 151_936 // 14,
    "max_position_embeddings": 40_960,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}
MODELS: Final = {
    "demo": "demo model",
    "qwen3": "2 of 28 layers of Qwen3-0.6B, 1/14 of its vocabulary, random weights",
}


# --- the models, and a past


def write_models(folder: Path) -> dict[str, str]:
    """Folders of both models, without an end token; by name."""
    for name in MODELS:
        (folder / name).mkdir()
        shutil.copy(DEMO_MODEL_FOLDER / "tokenizer.json", folder / name)
        told = json.loads((DEMO_MODEL_FOLDER / "tokenizer_config.json").read_text(encoding="utf-8"))
        del told["eos_token"]
        (folder / name / "tokenizer_config.json").write_text(json.dumps(told))
    shutil.copy(DEMO_MODEL_FOLDER / "model.safetensors", folder / "demo")
    config = json.loads((DEMO_MODEL_FOLDER / "config.json").read_text(encoding="utf-8"))
    del config["eos_token_id"]
    (folder / "demo" / "config.json").write_text(json.dumps(config))
    (folder / "qwen3" / "config.json").write_text(json.dumps(_QWEN3))
    network = qwen3.Model(qwen3.ModelArgs.from_dict(_QWEN3))
    network.set_dtype(mx.bfloat16)
    mx.save_safetensors(str(folder / "qwen3" / "model.safetensors"), dict(tree_flatten(network.parameters())))
    return {name: str(folder / name) for name in MODELS}


@asynccontextmanager
async def opened(folder: Path, models: dict[str, str]) -> AsyncIterator[Service]:
    """A service in this process, on a store of its own."""
    options = ServeOptions(store=folder / "store", scrub_rate=0, prefix_reuse="off", batch=max(COUNTS))
    service = await Service.open(options, models={name: ModelChoice(source) for name, source in models.items()})
    try:
        yield service
    finally:
        await service.close()


async def begin_session(service: Service, name: str, model: str, tokens: int, seed: int = 0) -> None:
    """A session that has read so many tokens: a text, or for the random model numbers in place of keys and values.
    seed: others for each."""
    await service.create(session=name, model=model, sampling=_SAMPLING)
    if model == "demo":
        await service.append(session=name, tokens=text_of(service, seed + tokens)[seed:])
        return
    random = np.random.default_rng(seed)
    ids = random.integers(5, _QWEN3["vocab_size"], tokens).tolist()
    await service.append(session=name, tokens=ids[-2:])
    state = service._parts.sessions.residency.awake[service._parts.sessions.resolve(name)].state

    def fill() -> None:
        for cache in state.caches:
            shape = (1, cache.keys.shape[1], tokens - 2, cache.keys.shape[3])
            drawn = (mx.array(random.standard_normal(shape, dtype=np.float32)) for _ in "kv")
            cache.update_and_fetch(*(each.astype(cache.keys.dtype) for each in drawn))
        mx.eval(arrays_of(state.caches))
        state.tokens.extend(ids[:-2])
        for _ in range(tokens - 2):
            state.passes.add(1)

    await service._parts.models.engine.call(fill)


def text_of(service: Service, count: int) -> list[int]:
    """The first tokens of a text that is on every machine with Python."""
    import inspect

    tokens = service._parts.models.shelf.place("demo").model.encode(
        inspect.getsource(__import__("argparse")), opening=True
    )
    return (tokens * -(-count // len(tokens)))[:count]


@dataclass
class Past:
    """A tree on a past, and the past in mlx-lm's own caches. root: the branch. before: MLX's memory without the
    tree."""

    service: Service
    name: str
    tokens: int
    root: int
    caches: list[KVCache]
    before: int

    @classmethod
    async def begun(cls, service: Service, name: str, tokens: int) -> Past:
        """Plant it. The session that it began with is gone."""
        await begin_session(service, "past", name, tokens)
        live = service._parts.sessions.residency.awake[service._parts.sessions.resolve("past")]
        caches = [_copied(cache) for cache in live.state.caches]
        mx.clear_cache()
        before = mx.get_active_memory() - sum(array.nbytes for array in arrays_of(live.state.caches))
        root = (await service.tree(session="past")).branch
        await service.delete(session="past")
        return cls(service, name, tokens, root, caches, before)

    async def fork(self, count: int) -> list[int]:
        """So many branches, with seeds of their own."""
        made = await self.service.branch(branch=self.root, count=count, seeds=list(range(count)))
        return [each.branch for each in made.branches]

    @property
    def token_bytes(self) -> int:
        """Of keys and values."""
        return sum(2 * cache.keys.shape[1] * cache.keys.shape[3] * cache.keys.itemsize for cache in self.caches)


def _copied(cache: Any) -> KVCache:
    copy = KVCache()
    copy.keys, copy.values = (copied(array[:, :, : cache.offset]) for array in (cache.keys, cache.values))
    copy.offset = cache.offset
    mx.eval(copy.keys, copy.values)
    return copy


# --- the same work, in two ways


class Copies:
    """Rows of mlx-lm that go on from a past, each with a copy."""

    def __init__(self, network: Any, past: Past, rows: int) -> None:
        self._sampler = make_sampler(temp=1.0)
        self._one: Iterator[Any] | None = None
        self._many: BatchGenerator | None = None
        if rows == 1:
            caches = [_copied(cache) for cache in past.caches]
            self._one = generate_step(mx.array([7]), network, max_tokens=-1, sampler=self._sampler, prompt_cache=caches)
            return
        self._many = BatchGenerator(
            network, max_tokens=1 << 30, sampler=self._sampler, completion_batch_size=rows, prefill_batch_size=rows
        )
        self._many.insert([[7]] * rows, caches=[past.caches] * rows)

    def write(self, tokens: int) -> None:
        """So many tokens in each row; all that was begun is done."""
        for _ in range(tokens):
            if self._one is not None:
                next(self._one)
            elif self._many is not None:
                self._many.next_generated()
        mx.synchronize(generation_stream)

    def close(self) -> None:
        """Free it."""
        if self._many is not None:
            self._many.close()
        self._one = self._many = None
        gc.collect()
        mx.clear_cache()


def ignore(_event: object) -> None:
    """For events that are not measured."""


async def write(service: Service, numbers: Sequence[int], tokens: int) -> None:
    """The product's way: branches write so many tokens each."""
    done = await service.advance(branches=numbers, max_tokens=tokens, on_event=ignore)
    assert all(len(each.tokens) == tokens for each in done.written)


@dataclass
class Turn:
    """Seconds of one turn, for one token of each branch."""

    clock: float
    processor: float


@asynccontextmanager
async def timed(into: list[Turn], tokens: int) -> AsyncIterator[None]:
    """Note a turn."""
    clock, processor = time.perf_counter(), time.process_time()
    yield
    clock, processor = time.perf_counter() - clock, time.process_time() - processor
    into.append(Turn(clock / tokens, processor / tokens))


async def speed(past: Past, network: Any, count: int, rounds: int) -> dict[str, Any]:
    """Both ways in turns: seconds of a round of `count` branches, and how much faster ours is, pair by pair."""
    tokens = TOKENS if past.tokens * count < _LONG_ROWS else TOKENS // 2
    branches, copies = await past.fork(count), Copies(network, past, count)
    turns: dict[str, list[Turn]] = {"torpor": [], "mlx_lm": []}
    try:
        await write(past.service, branches, 2)
        copies.write(2)
        for number in range(rounds):
            for way in ("torpor", "mlx_lm") if number % 2 else ("mlx_lm", "torpor"):
                async with timed(turns[way], tokens):
                    if way == "torpor":
                        await write(past.service, branches, tokens)
                    else:
                        copies.write(tokens)
    finally:
        copies.close()
        await past.service.prune(branches=branches)
    pairs = list(zip(turns["mlx_lm"], turns["torpor"], strict=True))
    return {
        "model": past.name,
        "tokens": past.tokens,
        "branches": count,
        "round_seconds": {way: spread([each.clock for each in taken]) for way, taken in turns.items()},
        "round_processor_seconds": {way: spread([each.processor for each in taken]) for way, taken in turns.items()},
        "speed": spread([theirs.clock / ours.clock for theirs, ours in pairs]),
        "speed_by_processor": spread([theirs.processor / ours.processor for theirs, ours in pairs]),
        "goal": GOALS.get((past.name, count), {}).get(past.tokens),
    }


# --- memory, forks


async def memory(past: Past, network: Any) -> dict[str, Any]:
    """What branches hold that have written, beside one past and what each of them wrote. segments: as much, in whole
    segments of 64 tokens, and each with the end of the past that fills none."""
    branches = await past.fork(FORKED)
    await write(past.service, branches, WRITTEN)
    gc.collect()
    mx.clear_cache()
    ours = mx.get_active_memory() - past.before
    account = (await past.service.status()).memory.branches_bytes
    await past.service.prune(branches=branches)
    before = mx.get_active_memory()
    copies = Copies(network, past, FORKED)
    copies.write(WRITTEN)
    mx.clear_cache()
    theirs = mx.get_active_memory() - before
    copies.close()
    whole, rest = divmod(past.tokens, SEGMENT_TOKENS)
    own = -(-(rest + WRITTEN) // SEGMENT_TOKENS)
    tokens = past.tokens + FORKED * WRITTEN
    segments = SEGMENT_TOKENS * (whole + FORKED * own)
    return {
        "model": past.name,
        "tokens": past.tokens,
        "account_bytes": account,
        "active_bytes": ours,
        "mlx_lm_bytes": theirs,
        "one_past_and_tails_bytes": tokens * past.token_bytes,
        "active_over_past_and_tails": ours / (tokens * past.token_bytes),
        "active_over_segments": ours / (segments * past.token_bytes),
        "account_over_segments": account / (segments * past.token_bytes),
        "mlx_lm_over_past_and_tails": theirs / (tokens * past.token_bytes),
    }


async def forks(past: Past) -> dict[str, Any]:
    """Milliseconds of a fork, one at a time."""
    taken = []
    for _ in range(FORKS):
        started = time.perf_counter()
        (made,) = (await past.service.branch(branch=past.root)).branches
        taken.append(_MILLI * (time.perf_counter() - started))
        await past.service.prune(branches=[made.branch])
    return {"model": past.name, "tokens": past.tokens, "milliseconds": spread(taken)}


# --- through the socket


async def socket(past: Past, client: Client, rounds: int) -> dict[str, Any]:
    """Seconds of a round of branches in this process, and as a client of a daemon that has read as much, in turns."""
    random = np.random.default_rng(0)
    ids = random.integers(5, 4000, past.tokens).tolist()
    name = f"{past.name}-{past.tokens}"
    client.create(name, model=past.name, sampling=_SAMPLING)
    client.append(name, tokens=ids)
    root = client.tree(name).branch
    theirs = [each.branch for each in client.branch(root, count=FORKED, seeds=list(range(FORKED))).branches]
    ours = await past.fork(FORKED)
    turns: dict[str, list[Turn]] = {"in process": [], "socket": []}
    await write(past.service, ours, 2)
    client.advance(theirs, max_tokens=2, on_event=ignore)
    for number in range(rounds):
        for way in ("in process", "socket") if number % 2 else ("socket", "in process"):
            async with timed(turns[way], WRITTEN):
                if way == "socket":
                    client.advance(theirs, max_tokens=WRITTEN, on_event=ignore)
                else:
                    await write(past.service, ours, WRITTEN)
    await past.service.prune(branches=ours)
    client.prune([root], subtree=True)
    pairs = zip(turns["in process"], turns["socket"], strict=True)
    return {
        "model": past.name,
        "tokens": past.tokens,
        "branches": FORKED,
        "round_seconds": {way: spread([each.clock for each in taken]) for way, taken in turns.items()},
        "speed": spread([inside.clock / outside.clock for inside, outside in pairs]),
    }


# --- where it is not branched


async def around(service: Service, name: str, tokens: int, rounds: int) -> dict[str, Any]:
    """Seconds of reading on, of a sleep and of a wake: of a session that shares nothing, and of a branch."""
    taken: dict[str, dict[str, list[float]]] = {way: defaultdict(list) for way in ("session", "branch")}
    for number in range(rounds):
        for way in ("session", "branch") if number % 2 else ("branch", "session"):
            await begin_session(service, way, name, tokens, seed=2 * number + (way == "branch"))
            more = text_of(service, READ)
            if way == "session":
                await _clocked(taken[way]["read"], service.append(session=way, tokens=more))
                await _clocked(taken[way]["sleep"], service.sleep(session=way))
            else:
                root = (await service.tree(session=way)).branch
                await service.delete(session=way)
                reading = [BranchReading(root, tokens=more)]
                await _clocked(taken[way]["read"], service.prefill(readings=reading))
                await _clocked(taken[way]["sleep"], _keep_asleep(service, root, way))
                await service.prune(branches=[root])
            await _clocked(taken[way]["wake"], service.wake(session=way))
            await service.delete(session=way)
    return {
        "model": name,
        "tokens": tokens,
        "seconds": {way: {what: spread(each) for what, each in found.items()} for way, found in taken.items()},
        "speed": {
            what: spread([plain / shared for plain, shared in zip(taken["session"][what], each, strict=True)])
            for what, each in taken["branch"].items()
        },
    }


async def _keep_asleep(service: Service, branch: int, name: str) -> None:
    await service.keep(branch=branch, name=name)
    await service.sleep(session=name)


async def _clocked(into: list[float], work: Awaitable[Any]) -> None:
    started = time.perf_counter()
    await work
    into.append(time.perf_counter() - started)


# --- all of it


async def measure(options: argparse.Namespace, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The parts that are asked for, model by model and length by length."""
    rounds, found = rounds_of(options), {part: [] for part in options.only}
    models = write_models(folder)
    async with opened(folder, {name: models[name] for name in options.models}) as service:
        for name in options.models:
            network = service._parts.models.shelf.place(name).model.network
            for tokens in options.tokens or (DEMO_LENGTHS if name == "demo" else LENGTHS):
                past = await Past.begun(service, name, tokens)
                if "memory" in found:
                    found["memory"].append(await memory(past, network))
                if "forks" in found:
                    found["forks"].append(await forks(past))
                for count in options.branches if "speed" in found else ():
                    found["speed"].append(await speed(past, network, count, rounds))
                    print(_line_of(found["speed"][-1]), flush=True)
                if "socket" in found and tokens <= _FAR:
                    place = folder / f"{name}-{tokens}"
                    place.mkdir()
                    with serving(place, "--model", f"{name}={models[name]}", "--batch", str(max(COUNTS))) as client:
                        found["socket"].append(await socket(past, client, rounds))
                await service.prune(branches=[past.root], subtree=True)
                del past
                gc.collect()
                if "around" in found and tokens <= _FAR:
                    found["around"].append(await around(service, name, tokens, rounds))
    return found


# --- report


def report(found: dict[str, list[dict[str, Any]]], out: Path) -> None:
    """The figures as JSON and as a plot, and a table for a person."""
    threads = os.environ.get("OPENBLAS_NUM_THREADS", "all cores")
    figures = {"models": MODELS, "blas": library_in_use(), "blas_threads": threads, **found}
    document = save("branches", figures, out)
    print(f"BLAS {figures['blas']}, threads: {threads}")
    for each in found.get("memory", ()):
        print(
            f"{each['model']:6} {each['tokens']:>6} tokens, {FORKED} branches of {WRITTEN} more: "
            f"{each['active_bytes'] / MIB:8.1f} MiB, {each['active_over_past_and_tails']:.3f} of one past and tails, "
            f"{each['active_over_segments']:.3f} of them in segments; by the daemon's account "
            f"{each['account_over_segments']:.3f}; mlx-lm {each['mlx_lm_bytes'] / MIB:8.1f} MiB"
        )
    for each in found.get("forks", ()):
        print(f"{each['model']:6} {each['tokens']:>6} tokens, a fork: {_told(each['milliseconds'], 2)} ms")
    for each in found.get("socket", ()):
        print(f"{each['model']:6} {each['tokens']:>6} tokens, socket over in process: {_told(each['speed'], 2)}")
    for each in found.get("around", ()):
        told = ", ".join(f"{what} {_told(speed, 2)}" for what, speed in each["speed"].items())
        print(f"{each['model']:6} {each['tokens']:>6} tokens, a branch's speed over a session's: {told}")
    if found.get("speed"):
        _plot(found["speed"], document, out / "branches.png")


def _line_of(each: dict[str, Any]) -> str:
    ours, theirs = (_MILLI * each["round_seconds"][way]["median"] for way in ("torpor", "mlx_lm"))
    goal = "" if each["goal"] is None else f", goal {each['goal']}"
    return (
        f"{each['model']:6} {each['tokens']:>6} tokens {each['branches']:>3} branches: a round {ours:8.1f} ms, mlx-lm "
        f"{theirs:8.1f} ms: {_told(each['speed'], 2)} times as fast, "
        f"by processor {_told(each['speed_by_processor'], 2)}{goal}"
    )


def _told(values: dict[str, float], digits: int) -> str:
    median, lowest, highest = (f"{values[name]:.{digits}f}" for name in ("median", "lowest", "highest"))
    return f"{median} ({lowest} to {highest})"


def _plot(measured: list[dict[str, Any]], document: dict[str, Any], path: Path) -> None:
    best = max(measured, key=lambda each: each["speed"]["median"])
    title = (
        f"{best['branches']} branches of a past of {best['tokens']:,} tokens write {best['speed']['median']:.1f} times "
        "as fast as mlx-lm on copies"
    )
    names = list(dict.fromkeys(each["model"] for each in measured))
    with panels(path, document, title, (1, len(names)), (4.8 * len(names), 4.4), sharey=True) as grid:
        for axes, name in zip(grid, names, strict=True):
            mine = [each for each in measured if each["model"] == name]
            counts = sorted({each["branches"] for each in mine})
            axes.axhline(1, color=PEER, linewidth=1)
            axes.annotate("mlx-lm", (0, 1), (4, 3), axes.get_yaxis_transform(), "offset points", fontsize=8, color=PEER)
            below = 0.0
            lengths = sorted({each["tokens"] for each in mine})
            for tokens, colour in zip(lengths, _SHADES[-len(lengths) :], strict=True):
                line = sorted((each for each in mine if each["tokens"] == tokens), key=lambda each: each["branches"])
                xs, speeds = [each["branches"] for each in line], [each["speed"] for each in line]
                medians = [each["median"] for each in speeds]
                axes.plot(xs, medians, "o-", color=colour)
                lowest, highest = ([each[end] for each in speeds] for end in ("lowest", "highest"))
                axes.fill_between(xs, lowest, highest, alpha=0.2, color=colour)
                below = max(medians[-1], below * _APART)  # a label has a line of its own
                label_at_end(axes, xs, [below], f"{tokens:,} tokens", colour)
            axes.set(xlabel=f"branches, {name.replace('qwen3', 'Qwen3-0.6B shape')}", xscale="log", yscale="log")
            axes.set_xticks(counts, [str(each) for each in counts], minor=False)
            axes.set_yticks(_TICKS, [str(each) for each in _TICKS])
            axes.minorticks_off()
            axes.margins(x=0.25)
        grid[0].set_ylabel("times as fast as mlx-lm")


def main() -> None:
    """Measure and report."""
    parser = parser_for(__doc__, ROUNDS)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts, all unless told")
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=list(MODELS))
    parser.add_argument("--tokens", nargs="+", type=int, help="lengths of the past")
    parser.add_argument("--branches", nargs="+", type=int, default=list(COUNTS), help="how many, at most 32")
    options = parser.parse_args()
    if options.quick:
        vars(options).update(_QUICK)
    with tempfile.TemporaryDirectory(prefix="torpor-bench-", dir=options.folder) as folder:
        found = asyncio.run(measure(options, Path(folder)))
    report(found, options.out)
    print(f"figures and plot in {options.out}")


if __name__ == "__main__":
    main()
