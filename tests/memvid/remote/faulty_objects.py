"""An object store in memory that does wrong what a plan says, for sweeps within a process.

`MemoryObjects` is the object store itself, and does nothing wrong. Each client of it has a `FaultyObjects` of its own,
which counts the client's requests from 0, keeps what they were, and asks its plan what goes wrong with each:

    bucket = MemoryObjects()
    mine = FaultyObjects(bucket, {3: "lost"})        # the client's fourth request lands, and its answer is lost
    mine = FaultyObjects(bucket, lambda asked: "killed_before" if asked.verb == "replace" else None)

A sweep runs its scenario once without a fault, and reads `asked`; then once for each request and each of `FAULTS` that
means something for it (`faults_of`).
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from torpor.memvid.errors import RemoteRefused, RemoteTooLarge, RemoteUnclear, RemoteUnreachable
from torpor.memvid.remote.objects import Entry, Object, Part, Span, parts_of

Fault = Literal[
    "unreachable",  # no answer; a write has not landed
    "refused",  # the object store takes no such request
    "lost",  # a write has landed, its answer was lost: it raises RemoteUnclear
    "unclear",  # a write has not landed, and raises RemoteUnclear all the same
    "conflict",  # a conditional write has not landed, and says that another object is there (409)
    "landed_twice",  # a conditional write has landed, and says that another object is there: it met itself
    "cut",  # the first half of what was asked for comes, or of the parts is taken
    "flipped",  # one bit of what was read is another
    "swapped",  # what was read is the content of another object
    "shortened",  # half of what was read is there, and nothing says that more should be
    "replayed",  # what was read is what the object held before it was last written
    "stale",  # a listing lacks the object that was written last, or has one that was removed
    "killed_before",  # the client's process ends before the request
    "killed_after",  # and behind it
]
FAULTS: Final[tuple[Fault, ...]] = Fault.__args__

_WRITES: Final = ("create", "replace", "put", "remove")
_OF_ALL: Final = ("unreachable", "refused", "killed_before", "killed_after")
_OF_READ_BYTES: Final = ("cut", "flipped", "swapped", "shortened", "replayed")
_MEANS_SOMETHING: Final[dict[str, tuple[str, ...]]] = {
    "get": (*_OF_ALL, "flipped", "swapped", "shortened", "replayed"),
    "size": _OF_ALL,
    "get_ranges": (*_OF_ALL, *_OF_READ_BYTES),
    "create": (*_OF_ALL, "lost", "unclear", "conflict", "landed_twice"),
    "replace": (*_OF_ALL, "lost", "unclear", "conflict", "landed_twice"),
    "put": (*_OF_ALL, "lost", "unclear", "cut"),
    "remove": (*_OF_ALL, "lost", "unclear"),
    "entries": (*_OF_ALL, "stale"),
}


_PIECE_BYTES: Final = 777
_NUMBERS: Final = itertools.count()


class Killed(BaseException):
    """The process that asked is no more: nothing of it may run after this."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request: its number from 0, the method of `Objects`, the key, and how many bytes it sent or was to get."""

    number: int
    verb: str
    key: str
    size_bytes: int = 0


def faults_of(asked: Asked) -> list[Fault]:
    """The faults that mean something for a request."""
    return [fault for fault in FAULTS if fault in _MEANS_SOMETHING[asked.verb]]


