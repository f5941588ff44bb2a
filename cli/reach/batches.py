"""One verb on several sessions: goes on after a failure, and reports every one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ...errors import TorporError
from ..exit_codes import OK, PARTIAL, exit_status_of
from ..view.output import Output, report_error
from .interrupts import ignore_interrupts


@dataclass(slots=True)
class Batch:
    """The results in order, and the failures with the names that were given."""

    results: list[Any] = field(default_factory=list)
    failures: list[tuple[str, TorporError]] = field(default_factory=list)

    @property
    def exit_status(self) -> int:
        """0 if all worked, 3 if some did, the first failure's own status if none did."""
        if not self.failures:
            return OK.number
        return PARTIAL.number if self.results else exit_status_of(self.failures[0][1].code)


def run_batch(
    output: Output, command: str, sessions: Sequence[str], act: Callable[[str], Any], say: Callable[[Any], str]
) -> int:
    """Act on each session and give the exit status. Writes a line for each, or one document at the end."""
    batch = Batch()
    for number, session in enumerate(sessions, start=1):
        try:
            result = act(session)
            if number == len(sessions):
                ignore_interrupts()
        except TorporError as error:
            if ends_everything(error):
                raise
            batch.failures.append((session, error))
            if not output.as_json:
                report_error(error, as_json=False)
            continue
        batch.results.append(result)
        if not output.as_json:
            output.line(say(result))
    if output.as_json:
        output.document(command, _body(batch))
    return batch.exit_status


def _body(batch: Batch) -> dict[str, Any]:
    failures = [
        {"session": session, "code": error.code, "message": error.message, "details": error.details}
        for session, error in batch.failures
    ]
    return {"results": [asdict(result) for result in batch.results], "failures": failures}


def ends_everything(error: TorporError) -> bool:
    """Whether no further request can succeed: no daemon is left to ask."""
    return error.code in {"daemon_unreachable", "connection_lost", "protocol_error", "shutting_down", "service_closed"}
