"""What a message advises: the way out of damage, and commands that name the store of the command that shows it, if
--store named it. Without that they would mean the store that a daemon serves, or the default one.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from ...errors import TorporError
from ...memvid.errors import PUT_BACK
from ...records import Record
from ..exit_codes import INTEGRITY, exit_status_of

ON_FILES = frozenset(
    {
        *("serve", "serve-ray", "ensure", "launch", "service", "doctor"),
        *("ls", "log", "show", "why", "blocks", "who", "diff", "cat", "verify", "du", "backup", "import"),
        *("rm", "forget", "tag", "untag", "pin", "unpin", "prune", "repack", "strip", "repair"),
    }
)
"""The commands that take --store, but for these: messages name them as what writes a file, here or elsewhere."""
OF_ANY_STORE = frozenset({"export", "export-kv", "inspect"})
_NEEDS_NONE = OF_ANY_STORE | {"stop"}

_COMMAND = re.compile(r"`torpor ([a-z][a-z-]*)((?: [^`\n]*)?)`")
_NAMED = re.compile(r"\s--(?:store|socket)\b")
_SENTENCES = ("message", "reason", "goes_on")  # the fields of a document that are written for people

# A message with these words says what to do, or that nothing is missing.
_ADVISED = ("torpor repair", "is stripped: it has no keys and values")

_STORE: ContextVar[Path | None] = ContextVar("store", default=None)


@contextmanager
def advising_for(store: Path | None) -> Iterator[None]:
    """What is advised within is meant for this store, also by an error; None: for the one that commands take alone."""
    before = _STORE.set(store)
    try:
        yield
    except TorporError as error:
        if store is not None:
            error.message = naming_store(error.message + way_out(error))
        raise
    finally:
        _STORE.reset(before)


def way_out(error: TorporError) -> str:
    """What to do about a damaged file of the store, where the error only says which one it is."""
    from ...memvid.folder.store_file import BUNDLES, PACKS, VERSIONS  # only where something is damaged

    path = error.details.get("path")
    if exit_status_of(error.code) != INTEGRITY.number or any(words in error.message for words in _ADVISED):
        return ""
    if not isinstance(path, str) or not any(f"/{folder}/" in path for folder in (VERSIONS, PACKS, BUNDLES)):
        return ""  # an export, for example: no repair of a store mends it
    return f" {PUT_BACK}"


def naming_store(text: str) -> str:
    """A text whose commands in backticks name the store."""
    store = _STORE.get()
    if store is None:
        return text
    place = f"--store {shlex.quote(str(store))}"

    def named(found: re.Match[str]) -> str:
        verb, rest = found.groups()
        if verb in _NEEDS_NONE or _NAMED.search(rest):
            return found[0]
        return (
            f"`torpor {verb}{rest} {place}`" if verb in ON_FILES else f"{found[0]} (once `torpor serve {place}` runs)"
        )

    return _COMMAND.sub(named, text)


def naming_store_in(document: Any) -> Any:
    """A document for JSON, its sentences as of `naming_store`."""
    if _STORE.get() is None:
        return document
    if isinstance(document, Record):
        return naming_store_in(vars(document))
    if isinstance(document, Mapping):
        return {
            name: naming_store(each) if name in _SENTENCES and isinstance(each, str) else naming_store_in(each)
            for name, each in document.items()
        }
    return [naming_store_in(each) for each in document] if isinstance(document, list | tuple) else document
