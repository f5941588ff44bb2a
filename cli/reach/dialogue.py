"""The lines that somebody types in a dialogue on a terminal."""

from __future__ import annotations

import contextlib
import sys
import termios
from collections.abc import Iterator

from ..view.output import Output

_PROMPT = "[bold cyan]you ›[/] "
# The marks tell readline which characters of its prompt take no room.
_PROMPT_OF_READLINE = "\001\x1b[1;36m\002you ›\001\x1b[0m\002 "


def ask(output: Output) -> str:
    """The next line, with the keys of readline where the system has it. Raises EOFError."""
    if not sys.stdout.isatty():
        line: str = output.stderr.input(_PROMPT)
        return line
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - its import gives `input` its keys, and shows at the prompt what was typed before
    return input(_PROMPT_OF_READLINE if output.stdout.color_system else "you › ")


@contextlib.contextmanager
def unseen_typing() -> Iterator[None]:
    """Show nothing of what is typed meanwhile: it would stand in the midst of an answer. The next `ask` has it."""
    try:
        before = termios.tcgetattr(sys.stdin)
        quiet = [*before[:3], before[3] & ~termios.ECHO, *before[4:]]
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, quiet)
    except (termios.error, ValueError, OSError):  # no terminal
        yield
        return
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
