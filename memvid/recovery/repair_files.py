"""The files that a repair writes: flushed and read back before any of them has a name."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ..disk.durable import TempFile
from ..folder import quarantine
from ..format.blocks import span_parents
from ..format.bundle import FrameFile, require_promised
from ..format.layout import RETIRED_SUFFIX
from ..format.manifest import Manifest
from ..format.reader import FilePool
from ..format.writer import BundleWriter
from ..index.rows import LIVE, IndexedBundle, row_of
from .plan_steps import Layout, Mend, Restore, Salvage
from .repair_run import RepairRun
from .survey import FileState, open_source


class RepairFiles:
    def __init__(self, run: RepairRun) -> None:
        self._run = run

    @contextlib.contextmanager
    def written(
        self, layout: Layout, encoded: bytes, manifest: Manifest | None, bundle_id: bytes, *, pinning: bool = True
    ) -> Iterator[tuple[TempFile, IndexedBundle]]:
        """A new file with these frames, flushed and read back, and its row for the index."""
        core = self._run.core
        with core.pinning() as pin, contextlib.ExitStack() as stack:
            sources = {self._run.survey.by_key[key].bundle_id for _, key in layout.frames}
            for other in {*layout.holders.values(), *sources} if pinning else ():
                pin(other)
            pool = stack.enter_context(FilePool(self._open_source))
            with core.poisoning():
                temp = core.new_temp()
                stack.callback(temp.close)
                writer = BundleWriter(temp)
                self._copy_frames(writer, pool, layout, manifest)
                blocks = manifest.blocks if manifest else ()
                directory = writer.finish(encoded, blocks, bundle_id, layout.holders)
            self._run.bytes_written += temp.size_bytes
            row = row_of(manifest, bundle_id, temp.size_bytes) if manifest else None
            yield temp, IndexedBundle(bundle_id, LIVE, row, directory.holders, tuple(writer.frames))

    def _copy_frames(self, writer: BundleWriter, pool: FilePool, layout: Layout, manifest: Manifest | None) -> None:
        """Copy frames; each that the manifest lists is checked against it."""
        listed = {entry.id: entry for entry in manifest.blocks} if manifest else {}
        parents = span_parents(manifest.blocks) if manifest else {}

        def frame_bytes(frame: tuple[bytes, bytes]) -> int:
            return self._run.survey.by_key[frame[1]].frame_bytes[frame[0]]

        for block_id, source in writer.each(layout.frames, frame_bytes):
            with pool.holding(source) as file:
                if manifest is not None and block_id in listed:
                    header = file.read_head(block_id)[0]
                    require_promised(header, listed[block_id], parents[block_id], manifest.identity.digest, file.path)
                writer.add_copy(file, block_id)

    def _open_source(self, key: bytes) -> FrameFile:
        return open_source(self._run.core, self._run.survey.by_key[key])

    def needs(self, step: Mend | Restore | Salvage) -> set[bytes]:
        """The bundles that must stay where they are if a step cannot be done."""
        layout = step.layout
        sources = {self._run.survey.by_key[key].bundle_id for _, key in layout.frames} if layout else set()
        return {step.file.bundle_id, *sources, *(layout.holders.values() if layout else ())}

    @contextlib.contextmanager
    def copied(self, file: FileState) -> Iterator[quarantine.QuarantineCopy | None]:
        """A copy of a damaged file for the quarantine; None for one that is only written anew."""
        if not file.damage:
            yield None
            return
        with self._run.core.poisoning():
            copy = quarantine.QuarantineCopy(self._run.core.folder, file.bundle_id, file.suffix, self.ending(file))
        with copy:
            self._run.bytes_written += copy.bytes_written
            yield copy

    def ending(self, file: FileState) -> str:
        """The ending of its copy in quarantine: a version without a row, under another one's name, was deleted, and
        must not come back."""
        is_gone = file.content is not None and not self._run.core.index.knows(file.content)
        return RETIRED_SUFFIX if is_gone else file.suffix
