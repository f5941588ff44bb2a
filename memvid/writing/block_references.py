"""The frames that each session needs: one pass over the manifests and directories of all live versions.

`usage` and `forget` count from it. Changes nothing.

How it works: a version needs a frame where its directory places a block of its manifest. Nearly all such places are in
files of the version's own session that list the block themselves. Only the exceptions are kept: frames that another
session needs, and frames in files that do not list their block (retired files, and frames that a compaction has put
into a file for others). So memory grows with the exceptions and with the frames of the largest session, not with the
store; time with the number of versions times their blocks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from ..errors import BundleMissing, StoreError
from ..format.bundle import BundleFile
from ..format.layout import LIVE_SUFFIX, RETIRED_SUFFIX
from ..format.manifest import Manifest
from ..format.records import Finding
from ..index.rows import UNREADABLE
from ..index.unknown_references import missed_finding, unreadable_finding, untold_finding
from ..uri import SessionUri
from .core import StoreCore


@dataclass(slots=True)
class Needs:
    """The result of one pass.

    needed: for each exceptional frame, by the bundle whose file has it and by block, the sessions that need it.
    surplus: live bundles whose files have frames that their own manifests do not list.
    retired: bundles whose files are retired.
    unread: bundles with unknown needs, and the reason.
    """

    needed: dict[bytes, dict[bytes, set[SessionUri]]] = field(default_factory=dict)
    surplus: list[bytes] = field(default_factory=list)
    retired: list[bytes] = field(default_factory=list)
    unread: dict[bytes, Finding] = field(default_factory=dict)

    def of(self, bundle_id: bytes) -> dict[bytes, set[SessionUri]]:
        """The exceptional frames of a bundle's file that are needed, each with its users."""
        return self.needed.get(bundle_id, {})


LiveFile = Callable[[BundleFile, Manifest], None]


def read_needs(core: StoreCore, on_file: LiveFile, but_for: Iterable[bytes] = ()) -> Needs:
    """Visit every version but those of `but_for`; `on_file` gets each live file that could be read. Works beside a
    daemon: leaves out versions that go meanwhile."""
    needs = Needs()
    leaving = frozenset(but_for)
    listed = core.folder.list_bundles()
    needs.retired = [one for one, suffix in listed.items() if suffix == RETIRED_SUFFIX or one in leaving]
    live = {one for one, suffix in listed.items() if suffix == LIVE_SUFFIX and one not in leaving}
    for bundle_ids in _sessions(core, live):
        _read_session(core, bundle_ids, needs, on_file)
    for bundle_id in core.index.with_status(UNREADABLE):
        needs.unread.setdefault(bundle_id, unreadable_finding(core.folder, core.index, bundle_id))
    needs.unread.update(
        (one, missed_finding(core.folder.bundle_path(one), row))
        for one, row in core.index.missed().items()
        if one not in leaving
    )
    rows = core.index.given_up()
    needs.unread.update(
        (one, untold_finding(core.folder.bundle_path(one), rows[one]))
        for one in core.index.aside_untold()
        if one not in leaving
    )
    return needs


def _sessions(core: StoreCore, live: set[bytes]) -> Iterator[list[bytes]]:
    """The live bundles, those of one session together; bundles without a session one by one."""
    known: set[bytes] = set()
    for _, rows in itertools.groupby(core.index.all_rows(), lambda row: row.uri):
        bundle_ids = [row.bundle_id for row in rows if row.bundle_id in live]
        known.update(bundle_ids)
        yield bundle_ids
    for bundle_id in sorted(live - known):
        yield [bundle_id]


def _read_session(core: StoreCore, bundle_ids: list[bytes], needs: Needs, on_file: LiveFile) -> None:
    mine = frozenset(bundle_ids)
    own: dict[bytes, frozenset[bytes]] = {}  # the blocks that a file has and lists
    sought: dict[bytes, set[bytes]] = {}  # the blocks that the session looks for in its own files
    session: SessionUri | None = None
    for bundle_id in bundle_ids:
        try:
            with core.open_bundle(bundle_id) as file:
                manifest = file.manifest
                if manifest is None:
                    needs.unread[bundle_id] = unreadable_finding(
                        core.folder, core.index, bundle_id, "it has no manifest"
                    )
                    continue
                session = manifest.uri
                here = own[bundle_id] = frozenset(file.frames).intersection(entry.id for entry in manifest.blocks)
                if len(here) != len(file.frames):
                    needs.surplus.append(bundle_id)
                for entry in file.entries:
                    holder = entry.bundle_id
                    if holder is None or holder == bundle_id:
                        continue
                    if holder in mine:
                        sought.setdefault(holder, set()).add(entry.id)
                    else:
                        _need(needs, holder, entry.id, session)
                on_file(file, manifest)
        except BundleMissing:
            continue  # a daemon beside us has deleted it
        except StoreError as error:
            needs.unread[bundle_id] = unreadable_finding(core.folder, core.index, bundle_id, error.message)
    if session is not None:
        for holder, blocks in sought.items():
            for block_id in blocks.difference(own.get(holder, ())):
                _need(needs, holder, block_id, session)


def _need(needs: Needs, holder: bytes, block_id: bytes, session: SessionUri) -> None:
    needs.needed.setdefault(holder, {}).setdefault(block_id, set()).add(session)
