"""The plan of a repack: what goes, what is written anew, and in which order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from torpor.memvid.errors import InvalidPolicy
from torpor.memvid.format.layout import Frame
from torpor.memvid.maintenance.repack_plan import (
    CLEARING,
    PackView,
    RepackPolicy,
    Step,
    Uses,
    packs_to_join,
    plan_repack,
)
from torpor.memvid.uri import SessionUri
from torpor.memvid.writing.needs import Needed

A, B = SessionUri("default", "a"), SessionUri("default", "b")
SIZE, HEAD = 1024, 64


def block(number: int) -> bytes:
    return number.to_bytes(32, "big")


def pack(name: str, *numbers: int, heads: Sequence[int] = (), size: int = SIZE, **changes: Any) -> PackView:
    frames = {block(number): Frame(block(number), 64, size, HEAD) for number in numbers}
    stripped = {block(number): Frame(block(number), 64, HEAD, HEAD) for number in heads}
    total = size * len(frames) + HEAD * len(stripped) + 300
    return PackView(f"packs/{name}", total, frames, stripped, **changes)


def uses(of: dict[SessionUri, Sequence[Sequence[int]]], *, stripped: Sequence[int] = ()) -> Uses:
    chains = {uri: [list(map(block, chain)) for chain in its] for uri, its in of.items()}
    needed = frozenset(one for its in chains.values() for chain in its for one in chain)
    return Uses(Needed(needed, frozenset(map(block, stripped)), ()), chains)


def plan(packs: Sequence[PackView], needs: Uses, policy: RepackPolicy = RepackPolicy()) -> tuple[Step, ...]:
    return plan_repack(packs, needs, policy)


def shown(steps: Sequence[Step]) -> list[tuple[str, list[str], list[int]]]:
    return [
        (
            step.kind,
            [old.name.removeprefix("packs/") for old in step.olds],
            [int.from_bytes(one, "big") for one in step.blocks],
        )
        for step in steps
    ]


def test_a_pack_of_which_nothing_is_needed_goes_and_a_needed_one_stays() -> None:
    assert shown(plan([pack("p", 1, 2), pack("q", 3)], uses({A: [[1, 2]]}))) == [("remove", ["q"], [])]


@pytest.mark.parametrize(("unneeded", "is_written"), [(1, False), (2, True)])
def test_a_pack_is_written_anew_when_more_than_a_quarter_of_it_is_unneeded(unneeded: int, is_written: bool) -> None:
    needed = list(range(unneeded, 4))
    steps = plan([pack("p", 0, 1, 2, 3)], uses({A: [needed]}))
    assert shown(steps) == ([("rewrite", ["p"], needed)] if is_written else [])


def test_clearing_writes_a_pack_anew_for_one_unneeded_block() -> None:
    assert shown(plan([pack("p", 0, 1, 2, 3, 4)], uses({A: [[1, 2, 3, 4]]}), CLEARING)) == [
        ("rewrite", ["p"], [1, 2, 3, 4])
    ]


def test_what_is_written_anew_of_one_session_becomes_one_pack_in_the_order_of_its_newest_version() -> None:
    packs = [pack("p", 7, 1, 9), pack("q", 8, 2, 3)]
    steps = plan(packs, uses({A: [[1, 7], [1, 2, 3]]}))
    assert shown(steps) == [("rewrite", ["p", "q"], [1, 2, 3, 7])]


def test_packs_of_several_sessions_are_written_anew_each_for_itself() -> None:
    packs = [pack("p", 1, 2, 9), pack("q", 3, 8)]
    steps = plan(packs, uses({A: [[1, 3]], B: [[1, 2, 3]]}))
    assert shown(steps) == [("rewrite", ["p"], [1, 2]), ("rewrite", ["q"], [3])]


def test_of_a_block_in_two_packs_one_copy_stays() -> None:
    (step,) = plan([pack("old", 1), pack("new", 1, 2)], uses({A: [[1, 2]]}))
    assert shown([step]) == [("remove", ["old"], [])]
    assert step.elsewhere == (block(1),)


def test_what_a_repack_wrote_before_it_was_cut_off_is_the_home_and_not_what_it_was_made_of() -> None:
    written, made_of = pack("a", 1, 2), pack("b", 1, 2, 3, 4)
    assert shown(plan([written, made_of], uses({A: [[1, 2]]}))) == [("remove", ["b"], [])]


def test_a_stripped_block_is_worth_its_header_alone() -> None:
    (step,) = plan([pack("p", 1, 2)], uses({A: [[1, 2]]}, stripped=[1, 2]))
    assert shown([step]) == [("rewrite", ["p"], [1, 2])]
    assert step.after_bytes == 2 * HEAD
    assert plan([pack("q", heads=[1, 2])], uses({A: [[1, 2]]}, stripped=[1, 2])) == ()


def test_a_header_alone_is_no_home_for_a_block_whose_keys_and_values_are_needed() -> None:
    (step,) = plan([pack("p", 1), pack("q", heads=[1])], uses({A: [[1]]}))
    assert (step.kind, [old.name for old in step.olds]) == ("remove", ["packs/q"])


def test_the_only_header_of_a_block_stays_even_if_more_is_needed() -> None:
    assert plan([pack("q", heads=[1])], uses({A: [[1]]})) == ()


@pytest.mark.parametrize(
    ("sizes", "most", "joined"),
    [
        ([5, 5, 5], 3, 0),
        ([5, 5, 5, 5], 3, 4),
        ([100, 5, 5, 5], 3, 3),
        ([100, 50, 5, 9], 3, 2),
        ([100, 14, 5, 9], 3, 3),
        ([1, 1, 1, 1, 1, 1], 3, 6),
        ([1000, 1000, 9, 5, 1, 1], 3, 4),
    ],
)
def test_the_newest_packs_are_joined_while_the_next_is_not_larger(sizes: list[int], most: int, joined: int) -> None:
    assert packs_to_join(sizes, most) == joined


def test_a_block_is_copied_a_few_times_however_often_a_session_sleeps() -> None:
    sleeps, most = 2000, 24
    packs, copied = list[int](), 0
    for _ in range(sleeps):
        packs.append(1)
        count = packs_to_join(packs, most)
        if count:
            copied += sum(packs[-count:])
            packs[-count:] = [sum(packs[-count:])]
        assert len(packs) <= most
    assert copied <= sleeps * 11  # log2 of 2000


def test_a_session_of_too_many_packs_gets_fewer_and_shared_ones_do_not_count() -> None:
    own = [pack(f"p{number:02}", number) for number in range(1, 5)]
    shared = [pack(f"s{number:02}", number) for number in range(10, 16)]
    chain = [*range(10, 16), 1, 2, 3, 4]
    needs = uses({A: [chain[: 6 + count] for count in range(1, 5)], B: [list(range(10, 16))]})
    assert plan([*own, *shared], needs, RepackPolicy(max_packs=4)) == ()
    (step,) = plan([*own, *shared], needs, RepackPolicy(max_packs=3))
    assert step.reason.startswith("They are 4 packs")
    assert shown([step]) == [("rewrite", ["p01", "p02", "p03", "p04"], [1, 2, 3, 4])]


def test_cold_packs_are_compressed() -> None:
    (step,) = plan([pack("p", 1, 2, raw=frozenset([block(1)]))], uses({A: [[1, 2]]}))
    assert (step.kind, step.compress) == ("recompress", {block(1)})


def test_a_pack_of_the_earlier_format_is_written_anew_in_any_case() -> None:
    bundle = PackView("bundles/ab/x.mvb", SIZE, pack("p", 1).frames, must_go=True)
    (step,) = plan([bundle], uses({A: [[1]]}))
    assert (step.kind, list(step.blocks)) == ("rewrite", [block(1)])


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"max_packs": 0}, "max_packs"),
        ({"max_packs": 2.5}, "max_packs"),
        ({"max_unneeded": 1}, "max_unneeded"),
        ({"max_unneeded": float("nan")}, "max_unneeded"),
        ({"max_unneeded": -0.1}, "max_unneeded"),
        ({"cold_after_seconds": -1}, "cold_after_seconds"),
        ({"cold_after_seconds": float("inf")}, "cold_after_seconds"),
        ({"cold_after_seconds": True}, "cold_after_seconds"),
    ],
)
def test_a_policy_outside_its_limits_is_refused(values: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidPolicy) as refusal:
        RepackPolicy(**values)
    assert refusal.value.details["field"] == field
