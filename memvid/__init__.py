"""Bytes on disk: blocks, bundles, manifests, index. Knows nothing of mlx, sessions or sockets.

A module is imported at the first use of one of its names here: an import of `errors` or `uri` does not wait for it.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .disk.location import default_store_path
    from .errors import StoreError
    from .format.blocks import BLOCK_TOKENS, BlockDraft, BlockEntry, BlockHeader, SlotDraft, SlotSpec
    from .format.identity import Identity
    from .format.manifest import Manifest
    from .format.reader import BundleReader
    from .format.records import DeleteReport, Finding, IndexRow, OpenReport, Receipt, StoreStatistics, VerifyReport
    from .maintenance.compaction_plan import CompactionPolicy
    from .store import Store
    from .uri import DEFAULT_NAMESPACE, SessionUri

__all__ = [
    "BLOCK_TOKENS",
    "DEFAULT_NAMESPACE",
    "BlockDraft",
    "BlockEntry",
    "BlockHeader",
    "BundleReader",
    "CompactionPolicy",
    "DeleteReport",
    "Finding",
    "Identity",
    "IndexRow",
    "Manifest",
    "OpenReport",
    "Receipt",
    "SessionUri",
    "SlotDraft",
    "SlotSpec",
    "Store",
    "StoreError",
    "StoreStatistics",
    "VerifyReport",
    "default_store_path",
]

if not TYPE_CHECKING:  # or no checker would miss a name

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from . import errors, store, uri
        from .disk import location
        from .format import blocks, identity, manifest, reader, records
        from .maintenance import compaction_plan

        formats = (blocks, identity, manifest, reader, records)
        modules = (errors, uri, location, *formats, compaction_plan, store)
        return next(getattr(module, name) for module in modules if hasattr(module, name))
