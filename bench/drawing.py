"""What drawing the tokens of sixteen sessions costs in a round, and what drawing them together would save.

Four ways, for three sizes of vocabulary, taking turns: *by a key*, as sessions of before draw; *by place*, as new ones
do; *one evaluation*, as *by place*, but what MLX computes for the sixteen is evaluated at once; *one array*, as *by
place*, but the sixteen are rows of one array, through the same filters, and cross over to numpy at once. All but the
first draw the same tokens, which is checked.

Then whole rounds: sixteen sessions on the demo model write beside each other, greedy, by a key, and by place. What a
round takes beyond a greedy one is the drawing.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

# In this order: torpor chooses the BLAS that MLX, which is imported after it, will use.
# isort: off
from torpor.daemon.api.sampling import Sampling
from torpor.daemon.engine import sampler
from torpor.daemon.options.serve_options import ServeOptions
from torpor.daemon.service import Service
import mlx.core as mx
import numpy as np
from figures import OURS, PEER, parser_for, plotted, rounds_of, save
from machine import spread
# isort: on

ROWS = 16
VOCABULARIES, QUICK_VOCABULARIES = (4096, 49_152, 151_936), (4096,)
ROUNDS = 9
TOKENS, QUICK_TOKENS = 64, 8
SAMPLINGS = {"temperature": Sampling(0.8, seed=7), "top_p": Sampling(0.8, top_p=0.95, seed=7)}
PLACE = array("I", range(100))
_MILLI = 1000.0

Way = Callable[[Sampling, mx.array, list[mx.array]], list[int]]


def by_key(sampling: Sampling, _logits: mx.array, rows: list[mx.array]) -> list[int]:
    """One after the other, each with a key that goes on."""
    return [sampler.draw(sampling, row, PLACE, key).token for row, key in zip(rows, _KEYS, strict=True)]


def by_place(sampling: Sampling, _logits: mx.array, rows: list[mx.array]) -> list[int]:
    """One after the other, as the daemon draws."""
    return [sampler.draw(sampling, row, PLACE, sampler.initial_key()).token for row in rows]


def one_evaluation(sampling: Sampling, _logits: mx.array, rows: list[mx.array]) -> list[int]:
    """All that MLX computes is evaluated at once."""
    filtered = [_filtered(sampling, row[None])[0] for row in rows]
    mx.eval(filtered)
    return [_chosen(sampling, np.asarray(row)) for row in filtered]


def one_array(sampling: Sampling, logits: mx.array, _rows: list[mx.array]) -> list[int]:
    """The rows of one array, which crosses over at once."""
    return [_chosen(sampling, row) for row in np.asarray(_filtered(sampling, logits))]


WAYS: dict[str, Way] = {
    "by a key": by_key,
    "by place": by_place,
    "one evaluation": one_evaluation,
    "one array": one_array,
}
_KEYS = [mx.random.key(number) for number in range(ROWS)]


def _filtered(sampling: Sampling, logits: mx.array) -> mx.array:
    """Rows of logits through the filters, as `sampler.draw` does it for one."""
    filters = sampler._filters(sampling, logits.shape[-1])
    if filters:
        logits = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    for apply in filters:
        logits = apply(logits)
    return logits


def _chosen(sampling: Sampling, values: np.ndarray) -> int:
    number = sampler.number_at(sampling.seed, len(PLACE))
    return sampler._chosen(mx.array(values), sampling.temperature, number)


def drawing(rounds: int, vocabularies: tuple[int, ...]) -> list[dict[str, Any]]:
    """Seconds of sixteen draws, in each way."""
    found = []
    for vocabulary in vocabularies:
        logits = mx.random.normal((ROWS, vocabulary), key=mx.random.key(3)) * 4
        rows = [logits[row] for row in range(ROWS)]
        mx.eval(logits, rows, _KEYS)
        for name, sampling in SAMPLINGS.items():
            taken: dict[str, list[float]] = {way: [] for way in WAYS}
            for _ in range(rounds):
                drawn = {}
                for way, draw in WAYS.items():
                    begun = time.perf_counter()
                    drawn[way] = draw(sampling, logits, rows)
                    taken[way].append(time.perf_counter() - begun)
                assert drawn["by place"] == drawn["one evaluation"] == drawn["one array"]
            seconds = {way: spread(each) for way, each in taken.items()}
            found.append({"vocabulary": vocabulary, "sampling": name, "seconds": seconds})
    return found


async def writing(rounds: int, tokens: int, folder: Path) -> dict[str, Any]:
    """Seconds of a round of sixteen sessions on the demo model."""
    service = await Service.open(ServeOptions(store=folder / "store", scrub_rate=0, batch=ROWS))
    taken: dict[str, list[float]] = {"greedy": [], "by a key": [], "by place": []}
    try:
        for number in range(rounds):
            for way, each in taken.items():
                names = [f"{way.replace(' ', '-')}-{number}-{row}" for row in range(ROWS)]
                for row, name in enumerate(names):
                    sampling = Sampling(0.0 if way == "greedy" else 0.8, seed=row)
                    await service.create(session=name, sampling=sampling)
                    await service.append(session=name, text="def begin(self, number: int) -> None:\n")
                    if way == "by a key":
                        service._parts.sessions.residency.awake[
                            service._parts.sessions.resolve(name)
                        ].state.random_key = _KEYS[row]
                begun = time.perf_counter()
                work = [service.generate(session=name, max_tokens=tokens, prove=False) for name in names]
                results = await asyncio.gather(*work)
                written = max(len(result.tokens) for result in results)
                each.append((time.perf_counter() - begun) / written)
                for name in names:
                    await service.delete(session=name)
    finally:
        await service.close()
    return {way: spread(each) for way, each in taken.items()}


def report(draws: list[dict[str, Any]], rounds: dict[str, Any], out: Path) -> None:
    """The figures as JSON and as a plot, and a few lines for a person."""
    document = save("drawing", {"rows": ROWS, "draws": draws, "round_seconds": rounds}, out)
    first = draws[0]["seconds"]
    ratio = first["by a key"]["median"] / first["by place"]["median"]
    title = f"By place, {ROWS} draws from {draws[0]['vocabulary']:,} tokens take 1/{ratio:.1f} of the time"
    with plotted(out / "drawing.png", document, title, width=9.0) as axes:
        for at, (way, colour) in enumerate(zip(WAYS, (PEER, OURS, "tab:green", "tab:orange"), strict=True)):
            heights = [_MILLI * each["seconds"][way]["median"] for each in draws]
            axes.bar([number + 0.2 * at for number in range(len(draws))], heights, 0.2, color=colour, label=way)
        names = [f"{each['sampling']}\n{each['vocabulary']:,}" for each in draws]
        axes.set(ylabel=f"milliseconds of {ROWS} draws", yscale="log")
        axes.set_xticks([number + 0.3 for number in range(len(draws))], names)
        axes.legend()
    for each in draws:
        told = ", ".join(f"{way} {_MILLI * taken['median']:.2f}" for way, taken in each["seconds"].items())
        print(f"{each['vocabulary']:>7} {each['sampling']:>11}, ms of {ROWS} draws: {told}")
    print("a round, ms: " + ", ".join(f"{way} {_MILLI * taken['median']:.2f}" for way, taken in rounds.items()))


def main() -> None:
    """Measure and report."""
    options = parser_for(__doc__, ROUNDS).parse_args()
    rounds = rounds_of(options)
    draws = drawing(rounds, QUICK_VOCABULARIES if options.quick else VOCABULARIES)
    with tempfile.TemporaryDirectory(prefix="torpor-bench-", dir=options.folder) as folder:
        written = asyncio.run(writing(rounds, QUICK_TOKENS if options.quick else TOKENS, Path(folder)))
    report(draws, written, options.out)
    print(f"figures and plot in {options.out}")


if __name__ == "__main__":
    main()
