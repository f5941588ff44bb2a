"""Why the daemon refuses: one root, a stable code each. Texts are written where the error is raised."""

from __future__ import annotations

from ..errors import TorporError


class DaemonError(TorporError):
    """Root of what models, sessions and the engine refuse."""


class InvalidSampling(DaemonError):
    """A sampling parameter is out of range."""


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
    """A model is to be unloaded while a request or a session that must stay in memory needs it."""


class ModelChanged(DaemonError):
    """A model's files are not those that it was loaded from."""


class ModelUnavailable(DaemonError):
    """A model cannot be loaded from where it is said to be."""


class AdapterUnavailable(DaemonError):
    """An adapter is not where it is said to be."""


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


class InvalidTranscript(DaemonError):
    """Messages that are no transcript of a chat which the assistant is to go on with."""


class TranscriptDiverged(DaemonError):
    """A transcript is not what the session has read and written. The session is as it was."""


class InvalidFold(DaemonError):
    """A session cannot be folded so: there is no summary, or two ways to one, or the new one would not be smaller."""


class GenerationFailed(DaemonError):
    """The model failed; the session is back at its last committed token."""


class MemoryBudgetExceeded(DaemonError):
    """More memory is needed than the budget can ever give. What was asked for has not begun."""


class MemoryBusy(DaemonError):
    """Too many requests wait for memory."""


class EngineBusy(DaemonError):
    """Too many requests wait for a turn, for memory or the engine. Nothing of this one has begun."""


class ModelNotLoaded(DaemonError):
    """A model has not been loaded since the daemon began, and what is asked is not worth a load."""


class NotRecomputable(DaemonError):
    """The damaged part of a session cannot be computed again from what is stored."""


class RepairPutOff(DaemonError):
    """A repair would give up versions that can be computed again later. Nothing was changed. `sessions`: their URIs,
    each with the reason."""


class UnknownEvent(DaemonError):
    """No event has such a name."""


class TooManySubscribers(DaemonError):
    """As many as the daemon serves are told of events already."""


class ServiceClosed(DaemonError):
    """The daemon is stopping and takes no more work."""


class SessionAwake(DaemonError):
    """An earlier version was asked for while the session is awake with another, or the session is awake for a look."""


def sentence_of(error: BaseException) -> str:
    """An error as it is told where it is no answer: its code, or its kind if it is none of ours, and its message."""
    return f"{error.code}: {error.message}" if isinstance(error, TorporError) else f"{type(error).__name__}: {error}"
