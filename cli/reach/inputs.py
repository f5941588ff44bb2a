"""Text that a command reads from its argument, a file or standard input. Bounded, strict UTF-8."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

from ..errors import InvalidUsage, NothingToDo, UnreadableInput

MAX_INPUT_BYTES = 15 << 20  # a request frame takes 16 MiB; the daemon would refuse a larger one unread


def load_text(argument: str | None, file: Path | None, *, what: str) -> str:
    """Take a text from the argument, from a file, or from piped standard input, which `-` stands for in both.

    Raises:
        NothingToDo: none of the three is there.
        UnreadableInput: it cannot be read, is too large, or is not UTF-8.
    """
    if argument is not None and file is not None:
        raise NothingToDo(f"Give {what} either as an argument or as a file, not both.")
    asked = "-" in (argument, str(file))
    if argument is not None and not asked:
        text = argument
    elif file is not None and not asked:
        text = _load_file(file)
    elif asked or not sys.stdin.isatty():
        text = _decode(sys.stdin.buffer.read(MAX_INPUT_BYTES + 1), "standard input")
    else:
        raise NothingToDo(f"There is no {what}: give it as an argument, with --file, or through a pipe.")
    if not text:
        raise NothingToDo(f"The {what} is empty.")
    return text


def require_no_file(text: str | None) -> None:
    """Refuse a text that is the name of a file: who gives one means what is in it. Raises InvalidUsage."""
    try:
        is_file = text is not None and Path(text).is_file()
    except (OSError, ValueError):  # too long for a name, or with a null character
        is_file = False
    if is_file:
        raise InvalidUsage(
            f"{text!r} is a file here, and only its name would be read. To read what is in it: `torpor append SESSION"
            f" --file {shlex.quote(str(text))}`. For these very words, pipe them to `torpor append SESSION -`.",
            path=text,
        )


def load_transcript(file: Path) -> list[dict[str, str]]:
    """Read a transcript from a file (`-` is standard input): a JSON list of messages, each a map of role and content.

    The client, which knows the protocol, checks the messages further.

    Raises:
        UnreadableInput: it cannot be read, or is not such a list. NothingToDo: it is empty.
    """
    text, source = load_text(None, file, what="transcript"), "Standard input" if str(file) == "-" else str(file)
    try:
        messages = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnreadableInput(f"{source} is not JSON: {error}.", source=str(file)) from error
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise UnreadableInput(
            f'{source} is not a transcript: a JSON list of messages such as {{"role": "user", "content": "hello"}}.',
            source=str(file),
        )
    return messages


def _load_file(path: Path) -> str:
    try:
        with path.open("rb") as stream:
            return _decode(stream.read(MAX_INPUT_BYTES + 1), str(path))
    except OSError as error:
        raise UnreadableInput(f"{path} cannot be read: {error.strerror}.", path=str(path)) from error


def _decode(data: bytes, source: str) -> str:
    if len(data) > MAX_INPUT_BYTES:
        raise UnreadableInput(
            f"{source} has more than {MAX_INPUT_BYTES >> 20} MiB. Append it in pieces.", source=source
        )
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UnreadableInput(
            f"{source} is not UTF-8 (byte {error.start}). Convert it first.", source=source
        ) from error
