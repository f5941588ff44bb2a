"""The drift against the parent: which blocks are the same ones, and what differs in the others, against plain numpy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from torpor.memvid.format.records import Receipt
from torpor.snapshot.analysis import common_tokens, drift_from
from torpor.snapshot.stored_version import StoredVersion
from torpor.tests.snapshot.stored_rig import KEY_DIM, VALUE_DIM, Kept

import mlx.core as mx  # isort: skip  # after torpor, which chooses the BLAS
from mlx_lm.models import cache as caches  # isort: skip

MakeKept = Callable[..., Kept]


def plain() -> list[Any]:
    return [caches.KVCache(), caches.KVCache()]


def drift(session: Kept, first: Receipt, second: Receipt) -> dict[str, Any]:
    return drift_from(StoredVersion(session.open(second)), StoredVersion(session.open(first)))


def test_a_session_that_only_grew_has_all_its_full_blocks_and_no_difference(kept: MakeKept) -> None:
    session = kept(plain, slept=600)
    first = session.last
    session.read(200)
    found = drift(session, first, session.sleep())
    assert found["common_tokens"] == 600
    assert found["blocks"] == {"common": 3, "same": 2, "same_share": 0.666667}  # the third was not full
    assert [(each["path"], each["name"]) for each in found["arrays"]] == [
        ("0", "k"),
        ("0", "v"),
        ("1", "k"),
        ("1", "v"),
    ]
    assert {(each["max_abs"], each["relative_l2"]) for each in found["arrays"]} == {(0.0, 0.0)}
    assert found["parent"] == {
        "session": "torpor://default/agent",
        "version": 1,
        "bundle_id": first.bundle_id,
        "token_count": 600,
    }


def test_blocks_of_one_id_are_not_read(kept: MakeKept, monkeypatch: pytest.MonkeyPatch) -> None:
    session = kept(plain, slept=512)
    first = session.last
    session.read(40)
    second = StoredVersion(session.open(session.sleep()))
    monkeypatch.setattr(second, "piece", lambda *_: pytest.fail("it read a block that is the same"))
    assert drift_from(second, StoredVersion(session.open(first)))["blocks"]["same_share"] == 1.0


def test_the_difference_of_blocks_that_differ_is_that_of_their_common_tokens(kept: MakeKept) -> None:
    """The same tokens, computed otherwise: as after an adapter's last bits, or on another device."""
    session = kept(plain, slept=300)
    first = session.last
    session.state.caches[1].keys[:, 1, 270, 3] += 0.5
    session.state.caches[1].values[:, :, :256] *= 1.25
    session.read(200)
    found = drift(session, first, session.sleep(reuse=False))
    assert found["common_tokens"] == 300
    assert found["blocks"] == {"common": 2, "same": 0, "same_share": 0.0}
    by_name = {(each["path"], each["name"]): each for each in found["arrays"]}
    assert by_name["0", "k"]["relative_l2"] == 0.0
    keys, values = session.numbers(1, 0, 0, 300, KEY_DIM), session.numbers(1, 1, 0, 300, VALUE_DIM)
    assert by_name["1", "k"]["max_abs"] == pytest.approx(0.5, rel=1e-6)
    assert by_name["1", "k"]["relative_l2"] == pytest.approx(0.5 / np.linalg.norm(keys.astype(float)), rel=1e-5)
    changed = values[:, :256].astype(float) / 4
    assert by_name["1", "v"]["max_abs"] == pytest.approx(np.abs(changed).max(), rel=1e-5)
    share = np.linalg.norm(changed) / np.linalg.norm(values.astype(float))
    assert by_name["1", "v"]["relative_l2"] == pytest.approx(share, rel=1e-5)


def test_what_comes_after_another_token_is_not_compared(kept: MakeKept) -> None:
    session = kept(plain, slept=520)
    first = session.last
    session.state = kept(plain).state
    session.read(400)
    session.read(1, token=session.state.tokens[399])  # another token than the parent's at 400
    session.read(100)
    session.state.caches[0].keys[:, :, 400:] += 9.0
    found = drift(session, first, session.sleep(reuse=False))
    assert found["common_tokens"] == 400
    assert found["blocks"]["common"] == 2
    assert all(each["max_abs"] == 0.0 for each in found["arrays"])


@pytest.mark.parametrize(("mine", "theirs", "common"), [(256, 256, 256), (257, 256, 256), (10, 300, 10), (300, 10, 10)])
def test_common_tokens_end_with_the_shorter_ledger(kept: MakeKept, mine: int, theirs: int, common: int) -> None:
    one, other = kept(plain), kept(plain, salt=1, name="other")
    for session, count in ((one, mine), (other, theirs)):
        session.read(count)
        session.sleep()
    assert common_tokens(one.open(), other.open()) == common


def test_nothing_in_common_is_no_share_and_no_difference(kept: MakeKept) -> None:
    session = kept(plain, slept=20)
    first = session.last
    session.state = kept(plain).state
    session.read(20, token=7)
    found = drift(session, first, session.sleep(reuse=False))
    assert found["common_tokens"] == 0
    assert found["blocks"] == {"common": 0, "same": 0, "same_share": None}


def test_arrays_of_the_records_and_logits_are_compared_as_they_lie(kept: MakeKept) -> None:
    session = kept(lambda: [caches.ArraysCache(3), caches.RotatingKVCache(max_size=8)])
    for count in (8, 4):
        session.read(count)
    first = session.sleep()
    state, logits = session.state.caches[0][0], session.state.last_logits
    window = mx.array(session.state.caches[1].keys)
    session.read(1)
    found = drift(session, first, session.sleep())
    by_name = {(each["path"], each["name"]): each for each in found["arrays"]}
    assert not by_name["0", "a0"]["in_spans"]
    for told, old, new in (
        (by_name["0", "a0"], state, session.state.caches[0][0]),
        (found["logits"], logits, session.state.last_logits),
    ):
        before, after = (np.array(each).astype(float) for each in (old, new))
        assert told["relative_l2"] == pytest.approx(np.linalg.norm(after - before) / np.linalg.norm(before), rel=1e-5)
        assert told["max_abs"] == pytest.approx(np.abs(after - before).max(), rel=1e-5)
    same_rows = window.shape == session.state.caches[1].keys.shape
    assert (by_name["1", "k"]["relative_l2"] is not None) == same_rows


def test_what_the_parent_keeps_otherwise_is_told_with_a_reason(kept: MakeKept) -> None:
    session = kept(lambda: [caches.KVCache()], slept=20)
    first = session.last
    other = kept(lambda: [caches.QuantizedKVCache(group_size=32, bits=8), caches.KVCache()], name="other")
    other.read(20)
    found = drift(other, first, other.sleep())
    assert [each["why"] for each in found["arrays"]] == [
        "the parent keeps it as kv/1",
        "the parent keeps it as kv/1",
        "the parent has no such array",
        "the parent has no such array",
    ]
