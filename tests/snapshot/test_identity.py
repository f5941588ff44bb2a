"""What differs between a snapshot and a live model, part by part, and what follows from it (MS1, GM9, QC14)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from torpor.memvid.answers import PartDiffers
from torpor.memvid.format.identity import Identity
from torpor.memvid.limits import MAX_IDENTITY_PARTS
from torpor.snapshot.errors import IdentityMismatch, MalformedSnapshot
from torpor.snapshot.identity import (
    CIRCUMSTANCES,
    ELSEWHERE,
    PARTS,
    circumstances_in,
    compare,
    policy_of,
    require_circumstances,
    require_same,
    tokens_from_elsewhere,
)

DOCUMENT = Path(__file__).parents[2] / "docs" / "explanation" / "identity.md"
HERE = {"device": "cpu", "mlx": "0.32.4"}


def identity(**parts: str) -> Identity:
    return Identity(tuple(parts.items()))


def refusal_of(stored: Identity, live: Identity, **options: Any) -> IdentityMismatch:
    with pytest.raises(IdentityMismatch) as refusal:
        require_same(stored, live, model="m", **options)
    return refusal.value


def test_every_part_has_one_name_a_reason_and_a_remedy() -> None:
    names = [part.name for part in PARTS]
    assert len(set(names)) == len(names) <= MAX_IDENTITY_PARTS
    assert all(part.why and part.remedy for part in PARTS)
    assert {part.policy for part in PARTS} == {"must_match", "convertible", "may_differ"}
    assert {part.side for part in PARTS} == {"meaning", "representation"}


def test_whatever_is_of_the_meaning_must_match() -> None:
    assert {part.policy for part in PARTS if part.side == "meaning"} == {"must_match"}


def test_the_document_has_every_part_with_its_side_policy_and_reason() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| (\w+) \| .* \| (.*) \|$", DOCUMENT.read_text(), re.MULTILINE)
    assert rows == [(part.name, part.side, part.policy, part.why) for part in PARTS]


def test_equal_identities_pass() -> None:
    assert require_same(identity(weights="w"), identity(weights="w"), model="m") == ()


def test_a_refusal_lists_every_part_with_both_values_and_what_to_do() -> None:
    stored = identity(config="c", template="t", weights="a" * 64, compute_dtype="bfloat16")
    live = identity(config="c", template="T", weights="b" * 64, compute_dtype="float32")
    error = refusal_of(stored, live)
    assert error.mismatched_fields == [
        {"field": "weights", "stored": "a" * 64, "live": "b" * 64, "policy": "must_match"},
        {"field": "template", "stored": "t", "live": "T", "policy": "must_match"},
        {"field": "compute_dtype", "stored": "bfloat16", "live": "float32", "policy": "convertible"},
    ]
    assert error.model == "m"
    assert f"weights was {'a' * 12}… and is {'b' * 12}…; template was t and is T;" in error.message
    for words in ("restore the model's chat template", "point the model at the weights", "the stored type"):
        assert words in error.message


def test_a_long_value_is_cut_in_the_sentence_and_whole_in_the_details() -> None:
    error = refusal_of(identity(rope="x" * 500), identity(rope="none"))
    assert error.mismatched_fields[0]["stored"] == "x" * 500
    assert "x" * 81 not in error.message


@pytest.mark.parametrize("name", ["rope", "state_layout", "color"])
def test_a_part_that_only_one_side_has_differs_and_its_policy_decides_gm9(name: str) -> None:
    """`color` is a part that this version does not know: nobody can say that it may differ."""
    with_it, without = identity(weights="w", **{name: "r"}), identity(weights="w")
    assert refusal_of(with_it, without).mismatched_fields == [
        {"field": name, "stored": "r", "live": None, "policy": "must_match"}
    ]
    error = refusal_of(without, with_it)
    assert error.mismatched_fields == [{"field": name, "stored": None, "live": "r", "policy": "must_match"}]
    assert f"{name} was not there and is r" in error.message


def test_another_kv_format_is_refused_unless_the_caller_converts_it_qc14() -> None:
    stored, live = identity(kv_format="q8g64"), identity(kv_format="float")
    assert refusal_of(stored, live).mismatched_fields[0]["policy"] == "convertible"
    assert refusal_of(stored, live, conversions={"compute_dtype"}).mismatched_fields[0]["field"] == "kv_format"
    assert require_same(stored, live, model="m", conversions={"kv_format"}) == (
        PartDiffers("kv_format", "q8g64", "float"),
    )


@pytest.mark.parametrize(
    ("stored", "live", "how"),
    [
        ("q8g64", "float", "start it with --kv-bits m=8 --kv-group m=64 ("),
        ("float", "q8g64", "start it without --kv-bits for m ("),
        ("q4g32", "q8g64", "start it with --kv-bits m=4 --kv-group m=32 ("),
        ("float+q8g128", "float", "start it with --kv-bits m=8 --kv-group m=128 ("),
        ("q3g64", "float", "serve the model with the KV bits and group it was slept with"),
    ],
)
def test_a_refused_kv_format_says_how_to_start_the_daemon_and_nothing_of_what_follows_from_it(
    stored: str, live: str, how: str
) -> None:
    error = refusal_of(
        identity(kv_format=stored, cache_layout=f"l-{stored}"), identity(kv_format=live, cache_layout=f"l-{live}")
    )
    assert [found["field"] for found in error.mismatched_fields] == ["kv_format", "cache_layout"]
    assert how in error.message
    assert "mlx-lm" not in error.message


def test_a_cache_layout_that_alone_differs_has_its_own_remedy() -> None:
    error = refusal_of(identity(cache_layout="a"), identity(cache_layout="b"))
    assert "use a version of mlx-lm that lays the cache out" in error.message


def test_no_conversion_lets_another_meaning_through() -> None:
    names = {part.name for part in PARTS}
    error = refusal_of(
        identity(weights="w", kv_format="q8g64"), identity(weights="v", kv_format="float"), conversions=names
    )
    assert [found["field"] for found in error.mismatched_fields] == ["weights", "kv_format"]


def test_what_may_differ_is_listed_and_passes_unless_one_is_strict() -> None:
    comparison = compare({"mlx": "1", "device": "cpu"}, {"mlx": "2", "device": "cpu"})
    assert not comparison.is_same
    assert comparison.differing == (PartDiffers("mlx", "1", "2"),)
    assert comparison.refused() == ()
    assert comparison.refused(strict=True) == comparison.differing


def test_other_circumstances_are_reported_and_refused_only_if_one_is_strict() -> None:
    stored = {**HERE, "mlx": "0.31.0"}
    found = (PartDiffers("mlx", "0.31.0", "0.32.4"),)
    assert require_circumstances(stored, HERE, model="m", strict=False) == found
    with pytest.raises(IdentityMismatch, match=r"mlx was 0\.31\.0 and is 0\.32\.4") as refusal:
        require_circumstances(stored, HERE, model="m", strict=True)
    assert [part["field"] for part in refusal.value.mismatched_fields] == ["mlx"]
    assert require_circumstances(HERE, HERE, model="m", strict=True) == ()


def test_where_an_adapter_lies_is_told_and_nobody_is_strict_about_it() -> None:
    (found,) = require_circumstances({"adapter_path": "/a"}, {"adapter_path": "/b"}, model="m", strict=True)
    assert (found.field, found.stored, found.live) == ("adapter_path", "/a", "/b")


@pytest.mark.parametrize("stored", [None, 5, "text", [], {}, {"device": 5, "mlx": "x" * 5000}, {1: "one"}])
def test_circumstances_that_we_did_not_write_count_as_missing_gm11(stored: object) -> None:
    assert circumstances_in(stored) == {}
    found = require_circumstances(stored, HERE, model="m", strict=False)
    assert [(each.field, each.stored) for each in found] == [("device", None), ("mlx", None)]


def test_how_much_was_computed_elsewhere_is_a_number_of_tokens_or_refused() -> None:
    assert [tokens_from_elsewhere(kept) for kept in ({}, {ELSEWHERE: 7}, {"backend": {}})] == [0, 7, 0]
    for wrong in (-1, True, 1.0, "7", None, 2**40):
        with pytest.raises(MalformedSnapshot):
            tokens_from_elsewhere({ELSEWHERE: wrong})


def test_what_is_kept_beside_the_identity_is_all_that_may_differ_and_nothing_else() -> None:
    assert {name for name in CIRCUMSTANCES if policy_of(name) == "may_differ"} == CIRCUMSTANCES
    assert circumstances_in({"mlx": "1", "weights": "w", "unknown": "u"}) == {"mlx": "1"}
