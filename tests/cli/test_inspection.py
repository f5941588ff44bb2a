"""`ls`, `show` and `verify` on a store's files, with no daemon and beside one, sound and damaged."""

from __future__ import annotations

import io
import re
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from torpor.cli.commands.show import render_detail
from torpor.cli.commands.verify import SESSIONS_SHOWN
from torpor.cli.serve.doctor import _describe_config, _describe_disk, _describe_queue, _describe_remote
from torpor.cli.view.formatting import format_time
from torpor.daemon.api.session import Look, SessionDetail
from torpor.errors import TorporError
from torpor.memvid.answers import Finding
from torpor.memvid.errors import Corruption
from torpor.memvid.index.index import INDEX_FILE
from torpor.memvid.store import Store, VersionDraft
from torpor.memvid.uri import SessionUri, parse_reference
from torpor.socket_api.client.plain import record_of
from torpor.tests.cli.cli_rig import MadeStore, Torpor, flip, pretend_terminal, unstyled
from torpor.tests.daemon.damage_rig import damage
from torpor.tests.memvid import store_making as making
from torpor.tests.socket_api.server_rig import ServerThread

WAKE_VERSION_1 = "`torpor wake torpor://default/agent@1` goes on from version 1, which is whole."
AGENT = "torpor://default/agent"


