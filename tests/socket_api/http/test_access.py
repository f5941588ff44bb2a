"""Who may ask over HTTP: tokens, hosts, pages of browsers, users of the Unix socket (threats 39 and 60)."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from torpor.daemon.api.conversing import ConverseRequest
from torpor.daemon.api.events import TokenEvent
from torpor.daemon.errors import MemoryBudgetExceeded
from torpor.errors import TorporError
from torpor.memvid.errors import BudgetExceeded, CorruptBundle
from torpor.records import Result
from torpor.socket_api.errors import UnsafeTokenFile
from torpor.socket_api.tokens import Tokens
from torpor.tests.socket_api.http.http_rig import Begin, HttpThread, asked

LONG = "a-token-of-some-length"
OWNERS = "the-token-of-the-owner"


def test_the_first_start_makes_a_file_with_one_token_that_the_owner_alone_can_read(tmp_path: Path) -> None:
    path = tmp_path / "config" / "http-tokens"
    tokens = Tokens(path)
    tokens.make()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(path.parent) == [path.name]
    name, token = path.read_text().splitlines()[-1].split()
    assert tokens.namespace_of(token) == name == "default"
    assert (tokens.token_of("default"), tokens.token_of("other")) == (token, None)
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
    assert ask("GET", "/v1/sessions/a/difference?other=other%2Fd") == 403
    assert ask("GET", "/v1/sessions/a/difference?other=other%2F%40abcdef12") == 403
    assert ask("GET", "/v1/sessions?namespace=other") == 200
    assert ask("GET", "/v1/history?sessions=other%2Fd") == 403
    assert ask("GET", "/v1/history?sessions=b&sessions=other%2Fd") == 403
    assert ask("GET", "/v1/history?sessions=b&namespace=other&limit=7") == 200
    calls = server.service.calls
    made = [given["session"] for verb, given in calls if verb == "create"]
    assert made == ["team/a", "team/b", "torpor://team/c"]
    assert ("list", {"namespace": "team"}) in calls
    assert ("history", {"sessions": ("team/b",), "namespace": "team", "limit": 7}) in calls
    connection.close()


CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}


@pytest.mark.parametrize("way", ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/mcp"])
@pytest.mark.parametrize(
    ("error", "status"),
    [
        (MemoryBudgetExceeded("8.1 MiB of it is taken by 3 sessions.", held_bytes=8493465), 507),
        (BudgetExceeded("The store holds 5.9 MiB of 6.0 MiB.", which="store"), 507),
        (CorruptBundle("The file packs/17ebfc.mvp is damaged.", path="17ebfc.mvp"), 500),
    ],
)
def test_a_fault_of_the_whole_daemon_is_told_to_its_owner_with_its_reason_and_to_others_without_threat_61(
    server: HttpThread, way: str, error: TorporError, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    """How full memory and store are, and which file is damaged, depends on what other namespaces have."""
    server.do(lambda: setattr(server.service, "fault", error))
    server.tokens_path.write_text(f"default {OWNERS}\nteam {LONG}\n")
    body = {**CHAT, "input": "hello", "prompt": "hello"}
    if way == "/mcp":
        arguments = {"session": "a", "message": "hello", "create": True}
        call = {"name": "chat", "arguments": arguments}
        body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": call}
    for token in (OWNERS, LONG):
        connection = server.on_port()
        answer = asked(
            connection, "POST", way, body, x_api_key=token, accept="application/json, text/event-stream",
            content_type="application/json",
        )  # fmt: skip
        connection.close()
        assert way == "/mcp" or answer.status == status
        assert way == "/v1/messages" or error.code in answer.body.decode()
        assert (error.message in answer.body.decode()) == (token == OWNERS)
    assert error.message in caplog.text


@pytest.mark.parametrize("token", [OWNERS, LONG])
def test_so_is_a_fault_in_the_midst_of_a_stream_threat_61(server: HttpThread, token: str) -> None:
    error = MemoryBudgetExceeded("8.1 MiB of it is taken by 3 sessions.")

    async def converse(request: ConverseRequest) -> Result:
        request.emit(TokenEvent(1, "a"))
        await server.service.open_gate.wait()
        raise error

    server.do(server.service.hold)
    server.service.answers[ConverseRequest] = converse
    server.tokens_path.write_text(f"default {OWNERS}\nteam {LONG}\n")
    connection = server.on_port()
    key = {"x-api-key": token}
    connection.request("POST", "/v1/chat/completions", json.dumps({**CHAT, "stream": True}), key)
    stream = connection.getresponse()
    assert stream.status == 200
    server.do(server.service.release)
    told = stream.read().decode()
    connection.close()
    assert error.code in told
    assert (error.message in told) == (token == OWNERS)
