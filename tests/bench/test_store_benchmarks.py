"""The benchmarks of the store, in tiny: that they measure what they say, not how fast anything is."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torpor.memvid.store import Store, VersionDraft
from torpor.memvid.uri import SessionUri

ROOT = Path(__file__).resolve().parents[2]

sys.path.insert(0, str(ROOT / "bench"))
try:
    import delta
    import forks
    import parts
    import plain
    import scale
    import store
    import synthetic
finally:
    sys.path.remove(str(ROOT / "bench"))

SMALL = synthetic.Shape("small", layers=2, heads=2, dim=4, dtype="bfloat16", vocabulary=16)
PNG = b"\x89PNG"


def written(out: Path, name: str) -> dict[str, Any]:
    """The figures of a benchmark, after a look at its plot and at what must stand with all figures."""
    found: dict[str, Any] = json.loads((out / f"{name}.json").read_text(encoding="utf-8"))
    assert (out / f"{name}.png").read_bytes().startswith(PNG)
    assert found["benchmark"] == name
    assert {"processor", "cpu_count", "packages"} <= found["machine"].keys()
    return found


def sleep(opened: Store, memory: synthetic.CacheMemory, ledger: bytes) -> Any:
    return opened.write_bundle(
        VersionDraft(
            uri=SessionUri("bench", "one"),
            identity=synthetic.IDENTITY,
            parent=None,
            reused=(),
            blocks=memory.drafts(ledger),
            session={},
            token_count=len(ledger) // 4,
        )
    )


# --- the states


def test_the_shape_of_qwen3_has_the_bytes_a_token_that_the_documents_quote() -> None:
    assert synthetic.QWEN3_06B.token_bytes == 114_688


def test_the_demo_shape_is_that_of_the_model_in_the_package() -> None:
    shape = synthetic.demo_shape()
    config = json.loads((ROOT / "daemon" / "demo_model" / "config.json").read_text(encoding="utf-8"))
    assert (shape.layers, shape.heads, shape.dim) == (
        config["num_hidden_layers"],
        config["num_key_value_heads"],
        config["head_dim"],
    )


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


def test_a_block_is_cut_from_the_memory_of_each_layer_one_run_a_head() -> None:
    arrays = [np.random.default_rng(slot).integers(0, 255, (2, 512, 8), dtype="u1") for slot in range(4)]
    memory = synthetic.CacheMemory(SMALL, 512, [memoryview(array.tobytes()) for array in arrays], [])
    assert synthetic.blocks(0, 300) == [(0, 256), (256, 44)]
    for start, count in synthetic.blocks(0, 300):
        cut = b"".join(array[:, start : start + count].tobytes() for array in arrays)
        assert b"".join(memory.block_runs(start, count)) == cut
    assert memory.block_runs(512, 256) == memory.block_runs(0, 256)  # a longer session repeats it


def test_other_salts_give_other_tokens() -> None:
    ledgers = {synthetic.random_ledger(synthetic.QWEN3_06B, 32, *salt) for salt in ((), (1,), (2,), (1, 2))}
    assert len(ledgers) == 4


# --- plain system calls


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


# --- parts


def test_the_parts_of_a_sleep_are_within_the_whole_and_nothing_stays_wrapped(tmp_path: Path) -> None:
    before = (os.fsync, os.preadv, os.writev)
    memory, ledger = synthetic.random_memory(SMALL, 300), synthetic.random_ledger(SMALL, 300)
    with Store.open(tmp_path / "store", writable=True) as opened:
        with parts.timed_parts() as found:
            sleep(opened, memory, ledger)
        assert (os.fsync, os.preadv, os.writev) == before
        calls = dict(found.calls)
        sleep(opened, memory, synthetic.random_ledger(SMALL, 300, 1))
    assert found.calls == calls
    assert {"hash", "write", "flush", "later flushes", "index"} <= found.seconds.keys()
    own = sum(seconds for part, seconds in found.seconds.items() if not part.endswith("threads)"))
    assert 0 < own <= found.whole


# --- the four


@pytest.mark.one_in(1)
def test_store_measures_each_thing_in_each_round_beside_its_plain_peer(tmp_path: Path) -> None:
    results = store.measure([store.Case(SMALL, 300)], 2, tmp_path)
    store.report(results, tmp_path / "out")
    (case,) = written(tmp_path / "out", "store")["cases"]
    assert case["state_bytes"] == 300 * SMALL.token_bytes < case["file_bytes"]
    ways = {f"verified_{kind}_{threads}" for kind in ("warm", "fresh", "cold") for threads in (1, 2)}
    assert case["share_of_plain_speed"].keys() == {"sleep", *ways}
    assert all(share["runs"] == 2 and share["lowest"] > 0 for share in case["share_of_plain_speed"].values())
    assert [path.name for path in tmp_path.iterdir()] == ["out"]  # its stores are gone


@pytest.mark.one_in(2)
def test_delta_writes_no_more_behind_a_long_history_than_behind_a_short_one(tmp_path: Path) -> None:
    sleepers = delta.measure((1024, 2048), 3, synthetic.QWEN3_THIN, tmp_path)
    delta.report(sleepers, synthetic.QWEN3_THIN, tmp_path / "out")
    short, long = written(tmp_path / "out", "delta")["histories"]
    assert short["bytes_over_shortest"]["median"] == 1
    assert long["bytes_over_shortest"]["highest"] < 1.01
    assert long["packs_of_the_history"]["lowest"] > delta.EARLIER
    tokens = 455  # the most that 200 new tokens can make a sleep write
    assert long["bytes_written"]["highest"] < 1.25 * tokens * synthetic.QWEN3_THIN.token_bytes


def test_forks_take_one_base_and_their_tails_whether_they_name_their_base_or_hand_in_all(tmp_path: Path) -> None:
    plan = forks.Plan(synthetic.QWEN3_THIN, base_tokens=512, own_tokens=20, forks=4)
    forks.report(plan, forks.measure(plan, tmp_path), tmp_path / "out")
    found = written(tmp_path / "out", "forks")
    assert found["raw_copies_bytes"] > 2 * found["raw_base_and_tails_bytes"]
    for way in forks.WAYS:
        assert found["ways"][way]["files"] == 10, "a pack and a manifest each"
        assert 1 <= found["ways"][way]["file_bytes"] / found["raw_base_and_tails_bytes"] < 1.02
    # the base's two spans, each tail, each record at an end; and the base again with each fork
    assert {way: ways["blocks_handed_in"] for way, ways in found["ways"].items()} == {"reused": 11, "whole": 19}


def test_a_fork_of_a_base_that_ends_within_a_block_has_its_own_copy_of_that_block() -> None:
    even, odd = (forks.Plan(SMALL, base_tokens=tokens, own_tokens=200, forks=10) for tokens in (512, 513))
    assert odd.base_and_tails - even.base_and_tails == 11 * SMALL.token_bytes


@pytest.mark.one_in(3)
def test_scale_does_each_thing_in_a_process_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "store"
    making = scale.make_store(path, 3)
    with Store.open(path, writable=False) as opened:
        assert len(list(opened.iter_sessions())) == 3
        newest = opened.versions(scale.session_uri(2))[-1]
        assert newest.version == scale.VERSIONS
        with opened.open_session(newest.uri) as reader:
            assert opened.count_packs(reader.entries) == scale.VERSIONS
    results = scale.measure(path, 3, 1)
    figures = {"sessions": 3, "versions": 15, "making_seconds": making, "operations": scale.figures_of(results)}
    scale.report(figures, tmp_path / "out")
    operations = written(tmp_path / "out", "scale")["operations"]
    assert operations.keys() == scale.OPERATIONS.keys()
    assert all(found["peak_bytes"]["lowest"] >= found["peak_bytes_before"]["lowest"] for found in operations.values())
    with Store.open(path, writable=False) as opened:  # what was measured left it as it was
        assert len(opened.index.all_rows()) == 15
