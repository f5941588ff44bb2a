"""`torpor inspect --html`: one file of a store or a daemon, without text unless it is wanted, whole or not at all."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torpor.cli.reach import page_answers
from torpor.daemon.api.causes import REMEDIES, Reuse
from torpor.memvid.store import Store
from torpor.memvid.uri import SessionUri
from torpor.tests.cli.cli_rig import MadeStore, Torpor
from torpor.tests.memvid import store_making as making
from torpor.tests.socket_api.server_rig import ServerThread


def kept_in(path: Path) -> Any:
    found = re.search(r'id="kept">(.*?)</script>', path.read_text(), re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_a_file_of_a_store_has_each_view_s_answers_by_the_paths_that_the_page_asks_for(
    made_store: MadeStore, tmp_path: Path
) -> None:
    ran = made_store("inspect", "--html", tmp_path / "a.html")
    assert ran.status == 0, ran.err
    assert str(tmp_path / "a.html") in ran.out
    told = kept_in(tmp_path / "a.html")
    for sentence in told["left_out"]:
        assert sentence in " ".join(ran.err.split())
    answers = told["answers"]
    one = "/v1/sessions/default%2F"
    assert answers.keys() == {
        *("/v1/sessions", "/v1/usage", "/v1/history?limit=500"),
        *(f"/v1/why?by={by}" for by in ("cause", "session", "client", "hour")),
        *(f"{one}{name}{more}" for name in ("agent", "other") for more in ("", "/why")),
        *(f"{one}agent/blocks", f"{one}other/blocks"),
    }
    assert {each["state"] for each in answers["/v1/sessions"]["sessions"]} == {"stored"}
    assert [each["version"] for each in answers[f"{one}agent"]["versions"]] == [1, 2]
    usage = answers["/v1/usage"]
    assert usage["file_bytes"] == usage["stored_bytes"] + usage["rest_bytes"]
    assert [each["start"] for each in answers[f"{one}agent/blocks"]["blocks"] if each["tokens"]] == [0, 256, 512]
    assert len(answers["/v1/history?limit=500"]["entries"]) == 3


def test_with_text_each_stretch_of_the_ribbon_has_its_contents(made_store: MadeStore, tmp_path: Path) -> None:
    assert made_store("inspect", "--html", tmp_path / "a.html", "--with-text").status == 0
    told = kept_in(tmp_path / "a.html")
    assert told["with_text"]
    paths = [path for path in told["answers"] if "/contents?" in path and "agent" in path]
    spans = ("start=0&end=256", "start=256&end=512", "start=512&end=600")
    assert paths == [f"/v1/sessions/default%2Fagent/contents?{span}" for span in spans]


def test_a_file_of_a_daemon_has_no_word_of_a_text_and_what_a_daemon_alone_knows(
    torpor: Torpor, daemon: ServerThread, made_store: MadeStore, tmp_path: Path
) -> None:
    daemon.service.store = str(made_store.path)
    torpor("append", "agent", "a secret")
    daemon.service.also("show", tail_text="a secret")
    said = Reuse(
        "chat", 1, "diverged", expected_text="a secret", found_text="a secret", cause="clock", remedy="a secret"
    )
    daemon.service.also("why", requests=(replace(said, volatile=("a secret",)),))
    assert torpor("inspect", "--html", tmp_path / "a.html").status == 0
    told = kept_in(tmp_path / "a.html")["answers"]
    assert told["/v1/sessions/default%2Fagent"]["tail_text"] == ""
    (request,) = told["/v1/sessions/default%2Fagent/why"]["requests"]
    assert (request["cause"], request["remedy"], request["expected_text"]) == ("clock", REMEDIES["clock"], None)
    assert told["/v1/models"]["data"][0]["context_length"] == 8192
    assert told["/v1/status"]["store"] == str(made_store.path)
    assert "a secret" not in (tmp_path / "a.html").read_text()
    assert torpor("inspect", "--html", tmp_path / "b.html", "--with-text").status == 0
    assert "a secret" in (tmp_path / "b.html").read_text()


def test_of_a_large_store_a_file_is_bounded_and_says_what_it_leaves_out(
    made_store: MadeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def left_out(**bounds: int) -> str:
        for name, value in bounds.items():
            monkeypatch.setattr(page_answers, name, value)
        ran = made_store("inspect", "--html", tmp_path / "a.html", "--overwrite", "--json")
        assert ran.status == 0, ran.err
        assert ran.document["left_out"] == kept_in(tmp_path / "a.html")["left_out"]
        return " ".join(ran.document["left_out"])

    assert "tells" not in left_out()
    assert "It tells 1 session in full" in left_out(MOST_BYTES=1)
    assert "/v1/sessions/default%2Fother" not in kept_in(tmp_path / "a.html")["answers"], "the smaller one"
    assert "It tells 1 session in full" in left_out(MOST_BYTES=1 << 20, MOST_TOLD=1)
    assert "It lists the 1 sessions with the most tokens, of 2" in left_out(MOST_LISTED=1)
    (listed,) = kept_in(tmp_path / "a.html")["answers"]["/v1/sessions"]["sessions"]
    assert listed["name"] == "agent"


def test_of_a_damaged_session_is_kept_what_is_known_and_the_others_are_told(
    made_store: MadeStore, tmp_path: Path
) -> None:
    made_store.cut(1)
    assert made_store("inspect", "--html", tmp_path / "a.html").status == 0
    answers = kept_in(tmp_path / "a.html")["answers"]
    assert answers["/v1/sessions/default%2Fagent"]["damaged"]
    assert [each["code"] for each in answers["/v1/sessions/default%2Fagent/blocks"]["problems"]] == ["truncated"]
    assert answers["/v1/sessions/default%2Fother"]["info"]["token_count"]


def test_a_namespace_without_sessions_gives_no_file(made_store: MadeStore, tmp_path: Path) -> None:
    ran = made_store("inspect", "--html", tmp_path / "a.html", "--namespace", "ghost")
    assert (ran.status, "No sessions in namespace ghost." in ran.err) == (4, True)
    assert not (tmp_path / "a.html").exists()


def test_one_namespace_s_file_tells_of_no_other(made_store: MadeStore, tmp_path: Path) -> None:
    with Store.open(made_store.path, writable=True) as store:
        making.sleep(store, 20, uri=SessionUri("team", "own"))
    assert made_store("inspect", "--html", tmp_path / "a.html", "--namespace", "team").status == 0
    answers = kept_in(tmp_path / "a.html")["answers"]
    assert [each["name"] for each in answers["/v1/sessions"]["sessions"]] == ["own"]
    assert "/v1/usage" not in answers
    assert "default" not in json.dumps(answers)


def test_what_cannot_be_written_is_refused_and_nothing_is_left(made_store: MadeStore, tmp_path: Path) -> None:
    there = tmp_path / "there.html"
    there.write_text("mine")
    for target, code in (
        (there, "target_exists"),
        (tmp_path / "no" / "a.html", "no_target_folder"),
        (made_store.path / "a.html", "target_in_store"),
        ("-", "invalid_usage"),
    ):
        ran = made_store("inspect", "--html", target, "--json")
        assert (ran.status != 0, ran.error["error"]["code"]) == (True, code), target
    assert there.read_text() == "mine"
    assert made_store("inspect", "--html", there, "--overwrite").status == 0
    assert there.read_text() != "mine"
    assert [path.name for path in tmp_path.glob("*.html*")] == ["there.html"]


def test_options_of_the_file_go_with_it_alone(torpor: Torpor, made_store: MadeStore) -> None:
    for options in (("--with-text",), ("--overwrite",), ("--store", made_store.path)):
        assert torpor("inspect", *options, "--json").error["error"]["code"] == "invalid_usage"
