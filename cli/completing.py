"""What a shell may complete on a command line: commands, options, choices, and names of sessions, tags and models.

Reads the store's files and asks no daemon: a press of a key waits for it. A shell calls `torpor` with TORPOR_COMPLETING
set and the words before the cursor, the last of which may be empty; it gets a candidate a line (`torpor completion`).
"""

from __future__ import annotations

import inspect
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Literal, get_args, get_origin

from ..errors import TorporError
from ..memvid.disk.location import default_store_path, named_store_path
from ..memvid.store import Store
from ..memvid.uri import DEFAULT_NAMESPACE, VERSION_MARK, SessionUri, parse_reference, require_tag
from ..socket_api.wire.address import default_socket_path
from ..spellings import present
from .calling import guarded
from .command_list import COMMANDS, command_named
from .reach.options import (
    NAMESPACE_VARIABLE,
    READS_VERSIONS,
    Declared,
    NewNameArgument,
    enter_namespace,
    require_sessions,
)
from .serve import last_options

VARIABLE: Final = "TORPOR_COMPLETING"
_MOST: Final = 500
"""Candidates: more than anybody reads."""

_WORD: Final = re.compile(r"[\w.][\w./@:+,%-]*|--?[\w-]+")
"""What every shell takes as it is, as one word: bash puts a candidate into the line without quotes. Anybody may have
chosen a label, or the name of a model in an imported bundle, and one with a `$(` in it would be a command."""


def write_candidates(words: Sequence[str]) -> None:
    """Print what the last word may become. A fault gives none: nothing may stand in the midst of a command line."""
    with suppress(TorporError, OSError):
        for candidate in candidates(words):
            print(candidate)


def candidates(words: Sequence[str]) -> list[str]:
    """What the last word may become, in order."""
    *before, begun = words or [""]
    named = next((at for at, word in enumerate(before) if command_named(present(word))), None)
    command = None if named is None else command_named(present(before[named]))
    if named is None or command is None:
        return _fitting((each.name for each in COMMANDS), begun)
    parameters = list(inspect.signature(guarded(command)).parameters.values())
    options = {flag: each for each in parameters for flag in _flags_of(each)}
    if begun.startswith("-"):
        return _fitting((*options, "--help"), begun)
    behind = before[named + 1 :]
    given = options.get(behind[-1]) if behind else None
    if given is None or get_args(given.annotation)[0] is bool:
        given = _place_of([each for each in parameters if not _flags_of(each)], behind, options)
    if given is not None and _declared(given).callback is require_tag:
        of_session = next(iter(_arguments_in(behind, options)), None) if command.name == "untag" else None
        return _fitting(_tags(of_session, before), begun)
    return [] if given is None else _fitting(_values_of(given, begun, before), begun)


def _fitting(found: Iterable[str], begun: str) -> list[str]:
    return sorted(each for each in set(found) if each.startswith(begun) and _WORD.fullmatch(each))[:_MOST]


def _declared(parameter: inspect.Parameter) -> Declared:
    declared: Declared = get_args(parameter.annotation)[1]
    return declared


def _flags_of(parameter: inspect.Parameter) -> Sequence[str]:
    """The flags of an option; of an argument none."""
    return _declared(parameter).flags


def _place_of(
    arguments: Sequence[inspect.Parameter], behind: Sequence[str], options: dict[str, inspect.Parameter]
) -> inspect.Parameter | None:
    """The argument that a word is for; the last one takes all that follow, if it takes several."""
    taken = sum(1 for _ in _arguments_in(behind, options))
    if taken < len(arguments):
        return arguments[taken]
    last = arguments[-1] if arguments else None
    return last if last is not None and "list" in str(get_args(last.annotation)[:1]) else None


def _arguments_in(behind: Sequence[str], options: dict[str, inspect.Parameter]) -> Iterator[str]:
    """The words that are no option and no value of one."""
    words = iter(behind)
    for word in words:
        if word in options:
            if get_args(options[word].annotation)[:1] != (bool,):
                next(words, None)
        elif not word.startswith("-"):
            yield word


