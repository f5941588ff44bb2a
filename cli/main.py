"""The entry point: makes the process fit for output, catches Ctrl-C from the first moment, and ends with a status.

Imports nothing heavy before handling is in place, so that an interrupt during the imports is a status, not a trace.
What commands there are is in `commands.py`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

INTERRUPTED_STATUS = 130  # as in exit_codes.py, which is not imported yet when it is needed here
FAILED_STATUS = 1


def main() -> None:
    """Run the command line of this process."""
    arguments = sys.argv[1:]
    as_json = "--json" in arguments
    try:
        _prepare_streams()
        status = _run(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        status = _fail("cancelled", "Interrupted.", INTERRUPTED_STATUS, as_json=as_json)
    except BrokenPipeError:
        status = FAILED_STATUS  # whoever read our output has seen enough
    except OSError as error:
        status = _fail("output_failed", f"Output failed: {error.strerror}.", FAILED_STATUS, as_json=as_json)
    _leave(status)


def _run(arguments: Sequence[str]) -> int:
    from .commands import run  # here, because this import takes long enough to be interrupted

    return run(arguments)


def _prepare_streams() -> None:
    """Give each standard stream a place, and let no character be one that it cannot take.

    A stream that was closed becomes the null device; otherwise the next file that is opened would take its number.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8")  # noqa: SIM115 - it stays open as long as the process
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]


def _fail(code: str, message: str, status: int, *, as_json: bool) -> int:
    """Write one line as `output.write_failure` does, with nothing imported; gives the status."""
    error = {"code": code, "message": message, "details": {}}
    document = json.dumps({"schema_version": 1, "error": error, "exit_status": status})
    try:
        sys.stderr.write((document if as_json else f"error {code}  {message}") + "\n")
        sys.stderr.flush()
    except OSError:
        pass  # stderr takes nothing either: the status is all that is left to say
    return status


def _leave(status: int) -> None:
    """End the process. What a stream still holds and cannot write is dropped, without a word from the interpreter."""
    for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
        try:
            stream.flush()
        except (OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
    sys.exit(status)


if __name__ == "__main__":
    main()
