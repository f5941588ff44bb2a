"""Bytes on disk: blocks, bundles, manifests, index. Knows nothing of mlx, sessions or sockets."""

from .disk.location import default_store_path
from .errors import StoreError
from .format.blocks import BLOCK_TOKENS, BlockDraft, BlockEntry, BlockHeader, SlotDraft, SlotSpec
from .format.bundle import BundleReader
from .format.codecs import RAW, Codec, zstd
from .format.identity import Identity
from .format.manifest import Manifest
from .format.records import DeleteReport, Finding, IndexRow, OpenReport, Receipt, StoreStatistics, VerifyReport
from .maintenance.compaction_plan import CompactionPolicy
from .store import Store
from .uri import DEFAULT_NAMESPACE, SessionUri

__all__ = [
    "BLOCK_TOKENS",
    "DEFAULT_NAMESPACE",
    "RAW",
    "BlockDraft",
    "BlockEntry",
    "BlockHeader",
    "BundleReader",
    "Codec",
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
    "resolve",
    "zstd",
]