def _values_of(parameter: inspect.Parameter, begun: str, before: Sequence[str]) -> Iterable[str]:
    kind, callback = get_args(parameter.annotation)[0], _declared(parameter).callback
    for each in (kind, *get_args(kind)):
        if get_origin(each) is Literal:
            return map(str, get_args(each))
    if parameter.annotation == NewNameArgument:
        return ()
    if callback is require_sessions or callback in READS_VERSIONS:
        return _sessions(begun, before, versions=callback in READS_VERSIONS)
    if callback is enter_namespace:
        return _select(before, "SELECT DISTINCT namespace FROM versions")
    if "--model" in _flags_of(parameter) or (parameter.name == "name" and "load" in before):
        return (*(_served().get("model") or {}), *_select(before, "SELECT DISTINCT model FROM versions"))
    if "--label" in _flags_of(parameter):
        labels = _select(before, "SELECT DISTINCT labels FROM versions")
        return (label for told in labels for label in json.loads(told))
    return ()


def _sessions(begun: str, before: Sequence[str], *, versions: bool) -> Iterator[str]:
    """Names of sessions, bare where those of their namespace are; behind the mark of a version its tags and numbers."""
    chosen = _namespace_in(before)
    with _opened(before) as store:
        if VERSION_MARK in begun and versions:
            name = begun.partition(VERSION_MARK)[0]
            uri = parse_reference(name if "/" in name else f"{chosen}/{name}")
            yield from (f"{name}{VERSION_MARK}{each}" for each in _versions(store, uri))
            return
        namespace, slash, name = begun.removeprefix("torpor://").rpartition("/")
        scheme = "torpor://" if begun.startswith("torpor://") else ""
        named = store.index.select(
            "SELECT DISTINCT name FROM versions WHERE namespace = ? AND name >= ? ORDER BY name LIMIT ?",
            (namespace or chosen, name, _MOST),
        )
        for (each,) in named:
            yield f"{scheme}{namespace}{slash}{each}"
        for uri in store.acknowledged():
            if uri.namespace == (namespace or chosen):
                yield f"{scheme}{namespace}{slash}{uri.name}"
        if not slash:
            for (each,) in store.index.select("SELECT DISTINCT namespace FROM versions", ()):
                if each != chosen:
                    yield f"{scheme}{each}/"


def _versions(store: Store, uri: SessionUri) -> Iterator[str]:
    with suppress(TorporError):
        yield from store.marks(uri).tags
    yield from (str(row.version) for row in store.versions(uri))


def _tags(session: str | None, before: Sequence[str]) -> list[str]:
    """The tags that a session has; a new one, of no session, is anybody's guess."""
    if session is None:
        return []
    chosen = _namespace_in(before)
    with _opened(before) as store:
        return list(store.marks(parse_reference(session if "/" in session else f"{chosen}/{session}")).tags)


def _namespace_in(before: Sequence[str]) -> str:
    return _option("--namespace", before) or os.environ.get(NAMESPACE_VARIABLE) or DEFAULT_NAMESPACE


def _select(before: Sequence[str], query: str) -> list[str]:
    with _opened(before) as store:
        return [str(value) for (value,) in store.index.select(query, ())]


def _opened(before: Sequence[str]) -> Store:
    """The store of the line, else the one that the daemon serves, else the default one."""
    named = _option("--store", before) or named_store_path() or _served().get("store") or default_store_path()
    return Store.open(Path(str(named)).expanduser(), writable=False)


def _served() -> dict[str, Any]:
    """The options of the daemon on the default socket, as its file beside the socket has them."""
    return last_options.recall(default_socket_path())


def _option(flag: str, before: Sequence[str]) -> str | None:
    """The value of an option that stands in the line."""
    places = [at for at, word in enumerate(before[:-1]) if word == flag]
    return before[places[-1] + 1] if places else None