class MemoryObjects:
    """Objects in memory. `written` has each content that a key ever had, oldest first, None for a removal. now_ns: the
    object store's clock."""

    keeps_old = False

    def place(self) -> object:
        return self.url

    def __init__(self) -> None:
        self.url = "memory://"
        self.now_ns = 0
        self.written: dict[str, list[bytes | None]] = {}
        self._modified_ns: dict[str, int] = {}
        self.last_key = ""
        self._lock = threading.Lock()

    def copy(self) -> MemoryObjects:
        """Another one, with what this one has now, under another URL: no store has seen a head of it."""
        other = MemoryObjects()
        other.url = f"memory://{next(_NUMBERS)}"
        other.now_ns = self.now_ns
        other.written = {key: list(each) for key, each in self.written.items()}
        other._modified_ns = dict(self._modified_ns)
        return other

    def content(self, key: str) -> bytes | None:
        """What is there, beside every fault."""
        parts_of(key)
        return self.written.get(key, [None])[-1]

    def keys(self) -> set[str]:
        return {key for key in self.written if self.content(key) is not None}

    def set(self, key: str, data: bytes | None) -> None:
        """Write beside every fault, whatever is there."""
        with self._lock:
            self._write(key, data)

    def get(self, key: str, most_bytes: int) -> Object | None:
        with self._lock:
            data = self.content(key)
            if data is None:
                return None
            if len(data) > most_bytes:
                raise RemoteTooLarge(f"{key} is too large.", limit=most_bytes)
            return Object(data, self._tag(key))

    def size(self, key: str) -> int | None:
        data = self.content(key)
        return None if data is None else len(data)

    def get_ranges(self, spans: Sequence[Span]) -> Iterator[Part | None]:
        for key, first, size in spans:
            data = self.content(key)
            yield None if data is None else _pieces(data[first : first + size])

    def create(self, key: str, data: bytes) -> str | None:
        with self._lock:
            return self._write(key, data) if self.content(key) is None else None

    def replace(self, key: str, data: bytes, tag: str) -> str | None:
        with self._lock:
            there = self.content(key) is not None and self._tag(key) == tag
            return self._write(key, data) if there else None

    def put(self, key: str, parts: Iterable[bytes], size_bytes: int) -> None:
        parts_of(key)
        data = b"".join(parts)
        if len(data) != size_bytes:
            raise ValueError(f"{key} was to have {size_bytes} bytes, not {len(data)}")
        with self._lock:
            self._write(key, data)

    def remove(self, key: str) -> None:
        with self._lock:
            if self.content(key) is not None:
                self._write(key, None)

    def entries(self, prefix: str) -> Iterator[Entry]:
        with self._lock:
            found = sorted(key for key in self.keys() if key.startswith(prefix))
            return iter([Entry(key, len(self.content(key) or b""), self._modified_ns[key]) for key in found])

    def close(self) -> None:
        pass

    def _write(self, key: str, data: bytes | None) -> str:
        self.written.setdefault(key, []).append(None if data is None else bytes(data))
        self._modified_ns[key] = self.now_ns
        self.last_key = key
        return self._tag(key)

    def _tag(self, key: str) -> str:
        return f'"{len(self.written[key])}"'


def _pieces(part: bytes) -> Part:
    """A part as the end of one request and the beginning of others, wherever these are cut."""
    return [part[at : at + _PIECE_BYTES] for at in range(0, len(part), _PIECE_BYTES)]


Plan = Mapping[int, Fault] | Callable[[Asked], Fault | None]


