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
    from .format.records import DeleteReport, Finding, IndexRow, OpenReport, Receipt, VerifyReport
    from .maintenance.repack_plan import RepackPolicy
    from .store import Store
    from .uri import DEFAULT_NAMESPACE, SessionUri
    from .writing.reader import BundleReader

__all__ = [
    "BLOCK_TOKENS",
    "DEFAULT_NAMESPACE",
    "BlockDraft",
    "BlockEntry",
    "BlockHeader",
    "BundleReader",
    "DeleteReport",
    "Finding",
    "Identity",
    "IndexRow",
    "Manifest",
    "OpenReport",
    "Receipt",
    "RepackPolicy",
    "SessionUri",
    "SlotDraft",
    "SlotSpec",
    "Store",
    "StoreError",
    "VerifyReport",
    "default_store_path",
]

if not TYPE_CHECKING:  # or no checker would miss a name

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from . import errors, store, uri
        from .disk import location
        from .format import blocks, identity, manifest, records
        from .maintenance import repack_plan
        from .writing import reader

        formats = (blocks, identity, manifest, records)
        modules = (errors, uri, location, *formats, reader, repack_plan, store)
        return next(getattr(module, name) for module in modules if hasattr(module, name))
