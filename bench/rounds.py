"""Eight sessions that write together: in rounds, where each is read over its own cache, and in mlx-lm's batch caches.

In one process, taking turns: *rounds*, as the daemon decodes sessions with plain caches; *batches*, as it decodes the
others, where rows are padded by a quarter at most. Both through the daemon's own decoder, a token for each session in
each turn. The sessions are of one length, or of 60 to 3,600 tokens; their keys and values are random.

The models are those of `branches.py`. Seconds are by the clock; processor seconds are of all threads. The BLAS has as
many threads as the daemon's: all cores, unless OPENBLAS_NUM_THREADS says otherwise.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parent))

# In this order: torpor chooses the BLAS that MLX, which is imported after it, will use.
# isort: off
from torpor.daemon.engine.asking import Decode
from torpor.daemon.engine.decoding import Decoder
from torpor.daemon.models.company import Company
from torpor.daemon.models.models import LoadedModel, load_model
from torpor.snapshot.caches import arrays_of
from torpor.snapshot.digests import DigestCache
from torpor.snapshot.passes import UNREPEATABLE
from torpor.snapshot.state import LiveState
import mlx.core as mx
from branches import MODELS, write_models
from figures import OURS, PEER, parser_for, plotted, rounds_of, save
from machine import spread
# isort: on

ROUNDS: Final = 30
WAYS: Final = ("rounds", "batches")
CASES: Final[dict[str, tuple[int, ...]]] = {
    "200": (200,) * 8,
    "1,000": (1000,) * 8,
    "3,000": (3000,) * 8,
    "60 to 3,600": (60, 120, 240, 480, 900, 1500, 2400, 3600),
}
_QUICK: Final[dict[str, tuple[int, ...]]] = {"50": (50,) * 3, "20 to 100": (20, 50, 100)}
_MILLI: Final = 1000.0


class NoRounds(Company):
    """Of a model whose sessions decode in batches."""

    def settle(self, *_: Any) -> None:
        """Nothing is tried."""


class Counted:
    """A network that counts its calls."""

    def __init__(self, network: Any) -> None:
        self.network, self.calls = network, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.network, name)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self.calls += 1
        return self.network(*arguments, **options)


class Writing:
    """Sessions that write in one way."""

    def __init__(self, model: LoadedModel, lengths: Sequence[int]) -> None:
        self._model, self._decoder = model, Decoder()
        self._states = [_state(model, count, seed) for seed, count in enumerate(lengths)]

    def turn(self) -> dict[str, float]:
        """A token for each: its seconds, processor seconds and calls."""
        asked = [Decode(self._model, state, 5 + row) for row, state in enumerate(self._states)]
        calls, begun, begun_processor = self._model.network.calls, time.perf_counter(), time.process_time()
        outcomes = self._decoder.decode(asked)
        taken = time.perf_counter() - begun, time.process_time() - begun_processor
        for each, logits in zip(asked, outcomes, strict=True):
            assert isinstance(logits, mx.array), logits
            each.state.tokens.append(each.token)
            each.state.last_logits = logits
        return {"s": taken[0], "processor_s": taken[1], "calls": self._model.network.calls - calls}

    @property
    def is_repeatable(self) -> bool:
        """Whether all of their tokens can be read again alone."""
        return all(UNREPEATABLE not in list(state.passes) for state in self._states)


def _state(model: LoadedModel, count: int, seed: int) -> LiveState:
    """A session that has as many tokens, with random keys and values of unit variance."""
    state = model.new_state(mx.random.key(seed))
    mx.eval(model.extend([5, 6], state), arrays_of(state.caches))
    keys = iter(mx.random.split(mx.random.key(seed), 2 * len(state.caches)))
    for cache in state.caches:
        shape = (1, cache.keys.shape[1], count - 2, cache.keys.shape[3])
        cache.update_and_fetch(*(mx.random.normal(shape, cache.keys.dtype, key=next(keys)) for _ in "kv"))
    mx.eval(arrays_of(state.caches))
    state.tokens.extend([5] * count)
    for _ in range(count - 2):
        state.passes.add(1)
    return state


def measured(model: LoadedModel, lengths: Sequence[int], rounds: int) -> dict[str, Any]:
    """Both ways, in turns; how many times as fast rounds are, pair by pair."""
    model = replace(model, network=Counted(model.network))
    ways = {"rounds": Writing(model, lengths), "batches": Writing(replace(model, company=NoRounds()), lengths)}
    taken: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for number in range(-2, rounds):
        for way in WAYS if number % 2 else WAYS[::-1]:
            turn = ways[way].turn()
            if number >= 0:  # at first the model is tried, and a batch is put together
                taken[way].append(turn)
    found: dict[str, Any] = {
        way: {each: spread([turn[each] for turn in turns]) for each in turns[0]} for way, turns in taken.items()
    }
    for each in ("s", "processor_s"):
        pairs = zip(taken["batches"], taken["rounds"], strict=True)
        found[f"speed_by_{each}"] = spread([batch[each] / mine[each] for batch, mine in pairs])
    return {**found, "is_repeatable": ways["rounds"].is_repeatable}


def _told(way: dict[str, Any]) -> str:
    seconds, processor, calls = (way[each]["median"] for each in ("s", "processor_s", "calls"))
    return f"{_MILLI * seconds:.1f} ms ({_MILLI * processor:.1f} of the processor, {calls:g} calls)"


def report(found: list[dict[str, Any]], out: Path) -> None:
    """The figures as JSON and as a plot, and a line each for a person."""
    document = save("rounds", {"sessions": found}, out)
    best = max(each["speed_by_processor_s"]["median"] for each in found)
    with plotted(out / "rounds.png", document, f"Unlike lengths in one call: {best:.1f} times as fast", 9.0) as axes:
        for at, (way, colour) in enumerate(zip(WAYS, (OURS, PEER), strict=True)):
            heights = [_MILLI * each[way]["processor_s"]["median"] for each in found]
            axes.bar([number + 0.4 * at for number in range(len(found))], heights, 0.4, color=colour, label=way)
        axes.set(ylabel="processor milliseconds of a round")
        axes.set_xticks([n + 0.2 for n in range(len(found))], [f"{each['model']}\n{each['lengths']}" for each in found])
        axes.legend()
    for each in found:
        told = ", ".join(f"{way} {_told(each[way])}" for way in WAYS)
        speed = f"{each['speed_by_s']['median']:.2f} ({each['speed_by_processor_s']['median']:.2f}) times as fast"
        print(f"{each['model']:>6} {each['lengths']:>11}: {told}; {speed}; repeatable: {each['is_repeatable']}")


def main() -> None:
    """Measure and report."""
    options = parser_for(__doc__, ROUNDS).parse_args()
    found = []
    with tempfile.TemporaryDirectory(prefix="torpor-bench-", dir=options.folder) as folder:
        digests = DigestCache(Path(folder) / "digests")
        sources = write_models(Path(folder))
        for name in MODELS:
            model = load_model(name, sources[name], digests)
            for told, lengths in (_QUICK if options.quick else CASES).items():
                found.append({"model": name, "lengths": told, **measured(model, lengths, rounds_of(options))})
    report(found, options.out)
    print(f"figures and plot in {options.out}")


if __name__ == "__main__":
    main()
