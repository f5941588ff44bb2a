"""Checks the disk without changing it, one session or a whole store: which blocks are sound in packs, and which
versions are not whole by them. Repairs nothing.

A damaged frame is a finding of its pack, and one of a version only where no other pack has a sound copy of the block.
Each pack is read once, then each manifest. Other threads, and a daemon beside a store that was opened for reading, move
blocks and delete versions meanwhile: what is not found is looked for again before it is told. Time grows with the bytes
read, memory with the number of blocks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Container, Generator, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ..answers import Finding, VersionInfo
from ..errors import BundleMissing, StoreClosed, StoreError
from ..folder.marks import findings_of_missing, stripped_in
from ..folder.store_file import PACKS
from ..format.manifest import Manifest
from ..format.pack_writer import joined_block
from ..format.records import DamagedVersion, Progress, VerifyReport
from ..uri import SessionUri
from ..writing.core import StoreCore
from ..writing.reader import MOST_LOOKS
from ..writing.removal import packs_of
from ..writing.unreadable import finding_of_missing
from .findings import findings_of_pack, findings_of_rivals, findings_of_store
from .packs import PackCheck, check_pack
from .promised import require_same_as_row, still_missing
from .wholeness import FoundBlocks, Lack, damaged_version, finding_of, lack_of

Result = TypeVar("Result")
Steps = Generator[int, None, Result]
"""A check that yields the bytes of each block behind it. Whoever runs it may wait in between, or give it up."""


def exhausted(steps: Generator[Any, None, Result]) -> Result:
    """The result of a check that waits for nobody."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: Result = end.value
            return result


@dataclass(slots=True)
class _Suspect:
    """A version that was not found whole; without `manifest` for the reason `why`."""

    bundle_id: str
    row: VersionInfo | None
    manifest: Manifest | None = None
    why: StoreError | None = None


