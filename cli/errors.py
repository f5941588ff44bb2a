"""The command line's own errors. All other errors that it reports come from another layer."""

from __future__ import annotations

from typing import Any

from ..errors import TorporError


class CliError(TorporError):
    """Root of the command line's own errors."""


class InvalidUsage(CliError):
    """Arguments that parse one by one but do not make sense together."""


class NothingToDo(CliError):
    """A command that needs something to work on was given nothing."""


class UnreadableInput(CliError):
    """A file, standard input or an argument that cannot be read, or not as text."""


class OutputFailed(CliError):
    """Standard output or standard error took no more: a full disk, most likely."""


class SystemRefused(CliError):
    """The operating system refused something unexpected; the message has its words."""

    code = "system_error"


class Interrupted(CliError):
    """Ctrl-C: the work was stopped where it could be."""

    code = "cancelled"


class DoctorFailed(CliError):
    """An examination of the machine gave no report."""


class DaemonStartFailed(CliError):
    """A daemon in the background could not be started. code: of the daemon's own error, if it told one."""

    code = "daemon_start_failed"

    def __init__(self, message: str, *, code: str = code, **details: Any) -> None:
        super().__init__(message, **details)
        self.code = code  # type: ignore[misc]  # the daemon's code replaces that of the class


class DaemonStillRunning(CliError):
    """A daemon that was asked to stop has not ended within the time given."""


class AgentMissing(CliError):
    """The program of an agent that was to be launched is not installed."""


class HttpNotServed(CliError):
    """A daemon answers, but not over HTTP."""


class DemoDaemonFailed(CliError):
    """A daemon of the demo did not end as it should have."""


class DemoUnfit(CliError):
    """The document or the model does not fit what the demo wants to show."""


class DemoDisproved(CliError):
    """The demo ran to its end, and something that should have been equal was not."""
