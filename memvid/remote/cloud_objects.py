"""Objects in S3, Google's or Azure's object store, by obstore.

Owns times, retries and the size of requests. What an error means stands in `cloud_errors`.

How it works:
- A small object has seconds, for a lease waits for it. Parts of large ones have minutes, for a line may be slow.
- Parts of objects are asked for in pieces, some at once, each by a thread, while the caller looks at what is there.
  obstore's own `get_ranges` makes one request of neighbors, and panics where a part begins behind the end of the
  object, as in a pack that was cut; its coroutines take a tenth of a second to hand over a megabyte.
- An upload of several parts is given up at the object store when one fails. Where the process ends meanwhile, what it
  sent lies there unseen: a rule of the bucket has to drop it ("abort incomplete multipart uploads").
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from ..errors import RemoteError, RemoteTooLarge, RemoteUnclear, RemoteUnfit
from ..limits import MAX_LISTED, MIB
from .cloud_errors import Asking, asked_behind_the_end
from .objects import Entry, Object, Part, Span, is_key, parts_of
from .ranges import Fetch, fetches

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

_CONNECT_S: Final = 5
_SMALL_S: Final = 10
_LARGE_S: Final = 120
"""Of one request. An upload has 20 MiB on their way at once: a line with 1.5 Mbit/s has time for them."""
_LIST_S: Final = 600
"""Of one listing, which is many requests."""
_RETRIES: Final = 5
_AT_ONCE: Final = 4
"""Parts of one upload that are on their way at once."""
_PART_BYTES: Final = 5 * MIB
"""Of an upload: the least that S3 takes."""
_MOST_PARTS: Final = 9_000
"""Of an upload: S3 takes 10,000."""
_PIECE_BYTES: Final = 8 * MIB
_AHEAD: Final = 8
"""Pieces that are asked for at once: 64 MiB."""
_BETWEEN: Final = "\n"
"""Of the two halves of a tag."""

_Coming = tuple[Fetch, "Future[memoryview | None]"]
Opener = Callable[["ClientConfig", "RetryConfig"], "ObjectStore"]


class CloudObjects:
    """Objects by obstore. open_store: makes its client, for the times that it is given. url: without credentials."""

    def __init__(self, open_store: Opener, url: str) -> None:
        self.url = url
        self.keeps_old = False
        self._small = open_store(*_bounds(_SMALL_S))
        self._large = open_store(*_bounds(_LARGE_S))
        self._threads = ThreadPoolExecutor(_AHEAD, thread_name_prefix="torpor-remote")

    def place(self) -> object:
        return self.url

    def get(self, key: str, most_bytes: int) -> Object | None:
        import obstore

        parts_of(key)
        with self._asking("read", key):
            found = obstore.get(self._small, key)
            if found.meta["size"] > most_bytes:
                raise self._too_large(key, most_bytes)
            tag = self._tag(found.meta, key)
            return Object(bytes(found.bytes()), tag)
        return None

    def size(self, key: str) -> int | None:
        import obstore

        parts_of(key)
        with self._asking("look at", key):
            return obstore.head(self._small, key)["size"]
        return None

    def get_ranges(self, spans: Sequence[Span]) -> Iterator[Part | None]:
        for key in {key for key, _, _ in spans}:
            parts_of(key)
        return _parts(self._fetched(fetches(spans, _PIECE_BYTES)), spans)

    def _ask(self, wanted: Iterator[Fetch], coming: deque[_Coming]) -> None:
        """Ask for as much as may be under way at once."""
        while len(coming) < _AHEAD and (fetch := next(wanted, None)) is not None:
            coming.append((fetch, self._threads.submit(self._piece, fetch)))

    def _piece(self, fetch: Fetch) -> memoryview | None:
        """What one request brings. None: there is no such object."""
        import obstore

        with self._asking("read", fetch.key):
            try:
                # As a stream: `get_range` takes in whatever is sent, however little was asked for.
                found = obstore.get(self._large, fetch.key, options={"range": (fetch.first, fetch.end)})
                size = fetch.end - fetch.first
                return memoryview(next(iter(found.stream(min_chunk_size=size)), b""))[:size]
            except Exception as error:
                if not asked_behind_the_end(error):
                    raise
                return memoryview(b"")
        return None

    def _fetched(self, wanted: Iterator[Fetch]) -> Iterator[tuple[Fetch, memoryview | None]]:
        """What requests bring, in their order."""
        coming = deque[_Coming]()
        try:
            self._ask(wanted, coming)
            while coming:
                fetch, asked = coming.popleft()
                data = asked.result()
                self._ask(wanted, coming)
                yield fetch, data
        finally:
            _give_up(coming)

    def create(self, key: str, data: bytes) -> str | None:
        return self._write_if("create", key, data, "create")

    def replace(self, key: str, data: bytes, tag: str) -> str | None:
        e_tag, _, version = tag.partition(_BETWEEN)
        return self._write_if(
            "replace", key, data, {name: of for name, of in (("e_tag", e_tag), ("version", version)) if of}
        )

    def _write_if(self, action: str, key: str, data: bytes, mode: Any) -> str | None:
        import obstore
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        parts_of(key)
        with self._asking(action, key, writing=True):
            try:
                put = obstore.put(self._small, key, data, mode=mode, use_multipart=False)
            except (AlreadyExistsError, PreconditionError):
                return None
            with contextlib.suppress(RemoteUnfit):
                return self._tag(put, key)
            raise RemoteUnclear(f"{self.url} did not say under which tag it has {key}.", url=self.url, key=key)
        if action == "create":
            raise self._asking("find", key).refused(404, None)
        return None

    def put(self, key: str, parts: Iterable[bytes], size_bytes: int) -> None:
        import obstore

        parts_of(key)
        failed: list[BaseException] = []
        whole = _counted(parts, size_bytes, failed)
        part_bytes = _part_bytes(size_bytes)
        with self._asking("write", key, writing=True):
            try:
                if size_bytes <= part_bytes:
                    obstore.put(self._large, key, b"".join(whole), use_multipart=False)
                else:
                    obstore.put(self._large, key, whole, chunk_size=part_bytes, max_concurrency=_AT_ONCE)
            except BaseException:
                if not failed:
                    raise
            else:
                return
        raise failed[0] if failed else self._asking("write", key).unclear(404)

    def remove(self, key: str) -> None:
        import obstore

        parts_of(key)
        with self._asking("remove", key, writing=True):
            obstore.delete(self._small, key)

    def entries(self, prefix: str) -> Iterator[Entry]:
        import obstore

        listed, until = 0, time.monotonic() + _LIST_S
        with self._asking("list", prefix):
            for chunk in obstore.list(self._small, prefix=prefix or None):
                listed += len(chunk)
                if listed > MAX_LISTED or time.monotonic() > until:
                    raise self._endless(prefix, listed)
                for meta in chunk:
                    if is_key(meta["path"]):  # else somebody else's
                        yield Entry(meta["path"], meta["size"], _ns(meta["last_modified"]))

    def close(self) -> None:
        """obstore lets go of a connection that is idle."""
        self._threads.shutdown(cancel_futures=True)

    def _tag(self, meta: Any, key: str) -> str:
        """What Google asks for is the version, and others ask for the tag of HTTP."""
        tag, version = meta["e_tag"] or "", meta["version"] or ""
        # Google names a version in any case: whether a bucket keeps others it tells nobody who only reads objects.
        self.keeps_old |= bool(version) and not self.url.startswith("gs:")
        if not tag and not version:
            raise RemoteUnfit(
                f"{self.url} gives no tag (ETag) with an object, so a change cannot depend on what was read. Choose "
                "another object store.",
                url=self.url,
                key=key,
                check="tags",
            )
        return f"{tag}{_BETWEEN}{version}" if version else tag

    def _asking(self, action: str, key: str, *, writing: bool = False) -> Asking:
        return Asking(self.url, action, key, writing)

    def _endless(self, prefix: str, listed: int) -> RemoteError:
        return RemoteTooLarge(
            f"{self.url} lists more under {prefix} than is taken in: {MAX_LISTED} objects, in {_LIST_S} s. See what "
            "else writes there, or keep some of the sessions under another prefix.",
            url=self.url,
            key=prefix,
            limit=MAX_LISTED,
            listed=listed,
        )

    def _too_large(self, key: str, most_bytes: int) -> RemoteError:
        return RemoteTooLarge(
            f"{key} in {self.url} is larger than the {most_bytes} bytes that Torpor writes there at most. Something "
            "else wrote it: see what it is, and remove it.",
            url=self.url,
            key=key,
            limit=most_bytes,
        )


def requests_to_put(size_bytes: int) -> int:
    """How many requests an upload of so many bytes is: one for each part, and two around them; or one in all."""
    part_bytes = _part_bytes(size_bytes)
    return 1 if size_bytes <= part_bytes else 2 + -(-size_bytes // part_bytes)


def requests_to_get(spans: Sequence[Span]) -> int:
    """How many requests it is to read parts of objects, as of `get_ranges`."""
    return sum(1 for _ in fetches(spans, _PIECE_BYTES))


def _part_bytes(size_bytes: int) -> int:
    return max(_PART_BYTES, -(-size_bytes // _MOST_PARTS))


def _bounds(request_s: int) -> tuple[ClientConfig, RetryConfig]:
    """The time of one request, and when no other one is tried in its place."""
    client: ClientConfig = {"connect_timeout": timedelta(seconds=_CONNECT_S), "timeout": timedelta(seconds=request_s)}
    retries: RetryConfig = {
        "max_retries": _RETRIES,
        "retry_timeout": timedelta(seconds=request_s),
        "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=2), "base": 2},
    }
    return client, retries


def _give_up(coming: Iterable[_Coming]) -> None:
    """Ask for nothing more; what is under way comes for nobody."""
    for _, asked in coming:
        asked.cancel()


def _parts(fetched: Iterator[tuple[Fetch, memoryview | None]], spans: Sequence[Span]) -> Iterator[Part | None]:
    """The parts that were asked for, of what requests bring: each as soon as its last byte is there."""
    number = 0
    pieces: Part | None = ()
    for fetch, data in fetched:
        for part, first, end in fetch.shares:
            while number < part:
                yield ()
                number += 1
            share = None if data is None else data[first - fetch.first : end - fetch.first]
            pieces = None if share is None or pieces is None else [*pieces, share]
            if end == sum(spans[part][1:]):
                yield pieces
                number, pieces = part + 1, ()
    while number < len(spans):
        yield ()
        number += 1


def _counted(parts: Iterable[bytes], size_bytes: int, failed: list[BaseException]) -> Iterator[bytes]:
    """The parts, which have to be so many bytes. What they raise is kept in `failed`: obstore raises alike."""
    came = 0
    try:
        for part in parts:
            came += len(part)
            if came > size_bytes:
                break
            yield part
        if came != size_bytes:
            raise ValueError(f"{size_bytes} bytes were to come, and not {came}")
    except GeneratorExit:
        raise
    except BaseException as error:
        failed.append(error)
        raise


def _ns(moment: datetime) -> int:
    """Nanoseconds since 1970; what is before 1970 counts as 0."""
    return max(int(moment.timestamp()) * 10**9 + moment.microsecond * 1000, 0)
