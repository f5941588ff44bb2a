# ruff: noqa: E501 - what is replaced stands as it does in the code
"""Can the fuzzer find anything? Plant a fault in a copy of the code, fuzz it, and see how long it takes.

    python tests/memvid/fuzz/plants.py --seconds 60 [--only NAME]

Each plant is one replacement in one module. What is not found within the time is a hole in the fuzzer: it ends with 1.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]


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
    Plant("duplicate keys raise KeyError", "packing", "packing.py", 'raise _Refused(f"the key {key[:64]!r} is there twice")', "raise KeyError(key)"),
    Plant("no depth limit on reading", "packing", "packing.py", "    if depth > MAX_DEPTH:\n        raise _Refused(f\"nesting is deeper than {MAX_DEPTH}\")\n    if isinstance(value, list):", "    if isinstance(value, list):"),
    Plant("struct.error escapes", "packing", "packing.py", "except struct.error as error", "except ZeroDivisionError as error"),
    Plant("version is not checked", "manifest", "manifest.py", 'integer_in(fields["version"], 1, MAX_VERSION)', 'fields["version"]'),
    Plant("chain is not checked", "manifest", "manifest.py", "problem = require_chain(manifest.blocks, manifest.token_count)", "problem = None"),
    Plant("TypeError escapes from a manifest", "manifest", "manifest.py", "except (StoreError, ValueError, TypeError) as error", "except (StoreError, ValueError) as error"),
    Plant("slot digest is not checked for length", "block_header", "blocks.py", "if not isinstance(shape, list) or not _is_id(digest):", "if not isinstance(shape, list):"),
    Plant("sizes wrap at 64 bits", "block_header", "blocks.py", "        size *= dim\n", "        size = (size * dim + (1 << 63)) % (1 << 64) - (1 << 63)\n"),
    Plant("unknown dtype is a KeyError", "block_header", "blocks.py", "spec.dtype not in DTYPE_BYTES", "not spec.dtype"),
    Plant("frame may declare any size", "slot", "codecs.py", "if parameters.content_size != raw_bytes:", "if False:"),
    Plant("bytes after a zstd frame", "slot", "codecs.py", "if position + _CHECKSUM_BYTES != len(stored):", "if False:"),
    Plant("a walk past the end", "slot", "codecs.py", "if block_type == _RESERVED_BLOCK or position > len(stored):", "if block_type == _RESERVED_BLOCK:"),
    Plant("memory for what a slot declares", "slot", "codecs.py", "chunk = bytearray(min(slot.chunk_bytes, raw_bytes))", "chunk = bytearray(raw_bytes)"),
    Plant("planes may lie in any length", "slot", "codecs.py", "if plane_bytes > size_bytes or end > len(stored):", "if False:"),
    Plant("frames with gaps", "directory", "directory.py", "if start != offset:", "if False:"),
    Plant("two frames of one block", "directory", "directory.py", "if len({frame.id for frame in frames}) != len(frames):", "if False:"),
    Plant("no limit for a frame", "directory", "directory.py", "if zero or frame_bytes > MAX_FRAME_BYTES or", "if zero or"),
    Plant("a place without a holder", "directory", "directory.py", "if used != tuple(range(1, len(holders) + 1)) or len(set(holders)) != len(holders):", "if False:"),
    Plant("places that lie", "bundle", "directory.py", "if (place == 0) != (entry.id in here):", "if False:"),
    Plant("slot digest is not compared", "bundle", "bundle.py", "        if hasher.digest() != digest:\n            self._bad_slot(header, spec)\n\n    def check_block", "\n    def check_block"),
    Plant("deep check compares no digest", "bundle", "bundle.py", "            if hasher.digest() != digest:\n                self._bad_slot(header, spec)\n            if on_bytes", "            if on_bytes"),
    Plant("padding is not looked at", "bundle", "bundle.py", "if any(self._read(start + offset + stored.stored_bytes, padding)):", "if False:"),
    Plant("block id is not compared", "bundle", "bundle.py", "if block_id_of(head.block_header) != block_id:", "if False:"),
    Plant("bundle id is not compared", "bundle", "bundle.py", "if bundle_id_of(encoded) != self.bundle_id:", "if False:"),
    Plant("payloads need not fill a frame", "bundle", "layout.py", "if offsets[-1] != frame_bytes:", "if False:"),
    Plant("unused bytes of a header", "bundle", "layout.py", "if fixed != _HEADER.pack(magic, version, HEADER_BYTES, file_bytes) or", "if"),
    Plant("a crash in a rare branch", "bundle", "packing.py", "    raise _Refused(\"it holds an extension type\")\n\n\ndef _map", "    import os\n    os.abort()\n\n\ndef _map"),
    Plant("the chain is not compared at a wake", "store", "bundle.py", "    if found != promised:\n", "    if False:\n"),
    Plant("the row is not compared at a wake", "index", "sessions.py", "            require_same_as_row(row, uri, reader.manifest, reader.path)\n", "            pass\n"),
    Plant("an import asks for no promise", "import", "import_checks.py", "        require_promised(known[0], entry, parents[entry.id], manifest.identity.digest, file.path)\n", ""),
    Plant("an import keeps its own name", "import", "transfer.py", "uri = as_uri or manifest.uri", "uri = manifest.uri"),
    Plant("what was taken waits on", "import", "transfer.py", "        remove_taken(core.folder, bundle_id)\n", "        pass\n"),
    Plant("a refused export leaves its file", "export", "targets.py", "        finally:\n            temp.close()\n", "        finally:\n            pass\n"),
    Plant("an export skips the promise", "export", "bundle.py", "    if found != promised:\n", "    if False:\n"),
    Plant("store.json in any form", "store_file", "store_file.py", "    if file.encode() != data:\n", "    if False:\n"),
    Plant("AttributeError escapes from store.json", "store_file", "store_file.py", "except (ValueError, TypeError, AttributeError, RecursionError) as error:", "except (ValueError, TypeError, RecursionError) as error:"),
    Plant("a damaged store.json is made again by an opening", "store_file", "store_file.py", "        raise corrupt_store_file(path, reason_of(error)) from error\n", "        os.unlink(STORE_FILE, dir_fd=root_fd)\n        raise corrupt_store_file(path, reason_of(error)) from error\n"),
    Plant("marks in any form", "marks", "marks.py", "if encode_marks(marks) != data:", "if False:"),
    Plant("a record of the journal counts in any place", "journal", "format/journal.py", "digest != _digest(self.store, nonce, _PLACE.pack(place), payload)", "digest != _digest(self.store, nonce, _PLACE.pack(place), payload) and self.nonce"),
    Plant("a damaged mark is not told", "journal", "format/journal.py", "mark not in (_TURN, VOID) or any(padding)", "any(padding)"),
    Plant("behind damage no record is looked for", "journal", "format/journal.py", "search.next_record(place + _ALIGNED, key)", "size_bytes"),
    Plant("TypeError escapes from a record", "journal", "format/journal.py", "except (KeyError, TypeError, ValueError, StoreError) as error", "except (KeyError, ValueError, StoreError) as error"),
    Plant("the first record of a session counts", "replay", "folder/journal.py", "older = self._live.pop(record.uri, None)", "older = self._live.get(record.uri)\n            if older:\n                continue"),
    Plant("turns of which no version can be made are let go", "replay", "replaying.py", "            journal.waiting[uri] = error.message", "            journal.cover(uri)"),
    Plant("RecursionError escapes from marks", "marks", "marks.py", "except (ValueError, TypeError, RecursionError, InvalidUri", "except (ValueError, TypeError, InvalidUri"),
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--engine", default="atheris")
    parser.add_argument("--only")
    parser.add_argument("--json")
    parser.add_argument("--not", dest="known", action="append", default=[], help="a kind that the code has by itself")
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
        package = Path(folder) / "torpor"
        package.mkdir()
        for name in ("__init__.py", "errors.py", "places.py"):
            shutil.copy(ROOT / name, package)
        shutil.copytree(ROOT / "memvid", package / "memvid", ignore=shutil.ignore_patterns("__pycache__"))
        (module,) = (package / "memvid").rglob(plant.module)
        source = module.read_text()
        if source.count(plant.before) != 1:
            return {"plant": plant.name, "found": False, "why": f"it does not fit {plant.module}"}
        module.write_text(source.replace(plant.before, plant.after))
        report = Path(folder) / "report.json"
        command = [sys.executable, str(HERE / "run.py"), "--target", plant.target, "--seconds", str(arguments.seconds)]
        command += ["--engine", arguments.engine, "--stop-at-finding", "--no-corpus"]
        command += ["--json", str(report), "--out", str(Path(folder) / "findings")]
        command += [text for kind in arguments.known for text in ("--not", kind)]
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
