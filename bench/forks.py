"""What a base and a hundred forks of it take on the disk.

A base of 4,096 tokens and 100 sessions that each go on from it with 200 tokens of their own, in a store of their own
for each way of handing them over:

- reused: each fork names the base's blocks as already durable;
- whole: each fork hands in all of its blocks, as a process that knows nothing of the base does, and the store finds
  out for itself what it has.

Beside them, from the sizes of the raw state: one base and a hundred tails, and a hundred whole copies. What the disk
gives to a file (its blocks) is counted, not only its length; the index is counted apart. Every fork is then read back
and compared with what was handed in.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from figures import OURS, parser_for, plotted, save
from machine import spread
from synthetic import IDENTITY, QWEN3_06B, QWEN3_THIN, CacheMemory, Shape, demo_shape, random_ledger, random_memory
from torpor.memvid.format.blocks import BLOCK_TOKENS
from torpor.memvid.format.records import Receipt
from torpor.memvid.store import Store, VersionDraft
from torpor.memvid.uri import SessionUri

WAYS = ("reused", "whole")
SHAPES = {"demo": demo_shape(), "thin": QWEN3_THIN, "qwen": QWEN3_06B}
_SECTOR = 512  # unit of st_blocks, whatever the file system's own is
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Plan:
    """How many forks, of what."""

    shape: Shape
    base_tokens: int
    own_tokens: int
    forks: int

    def state_bytes(self, tokens: int) -> int:
        """Raw state of a session of so many tokens: its spans and the record at its end."""
        return tokens * self.shape.token_bytes + sum(spec.size_bytes for spec in self.shape.state_slots())

    @property
    def base_and_tails(self) -> int:
        """Raw state, each token of it once. A fork needs its own copy of the base's last block if that is not full."""
        tail = self.base_tokens % BLOCK_TOKENS + self.own_tokens
        return self.state_bytes(self.base_tokens) + self.forks * self.state_bytes(tail)

    @property
    def copies(self) -> int:
        """Raw state of the base and of each fork, whole."""
        return self.state_bytes(self.base_tokens) + self.forks * self.state_bytes(self.base_tokens + self.own_tokens)


def measure(plan: Plan, folder: Path | None) -> dict[str, dict[str, Any]]:
    """Both ways; for each what its store takes, and how long a fork's sleep took."""
    results = {}
    memory = random_memory(plan.shape)
    for way in WAYS:
        with tempfile.TemporaryDirectory(prefix="torpor-bench-", dir=folder) as place:
            with Store.open(Path(place) / "store", writable=True) as store:
                seconds, handed_in = _fork_all(store, plan, memory, way)
                _require_awake(store, plan, memory)
            disk = _disk(Path(place) / "store")
            results[way] = {"sleep_seconds": spread(seconds), "blocks_handed_in": handed_in, **disk}
    return results


def _fork_all(store: Store, plan: Plan, memory: CacheMemory, way: str) -> tuple[list[float], int]:
    """Seconds of each fork's sleep; how many blocks were handed in, the base's included."""
    ledger = random_ledger(plan.shape, plan.base_tokens, 0)
    base, handed_in = _write(store, SessionUri("bench", "base"), memory, ledger, None, way)
    seconds = []
    for number in range(1, plan.forks + 1):
        own = ledger + random_ledger(plan.shape, plan.own_tokens, number)
        started = time.perf_counter()
        _, blocks = _write(store, SessionUri("bench", f"fork-{number}"), memory, own, base, way)
        seconds.append(time.perf_counter() - started)
        handed_in += blocks
    return seconds, handed_in


def _write(
    store: Store, uri: SessionUri, memory: CacheMemory, ledger: bytes, base: Receipt | None, way: str
) -> tuple[Receipt, int]:
    full = [entry for entry in (base.entries if base else ()) if entry.token_count == BLOCK_TOKENS]
    reused = tuple(full) if way == "reused" else ()
    drafts = list(memory.drafts(ledger, first=len(reused) * BLOCK_TOKENS))
    receipt = store.write_bundle(
        VersionDraft(
            uri=uri,
            identity=IDENTITY,
            parent=base.bundle_id if base else None,
            reused=reused,
            blocks=drafts,
            session={},
            block_tokens=len(ledger) // 4,
        )
    )
    return receipt, len(drafts)


