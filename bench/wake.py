"""Wake beside reading again, and beside what others and the disk take for the same bytes, in one process and run.

For each length of context the demo model reads a document, and then, round by round:

- cold: a new session reads the same tokens; time to its first token;
- woken: the sleeping session is woken; time from the request to its first token, all verification included;
- sleep: until the receipt, beside a plain `write` + `fsync` of as many bytes to the same file system;
- wake alone, beside a plain `readv` of as many bytes into fresh memory, and beside mlx-lm's `load_prompt_cache`
  (which verifies nothing) of the same cache, evaluated.

Rounds are interleaved and medians reported. Nothing else should run on the machine.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

# In this order: torpor chooses the BLAS that MLX, which is imported after it, will use.
# isort: off
from torpor.daemon.results import Event, Token
from torpor.daemon.service import Service
import mlx.core as mx
from mlx_lm.models.cache import KVCache, load_prompt_cache, save_prompt_cache
from figures import parser_for, plotted, rounds_of, save
from machine import spread
# isort: on

LENGTHS = (512, 1024, 2048, 4096, 7680)
QUICK_LENGTHS = (256, 512)
ROUNDS = 5
_MIB = 2**20


@dataclass
class Round:
    """Seconds of each thing in one round."""

    cold_first_token: float = 0.0
    woken_first_token: float = 0.0
    sleep: float = 0.0
    wake: float = 0.0
    plain_write: float = 0.0
    plain_read: float = 0.0
    mlx_lm_save: float = 0.0
    mlx_lm_load: float = 0.0


@dataclass
class Length:
    """All rounds at one length; `state_bytes` is what a wake reads and verifies."""

    tokens: int
    state_bytes: int = 0
    rounds: list[Round] = field(default_factory=list)

    def figures(self) -> dict[str, Any]:
        """Medians with spread, and the ratios that the documents quote, each taken round by round."""
        names = tuple(Round.__dataclass_fields__)
        return {
            "tokens": self.tokens,
            "state_bytes": self.state_bytes,
            "seconds": {name: spread([getattr(each, name) for each in self.rounds]) for name in names},
            "cold_over_woken": spread([each.cold_first_token / each.woken_first_token for each in self.rounds]),
            "wake_speed_over_mlx_lm_load": spread([each.mlx_lm_load / each.wake for each in self.rounds]),
            "wake_speed_over_plain_read": spread([each.plain_read / each.wake for each in self.rounds]),
            "sleep_speed_over_plain_write": spread([each.plain_write / each.sleep for each in self.rounds]),
            "sleep_speed_over_mlx_lm_save": spread([each.mlx_lm_save / each.sleep for each in self.rounds]),
        }


class FirstToken:
    """An event sink that notes when the first token came."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.seconds: float | None = None

    def __call__(self, event: Event) -> None:
        if self.seconds is None and isinstance(event, Token):
            self.seconds = time.perf_counter() - self.started

    def require(self) -> float:
        """The seconds; a generation that gave no token is an error of the benchmark."""
        assert self.seconds is not None
        return self.seconds


def ignore(_event: object) -> None:
    """For events that are not measured."""


async def measure(lengths: tuple[int, ...], rounds: int, parent: Path | None) -> list[Length]:
    """Everything, on a store of its own in `parent` (the folder for temporary files, unless told)."""
    with tempfile.TemporaryDirectory(prefix="torpor-bench-", dir=parent) as folder:
        service = await Service.open(store_path=Path(folder) / "store")
        try:
            tokens = await document(service, max(lengths))
            return [await measure_length(service, Path(folder), tokens[:each], rounds) for each in lengths]
        finally:
            await service.close()


async def document(service: Service, count: int) -> list[int]:
    """The first tokens of a text that is on every machine with Python."""
    import argparse as source
    import inspect

    model = service._model_named(None)
    tokens = model.encode(inspect.getsource(source), opening=True)
    while len(tokens) < count:
        tokens = tokens + tokens
    return tokens[:count]


async def measure_length(service: Service, folder: Path, tokens: list[int], rounds: int) -> Length:
    """All rounds at one length."""
    length = Length(len(tokens))
    await service.create(session="sleeper")
    await service.append(session="sleeper", tokens=tokens, emit=ignore)
    await service.sleep(session="sleeper", emit=ignore)
    for _ in range(rounds):
        length.rounds.append(await measure_round(service, folder, tokens, length))
    await service.delete(session="sleeper")
    return length


