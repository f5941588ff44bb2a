"""What the benchmarks of the store measure with: states that come back as they were, plain system calls, and parts."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torpor.snapshot  # noqa: F401  # chooses the BLAS before MLX is imported
from torpor.memvid.store import Store, VersionDraft
from torpor.memvid.uri import SessionUri

ROOT = Path(__file__).resolve().parents[2]

sys.path.insert(0, str(ROOT / "bench"))
try:
    import compression
    import parts
    import plain
    import synthetic
finally:
    sys.path.remove(str(ROOT / "bench"))

SMALL = synthetic.Shape("small", layers=2, heads=2, dim=4, dtype="bfloat16", vocabulary=16)


def sleep(opened: Store, memory: synthetic.CacheMemory, ledger: bytes) -> Any:
    return opened.write_bundle(
        VersionDraft(
            uri=SessionUri("bench", "one"),
            identity=synthetic.IDENTITY,
            parent=None,
            reused=(),
            blocks=memory.drafts(ledger),
            session={},
            block_tokens=len(ledger) // 4,
        )
    )


def test_the_shapes_are_those_of_the_models_that_the_documents_name() -> None:
    assert synthetic.QWEN3_06B.token_bytes == 114_688
    shape = synthetic.demo_shape()
    config = json.loads((ROOT / "daemon" / "demo_model" / "config.json").read_text(encoding="utf-8"))
    names = ("num_hidden_layers", "num_key_value_heads", "head_dim")
    assert (shape.layers, shape.heads, shape.dim) == tuple(config[name] for name in names)


def test_a_session_comes_back_from_the_store_as_the_memory_it_was_cut_from(tmp_path: Path) -> None:
    memory, ledger = synthetic.random_memory(SMALL, 300), synthetic.random_ledger(SMALL, 300)
    with Store.open(tmp_path / "store", writable=True) as opened:
        sleep(opened, memory, ledger)
        with opened.open_session(SessionUri("bench", "one")) as reader:
            assert reader.tokens() == ledger
            first, second, _ = reader.entries
            for entry in (first, second):
                for slot in range(4):
                    expected = b"".join(memory.runs(slot, entry.start, entry.token_count))
                    assert reader.read_slot(entry, slot) == expected


def test_plain_writes_and_reads_move_every_byte_however_many_buffers_there_are(tmp_path: Path) -> None:
    data = np.random.default_rng(0).bytes(3000)
    views = [memoryview(data)[at : at + 2] for at in range(0, 3000, 2)]  # more than one call takes
    whole, flush = plain.write_and_flush(tmp_path / "plain", [views, views[:1]])
    assert (tmp_path / "plain").read_bytes() == data + data[:2]
    assert 0 <= flush <= whole
    target = memoryview(bytearray(2000))
    fd = os.open(tmp_path / "plain", os.O_RDONLY)
    try:
        plain.read_at(fd, 1000, [target[at : at + 2] for at in range(0, 2000, 2)])
        assert target == data[1000:]
        with pytest.raises(EOFError):
            plain.read_at(fd, 2900, [target])
    finally:
        os.close(fd)


def test_the_parts_of_a_sleep_are_within_the_whole_and_nothing_stays_wrapped(tmp_path: Path) -> None:
    before = (os.fsync, os.preadv, os.writev)
    memory, ledger = synthetic.random_memory(SMALL, 300), synthetic.random_ledger(SMALL, 300)
    with Store.open(tmp_path / "store", writable=True) as opened:
        with parts.timed_parts() as found:
            sleep(opened, memory, ledger)
        assert (os.fsync, os.preadv, os.writev) == before
    assert {"hash", "write", "flush", "later flushes", "index"} <= found.seconds.keys()
    own = sum(seconds for part, seconds in found.seconds.items() if not part.endswith("threads)"))
    assert 0 < own <= found.whole


def test_a_codec_that_gives_back_anything_else_ends_the_benchmark() -> None:
    def restore(stored: bytes, target: bytearray, _dtype: str) -> None:
        target[:] = stored[:-1] + b"\0"

    liar = compression.Way("liar", lambda slot, _: slot[:-1] + b"\xff", restore)
    with pytest.raises(SystemExit, match="liar"):
        compression.measure(compression.Sample("zeros", "bfloat16", [b"\1" * 4000]), [liar], rounds=1)
