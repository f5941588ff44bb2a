"""The daemon's errors: one root, a stable code each. Messages are written where an error is raised."""

from __future__ import annotations

from ..errors import TorporError


class DaemonError(TorporError):
    """Root of the errors of models, sessions and the engine."""


class InvalidSampling(DaemonError):
    """A sampling parameter is out of range, or not of use for what was asked."""


class SessionExists(DaemonError):
    """A session of that name exists already."""


class SessionBusy(DaemonError):
    """Too many requests wait for one session."""


class StopDeadline(DaemonError):
    """A daemon that stops has no time left to put a session to sleep."""


class UnknownModel(DaemonError):
    """No model of that name is configured."""


class InvalidConfiguration(DaemonError):
    """A configuration file cannot be read, or has an unknown key or a wrong value."""


class ModelInUse(DaemonError):
    """A model cannot be unloaded: a request, or a session that must stay in memory, needs it."""


class ModelChanged(DaemonError):
    """A model's files have changed since it was loaded."""


class ModelUnavailable(DaemonError):
    """A model cannot be loaded from its source."""


class AdapterUnavailable(DaemonError):
    """There is no adapter at its path."""


class AdapterMismatch(DaemonError):
    """An adapter was made for another model, or lacks weights that its configuration asks for."""


class ContextOverflow(DaemonError):
    """The text and the tokens asked for do not fit into the model's context. The session is as it was."""


class EmptyContext(DaemonError):
    """A session that has read nothing has no next token."""


class InvalidTokens(DaemonError):
    """Token ids outside the model's vocabulary, or none at all."""


class TemplateUnusable(DaemonError):
    """The model has no chat template, or one that cannot be continued token by token."""


class InvalidConstraint(DaemonError):
    """An answer cannot be held to a constraint: it is wrong, too large, asks for a file or address, or allows no
    answer; or the model cannot be held to it. `reason`: the compiler's words. If the answer had begun, its tokens stay.
    """


class InvalidTranscript(DaemonError):
    """Messages that are not a transcript for the assistant to answer."""


class TranscriptDiverged(DaemonError):
    """A transcript differs from the session's ledger. The session is as it was."""


class AnswerNotFound(DaemonError):
    """No session has an answer of this id. It was never given, or it or its session was deleted."""


class InvalidFold(DaemonError):
    """A fold without a summary, with two ways to one, or with a new session that would not be smaller."""


class GenerationFailed(DaemonError):
    """The model failed; the session is back at its last committed token."""


class MemoryBudgetExceeded(DaemonError):
    """The request needs more memory than the budget can ever give. It has not begun."""


class MemoryBusy(DaemonError):
    """Too many requests wait for memory."""


class EngineBusy(DaemonError):
    """Too many requests wait for a turn, for memory or the engine. This one has not begun."""


class ModelNotLoaded(DaemonError):
    """A model has not been loaded since the daemon began, and this request does not load it."""


class NotRecomputable(DaemonError):
    """The damaged part of a session cannot be computed again from what is stored."""


class UnknownEvent(DaemonError):
    """No event has such a name."""


class TooManySubscribers(DaemonError):
    """The daemon serves as many subscribers as it may."""


class BranchNotFound(DaemonError):
    """There is no such branch for this connection. `reason`: `unknown`, `pruned`, or `foreign`: it belongs to another
    connection. Nothing has changed."""


class InvalidBranches(DaemonError):
    """A request names a branch twice, branches of several trees, or more than one answer holds. Nothing has changed."""


class BranchHasChildren(DaemonError):
    """A branch cannot be pruned alone, as others were forked from it. `children`: these. Nothing has changed."""


class TooManyBranches(DaemonError):
    """A tree would have more branches than it may. Nothing has changed."""


class StaleStep(DaemonError):
    """A branch has gone on since a token was drawn. `step`: where it stands now. Nothing has changed."""


class StaleLogits(DaemonError):
    """A view of logits whose branch has gone on."""


class LogitsLent(DaemonError):
    """A branch cannot go on while a function looks at its logits. Nothing has changed."""


class InvalidLogits(DaemonError):
    """Logits of a wrong length, with NaN or infinity, or that allow no token. Nothing has changed."""


class ServiceClosed(DaemonError):
    """The daemon is stopping and takes no more work."""


class NoRemote(DaemonError):
    """The daemon has no remote."""


class SessionAwake(DaemonError):
    """The session is awake with another version than the requested one, or only for a look."""


def sentence_of(error: BaseException) -> str:
    """An error as text: its code, or its kind if it is not ours, and its message."""
    return f"{error.code}: {error.message}" if isinstance(error, TorporError) else f"{type(error).__name__}: {error}"
