"""Targets for bytes that reach a store from outside: an imported file and store.json.

The store around them is sound and known, so that whatever comes of the input, nothing else may change.
"""

from __future__ import annotations

import contextlib
import functools
import json
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path
from random import Random
from typing import Any, Final

from blake3 import blake3
from torpor.memvid.errors import StoreError
from torpor.memvid.exchange.incoming import hand_over
from torpor.memvid.format.records import Receipt
from torpor.memvid.store import Store
from torpor.memvid.uri import SessionUri
from torpor.tests.memvid.fuzz import pack_file
from torpor.tests.memvid.fuzz.marks_target import VALUES, canonical, change_document, sealed
from torpor.tests.memvid.fuzz.store_targets import (
    InStore,
    Truth,
    Version,
    all_rows,
    export_of,
    look_at,
    read_checked,
    write,
)
from torpor.tests.memvid.fuzz.target import SOUND, Target, again, require

NOBODY: Final = ""
"""The file that is harmed where none is."""

OTHER: Final = SessionUri("other", "name")


def bundle_id_of(data: bytes) -> str:
    """The digest of the manifest in an exported file; nothing's where it has none."""
    try:
        return blake3(pack_file.take_apart(data).manifest).hexdigest()
    except pack_file.Unparsable:
        return "00" * 32


def require_the_others(store: Store, truths: dict[Version, Truth]) -> None:
    """Every version of the template is there, and wakes as it was put to sleep."""
    seen = look_at(store, truths, NOBODY)
    require(all(seen.get(truth.bundle_id) for truth in truths.values()), "a version is gone")


def without_leftovers(store_path: Path) -> bool:
    return not any(store_path.glob("**/*.tmp"))


