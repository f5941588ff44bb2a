"""A version's arrays as one `.safetensors` file, for other tools: its slots joined over the whole session.

Owns the names, shapes and order of the tensors. Nothing is converted: the bytes of a slot are its tensor's. The format:
the header's length (8 bytes, little-endian), the header (JSON), the data without gaps.

Names: a cache's slot `3.k` is the tensor `layers.3.k`, any other slot (`logits`) is `state.logits`, and `tokens` is the
ledger. A slot of span blocks becomes `[heads, tokens, dim]` over all tokens. If blocks keep it in several forms (some
with a loss), each run of tokens in one form is a tensor of its own, `layers.3.k@0-512`. Of the state records only the
one at the version's end is written, as it lies.

Memory: one slot of one block, `MAX_TENSOR_SLOT_BYTES` at most. Each is verified before it is written.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from ..answers import TensorReport
from ..disk.durable import TempFile
from ..disk.paths import whole_path
from ..disk.targets import new_file
from ..errors import LimitExceeded, NotTensors
from ..format.blocks import BlockEntry, SlotSpec
from ..format.records import Progress
from ..limits import MAX_TENSOR_HEADER_BYTES, MAX_TENSOR_SLOT_BYTES
from ..writing.core import StoreCore
from ..writing.reader import BundleReader

FORMAT: Final = "torpor.tensors/1"
DEFAULT_KIND: Final = "kv-snapshot"

_DTYPES: Final = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "float16": "F16", "bfloat16": "BF16",
    "uint32": "U32", "int32": "I32", "float32": "F32", "uint64": "U64", "int64": "I64", "float64": "F64",
    "complex64": "C64",
}  # fmt: skip
_ALIGNMENT: Final = 8


@dataclass(slots=True)
class _Tensor:
    """One tensor of the file. outer, dim: its shape around the tokens; start, end: its tokens. dim None: its shape is
    `outer` alone, without tokens. offset: its first byte in the data."""

    slot: str
    kind: str
    dtype: str
    element_bytes: int
    outer: tuple[int, ...]
    dim: int | None
    start: int = 0
    end: int = 0
    name: str = ""
    offset: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return self.outer if self.dim is None else (*self.outer, self.end - self.start, self.dim)

    @property
    def size_bytes(self) -> int:
        return self.element_bytes * math.prod(self.shape)

    def continues(self, other: _Tensor) -> bool:
        mine, others = ((each.slot, each.kind, each.dtype, each.outer, each.dim) for each in (self, other))
        return mine == others and self.start == other.end


@dataclass(slots=True)
class _Plan:
    """All tensors, and for each block the tensor of each slot."""

    tokens: _Tensor
    tensors: list[_Tensor] = field(default_factory=list)
    of_block: dict[bytes, list[_Tensor]] = field(default_factory=dict)
    header: bytes = b""


def export_tensors(
    core: StoreCore,
    reader: BundleReader,
    target: str | os.PathLike[str],
    *,
    kind: str = DEFAULT_KIND,
    labels: Sequence[str] | None = None,
    replacing: bool = False,
    on_progress: Progress | None = None,
) -> TensorReport:
    """Write an open version's arrays to a file. See `Store.export_tensors`."""
    plan = _planned(reader)
    names = reader.manifest.artifact_labels if labels is None else tuple(dict.fromkeys(labels))
    plan.header = _header(reader, plan, kind, names)
    with new_file(core.folder.root_fd, target, replacing=replacing) as temp:
        temp.whole_bytes = lambda: len(plan.header) + sum(tensor.size_bytes for tensor in plan.tensors)
        temp.append([plan.header])
        _write_all(temp, reader, plan, on_progress)
        temp.sync()
    manifest = reader.manifest
    return TensorReport(
        session=str(manifest.uri),
        version=manifest.version,
        bundle_id=reader.bundle_id,
        path=whole_path(target),
        kind=kind,
        labels=names,
        token_count=manifest.block_tokens,
        unread_tokens=manifest.unread_tokens,
        tensors=len(plan.tensors),
        file_bytes=temp.size_bytes,
    )


def _planned(reader: BundleReader) -> _Plan:
    plan = _Plan(_Tensor("tokens", "", "uint32", 4, (reader.manifest.block_tokens,), None, name="tokens"))
    runs: dict[str, list[_Tensor]] = {}
    for entry in _taken(reader):
        specs = [spec for spec, _ in reader.read_header(entry).slots]
        tensors_of_block = plan.of_block[entry.id] = []
        for spec in specs:
            tensor = _tensor_of(spec, entry)
            earlier = runs.setdefault(spec.name, [])
            if earlier and tensor.dim is not None and tensor.continues(earlier[-1]):
                earlier[-1].end = tensor.end
            else:
                earlier.append(tensor)
            tensors_of_block.append(earlier[-1])
    tensors = [plan.tokens, *(tensor for name in runs for tensor in _named(name, runs[name], reader))]
    # The largest elements first: so each tensor is aligned, without a gap.
    plan.tensors = sorted(tensors, key=lambda tensor: -tensor.element_bytes)
    offset = 0
    for tensor in plan.tensors:
        tensor.offset = offset
        offset += tensor.size_bytes
    return plan