@dataclass(slots=True)
class Check:
    """Reads packs (deep: every byte) and manifests, and gathers what they have and what is wrong. `faulty`: packs with
    faults. `planned`: manifests that count as if they were there, for a dry run. One thread."""

    core: StoreCore
    deep: bool
    on_progress: Progress | None = None
    found: FoundBlocks = field(default_factory=FoundBlocks)
    faulty: dict[str, PackCheck] = field(default_factory=dict)
    planned: dict[str, Manifest] = field(default_factory=dict)
    bundles: int = 0
    blocks: int = 0
    bytes_checked: int = 0
    _read: set[str] = field(default_factory=set)
    _suspects: list[_Suspect] = field(default_factory=list)
    _stripped: frozenset[str] | None = None

    # --- packs

    def read_packs(self, names: Iterable[str], wanted: Container[bytes] | None = None) -> Steps[None]:
        """Check these packs; of one the `wanted` blocks, if any are named."""
        sizes = self.core.index.pack_sizes()
        ordered = sorted(names)
        done, total = 0, sum(sizes.get(name, 0) for name in ordered)
        for name in ordered:
            yield from self._read_pack(name, wanted)
            done += sizes.get(name, 0)
            if self.on_progress is not None:
                self.on_progress(done, total)

    def _read_pack(self, name: str, wanted: Container[bytes] | None) -> Steps[None]:
        check = yield from check_pack(self.core.folder, name, deep=self.deep, wanted=wanted)
        self.blocks += check.blocks_checked
        self.bytes_checked += check.bytes_checked
        if check.is_missing:
            return
        self._read.add(name)
        self.found.take(check)
        if check.faults:
            self.faulty[name] = check

    # --- versions

    def read_versions(self, rows: Iterable[VersionInfo], others: Iterable[str]) -> None:
        """Check the manifests of these versions, and of those that the index does not tell of, against the blocks that
        were found."""
        self._stripped = stripped_in(self.core.folder)
        for row in sorted(rows, key=lambda row: (row.uri, row.version, row.bundle_id)):
            self._read_version(row.bundle_id, row)
        for bundle_id in sorted(others):
            self._read_version(bundle_id, None)

    def _read_version(self, bundle_id: str, row: VersionInfo | None) -> None:
        self.bundles += 1
        try:
            manifest = self.planned.get(bundle_id) or self.core.read_manifest(bundle_id)
            if row is not None:
                require_same_as_row(row, row.uri, manifest, self._path_of(bundle_id))
        except StoreClosed:
            raise
        except StoreError as error:
            self._suspects.append(_Suspect(bundle_id, row, why=error))
            return
        if self.lack_of(bundle_id, manifest) is not None:
            self._suspects.append(_Suspect(bundle_id, row, manifest))

    def is_stripped(self, bundle_id: str) -> bool | None:
        """None: that is unknown, for the marks cannot be read."""
        return None if self._stripped is None else bundle_id in self._stripped

    def lack_of(self, bundle_id: str, manifest: Manifest) -> Lack | None:
        return lack_of(manifest, self.found, is_stripped=self.is_stripped(bundle_id))

    def _path_of(self, bundle_id: str) -> str:
        return self.core.folder.manifest_path(bundle_id)

    # --- the end

    def look_for_blocks(self) -> Steps[None]:
        """Look again for the blocks that versions lack. First in damaged frames: where several packs have one of a
        block, each slot is read from a pack in which it is sound. Then in packs that came meanwhile."""
        for block_id in self.lacking():
            with contextlib.ExitStack() as stack:
                files = []
                for name in self.core.index.packs_of(block_id):
                    with contextlib.suppress(StoreError):
                        files.append(stack.enter_context(self.core.files.holding(name)))
                if block := joined_block(files, block_id):
                    self.found.full[block_id] = hash(block.header.said)
        for _ in range(MOST_LOOKS):
            self._stripped = stripped_in(self.core.folder) if self._suspects else self._stripped
            lacking = self.lacking()
            if not lacking:
                return
            self.core.look_again()
            new = packs_of(self.core, lacking) - self._read
            if not new:
                return
            for name in sorted(new):
                yield from self._read_pack(name, lacking)

    def lacking(self) -> set[bytes]:
        """The blocks that versions lack."""
        blocks: set[bytes] = set()
        for one in self._suspects:
            if one.manifest is not None and (lack := self.lack_of(one.bundle_id, one.manifest)) is not None:
                blocks.update(entry.id for entry in lack.blocks)
        return blocks

    def tell(self) -> tuple[list[Finding], list[DamagedVersion]]:
        """The findings about versions: each that is not whole, and each manifest that cannot be read."""
        gone = {one.bundle_id for one in self._suspects if one.bundle_id not in self.planned}
        gone = {each for each in gone if not self.core.folder.has_manifest(each)}
        missing = still_missing(self.core, gone)
        findings: list[Finding] = []
        damaged: list[DamagedVersion] = []
        for one in self._suspects:
            if one.bundle_id in gone and (one.row is None or one.bundle_id not in missing):
                continue  # it was deleted
            if one.bundle_id not in gone and isinstance(one.why, BundleMissing):
                continue  # it was put back
            if one.row is not None and (one.bundle_id in gone or one.why is not None):
                damaged.append(DamagedVersion(one.row.uri, one.row.version, one.bundle_id, 0))
            if one.row is not None and one.bundle_id in gone:
                findings.append(finding_of_missing(self.core.folder, one.row))
            elif one.why is not None:
                whose = (str(one.row.uri), one.row.version) if one.row is not None else (None, None)
                findings.append(Finding(self._path_of(one.bundle_id), one.why.code, one.why.message, *whose))
            elif one.manifest is not None and (lack := self.lack_of(one.bundle_id, one.manifest)) is not None:
                is_stripped = bool(self.is_stripped(one.bundle_id))
                version = damaged_version(one.manifest, one.bundle_id, lack, is_stripped=is_stripped)
                findings.append(finding_of(version, self.core.folder.path_of(PACKS), lack))
                damaged.append(version)
        return findings, damaged


def verify_store(
    core: StoreCore, uri: SessionUri | None, *, deep: bool, on_progress: Progress | None
) -> Steps[VerifyReport]:
    """See `Store.verify`. For one session: its manifests, and its blocks in all packs that have them. For all: every
    manifest and pack, the small files, the journal, and what belongs to nobody.

    Raises:
        StoreClosed, StoreIoError: the store's folder cannot be listed.
    """
    core.look_again()
    check = Check(core, deep, on_progress)
    if uri is None:
        findings = findings_of_store(core)
        yield from check.read_packs(core.folder.list_packs())
        rows = core.index.rows_of(core.index.bundle_ids())
        others = core.folder.list_versions() - rows.keys()
    else:
        findings, others = findings_of_missing(core.folder, core.index.knows, uri), set()
        rows = {row.bundle_id: row for row in core.index.versions(uri)}
        wanted = {block_id for bundle_id in rows for block_id in core.needs.of(bundle_id)}
        yield from check.read_packs(packs_of(core, wanted), wanted)
    findings += findings_of_rivals(core, rows.values())
    check.read_versions(rows.values(), others)
    yield from check.look_for_blocks()
    of_versions, damaged = check.tell()
    of_packs = [
        finding
        for name, pack in check.faulty.items()
        if core.folder.has(name)  # else it was removed meanwhile
        for finding in findings_of_pack(core, pack)
    ]
    return VerifyReport(
        (*findings, *of_packs, *of_versions),
        check.bundles,
        check.blocks,
        check.bytes_checked,
        damaged=tuple(damaged),
    )
