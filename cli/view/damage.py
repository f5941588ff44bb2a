"""Damage in terms of sessions: which versions are whole and which up to a token, what to put back, and what goes on.

Only the store decides whether a byte is sound; this puts its report into words.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...errors import TorporError
from ...memvid.answers import VersionInfo
from ...memvid.checking.wholeness import AGAIN
from ...memvid.errors import BundleMissing
from ...memvid.folder.folder import manifest_name
from ...memvid.format.records import DamagedVersion, VerifyReport
from ...memvid.store import Store
from ...memvid.units import format_count
from ...memvid.uri import VERSION_MARK, SessionUri
from .advice import way_out
from .formatting import format_id

_MENDING = " Its tokens are sound, so `torpor repair` lets the daemon compute its keys and values again."

_COMPUTING = (
    "The tokens of the newest version are sound: `torpor repair` beside a daemon that serves its model computes its "
    "keys and values again."
)


@dataclass(frozen=True, slots=True)
class VersionState:
    """How far a version is whole: all of it, or its first `whole_up_to` tokens. `manifest`: sound, missing or
    damaged. bundle_id: its hex digits, which tell two versions with one number apart."""

    version: int
    token_count: int
    is_whole: bool
    whole_up_to: int
    manifest: str
    bundle_id: str = ""


@dataclass(frozen=True, slots=True)
class SessionDamage:
    """A session that is not whole. versions: all of them, oldest first. put_back: the files, or what is known of them.
    goes_on: a sentence."""

    session: str
    versions: tuple[VersionState, ...]
    put_back: tuple[str, ...]
    goes_on: str


def damage_by_session(store: Store, report: VerifyReport) -> list[SessionDamage]:
    """The sessions with versions that are not whole, by name."""
    damaged: dict[SessionUri, dict[str, DamagedVersion]] = {}
    for each in report.damaged:
        damaged.setdefault(each.uri, {})[each.bundle_id] = each
    missing = {finding.path for finding in report.findings if finding.code == BundleMissing.code}
    return [_damage_of(store, uri, damaged[uri], missing) for uri in sorted(damaged)]


def add_suggestion(error: TorporError, store_path: Path, session: str, *, is_served: bool = False) -> None:
    """Add to an error about the damaged state of a session how that goes on anyway, as a sentence, and its newest whole
    version, as `intact_version`. The sentence comes after the ways to bring the damaged version back: once an older one
    was woken and sleeps, that is the newest. is_served: a daemon runs, which can compute the state again.

    Every byte is read, because a suggestion that fails too would be worse than none. Raises StoreError and InvalidUri:
    there is nothing to suggest.
    """
    with Store.open(store_path, writable=False) as store:
        uri = store.session_of(session)
        damaged = {each.bundle_id: each for each in store.verify(uri, deep=True).damaged}
        rows = store.versions(uri)
        if not rows:
            return
        mending = _MENDING if is_served and _has_newest_tokens(store, rows[-1], damaged) else ""
    if not damaged and not mending:
        return
    if damaged and (whole := _whole(rows, damaged)):
        error.details["intact_version"] = whole[-1].version
    going_on = f" {_how_it_goes_on(uri, rows, damaged, told=error.message)}" if damaged else ""
    error.message += f"{way_out(error)}{mending}{going_on}"


def _has_newest_tokens(store: Store, newest: VersionInfo, damaged: Mapping[str, DamagedVersion]) -> bool:
    """Whether the newest version is damaged in its keys and values alone. A stripped one counts as whole then."""
    if newest.bundle_id not in damaged and newest.bundle_id not in store.marks_to_show(newest.uri).stripped:
        return False
    try:
        with store.open_bundle(newest.bundle_id) as reader:
            reader.tokens()
    except TorporError:
        return False
    return True


def _damage_of(
    store: Store, uri: SessionUri, damaged: Mapping[str, DamagedVersion], missing: Container[str]
) -> SessionDamage:
    rows, states = store.versions(uri), []
    for row in rows:
        damage, manifest = damaged.get(row.bundle_id), "sound"
        if damage is not None and not damage.blocks:
            manifest = "missing" if _manifest_path(store, damage) in missing else "damaged"
        whole_up_to = row.block_tokens if damage is None else damage.whole_up_to
        is_whole, bundle_id = damage is None, row.bundle_id
        states.append(VersionState(row.version, row.block_tokens, is_whole, whole_up_to, manifest, bundle_id))
    mending = f"{_COMPUTING} " if rows and _has_newest_tokens(store, rows[-1], damaged) else ""
    goes_on = f"{mending}{_how_it_goes_on(uri, rows, damaged)}"
    return SessionDamage(str(uri), tuple(states), _to_put_back(store, damaged), goes_on)


def _to_put_back(store: Store, damaged: Mapping[str, DamagedVersion]) -> tuple[str, ...]:
    """Manifests by their paths; packs by theirs where it is known which had the blocks, else by a block."""
    files = [_manifest_path(store, each) for each in damaged.values() if not each.blocks]
    packs: dict[str, None] = {}
    unknown: dict[bytes, None] = {}
    lacking = {block: each.is_stripped for each in damaged.values() for block in each.blocks}
    for block, is_stripped in lacking.items():
        names = store.index.packs_of(block, stripped=is_stripped)
        packs.update(dict.fromkeys(f"{store.path}/{name}" for name in names))
        if not names:
            unknown[block] = None
    if unknown:
        more = f" and {format_count(len(unknown) - 1)} more" if len(unknown) > 1 else ""
        files.append(f"the pack that had block {next(iter(unknown)).hex()[:16]}{more}")
    return (*files, *packs)


def _manifest_path(store: Store, version: DamagedVersion) -> str:
    return f"{store.path}/{manifest_name(version.bundle_id)}"


def _how_it_goes_on(
    uri: SessionUri, rows: Sequence[VersionInfo], damaged: Mapping[str, DamagedVersion], *, told: str = ""
) -> str:
    """What can be woken although some versions are not whole. told: an error that may say a part of it already."""
    times = Counter(row.version for row in rows)
    rows = list({row.version: row for row in rows}.values())  # of two with one number the younger one is woken
    damaged = {row.bundle_id: damaged[row.bundle_id] for row in rows if row.bundle_id in damaged}
    whole = _whole(rows, damaged)
    if whole and whole[-1] == rows[-1]:
        return f"The newest version of {uri} is whole, so its next use wakes as ever."
    ways = []
    cut = max(damaged.values(), key=_usable, default=None)
    if cut is not None and cut.whole_up_to:
        command = f"`torpor wake {uri}{VERSION_MARK}{_named(cut, times)} --at {cut.whole_up_to}`"
        if command not in told:
            at = format_count(cut.whole_up_to)
            from_there = f"goes on from token {at} of version {cut.version}"
            ways.append(f"{command} {AGAIN if cut.is_stripped else from_there}.")
    if whole:
        last = whole[-1]
        way = f"`torpor wake {uri}{VERSION_MARK}{_named(last, times)}`"
        ways.append(f"{way} goes on from version {last.version}, which is whole.")
    if not ways and not told.count(" --at "):
        return f"Until then no version of {uri} can be woken."
    return " ".join([*ways, "What sleeps then is the newest."])


def _named(version: VersionInfo | DamagedVersion, times: Mapping[int, int]) -> str:
    """A version behind an `@`: by its number, or by its id where several have the number."""
    return str(version.version) if times[version.version] == 1 else format_id(version.bundle_id)


def _usable(damage: DamagedVersion) -> tuple[int, bool, int]:
    """How much of a damaged version can be woken; of several alike one that is not computed again, and the newest."""
    return damage.whole_up_to, not damage.is_stripped, damage.version


def _whole(rows: Sequence[VersionInfo], damaged: Mapping[str, DamagedVersion]) -> list[VersionInfo]:
    return [row for row in rows if row.bundle_id not in damaged]
