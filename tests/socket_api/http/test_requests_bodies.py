"""A body is bounded before it is read, and its JSON before it is built (threats 41 to 43, 48; QX12)."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from http.client import HTTPConnection

import pytest
from torpor.socket_api.errors import InvalidRequest
from torpor.socket_api.http import json_reading, requests
from torpor.socket_api.http.connections import MAX_BODY_BYTES
from torpor.socket_api.http.json_reading import MAX_BODY_DEPTH, require_bounded
from torpor.tests.socket_api.http.http_rig import Begin, HttpThread

MOST_VALUES = 2_000


def bounded(body: bytes) -> bool:
    try:
        require_bounded(body)
    except InvalidRequest:
        return False
    return True


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("[" * MAX_BODY_DEPTH + "]" * MAX_BODY_DEPTH, True),
        ("[" * (MAX_BODY_DEPTH + 1), False),
        ('{"a":' * (MAX_BODY_DEPTH + 1), False),
        (json.dumps("[{" * 100_000), True),
        (json.dumps('"[' * 100_000), True),
        (json.dumps("\\" * 100_001 + '"['), True),
        ("[" + "0," * (MOST_VALUES - 2) + "0]", True),
        ("[" + "0," * MOST_VALUES + "0]", False),
        ("[" + "[]," * MOST_VALUES, False),
        ('""' * (MOST_VALUES + 1), False),
        ('"\\"\\"' * MOST_VALUES * 2, False),
        ('"' + "x" * 200_000, True),
        ('"\\' * 200_000, True),
    ],
)
def test_depth_and_values_are_counted_outside_of_strings(
    text: str, holds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_reading, "MAX_BODY_VALUES", MOST_VALUES)
    assert bounded(text.encode()) is holds


def test_an_escape_over_the_end_of_a_piece_ends_no_string() -> None:
    for before in range(65_530, 65_540):
        assert bounded(b'"' + b"x" * before + b'\\"' + b"[" * 100 + b'"')


_PEAK_OF_A_CHECK = """
import tracemalloc
from torpor.socket_api.http.json_reading import require_bounded
body = b"[" + b"[]," * 10_000 + b"[]]"
tracemalloc.start()
require_bounded(body)
print(tracemalloc.get_traced_memory()[1] / len(body))
"""


@pytest.mark.one_in(1)
def test_the_check_builds_nothing_of_a_body() -> None:
    """In a process of its own: what threads of other tests take counts, too."""
    peak = subprocess.run([sys.executable, "-c", _PEAK_OF_A_CHECK], check=True, capture_output=True).stdout
    assert float(peak) < 0.1, "built, its lists would take twenty times its bytes"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"{", "not JSON"),
        (b"[1]", "no JSON object"),
        (b"null", "no JSON object"),
        (b'{"session": NaN}', "not JSON"),
        (b'{"session": "\\ud8', "not JSON"),
        (b'{"session": "\xff"}', "not JSON"),
        (b'{"session": ' + b"9" * 5000 + b"}", "not JSON"),
        (b'{"session": 1e999}', "session: the number is too large"),
        (b'{"a": 1, "labels": [1, {"b c": [2, -1e400]}]}', "labels.1.b c.1: the number is too large"),
        (b'{"session": 0.1e310, "labels": []}', "session: the number is too large"),
        (b'{"session": {"a": 1}}', "session: it is no text"),
        (b'{"session": "a", "labels": "x"}', "labels: it is no list"),
        (b'{"session": "a", "sampling": {"temperature": -1}}', "temperature"),
        (b'{"session": "a", "sampling": {"seed": 99999999999999999999999}}', "seed"),
        (b'{"session": "a", "colour": 1}', "no such field"),
        (b"{}", "session: it is missing"),
    ],
)
def test_a_wrong_body_is_a_400_that_says_what_to_do_threat_48(server: HttpThread, body: bytes, said: str) -> None:
    answer = server.ask("POST", "/v1/sessions", body)
    assert answer.status == 400
    assert said in answer.json["error"]["message"]
    assert answer.json["error"]["type"] == "invalid_request_error"
    assert not server.service.calls


def test_a_body_above_the_limit_is_refused_before_it_is_sent(server: HttpThread) -> None:
    connection = server.on_unix()
    connection.putrequest("POST", "/v1/sessions")
    connection.putheader("content-length", str(MAX_BODY_BYTES + 1))
    connection.endheaders()
    answer = connection.getresponse()
    assert answer.status == 413
    assert json.loads(answer.read())["error"]["code"] == "request_too_large"
    connection.close()


def test_a_body_of_unknown_length_is_refused_at_the_limit(server: HttpThread) -> None:
    connection = server.on_unix()

    def pieces() -> Iterator[bytes]:
        for _ in range(33):
            yield b" " * (1 << 20)

    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it was refused before all was sent
        connection.request("POST", "/v1/sessions", pieces(), {"transfer-encoding": "chunked"}, encode_chunked=True)
    assert connection.getresponse().status == 413
    connection.close()


def test_a_slow_body_is_given_up(begin: Begin) -> None:
    connection = begin(body_timeout_s=0.05).on_unix()
    connection.putrequest("POST", "/v1/sessions")
    connection.putheader("content-length", "10")
    connection.endheaders(b'{"sess')
    assert connection.getresponse().status == 408
    connection.close()


def test_an_encoded_body_is_refused(server: HttpThread) -> None:
    assert server.ask("POST", "/v1/sessions", b"\x1f\x8b", content_encoding="gzip").status == 415


@pytest.mark.parametrize(
    ("sent", "read"),
    [
        ("cut \\ud83d", "cut \ufffd"),
        ("\\uDE00 \\ud83d\\ud83d\\ude00 \\\\ud83d", "\ufffd \ufffd\U0001f600 \\ud83d"),
        ("\\ud83d" * 5_000 + '\\"', "\ufffd" * 5_000 + '"'),
    ],
    ids=["at the end", "in a row", "many"],
)
def test_half_a_surrogate_pair_is_a_replacement_character(server: HttpThread, sent: str, read: str) -> None:
    """Clients in JavaScript cut texts so."""
    body = f'{{"messages": [{{"role": "user", "content": "{sent}"}}], "\\udc00": 1}}'
    assert server.ask("POST", "/v1/chat/completions", body.encode()).status == 200
    (asked,) = [given for name, given in server.service.calls if name == "converse"]
    assert asked["messages"][0]["content"] == read


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_fields_without_effect_take_no_room_while_the_answer_is_written(
    begin: Begin, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """Else a client's large bodies would keep those of all others out until its long answers end."""
    monkeypatch.setattr(requests, "MAX_BODY_BYTES", 100_000)
    server = begin(max_bodies_bytes=200_000, free_body_bytes=0, body_timeout_s=5.0)
    said = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, "input": "hi"}
    large = {**said, "pad": "x" * 90_000}
    server.do(server.service.hold)
    working = [server.on_unix() for _ in range(6)]
    for each in working:
        each.request("POST", path, json.dumps(large))
    server.wait_until(lambda: server.server.works == len(working))
    assert server.ask("POST", "/v1/sessions", {"session": "b", "labels": ["x" * 200] * 50}).status == 200
    server.do(server.service.release)
    for each in working:
        assert each.getresponse().status == 200
        each.close()


