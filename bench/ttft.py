"""Time to the first token of a session that is woken, beside that of one that reads its context again.

- The demo model, through the daemon's own service: from the request to the first token, the model loaded, the bundle in
  the page cache. Round by round: a new session that reads the tokens, and the sleeping one woken.
- The shape of Qwen3-0.6B, random weights (float32; on a GPU bfloat16): the network reads in the daemon's chunks, the
  last token alone, and the state is slept at each length on the way, so that one reading (minutes on a CPU) gives all
  lengths: the time to the first token at a length is all that was computed up to it. Woken, verified and by the same
  steps as the daemon, in several rounds; the logits that come back are compared with those that went. A GPU reads each
  length from its beginning, once before it is timed, and a wake there ends when a token was computed on the state.

Where the two lines cross is the shortest length from which on waking is faster at every length.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

# In this order: torpor chooses the BLAS that MLX, which is imported after it, will use.
# isort: off
from torpor.memvid.store import VersionDraft
from torpor.daemon.engine.generation import PREFILL_CHUNK_TOKENS
from torpor.daemon.api.events import WorkEvent
from torpor.daemon.api.events import TokenEvent
from torpor.daemon.options.serve_options import ServeOptions
from torpor.daemon.service import Service
from torpor.memvid.store import Store
from torpor.memvid.uri import SessionUri
from torpor.snapshot import restore
from torpor.snapshot.caches import arrays_of
from torpor.snapshot.capture import cut
from torpor.snapshot.layout import layout_of
from torpor.snapshot.state import LiveState, token_array
import mlx.core as mx
import numpy as np
from mlx_lm.models import qwen3
from mlx_lm.models.cache import make_prompt_cache
from figures import label_at_end, parser_for, plotted, rounds_of, save
from machine import spread
from model_states import IDENTITY
# isort: on

DEMO, QWEN3_06B = "demo model", "Qwen3-0.6B, random weights"
DEMO_LENGTHS = (16, 64, 256, 512, 1024, 2048, 4096, 7680)
QWEN3_LENGTHS = (16, 64, 256, 512, 1024, 2048, 4096, 8192)
QUICK_LENGTHS = (16, 300)
ROUNDS = 5
_MIB = 2**20
_SIZES: dict[str, Any] = {
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
}
_QUICK_SIZES = _SIZES | {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "vocab_size": 512}


@dataclass
class Length:
    """All rounds at one length; `state_bytes` is what a wake reads and verifies."""

    tokens: int
    state_bytes: int = 0
    cold: list[float] = field(default_factory=list)
    woken: list[float] = field(default_factory=list)

    def figures(self) -> dict[str, Any]:
        """Medians with spread. The ratio is taken round by round where both were, else over the one reading."""
        pairs = (
            zip(self.cold, self.woken, strict=True) if len(self.cold) > 1 else ((self.cold[0], w) for w in self.woken)
        )
        return {
            "tokens": self.tokens,
            "state_bytes": self.state_bytes,
            "seconds": {"read_again": spread(self.cold), "woken": spread(self.woken)},
            "read_again_over_woken": spread([cold / woken for cold, woken in pairs]),
        }


# --- the demo model, through the daemon


class FirstToken:
    """An event sink that notes when the first token came."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.seconds: float | None = None

    def __call__(self, event: WorkEvent) -> None:
        if self.seconds is None and isinstance(event, TokenEvent):
            self.seconds = time.perf_counter() - self.started

    def require(self) -> float:
        """The seconds; a generation that gave no token is an error of the benchmark."""
        assert self.seconds is not None
        return self.seconds


def ignore(_event: object) -> None:
    """For events that are not measured."""


async def measure_demo(lengths: Sequence[int], rounds: int, parent: Path | None) -> list[Length]:
    """On a store of its own in `parent` (the folder for temporary files, unless told)."""
    with tempfile.TemporaryDirectory(prefix="torpor-bench-", dir=parent) as folder:
        service = await Service.open(ServeOptions(store=Path(folder) / "store", prefix_reuse="off", scrub_rate=0))
        try:
            tokens = document(service, max(lengths))
            return [await _demo_length(service, tokens[:each], rounds) for each in lengths]
        finally:
            await service.close()