@pytest.mark.one_in(3)
@pytest.mark.usefixtures("examined_once")
def test_looking_tells_of_a_daemon_that_ended_without_a_stop(
    torpor: Torpor, made_store: MadeStore, short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORPOR_STORE", str(made_store.path))
    monkeypatch.setenv("XDG_STATE_HOME", str(short_path))
    path = short_path / "run" / "t.sock"
    assert torpor("ls", "--json").document["problems"] == []
    path.parent.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as killed:  # a daemon that is killed leaves its socket, too
        killed.bind(str(path))
    for command in (("ls",), ("show", "agent")):
        ran = torpor(*command)
        assert (ran.status, "default/agent" in ran.out) == (0, True)
        assert f"daemon_unreachable  {path}" in ran.err
        assert "ended without a stop. The next start brings each session back" in ran.err
        assert "Start it again with `torpor ensure`." in ran.err
        assert "daemon.log" not in ran.err, "it has none"
    (short_path / "torpor").mkdir()
    (short_path / "torpor" / "daemon.log").touch()
    (told,) = torpor("ls", "--json").document["problems"]
    assert torpor("doctor", "--json").document["daemon"]["problem"] == told["message"]
    assert told["message"].endswith(f"may stand in {short_path}/torpor/daemon.log, or in the file that --log named.")
    assert made_store("ls", "--json").document["problems"] == []


@pytest.mark.parametrize("beside_a_daemon", [False, True])
def test_ls_tells_of_a_manifest_that_may_be_of_any_session(
    torpor: Torpor, made_store: MadeStore, daemon: ServerThread, beside_a_daemon: bool
) -> None:
    flip(made_store.manifests[1], 200)
    (made_store.path / INDEX_FILE).unlink()
    (told,) = made_store("ls", "--json").document["problems"]
    assert (told["code"], told["path"]) == ("bundle_mismatch", str(made_store.manifests[1]))
    assert "it may be the newest of a session" in told["message"]
    daemon.service.store = str(made_store.path)
    daemon.service.also("status", unreadable=(Finding(**told),))
    ask = torpor if beside_a_daemon else made_store
    assert ask("ls", "--json").document["problems"] == [told]
    assert "it may be the newest of a session" in ask("ls").err


@pytest.mark.parametrize(
    ("kept", "shown"),
    [
        ({"device": "metal", "mlx": "0.32.4", "note": "x"}, {"device": "metal", "mlx": "0.32.4", "note": "x"}),
        ({"device": 5, "mlx": "x" * 2000, "blas": "b"}, {"blas": "b"}),
        ({f"k{number}": "v" for number in range(100)}, {}),
        ("text", {}),
        (None, {}),
    ],
)
def test_show_tells_what_computed_a_session_as_far_as_that_is_short_text(
    torpor: Torpor, short_path: Path, kept: object, shown: dict[str, str]
) -> None:
    with Store.open(short_path / "store", writable=True) as store:
        store.write_bundle(
            VersionDraft(
                uri=SessionUri("default", "agent"),
                identity=making.IDENTITY,
                parent=None,
                reused=(),
                blocks=making.drafts(5),
                session={"model": "m", "backend": kept},
                block_tokens=5,
            )
        )
    ran = torpor("show", "agent", "--store", short_path / "store", "--json")
    assert ran.document["backend"] == shown
    text = torpor("show", "agent", "--store", short_path / "store").out
    assert ("\nbackend\n" in text) == bool(shown)
    assert all(value in text for value in shown.values())


def test_a_narrow_terminal_breaks_no_word_of_show(made_store: MadeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    made_store("tag", "agent@1", "before-refactor")
    wide = made_store("show", "agent", "--json").document
    pretend_terminal(monkeypatch, 80)
    shown = unstyled(made_store("show", "agent").out)
    rows = [line for line in shown.splitlines() if line.startswith(("  1 ", "  2 "))]
    for row, version in zip(rows, wide["versions"], strict=True):
        assert version["bundle_id"][:12] in row
        assert re.search(r" \d{4}-\d\d-\d\d \d\d:\d\d", row)
    assert "before-refactor" in rows[0]
    assert "  VERSION  BUNDLE" in shown
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize("columns", [50, 80, 110])
def test_a_terminal_of_few_columns_breaks_no_figure_and_no_header_of_ls(
    made_store: MadeStore, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    pretend_terminal(monkeypatch, columns)
    header, *rows = unstyled(made_store("ls").out).splitlines()
    names = ["SESSION", "STATE", "TOKENS", "VERSION", "WRITTEN", "RESIDENT", "MODEL", "BUNDLE", "LAST VERSION"]
    names = names[: {50: 5, 80: 7}.get(columns, 9)]
    assert re.split(" {2,}", header.strip())[: len(names)] == names
    assert any(re.search(r"default/agent +stored +[\d, ]+ [\d.]+ KiB", row) for row in rows)
    assert max(map(len, (header, *rows))) <= columns


def test_verify_finds_a_flipped_bit_and_ends_with_status_6(made_store: MadeStore) -> None:
    """GM4: one flipped bit in a block."""
    damaged = made_store.flip(0, 2)
    ran = made_store("verify", "--deep")
    assert ran.status == 6
    assert "damaged" in ran.out
    as_json = made_store("verify", "--deep", "--json")
    assert as_json.status == 6
    assert as_json.document["ok"] is False
    assert damaged.name in as_json.document["findings"][0]["path"]
    assert as_json.document["findings"][0]["code"]


def test_versions_that_are_alike_are_told_in_one_line(made_store: MadeStore) -> None:
    with Store.open(made_store.path, writable=True) as store:
        for length in range(601, 609):
            making.sleep(store, length)
    made_store.manifests[0].unlink()
    made_store.manifests[1].unlink()
    text = made_store("verify", "agent").out
    assert "  versions 1 and 2: manifest missing\n  8 versions, 3 to 10: whole\n" in text


def test_a_stripped_version_that_is_damaged_can_be_computed_again_up_to_there(made_store: MadeStore) -> None:
    assert made_store("strip", "agent@2").status == 0
    damage(made_store.path, "agent", span=1, head=True)
    way = "`torpor wake torpor://default/agent@2 --at 256` computes its tokens up to there again, if not an earlier"
    report = made_store("verify", "agent", "--deep", "--json").document
    assert [made_store.advised(way) in each["message"] for each in report["findings"] if each["version"] == 2] == [True]
    (session,) = report["sessions"]
    assert session["goes_on"].startswith(made_store.advised(way))
    assert "no version" not in session["goes_on"]


def test_many_damaged_sessions_are_cut_for_people_and_not_in_json(made_store: MadeStore) -> None:
    with Store.open(made_store.path, writable=True) as store:
        for number in range(SESSIONS_SHOWN):
            with store.open_session(SessionUri("default", "agent"), 1) as reader:
                store.write_bundle(
                    VersionDraft(
                        uri=SessionUri("default", f"fork-{number}"),
                        identity=reader.manifest.identity,
                        parent=reader.bundle_id,
                        reused=[entry for entry in reader.entries if entry.kind == "span" and entry.token_count == 256],
                        blocks=(),
                        session={},
                        block_tokens=256,
                    )
                )
    made_store.packs[0].unlink()
    assert len(made_store("verify", "--json").document["sessions"]) == SESSIONS_SHOWN + 1
    text = made_store("verify").out
    assert text.count("put back") == SESSIONS_SHOWN
    assert "1 more session (--json has them)" in text


def test_show_tells_facts_of_the_version_that_it_shows_and_which_is_the_newest(
    torpor: Torpor, made_store: MadeStore
) -> None:
    at = ("agent@1", "--store", made_store.path)
    earlier, newest = torpor("show", *at, "--json").document["versions"]
    lines = torpor("show", *at).out.splitlines()
    assert f"version\t1; the newest is version 2, with {newest['token_count']} tokens" in lines
    assert "version\t2" in made_store("show", "agent").out.splitlines()
    detail = record_of(SessionDetail, torpor("show", *at, "--json").document)
    looked = replace(
        detail.info, look=Look(1, 3, 2, newest["token_count"]), token_count=3, slept_ns=newest["created_ns"] + 10**15
    )
    drawn = Console(file=io.StringIO())
    drawn.print(*render_detail(replace(detail, info=looked), 120), sep="\n")
    told = drawn.file.getvalue().splitlines()
    assert f"made\t{format_time(earlier['created_ns'])}" in told
    assert "state\tstored, a look at token 3" in told


def refuse_wakes(torpor: Torpor, made_store: MadeStore, daemon: ServerThread, fault: TorporError) -> None:
    """Let the daemon have the session asleep in this store, and refuse its wake so."""
    torpor("append", "agent", "one")
    torpor("sleep", "agent")
    daemon.service.store = str(made_store.path)
    daemon.service.fault = fault


@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_who_looks_and_who_wakes_are_advised_alike(
    torpor: Torpor, made_store: MadeStore, daemon: ServerThread, damage: str
) -> None:
    damaged = made_store.manifests[1]
    if damage == "missing":
        damaged.unlink()
    else:
        made_store.cut(1)
    with Store.open(made_store.path, writable=False) as store, pytest.raises(Corruption) as raised:
        store.open_session(parse_reference("agent"))
    refuse_wakes(torpor, made_store, daemon, raised.value)
    (session,) = torpor("verify", "agent", "--json").document["sessions"]
    wrong, goes_on = raised.value.message, session["goes_on"]
    assert torpor("wake", "agent", "--json").error["error"]["message"] == f"{wrong} {goes_on}"
    ran = made_store("show", "agent")
    assert ran.status == 6
    assert made_store.advised(f"{wrong} {goes_on}") in " ".join(ran.err.split())
    assert made_store("show", "agent", "--json").document["problems"][0]["message"] == made_store.advised(wrong)


def test_what_an_error_says_of_going_on_is_not_said_twice(made_store: MadeStore, tmp_path: Path) -> None:
    made_store.packs[1].unlink()
    ran = made_store("export", "agent", tmp_path / "out.mvb")
    assert (ran.status, ran.err.count("--at 256"), ran.err.count(made_store.advised(WAKE_VERSION_1))) == (6, 1, 1)


def test_doctor_says_who_waits_and_nothing_of_a_queue_in_which_nobody_does() -> None:
    assert _describe_queue({"waiting": 0, "background": 0, "limit": 512}) == ""
    assert _describe_queue({"waiting": 1, "background": 0, "limit": 512}) == "; 1 request waiting (512 may)"
    told = _describe_queue({"waiting": 1200, "background": 3, "limit": 2000})
    assert told == "; 1,200 requests waiting, 3 of them in the background (2,000 may)"


def test_doctor_tells_budgets_of_the_store_that_it_counts_alone() -> None:
    disk = {"store_budget_bytes": 20 << 30, "held_bytes": 3 << 30}
    daemon = {"store": "/a/store", "disk": disk}
    told = "; the store may hold 20.0 GiB, its manifests and packs hold 3.00 GiB"
    assert _describe_disk(daemon, {"path": "/a/b/../store"}) == told
    assert _describe_disk(daemon, {"path": "/b"}) == "; it serves another store, /a/store"


def test_doctor_tells_what_the_day_has_used_of_the_remote_and_what_waits() -> None:
    remote = {"url": "s3://b/p", "bytes_sent": 3 << 20, "requests": 1200, "dollars": 0.0123, "daily_budget": None}
    remote |= {"problem": None, "sealed": False}
    told = "; remote s3://b/p: 3.00 MiB, 1,200 requests, about $0.01 today"
    assert _describe_remote({**remote, "waiting": 0}) == told
    bounded = {**remote, "daily_budget": "1.00 GiB, $2.00", "waiting": 2}
    assert _describe_remote(bounded) == f"{told} of 1.00 GiB, $2.00; 2 sessions to be sent tomorrow"
    failed = {**remote, "waiting": 0, "problem": "Look there."}
    assert _describe_remote(failed) == f"{told}; its last request failed: Look there."
    assert _describe_remote({**remote, "waiting": 0, "sealed": True}).startswith("; remote s3://b/p, sealed: 3.00 MiB")
    assert _describe_remote(None) == ""


def test_doctor_names_what_waits_in_words_for_one_and_for_several() -> None:
    config = {"path": "c.toml", "problem": None, "waits_for_restart": ["batch", "canary"], "waits_for_disuse": ["qwen"]}
    waiting = "; only a restart will change: batch, canary; in memory until no request uses them: qwen"
    assert _describe_config(config) == f"; configured by c.toml{waiting}"