def _taken(reader: BundleReader) -> Iterator[BlockEntry]:
    """The spans, and the state record at the end."""
    states = [entry for entry in reader.entries if entry.kind == "state"]
    yield from (entry for entry in reader.entries if entry.kind == "span")
    if states and states[-1].start == reader.manifest.block_tokens:
        yield states[-1]


def _tensor_of(spec: SlotSpec, entry: BlockEntry) -> _Tensor:
    if spec.size_bytes > MAX_TENSOR_SLOT_BYTES:
        raise LimitExceeded(
            f"slot {spec.name} has {spec.size_bytes} bytes, and {MAX_TENSOR_SLOT_BYTES} are held at once.",
            size_bytes=spec.size_bytes,
            limit=MAX_TENSOR_SLOT_BYTES,
        )
    if entry.kind == "state":
        return _Tensor(spec.name, spec.kind, spec.dtype, spec.element_bytes, spec.shape, None)
    if len(spec.shape) < 2 or spec.shape[-2] != entry.token_count:
        raise NotTensors(
            f"Slot {spec.name} of the block at token {entry.start} has the shape {spec.shape}, in which its "
            f"{entry.token_count} tokens are not found, so no tensor over the session can be made of it.",
            slot=spec.name,
            start=entry.start,
        )
    outer, dim = spec.shape[:-2], spec.shape[-1]
    return _Tensor(spec.name, spec.kind, spec.dtype, spec.element_bytes, outer, dim, entry.start, entry.end)


def _named(slot: str, runs: list[_Tensor], reader: BundleReader) -> list[_Tensor]:
    base = f"layers.{slot}" if slot[0].isdigit() else f"state.{slot}"
    if len({tensor.dim is None for tensor in runs}) > 1:
        raise NotTensors(f"Slot {slot} is in spans and in a state record.", slot=slot)
    for tensor in runs:
        whole = tensor.dim is None or (tensor.start, tensor.end) == (0, reader.manifest.block_tokens)
        tensor.name = base if whole else f"{base}@{tensor.start}-{tensor.end}"
    return runs


def _header(reader: BundleReader, plan: _Plan, kind: str, labels: Sequence[str]) -> bytes:
    manifest = reader.manifest
    metadata = {
        "format": FORMAT,
        "kind": kind,
        "labels": json.dumps(list(labels)),
        "session": str(manifest.uri),
        "version": str(manifest.version),
        "bundle_id": reader.bundle_id,
        "model": manifest.model,
        "identity": json.dumps(dict(manifest.identity.parts), sort_keys=True),
        "token_count": str(manifest.block_tokens),
        "slot_kinds": json.dumps({each.name: each.kind for each in plan.tensors if each.kind}, sort_keys=True),
    }
    document: dict[str, object] = {"__metadata__": metadata}
    for tensor in plan.tensors:
        document[tensor.name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [tensor.offset, tensor.offset + tensor.size_bytes],
        }
    text = json.dumps(document, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    if len(text) > MAX_TENSOR_HEADER_BYTES:
        raise LimitExceeded(
            f"the file's header would have {len(text)} bytes, and readers take {MAX_TENSOR_HEADER_BYTES}.",
            size_bytes=len(text),
            limit=MAX_TENSOR_HEADER_BYTES,
        )
    return len(text).to_bytes(8, "little") + text


def _write_all(temp: TempFile, reader: BundleReader, plan: _Plan, on_progress: Progress | None) -> None:
    base, done = len(plan.header), 0
    total = sum(entry.raw_bytes for entry in _taken(reader))
    for entry in _taken(reader):
        header = reader.read_header(entry)
        temp.write_at(base + plan.tokens.offset + 4 * entry.start, [header.tokens])
        for index, tensor in enumerate(plan.of_block[entry.id]):
            data = memoryview(reader.read_slot(entry, index))
            for offset, run in _runs(tensor, entry, data):
                temp.write_at(base + offset, [run])
        done += entry.raw_bytes
        if on_progress is not None:
            on_progress(done, total)


def _runs(tensor: _Tensor, entry: BlockEntry, data: memoryview) -> Iterator[tuple[int, memoryview]]:
    """The places in the data for the parts of a block's slot, one for each head."""
    if tensor.dim is None:
        yield tensor.offset, data
        return
    row = tensor.dim * tensor.element_bytes
    run, pitch = entry.token_count * row, (tensor.end - tensor.start) * row
    first = tensor.offset + (entry.start - tensor.start) * row
    for head in range(math.prod(tensor.outer) if run else 0):
        yield first + head * pitch, data[head * run : (head + 1) * run]
