"""An operation of maintenance under way: what it did and found, and its figures; carried out, or only planned."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from ..answers import Action, Finding, MaintenanceReport, VersionInfo
from ..errors import StoreError
from .core import StoreCore


@dataclass(slots=True)
class MaintenanceRun:
    """Gathers the report of an operation. With `dry_run` nothing is changed."""

    core: StoreCore
    operation: str
    dry_run: bool
    actions: list[Action] = field(default_factory=list)
    problems: list[Finding] = field(default_factory=list)
    _told: set[Finding] = field(default_factory=set)
    bytes_freed: int = 0
    bytes_written: int = 0

    def committing(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext() if self.dry_run else self.core.committing()

    def did(self, kind: str, what: str | VersionInfo, size_bytes: int, reason: str) -> None:
        """what: the path of the file, or the version whose manifest it is."""
        path, of = (what, None) if isinstance(what, str) else (self.core.folder.manifest_path(what.bundle_id), what)
        session, version = (of.session, of.version) if of is not None else (None, None)
        self.actions.append(Action(kind, path, session, version, size_bytes, reason))

    def freed(self, kind: str, what: str | VersionInfo, size_bytes: int, reason: str) -> None:
        """As `did`, of a step that frees so many bytes."""
        self.did(kind, what, size_bytes, reason)
        self.bytes_freed += size_bytes

    def tell(self, path: str, code: str, message: str, *, lost: bool = False) -> None:
        """Tell of a problem, once."""
        finding = Finding(path, code, message, lost=lost)
        if finding not in self._told:
            self._told.add(finding)
            self.problems.append(finding)

    def fail(self, path: str, error: StoreError) -> None:
        """Tell of a step that failed; the error may know a better path."""
        self.tell(str(error.details.get("path", path)), error.code, error.message)

    def report(self) -> MaintenanceReport:
        return MaintenanceReport(
            self.operation,
            self.dry_run,
            tuple(self.actions),
            bytes_freed=self.bytes_freed,
            bytes_written=self.bytes_written,
            problems=tuple(self.problems),
        )
