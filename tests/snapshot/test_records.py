"""A state record that this version did not write is refused by what is wrong with it, before memory is taken."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from torpor.memvid.format.blocks import BlockDraft, SlotDraft, SlotSpec
from torpor.snapshot import restore
from torpor.snapshot.capture import cut
from torpor.snapshot.errors import LayoutMismatch, MalformedSnapshot, SnapshotError, UnsupportedCache
from torpor.tests.snapshot.growers import GROWERS, Run
from torpor.tests.snapshot.stored_rig import Shelf

import mlx.core as mx  # isort: skip  # after torpor, which chooses the BLAS

Slots = list[tuple[SlotSpec, bytes]]
KINDS = ["rotating", "chunked", "arrays", "pooled", "list"]


@pytest.fixture
def wake_with(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Callable[[Slots], Slots]], None]:
    """Plans a wake of a session whose state record was changed before it was written; no memory may be taken."""

    def plan(kind: str, change: Callable[[Slots], Slots]) -> None:
        run = Run(GROWERS[kind], mx.float32)
        run.read(20)
        run.read(1)
        snapshot = cut(run.state, run.layout(), durable=(), unchanged_tokens=0)
        *spans, state = snapshot.drafts()
        slots = change([(slot.spec, b"".join(bytes(each) for each in slot.buffers)) for slot in state.slots])
        made = [SlotDraft(spec, [memoryview(data)]) for spec, data in slots]
        record = BlockDraft(kind="state", start=21, tokens=b"", slots=made)
        shelf.write([*spans, record], 21)
        monkeypatch.setattr(restore.memory, "allocate", lambda *_: pytest.fail("memory was taken"))
        shelf.plan(run.layout())

    return plan


def index_of(slots: Slots, ending: str) -> int:
    return next(at for at, (spec, _) in enumerate(slots) if spec.name.endswith(ending))


def with_numbers(*numbers: int) -> Callable[[Slots], Slots]:
    def change(slots: Slots) -> Slots:
        at = index_of(slots, ".n")
        data = array("q", numbers).tobytes()
        slots[at] = (replace(slots[at][0], shape=(len(numbers),)), data)
        return slots

    return change


@pytest.mark.parametrize("kind", KINDS)
def test_a_record_that_is_as_it_was_written_is_taken(wake_with: Any, kind: str) -> None:
    wake_with(kind, lambda slots: slots)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", KINDS)
def test_a_record_without_any_one_of_its_slots_is_refused(wake_with: Any, kind: str) -> None:
    counts: list[int] = []
    wake_with(kind, lambda slots: counts.append(len(slots)) or slots)
    for gone in range(counts[0]):
        with pytest.raises(SnapshotError):
            wake_with(kind, lambda slots, gone=gone: [slot for at, slot in enumerate(slots) if at != gone])


BIG = 2**63 - 1


@pytest.mark.parametrize(
    ("kind", "numbers"),
    [
        ("rotating", (21, 17)),
        ("rotating", (21, -1)),
        ("rotating", (20, 5)),
        ("rotating", (BIG, BIG)),
        ("rotating", (-BIG, 0)),
        ("rotating", (21,)),
        ("rotating", (21, 1, 1)),
        ("chunked", (21, 22)),
        ("chunked", (21, -1)),
        ("chunked", (20, 0)),
        ("chunked", (BIG, BIG)),
        ("arrays", (1, 1, 1, 1)),
        ("arrays", (0, 0, 0, 0)),
        ("arrays", (2, 0, 1, 1)),
        ("arrays", (-1, 0, 1, 1)),
        ("pooled", (20, 1, 1, 0, 1, 0)),
        ("pooled", (21, 0, 0, 0, 0, 0)),
        ("pooled", (21, 1, 1, 0, 1, 2)),
    ],
)
def test_numbers_that_do_not_fit_the_arrays_are_refused(wake_with: Any, kind: str, numbers: tuple[int, ...]) -> None:
    with pytest.raises((MalformedSnapshot, LayoutMismatch)):
        wake_with(kind, with_numbers(*numbers))


@pytest.mark.parametrize("kind", ["rotating", "chunked"])
def test_rows_that_no_window_has_are_refused(wake_with: Any, kind: str) -> None:
    def longer(slots: Slots) -> Slots:
        for name in (".k", ".v"):
            at = index_of(slots, name)
            spec = replace(slots[at][0], shape=(1, 2, 500, slots[at][0].shape[-1]))
            slots[at] = (spec, bytes(spec.size_bytes))
        return slots

    with pytest.raises(MalformedSnapshot):
        wake_with(kind, longer)


@pytest.mark.parametrize("kind", KINDS)
def test_a_slot_too_many_is_refused(wake_with: Any, kind: str) -> None:
    with pytest.raises(SnapshotError):
        wake_with(kind, lambda slots: [*slots, (replace(slots[-1][0], name="2.zz"), slots[-1][1])])


def test_an_array_of_another_type_or_rank_is_refused(wake_with: Any) -> None:
    def halved(slots: Slots) -> Slots:
        at = index_of(slots, ".k")
        spec, data = slots[at]
        slots[at] = (replace(spec, dtype="float16"), data[: len(data) // 2])
        return slots

    with pytest.raises(LayoutMismatch):
        wake_with("rotating", halved)


def test_a_kind_of_a_later_version_is_refused_by_its_name(wake_with: Any) -> None:
    def later(slots: Slots) -> Slots:
        at = index_of(slots, ".k")
        slots[at] = (replace(slots[at][0], kind="ring.k/9"), slots[at][1])
        return slots

    with pytest.raises(UnsupportedCache, match="ring/9"):
        wake_with("rotating", later)


@pytest.mark.parametrize(
    "runs", [(20, 1), (22, 1), (1, 2**32 - 1), (2**32 - 1, 2**32 - 1), (0, 5), (5, 0), (7, 3, 1, 1)]
)
def test_passes_that_do_not_read_the_ledger_are_refused(wake_with: Any, runs: tuple[int, ...]) -> None:
    def claim(slots: Slots) -> Slots:
        at = index_of(slots, "passes")
        data = array("I", runs).tobytes()
        slots[at] = (replace(slots[at][0], shape=(len(runs) // 2, 2)), data)
        return slots

    with pytest.raises(MalformedSnapshot, match="passes"):
        wake_with("rotating", claim)


@pytest.mark.parametrize("rows", [65, 10**6])
def test_an_axis_that_was_counted_once_has_a_limit(wake_with: Any, rows: int) -> None:
    """What would make the model compute with rows that no model keeps."""

    def longer(slots: Slots) -> Slots:
        at = index_of(slots, ".a3")
        spec = replace(slots[at][0], shape=(1, rows))
        slots[at] = (spec, bytes(spec.size_bytes))
        return slots

    with pytest.raises(MalformedSnapshot, match="at most"):
        wake_with("arrays", longer)


def test_an_array_that_the_cache_never_makes_is_refused(wake_with: Any) -> None:
    def added(slots: Slots) -> Slots:
        slots = with_numbers(1, 1, 1, 1)(slots)
        at = index_of(slots, ".a2")
        return [*slots[:at], (replace(slots[at][0], name="0.a1", kind="arrays.a1/1"), slots[at][1]), *slots[at:]]

    with pytest.raises(MalformedSnapshot, match="does not have"):
        wake_with("arrays", added)


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        ("float64", (1, 2, 3)),
        ("complex64", (1, 2, 3)),
        ("float32", (1, 2**32, 0)),
        ("float32", ()),
        ("float32", (2, 1, 8)),
        ("float32", (1, 1, 1, 8)),
    ],
)
def test_an_array_that_can_come_late_is_still_one_that_the_cache_can_make(
    wake_with: Any, dtype: str, shape: tuple[int, ...]
) -> None:
    def late(slots: Slots) -> Slots:
        slots = with_numbers(21, 1, 1, 1, 1, 0)(slots)
        at = index_of(slots, ".pending_kv")
        spec = SlotSpec("0.index_k", "pooled.index_k/1", dtype, shape)
        return [*slots[:at], (spec, bytes(spec.size_bytes)), *slots[at:]]

    with pytest.raises(MalformedSnapshot):
        wake_with("pooled", late)
