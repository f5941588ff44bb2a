"""Agents as `torpor launch` starts them. A program in front of each one has it ask the front in place of the daemon."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from front import Front
from serving import NODE, TORPOR

LARGE = 200_000
"""Tokens of a context that never fills."""

NO_PROXY_IS_THERE = "http://127.0.0.1:9"
"""Of a proxy that agents are not to ask."""

_BETWEEN = """\
#!{python}
import os, pathlib, re, sys
def turned(text):
    for pattern, other in {turns!r}:
        text = re.sub(pattern, other, text)
    return text
own = pathlib.Path(os.environ["HOME"], ".local", "state", "torpor", "launch")
for file in own.rglob("*") if own.is_dir() else ():
    if file.is_file():
        file.write_text(turned(file.read_text()))
environment = {{name: turned(value) for name, value in os.environ.items()}}
os.execve({program!r}, [{program!r}, *map(turned, sys.argv[1:])], environment)
"""


def launched(
    name: str, program: Path, front: Front, home: Path, *, context: int | None = None, **environment: str
) -> tuple[list[str], Mapping[str, str]]:
    """A command that launches an agent in a home, to which its own arguments are added, and its environment. context:
    what the model holds, if the agent is to think that it holds more."""
    turns = [(r"http://127\.0\.0\.1:\d+", front.url), *([(rf"\b{context}\b", str(LARGE))] if context else [])]
    between = home / "bin" / program.name
    between.parent.mkdir(exist_ok=True)
    between.write_text(_BETWEEN.format(python=sys.executable, program=str(program), turns=turns))
    between.chmod(0o755)
    known = {
        "PATH": f"{between.parent}:{NODE}:{os.environ['PATH']}",
        "HOME": str(home),
        "TORPOR_SOCKET": str(front.daemon.torpor_socket),
        **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), NO_PROXY_IS_THERE),
    }
    return [TORPOR, "launch", name, "--"], {**known, **environment}
