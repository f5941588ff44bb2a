"""Bundles of every kind of cache as a release of mlx-lm held them, which must wake for ever.

`python tests/snapshot/release_fixtures.py` writes those that the installed release lacks; what is there stays as it is.
"""

from __future__ import annotations

import importlib.metadata
import json
import tempfile
from pathlib import Path

from torpor.memvid.format.identity import Identity
from torpor.memvid.store import Store
from torpor.memvid.uri import SessionUri
from torpor.snapshot.capture import cut

import mlx.core as mx  # isort: skip  # after torpor, which chooses the BLAS
from blake3 import blake3  # isort: skip

from torpor.tests.snapshot import stored_rig
from torpor.tests.snapshot.growers import GROWERS, Run, fingerprint

FOLDER = Path(__file__).parent / "release_fixtures"
URI = SessionUri("fixtures", "kind")
IDENTITY = Identity((("fixture", "of every kind of cache"),))
READ = (12, 1, 20, 1, 1)
"""Past the windows and chunks of 16 tokens, with reads at once and one by one."""


def grown(kind: str) -> Run:
    """A state of that kind after all of `READ`."""
    run = Run(GROWERS[kind], mx.float32)
    for count in READ:
        run.read(count)
    return run


def file_of(kind: str) -> str:
    return kind.replace(" ", "-") + ".mvb"


def digest_of(run: Run) -> str:
    """BLAKE3, as hex, of all that its caches hold."""
    return blake3(repr(fingerprint(run.state.caches)).encode()).hexdigest()


def held_of(folder: Path) -> dict[str, str]:
    """The digest of what each bundle of a release holds, by kind; empty where the release has none."""
    file = folder / "held.json"
    held: dict[str, str] = json.loads(file.read_text()) if file.exists() else {}
    return held


def write_missing(folder: Path) -> None:
    """Write the bundle of each kind that has none yet, and what is in it."""
    folder.mkdir(parents=True, exist_ok=True)
    held = held_of(folder)
    for kind in GROWERS.keys() - held.keys():
        run = grown(kind)
        with tempfile.TemporaryDirectory() as scratch, Store.open(Path(scratch) / "store", writable=True) as store:
            snapshot = cut(run.state, run.layout(), durable=(), unchanged_tokens=0)
            stored_rig.write(store, URI, IDENTITY, snapshot.drafts(), snapshot.token_count, compressed=True)
            store.export_session(URI, None, folder / file_of(kind), replacing=True)
        held[kind] = digest_of(run)
    (folder / "held.json").write_text(json.dumps(held, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    write_missing(FOLDER / f"mlx-lm-{importlib.metadata.version('mlx-lm')}")
