"""One verb on several sessions: goes on after a failure, and reports every one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ...errors import TorporError
from ..exit_codes import OK, PARTIAL, exit_status_of
from ..view.output import Output, report_error
from .interrupts import ignore_interrupts


def run_batch(
    output: Output, command: str, sessions: Sequence[str], act: Callable[[str], Any], say: Callable[[Any], str]
) -> int:
    """Act on each session. Writes a line for each, or one document at the end. Gives the exit status: 0 if all worked,
    3 if some did, the first failure's own if none did."""
    results, failures = list[Any](), list[tuple[str, TorporError]]()
    for number, session in enumerate(sessions, start=1):
        try:
            result = act(session)
            if number == len(sessions):
                ignore_interrupts()
        except TorporError as error:
            if ends_everything(error):
                raise
            failures.append((session, error))
            if not output.as_json:
                report_error(error, as_json=False)
            continue
        results.append(result)
        if not output.as_json:
            output.line(say(result))
    if output.as_json:
        told = [
            {"session": session, "code": error.code, "message": error.message, "details": error.details}
            for session, error in failures
        ]
        output.document(command, {"results": results, "failures": told})
    if not failures:
        return OK.number
    return PARTIAL.number if results else exit_status_of(failures[0][1].code)


def ends_everything(error: TorporError) -> bool:
    """Whether no further request can succeed: no daemon is left to ask."""
    return error.code in {"daemon_unreachable", "connection_lost", "protocol_error", "shutting_down", "service_closed"}
