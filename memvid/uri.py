"""A session's name, torpor://NAMESPACE/NAME, and the texts that a person may type for it and for its versions.

    NAME                NAMESPACE/NAME         torpor://NAMESPACE/NAME      the session, its newest version
                        (a bare NAME is one of the namespace `default`)
    NAME@3              the version with this number
    NAME@before-refactor    the version that has this tag
    NAME@3f9c01ab       the version whose bundle id begins so: 8 hex digits at least
    3f9c01ab  @3f9c01ab     the same, whoever has it; without the `@` where no session is called so
    NAME~2  NAME@3~2    the version two before, along the parents; NAME~ is NAME~1
    NAME:500  NAME@3:500    the same, as it was at its token 500: a place within

Owns the syntax, and the suggestions for a name that is not there. Never turns a name into a path: sessions are found by
the index, bundles by their ids, so no text of a client is ever joined to a folder.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from .errors import InvalidTag, InvalidUri, SessionNotFound
from .limits import MAX_NAME_CHARS, MAX_TAG_CHARS, MAX_VERSION, MIN_ID_DIGITS

DEFAULT_NAMESPACE: Final = "default"
SCHEME: Final = "torpor://"
VERSION_MARK: Final = "@"
BACK_MARK: Final = "~"
PLACE_MARK: Final = ":"

_PART: Final = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{MAX_NAME_CHARS - 1}}}", re.ASCII)
_RULE: Final = f"1 to {MAX_NAME_CHARS} ASCII letters, digits, '.', '_' or '-', beginning with a letter or a digit"
_ID_DIGITS: Final = 64
_NUMBER: Final = re.compile(r"[1-9][0-9]{0,15}", re.ASCII)
_ID_PREFIX: Final = re.compile(rf"[0-9A-Fa-f]{{{MIN_ID_DIGITS},{_ID_DIGITS}}}", re.ASCII)
_LOOKS_LIKE_ID: Final = re.compile(rf"[0-9A-Fa-f]{{{MIN_ID_DIGITS},}}", re.ASCII)
_TAG: Final = re.compile(rf"[A-Za-z][A-Za-z0-9._-]{{0,{MAX_TAG_CHARS - 1}}}", re.ASCII)
_STEPS: Final = re.compile(r"[0-9]{0,7}", re.ASCII)
_TOKEN: Final = re.compile(r"[1-9][0-9]{0,9}", re.ASCII)
_LIKENESS: Final = 0.75
"""From 0 to 1: a name less like the typed one is another name, no slip of the finger."""
_BEGUN_TOLD: Final = 8
_TAG_RULE: Final = (
    f"1 to {MAX_TAG_CHARS} ASCII letters, digits, '.', '_' or '-', beginning with a letter, and not {MIN_ID_DIGITS} or "
    "more hex digits only"
)


def _is_part(part: object) -> bool:
    return isinstance(part, str) and _PART.fullmatch(part) is not None


def _no_part(label: str, part: object) -> InvalidUri:
    return InvalidUri(f"{_shown(part)} is not a valid {label}: use {_RULE}.", field=label, value=_shown(part))


@dataclass(frozen=True, slots=True, order=True)
class SessionUri:
    """The full name of a session. Raises InvalidUri for parts outside the syntax, however it is built."""

    namespace: str
    name: str

    def __post_init__(self) -> None:
        if not _is_part(self.namespace):
            raise _no_part("namespace", self.namespace)
        if not _is_part(self.name):
            raise _no_part("name", self.name)

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


def parse_reference(text: str) -> SessionUri:
    """Read a session as a person types it; it need not exist. Raises InvalidUri."""
    if isinstance(text, str) and ("/" in text or text.startswith("torpor:")):
        return SessionUri.parse(text if text.startswith("torpor:") else SCHEME + text)
    return SessionUri(DEFAULT_NAMESPACE, text)


@dataclass(frozen=True, slots=True)
class Selector:
    """What stands after the `@`, with each of its possible readings; at least one is not None.

    Eight digits are a version number and the beginning of an id: both are looked up, and two hits are an error.
    """

    text: str
    number: int | None
    tag: str | None
    id_prefix: str | None


@dataclass(frozen=True, slots=True)
class Reference:
    """A text that names a session, a version of one, or a place within, taken apart. None of it need exist.

    session: as it was typed; before an `@` with the digits of a bundle id it may be nothing, or `NAMESPACE/`. selector:
    None for the newest version. back: how many versions before. token: the place; None for the end.
    """

    session: str
    selector: Selector | None = None
    back: int = 0
    token: int | None = None

    @property
    def namespace(self) -> str | None:
        """The namespace that was typed; None for none."""
        return self.session.removeprefix(SCHEME).rpartition("/")[0] or None

    @property
    def id_alone(self) -> str | None:
        """The digits of a bundle id that stand where a session could: the version is theirs if no session has that
        name."""
        name = self.session.rpartition("/")[2]
        if name:
            return name.lower() if self.selector is None and _ID_PREFIX.fullmatch(name) else None
        return None if self.selector is None else self.selector.id_prefix


def parse_version_reference(text: str) -> Reference:
    """Take a reference apart. Checks the syntax only.

    Raises:
        InvalidUri: not a reference; the message tells the grammar.
    """
    if not isinstance(text, str):
        raise _no_reference(text)
    session = session_in(text)
    version, to_place, place = text[len(session) :].partition(PLACE_MARK)
    version, to_before, steps = version.partition(BACK_MARK)
    if to_place and not _TOKEN.fullmatch(place):
        raise _no_reference(PLACE_MARK + place)
    if to_before and not _STEPS.fullmatch(steps):
        raise _no_reference(BACK_MARK + steps)
    reference = Reference(
        session,
        parse_selector(version.removeprefix(VERSION_MARK)) if version else None,
        int(steps or 1) if to_before else 0,
        int(place) if to_place else None,
    )
    parse_reference(session if session.rpartition("/")[2] else session + (reference.id_alone or ""))
    return reference


def session_in(text: str) -> str:
    """What names the session in a reference: all before the mark of a version or a place. Checks nothing."""
    scheme = SCHEME if text.startswith(SCHEME) else ""
    return scheme + re.split(f"[{VERSION_MARK}{BACK_MARK}{PLACE_MARK}]", text[len(scheme) :], maxsplit=1)[0]


def names_version(text: str) -> bool:
    """Whether a reference has the mark of a version. The digits of an id alone have none."""
    return VERSION_MARK in text or BACK_MARK in text


def names_place(text: str) -> bool:
    """Whether a reference has the mark of a place."""
    return PLACE_MARK in text.removeprefix(SCHEME)


def parse_selector(text: str) -> Selector:
    """Read a version number, a tag or the beginning of a bundle id. Raises InvalidUri."""
    number = int(text) if _NUMBER.fullmatch(text) else None
    selector = Selector(
        text=text,
        number=number if number is None or number <= MAX_VERSION else None,
        tag=text if is_tag(text) else None,
        id_prefix=text.lower() if _ID_PREFIX.fullmatch(text) else None,
    )
    if selector.number is None and selector.tag is None and selector.id_prefix is None:
        raise _no_reference(VERSION_MARK + text)
    return selector


def is_tag(text: str) -> bool:
    return _TAG.fullmatch(text) is not None and not _LOOKS_LIKE_ID.fullmatch(text)


def require_tag(text: str) -> str:
    """Check a tag, and return it. Raises InvalidTag."""
    if not isinstance(text, str) or not is_tag(text):
        raise InvalidTag(f"{_shown(text)} is not a valid tag: use {_TAG_RULE}.", value=_shown(text))
    return text


def _no_reference(value: object) -> InvalidUri:
    return InvalidUri(
        f"{_shown(value)} names no version: write SESSION@N for a version number, SESSION@TAG for a tag ({_TAG_RULE}), "
        f"or SESSION@ID with the first {MIN_ID_DIGITS} to {_ID_DIGITS} hex digits of a bundle id; behind it ~N for N "
        "versions before, :TOKEN for a place.",
        field="version",
        value=_shown(value),
    )


def not_found(wanted: SessionUri, known: Iterable[SessionUri]) -> SessionNotFound:
    """The error for a session that is not there, with suggestions, and in `begun` the first sessions whose names begin
    as the wanted one. All are of its own namespace: a client may be told of no other one."""
    names = sorted({uri.name for uri in known if uri.namespace == wanted.namespace})
    hits = difflib.get_close_matches(wanted.name, names, n=3, cutoff=_LIKENESS)
    close = [str(SessionUri(wanted.namespace, name)) for name in hits]
    begun = [str(SessionUri(wanted.namespace, name)) for name in names if name.startswith(wanted.name)]
    hint = f" Did you mean {' or '.join(close)}?" if close else " List what there is with `torpor ls`."
    if begun:
        more = f" and {len(begun) - _BEGUN_TOLD} more" if len(begun) > _BEGUN_TOLD else ""
        hint = f" These begin so: {', '.join(begun[:_BEGUN_TOLD])}{more}."
    told = {"begun": begun[:_BEGUN_TOLD]} if begun else {}
    return SessionNotFound(f"There is no session {wanted}.{hint}", session=str(wanted), suggestions=close, **told)


def _shown(value: object) -> str:
    """A hostile value made safe to print: quoted, escaped, and short."""
    text = ascii(value)
    return text if len(text) <= 160 else text[:157] + "..."