def two_at_work(server: HttpThread, body: dict[str, str]) -> list[HTTPConnection]:
    """Two clients whose requests the held service has, one after the other."""
    working = [server.on_unix() for _ in range(2)]
    for at, each in enumerate(working, 1):
        each.request("POST", "/v1/responses", json.dumps(body))
        server.wait_until(lambda at=at: server.server.works == at)
    return working


def test_what_is_kept_of_a_body_still_counts(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "MAX_BODY_BYTES", 100_000)
    server = begin(max_bodies_bytes=200_000, free_body_bytes=0, body_timeout_s=0.2)
    server.do(server.service.hold)
    working = two_at_work(server, {"input": "x" * 99_000})
    assert server.ask("POST", "/v1/sessions", {"session": "b", "labels": ["x" * 200] * 50}).status == 408
    server.do(server.service.release)
    for each in working:
        assert each.getresponse().status == 200
        each.close()


def test_the_first_bytes_of_a_body_wait_for_nobody(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    """A usual request is answered beside large bodies that take all room."""
    monkeypatch.setattr(requests, "MAX_BODY_BYTES", 100_000)
    server = begin(max_bodies_bytes=200_000, free_body_bytes=2_000, body_timeout_s=0.2)
    server.do(server.service.hold)
    working = two_at_work(server, {"input": "x" * 99_900})
    for labels, status in ((1, 200), (9, 200), (50, 408)):
        body = {"session": f"b{labels}", "labels": ["x" * 200] * labels}
        assert server.ask("POST", "/v1/sessions", body).status == status
    server.do(server.service.release)
    for each in working:
        assert each.getresponse().status == 200
        each.close()
