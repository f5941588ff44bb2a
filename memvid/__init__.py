"""Bytes on disk: blocks, bundles, manifests, index. Knows nothing of mlx, sessions or sockets."""

from .blocks import BLOCK_TOKENS, BlockDraft, BlockEntry, BlockHeader, SlotDraft, SlotSpec
from .bundle import BundleReader
from .codecs import RAW, Codec, zstd
from .compaction_plan import CompactionPolicy
from .errors import StoreError
from .identity import Identity
from .location import default_store_path
from .manifest import Manifest
from .records import DeleteReport, Finding, IndexRow, OpenReport, Receipt, StoreStatistics, VerifyReport
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
