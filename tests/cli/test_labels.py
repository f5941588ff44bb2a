"""`torpor stats`, `warm` and `clear`: what they ask of the daemon, and what they say."""

from __future__ import annotations

import pytest
from torpor.tests.cli.cli_rig import Torpor
from torpor.tests.socket_api.server_rig import ServerThread


@pytest.fixture
def labelled(torpor: Torpor, daemon: ServerThread) -> ServerThread:
    """Sessions a, b and c, of which the first two are nightly."""

    async def make() -> None:
        for name, labels in (("a", ["nightly"]), ("b", ["nightly", "big"]), ("c", [])):
            await daemon.service.create(session=name, labels=labels)

    daemon.do(make)
    return daemon


def test_stats_is_a_table_by_label_and_a_document(torpor: Torpor, labelled: ServerThread) -> None:
    ran = torpor("stats")
    assert ran.status == 0
    rows = [line.split() for line in ran.out.splitlines()]
    assert rows[0] == ["LABEL", "SESSIONS", "AWAKE", "TOKENS", "RESIDENT", "STORED", "HITS"]
    assert [row[:3] for row in rows[1:]] == [["big", "1", "1"], ["nightly", "2", "2"], ["all", "3", "3"]]
    one = [line.split()[:3] for line in torpor("stats", "--label", "nightly").out.splitlines()]
    assert one == [["LABEL", "SESSIONS", "AWAKE"], ["nightly", "2", "2"]], "none of all that is not of all"
    document = torpor("stats", "--label", "big", "--namespace", "default", "--json").document
    assert (document["total"]["sessions"], document["labels"][0]["label"]) == (1, "big")
    assert labelled.service.calls[-1][1] == {"label": "big", "namespace": "default"}


def test_warm_says_what_became_of_each(torpor: Torpor, labelled: ServerThread) -> None:
    ran = torpor("warm", "c", "--label", "nightly")
    assert ran.status == 0
    assert ran.out.splitlines()[1] == "torpor://default/a  awake already, 0 tokens, found 3×  nightly"
    assert len(ran.out.splitlines()) == 3
    labelled.service.left = "no_room"
    ran = torpor("warm", "c")
    assert ran.status == 3
    assert "left asleep: there is no free memory for it" in ran.out
    labelled.service.left = "corrupt_block"
    assert "left asleep: corrupt_block" in torpor("warm", "c").out
    document = torpor("warm", "a", "--json").document
    assert (document["sessions"][0]["left"], document["sessions"][0]["hits"]) == ("corrupt_block", 3)
    assert "No session has the label" in torpor("warm", "--label", "none").err
    assert torpor("warm", "nobody").status == 4


@pytest.mark.parametrize("arguments", [(), ("a@1",)])
def test_warm_needs_to_know_what(torpor: Torpor, daemon: ServerThread, arguments: tuple[str, ...]) -> None:
    assert torpor("warm", *arguments).status == 2


def test_clear_needs_yes_where_nobody_can_be_asked(torpor: Torpor, labelled: ServerThread) -> None:
    assert torpor("clear", "--label", "nightly").status == 2
    assert torpor("clear").status == 2
    ran = torpor("clear", "--label", "nightly", "--dry-run")
    assert (ran.status, "would be deleted" in ran.out) == (0, True)
    assert len(labelled.service.sessions) == 3
    ran = torpor("clear", "--label", "nightly", "--namespace", "default", "--yes")
    assert ran.out.splitlines() == ["torpor://default/a  deleted", "torpor://default/b  deleted"]
    assert "2 sessions" in ran.err
    assert list(labelled.service.sessions) == ["c"]
    assert labelled.service.calls[-1][1] == {"label": "nightly", "namespace": "default"}


def test_clear_says_what_stays(torpor: Torpor, labelled: ServerThread) -> None:
    labelled.service.fail_clear = {"b": "no_space: no room"}
    ran = torpor("clear", "--label", "nightly", "--yes")
    assert ran.status == 3
    assert "no_space: no room" in ran.err
    assert torpor("clear", "--label", "big", "--yes", "--json").document["failed"] == {
        "torpor://default/b": "no_space: no room"
    }
    assert torpor("clear", "--label", "big", "--yes").status == 1


@pytest.mark.parametrize("verb", ["append", "generate", "chat"])
def test_a_session_that_a_command_begins_has_the_labels_that_it_gives(
    torpor: Torpor, daemon: ServerThread, verb: str
) -> None:
    assert torpor(verb, "new", "some text", "--label", "x", "--label", "y").status == 0
    assert torpor("ls", "--json").document["sessions"][0]["labels"] == ["x", "y"]
    assert torpor(verb, "new", "some text", "--label", "y").status == 0, "it has that"
    ran = torpor(verb, "new", "some text", "--label", "z")
    assert (ran.status, "does not exist yet" in " ".join(ran.err.split())) == (2, True)
    assert torpor(verb, "new", "some text").status == 0
    assert torpor("generate", "new", "--label", "z").status == 2
