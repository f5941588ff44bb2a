"""Why the daemon refuses: one root, a stable code each. Texts are written where the error is raised."""

from __future__ import annotations

from ..errors import TorporError


class DaemonError(TorporError):
    """Root of what models, sessions and the engine refuse."""

    code = "daemon_error"


class InvalidSampling(DaemonError):
    """A sampling parameter is out of range."""

    code = "invalid_sampling"


class SessionExists(DaemonError):
    """A session of that name exists already."""

    code = "session_exists"


class SessionBusy(DaemonError):
    """Too many requests wait for one session."""

    code = "session_busy"


class StopDeadline(DaemonError):
    """A daemon that stops has no time left to put a session to sleep."""

    code = "stop_deadline"


class UnknownModel(DaemonError):
    """No model of that name is configured."""

    code = "unknown_model"


class InvalidConfiguration(DaemonError):
    """A configuration file cannot be read, or has an unknown key or a wrong value."""

    code = "invalid_configuration"


class ModelInUse(DaemonError):
    """A model is to be unloaded while a request or a session that must stay in memory needs it."""

    code = "model_in_use"


class ModelChanged(DaemonError):
    """A model's files are not those that it was loaded from."""

    code = "model_changed"


class ModelUnavailable(DaemonError):
    """A model cannot be loaded from where it is said to be."""

    code = "model_unavailable"


class AdapterUnavailable(DaemonError):
    """An adapter is not where it is said to be."""

    code = "adapter_unavailable"


class AdapterMismatch(DaemonError):
    """An adapter was made for another model, or lacks weights that its configuration asks for."""

    code = "adapter_mismatch"


class ContextOverflow(DaemonError):
    """The text and the tokens asked for do not fit into the model's context. The session is as it was."""

    code = "context_overflow"


class EmptyContext(DaemonError):
    """A session that has read nothing has no next token."""

    code = "empty_context"


class InvalidTokens(DaemonError):
    """Token ids outside the model's vocabulary, or none at all."""

    code = "invalid_tokens"


class TemplateUnusable(DaemonError):
    """The model has no chat template, or one that cannot be continued token by token."""

    code = "template_unusable"


class InvalidTranscript(DaemonError):
    """Messages that are no transcript of a chat which the assistant is to go on with."""

    code = "invalid_transcript"


class TranscriptDiverged(DaemonError):
    """A transcript is not what the session has read and written. The session is as it was."""

    code = "transcript_diverged"


class InvalidFold(DaemonError):
    """A session cannot be folded so: there is no summary, or two ways to one, or the new one would not be smaller."""

    code = "invalid_fold"


class GenerationFailed(DaemonError):
    """The model failed; the session is back at its last committed token."""

    code = "generation_failed"


class MemoryBudgetExceeded(DaemonError):
    """More memory is needed than the budget can ever give. What was asked for has not begun."""

    code = "memory_budget_exceeded"


class MemoryBusy(DaemonError):
    """Too many requests wait for memory."""

    code = "memory_busy"


class EngineBusy(DaemonError):
    """Too many requests wait for a turn, for memory or the engine. Nothing of this one has begun."""

    code = "engine_busy"


class ModelNotLoaded(DaemonError):
    """A model has not been loaded since the daemon began, and what is asked is not worth a load."""

    code = "model_not_loaded"


class NotRecomputable(DaemonError):
    """The damaged part of a session cannot be computed again from what is stored."""

    code = "not_recomputable"


class RepairPutOff(DaemonError):
    """A repair would give up versions that can be computed again later. Nothing was changed. `sessions`: their URIs,
    each with the reason."""

    code = "repair_put_off"


class UnknownEvent(DaemonError):
    """No event has such a name."""

    code = "unknown_event"


class TooManySubscribers(DaemonError):
    """As many as the daemon serves are told of events already."""

    code = "too_many_subscribers"


class ServiceClosed(DaemonError):
    """The daemon is stopping and takes no more work."""

    code = "service_closed"


class SessionAwake(DaemonError):
    """An earlier version was asked for while the session is awake with another, or the session is awake for a look."""

    code = "session_awake"


def sentence_of(error: BaseException) -> str:
    """An error as it is told where it is no answer: its code, or its kind if it is none of ours, and its message."""
    return f"{error.code}: {error.message}" if isinstance(error, TorporError) else f"{type(error).__name__}: {error}"
