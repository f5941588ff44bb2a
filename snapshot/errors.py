"""Why a snapshot cannot be taken or given back: one root, a stable code each."""

from __future__ import annotations

from ..errors import TorporError


class SnapshotError(TorporError):
    """Root of what capture, restore and identity refuse."""

    code = "snapshot_error"


class UnsupportedCache(SnapshotError):
    """A cache of a kind that has no adapter; it is named, never guessed at."""

    code = "unsupported_cache"


class IdentityMismatch(SnapshotError):
    """The snapshot belongs to another model, tokenizer, template or precision than the resident one."""

    code = "identity_mismatch"


class LayoutMismatch(SnapshotError):
    """A stored block does not have the slots that the resident model's cache has."""

    code = "layout_mismatch"


class InconsistentState(SnapshotError):
    """Ledger and cache do not describe one span; taking a snapshot of them would keep a lie."""

    code = "inconsistent_state"


class NonFiniteState(SnapshotError):
    """Keys or values hold NaN or infinity; `layer`, `slot` and `start` (the block's first token) say where."""

    code = "non_finite_state"


class MalformedSnapshot(SnapshotError):
    """A verified bundle holds something that this version does not write: a foreign or hand-made snapshot."""

    code = "malformed_snapshot"


class ContextTooShort(SnapshotError):
    """A snapshot holds more tokens than the model's context has room for."""

    code = "context_too_short"


class NoSuchPosition(SnapshotError):
    """A snapshot was to be woken at a token that it does not have."""

    code = "no_such_position"


class CanaryFailed(SnapshotError):
    """A state that was put back does not compute what the slept one did."""

    code = "canary_failed"


class NotEnoughMemory(SnapshotError):
    """There is no memory for the state; nothing has been taken."""

    code = "not_enough_memory"


class ModelFilesMissing(SnapshotError):
    """A model folder lacks the files that its identity is made of."""

    code = "model_files_missing"


class AdapterFilesMissing(SnapshotError):
    """An adapter's folder is not complete, or not in mlx-lm's form."""

    code = "adapter_files_missing"


class ModelFilesChanging(SnapshotError):
    """Model files changed while they were being read."""

    code = "model_files_changing"
