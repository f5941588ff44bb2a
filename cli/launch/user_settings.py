"""An agent's settings in the file of its user: what would change there, and the change.

A JSON file keeps all that it has beside them. Any other file has a name of Torpor's own, and no words but these.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ...places import expanded
from ..errors import InvalidUsage, UnreadableInput
from ..reach.writing import write_whole
from .agents import HOMES, Agent
from .filling import Facts, settings_of, text_of

MAX_BYTES: Final = 4 << 20
"""Of a file of settings that is read."""


@dataclass(frozen=True, slots=True)
class Change:
    """A file as it is, empty if there is none, and as it would be."""

    path: Path
    before: str
    after: str

    def lines(self) -> Iterator[str]:
        """The change as a unified diff; none if the file has all of it."""
        before, after = self.before.splitlines(), self.after.splitlines()
        present = str(self.path) if self.before else "/dev/null"
        return difflib.unified_diff(before, after, present, str(self.path), lineterm="")

    def write(self) -> None:
        """Make the change, for this user alone where the file is new."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.path, self.after, self.path.stat().st_mode & 0o777 if self.path.exists() else 0o600)


def change_of(agent: Agent, facts: Facts) -> Change:
    """What the user's own file lacks.

    Raises:
        InvalidUsage: the agent has no such file.
        UnreadableInput: what the file has cannot be kept, as it is not plain JSON.
    """
    if agent.settings_path is None:
        raise InvalidUsage(
            f"{agent.title} takes its settings from the environment. `torpor launch {agent.name} --dry-run` shows what"
            " to export in your shell's profile."
        )
    path = _path_of(agent.settings_path).resolve()  # a link stays one
    try:
        with path.open(encoding="utf-8") as file:
            before = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return Change(path, "", text_of(agent, facts))
    except UnicodeDecodeError as error:
        raise _not_plain(agent, path, "it is no text") from error
    if path.suffix != ".json":
        return Change(path, before, text_of(agent, facts))
    try:
        present = json.loads(before if len(before) <= MAX_BYTES else "")
    except (ValueError, RecursionError) as error:
        raise _not_plain(agent, path, str(error)) from error
    if not isinstance(present, dict):
        raise _not_plain(agent, path, "it is no map")
    merged = _merged(present, settings_of(agent, facts))
    return Change(
        path, before, before if merged == present else json.dumps(merged, indent=2, ensure_ascii=False) + "\n"
    )


def _path_of(settings_path: str) -> Path:
    for variable, folder in HOMES.items():
        if settings_path.startswith(f"{folder}/") and (chosen := os.environ.get(variable)):
            return Path(chosen, settings_path.removeprefix(f"{folder}/"))
    return expanded(settings_path)


def _not_plain(agent: Agent, path: Path, why: str) -> UnreadableInput:
    return UnreadableInput(
        f"{path} is not plain JSON ({why}), so nothing was written. Add by hand what `torpor launch {agent.name}"
        " --dry-run` shows, or go on with `torpor launch`, which leaves the file as it is.",
        path=str(path),
    )


def _merged(present: Any, more: Any) -> Any:
    """Settings with others put in. Of a list, entries of another id stay."""
    if isinstance(present, Mapping) and isinstance(more, Mapping):
        return {**present, **{name: _merged(present.get(name), value) for name, value in more.items()}}
    if isinstance(present, list) and isinstance(more, list):
        ids = [each.get("id") for each in more if isinstance(each, Mapping)]
        return [*(each for each in present if not (isinstance(each, Mapping) and each.get("id") in ids)), *more]
    return more