class FaultyObjects:
    """What one client sees of an object store. within: called before each request, for what happens in between."""

    def __init__(
        self, bucket: MemoryObjects, plan: Plan | None = None, within: Callable[[Asked], None] = lambda asked: None
    ) -> None:
        self.bucket = bucket
        self.plan: Plan = plan or {}
        self.within = within
        self.asked: list[Asked] = []
        self._lock = threading.Lock()
        self._killed = False

    @property
    def url(self) -> str:
        return self.bucket.url

    def place(self) -> object:
        return self.bucket.place()

    @property
    def keeps_old(self) -> bool:
        return self.bucket.keeps_old

    def get(self, key: str, most_bytes: int) -> Object | None:
        fault = self._ask("get", key)
        found = self.bucket.get(key, most_bytes)
        self._answer(fault)
        if found is None:
            return None
        return Object(self._spoiled(fault, key, found.data, [(0, len(found.data))]), found.tag)

    def size(self, key: str) -> int | None:
        fault = self._ask("size", key)
        size = self.bucket.size(key)
        self._answer(fault)
        return size

    def get_ranges(self, spans: Sequence[Span]) -> Iterator[Part | None]:
        """A request for each object."""
        for key, of_key in itertools.groupby(spans, key=lambda span: span[0]):
            yield from self._ranges(key, [(first, size) for _, first, size in of_key])

    def _ranges(self, key: str, spans: Sequence[tuple[int, int]]) -> Iterator[Part | None]:
        fault = self._ask("get_ranges", key, sum(size for _, size in spans))
        data = self.bucket.content(key)
        self._answer(fault)
        if data is None:
            yield from [None] * len(spans)
            return
        spoiled = self._spoiled(fault, key, data, spans)
        whole = (_pieces(spoiled[first : first + size]) for first, size in spans)
        yield from self._cut(whole, len(spans)) if fault == "cut" else whole

    def create(self, key: str, data: bytes) -> str | None:
        fault = self._ask("create", key, len(data))
        return self._conditional(fault, lambda: self.bucket.create(key, data))

    def replace(self, key: str, data: bytes, tag: str) -> str | None:
        fault = self._ask("replace", key, len(data))
        return self._conditional(fault, lambda: self.bucket.replace(key, data, tag))

    def put(self, key: str, parts: Iterable[bytes], size_bytes: int) -> None:
        fault = self._ask("put", key, size_bytes)
        taken = []
        for part in parts:
            taken.append(bytes(part))
            if fault == "cut" and 2 * sum(map(len, taken)) >= size_bytes:
                raise RemoteUnreachable("The connection was cut.")
        if fault != "unclear":
            self.bucket.put(key, taken, size_bytes)
        self._answer(fault)

    def remove(self, key: str) -> None:
        fault = self._ask("remove", key)
        if fault != "unclear":
            self.bucket.remove(key)
        self._answer(fault)

    def entries(self, prefix: str) -> Iterator[Entry]:
        fault = self._ask("entries", prefix)
        found = list(self.bucket.entries(prefix))
        self._answer(fault)
        last = self.bucket.last_key
        if fault == "stale" and last.startswith(prefix):
            there = self.bucket.content(last) is not None
            found = [each for each in found if each.key != last] if there else [*found, Entry(last, 1, 0)]
        return iter(found)

    def close(self) -> None:
        pass

    def _ask(self, verb: str, key: str, size_bytes: int = 0) -> Fault | None:
        """What is wrong with this request. Raises what comes before anything lands."""
        with self._lock:
            if self._killed:
                raise Killed("a process that was killed asked again")
            asked = Asked(len(self.asked), verb, key, size_bytes)
            self.asked.append(asked)
        self.within(asked)
        fault = self.plan(asked) if callable(self.plan) else self.plan.get(asked.number)
        if fault == "killed_before":
            self._kill()
        if fault == "unreachable":
            raise RemoteUnreachable(f"No answer to request {asked.number}.")
        if fault == "refused":
            raise RemoteRefused(f"Request {asked.number} is refused.")
        assert fault is None or fault in _MEANS_SOMETHING[verb], f"{fault} means nothing for {asked}"
        return fault

    def _answer(self, fault: Fault | None) -> None:
        """Raises what comes instead of an answer."""
        if fault == "killed_after":
            self._kill()
        if fault in ("lost", "unclear"):
            raise RemoteUnclear("The answer was lost.")

    def _kill(self) -> None:
        self._killed = True
        raise Killed

    def _conditional(self, fault: Fault | None, write: Callable[[], str | None]) -> str | None:
        landed = write() if fault not in ("conflict", "unclear") else None
        self._answer(fault)
        return landed if fault != "landed_twice" else None

    def _spoiled(self, fault: Fault | None, key: str, data: bytes, spans: Sequence[tuple[int, int]]) -> bytes:
        """The content of an object as this request reads it, wrong within the last part that is asked for."""
        first, size = spans[-1] if spans else (0, 0)
        middle = min(first + size // 2, len(data) - 1)
        if fault == "flipped" and data:
            return data[:middle] + bytes([data[middle] ^ 0x10]) + data[middle + 1 :]
        if fault == "shortened":
            return data[: max(middle, 0)]
        if fault == "swapped":
            contents = {other: self.bucket.content(other) for other in self.bucket.keys() - {key}}
            folder = key.partition("/")[0]
            beside = sorted(contents, key=lambda other: (other.partition("/")[0] != folder, other))
            return next((found for other in beside if (found := contents[other]) not in (None, data)), b"")
        if fault == "replayed":
            earlier = [each for each in self.bucket.written[key] if each is not None and each != data]
            return earlier[-1] if earlier else data
        return data

    def _cut(self, whole: Iterator[Part], count: int) -> Iterator[Part]:
        for number, part in enumerate(whole):
            if 2 * number >= count - 1:
                raise RemoteUnreachable("The connection was cut.")
            yield part
