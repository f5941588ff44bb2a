"""An object store over a network that fails: every fault at every request of each method.

What is told is true, nothing is half there, a write whose fate is not known says so, and nothing hangs.
"""

from __future__ import annotations

import contextlib
import itertools
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from typing import Any, Final

import pytest
from torpor.memvid.errors import RemoteError, RemoteTooLarge, RemoteUnclear
from torpor.memvid.remote import cloud_objects
from torpor.memvid.remote.objects import Objects
from torpor.tests.memvid.remote.fault_proxy import FAULTS, HANGING, Fault, FaultProxy, insisting
from torpor.tests.memvid.remote.loopback import Loopback
from torpor.tests.memvid.remote.s3_servers import SERVERS, open_s3, s3_server

SPOIL: Final = ("flipped", "swapped", "replayed", "flipped_request")
"""What no object store can tell: the digests of what is read do."""


@dataclass(frozen=True)
class Case:
    """A method. before: what the object is, after: what it becomes."""

    ask: Callable[[Objects, str, str], Any]
    before: bytes | None
    after: bytes | None
    answer: Any = None
    writes: bool = True


READ: Final = b"0123456789" * 1000


def ranges(objects: Objects, key: str, tag: str) -> list[bytes] | None:
    spans = [(0, 2500), (2500, 10), (9000, 5000), (20_000, 1)]
    parts = list(objects.get_ranges([(key, *span) for span in spans]))
    return None if parts == [None] * len(spans) else [b"".join(part) for part in parts if part is not None]


CASES: Final = {
    "get": Case(lambda o, key, tag: o.get(key, 20_000).data, READ, READ, READ, writes=False),
    "size": Case(lambda o, key, tag: o.size(key), READ, READ, len(READ), writes=False),
    "get_ranges": Case(ranges, READ, READ, [READ[:2500], READ[2500:2510], READ[9000:], b""], writes=False),
    "entries": Case(
        lambda o, key, tag: [(each.key, each.size_bytes) for each in o.entries("heads/")],
        READ,
        READ,
        [("heads/x", len(READ))],
        writes=False,
    ),
    "create": Case(lambda o, key, tag: o.create(key, b"after") is not None, None, b"after", True),
    "replace": Case(lambda o, key, tag: o.replace(key, b"after", tag) is not None, b"before", b"after", True),
    "put": Case(lambda o, key, tag: o.put(key, [b"af", b"ter"], 5), b"before", b"after"),
    "put_large": Case(lambda o, key, tag: o.put(key, iter([READ[:5], READ[5:]]), len(READ)), b"before", READ),
    "remove": Case(lambda o, key, tag: o.remove(key), b"before", None),
}
PUT_LARGER: Final = Case(lambda o, key, tag: o.put(key, iter([READ] * 1200), 1200 * len(READ)), b"before", READ * 1200)
"""For servers that take no part of less than 5 MiB."""


@pytest.fixture(scope="module", params=SERVERS)
def port(request: pytest.FixtureRequest) -> Iterator[int]:
    with s3_server(request.param) as port:
        yield port


class World:
    """An object under a prefix of its own, seen through a proxy, and beside it."""

    def __init__(self, patched: pytest.MonkeyPatch, port: int, proxy: FaultProxy, case: Case, seconds: float) -> None:
        prefix = uuid.uuid4().hex
        self.direct = open_s3(patched, port, prefix)
        self.faulty = open_s3(patched, proxy.port, prefix, seconds=seconds)
        self.tag = (self.direct.create("heads/x", case.before) or "") if case.before is not None else ""

    def content(self) -> bytes | None:
        found = self.direct.get("heads/x", 64 << 20)
        return None if found is None else found.data


def outcome(world: World, case: Case) -> Any:
    """What the method answers; the class of what it raises."""
    try:
        return case.ask(world.faulty, "heads/x", world.tag)
    except RemoteError as error:
        return type(error)


def judge(case: Case, answer: Any, there: bytes | None, fault: str) -> None:
    if fault in SPOIL:
        assert case.writes or there == case.before
        return
    assert there in (case.before, case.after), "something half, or something else, is there"
    if isinstance(answer, type):
        assert answer is not RemoteUnclear or case.writes
        assert answer is RemoteUnclear or not case.writes or there == case.before, f"{answer} though it has landed"
    elif answer is not False:  # else it met another write, or itself: the caller reads back
        assert answer == case.answer
        assert there == case.after


