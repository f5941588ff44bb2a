"""Which version of a session a selector means: by number, by tag, or by the beginning of its bundle id.

Pure. Owns the rule that a selector means exactly one version: several are an error that lists them, never a default.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from ..answers import VersionInfo
from ..errors import AmbiguousVersion, InvalidUri, SessionNotFound
from ..uri import BACK_MARK, VERSION_MARK, Selector, SessionUri
from .marks import Marks

_SHORT_ID_DIGITS: Final = 12
_MAX_LISTED: Final = 8


def select_version(uri: SessionUri, rows: Sequence[VersionInfo], marks: Marks, selector: Selector) -> VersionInfo:
    """The one version among a session's `rows` (all of them) that `selector` means.

    Raises:
        AmbiguousVersion: it means several; `candidates` lists a reference to each.
        SessionNotFound: it means none.
    """
    tagged = marks.tagged(uri, selector.tag) if selector.tag is not None else None
    matches = [row for row in rows if _means(selector, tagged, row)]
    if not matches:
        raise _no_version(uri, rows, marks, selector, tagged)
    if len(matches) > 1:
        raise ambiguous(uri, selector.text, matches)
    return matches[0]


def ambiguous(uri: SessionUri, text: str, found: Sequence[VersionInfo]) -> AmbiguousVersion:
    """The error for a text that means several versions."""
    are_rivals = len({row.version for row in found}) == 1
    return AmbiguousVersion(
        told_of_rivals(found) if are_rivals else _told_of_several(uri, found, text),
        session=str(uri),
        selector=text,
        candidates=[f"{uri}{VERSION_MARK}{row.bundle_id}" for row in found],  # a shorter id was ambiguous
    )


def ambiguous_id(digits: str, found: Sequence[VersionInfo]) -> AmbiguousVersion:
    """The error for digits that begin several bundle ids. found: their versions."""
    told = [f"{row.uri}{VERSION_MARK}{row.bundle_id}" for row in found]
    more = f" and {len(told) - _MAX_LISTED} more" if len(told) > _MAX_LISTED else ""
    return AmbiguousVersion(
        f"{digits} begins the ids of several versions: {', '.join(told[:_MAX_LISTED])}{more}. Give more digits.",
        session=digits,
        selector=digits,
        candidates=told,
    )


def step_back(row: VersionInfo, steps: int, before: Callable[[VersionInfo], VersionInfo | None]) -> VersionInfo:
    """The version that is so many before another one: also of the session that it was forked from, as far as that is
    of its namespace. before: the version that one goes on from, if it is there. Raises SessionNotFound."""
    current = row
    for step in range(steps):
        earlier = before(current)
        if earlier is None or earlier.uri.namespace != row.uri.namespace:
            has = f"only {step} before it" if step else "none before it"
            why = "begins with it" if current.parent is None else "has lost what was before that, or never had it"
            raise SessionNotFound(
                f"{row.uri} has no version {steps} before version {row.version}: there {'are' if step > 1 else 'is'} "
                f"{has}. The line of versions {why}.{way_to_any_moment(row.uri, [row], below=row.version - 1)}",
                session=str(row.uri),
                version=f"{row.version}{BACK_MARK}{steps}",
                suggestions=[str(row.uri)],
            )
        current = earlier
    return current


def other_session(text: str, row: VersionInfo) -> InvalidUri:
    """The error for steps back that lead out of the session that was named, where that would change something. row: of
    the version that they lead to."""
    other = f"{row.uri}{VERSION_MARK}{row.version}"
    return InvalidUri(f"{text} is {other}; name it so.", field="session", value=text)


def told_of_rivals(rivals: Sequence[VersionInfo]) -> str:
    """Where a manifest was put back whose number was given again."""
    uri, ids = rivals[0].uri, [row.bundle_id[:_SHORT_ID_DIGITS] for row in rivals]
    return (
        f"{uri} has {len(rivals)} versions with the number {rivals[0].version}, as when one was put back after its "
        f"number was given again: {' and '.join(f'{uri}{VERSION_MARK}{each}' for each in ids)}. Keep one in a file "
        f"(`torpor export {uri}{VERSION_MARK}ID FILE`), which an import takes under another name, and delete it here "
        f"(`torpor rm {uri}{VERSION_MARK}ID`)."
    )


def _means(selector: Selector, tagged: str | None, row: VersionInfo) -> bool:
    return (
        row.version == selector.number
        or row.bundle_id == tagged
        or (selector.id_prefix is not None and row.bundle_id.startswith(selector.id_prefix))
    )


def _told_of_several(uri: SessionUri, matches: Sequence[VersionInfo], text: str) -> str:
    shown = ", ".join(f"version {row.version} ({row.bundle_id})" for row in matches[:_MAX_LISTED])
    more = f" and {len(matches) - _MAX_LISTED} more" if len(matches) > _MAX_LISTED else ""
    return f"{uri}{VERSION_MARK}{text} means {len(matches)} versions: {shown}{more}. Give more digits of the id."


def _no_version(
    uri: SessionUri, rows: Sequence[VersionInfo], marks: Marks, selector: Selector, tagged: str | None
) -> SessionNotFound:
    if tagged is not None:
        why = (
            f"The tag {selector.text!r} of {uri} names the bundle {tagged[:_SHORT_ID_DIGITS]}, which is none of "
            "its versions now: it cannot be read, or is gone. `torpor verify` says more."
        )
    else:
        tags = sorted(marks.session(uri).tags)
        known = [
            describe_versions([row.version for row in rows]),
            f"the tags {', '.join(tags[:_MAX_LISTED])}" if tags else "",
        ]
        way = "" if rows else f" `torpor save {uri}` makes one."
        why = f"{uri} has no version {selector.text!r}; it has {' and '.join(filter(None, known))}.{way}"
        if selector.number is not None:
            why += way_to_any_moment(uri, rows, below=selector.number)
    return SessionNotFound(why, session=str(uri), version=selector.text, suggestions=[str(uri)])


def way_to_any_moment(uri: SessionUri, rows: Sequence[VersionInfo], *, below: int) -> str:
    """What helps whoever names a version that is gone: as a sentence behind another one. rows: of those that are left;
    below: the number of the one that is gone. Empty where none of them is later."""
    newest = max(rows, key=lambda row: row.version, default=None)
    if newest is None or newest.version <= below:
        return ""
    return (
        f" A version that the daemon wrote behind your requests goes once a later one has all of it: "
        f"`torpor wake {uri} --at TOKEN` gives any moment of version {newest.version}, up to token "
        f"{newest.token_count:,}."
    )


def _parts(run: Sequence[int]) -> list[str]:
    return [f"{run[0]} to {run[-1]}"] if len(run) > 2 else [str(number) for number in run]


def describe_versions(numbers: Sequence[int]) -> str:
    """The version numbers as text, in whole runs, for some between may be gone."""
    if not numbers:
        return "no versions"
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    shown = [part for run in runs[:_MAX_LISTED] for part in _parts(run)]
    if len(runs) > _MAX_LISTED:
        shown.append(f"others up to {runs[-1][-1]}")
    text = shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"
    return f"version{'s' if len(numbers) > 1 else ''} {text}"


def lineage_of(versions: Sequence[VersionInfo], row: VersionInfo) -> tuple[str, ...]:
    """The bundle ids, in hex, from a version back along the parents: as far as they are versions of its session, and
    the first that is none, which was removed or is another session's."""
    by_id = {each.bundle_id: each for each in versions}
    line: list[str] = []
    current: str | None = row.bundle_id
    while current is not None and current not in line:
        line.append(current)
        current = by_id[current].parent if current in by_id else None
    return tuple(line)
