"""What other journals mean that lie beside the open one, as one that was put back while it was open."""

from __future__ import annotations

from ..uri import SessionUri
from .journal import Journal


def require_beside(journal: Journal) -> None:
    """Refuse to begin a deletion that `Journal.drop` could not end: each journal beside this one can be read. Raises as
    `Journal.load`."""
    with journal.lock:
        for _ in journal.beside():
            pass


def bases_beside(journal: Journal, but: SessionUri | None = None) -> set[str]:
    """The versions behind which turns stand in journals beside this one, of all sessions but one. Raises UnsafePath,
    StoreIoError."""
    with journal.lock:
        return {base for each in journal.beside(writable=False) for uri, base in each.bases().items() if uri != but}
