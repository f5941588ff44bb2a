"""Mutants of the journal: its order, the checks that tell which record counts, and the daemon's part.

Most of the checks are of no use in a power cut. Each of those names the test that must find it. Must not import torpor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from torpor.tests.memvid.faults.mutant import Edit, Mutant

_FORMAT: Final = "tests/memvid/format/test_journal.py::"
_FOLDER: Final = "tests/memvid/folder/test_journal.py::"
_REPLAYING: Final = "tests/memvid/recovery/test_replaying.py::"
_DAEMON: Final = "tests/daemon/versions/test_journal.py::"
_HEALING: Final = "tests/daemon/upkeep/test_healing.py::"

_TURN_JOURNAL: Final = "daemon.versions.journal"

_ORDER: Final = (
    Mutant(
        "turns are acknowledged before they are flushed, by the next write",
        (Edit("folder.journal", "Journal._write", "durable.sync_file(", before="durable.write_at(self._fd, sel"),),
    ),
    Mutant(
        "nothing flushes the name of the journal's folder",
        (
            Edit(
                "folder.journal",
                "Journal._open_folder",
                "durable.make_folder(",
                "os.mkdir(JOURNAL, durable.FOLDER_MODE, dir_fd=self._folder.root_fd)",
            ),
        ),
    ),
    Mutant(
        "nothing flushes the name of a new journal",
        (
            Edit(
                "folder.journal",
                "Journal._write_anew",
                "temp.publish(",
                "temp.publish(self._name, replacing=True, flushing=False)",
            ),
        ),
    ),
    Mutant(
        "a sleep does not tell the journal",  # it names the record that it covers, so no crash loses anything
        (Edit("sleeping", "write_version", "core.journal.cover("),),
        test=f"{_REPLAYING}test_a_sleep_takes_its_turns_out_of_the_journal_of_a_store_that_stays_open",
    ),
    Mutant(
        "a delete does not tell the journal",
        (Edit("deletion", "delete_versions", "core.journal.drop(uri)"),),
    ),
    Mutant("a forget does not tell the journal", (Edit("forgetting", "_Forget._erase_turns", "journal.erase("),)),
    Mutant(
        "a record that counts no more is void in memory only",
        (Edit("folder.journal", "Journal._write", "VOID, self.path"),),
    ),
)


def _by_test(found_by: Mapping[str, Mapping[str, Edit | tuple[Edit, ...]]]) -> tuple[Mutant, ...]:
    """The mutants that each test must find, by their names."""
    return tuple(
        Mutant(name, edits if isinstance(edits, tuple) else (edits,), test=test)
        for test, mutants in found_by.items()
        for name, edits in mutants.items()
    )


_WHOLE: Final = "digest = digest_of(self.store, self.nonce, _PLACE.pack(place), payload)"

_RECORDS: Final = _by_test(
    {
        f"{_FORMAT}test_every_flipped_bit_is_told_and_costs_the_record_in_which_it_lies_at_most": {
            "a damaged record counts": Edit("format.journal", "Key.record_at", "if digest !="),
            "a record whose mark is damaged is not told": Edit(
                "format.journal", "Key.record_at", "is_spoilt = mark not in", "is_spoilt = any(padding)"
            ),
        },
        f"{_FORMAT}test_records_that_changed_places_do_not_count": {
            "a record counts in any place": (
                Edit("format.journal", "Key.record", "digest =", _WHOLE.replace("place)", "0)")),
                Edit(
                    "format.journal",
                    "Key.record_at",
                    "if digest !=",
                    "if digest != digest_of(self.store, nonce, _PLACE.pack(0), payload): return None",
                ),
            ),
        },
        f"{_FORMAT}test_a_record_of_an_earlier_journal_or_of_another_store_does_not_count": {
            "a record of an earlier journal counts": Edit(
                "format.journal",
                "Key.payload_bytes_at",
                "self.nonce not in",
                "if length > MAX_JOURNAL_RECORD_BYTES: return None",
            ),
            "a record of another store counts": (
                Edit("format.journal", "Key.record", "digest =", _WHOLE.replace("self.store", "b''")),
                Edit(
                    "format.journal",
                    "Key.record_at",
                    "if digest !=",
                    "if digest != digest_of(b'', nonce, _PLACE.pack(place), payload): return None",
                ),
            ),
        },
        f"{_FORMAT}test_a_whole_journal_of_another_store_or_version_is_not_read": {
            "the journal of another store is read": Edit("format.journal", "Key.read", "if store != ours"),
        },
        f"{_FOLDER}test_a_foreign_file_is_put_aside_and_never_in_the_place_of_an_earlier_one": {
            "the journal of another store is written over": Edit("folder.journal", "Journal.load", "move_aside("),
        },
        f"{_FOLDER}test_a_flipped_bit_in_any_byte_of_a_journal_costs_one_record_at_most_and_is_told": {
            "damage in the zeros behind a record is not told": Edit(
                "format.journal", "Key.record_at", "is_spoilt = mark not in", "is_spoilt = mark not in (_TURN, VOID)"
            ),
            "a damaged header is not told": Edit("folder.journal", "Journal._scan", "its header is damaged"),
            "bytes that hold no record are not told": Edit(
                "folder.journal", "Journal._scan", "self._find(f'{self.path}: {describe_hole(found)}')"
            ),
        },
        f"{_FORMAT}test_a_mark_with_some_flipped_bits_is_still_known": {
            "a mark with one damaged bit means the other one": Edit(
                "format.journal", "Key.record_at", "is_void = _distance", "is_void = mark != _TURN"
            ),
        },
        f"{_FORMAT}test_every_cut_is_told_and_costs_what_stood_behind_it": {
            "a journal that was cut off behind a record is not told": Edit(
                "format.journal", "scan", "yield Found(place, place)"
            ),
        },
        f"{_FOLDER}test_the_last_record_of_a_session_counts": {
            "the first record of a session counts": Edit(
                "folder.journal",
                "Journal._scan",
                "if not found.is_void",
                "if older is None and not found.is_void: self._live[record.uri] = "
                "_Place(found.place, len(found.payload), digest_of(found.payload), record.base, older)\n"
                "elif older is not None: self._live[record.uri] = older",
            ),
        },
        f"{_FOLDER}test_each_record_of_a_session_is_void_once_it_is_covered": {
            "only the last record of a session becomes void": Edit(
                "folder.journal", "_Place.starts", "place = place.older", "place = None"
            ),
        },
        f"{_FOLDER}test_earlier_records_that_a_crash_left_are_void_after_the_next_opening": {
            "a void record leaves the ones before it": Edit(
                "folder.journal", "Journal._scan", "self._void.append(older)"
            ),
        },
        f"{_FOLDER}test_after_damage_the_next_record_is_written_into_a_new_file": {
            "a damaged journal is written on": Edit("folder.journal", "Journal._find", "self._is_spoilt = True"),
        },
        f"{_FOLDER}test_a_file_that_has_left_its_place_is_written_anew_before_the_next_record": {
            "a journal that has left its place is written on": Edit(
                "folder.journal", "Journal._is_in_place", "return is_named", "return True"
            ),
        },
        f"{_FOLDER}test_a_whole_record_that_is_refused_is_taken_back_durably": {
            "a refused record stays in the file": Edit("folder.journal", "Journal._write", "self._take_back("),
            "a refused record is taken back without a flush": Edit(
                "folder.journal", "Journal._take_back", "durable.sync_file("
            ),
        },
        f"{_FOLDER}test_a_session_whose_turns_wait_takes_no_more": {
            "a session whose turns wait goes on without them": Edit(
                "folder.journal", "Journal.append", "self.require_settled("
            ),
        },
    }
)

_REPLAYED: Final = _by_test(
    {
        f"{_REPLAYING}test_a_journal_of_before_a_version_that_knew_it_is_replayed_where_that_does_not_cover_it": {
            "a version that names other turns covers these": Edit(
                "replaying",
                "_is_covered",
                "session.get(COVERS)",
                "names = (_is(core, one, lambda reader: COVERS in reader.manifest.session) for one in candidates)",
            ),
            "a version that names the turns does not cover them": Edit(
                "replaying", "_is_covered", "return True", "pass"
            ),
            "a version whose tokens are lost covers the turns that it names": Edit(
                "replaying", "_is_covered", "is not None", "if from_it_on: return True"
            ),
            "a damaged version covers the turns": Edit("replaying", "_is", "return False", "return True"),
        },
        f"{_REPLAYING}test_a_version_that_begins_with_the_turns_covers_them_though_it_does_not_name_them": {
            "a version that begins with the turns does not cover them": Edit(
                "replaying", "_is_covered", "startswith(ledger)", "return False"
            ),
            "any later version covers the turns": Edit(
                "replaying", "_is_covered", "startswith(ledger)", "return bool(later)"
            ),
        },
        f"{_REPLAYING}test_a_session_that_was_taken_back_is_so_though_its_newest_version_begins_with_its_turns": {
            "a version from before the turns covers them": Edit(
                "replaying", "_is_covered", "known, newest =", "known, newest = 0, None"
            ),
        },
        f"{_REPLAYING}test_turns_are_covered_by_a_version_that_has_the_number_of_one_that_was_deleted": {
            "only a version with a later number covers the turns that it names": Edit(
                "replaying", "_is_covered", "candidates = later", "candidates = later"
            ),
        },
        f"{_REPLAYING}test_turns_that_a_version_covers_do_not_come_back_once_it_is_gone": {
            "a version goes before the turns that it covers are void": Edit(
                "deletion", "_drop", "core.journal.settle("
            ),
        },
        f"{_REPLAYING}test_a_version_that_is_made_while_turns_wait_does_not_take_their_place": {
            "a version takes the place of turns that wait": Edit(
                "folder.journal",
                "Journal.cover",
                "if uri not in",
                "if self._let_go(uri) is not None: self.settle(removing=False)",
            ),
        },
        f"{_REPLAYING}test_turns_of_another_session_outlive_the_bundle_that_they_stand_behind": {
            "turns go with the bundle of another session": Edit("replaying", "keep_turns_behind", "replay_session("),
        },
        f"{_REPLAYING}test_turns_that_find_no_room_for_their_version_wait_and_their_session_is_not_used": {
            "turns that become no version now are given up": Edit(
                "replaying", "_replay_journal", "journal.waiting[uri] = error.message", "journal.cover(uri)"
            ),
        },
        "tests/memvid/test_delete.py::test_no_turn_is_acknowledged_behind_a_version_that_goes_meanwhile": {
            "turns stand behind a version that goes meanwhile": Edit(
                "folder.journal", "Journal.append", "if record.base is not None"
            ),
        },
        f"{_HEALING}test_turns_of_a_session_that_went_back_before_its_healed_version_survive_a_kill": {
            "a heal covers the turns of a session that went back before it": Edit(
                "sleeping", "write_version", "if request.covers", "core.journal.cover(request.uri)"
            ),
        },
    }
)

_ANSWERS: Final = _by_test(
    {
        f"{_DAEMON}test_an_answer_waits_for_its_flush": {
            "an answer is given before the flush": Edit(_TURN_JOURNAL, "TurnJournal._acknowledge", "await written"),
            "an answer is given once its flush has begun": Edit(
                _TURN_JOURNAL,
                "TurnJournal._write",
                "await self._versions.threads.on_journal(acknowledge)",
                "asyncio.ensure_future(self._versions.threads.on_journal(acknowledge))\n"
                "records = [self._record_of(each.session, relying=relying) for each in batch]",
            ),
        },
        f"{_DAEMON}test_a_turn_that_is_cancelled_while_it_is_flushed_is_answered": {
            "an answer that nobody waits for is not flushed": Edit(
                _TURN_JOURNAL, "TurnJournal.acknowledge", "await in_any_case", "await self._acknowledge(session)"
            ),
        },
        f"{_DAEMON}test_a_chat_goes_on_with_its_messages_and_sampling_after_a_kill": {
            "an answer is not flushed at all": Edit(
                "daemon.parts.sessions", "SessionParts.acknowledge", "await self._store.journal.acknowledge("
            ),
        },
        f"{_DAEMON}test_what_stays_of_a_cancelled_answer_is_there_after_a_kill": {
            "what stays of a cancelled answer is not flushed": Edit(
                "daemon.parts.sessions", "SessionParts.woken", "await self.acknowledge(uri, unnamed"
            ),
        },
        f"{_DAEMON}test_turns_that_wait_together_are_flushed_once": {
            "records that come during a flush are left to the next answer": Edit(
                _TURN_JOURNAL,
                "TurnJournal._flush",
                "while self._waiting",
                "batch, self._waiting = self._waiting, []\nawait self._write(batch)\n"
                "for left in self._waiting: left.written.set_result(None)",
            ),
        },
        f"{_DAEMON}test_a_turn_that_cannot_be_written_refuses_no_other": {
            "a turn that cannot be written refuses all that wait with it": Edit(
                _TURN_JOURNAL, "TurnJournal._write", "if len(batch) > 1"
            ),
            "a refused turn is told as durable": Edit(
                _TURN_JOURNAL,
                "TurnJournal._write",
                "each.written.set_exception(error)",
                "each.written.set_result(None)",
            ),
        },
        f"{_DAEMON}test_a_full_disk_refuses_a_turn_before_it_changes_the_session": {
            "room for a turn is not taken before it begins": Edit(
                "daemon.chat.prompt_io", "Exchanges._room_for", "make_room("
            ),
        },
        f"{_DAEMON}test_room_that_a_failed_request_leaves_is_given_back": {
            "the room of a request that failed is kept": Edit(
                "daemon.residency.residency", "Residency.turn", "self.journal.give_back_room(uri)"
            ),
        },
        f"{_DAEMON}test_a_session_that_lost_its_state_is_there_with_its_turns_whatever_is_asked": {
            "a session that lost its state is gone if it never slept": Edit(
                "daemon.residency.residency", "Residency.turn", "await in_any_case("
            ),
        },
        f"{_DAEMON}test_turns_of_a_lost_state_that_became_no_version_at_once_become_one_at_the_next_use": {
            "a fork of a session that lost its state lacks its turns": Edit(
                "daemon.verbs.forking", "_order_of_fork", "await parts.store.journal.replay("
            ),
            "a sleep of a session that lost its state lacks its turns": Edit(
                "daemon.verbs.waking", "_keep_in_turn", "await parts.store.journal.replay("
            ),
            "a wake of a session that lost its state lacks its turns": Edit(
                "daemon.residency.residency", "Residency.bring_back", "await self.journal.replay("
            ),
            "a session that lost its state is warmed without its turns": Edit(
                "daemon.residency.residency", "Residency.warm", "await self.journal.replay("
            ),
        },
        f"{_DAEMON}test_a_request_that_may_make_a_session_goes_on_with_the_turns_of_one_that_lost_its_state": {
            "a session that lost its state is begun anew by the next request": Edit(
                "daemon.residency.residency", "Residency.woken", "await self.journal.replay("
            ),
        },
    }
)

JOURNAL: Final = (*_ORDER, *_RECORDS, *_REPLAYED, *_ANSWERS)
