"""What was acknowledged and no version covers becomes a version when a store is opened.

Owns the decision whether the journal's record of a session is still to be replayed. A version that it makes refers to
the blocks of the version behind which the turns stood, and has their tokens under `unread`: the next use of the session
computes these again. Knows nothing of models.

Rules:
- A record is covered if a version of the session names it, and has all its tokens still, or one after it has; or if a
  later one begins with its ledger. Then a sleep was cut off before its last step, which tells the journal, or journal
  and bundles are of different moments. What is damaged or gone covers nothing: the turns would be lost with it. Later
  are versions with larger numbers; where the newest one of then is gone, its number may have been given again.
- A record whose base is missing waits until that is back. A delete drops the record before the newest version goes.
- A record waits for no keys and values: where packs have the headers of its base's blocks, which have the tokens, its
  version is one that lacks the rest. The next use computes that.
- Otherwise the record becomes the session's next version, whatever came back or was imported meanwhile: nothing is lost
  by a version too many.
- What cannot become a version stays in the journal, and its session is not used until it can: its newest version lacks
  turns that were acknowledged.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection

from ..answers import Finding
from ..errors import Corruption, DurabilityLost, LockLost, NoSpace, StoreBusy, StoreError, StoreIoError
from ..folder.journal import Journal
from ..folder.journal_findings import findings_beside, waiting_finding
from ..folder.journals_beside import bases_beside
from ..format.blocks import TOKEN_BYTES, BlockEntry
from ..format.journal import COVERS, JournalRecord
from ..format.manifest import tail_in
from ..format.records import OpenReport
from ..uri import SessionUri
from ..writing.core import StoreCore
from ..writing.reader import BundleReader
from ..writing.sleeping import VersionDraft, write_version


def replay(core: StoreCore, opening: OpenReport) -> OpenReport:
    """Make versions of what the journal of a store holds, opened to write, and remove a journal in which nothing counts
    any more. What failed is told in the report, and the next opening tries again.

    Raises:
        DurabilityLost, LockLost; UnsafePath, NoSpace, StoreIoError: a journal kept beside it cannot be taken up.
    """
    replayed, findings = _replay_journal(core)
    while core.journal.take_up():
        core.journal.close()
        core.journal = Journal.load(core.folder, writable=True)
        more, failures = _replay_journal(core)
        replayed, findings = replayed + more, findings + failures
    findings += findings_beside(core.journal.folder_path, core.journal.strange())
    return dataclasses.replace(opening, turns_replayed=replayed, journal=tuple(findings))


def _replay_journal(core: StoreCore) -> tuple[int, list[Finding]]:
    journal, replayed = core.journal, 0
    for uri in journal.uris():
        try:
            replayed += replay_session(core, uri)
        except (DurabilityLost, LockLost):
            raise
        except StoreError as error:
            journal.waiting[uri] = error.message
    with core.journaling(), contextlib.suppress(NoSpace, StoreIoError):
        journal.settle()
    waiting = [waiting_finding(journal.path, uri, reason) for uri, reason in journal.waiting.items()]
    return replayed, [*journal.findings, *waiting]


def replay_session(core: StoreCore, uri: SessionUri) -> bool:
    """Make a version of what the journal has of a session; whether it had to be.

    Raises:
        StoreError: it could not be made, and the journal keeps its record.
    """
    journal = core.journal
    reason = journal.waiting.pop(uri, None)
    try:
        return _replay(core, uri)
    except BaseException:
        if reason is not None:
            journal.waiting[uri] = reason
        raise


def _replay(core: StoreCore, uri: SessionUri) -> bool:
    record = core.journal.find(uri)
    if record is None or _is_covered(core, record):
        with core.journaling():
            core.journal.cover(uri)
        return False
    if record.base is None:
        assert record.identity is not None
        write_version(core, _draft(record, ()))
        return True
    with core.open_reader(record.base) as base:
        blocks = tuple(_held(core, base, record.held))
        write_version(core, _draft(dataclasses.replace(record, identity=base.manifest.identity), blocks))
    return True


def keep_turns_behind(core: StoreCore, uri: SessionUri | None, bundle_ids: Collection[str]) -> None:
    """Make versions of the turns of other sessions that stand behind bundles of this one, which are about to go. Call
    it while `committing`.

    Raises:
        StoreBusy: a version of such a session is being written, and has a smaller number than its turns would get; or
            its turns are in a journal beside the open one.
        StoreError: it could not be done, and nothing may go.
    """
    if not bases_beside(core.journal, uri).isdisjoint(bundle_ids):
        raise StoreBusy(
            "Turns stand behind what is to go, in a journal that was put back while the store was open. They become "
            "versions at its next opening: stop the daemon and start it again, then try again.",
            path=core.journal.folder_path,
        )
    for other, base in core.journal.bases().items():
        if other != uri and base in bundle_ids:
            if core.being_written(other):
                raise StoreBusy(
                    f"Turns of {other} stand behind what is to go, and a version of it is being written. Try again.",
                    session=str(other),
                )
            replay_session(core, other)


def _draft(record: JournalRecord, reused: tuple[BlockEntry, ...]) -> VersionDraft:
    assert record.identity is not None
    return VersionDraft(
        uri=record.uri,
        identity=record.identity,
        parent=record.base,
        reused=reused,
        blocks=(),
        session=record.session,
        block_tokens=record.held,
        beyond="reserve",
        whole=False,
    )


def _held(core: StoreCore, base: BundleReader, tokens: int) -> list[BlockEntry]:
    """The blocks of a version that hold its first tokens, with the state records among them that are there."""
    entries = [entry for entry in base.entries if entry.end <= tokens]
    missing = core.missing_of([entry.id for entry in entries if entry.kind == "state"])
    return [entry for entry in entries if entry.id not in missing]


def _is_covered(core: StoreCore, record: JournalRecord) -> bool:
    known, newest = record.newest or (0, None)
    versions = {row.bundle_id: row.version for row in core.index.versions(record.uri)}
    later = [bundle_id for bundle_id, version in versions.items() if version > known]
    digest = core.journal.digest_of(record.uri)
    candidates = later if newest in versions else list(versions)
    names = (_is(core, one, lambda reader: reader.manifest.session.get(COVERS) == digest) for one in candidates)
    from_it_on = candidates[next((at for at, does in enumerate(names) if does), len(candidates)) :]
    if any(_is(core, one, lambda reader: all_tokens(reader) is not None) for one in from_it_on):
        return True
    ledger = ledger_of(core, record) if later else b""
    return any(_is(core, one, lambda reader: all_tokens(reader).startswith(ledger)) for one in later)


def _is(core: StoreCore, bundle_id: str, holds: Callable[[BundleReader], bool]) -> bool:
    """Whether something holds for a version; it does not if that is damaged or gone."""
    with contextlib.suppress(Corruption), core.open_reader(bundle_id) as reader:
        return holds(reader)
    return False


def all_tokens(reader: BundleReader) -> bytes:
    """All tokens of a version, uint32 as bytes. Raises as `BundleReader.tokens`."""
    return reader.tokens() + reader.manifest.tail


def ledger_of(core: StoreCore, record: JournalRecord) -> bytes:
    """All tokens of a record, uint32 as bytes. Raises as `StoreCore.open_reader`, and `BundleReader.tokens`."""
    tail = tail_in(record.session)
    if record.base is None:
        return tail
    with core.open_reader(record.base) as base:
        spans = [entry for entry in base.entries if entry.kind == "span" and entry.start < record.held]
        tokens = b"".join(base.read_header(entry).tokens for entry in spans)
    return tokens[: TOKEN_BYTES * record.held] + tail
