"""Connections and the heads of requests are bounded in number, bytes and time (threats 41 to 43)."""

from __future__ import annotations

import contextlib
import json
import socket
from typing import Any

import pytest
from torpor.daemon.api.events import TokenEvent
from torpor.socket_api.http.connections import MAX_BODY_BYTES
from torpor.tests.socket_api.http.answers import says
from torpor.tests.socket_api.http.http_rig import Begin, HttpThread, asked

MADE = b'{"session": "a"}'


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
        (b"POST / HTTP/1.1\r\ncontent-length: 3\r\ncontent-length: 4\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\ntransfer-encoding: gzip, chunked\r\n\r\n", 400),
        (b"GET /healthz HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n", 400),
        (b"GET http://b/healthz HTTP/1.1\r\nhost: a\r\n\r\n", 400),
    ],
    ids=[
        *("many", "long", "endless", "path", "noise", "colon", "latin", "negative", "smuggled"),
        *("two lengths", "coded", "two hosts", "another host"),
    ],
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


def test_a_target_as_proxies_get_it_is_answered(server: HttpThread) -> None:
    for target, status in ((b"http://A:80/healthz?x=1", 200), (b"//healthz", 404), (b"http://[/healthz", 400)):
        head = b"GET " + target + b" HTTP/1.1\r\nhost: a:80\r\nconnection: close\r\n\r\n"
        assert status_of(spoken(server, head)) == status


@pytest.mark.one_in(1)
@pytest.mark.parametrize("head", [b"GET /healthz", b"POST /v1/sessions", b"POST /v1/chat/completions", b"POST /mcp"])
def test_a_body_that_stalls_ends_its_connection(begin: Begin, head: bytes) -> None:
    """Whether a route waits for the body or not, and though more of it comes."""
    server = begin(body_timeout_s=0.1)
    with connected(server) as client:
        client.sendall(head + b" HTTP/1.1\r\nhost: a\r\ncontent-length: 90\r\n\r\n{")
        assert status_of(client.recv(4096)) == (200 if head.startswith(b"GET") else 408)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            client.sendall(b'"mess')
            while client.recv(4096):
                pass
    server.wait_until(lambda: server.server.works == 0)


@pytest.mark.one_in(1)
def test_a_body_that_nobody_waits_for_and_that_ends_keeps_its_connection(begin: Begin) -> None:
    server, health = begin(body_timeout_s=1.0), b'{"status":"ok"}'

    def answered(client: socket.socket) -> None:
        said = b""
        while not said.endswith(health):
            said += client.recv(4096) or pytest.fail("the connection has ended")
        assert status_of(said) == 200

    with connected(server) as client:
        client.sendall(b"GET /healthz HTTP/1.1\r\nhost: a\r\ncontent-length: 4\r\n\r\n{")
        answered(client)
        client.sendall(b'"a}')
        client.settimeout(1.2)
        with pytest.raises(TimeoutError):
            client.recv(1)
        client.sendall(b"GET /healthz HTTP/1.1\r\nhost: a\r\n\r\n")
        answered(client)


@pytest.mark.parametrize("path", ["/", "/healthz", "/metrics", "/v1/models", "/v1/sessions", "/nowhere", "/mcp"])
def test_a_head_has_the_headers_of_its_get_and_no_body(server: HttpThread, path: str) -> None:
    asks = (f"{method} {path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n" for method in ("HEAD", "GET"))
    (told, _, nothing), (status, _, _) = (spoken(server, each.encode()).partition(b"\r\n\r\n") for each in asks)
    assert not nothing
    assert status_of(told) == status_of(status)


@pytest.mark.parametrize(
    ("size", "continues", "status"), [(len(MADE), True, 200), (MAX_BODY_BYTES + 1, False, 413)], ids=["body", "large"]
)
def test_a_client_that_waits_to_continue_is_told_whether_to(
    server: HttpThread, size: int, continues: bool, status: int
) -> None:
    head = b"POST /v1/sessions HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\nconnection: close\r\ncontent-length: %d"
    with connected(server) as client:
        client.sendall(head % size + b"\r\n\r\n")
        told = client.recv(4096)
        assert status_of(told) == (100 if continues else status)
        if continues:
            client.sendall(MADE)
            assert status_of(client.recv(4096)) == status


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


def spoken(server: HttpThread, *pieces: bytes) -> bytes:
    """All that the server says to these bytes, until it ends the connection."""
    with connected(server) as client:
        for piece in pieces:
            client.sendall(piece)
        said = b""
        while more := client.recv(65536):
            said += more
    return said


OFFER = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAA\r\n"
LIST = b"GET /v1/sessions HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"


@pytest.mark.parametrize("in_pieces", [False, True])
@pytest.mark.parametrize(
    "body",
    [
        b"content-length: %d\r\n\r\n%s" % (len(MADE), MADE),
        b"transfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(MADE), MADE),
    ],
    ids=["whole", "chunks"],
)
def test_a_request_that_offers_another_protocol_keeps_its_body_and_so_does_its_connection(
    server: HttpThread, body: bytes, in_pieces: bool
) -> None:
    """As the JDK's client and `curl --http2` begin."""
    sent = b"POST /v1/sessions HTTP/1.1\r\nhost: a\r\n" + OFFER + body + LIST
    said = spoken(server, *([sent[at : at + 1] for at in range(len(sent))] if in_pieces else [sent]))
    made, listed = said.split(b"HTTP/1.1 ")[1:]
    assert (made[:3], listed[:3]) == (b"200", b"200"), said
    assert ("create", {"session": "a"}) in server.service.calls
    assert b"101" not in made[:3]
    assert b"upgrade" not in made.lower()


