"""A repair under way: its survey, its report, and how each step is taken or planned."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from ..checking import set_aside_versions
from ..checking.set_aside_versions import LOST
from ..disk.paths import Stamp
from ..errors import Corruption
from ..format.layout import LIVE_SUFFIX, RETIRED_SUFFIX
from ..format.records import Action
from ..index.schema import IndexUnusable
from ..writing.maintenance_run import MaintenanceRun
from .plan_steps import Layout
from .survey import FileState, Survey

CHANGED: Final = "changed_meanwhile"


class Changed(Exception):
    """The store differs from the survey. Never leaves a repair."""


@dataclass(slots=True)
class RepairRun(MaintenanceRun):
    """A repair, carried out or only planned.

    held: the bundles that a failed step still needs. `_stamps`: the new stamps of files that steps have changed.
    """

    survey: Survey = field(default_factory=lambda: Survey({}, frozenset()))
    held: set[bytes] = field(default_factory=set)
    _stamps: dict[tuple[bytes, str], Stamp | None] = field(default_factory=dict)

    def do(
        self,
        path: str,
        actions: Sequence[Action],
        work: Callable[[], None],
        *,
        layout: Layout | None = None,
        copied: FileState | None = None,
        needs: Iterable[bytes] = (),
        of: bytes | None = None,
        loss: str = "",
    ) -> bool:
        """Take a step; or plan it: it writes a file of this layout, and a copy of a damaged one. A failed step only
        stops those that would remove what it needs. `of`: its bundle; if that is gone, there is no problem.

        Raises:
            NoSpace, StoreIoError, DurabilityLost, LockLost, ReadOnlyStore, StoreClosed
        """
        if self.dry_run:
            self.bytes_written += layout.size_bytes if layout else 0
            self.bytes_written += copied.file_bytes if copied is not None and copied.damage else 0
        elif not self.succeeds(path, work, needs, of):
            return False
        self.actions += actions
        if loss:
            self.tell(path, LOST, loss)
        return True

    def succeeds(
        self, path: str, work: Callable[[], None], needs: Iterable[bytes] = (), of: bytes | None = None
    ) -> bool:
        try:
            work()
            return True
        except Changed:
            message = f"{path} is in use or has changed since it was looked at; it was left. Run it again."
            if of is None or not self.went(of):
                self.tell(path, CHANGED, message)
        except Corruption as error:
            self.tell(path, error.code, f"{path} was left as it is: {error.message}")
        except IndexUnusable as error:
            self.tell(path, CHANGED, f"{path} was left as it is: {error}. Run it again.")
        self.held.update(needs)
        return False

    def went(self, bundle_id: bytes) -> bool:
        """Whether a version was deleted since, or a file without a version is gone."""
        core = self.core
        was_version = bundle_id in self.survey.rows or bundle_id in self.survey.given_up
        return not core.index.knows(bundle_id) and (was_version or core.folder.is_gone(bundle_id))

    def require_index_file(self) -> None:
        """Write an index in memory to its file again: a repair's moves must not depend on a clean close of the store,
        while old rows still stand in the file.

        Raises:
            NoSpace, StoreIoError, DurabilityLost: it cannot be written.
        """
        with self.committing_to_file():
            pass

    def settle_leaving(self) -> None:
        """Finish the deletes begun in quarantine: a version set aside after that would look deleted.

        Raises:
            UnsafePath, NoSpace, StoreIoError, DurabilityLost: one cannot be finished.
        """
        if self.dry_run:
            return
        with self.committing_to_file():
            for error in set_aside_versions.settle_leaving(self.core.folder, self.core.index).values():
                raise error

    @contextlib.contextmanager
    def committing_to_file(self) -> Iterator[None]:
        """As the core's, with the index in its file: a delete beside this repair may have left that behind."""
        with self.core.committing():
            self.core.index.return_to_file()
            yield

    def is_changed(self, bundle_id: bytes) -> bool:
        """Whether a bundle's files differ from the survey, apart from this repair's own steps."""
        stamp_of = self.core.folder.stamp_of
        return any(
            stamp_of(bundle_id, suffix) != self.stamp(bundle_id, suffix) for suffix in (LIVE_SUFFIX, RETIRED_SUFFIX)
        )

    def stamp(self, bundle_id: bytes, suffix: str) -> Stamp | None:
        """The stamp of a bundle's file of this ending, from the survey or a later step; None for no file."""
        if (bundle_id, suffix) in self._stamps:
            return self._stamps[bundle_id, suffix]
        return next((file.stamp for file in self.survey.of(bundle_id) if file.suffix == suffix), None)

    def note(self, bundle_id: bytes) -> None:
        for suffix in (LIVE_SUFFIX, RETIRED_SUFFIX):
            self._stamps[bundle_id, suffix] = self.core.folder.stamp_of(bundle_id, suffix)