@pytest.mark.one_in(1)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", CASES)
def test_every_fault_at_every_request_of_a_method(
    name: str, fault: Fault, port: int, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Once, and again at each try of the same."""
    case = CASES[name]
    if request.node.callspec.params["port"] != "own":
        case = PUT_LARGER if name == "put_large" else case
    else:
        monkeypatch.setattr(cloud_objects, "_PART_BYTES", 4000)
    monkeypatch.setattr(cloud_objects, "_PIECE_BYTES", 2000)
    monkeypatch.setattr(cloud_objects, "_RETRIES", 1)
    with FaultProxy(port) as proxy:
        world = World(monkeypatch, port, proxy, case, 10)
        assert outcome(world, case) == case.answer
        requests = len(proxy.asked)
    assert requests >= (5 if name == "put_large" else 1)
    for number, insists in itertools.product(range(requests), (False, True)):
        with FaultProxy(port) as proxy:
            world = World(monkeypatch, port, proxy, case, 0.3 if fault in HANGING else 10)
            proxy.plan = insisting(number, fault) if insists else {number: fault}
            answer = outcome(world, case)
            try:
                judge(case, answer, world.content(), fault)
            except AssertionError as error:
                again = " and its retries" if insists else ""
                raise AssertionError(f"{fault} at request {number}{again}: {answer!r}") from error


@pytest.mark.parametrize("name", ["create", "replace", "put", "remove"])
def test_what_refuses_a_second_try_says_nothing_of_the_first(
    name: str, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one has landed, and its answer was an error of the server."""
    with FaultProxy(port) as proxy:
        world = World(monkeypatch, port, proxy, CASES[name], 10)
        proxy.plan = {0: "landed_500", 1: "error_403"}
        assert outcome(world, CASES[name]) is RemoteUnclear
        assert len(proxy.asked) == 2
        assert world.content() == CASES[name].after


def test_parts_that_fail_are_told_of_also_where_an_upload_cannot_be_given_up(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def parts() -> Iterator[bytes]:
        yield b"x" * (6 << 20)
        raise FileNotFoundError("a pack is gone")

    monkeypatch.setattr(cloud_objects, "_RETRIES", 0)
    with FaultProxy(port) as proxy:
        world = World(monkeypatch, port, proxy, CASES["put"], 10)
        proxy.plan = lambda asked: "error_500" if asked.method == "DELETE" else None
        with pytest.raises(FileNotFoundError, match="a pack is gone"):
            world.faulty.put("heads/x", parts(), 7 << 20)
        assert world.content() == b"before"


class _Endless(BaseHTTPRequestHandler):
    """A listing of it has no end, and a part of an object is a gigabyte, whatever is asked for."""

    sent_bytes = 0

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.send_response(200 if "list-type" in self.path else 206)
        if "list-type" in self.path:
            text = (
                b"<ListBucketResult><IsTruncated>true</IsTruncated><NextContinuationToken>more</NextContinuationToken>"
                b"<Contents><Key>p/heads/x</Key><LastModified>2026-12-01T12:00:00.000Z</LastModified>"
                b'<ETag>"1"</ETag><Size>1</Size></Contents></ListBucketResult>'
            )
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)
            return
        for name, value in {
            "Content-Range": "bytes 0-99/1000",
            "ETag": '"1"',
            "Last-Modified": "Tue, 01 Dec 2026 12:00:00 GMT",
            "Content-Length": str(1 << 30),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        with contextlib.suppress(ConnectionError):
            for _ in range(1 << 10):
                self.wfile.write(bytes(1 << 20))
                type(self).sent_bytes += 1 << 20


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Objects, type[_Endless]]]:
    handler = type("Handler", (_Endless,), {})
    with Loopback(handler) as server:
        yield open_s3(monkeypatch, server.port, "p"), handler


def test_no_more_of_an_object_is_taken_in_than_was_asked_for(endless: tuple[Objects, type[_Endless]]) -> None:
    objects, server = endless
    parts = list(objects.get_ranges([("packs/x", 0, 60), ("packs/x", 60, 40)]))
    assert [part and len(b"".join(part)) for part in parts] == [60, 40]
    assert server.sent_bytes < 100 << 20


@pytest.mark.parametrize("bound", ["MAX_LISTED", "_LIST_S"])
def test_a_listing_has_an_end(
    bound: str, endless: tuple[Objects, type[_Endless]], monkeypatch: pytest.MonkeyPatch
) -> None:
    objects, _ = endless
    monkeypatch.setattr(cloud_objects, bound, {"MAX_LISTED": 20, "_LIST_S": 0.1}[bound])
    with pytest.raises(RemoteTooLarge) as refused:
        list(objects.entries("heads/"))
    assert "heads/" in refused.value.message
