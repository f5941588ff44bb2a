"""The HTTP server starts and stops with its daemon."""

from __future__ import annotations

import asyncio
import http.client
import os
import stat
import time
from email.utils import parsedate_to_datetime
from pathlib import Path

import pytest
from torpor.socket_api.errors import PortInUse, SocketInUse
from torpor.socket_api.http import connections
from torpor.socket_api.http.connections import HttpLimits
from torpor.socket_api.http.server import HttpServer
from torpor.tests.socket_api.http.http_rig import Begin, HttpThread, UnixConnection, asked
from torpor.tests.socket_api.server_rig import Here


def test_a_port_or_a_socket_in_use_is_told_before_anything_is_loaded(server: HttpThread, tmp_path: Path) -> None:
    with pytest.raises(PortInUse, match="--http"):
        HttpServer(port=server.port, tokens_path=tmp_path / "tokens")
    with pytest.raises(SocketInUse):
        HttpServer(socket_path=server.socket_path)


def test_the_socket_is_the_owners_alone_and_goes_with_the_server(begin: Begin) -> None:
    server = begin()
    assert stat.S_IMODE(server.socket_path.stat().st_mode) == 0o600
    server.do(server.server.stop)
    assert not server.socket_path.exists()


def test_each_answer_has_the_date_of_its_request(server: HttpThread, monkeypatch: pytest.MonkeyPatch) -> None:
    connection = server.on_unix()
    assert (
        abs(parsedate_to_datetime(asked(connection, "GET", "/healthz").headers["date"]).timestamp() - time.time()) < 5
    )
    monkeypatch.setattr(connections, "formatdate", lambda **_: "later")
    assert asked(connection, "GET", "/healthz").headers["date"] == "later"
    connection.close()


def waking(server: HttpThread) -> http.client.HTTPConnection:
    """A request that waits at the service until it is cancelled or released."""
    server.ask("POST", "/v1/sessions", {"session": "a"})
    server.service.sessions["a"].tokens += [1]
    server.ask("POST", "/v1/sessions/a/sleep")
    server.do(server.service.hold)
    connection = server.on_unix()
    connection.request("POST", "/v1/sessions/a/wake")
    server.wait_until(lambda: ("wake", {"session": "a"}) in server.service.calls)
    return connection


def test_a_stop_answers_what_runs_and_what_still_comes_with_the_error_of_the_api(begin: Begin) -> None:
    server = begin()
    idle = server.on_unix()
    asked(idle, "GET", "/healthz")
    connection = waking(server)
    server.do(server.server.quiesce)
    answer = connection.getresponse()
    assert answer.status == 503
    assert b"shutting_down" in answer.read()
    assert asked(idle, "GET", "/healthz").json == {"status": "stopping"}
    assert asked(idle, "GET", "/v1/sessions").status == 503
    connection.close()
    server.do(server.server.stop)
    assert idle.sock is None or idle.sock.recv(1) == b""
    idle.close()


def test_a_client_that_leaves_cancels_its_request(server: HttpThread) -> None:
    """Threat 45."""
    connection = waking(server)
    assert server.server.works == 1
    connection.close()
    server.wait_until(lambda: server.server.works == 0)
    assert server.service.sessions["a"].info.state == "asleep"


async def test_a_stop_that_a_client_asks_for_on_the_other_socket_ends_it(short_path: Path) -> None:
    door = HttpServer(socket_path=short_path / "h.sock", limits=HttpLimits(goodbye_timeout_s=0.5))
    async with Here(short_path / "t.sock", files=1024, find_doors=lambda: (door,)) as here:
        connection = UnixConnection(short_path / "h.sock")
        assert (await asyncio.to_thread(asked, connection, "GET", "/healthz")).status == 200
        await here.client.shutdown()
        await here.serving
        assert here.service.closed
        assert os.listdir(short_path) == []
        connection.close()