class ImportTarget(InStore):
    """A byte that says how a file comes in (given by path, handed over, or left in STORE/incoming by a liar), under
    which name, and how often; then the file."""

    name = "import"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._exported: list[bytes] = []
        target = folder / "exported"
        with Store.open(self._template.path, writable=False) as store:
            for row in all_rows(store):
                with contextlib.suppress(StoreError):  # one is stripped
                    store.export_session(row.uri, row.version, target)
                    self._exported.append(target.read_bytes())
                    target.unlink()

    def seeds(self) -> Iterable[bytes]:
        for number, data in enumerate([*self._exported, *self._template.packs]):
            yield bytes([number]) + data
            yield bytes([number + 6]) + data

    def change(self, data: bytes, rng: Random) -> bytes:
        how = data[:1] if rng.random() < 0.7 else rng.randbytes(1)
        return how.ljust(1, b"\x00") + pack_file.change(data[1:], rng)

    def check(self, data: bytes) -> str:
        how, file = (data[:1] or b"\x00")[0], data[1:]
        template, source = self._template, self.folder / "source"
        template.restore(indexed=True)
        source.write_bytes(file)
        as_uri = OTHER if how // 3 % 2 else None
        with Store.open(template.path, writable=True) as store:
            before = {row.bundle_id for row in all_rows(store)}
            for _ in range(1 + how // 6 % 2):
                try:
                    receipt = self._bring_in(store, how % 3, source, file, as_uri)
                except StoreError:
                    require({row.bundle_id for row in all_rows(store)} == before, "a refused import left a version")
                    require_the_others(store, template.truths)
                    raise
                again(functools.partial(require_imported, store, receipt, file, as_uri))
                before = {row.bundle_id for row in all_rows(store)}
            require_the_others(store, template.truths)
            require(store.verify(deep=True).ok, "verify finds something after an import")
            self._require_export(store, receipt, file)
        require(without_leftovers(template.path), "an import left a temporary file")
        with Store.open(template.path, writable=True) as store:
            require({row.bundle_id for row in all_rows(store)} == before, "other versions after the next opening")
        return SOUND

    def _bring_in(self, store: Store, how: int, source: Path, file: bytes, as_uri: SessionUri | None) -> Receipt:
        if how == 0:
            return store.import_file(source, as_uri=as_uri)
        folder = self._template.path / "incoming"
        if how == 1:
            bundle_id = hand_over(str(self._template.path), str(source))
        else:
            bundle_id = bundle_id_of(file)
            write(folder / f"{bundle_id}.mvb", file)
        receipt = store.adopt_incoming(bundle_id, as_uri=as_uri)
        require(not any(folder.iterdir()), "what was imported still waits")
        return receipt

    def _require_export(self, store: Store, receipt: Receipt, file: bytes) -> None:
        """What is exported of it stands alone, and is the same snapshot if it is the same bundle."""
        exported = export_of(store, receipt.uri, receipt.version, self.folder)
        assert exported is not None
        if receipt.bundle_id == bundle_id_of(file):
            mine, other = pack_file.take_apart(file), pack_file.take_apart(exported)
            require(mine.manifest == other.manifest, "another manifest is exported than was imported")


def require_imported(store: Store, receipt: Receipt, file: bytes, as_uri: SessionUri | None) -> None:
    """The version that a receipt tells of holds the blocks that the file lists, in its name or in the wanted one."""
    listed = [line[0] for line in pack_file.lines_of(pack_file.take_apart(file).manifest, "blocks", pack_file.LINE)]
    with store.open_session(receipt.uri, receipt.version) as reader:
        require(reader.bundle_id == receipt.bundle_id, "a receipt names another bundle")
        require([entry.id for entry in reader.entries] == listed, "other blocks than those of the file")
        require(as_uri in (None, reader.manifest.uri), "it has another name than was asked for")
        same = receipt.bundle_id == bundle_id_of(file)
        require(same or reader.manifest.parent == bundle_id_of(file), "its parent is not what was imported")
        read_checked(reader)


class StoreFileTarget(InStore):
    """store.json: refused without a change, or the store of this very content with all its versions."""

    name = "store_file"
    max_bytes = 1 << 13

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._path = self._template.path / "store.json"
        self._original = self._path.read_bytes()

    def seeds(self) -> Iterable[bytes]:
        document = json.loads(self._original)
        yield self._original
        yield sealed({**document, "uuid": str(uuid.UUID(int=1))})
        yield sealed({**document, "version": 3})

    def change(self, data: bytes, rng: Random) -> bytes:
        if rng.random() < 0.1:
            return canonical(rng.choice(VALUES))
        return change_document(data, rng, self.max_bytes)

    def check(self, data: bytes) -> str:
        self._template.restore(indexed=True)
        write(self._path, data)
        try:
            for writable in (False, True):
                self._open(writable)
        finally:
            changed = self._path.read_bytes() != data
            write(self._path, self._original)
        require(not changed, "store.json was changed")
        document = json.loads(data)
        require(sealed(document) == data, "the digest is not that of the content, or the form is another")
        require(told(document) is not None, "what says no version and no uuid of a store was opened")
        return SOUND

    def _open(self, writable: bool) -> None:
        try:
            with Store.open(self._template.path, writable=writable) as store:
                require_the_others(store, self._template.truths)
                codes = {finding.code for finding in store.verify(deep=False).findings}
                is_other = store.uuid != json.loads(self._original)["uuid"]  # marks and index are of the first one then
                require(codes <= ({"corrupt_marks", "index_failed"} if is_other else set()), "verify finds more")
        finally:
            files = {path for path in self._template.path.rglob("*.mv?") if path.is_file()}
            kept = {path for path in self._template.files if path.suffix in (".mvp", ".mvm")}
            require(files == kept, "a file came or went")


def told(document: Any) -> str | None:
    """The uuid that store.json tells, where it is one of this version."""
    if not isinstance(document, dict) or document.keys() != {"digest", "format", "uuid", "version"}:
        return None
    if document["format"] != "torpor.store" or type(document["version"]) is not int or document["version"] != 2:
        return None
    said = document["uuid"]
    known = isinstance(said, str) and str(uuid.UUID(said)) == said
    return said if known else None


TARGETS: Final[Sequence[type[Target]]] = (ImportTarget, StoreFileTarget)
