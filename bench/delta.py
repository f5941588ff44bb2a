"""What a sleep of 200 more tokens costs, over the length of the history that is durable already.

Three sessions with 1 k, 8 k and 64 k tokens of history, each put to sleep in a first bundle and in several deltas after
it, so that the history lies in several packs. Then, round by round and interleaved: each goes on by 200 tokens and
sleeps, beside `writev` and flush of as many bytes into one file of the same folder. As in a real session, the last
block is written again while it is not full, so a sleep writes 200 to 455 tokens; the sessions have the same remainders
in each round, so that ratios between them are of like with like.

The shape is four of the 28 layers of Qwen3-0.6B, for all three, so that 64 k tokens are 1 GiB and not 7.5.
Blocks hold the same random bytes under different tokens; the store sees different blocks.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import plain
from figures import OURS, PEER, label_at_end, parser_for, plotted, rounds_of, save
from machine import spread
from parts import Parts, timed_parts
from synthetic import IDENTITY, QWEN3_THIN, Shape, demo_shape, random_ledger, random_memory
from torpor.memvid.format.blocks import BLOCK_TOKENS, TOKEN_BYTES, BlockEntry
from torpor.memvid.format.records import Receipt
from torpor.memvid.store import Store, VersionDraft
from torpor.memvid.uri import SessionUri

HISTORIES = (1024, 8192, 65536)
QUICK_HISTORIES = (1024, 4096)
STEP = 200
EARLIER = 4
ROUNDS = 15
_KIB = 1024


@dataclass
class Sleeper:
    """A session that goes on by a step and sleeps, again and again; figures of the sleeps that counted."""

    store: Store
    history: int
    shape: Shape
    seconds: list[float] = field(default_factory=list)
    plain_seconds: list[float] = field(default_factory=list)
    bytes_written: list[int] = field(default_factory=list)
    packs: list[int] = field(default_factory=list)
    parts: Parts | None = None

    def __post_init__(self) -> None:
        self._uri = SessionUri("bench", f"history-{self.history}")
        self._memory = random_memory(self.shape)
        self._ledger = b""
        self._last: Receipt | None = None
        self._go_on(self.history - EARLIER * STEP)
        for _ in range(EARLIER):
            self._go_on(STEP)

    def sleep(self) -> None:
        """Measured: one step more."""
        started = time.perf_counter()
        receipt = self._go_on(STEP)
        self.seconds.append(time.perf_counter() - started)
        self.bytes_written.append(receipt.bytes_written)
        self.packs.append(self.store.count_packs(receipt.entries))

    def sleep_in_parts(self) -> None:
        """One step more, taken apart instead of timed."""
        with timed_parts() as parts:
            self._go_on(STEP)
        self.parts = parts

    def write_plain(self, path: Path) -> None:
        """As many bytes as the last sleep wrote, in one file."""
        data = memoryview(np.random.default_rng(len(self.seconds)).bytes(self.bytes_written[-1]))
        seconds, _ = plain.write_and_flush(path, [[data]])
        self.plain_seconds.append(seconds)
        path.unlink()

    def _go_on(self, tokens: int) -> Receipt:
        self._ledger += random_ledger(self.shape, tokens, self.history, len(self._ledger))
        reused = _durable(self._last)
        self._last = self.store.write_bundle(
            VersionDraft(
                uri=self._uri,
                identity=IDENTITY,
                parent=self._last.bundle_id if self._last else None,
                reused=reused,
                blocks=self._memory.drafts(self._ledger, first=len(reused) * BLOCK_TOKENS),
                session={},
                block_tokens=len(self._ledger) // TOKEN_BYTES,
            )
        )
        return self._last


def _durable(receipt: Receipt | None) -> tuple[BlockEntry, ...]:
    """The blocks of the last sleep that the next one refers to: the full ones."""
    entries = receipt.entries if receipt else ()
    return tuple(entry for entry in entries if entry.kind == "span" and entry.token_count == BLOCK_TOKENS)


def measure(histories: tuple[int, ...], rounds: int, shape: Shape, folder: Path | None) -> list[Sleeper]:
    """All rounds, in one store."""
    with (
        tempfile.TemporaryDirectory(prefix="torpor-bench-", dir=folder) as place,
        Store.open(Path(place) / "store", writable=True) as store,
    ):
        sleepers = [Sleeper(store, history, shape) for history in histories]
        for each in sleepers:
            each.sleep_in_parts()
        for number in range(rounds):
            for each in sleepers if number % 2 else reversed(sleepers):
                plain.settle()
                each.sleep()
                plain.settle()
                each.write_plain(Path(place) / "plain")
    return sleepers


def figures_of(each: Sleeper, first: Sleeper) -> dict[str, Any]:
    """Medians with spread; ratios to the shortest history and to the plain write, round by round."""
    return {
        "history_tokens": each.history,
        "packs_of_the_history": spread(each.packs),
        "seconds": spread(each.seconds),
        "bytes_written": spread(each.bytes_written),
        "plain_seconds": spread(each.plain_seconds),
        "time_over_shortest": spread(_ratios(each.seconds, first.seconds)),
        "bytes_over_shortest": spread(_ratios(each.bytes_written, first.bytes_written)),
        "time_over_plain": spread(_ratios(each.seconds, each.plain_seconds)),
        "parts": each.parts.as_data() if each.parts else None,
    }


def _ratios(values: list[Any], others: list[Any]) -> list[float]:
    return [value / other for value, other in zip(values, others, strict=True)]


def report(sleepers: list[Sleeper], shape: Shape, out: Path) -> None:
    """JSON, plot, and a table for a person."""
    histories = [figures_of(each, sleepers[0]) for each in sleepers]
    document = save("delta", {"shape": shape.name, "step_tokens": STEP, "histories": histories}, out)
    title = f"A sleep of {STEP} new tokens takes the same time, however long the history ({shape.name})"
    with plotted(out / "delta.png", document, title, 9) as axes:
        tokens = [each["history_tokens"] for each in histories]
        for name, label, colour in (
            ("seconds", "sleep, read back", OURS),
            ("plain_seconds", "plain write and flush", PEER),
        ):
            values = [[1000 * each[name][which] for each in histories] for which in ("median", "lowest", "highest")]
            axes.plot(tokens, values[0], "o-", color=colour)
            label_at_end(axes, tokens, values[0], label, colour)
            axes.fill_between(tokens, values[1], values[2], alpha=0.2, color=colour)
        axes.set_xscale("log")
        axes.minorticks_off()
        axes.set_xticks(tokens, [f"{count:,}" for count in tokens])
        axes.set_ylim(bottom=0)
        axes.set(xlabel="tokens that were durable before", ylabel="milliseconds", xlim=(None, 8 * tokens[-1]))
    print(
        f"{'history':>8} {'packs':>8} {'KiB written':>12} {'sleep ms':>9} {'plain ms':>9} "
        f"{'time / first':>22} {'bytes / first':>14}"
    )
    for each in histories:
        ratio = each["time_over_shortest"]
        print(
            f"{each['history_tokens']:>8} {each['packs_of_the_history']['median']:>8.0f} "
            f"{each['bytes_written']['median'] / _KIB:>12.1f} {1000 * each['seconds']['median']:>9.2f} "
            f"{1000 * each['plain_seconds']['median']:>9.2f} "
            f"{ratio['median']:>8.2f} ({ratio['lowest']:.2f} to {ratio['highest']:.2f}) "
            f"{each['bytes_over_shortest']['median']:>14.4f}"
        )
    for sleeper in sleepers:
        if sleeper.parts is not None:
            print(
                f"  where the time of one goes at {sleeper.history} "
                f"({1000 * sleeper.parts.whole:.1f} ms with the clocks)"
            )
            print("\n".join(sleeper.parts.lines()))


def main() -> None:
    """Measure and report."""
    parser = parser_for(__doc__, ROUNDS)
    parser.add_argument("--histories", type=int, nargs="+", help="tokens of history, multiples of 256 above 800")
    options = parser.parse_args()
    histories = tuple(sorted(options.histories or (QUICK_HISTORIES if options.quick else HISTORIES)))
    shape = demo_shape() if options.quick else QWEN3_THIN
    report(measure(histories, rounds_of(options), shape, options.folder), shape, options.out)
    print(f"figures and plot in {options.out}")


if __name__ == "__main__":
    main()