async def measure_round(service: Service, folder: Path, tokens: list[int], length: Length) -> Round:
    """One round; the sleeper is asleep before and after it, and woken at its first version each time."""
    one = Round()

    cold = FirstToken()
    await service.create(session="cold")
    await service.append(session="cold", tokens=tokens, emit=ignore)
    await service.generate(session="cold", max_tokens=1, emit=cold)
    one.cold_first_token = cold.require()
    # A whole first sleep: this session has no durable blocks to refer to.
    one.sleep = await timed(lambda: service.sleep(session="cold", emit=ignore))
    await service.delete(session="cold")

    woken = FirstToken()
    report = await service.wake(session="sleeper", version=1, emit=ignore)
    one.wake = time.perf_counter() - woken.started
    length.state_bytes = report.bytes_read
    caches = service._awake[next(iter(service._awake))].state.caches
    plain = Path(folder) / "plain"
    # On the engine thread, because that is where MLX may compute.
    await service._engine.call(lambda: one_peer_round(one, plain, length.state_bytes, caches))
    await service.sleep(session="sleeper", emit=ignore)

    woken = FirstToken()
    await service.wake(session="sleeper", version=1, emit=ignore)
    await service.generate(session="sleeper", max_tokens=1, emit=woken)
    one.woken_first_token = woken.require()
    await service.sleep(session="sleeper", emit=ignore)
    return one


def one_peer_round(one: Round, path: Path, size: int, caches: list[KVCache]) -> None:
    """Plain system calls, and mlx-lm, for the same amount of state."""
    payload = os.urandom(_MIB) * (size // _MIB + 1)
    started = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        view = memoryview(payload)[:size]
        while view:
            view = view[file.write(view) :]
        os.fsync(file.fileno())
    one.plain_write = time.perf_counter() - started

    started = time.perf_counter()
    target = bytearray(size)
    with path.open("rb", buffering=0) as file:
        view, done = memoryview(target), 0
        while done < size:
            done += os.preadv(file.fileno(), [view[done:]], done)
    one.plain_read = time.perf_counter() - started

    safetensors = path.with_suffix(".safetensors")
    started = time.perf_counter()
    save_prompt_cache(str(safetensors), caches)
    one.mlx_lm_save = time.perf_counter() - started
    started = time.perf_counter()
    loaded = load_prompt_cache(str(safetensors))
    mx.eval([cache.state[:2] for cache in loaded])
    one.mlx_lm_load = time.perf_counter() - started
    path.unlink()
    safetensors.unlink()


async def timed(work: Callable[[], Coroutine[Any, Any, object]]) -> float:
    """Seconds that the work takes."""
    started = time.perf_counter()
    await work()
    return time.perf_counter() - started


def report(lengths: list[Length], out: Path) -> None:
    """The figures as JSON and as a plot, and a few lines for a person."""
    lines = {"device": str(mx.default_device()), "lengths": [length.figures() for length in lengths]}
    figures = save("wake", lines, out)
    plot(figures, out / "wake.png")
    head = f"{'tokens':>7} {'state MiB':>10} {'cold s':>8} {'woken s':>8} {'ratio':>7}"
    print(f"{head}   wake / mlx-lm load   sleep / write+fsync")
    for each in figures["lengths"]:
        seconds = each["seconds"]
        print(
            f"{each['tokens']:>7} {each['state_bytes'] / _MIB:>10.1f} {seconds['cold_first_token']['median']:>8.3f} "
            f"{seconds['woken_first_token']['median']:>8.3f} {each['cold_over_woken']['median']:>7.1f}"
            f"   {each['wake_speed_over_mlx_lm_load']['median']:>18.2f}   "
            f"{each['sleep_speed_over_plain_write']['median']:>19.2f}"
        )


def plot(figures: dict[str, Any], path: Path) -> None:
    """Time to first token over the length of the context, woken beside read again."""
    with plotted(path, figures, f"Demo model on {figures['device']}") as axes:
        for name, label, colour in (
            ("cold_first_token", "read again", "tab:red"),
            ("woken_first_token", "woken, verified", "tab:blue"),
        ):
            tokens = [each["tokens"] for each in figures["lengths"]]
            seconds = [each["seconds"][name] for each in figures["lengths"]]
            lowest, highest = [each["lowest"] for each in seconds], [each["highest"] for each in seconds]
            axes.plot(tokens, [each["median"] for each in seconds], "o-", label=label, color=colour)
            axes.fill_between(tokens, lowest, highest, alpha=0.2, color=colour)
        axes.set(xlabel="tokens of context", ylabel="seconds to the first token", yscale="log", xscale="log")
        axes.legend()


def main() -> None:
    """Measure and report."""
    parser = parser_for(__doc__, ROUNDS)
    parser.add_argument("--lengths", type=int, nargs="+", help="tokens of context")
    options = parser.parse_args()
    asked = sorted(options.lengths or (QUICK_LENGTHS if options.quick else LENGTHS))
    lengths = asyncio.run(measure(tuple(asked), rounds_of(options), options.folder))
    report(lengths, options.out)
    medians = [statistics.median(round_.cold_first_token for round_ in length.rounds) for length in lengths]
    print(f"longest context read in {medians[-1]:.2f} s; figures and plot in {options.out}")


if __name__ == "__main__":
    main()