def _require_awake(store: Store, plan: Plan, memory: CacheMemory) -> None:
    """Little on the disk is worth nothing if a fork does not come back."""
    base = random_ledger(plan.shape, plan.base_tokens, 0)
    for number in range(1, plan.forks + 1):
        with store.open_session(SessionUri("bench", f"fork-{number}")) as reader:
            assert reader.tokens() == base + random_ledger(plan.shape, plan.own_tokens, number)
            for entry in reader.entries:
                runs = _runs(memory, entry.kind, entry.start, entry.token_count)
                for slot, expected in enumerate(runs):
                    assert reader.read_slot(entry, slot) == b"".join(expected)


def _runs(memory: CacheMemory, kind: str, start: int, count: int) -> list[list[memoryview]]:
    if kind == "state":
        return [[record] for record in memory.record]
    return [memory.runs(slot, start, count) for slot in range(2 * memory.shape.layers)]


def _disk(store: Path) -> dict[str, int]:
    """Bytes of packs and manifests by their lengths and by the disk's blocks, and of everything else in the store."""
    files = [path for path in store.rglob("*") if path.is_file()]
    sessions = [path.stat() for path in files if path.parent.name in ("packs", "versions")]
    others = [path.stat() for path in files if path.parent.name not in ("packs", "versions")]
    return {
        "files": len(sessions),
        "file_bytes": sum(each.st_size for each in sessions),
        "disk_bytes": sum(each.st_blocks for each in sessions) * _SECTOR,
        "other_disk_bytes": sum(each.st_blocks for each in others) * _SECTOR,
    }


def report(plan: Plan, ways: dict[str, dict[str, Any]], out: Path) -> None:
    """JSON, plot, and a table for a person."""
    ideal = plan.base_and_tails
    figures: dict[str, Any] = {
        "shape": plan.shape.name,
        "base_tokens": plan.base_tokens,
        "own_tokens": plan.own_tokens,
        "forks": plan.forks,
        "raw_base_and_tails_bytes": ideal,
        "raw_copies_bytes": plan.copies,
        "ways": {
            way: {
                **found,
                "disk_over_raw_base_and_tails": found["disk_bytes"] / ideal,
                "copies_over_disk": plan.copies / found["disk_bytes"],
            }
            for way, found in ways.items()
        },
    }
    document = save("forks", figures, out)
    rows = [("base and tails, raw", ideal)]
    rows += [(f"store, {way}", found["disk_bytes"]) for way, found in ways.items()]
    rows.append(("whole copies, raw", plan.copies))
    title = f"a base of {plan.base_tokens} tokens and {plan.forks} forks with {plan.own_tokens} more, {plan.shape.name}"
    least = max(found["copies_over_disk"] for found in figures["ways"].values())
    with plotted(out / "forks.png", document, f"{plan.forks} forks take {least:.0f} times less than copies") as axes:
        bars = axes.barh([name for name, _ in rows][::-1], [size / _MIB for _, size in rows][::-1], color=OURS)
        axes.bar_label(bars, fmt="%.0f", fontsize=8, padding=2)
        axes.set(xlabel=f"MiB on the disk: {title}")
    print(title)
    for name, size in rows:
        print(f"  {name:22} {size / _MIB:10.1f} MiB   {size / ideal:7.3f} of base and tails")
    for way, found in figures["ways"].items():
        print(
            f"  {way}: {found['files']} packs and manifests, {found['other_disk_bytes'] / _MIB:.2f} MiB beside them, "
            f"{1000 * found['sleep_seconds']['median']:.1f} ms a fork, "
            f"{found['copies_over_disk']:.1f} times less than copies"
        )


def main() -> None:
    """Measure and report."""
    parser = parser_for(__doc__, 1)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="demo", help="the demo model's unless told")
    parser.add_argument("--base", type=int, help="tokens of the base")
    parser.add_argument("--forks", type=int, help="how many forks")
    options = parser.parse_args()
    plan = Plan(
        SHAPES[options.shape],
        base_tokens=options.base or (512 if options.quick else 4096),
        own_tokens=200,
        forks=options.forks or (5 if options.quick else 100),
    )
    report(plan, measure(plan, options.folder), options.out)
    print(f"figures and plot in {options.out}")


if __name__ == "__main__":
    main()
