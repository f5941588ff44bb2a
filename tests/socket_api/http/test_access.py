"""Who may ask over HTTP: tokens, hosts, pages of browsers, users of the Unix socket (threats 39 and 60)."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from torpor.socket_api.errors import UnsafeTokenFile
from torpor.socket_api.http.access import Tokens
from torpor.tests.socket_api.http.http_rig import Begin, HttpThread, asked

LONG = "a-token-of-some-length"


def test_the_first_start_makes_a_file_with_one_token_that_the_owner_alone_can_read(tmp_path: Path) -> None:
    path = tmp_path / "config" / "http-tokens"
    tokens = Tokens(path)
    tokens.make()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(path.parent) == [path.name]
    name, token = path.read_text().splitlines()[-1].split()
    assert tokens.namespace_of(token) == name == "default"
    again = Tokens(path)
    again.make()
    assert again.namespace_of(token) == "default"


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOTSUP])
def test_the_first_file_of_tokens_needs_no_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", refuse)
    tokens = Tokens(tmp_path / "tokens")
    tokens.make()
    assert os.listdir(tmp_path) == ["tokens"]
    assert tokens.namespace_of(tokens.path.read_text().split()[-1]) == "default"


def test_a_changed_file_holds_at_once(tmp_path: Path) -> None:
    tokens = Tokens(tmp_path / "tokens")
    tokens.make()
    before = tokens.path.read_text().split()[-1]
    tokens.path.write_text(f"team {LONG}\n")
    assert tokens.namespace_of(LONG) == "team"
    assert tokens.namespace_of(before) is None


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda path: path.chmod(0o640), "you alone can read"),
        (lambda path: path.write_text("# none\n"), "has no token"),
        (lambda path: path.write_text("team short\n"), "wrong in line 1"),
        (lambda path: path.write_text(f"te/am {LONG}\n"), "wrong in line 1"),
        (lambda path: path.write_text("x" * 300_000), "more than"),
        (lambda path: (path.rename(path.with_name("b")), path.symlink_to(path.with_name("b"))), "cannot be read"),
    ],
    ids=["readable", "empty", "short", "namespace", "long", "link"],
)
def test_an_unsafe_file_is_refused_at_the_start_and_lets_nobody_in_later(
    tmp_path: Path, spoil: Callable[[Path], object], problem: str
) -> None:
    tokens = Tokens(tmp_path / "tokens")
    tokens.make()
    token = tokens.path.read_text().split()[-1]
    spoil(tokens.path)
    assert tokens.namespace_of(token) is None
    with pytest.raises(UnsafeTokenFile, match=problem):
        Tokens(tmp_path / "tokens").make()


def test_the_port_needs_a_token_and_takes_it_in_two_ways(server: HttpThread) -> None:
    connection = server.on_port()
    for headers, status in (
        ({}, 401),
        ({"authorization": "Bearer wrong"}, 401),
        ({"authorization": f"Basic {server.token}"}, 401),
        ({"authorization": f"Bearer {server.token}"}, 200),
        ({"x_api_key": server.token}, 200),
    ):
        answer = asked(connection, "GET", "/v1/models", **headers)
        assert answer.status == status
        if status == 401:
            assert answer.json["error"]["code"] == "invalid_api_key"
    told = asked(connection, "POST", "/v1/messages", {}, anthropic_version="2023-06-01")
    assert (told.status, told.json["type"], told.json["error"]["type"]) == (401, "error", "authentication_error")
    connection.close()


def test_whether_the_daemon_is_there_needs_no_token(server: HttpThread) -> None:
    connection = server.on_port()
    assert asked(connection, "HEAD", "/").status == 200
    assert asked(connection, "GET", "/healthz").json == {"status": "ok"}
    assert asked(connection, "GET", "/").status == 401
    assert asked(connection, "GET", "/metrics").status == 401
    connection.close()


@pytest.mark.parametrize("host", ["evil.example", "evil.example:PORT", "127.0.0.1:1", "127.0.0.1", ""])
def test_a_name_that_leads_here_is_refused(server: HttpThread, host: str) -> None:
    """DNS rebinding: the page of another name reaches the port, and its browser sends that name."""
    connection = server.on_port()
    answer = asked(connection, "GET", "/healthz", host=host.replace("PORT", str(server.port)))
    assert answer.status == 403
    for own in ("127.0.0.1", "localhost", "LOCALHOST", "[::1]"):
        assert asked(connection, "GET", "/healthz", host=f"{own}:{server.port}").status == 200
    connection.close()


def test_a_page_of_a_browser_is_refused_on_both_addresses_and_no_cors_is_granted(server: HttpThread) -> None:
    for connection in (server.on_port(), server.on_unix()):
        headers = {"origin": "http://127.0.0.1", "authorization": f"Bearer {server.token}"}
        answer = asked(connection, "GET", "/v1/models", **headers)
        asking = asked(connection, "OPTIONS", "/v1/models", access_control_request_method="GET", **headers)
        assert (answer.status, asking.status) == (403, 403)
        assert not [name for name in (*answer.headers, *asking.headers) if name.startswith("access-control")]
        connection.close()


def test_another_user_of_the_unix_socket_is_refused_threat_39(begin: Begin) -> None:
    for find_peer_uid in (lambda _: os.geteuid() + 1, lambda _: os.stat("/nowhere/at/all").st_uid):
        answer = begin(find_peer_uid=find_peer_uid).ask("GET", "/healthz")
        assert answer.status == 403
        assert "serves user" in answer.json["error"]["message"]


def test_a_token_is_for_the_sessions_of_its_namespace(begin: Begin) -> None:
    server = begin()
    server.tokens_path.write_text(f"team {LONG}\n")
    connection = server.on_port()

    def ask(method: str, path: str, body: object = None) -> int:
        return asked(connection, method, path, body, x_api_key=LONG).status

    assert ask("POST", "/v1/sessions", {"session": "a"}) == 200
    assert ask("POST", "/v1/sessions", {"session": "team/b"}) == 200
    assert ask("POST", "/v1/sessions", {"session": "torpor://team/c"}) == 200
    assert ask("POST", "/v1/sessions", {"session": "other/d"}) == 403
    assert ask("GET", "/v1/sessions/other%2Fd") == 403
    assert ask("POST", "/v1/sessions/a/fork", {"name": "other/d"}) == 403
    assert ask("GET", "/v1/sessions?namespace=other") == 200
    calls = server.service.calls
    made = [given["session"] for verb, given in calls if verb == "create"]
    assert made == ["team/a", "team/b", "torpor://team/c"]
    assert ("list", {"namespace": "team"}) in calls
    connection.close()
