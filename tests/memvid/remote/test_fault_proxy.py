"""The proxy that does wrong what a plan says: each fault does what its name says, to a plain client of HTTP."""

from __future__ import annotations

import http.client
from collections.abc import Iterator

import pytest
from torpor.tests.memvid.remote.bucket_server import BucketServer
from torpor.tests.memvid.remote.fault_proxy import FAULTS, HANGING, FaultProxy, insisting

CONTENT = b"0123456789"


@pytest.fixture
def server() -> Iterator[BucketServer]:
    with BucketServer() as server:
        server.bucket.set("heads/x", CONTENT)
        server.bucket.set("heads/y", b"another")
        yield server


@pytest.fixture
def proxy(server: BucketServer) -> Iterator[FaultProxy]:
    with FaultProxy(server.port) as proxy:
        yield proxy


def ask(proxy: FaultProxy, method: str, key: str, body: bytes = b"") -> tuple[int, bytes]:
    client = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=0.3)
    try:
        client.request(method, f"/bucket/{key}", body=body or None)
        answer = client.getresponse()
        return answer.status, answer.read()
    finally:
        client.close()


READS = {
    "slow": (200, CONTENT),
    "flipped": (200, b"01234\x256789"),
    "flipped_request": (200, CONTENT),
    "swapped": (200, b"another"),
    "replayed": (200, b"of old"),
    "error_500": 500,
    "error_503": 503,
    "error_403": 403,
    "conflict": 409,
    "landed_500": 500,
}
LANDS = ("lost", "late", "landed_500", "cut_in_answer", "stalled", "slow", "flipped", "swapped", "replayed")
NO_ANSWER = ("cut_before", "cut_in_request", "lost", "cut_in_answer", *HANGING)


@pytest.mark.one_in(1)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_read(server: BucketServer, proxy: FaultProxy, fault: str) -> None:
    server.bucket.set("heads/x", b"of old")
    ask(proxy, "GET", "heads/x")
    ask(proxy, "GET", "heads/y")
    server.bucket.set("heads/x", CONTENT)
    proxy.plan = {2: fault}
    if fault in NO_ANSWER:
        with pytest.raises((OSError, http.client.HTTPException)):
            ask(proxy, "GET", "heads/x")
    else:
        status, body = ask(proxy, "GET", "heads/x")
        expected = READS[fault]
        assert (status if isinstance(expected, int) else (status, body)) == expected
    assert ask(proxy, "GET", "heads/x") == (200, CONTENT)
    assert [each.number for each in proxy.asked] == [0, 1, 2, 3]


@pytest.mark.one_in(1)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_write(server: BucketServer, proxy: FaultProxy, fault: str) -> None:
    proxy.plan = {0: fault}
    try:
        status, _ = ask(proxy, "PUT", "heads/x", b"written")
        assert (status == 200) == (fault in LANDS and fault != "landed_500") or fault == "flipped_request"
    except (OSError, http.client.HTTPException):
        assert fault in NO_ANSWER
    expected = b"wridten" if fault == "flipped_request" else b"written" if fault in LANDS else CONTENT
    assert server.bucket.content("heads/x") == expected


def test_a_plan_that_insists_meets_each_try_of_the_same(proxy: FaultProxy) -> None:
    proxy.plan = insisting(1, "error_503")
    assert [ask(proxy, "GET", key)[0] for key in ("heads/x", "heads/y", "heads/y", "heads/x")] == [200, 503, 503, 200]
    proxy.plan = lambda asked: "error_500" if asked.method == "PUT" else None
    assert [ask(proxy, "GET", "heads/x")[0], ask(proxy, "PUT", "heads/x", b"1")[0]] == [200, 500]
