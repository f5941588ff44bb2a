"""The identity of a model, by its files: every part that gives KV values their meaning, and nothing else (MS1)."""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torpor.snapshot import model_files
from torpor.snapshot.digests import DigestCache
from torpor.snapshot.errors import ModelFilesMissing
from torpor.snapshot.identity import CIRCUMSTANCES, PARTS
from torpor.snapshot.model_files import (
    MAX_SETTINGS_BYTES,
    identify,
    require_few_layers,
    require_model_files,
    rope_of,
)
from torpor.tokenizer_files import TOKENIZER_PATTERNS

FACTS: dict[str, Any] = {
    "chat_template": "T",
    "compute_dtype": "float32",
    "kv_format": "float",
    "cache_layout": "3 x kv/1 2x16 float32",
}


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


def test_its_parts_are_those_of_the_table_that_decide(own_tiny_model: Path, parts: Any) -> None:
    names = list(parts(own_tiny_model))
    assert names == sorted({part.name for part in PARTS} - CIRCUMSTANCES)
    assert {"weights", "config", "rope", "tokenizer", "template", "adapter", "compute_dtype"} < set(names)


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
        ("kv_format", "q8g64", "kv_format"),
        ("adapter", "lora rank=8 scale=20.0 unfused abc", "adapter"),
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
        (lambda folder: (folder / "model-2.safetensors").write_bytes(b"x"), "weights"),
        (lambda folder: (folder / "hf_quant_config.json").write_text("{}"), "config"),
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
        lambda folder: (folder / "model.safetensors.index.json").write_text('{"weight_map": {}}'),
        lambda folder: (folder / "adapters.safetensors").write_bytes(b"x"),
        lambda folder: (folder / "consolidated.safetensors").write_bytes(b"x"),
    ],
    ids=[
        "a readme",
        "defaults of sampling",
        "white space",
        "where the template is kept",
        "times",
        "an index that mlx-lm does not read",
        "an adapter beside the weights",
        "another form of the weights",
    ],
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


def test_every_weight_file_that_mlx_lm_loads_is_in_the_identity_and_no_other(own_tiny_model: Path, parts: Any) -> None:
    """Sharded weights: a byte in any of them counts."""
    (own_tiny_model / "model.safetensors").rename(own_tiny_model / "model-00001-of-00002.safetensors")
    second = own_tiny_model / "model-00002-of-00002.safetensors"
    second.write_bytes(b"second")
    before = parts(own_tiny_model)
    second.write_bytes(b"sEcond")
    assert changed(before, parts(own_tiny_model)) == {"weights"}


def test_files_that_are_links_count_by_what_they_lead_to(own_tiny_model: Path, parts: Any, tmp_path: Path) -> None:
    """As in a hub's cache, whose folders hold links to files that are named by their content."""
    before = parts(own_tiny_model)
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for file in list(own_tiny_model.iterdir()):
        blob = blobs / f"0123456789abcdef-{file.name}"
        file.rename(blob)
        file.symlink_to(blob)
    assert parts(own_tiny_model) == before
    flip_weight(own_tiny_model)
    assert changed(before, parts(own_tiny_model)) == {"weights"}
    (own_tiny_model / "model.safetensors").unlink()
    (own_tiny_model / "model.safetensors").symlink_to(blobs / "nowhere")
    with pytest.raises(OSError, match="nowhere"):
        parts(own_tiny_model)


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"rope_theta": 1.0}, '"rope_theta":1.0'),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, '"rope_scaling":{"factor":4.0,"type":"yarn"}'),
        ({"partial_rotary_factor": 0.5}, '"partial_rotary_factor":0.5'),
        ({"text_config": {"rope_theta": 5.0}}, '"text_config.rope_theta":5.0'),
    ],
)
def test_rope_is_named_with_its_values_and_is_in_the_config_too(
    own_tiny_model: Path, parts: Any, changes: dict[str, Any], shown: str
) -> None:
    before = parts(own_tiny_model)
    edit(own_tiny_model / "config.json", lambda it: it.update(changes))
    after = parts(own_tiny_model)
    assert changed(before, after) == {"config", "rope"}
    assert shown in after["rope"]
    assert shown not in before["rope"]


def test_rope_settings_that_are_long_are_kept_as_a_digest_which_tells_them_apart() -> None:
    scaling = {"type": "longrope", "long_factor": [1.0 + index / 7 for index in range(400)]}
    values = {rope_of({"rope_scaling": scaling | {"short_factor": [first]}}) for first in (1.0, 1.5)}
    assert len(values) == 2
    assert {len(value) for value in values} == {64}


def test_a_layout_that_is_long_is_kept_as_a_digest(own_tiny_model: Path, parts: Any) -> None:
    layouts = ["; ".join(f"1 x kv/1 {heads}x16 float32" for heads in range(start, 300)) for start in (0, 1)]
    values = {parts(own_tiny_model, cache_layout=layout)["cache_layout"] for layout in layouts}
    assert {len(value) for value in values} == {64}
    assert len(values) == 2


@pytest.mark.parametrize("settings", [{}, {"hidden_size": 3, "text_config": None, "vision_config": {"depth": 1}}])
def test_a_configuration_without_positions_says_so(settings: dict[str, Any]) -> None:
    assert rope_of(settings) == "none"


def test_the_document_names_every_pattern_of_tokenizer_files() -> None:
    text = (Path(__file__).parents[2] / "docs" / "explanation" / "identity.md").read_text()
    (told,) = re.findall(r"Files of the tokenizer are those(.*?)\. Each counts", text, re.DOTALL)
    assert set(re.findall(r"`(.+?)`", told)) == set(TOKENIZER_PATTERNS)


def test_a_config_of_something_else_and_weights_that_may_not_be_read_are_told(
    own_tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(file: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(file))

    require_model_files(own_tiny_model)
    with monkeypatch.context() as patch:
        patch.setattr(model_files, "tensor_names", refuse)
        with pytest.raises(ModelFilesMissing, match=r"model.safetensors cannot be read: Permission denied\.$"):
            require_model_files(own_tiny_model)
    for settings in ({"num_hidden_layers": 10**12}, {"text_config": {"n_layer": 4097}}):
        (own_tiny_model / "config.json").write_text(json.dumps(settings))
        with pytest.raises(ModelFilesMissing, match=r"more than 4096 layers, by .*layers?\.$"):
            require_few_layers(own_tiny_model)
    (own_tiny_model / "config.json").write_text('{"x": "' + "x" * MAX_SETTINGS_BYTES + '"}')
    with pytest.raises(ModelFilesMissing, match=r"config\.json has more than 32 MiB\.$"):
        require_model_files(own_tiny_model)
    (own_tiny_model / "config.json").write_text("{}")
    with pytest.raises(ModelFilesMissing, match=r"config\.json names no model_type.* A model folder has"):
        require_model_files(own_tiny_model)
