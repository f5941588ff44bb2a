"""Stores of format 1, in tests/memvid/data: made once by the last Torpor of format 1, and never again.

format-1/          of the release that introduced the format; format-1-cases/released.json: what that Torpor read
format-1-whole/    all that a carrying over meets. store/: a chain whose blocks moved, a fork, compressed slots, a
                   holder of a deleted session, a version that repair moved away with the note of another, two
                   damaged bundles, marks, and turns in the journal. expected.json: what that Torpor read
format-1-cases/    small/: 300 and 600 tokens of a session, the first tagged, and another session; backup/: of its
                   first version; small.mvb: its second, exported; group.json: what a group of it left behind.
                   rival/: another store, without marks, in which the other session has other tokens.
                   chain/: 600 and 900 tokens, a fork without a parent, and another session.
                   planes.mvb: exported from format-1
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from torpor.memvid.format.manifest import decode_manifest
from torpor.memvid.format_1 import BundleFile
from torpor.memvid.uri import SessionUri
from torpor.tests.memvid.store_making import contents, flip

DATA = next(folder / "data" for folder in Path(__file__).parents if (folder / "data" / "format-1").is_dir())
CASES = DATA / "format-1-cases"
EXPECTED: list[dict[str, Any]] = json.loads((DATA / "format-1-whole" / "expected.json").read_text())
"""Of each version of the whole fixture: session, version, bundle_id, and as state its digest, None where it is lost."""
RELEASED: list[dict[str, Any]] = json.loads((CASES / "released.json").read_text())

SMALL: dict[str, int] = {"layers": 1, "heads": 1, "dim": 2}
LOST_URI = SessionUri("default", "lost")
TORN_URI = SessionUri("default", "torn")
ROTTEN_URI = SessionUri("default", "rotten")
NEW_URI = SessionUri("other", "new")


def private_copy(source: Path, target: Path) -> Path:
    """A copy as a store is: git keeps neither modes nor empty folders."""
    shutil.copytree(source, target)
    (target / "quarantine").mkdir(exist_ok=True)
    for item in (target, *target.rglob("*")):
        item.chmod(0o700 if item.is_dir() else 0o600)
    return target


def case(name: str, target: Path) -> Path:
    """A copy of one of the small stores."""
    return private_copy(CASES / name, target)


def claims(store: Path) -> dict[tuple[str, int], Path]:
    """The bundles of an undamaged store, by the session and the version that each one is."""
    found = {}
    for path in sorted(store.glob("bundles/*/*.mvb")):
        with BundleFile(os.open(path, os.O_RDONLY), str(path), None) as file:
            manifest = decode_manifest(file.encoded_manifest(), str(path))
            found[str(manifest.uri), manifest.version] = path
    return dict(sorted(found.items()))


def bundle_of(store: Path, uri: SessionUri, version: int = 1) -> Path:
    return claims(store)[str(uri), version]


def damage_manifest(bundle: Path) -> bytes:
    """Flip a bit of the manifest in a bundle's file; what the file was before."""
    with BundleFile(os.open(bundle, os.O_RDONLY), str(bundle), None) as file:
        at = file.trailer.manifest_offset + 100
    return flip(bundle, at)


def digest_of(reader: Any) -> str:
    """One digest over all that a version is: manifest, tokens, every slot."""
    digest = hashlib.sha256(reader.manifest.encode())
    digest.update(reader.tokens())
    for slots in contents(reader):
        for data in slots:
            digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()
