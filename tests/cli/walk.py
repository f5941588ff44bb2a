"""Runs command lines in this process, one after the other: the child of `test_conditions.py`, which may have fewer
rights than the tests. Standard input: JSON of `lines`, and of `columns`, which is 0 for a pipe. Standard output: JSON
of what each line wrote and how it ended: a status, or the trace of what it raised."""

from __future__ import annotations

import io
import json
import os
import sys
import traceback
from typing import Any

from torpor.cli.registry import run
from torpor.cli.serve import doctor


class Stream(io.TextIOWrapper):
    """What a command writes to."""

    is_terminal = False

    def isatty(self) -> bool:
        return self.is_terminal

    def told(self) -> str:
        self.flush()
        written: io.BytesIO = self.buffer  # type: ignore[assignment]
        return written.getvalue().decode()


def walk(lines: list[list[str]], columns: int) -> list[dict[str, Any]]:
    """What each of the command lines wrote."""
    doctor.examine_machine = dict  # it takes seconds, and is the same everywhere
    told = []
    for line in lines:
        streams = Stream(io.BytesIO(), encoding="utf-8"), Stream(io.BytesIO(), encoding="utf-8")
        for stream in streams:
            stream.is_terminal = columns > 0
        sys.stdin, (sys.stdout, sys.stderr) = io.StringIO(), streams
        try:
            status: int | str = run(line)
        except Exception:
            status = traceback.format_exc()
        told.append({"line": line, "status": status, "out": streams[0].told(), "err": streams[1].told()})
    return told


if __name__ == "__main__":
    asked, answer = json.load(sys.stdin), sys.stdout
    os.environ |= {"COLUMNS": str(asked["columns"] or 80), "TERM": "xterm-256color"}
    json.dump(walk(asked["lines"], asked["columns"]), answer)
