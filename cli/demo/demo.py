"""`torpor demo`: the first thing to try. Makes a folder, runs the story, shows the report, cleans up."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated

from ..errors import DemoDisproved, InvalidUsage
from ..reach.inputs import load_text
from ..reach.options import JsonOption, option
from ..view.output import Output, plain
from .report import render_report
from .story import Demo, Settings

SIGNAL_STATUS = 128  # a shell adds the number of the signal that ended a process

DEFAULT_DOCUMENT = Path(argparse.__file__)  # about 100 kB of prose and code, in every Python, alike in all versions

DocumentOption = Annotated[Path | None, option("--document PATH", "Read this text; default: Python's argparse.py.")]
CountOption = Annotated[
    int, option("--max-tokens -n N", "Tokens before the sleep, and after. Default: 64.", min=64, max=512)
]
KeepOption = Annotated[bool, option("--keep", "Keep the demo's folder: store and daemon logs.")]


def demo(
    document: DocumentOption = None, max_tokens: CountOption = 64, keep: KeepOption = False, as_json: JsonOption = False
) -> None:
    """A session reads a long document and writes, sleeps, and its daemon is killed with SIGKILL. A new daemon wakes it
    and it goes on, beside a control that never slept and a cold session that reads everything again. Everything is
    real: processes, sockets, files, in a temporary folder of its own. It takes a minute or so on two cores, and ends
    with status 6 if token ids, logits or text are not equal to the last bit.

    [bold]Examples[/]

    [cyan]torpor demo[/]
    [cyan]torpor demo --document war-and-peace.txt --max-tokens 128[/]
    [cyan]torpor demo --json | jq .figures.ratio[/]
    [cyan]torpor demo --keep[/]
    """
    output = Output(as_json=as_json)
    text = load_text(None, document or DEFAULT_DOCUMENT, what="document")
    with _ending_on_signals(), _own_folder(keep=keep) as folder:
        output.remark(f"[bold]torpor demo[/]  [dim]store, socket and logs in {plain(str(folder))}[/]")
        name = (document or DEFAULT_DOCUMENT).name
        evidence = Demo(Settings(folder, name, text, tokens=max_tokens), output).tell()
    if as_json:
        output.document("demo", {**evidence.to_map(), "folder": str(folder) if keep else None})
    else:
        output.show(*render_report(evidence))
        if keep:
            output.remark(f"kept: [cyan]torpor ls --store {plain(str(folder))}/store[/]")
    if evidence.failed:
        raise DemoDisproved(f"Not the same: {'; '.join(evidence.failed)}.", checks=evidence.failed)


@contextmanager
def _own_folder(*, keep: bool) -> Iterator[Path]:
    """Make a private folder, short enough for a socket path, and remove it afterwards.

    Raises:
        InvalidUsage: $TMPDIR is not there. Python would take another folder, and MLX fail.
    """
    named = os.environ.get("TMPDIR")
    if named and not Path(named).is_dir():
        raise InvalidUsage(
            f"$TMPDIR names {named!r} for temporary files, and no such folder is there. Make it, or name another.",
            path=named,
        )
    base = "/tmp" if len(tempfile.gettempdir()) > 40 else None  # noqa: S108 - mkdtemp makes it private
    folder = Path(tempfile.mkdtemp(prefix="torpor-demo-", dir=base))
    try:
        yield folder
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _ending_on_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP (a terminal that closes) unwind the stack, so that daemons and folder are cleaned up."""

    def on_signal(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(SIGNAL_STATUS + number)

    # An ignored signal stays ignored: nohup asks for that.
    caught = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, on_signal) for number in caught}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
