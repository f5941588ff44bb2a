"""The list of a safetensors file tells whether all of the file is there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torpor.snapshot.tensor_list import NotWhole, tensor_names

import mlx.core as mx  # isort: skip  # after torpor, which chooses the BLAS


def written(path: Path, listed: object, data: bytes = b"") -> Path:
    text = json.dumps(listed).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    path = tmp_path / "w.safetensors"
    mx.save_safetensors(str(path), {"a": mx.zeros((4, 4)), "b": mx.ones((3,))}, {"format": "mlx"})
    return path


def test_the_tensors_of_a_whole_file_are_named_without_its_metadata(whole: Path, tmp_path: Path) -> None:
    assert tensor_names(whole) == {"a", "b"}
    assert tensor_names(written(tmp_path / "none", {})) == frozenset()


def test_a_file_cut_anywhere_is_not_whole(whole: Path) -> None:
    data = whole.read_bytes()
    for size in range(len(data)):
        whole.write_bytes(data[:size])
        with pytest.raises(NotWhole):
            tensor_names(whole)


@pytest.mark.parametrize("entry", [1, {}, {"data_offsets": [0]}, {"data_offsets": None}, {"data_offsets": [0, "x"]}])
def test_a_list_that_places_no_tensors_is_not_that_of_such_a_file(tmp_path: Path, entry: object) -> None:
    with pytest.raises(NotWhole, match="does not begin"):
        tensor_names(written(tmp_path / "x", {"a": entry}))
