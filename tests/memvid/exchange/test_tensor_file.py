"""A version as one `.safetensors` file: another reader finds every bit in it, and it is whole or not there."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from torpor.memvid import errors
from torpor.memvid.exchange import tensor_file
from torpor.memvid.format.blocks import BlockDraft, SlotDraft, SlotSpec
from torpor.memvid.store import Store
from torpor.tests.memvid import store_making as making
from torpor.tests.memvid.store_making import URI, drafts, sleep, write


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out" / "agent.safetensors"


def parsed(path: Path) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The header and the bytes of each tensor, read as the format says; every byte of the data is some tensor's."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    assert size % 8 == 0
    header = json.loads(data[8 : 8 + size])
    body, at = data[8 + size :], 0
    tensors = {}
    for name, told in sorted(
        ((name, told) for name, told in header.items() if name != "__metadata__"),
        key=lambda each: each[1]["data_offsets"],
    ):
        start, end = told["data_offsets"]
        assert start == at
        tensors[name], at = body[start:end], end
    assert at == len(body)
    return header, tensors


def joined(blocks: list[BlockDraft], name: str, heads: int = 2) -> bytes:
    """A slot of spans over the whole session: head by head the rows of all blocks."""
    parts: list[list[bytes]] = [[] for _ in range(heads)]
    for block in blocks:
        for slot in block.slots:
            if slot.spec.name == name:
                whole = b"".join(map(bytes, slot.buffers))
                step = len(whole) // heads
                for head in range(heads):
                    parts[head].append(whole[head * step : (head + 1) * step])
    return b"".join(b"".join(runs) for runs in parts)


@pytest.mark.parametrize("count", [1, 255, 256, 257, 600])
def test_every_slot_is_one_tensor_over_the_whole_session(store: Store, target: Path, count: int) -> None:
    sleep(store, count)
    report = store.export_tensors(URI, None, target)
    header, tensors = parsed(target)
    blocks = drafts(count)
    for name in ("0.k", "0.v", "1.k", "1.v"):
        assert tensors[f"layers.{name}"] == joined(blocks, name)
        assert header[f"layers.{name}"]["shape"] == [2, count, 4]
        assert header[f"layers.{name}"]["dtype"] == "BF16"
    assert tensors["tokens"] == b"".join(block.tokens for block in blocks)
    assert (header["tokens"]["dtype"], header["tokens"]["shape"]) == ("U32", [count])
    assert [tensors["state.logits"], tensors["state.key"]] == [bytes(slot.buffers[0]) for slot in blocks[-1].slots]
    assert set(tensors) == {*(f"layers.{name}" for name in ("0.k", "0.v", "1.k", "1.v")), "tokens", "state.logits"} | {
        "state.key"
    }
    assert (report.tensors, report.file_bytes, report.path) == (7, target.stat().st_size, str(target))
    assert target.stat().st_mode & 0o777 == 0o600


def test_another_reader_opens_it_and_finds_what_it_is(store: Store, target: Path) -> None:
    sleep(store, 300)
    receipt = sleep(store, 600)
    store.export_tensors(URI, None, target)
    with safe_open(target, framework="numpy") as opened:
        told = opened.metadata()
        assert opened.get_slice("layers.1.v").get_shape() == [2, 600, 4]
        assert opened.get_tensor("tokens").tolist()[:3] == [0, 7, 14]
    assert told["format"] == "torpor.tensors/1"
    assert (told["session"], told["version"], told["token_count"]) == (str(URI), "2", "600")
    assert told["bundle_id"] == receipt.bundle_id
    assert json.loads(told["identity"]) == dict(making.IDENTITY.parts)
    assert json.loads(told["slot_kinds"])["layers.0.k"] == "kv.k/1"


def test_kind_and_labels_default_to_what_a_file_is_found_by_gm6(store: Store, target: Path) -> None:
    sleep(store, 10)
    report = store.export_tensors(URI, None, target)
    told = parsed(target)[0]["__metadata__"]
    assert (told["kind"], json.loads(told["labels"])) == ("kv-snapshot", ["test", "demo", "v1"])
    assert (report.kind, report.labels) == ("kv-snapshot", ("test", "demo", "v1"))
    store.export_tensors(URI, None, target, kind="probe", labels=["b", "a", "b"], replacing=True)
    told = parsed(target)[0]["__metadata__"]
    assert (told["kind"], json.loads(told["labels"])) == ("probe", ["b", "a"])


def test_the_same_version_gives_the_same_bytes(store: Store, target: Path) -> None:
    sleep(store, 300)
    store.export_tensors(URI, None, target)
    store.export_tensors(URI, 1, target.with_name("again"))
    assert target.read_bytes() == target.with_name("again").read_bytes()


def test_blocks_of_ancestors_and_compressed_ones_are_written_as_they_were(store: Store, target: Path) -> None:
    first = sleep(store, 600, compressed=True)
    sleep(store, 900, before=first)
    with Store.open(store.path, writable=False) as reader:
        reader.export_tensors(URI, None, target)
        reader.export_tensors(URI, 1, target.with_name("first"))
    assert parsed(target)[1]["layers.1.k"] == joined(drafts(900), "1.k")
    assert parsed(target.with_name("first"))[1]["layers.1.k"] == joined(drafts(600), "1.k")


def test_tensors_are_aligned_for_their_elements(store: Store, target: Path) -> None:
    names = {"0.a": "bool", "0.b": "int64", "0.c": "float16", "0.d": "uint8", "0.e": "float32"}
    specs = [SlotSpec(name, "arrays.x/1", dtype, (3,)) for name, dtype in names.items()]
    written(store, [SlotSpec("1.k", "kv.k/1", "bfloat16", (1, 3, 1))], state=specs)
    store.export_tensors(URI, None, target)
    header, _ = parsed(target)
    size_of = {"BOOL": 1, "I64": 8, "F16": 2, "U8": 1, "F32": 4, "BF16": 2, "U32": 4}
    for name, told in header.items():
        if name != "__metadata__":
            assert told["data_offsets"][0] % size_of[told["dtype"]] == 0, name
    assert {told["dtype"] for name, told in header.items() if name != "__metadata__"} == set(size_of)


def written(
    store: Store, *blocks: list[SlotSpec], state: list[SlotSpec] | None = None, state_at: int | None = None
) -> list[BlockDraft]:
    """A version whose span blocks have these slots, the last of 3 tokens."""
    made = []
    for number, specs in enumerate(blocks):
        count = 256 if number < len(blocks) - 1 else 3
        made.append(BlockDraft("span", 256 * number, making.token_ids(256 * number, count), filled(specs, number)))
    end = 256 * (len(blocks) - 1) + 3
    record = [BlockDraft("state", end if state_at is None else state_at, b"", filled(state, "s"))] if state else []
    chain = sorted([*made, *record], key=lambda block: (block.start, block.kind != "state"))
    if state and state_at is None:
        chain = [*made, *record]
    write(store, iter(chain), end)
    return made


def filled(specs: list[SlotSpec], salt: object) -> list[SlotDraft]:
    return [
        SlotDraft(
            spec,
            [
                memoryview(making.raw_bytes(spec.size_bytes, salt, spec.name))
                if spec.dtype != "bool"
                else memoryview(bytes(spec.size_bytes))
            ],
        )
        for spec in specs
    ]


def test_each_run_of_tokens_of_one_form_is_a_tensor(store: Store, target: Path) -> None:
    """As where older blocks are kept in few bits, with their scales beside them."""
    lossy = [
        SlotSpec("0.k", "kv8g32.k/1", "uint32", (2, 256, 8)),
        SlotSpec("0.k.scales", "kv8g32.k.scales/1", "float16", (2, 256, 1)),
    ]
    exact = [SlotSpec("0.k", "kv.k/1", "float16", (2, 256, 32))]
    last = [SlotSpec("0.k", "kv.k/1", "float16", (2, 3, 32))]
    made = written(store, lossy, lossy, exact, last)
    store.export_tensors(URI, None, target)
    header, tensors = parsed(target)
    assert {name: (told["dtype"], told["shape"]) for name, told in header.items() if name.startswith("layers")} == {
        "layers.0.k@0-512": ("U32", [2, 512, 8]),
        "layers.0.k.scales@0-512": ("F16", [2, 512, 1]),
        "layers.0.k@512-771": ("F16", [2, 259, 32]),
    }
    assert tensors["layers.0.k@0-512"] == joined(made[:2], "0.k")
    assert tensors["layers.0.k.scales@0-512"] == joined(made[:2], "0.k.scales")
    assert tensors["layers.0.k@512-771"] == joined(made[2:], "0.k")
    assert json.loads(header["__metadata__"]["slot_kinds"])["layers.0.k@0-512"] == "kv8g32.k/1"


def test_a_slot_that_some_blocks_do_not_have_is_a_tensor_for_each_run(store: Store, target: Path) -> None:
    slot = SlotSpec("0.k", "kv.k/1", "float16", (1, 256, 2))
    made = written(store, [slot], [], [slot], [])
    store.export_tensors(URI, None, target)
    _, tensors = parsed(target)
    assert tensors["layers.0.k@0-256"] == joined(made[:1], "0.k", heads=1)
    assert tensors["layers.0.k@512-768"] == joined(made[2:], "0.k", heads=1)


def test_a_record_that_is_not_of_the_end_is_left_out(store: Store, target: Path) -> None:
    written(
        store,
        [SlotSpec("0.k", "kv.k/1", "float16", (1, 256, 2))],
        [SlotSpec("0.k", "kv.k/1", "float16", (1, 3, 2))],
        state=[SlotSpec("logits", "state.logits/1", "float32", (4,))],
        state_at=256,
    )
    store.export_tensors(URI, None, target)
    assert set(parsed(target)[1]) == {"layers.0.k", "tokens"}


@pytest.mark.parametrize("shape", [(3,), (1, 2, 3), (4, 1)])
def test_a_slot_whose_tokens_are_not_found_is_refused_by_name(store: Store, target: Path, shape: Any) -> None:
    written(store, [SlotSpec("0.k", "kv.k/1", "float16", shape)])
    with pytest.raises(errors.NotTensors, match=r"0\.k"):
        store.export_tensors(URI, None, target)
    assert os.listdir(target.parent) == []


def test_a_slot_that_is_in_spans_and_in_the_record_is_refused(store: Store, target: Path) -> None:
    written(
        store,
        [SlotSpec("0.k", "kv.k/1", "float16", (1, 3, 2))],
        state=[SlotSpec("0.k", "ring.k/1", "float16", (1, 1, 3, 2))],
    )
    with pytest.raises(errors.NotTensors):
        store.export_tensors(URI, None, target)


@pytest.mark.parametrize("limit", ["MAX_TENSOR_SLOT_BYTES", "MAX_TENSOR_HEADER_BYTES"])
def test_what_would_not_fit_is_refused_before_anything_is_written(
    store: Store, target: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    sleep(store, 300)
    monkeypatch.setattr(tensor_file, limit, 100)
    with pytest.raises(errors.LimitExceeded):
        store.export_tensors(URI, None, target)
    assert os.listdir(target.parent) == []


def test_short_writes_are_gone_on_with(store: Store, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sleep(store, 300)
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: real(fd, data[:7], offset))
    store.export_tensors(URI, None, target)
    monkeypatch.undo()
    assert parsed(target)[1]["layers.0.k"] == joined(drafts(300), "0.k")


def test_progress_comes_to_its_end(store: Store, target: Path) -> None:
    receipt = sleep(store, 600)
    told: list[tuple[int, int]] = []
    store.export_tensors(URI, None, target, on_progress=lambda done, total: told.append((done, total)))
    assert told[-1] == (receipt.logical_bytes, receipt.logical_bytes)
    assert [done for done, _ in told] == sorted(done for done, _ in told)
