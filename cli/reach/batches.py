"""One verb on several sessions: goes on after a failure, and reports every one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ...errors import TorporError
from ...memvid.answers import Finding
from ..exit_codes import OK, PARTIAL, exit_status_of
from ..view.output import Output, render_problem, report_error
from .interrupts import ignore_interrupts


@dataclass(frozen=True)
class Failure:
    """What did not work for a session."""

    session: str
    code: str
    message: str
    details: Mapping[str, Any]


def run_batch(
    output: Output,
    command: str,
    sessions: Sequence[str],
    act: Callable[[str], Any],
    say: Callable[[Any], str],
    problem_of: Callable[[Any], Finding | None] = lambda _: None,
) -> int:
    """Act on each session. Writes a line for each, or one document at the end. problem_of: what a result lacks, which
    is a failure beside it. Gives the exit status: 0 if all worked, 3 if some did, the first failure's own if none did.
    """
    results, failures = list[Any](), list[Failure]()
    for number, session in enumerate(sessions, start=1):
        try:
            result = act(session)
            if number == len(sessions):
                ignore_interrupts()
        except TorporError as error:
            if ends_everything(error):
                raise
            failures.append(Failure(session, error.code, error.message, error.details))
            if not output.as_json:
                report_error(error, as_json=False)
            continue
        results.append(result)
        if not output.as_json:
            output.line(say(result))
        if (problem := problem_of(result)) is not None:
            failures.append(Failure(session, problem.code, problem.message, {}))
            if not output.as_json:
                output.remark(render_problem(problem))
    if output.as_json:
        output.document(command, {"results": results, "failures": [asdict(each) for each in failures]})
    if not failures:
        return OK.number
    return PARTIAL.number if len(failures) < len(sessions) else exit_status_of(failures[0].code)


def ends_everything(error: TorporError) -> bool:
    """Whether no further request can succeed: no daemon is left to ask."""
    return error.code in {"daemon_unreachable", "connection_lost", "protocol_error", "shutting_down", "service_closed"}
