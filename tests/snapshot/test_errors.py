"""The codes are what clients and scripts go by: each is said once, and does not change."""

from __future__ import annotations

from torpor.errors import TorporError
from torpor.snapshot import errors
from torpor.snapshot.errors import SnapshotError


def test_every_refusal_has_a_code_of_its_own() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, SnapshotError)]
    assert {kind.__name__: kind.code for kind in kinds} == {
        "SnapshotError": "snapshot_error",
        "UnsupportedCache": "unsupported_cache",
        "IdentityMismatch": "identity_mismatch",
        "LayoutMismatch": "layout_mismatch",
        "InconsistentState": "inconsistent_state",
        "NonFiniteState": "non_finite_state",
        "MalformedSnapshot": "malformed_snapshot",
        "ContextTooShort": "context_too_short",
        "NoSuchPosition": "no_such_position",
        "CanaryFailed": "canary_failed",
        "NotEnoughMemory": "not_enough_memory",
        "ModelFilesMissing": "model_files_missing",
        "AdapterFilesMissing": "adapter_files_missing",
        "ModelFilesChanging": "model_files_changing",
    }
    assert issubclass(SnapshotError, TorporError)
