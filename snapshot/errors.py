"""Why a snapshot cannot be taken or given back: one root, a stable code each."""

from __future__ import annotations

from ..errors import TorporError


class SnapshotError(TorporError):
    """Root of what capture, restore and identity refuse."""


class UnsupportedCache(SnapshotError):
    """A cache of a kind that has no adapter; it is named, never guessed at."""


class IdentityMismatch(SnapshotError):
    """The snapshot belongs to another model, tokenizer, template or precision than the resident one."""


class LayoutMismatch(SnapshotError):
    """A stored block does not have the slots that the resident model's cache has."""


class InconsistentState(SnapshotError):
    """Ledger and cache do not describe one span; a snapshot of them would keep a lie."""


class NonFiniteState(SnapshotError):
    """Keys or values hold NaN or infinity; `layer`, `slot` and `start` (the block's first token) say where."""


class MalformedSnapshot(SnapshotError):
    """A verified bundle holds something that this version does not write: a foreign or hand-made snapshot."""


class ContextTooShort(SnapshotError):
    """A snapshot holds more tokens than the model's context has room for."""


class NoSuchPosition(SnapshotError):
    """A snapshot was to be woken at a token that it does not have."""


class CanaryFailed(SnapshotError):
    """A state that was put back does not compute what the slept one did."""


class NotEnoughMemory(SnapshotError):
    """There is no memory for the state; nothing has been taken."""


class ModelFilesMissing(SnapshotError):
    """A model folder lacks the files that its identity is made of."""


class AdapterFilesMissing(SnapshotError):
    """An adapter's folder is not complete, or not in mlx-lm's form."""


class ModelFilesChanging(SnapshotError):
    """Model files changed while they were being read."""