def test_an_offer_without_a_body_is_answered_in_http_1(server: HttpThread) -> None:
    head = b"GET /healthz HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n"
    assert spoken(server, head + LIST).count(b"HTTP/1.1 200") == 2


def test_no_tunnel_is_made(server: HttpThread) -> None:
    said = spoken(server, b"CONNECT a:1 HTTP/1.1\r\nhost: a\r\n\r\n")
    assert said.startswith(b"HTTP/1.1 405 ")


def test_trailers_are_no_headers(begin: Begin) -> None:
    server = begin()
    body = b"%x\r\n%s\r\n0\r\nauthorization: Bearer %s\r\n" % (len(MADE), MADE, server.token.encode())
    head = b"POST /v1/sessions HTTP/1.1\r\nhost: 127.0.0.1:%d\r\ntransfer-encoding: chunked\r\n" % server.port
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
        client.sendall(head + b"\r\n" + body + b"\r\n")
        assert status_of(client.recv(4096)) == 401
    said = spoken(server, head + b"\r\n" + body + b"x-torpor-session: b\r\norigin: http://page\r\n\r\n" + LIST)
    assert said.count(b"HTTP/1.1 200") == 2


@pytest.mark.parametrize(
    "endless", [b"0\r\na: " + b"b" * 600_000, b"0" * 600_000, b"3;" + b"x" * 600_000, b"\r\n" * 300_000]
)
def test_what_stands_around_the_chunks_of_a_body_is_bounded(server: HttpThread, endless: bytes) -> None:
    with connected(server) as client:
        client.sendall(b"POST /v1/sessions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n")
        with contextlib.suppress(BrokenPipeError):  # refused before all was sent
            client.sendall(endless)
        assert status_of(client.recv(4096)) in (400, 431)


def test_a_client_of_http_1_0_gets_no_chunks(server: HttpThread) -> None:
    """As a proxy in its default form asks: the end of the connection ends the answer, also of a stream."""
    says(server, TokenEvent(1, "hi"))
    body = json.dumps({"messages": [{"role": "user", "content": "a"}], "stream": True}).encode()
    head = b"POST /v1/chat/completions HTTP/1.0\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % len(body)
    told, _, events = spoken(server, head + body).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in told
    assert b"connection: close" in told
    assert events.startswith(b"data: {")
    assert events.endswith(b"data: [DONE]\n\n")
    told, _, health = spoken(server, b"GET /healthz HTTP/1.0\r\nhost: a\r\n\r\n").partition(b"\r\n\r\n")
    assert (b"content-length: %d" % len(health)) in told
    told, _, nothing = spoken(server, b"HEAD /healthz HTTP/1.0\r\nhost: a\r\n\r\n").partition(b"\r\n\r\n")
    assert told.startswith(b"HTTP/1.1 200")
    assert not nothing


LONG = b"GET /openapi.json HTTP/1.1\r\nhost: a\r\n\r\n"
SHORT = b"GET /healthz HTTP/1.1\r\nhost: a\r\n\r\n"


@pytest.mark.one_in(1)
def test_a_client_that_takes_no_answer_loses_its_connection(begin: Begin) -> None:
    server = begin(stall_timeout_s=0.1)
    with connected(server) as client:
        client.sendall(LONG * 40)
        server.wait_until(lambda: len(connections_of(server)) == 1)
        server.wait_until(lambda: len(connections_of(server)) == 0)


def connections_of(server: HttpThread) -> set[Any]:
    serving = server.server._server
    assert serving is not None
    return set(serving.server_state.connections)


def test_requests_that_wait_on_one_connection_are_bounded(server: HttpThread) -> None:
    with connected(server) as client:
        client.sendall(SHORT * 1_000)
        said = b""
        with contextlib.suppress(ConnectionResetError):
            while more := client.recv(65536):
                said += more
        assert b"HTTP/1.1 429 " in said


@pytest.mark.parametrize("sent", [b"POST /v1/sessions HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n\r\n{", LONG * 40])
def test_a_connection_that_waits_for_its_client_gives_way_to_a_new_one(begin: Begin, sent: bytes) -> None:
    """For the rest of a body, or until an answer is taken."""
    server = begin(max_connections=2)
    with connected(server) as first, connected(server) as second:
        for count, each in enumerate((first, second), 1):
            each.sendall(sent)
            server.wait_until(lambda count=count: sum(map(waits, connections_of(server))) == count)
        assert server.ask("GET", "/healthz").status == 200
        with contextlib.suppress(ConnectionResetError):
            while first.recv(65536):
                pass


def test_each_address_has_connections_of_its_own(begin: Begin) -> None:
    server = begin(max_connections=1)
    server.do(server.service.hold)
    working = server.on_port()
    said = {"messages": [{"role": "user", "content": "hi"}]}
    working.request("POST", "/v1/chat/completions", json.dumps(said), {"x-api-key": server.token})
    server.wait_until(lambda: server.server.works == 1)
    assert server.ask("GET", "/healthz").status == 200
    server.do(server.service.release)
    assert working.getresponse().status == 200
    working.close()


def waits(connection: Any) -> bool:
    """Whether it waits for the rest of a body, or for its client to take an answer."""
    is_amidst = connection.flow.write_paused or (connection.cycle is not None and connection.cycle.more_body)
    return is_amidst and connection.waits_since is not None
