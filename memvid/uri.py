"""How a session is called: torpor://NAMESPACE/NAME, and what a person may type for it.

Owns the syntax and the resolution of short names. Never turns a name into a path: sessions are found by the index,
bundles by their ids, so no text that a client sends is ever joined to a folder.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from .errors import AmbiguousName, InvalidUri, SessionNotFound
from .limits import MAX_NAME_CHARS

DEFAULT_NAMESPACE: Final = "default"
SCHEME: Final = "torpor://"

_PART: Final = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{MAX_NAME_CHARS - 1}}}", re.ASCII)
_RULE: Final = f"1 to {MAX_NAME_CHARS} ASCII letters, digits, '.', '_' or '-', beginning with a letter or a digit"


@dataclass(frozen=True, slots=True, order=True)
class SessionUri:
    """The full name of a session. Raises InvalidUri for parts outside the syntax, however it is built."""

    namespace: str
    name: str

    def __post_init__(self) -> None:
        for label, part in (("namespace", self.namespace), ("name", self.name)):
            if not isinstance(part, str) or not _PART.fullmatch(part):
                raise InvalidUri(
                    f"{_shown(part)} is not a valid {label}: use {_RULE}.", field=label, value=_shown(part)
                )

    @classmethod
    def parse(cls, text: str) -> SessionUri:
        """Read a full URI and nothing shorter."""
        if not isinstance(text, str) or not text.startswith(SCHEME):
            raise InvalidUri(
                f"{_shown(text)} is not a session URI: write torpor://NAMESPACE/NAME.", field="uri", value=_shown(text)
            )
        parts = text[len(SCHEME) :].split("/")
        if len(parts) != 2:
            raise InvalidUri(
                f"{_shown(text)} needs exactly a namespace and a name: write torpor://NAMESPACE/NAME.",
                field="uri",
                value=_shown(text),
            )
        return cls(parts[0], parts[1])

    def __str__(self) -> str:
        return f"{SCHEME}{self.namespace}/{self.name}"


def resolve(text: str, known: Iterable[SessionUri]) -> SessionUri:
    """Find the one session among `known` that `text` (a URI, NAMESPACE/NAME, or a bare NAME) means.

    Raises:
        InvalidUri: not a name at all.
        AmbiguousName: a bare name that several namespaces have.
        SessionNotFound: none has it.
    """
    namespace, name = parse_reference(text)
    sessions = sorted(set(known))
    matches = [uri for uri in sessions if uri.name == name and namespace in (None, uri.namespace)]
    if len(matches) > 1:
        candidates = [str(uri) for uri in matches]
        raise AmbiguousName(
            f"{text!r} names {len(matches)} sessions: {', '.join(candidates)}. Use one of these URIs.",
            name=text,
            candidates=candidates,
        )
    if not matches:
        raise not_found(text, sessions)
    return matches[0]


def parse_reference(text: str) -> tuple[str | None, str]:
    """What a person may type, as (namespace, name); a bare name has no namespace. Raises InvalidUri."""
    if isinstance(text, str) and ("/" in text or text.startswith("torpor:")):
        wanted = SessionUri.parse(text if text.startswith("torpor:") else SCHEME + text)
        return wanted.namespace, wanted.name
    return None, SessionUri(DEFAULT_NAMESPACE, text).name


def not_found(text: str, known: Iterable[SessionUri]) -> SessionNotFound:
    """The error for a name that nothing has, with the names that come close."""
    names = {str(uri): str(uri) for uri in known} | {uri.name: str(uri) for uri in known}
    close = list(dict.fromkeys(names[hit] for hit in difflib.get_close_matches(text, names, n=3, cutoff=0.6)))
    hint = f" Did you mean {' or '.join(close)}?" if close else " List what there is with `torpor ls`."
    return SessionNotFound(f"There is no session {text!r}.{hint}", session=text, suggestions=close)


def _shown(value: object) -> str:
    """A hostile value made safe to print: quoted, escaped, and short."""
    text = ascii(value)
    return text if len(text) <= 160 else text[:157] + "..."