def document(service: Service, count: int) -> list[int]:
    """The first tokens of a text that is on every machine with Python."""
    import argparse as source
    import inspect

    tokens = service._parts.models.shelf.place(None).model.encode(inspect.getsource(source), opening=True)
    return (tokens * -(-count // len(tokens)))[:count]


async def _demo_length(service: Service, tokens: list[int], rounds: int) -> Length:
    length = Length(len(tokens))
    await service.create(session="sleeper")
    await service.append(session="sleeper", tokens=tokens, on_event=ignore)
    await service.sleep(session="sleeper", on_event=ignore)
    for _ in range(rounds):
        cold = FirstToken()
        await service.create(session="cold")
        await service.append(session="cold", tokens=tokens, on_event=ignore)
        await service.generate(session="cold", max_tokens=1, on_event=cold)
        length.cold.append(cold.require())
        await service.delete(session="cold")
        woken = FirstToken()
        report = await service.wake(session="sleeper", version=1, on_event=ignore)
        await service.generate(session="sleeper", max_tokens=1, on_event=woken)
        length.woken.append(woken.require())
        length.state_bytes = report.bytes_read
        await service.sleep(session="sleeper", on_event=ignore)
    await service.delete(session="sleeper")
    return length


# --- the shape of Qwen3-0.6B


def measure_qwen3(sizes: dict[str, Any], lengths: Sequence[int], rounds: int, parent: Path | None) -> list[Length]:
    """Each length read, slept and woken."""
    kind = Reading if mx.default_device() == mx.Device(mx.cpu) else WarmReading
    network = qwen3.Model(
        qwen3.ModelArgs(
            model_type="qwen3",
            rms_norm_eps=1e-6,
            max_position_embeddings=40_960,
            tie_word_embeddings=True,
            rope_theta=1e6,
            **sizes,
        )
    )
    network.set_dtype(kind.dtype)
    mx.eval(network.parameters())
    measured = []
    with (
        tempfile.TemporaryDirectory(prefix="torpor-bench-", dir=parent) as folder,
        Store.open(Path(folder) / "store", writable=True) as store,
        ThreadPoolExecutor(2) as pool,
    ):
        reading = kind(network, store, sizes["vocab_size"])
        for tokens in lengths:
            length = Length(tokens, cold=reading.read_to(tokens, rounds))
            reading.sleep()
            for _ in range(rounds):
                length.state_bytes, seconds = reading.wake(pool)
                length.woken.append(seconds)
            measured.append(length)
    return measured


class Reading:
    """One session that reads on and is slept at times: a CPU takes minutes for it."""

    dtype = mx.float32

    def __init__(self, network: Any, store: Store, vocabulary: int) -> None:
        self._network, self._store, self._vocabulary = network, store, vocabulary
        self._begin()

    def read_to(self, tokens: int, rounds: int) -> list[float]:
        """The seconds of each reading of so many tokens: there is one."""
        return [self._go_on_to(tokens)]

    def _begin(self) -> None:
        self._state = LiveState(token_array(), make_prompt_cache(self._network), None, mx.random.key(0))
        self._random = np.random.default_rng(0)
        self._seconds = 0.0

    def _go_on_to(self, tokens: int) -> float:
        """Read on to this length; seconds of all that was read, and of the draw of a first token."""
        state, held = self._state, len(self._state.tokens)
        ids = self._random.integers(0, self._vocabulary, tokens - held, dtype="<u4").tolist()
        started = time.perf_counter()
        for start in range(0, len(ids) - 1, PREFILL_CHUNK_TOKENS):
            chunk = ids[start : min(start + PREFILL_CHUNK_TOKENS, len(ids) - 1)]
            self._network.model(mx.array([chunk]), cache=state.caches)
            state.passes.add(len(chunk))
            mx.eval(arrays_of(state.caches))
        state.last_logits = self._network(mx.array([ids[-1:]]), cache=state.caches)[0, -1].astype(mx.float32)
        state.passes.add(1)
        draw(state)
        self._seconds += time.perf_counter() - started
        state.tokens.extend(ids)
        return self._seconds

    def sleep(self) -> None:
        """Keep the state as a session of its own."""
        snapshot = cut(self._state, self._layout(), durable=(), unchanged_tokens=0)
        self._store.write_bundle(
            VersionDraft(
                uri=self._uri(),
                identity=IDENTITY,
                parent=None,
                reused=(),
                blocks=snapshot.drafts(),
                session={},
                block_tokens=snapshot.token_count,
            )
        )

    def wake(self, pool: ThreadPoolExecutor) -> tuple[int, float]:
        """(bytes read, seconds until a first token is drawn). What comes back is what went."""
        layout = self._layout()
        started = time.perf_counter()
        with self._store.open_session(self._uri()) as reader:
            plan = restore.plan_wake(reader, IDENTITY, layout, model="bench", context_tokens=1 << 30)
            filling = restore.allocate(plan)
            filling.run(reader, pool)
            woken = filling.assemble(make_prompt_cache(self._network), mx.random.key(0))
            draw(woken)
            self._use(woken)
        seconds = time.perf_counter() - started
        assert mx.array_equal(woken.last_logits, self._state.last_logits).item()
        return plan.read_bytes, seconds

    def _use(self, woken: LiveState) -> None:
        """What a wake is timed with, beyond the draw of a first token."""

    def _layout(self) -> Any:
        return layout_of(self._state.caches, self._vocabulary)

    def _uri(self) -> SessionUri:
        return SessionUri("bench", f"at-{len(self._state.tokens)}")


class WarmReading(Reading):
    """On a GPU: a session that begins anew for each length, once before it is timed, as the kernels are compiled then.
    The GPU has what was woken once it has computed on it."""

    dtype = mx.bfloat16

    def read_to(self, tokens: int, rounds: int) -> list[float]:
        seconds = []
        for _ in range(rounds + 1):
            self._begin()
            seconds.append(self._go_on_to(tokens))
        return seconds[1:]

    def _use(self, woken: LiveState) -> None:
        mx.eval(self._network(mx.array([woken.tokens[-1:].tolist()]), cache=woken.caches))


def draw(state: LiveState) -> int:
    """The first token, by the state's own logits and key."""
    return int(mx.random.categorical(state.last_logits, key=state.random_key).item())


# --- report


def crossing(lengths: list[dict[str, Any]]) -> int | None:
    """The shortest length from which on waking is faster, by the medians; None where it never is."""
    found = None
    for each in reversed(lengths):
        if each["seconds"]["woken"]["median"] >= each["seconds"]["read_again"]["median"]:
            break
        found = each["tokens"]
    return found


def report(measured: dict[str, list[Length]], out: Path) -> None:
    """The figures as JSON and as a plot, and a few lines for a person."""
    models = {name: [length.figures() for length in lengths] for name, lengths in measured.items()}
    crossings = {name: crossing(lengths) for name, lengths in models.items()}
    lines = {"device": str(mx.default_device()), "models": models, "woken_is_faster_from": crossings}
    figures = save("ttft", lines, out)
    ratios = [lengths[-1]["read_again_over_woken"]["median"] for lengths in models.values()]
    tokens = max(lengths[-1]["tokens"] for lengths in models.values())
    title = f"Woken, the first token comes {min(ratios):.0f} to {max(ratios):.0f} times sooner at {tokens:,} tokens"
    with plotted(out / "ttft.png", figures, title, 10) as axes:
        for colour, (name, lengths) in zip(("tab:blue", "tab:red"), models.items(), strict=False):
            tokens = [each["tokens"] for each in lengths]
            for what, style in (("read_again", "o--"), ("woken", "o-")):
                taken = [each["seconds"][what] for each in lengths]
                medians = [each["median"] for each in taken]
                axes.plot(tokens, medians, style, color=colour)
                label_at_end(axes, tokens, medians, f"{name}, {what.replace('_', ' ')}", colour)
                lowest, highest = [each["lowest"] for each in taken], [each["highest"] for each in taken]
                axes.fill_between(tokens, lowest, highest, alpha=0.2, color=colour)
        axes.set(xlabel="tokens of context", ylabel="seconds to the first token", yscale="log", xscale="log")
        axes.margins(x=0.25)
    for name, lengths in models.items():
        print(f"== {name}; waking is faster from {crossings[name]} tokens on")
        for each in lengths:
            cold, woken = each["seconds"]["read_again"], each["seconds"]["woken"]
            ratio = each["read_again_over_woken"]
            print(
                f"{each['tokens']:>7} tokens {each['state_bytes'] / _MIB:>8.1f} MiB"
                f"   read again {cold['median']:>8.3f} s ({cold['runs']} runs)"
                f"   woken {woken['median']:>7.3f} s ({woken['runs']} runs)"
                f"   ratio {ratio['median']:>7.1f} ({ratio['lowest']:.1f} to {ratio['highest']:.1f})"
            )


def main() -> None:
    """Measure and report."""
    parser = parser_for(__doc__, ROUNDS)
    parser.add_argument("--models", nargs="+", choices=("demo", "qwen3"), default=["demo", "qwen3"])
    parser.add_argument("--longest", type=int, help="leave out what is longer")
    options = parser.parse_args()
    rounds, measured = rounds_of(options), {}

    def wanted(lengths: Sequence[int]) -> list[int]:
        chosen = QUICK_LENGTHS if options.quick else lengths
        return [each for each in chosen if each <= (options.longest or each)]

    if "demo" in options.models:
        measured[DEMO] = asyncio.run(measure_demo(wanted(DEMO_LENGTHS), rounds, options.folder))
    if "qwen3" in options.models:
        sizes = _QUICK_SIZES if options.quick else _SIZES
        measured[QWEN3_06B] = measure_qwen3(sizes, wanted(QWEN3_LENGTHS), rounds, options.folder)
    report(measured, options.out)
    print(f"figures and plot in {options.out}")


if __name__ == "__main__":
    main()
