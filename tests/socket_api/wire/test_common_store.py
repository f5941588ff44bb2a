"""What is not told to who may know of one namespace alone."""

from __future__ import annotations

from torpor.socket_api.wire.common_store import without_others

ORIGIN = {"session": "torpor://other/a", "version": 3, "bundle_id": "ab", "tokens": 20}
DETAIL = {
    "info": {"session": "torpor://team/b", "token_count": 30, "stored_bytes": 900},
    "provenance": {"forked_from": ORIGIN, "folded_from": {**ORIGIN, "session": "torpor://team/c"}},
    "said": ["torpor://other/a", "torpor://team/c", "plain"],
}


def test_what_the_store_has_in_common_and_sessions_of_other_namespaces_are_left_out() -> None:
    """Threat 61."""
    assert without_others(DETAIL, "team") == {
        "info": {"session": "torpor://team/b", "token_count": 30},
        "provenance": {"forked_from": None, "folded_from": {**ORIGIN, "session": "torpor://team/c"}},
        "said": [None, "torpor://team/c", "plain"],
    }


def test_a_manifest_and_a_parent_that_may_be_of_another_namespace_are_left_out() -> None:
    told = {"session": "torpor://team/b", "parent": "ab", "manifest": '{"forked_from": "torpor://other/a"}'}
    assert without_others({**told, "versions": [told]}, "team") == {
        "session": "torpor://team/b",
        "versions": [{"session": "torpor://team/b"}],
    }
    entry = {"session": "torpor://team/b", "parent": "ab", "way": "went_on"}
    branch = {"session": "torpor://team/b", "branch": 3, "parent": 2}
    assert without_others([branch], "team") == [branch]
    assert without_others(entry, "team") == entry, "a history leaves out what is not told itself"


def test_the_line_of_a_fork_is_left_out_for_it_ends_with_the_id_of_another_session() -> None:
    told = {"info": {"session": "torpor://team/b"}, "lineage": ["cd", "ab"]}
    assert without_others(told, "team") == {"info": {"session": "torpor://team/b"}}


def test_a_text_is_told_whatever_it_begins_with() -> None:
    passage = {"role": "user", "text": "torpor://other/a is the name of a session"}
    assert without_others(passage, "team") == passage


def test_a_namespace_that_begins_as_another_one_is_not_that_one() -> None:
    assert without_others(["torpor://teams/a"], "team") == [None]


def test_who_may_know_of_all_is_told_of_their_sessions() -> None:
    assert without_others(DETAIL, None)["provenance"] == DETAIL["provenance"]
