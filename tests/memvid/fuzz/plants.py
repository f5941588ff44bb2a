# ruff: noqa: E501 - what is replaced stands as it does in the code
"""Can the fuzzer find anything? Plant a fault in a copy of the code, fuzz it, and see how long it takes.

    python tests/memvid/fuzz/plants.py --seconds 60 [--only NAME]

Each plant is one replacement in one module. What is not found within the time is a hole in the fuzzer: it ends with 1.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from torpor.tests.changed_copy import ROOT, copy_package, put

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Plant:
    name: str
    target: str
    module: str
    before: str
    after: str


PLANTS: Final = (
    Plant("map keys in any order", "packing", "packing.py", "former >= key for", "False for"),
    Plant("no second packing", "packing", "packing.py", "msgpack.packb(value, use_bin_type=True) != data", "False"),
    Plant("no depth limit on reading", "packing", "packing.py", "    if depth > MAX_DEPTH:\n        raise _Refused(f\"nesting is deeper than {MAX_DEPTH}\")\n    if isinstance(value, list):", "    if isinstance(value, list):"),
    Plant("struct.error escapes", "packing", "packing.py", "except struct.error as error", "except ZeroDivisionError as error"),
    Plant("version is not checked", "manifest", "manifest.py", 'integer_in(fields["version"], 1, MAX_VERSION)', 'fields["version"]'),
    Plant("chain is not checked", "manifest", "manifest.py", "problem = require_chain(manifest.blocks, manifest.block_tokens)", "problem = None"),
    Plant("TypeError escapes from a manifest", "manifest", "manifest.py", "except (StoreError, ValueError, TypeError) as error", "except (StoreError, ValueError) as error"),
    Plant("slot digest is not checked for length", "block_header", "blocks.py", "if not isinstance(shape, list) or not _is_id(digest):", "if not isinstance(shape, list):"),
    Plant("sizes wrap at 64 bits", "block_header", "blocks.py", "        size *= dim\n", "        size = (size * dim + (1 << 63)) % (1 << 64) - (1 << 63)\n"),
    Plant("unknown dtype is a KeyError", "block_header", "blocks.py", "spec.dtype not in DTYPE_BYTES", "not spec.dtype"),
    Plant("frame may declare any size", "slot", "codecs.py", "if parameters.content_size != raw_bytes:", "if False:"),
    Plant("bytes after a zstd frame", "slot", "codecs.py", "if position + _CHECKSUM_BYTES != len(stored):", "if False:"),
    Plant("a walk past the end", "slot", "codecs.py", "if block_type == _RESERVED_BLOCK or position > len(stored):", "if block_type == _RESERVED_BLOCK:"),
    Plant("memory for what a slot declares", "slot", "codecs.py", "chunk = bytearray(min(slot.chunk_bytes, raw_bytes))", "chunk = bytearray(raw_bytes)"),
    Plant("planes may lie in any length", "slot", "codecs.py", "if plane_bytes > size_bytes or end > len(stored):", "if False:"),
    Plant("payloads need not fill a frame", "pack", "format/layout.py", "if offsets[-1] != frame_bytes:", "if False:"),
    Plant("a crash in a rare branch", "pack", "packing.py", "    raise _Refused(\"it holds an extension type\")\n\n\n# Each", "    import os\n    os.abort()\n\n\n# Each"),
    Plant("a record of the journal counts in any place", "journal", "format/journal.py", "digest != digest_of(self.store, nonce, _PLACE.pack(place), payload)", "digest != digest_of(self.store, nonce, _PLACE.pack(place), payload) and self.nonce"),
    Plant("a damaged mark is not told", "journal", "format/journal.py", "mark not in (_TURN, VOID) or any(padding)", "any(padding)"),
    Plant("behind damage no record is looked for", "journal", "format/journal.py", "search.next_record(place + _ALIGNED, key)", "size_bytes"),
    Plant("TypeError escapes from a record", "journal", "format/journal.py", "except (KeyError, TypeError, ValueError, StoreError) as error", "except (KeyError, ValueError, StoreError) as error"),
    Plant("the first record of a session counts", "replay", "folder/journal.py", "older = self._live.pop(record.uri, None)", "older = self._live.get(record.uri)\n            if older:\n                continue"),
    Plant("a head has a version twice", "head", "remote/heads.py", "if len(set(ids)) != len(ids):", "if False:"),
    Plant("a machine's name may be anything", "head", "remote/heads.py", " or not machine.isprintable()", ""),
    Plant("a TypeError escapes from a head", "head", "remote/heads.py", "except (ValueError, TypeError, StoreError) as error", "except (ValueError, StoreError) as error"),
    Plant("frames with gaps", "directory", "format/pack.py", "        if frame.offset != offset:\n", "        if False:\n"),
    Plant("two frames of one block", "directory", "format/pack.py", "if len({frame.id for frame in frames}) != len(frames):", "if False:"),
    Plant("no limit for a frame", "directory", "format/pack.py", "if is_stripped > 1 or frame_bytes > MAX_FRAME_BYTES or", "if is_stripped > 1 or"),
    Plant("a stripped frame with slots", "directory", "format/pack.py", " or (is_stripped and head_bytes != frame_bytes)", ""),
    Plant("pack id is not compared", "pack", "format/pack.py", "        if pack_id_of(encoded) != self.pack_id:\n", "        if False:\n"),
    Plant("unused bytes of a header", "pack", "format/sealing.py", "if fixed != _HEADER.pack(magic, version, HEADER_BYTES, file_bytes) or", "if"),
    Plant("a manifest of another name", "version", "format/manifest.py", "    if bundle_id is not None and digest != bundle_id:\n", "    if False:\n"),
    Plant("an import keeps its own name", "import", "exchange/transfer.py", "    uri = as_uri or manifest.uri\n    core.read_again()", "    uri = manifest.uri\n    core.read_again()"),
    Plant("marks in any form", "marks", "folder/marks.py", "if encode_marks(marks) != data:", "if False:"),
    Plant("RecursionError escapes from marks", "marks", "folder/marks.py", "except (*UNDECODED, InvalidUri", "except (*UNDECODED[:-1], InvalidUri"),
    Plant("store.json in any form", "store_file", "folder/store_file.py", "        if encode_store_file(store_uuid, budget) != data:\n", "        if False:\n"),
    Plant("AttributeError escapes from store.json", "store_file", "folder/store_file.py", "except UNDECODED as error:", "except (ValueError, TypeError, KeyError, RecursionError) as error:"),
    Plant("unknown needs stop no removal", "maintenance", "writing/removal.py", "    if needed.unknown:\n", "    if False:\n"),
    Plant("a delete in the diary is not applied", "diary", "diary.py", "max(last.get(uri, 0), of_all) > at_ns", "of_all > at_ns"),
    Plant("the diary believes what is not wanted", "diary", "diary.py", "    if at_ns >= _MAX_NS or", "    if kind == _SAYS and at_ns < since_ns:\n        return None\n    if at_ns >= _MAX_NS or"),
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--engine", default="atheris")
    parser.add_argument("--only")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    results = []
    for plant in PLANTS:
        if arguments.only in (None, plant.name):
            results.append(_hunt(plant, arguments))
            print(json.dumps(results[-1]), flush=True)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(results, indent=1) + "\n")
    return 0 if all(result["found"] for result in results) else 1


def _hunt(plant: Plant, arguments: argparse.Namespace) -> dict[str, object]:
    with tempfile.TemporaryDirectory(prefix="torpor-plant-") as folder:
        package = copy_package(Path(folder), layers=["memvid"])
        (package / "tests").symlink_to(ROOT / "tests")
        (module,) = (package / "memvid").rglob(plant.module)
        put(module, plant.after, instead_of=plant.before)
        report = Path(folder) / "report.json"
        command = [sys.executable, str(HERE / "run.py"), "--target", plant.target, "--seconds", str(arguments.seconds)]
        command += ["--engine", arguments.engine, "--stop-at-finding", "--no-corpus"]
        command += ["--json", str(report), "--out", str(Path(folder) / "findings")]
        environment = {**os.environ, "PYTHONPATH": folder}
        subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
        figures = json.loads(report.read_text())
    return {
        "plant": plant.name,
        "target": plant.target,
        "found": bool(figures["findings"]),
        "seconds": figures["first_finding_seconds"],
        "executions": figures["executions"],
        "as": figures["findings"],
    }


if __name__ == "__main__":
    sys.exit(main())
