"""What an adapter is, by its files: only what changes a computation counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torpor.snapshot.adapter_files import AdapterSettings, identify_adapter, load_settings, tensor_names
from torpor.snapshot.digests import DigestCache
from torpor.snapshot.errors import AdapterFilesMissing
from torpor.snapshot.tensor_list import MAX_LIST_BYTES

CONFIG: dict[str, Any] = {
    "fine_tune_type": "lora",
    "num_layers": 16,
    "lora_parameters": {"rank": 8, "scale": 20, "dropout": 0.0, "keys": ["b", "a"]},
    "learning_rate": 1e-5,
}
TENSOR = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


def header(*names: str) -> bytes:
    listed = json.dumps({"__metadata__": {"format": "mlx"}} | dict.fromkeys(names, TENSOR)).encode()
    return len(listed).to_bytes(8, "little") + listed


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "adapter"
    path.mkdir()
    (path / "adapter_config.json").write_text(json.dumps(CONFIG))
    (path / "adapters.safetensors").write_bytes(header("x.lora_a", "x.lora_b") + bytes(4))
    return path


def part(folder: Path, *, fused: bool = False) -> str:
    digests = DigestCache(folder.parent / "digests.json")
    return identify_adapter(load_settings(folder), folder, fused=fused, digests=digests)


def reconfigure(folder: Path, changes: dict[str, Any]) -> None:
    """Change settings; those of `lora_parameters` by a nested map."""
    nested = CONFIG["lora_parameters"] | changes.pop("lora_parameters", {})
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | {"lora_parameters": nested} | changes))


def test_settings_are_what_the_configuration_says(folder: Path) -> None:
    assert load_settings(folder) == AdapterSettings("lora", rank=8, scale=20.0, layers=16, keys=("a", "b"))
    assert part(folder).startswith("lora rank=8 scale=20.0 unfused ")
    assert part(folder, fused=True).startswith("lora rank=8 scale=20.0 fused ")


@pytest.mark.parametrize(
    "changes",
    [
        {"fine_tune_type": "dora"},
        {"num_layers": 8},
        {"lora_parameters": {"rank": 4}},
        {"lora_parameters": {"scale": 20.5}},
        {"lora_parameters": {"keys": ["a"]}},
        {"lora_parameters": {"keys": None}},
    ],
)
def test_each_setting_that_changes_a_computation_makes_another_adapter_ms1(
    folder: Path, changes: dict[str, Any]
) -> None:
    before = part(folder)
    reconfigure(folder, changes)
    assert part(folder) != before


@pytest.mark.parametrize(
    "changes",
    [
        {"learning_rate": 1e-4, "adapter_path": "/elsewhere", "model": "another/name"},
        {"lora_parameters": {"dropout": 0.5}},
        {"lora_parameters": {"scale": 20.0}},
        {"lora_parameters": {"keys": ["a", "b"]}},
    ],
)
def test_what_was_told_to_the_training_alone_makes_none(folder: Path, changes: dict[str, Any]) -> None:
    before = part(folder)
    reconfigure(folder, changes)
    assert part(folder) == before


def test_a_byte_of_the_weights_makes_another_adapter(folder: Path) -> None:
    before = part(folder)
    (folder / "adapters.safetensors").write_bytes(header("x.lora_a", "x.lora_b") + b"\1\0\0\0")
    assert part(folder) != before


def test_a_full_adapter_has_neither_rank_nor_scale_and_is_never_fused(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"fine_tune_type": "full"}')
    assert part(folder) == part(folder, fused=True)
    assert part(folder).startswith("full ")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fine_tune_type": "ia3"}, "fine_tune_type is 'ia3'"),
        ({"fine_tune_type": ["lora"]}, "fine_tune_type"),
        ({"num_layers": "many"}, "num_layers is 'many'"),
        ({"num_layers": None}, "num_layers"),
        ({"lora_parameters": {"rank": 0}}, "rank is 0"),
        ({"lora_parameters": {"rank": True}}, "rank is True"),
        ({"lora_parameters": {"scale": None}}, "scale is None"),
        ({"lora_parameters": {"scale": float("inf")}}, "scale is inf"),
        ({"lora_parameters": {"scale": 10**400}}, "scale"),
        ({"lora_parameters": {"keys": "a"}}, "keys"),
    ],
)
def test_a_configuration_that_is_none_is_refused_by_the_setting(
    folder: Path, changes: dict[str, Any], words: str
) -> None:
    reconfigure(folder, changes)
    with pytest.raises(AdapterFilesMissing, match=words):
        load_settings(folder)


@pytest.mark.parametrize("content", ["", "[1]", "{", '"x"', "{}", '{"lora_parameters": []}', "[" * 100_000])
def test_a_configuration_that_is_no_object_is_refused(folder: Path, content: str) -> None:
    (folder / "adapter_config.json").write_text(content)
    with pytest.raises(AdapterFilesMissing, match=str(folder)):
        load_settings(folder)


def test_an_adapter_of_another_library_is_told_the_form_that_is_wanted(folder: Path) -> None:
    (folder / "adapters.safetensors").rename(folder / "adapter_model.safetensors")
    with pytest.raises(AdapterFilesMissing, match="in the form of mlx-lm"):
        load_settings(folder)


def test_the_names_of_the_tensors_are_read_from_the_beginning_of_the_weights(folder: Path) -> None:
    assert tensor_names(folder) == {"x.lora_a", "x.lora_b"}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\7",
        (MAX_LIST_BYTES + 1).to_bytes(8, "little"),
        (2**64 - 1).to_bytes(8, "little"),
        (5).to_bytes(8, "little") + b"{",
        (3).to_bytes(8, "little") + b"[1]",
        (100_000).to_bytes(8, "little") + b"[" * 100_000,
        (2).to_bytes(8, "little") + b"\xff\xff",
    ],
)
def test_weights_that_do_not_begin_as_such_are_refused_without_taking_memory(folder: Path, content: bytes) -> None:
    (folder / "adapters.safetensors").write_bytes(content)
    with pytest.raises(AdapterFilesMissing, match="does not begin as a safetensors file does"):
        tensor_names(folder)
