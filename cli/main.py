"""The entry point: prepares the streams, catches Ctrl-C from the first moment, and ends with a status.

Imports nothing heavy before handling is in place, so that an interrupt during the imports is a status, not a trace.
`command_list.py` lists the commands.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

from .view.streams import leave, prepare_streams

INTERRUPTED_STATUS = 130  # as in exit_codes.py, which is not imported yet when it is needed here
FAILED_STATUS = 1


def main() -> None:
    """Run the command line of this process."""
    arguments = sys.argv[1:]
    as_json = "--json" in arguments
    try:
        prepare_streams()
        status = _run(arguments)
        if not status:  # a failure has been told already
            sys.stdout.flush()
    except KeyboardInterrupt:
        status = _fail("cancelled", "Interrupted.", INTERRUPTED_STATUS, as_json=as_json)
    except OSError as error:
        status = _fail("output_failed", f"Output failed: {error.strerror}.", FAILED_STATUS, as_json=as_json)
    leave(status)


def _run(arguments: Sequence[str]) -> int:
    # The imports stand here because they take long enough to be interrupted.
    if os.environ.get("TORPOR_COMPLETING"):
        from .completing import write_candidates

        write_candidates(arguments)
        return 0
    from .registry import run

    return run(arguments)


def _fail(code: str, message: str, status: int, *, as_json: bool) -> int:
    """Write one line as `output.write_failure` does, with no import; gives the status."""
    error = {"code": code, "message": message, "details": {}}
    document = json.dumps({"schema_version": 1, "error": error, "exit_status": status})
    try:
        sys.stderr.write((document if as_json else f"error {code}  {message}") + "\n")
        sys.stderr.flush()
    except OSError:
        pass  # stderr takes nothing either: only the status is left
    return status


if __name__ == "__main__":
    main()
