"""The identity of a model: every part that gives KV values their meaning, and nothing that does not (MS1, GM9)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torpor.memvid import Identity
from torpor.snapshot.digests import DigestCache
from torpor.snapshot.errors import IdentityMismatch, ModelFilesMissing
from torpor.snapshot.identity import identify, require_same

FACTS: dict[str, Any] = {"chat_template": "T", "compute_dtype": "float32", "cache_layout": "3 x kv/1 2x16 float32"}


@pytest.fixture
def parts(tmp_path: Path) -> Callable[..., dict[str, str]]:
    digests = DigestCache(tmp_path / "digests.json")

    def look(folder: Path, **changes: Any) -> dict[str, str]:
        return dict(identify(folder, digests=digests, **(FACTS | changes)).parts)

    return look


def changed(before: dict[str, str], after: dict[str, str]) -> set[str]:
    assert before.keys() == after.keys()
    return {name for name in before if before[name] != after[name]}


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    loaded = json.loads(path.read_text())
    change(loaded)
    path.write_text(json.dumps(loaded))


def test_its_parts_are_named_in_order(own_tiny_model: Path, parts: Any) -> None:
    names = list(parts(own_tiny_model))
    assert names == ["adapter", "cache_layout", "compute_dtype", "config", "template", "tokenizer", "weights"]


def test_it_is_the_same_for_the_same_files_wherever_they_are(
    own_tiny_model: Path, tiny_model: Path, parts: Any
) -> None:
    assert parts(own_tiny_model) == parts(tiny_model)


@pytest.mark.parametrize(
    ("fact", "value", "part"),
    [
        ("chat_template", "T ", "template"),
        ("chat_template", None, "template"),
        ("chat_template", {"default": "T"}, "template"),
        ("compute_dtype", "bfloat16", "compute_dtype"),
        ("cache_layout", "4 x kv/1 2x16 float32", "cache_layout"),
    ],
)
def test_each_fact_is_a_part_of_its_own_ms1(
    own_tiny_model: Path, parts: Any, fact: str, value: object, part: str
) -> None:
    assert changed(parts(own_tiny_model), parts(own_tiny_model, **{fact: value})) == {part}


def flip_weight(folder: Path) -> None:
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (flip_weight, "weights"),
        (lambda folder: (folder / "model.safetensors").rename(folder / "model-1.safetensors"), "weights"),
        (lambda folder: (folder / "more.safetensors").write_bytes(b"x"), "weights"),
        (lambda folder: edit(folder / "config.json", lambda it: it.update(rope_theta=1.0)), "config"),
        (lambda folder: edit(folder / "config.json", lambda it: it.update(new_key=None)), "config"),
        (lambda folder: edit(folder / "tokenizer.json", lambda it: it.update(truncation=None, extra=1)), "tokenizer"),
        (lambda folder: edit(folder / "tokenizer_config.json", lambda it: it.update(bos_token="x")), "tokenizer"),
        (lambda folder: (folder / "added_tokens.json").write_text("{}"), "tokenizer"),
        (lambda folder: (folder / "special_tokens_map.json").write_text("{}"), "tokenizer"),
        (lambda folder: (folder / "spiece.model").write_text("{}"), "tokenizer"),
        (lambda folder: (folder / "sentencepiece.bpe.model").write_text("{}"), "tokenizer"),
        (lambda folder: (folder / "bpe.codes").write_text("{}"), "tokenizer"),
    ],
)
def test_each_file_is_in_one_part_threats_53_to_56(own_tiny_model: Path, parts: Any, change: Any, part: str) -> None:
    before = parts(own_tiny_model)
    change(own_tiny_model)
    assert changed(before, parts(own_tiny_model)) == {part}


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / "README.md").write_text("hello"),
        lambda folder: (folder / "generation_config.json").write_text("{}"),
        lambda folder: (folder / "config.json").write_text(
            json.dumps(json.loads((folder / "config.json").read_text()), indent=7, sort_keys=True)
        ),
        lambda folder: edit(folder / "tokenizer_config.json", lambda it: it.update(chat_template="elsewhere")),
        lambda folder: (folder / "model.safetensors").touch(),
    ],
    ids=["a readme", "defaults of sampling", "white space", "where the template is kept", "times"],
)
def test_what_gives_no_token_another_meaning_changes_nothing(own_tiny_model: Path, parts: Any, change: Any) -> None:
    before = parts(own_tiny_model)
    change(own_tiny_model)
    assert parts(own_tiny_model) == before


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_folder_without_a_needed_file_is_refused_by_its_name(own_tiny_model: Path, parts: Any, name: str) -> None:
    (own_tiny_model / name).unlink()
    with pytest.raises(ModelFilesMissing, match=str(own_tiny_model)):
        parts(own_tiny_model)


def test_a_folder_without_a_tokenizer_is_refused(own_tiny_model: Path, parts: Any) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (own_tiny_model / name).unlink()
    with pytest.raises(ModelFilesMissing, match="tokenizer"):
        parts(own_tiny_model)


@pytest.mark.parametrize("content", ["", "[1]", "{", '"x"', "[" * 100_000])
@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_a_file_that_is_no_json_object_is_refused_by_its_name(
    own_tiny_model: Path, parts: Any, name: str, content: str
) -> None:
    (own_tiny_model / name).write_text(content)
    with pytest.raises(ModelFilesMissing, match=name):
        parts(own_tiny_model)


def test_equal_identities_pass() -> None:
    identity = Identity((("weights", "w"),))
    require_same(identity, Identity((("weights", "w"),)), model="m")


def test_a_refusal_lists_every_part_with_both_values_and_what_to_do() -> None:
    stored = Identity((("config", "c"), ("template", "t"), ("weights", "w")))
    live = Identity((("config", "c"), ("template", "T"), ("weights", "W")))
    with pytest.raises(IdentityMismatch) as refusal:
        require_same(stored, live, model="m")
    assert refusal.value.mismatched_fields == [
        {"field": "template", "stored": "t", "live": "T"},
        {"field": "weights", "stored": "w", "live": "W"},
    ]
    assert refusal.value.model == "m"
    for words in ("template", "weights", "restore the model's chat template", "point the model at the weights"):
        assert words in refusal.value.message


def test_a_part_that_only_one_side_has_differs_gm9() -> None:
    with pytest.raises(IdentityMismatch) as refusal:
        require_same(Identity((("rope", "r"), ("weights", "w"))), Identity((("weights", "w"),)), model="m")
    assert [part["field"] for part in refusal.value.mismatched_fields] == ["rope"]
