"""Connections and the heads of requests are bounded in number, bytes and time (threats 41 to 43)."""

from __future__ import annotations

import contextlib
import socket

import pytest
from torpor.tests.socket_api.http.http_rig import Begin, HttpThread, asked


def connected(server: HttpThread) -> socket.socket:
    found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    found.settimeout(20)
    found.connect(str(server.socket_path))
    return found


def status_of(head: bytes) -> int:
    return int(head.split()[1])


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET / HTTP/1.1\r\n" + b"".join(b"a%d: b\r\n" % each for each in range(130)), 431),
        (b"GET / HTTP/1.1\r\na: " + b"b" * 40_000 + b"\r\nb: c\r\n", 431),
        (b"GET / HTTP/1.1\r\na: " + b"b" * 400_000, 431),
        (b"GET /" + b"b" * 40_000 + b" HTTP/1.1\r\n", 431),
        (b"\x00\x01\x02\x03\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nno colon\r\n\r\n", 400),
        (b"GET /\xff HTTP/1.1\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\ncontent-length: -1\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n", 400),
    ],
    ids=["many", "long", "endless", "path", "noise", "colon", "latin", "negative", "smuggled"],
)
def test_a_head_beyond_a_limit_is_refused_and_the_connection_ends(server: HttpThread, head: bytes, status: int) -> None:
    with connected(server) as client:
        with contextlib.suppress(BrokenPipeError):  # refused before all was sent
            client.sendall(head)
        assert status_of(client.recv(4096)) == status
        with contextlib.suppress(ConnectionResetError):  # what it sent behind the limit was not read
            assert client.recv(4096) == b""


def test_a_head_that_comes_too_slowly_ends_its_connection(begin: Begin) -> None:
    server = begin(head_timeout_s=0.05)
    with connected(server) as silent, connected(server) as slow:
        slow.sendall(b"GET / HTTP/1.1\r\n")
        assert status_of(slow.recv(4096)) == 408
        assert silent.recv(4096) == b""
    connection = server.on_unix()
    for _ in range(2):
        assert asked(connection, "GET", "/healthz").status == 200
    connection.close()


def test_a_connection_that_is_idle_for_too_long_is_closed(begin: Begin) -> None:
    connection = begin(keep_alive_s=0.05).on_unix()
    asked(connection, "GET", "/healthz")
    assert connection.sock.recv(1) == b""
    connection.close()


def test_the_longest_idle_connection_gives_way_to_a_new_one(begin: Begin) -> None:
    server = begin(max_connections=2)
    first, second, third = server.on_unix(), server.on_unix(), server.on_unix()
    for each in (first, second, third):
        assert asked(each, "GET", "/healthz").status == 200
    assert first.sock.recv(1) == b""
    assert asked(second, "GET", "/healthz").status == 200
    for each in (first, second, third):
        each.close()


def test_where_all_connections_work_a_new_one_is_told_so(begin: Begin) -> None:
    server = begin(max_connections=1)
    server.ask("POST", "/v1/sessions", {"session": "a"})
    server.service.sessions["a"].tokens += [1]
    server.ask("POST", "/v1/sessions/a/sleep")
    server.do(server.service.hold)
    working = server.on_unix()
    working.request("POST", "/v1/sessions/a/wake")
    server.wait_until(lambda: ("wake", {"session": "a"}) in server.service.calls)
    refused = server.ask("GET", "/healthz")
    assert refused.status == 503
    assert "all of them work" in refused.json["error"]["message"]
    server.do(server.service.release)
    assert working.getresponse().status == 200
    working.close()
