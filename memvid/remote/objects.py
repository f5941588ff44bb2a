"""What a remote needs of an object store: objects under one prefix, with conditional writes.

Owns the words, and no protocol: `cloud_objects` speaks to S3, Google and Azure, `folder_objects` to a shared folder.

Rules:
- Keys are ours: parts of lower-case letters, digits and `. - _ = %` with a slash between, none empty, none that begins
  with a dot, of `MAX_PART_CHARS` at most. Upper case is none of them: some file systems take it for lower case.
- An answer is believed only if it is one. A write whose answer was lost raises `RemoteUnclear`: the caller reads back
  what is there, and compares.
- So it does where a conditional write says that another object is there. A client asks again where an answer is late,
  and the second request meets what the first one wrote; and some object stores say it of a write that met another,
  though neither landed (409).
- A missing object is a value, None.
- Every method may be called from several threads, and gives up after a bounded time.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

Span = tuple[str, int, int]
"""A part of an object: its key, the first byte, and how many bytes."""
Part = Sequence[bytes | memoryview]
"""What came of it: pieces, one behind the other. They are not put together, for that would copy them."""

MAX_PART_CHARS: Final = 240
"""Of a part of a key: file systems take names of 255 bytes."""

_PART: Final = re.compile(rf"[a-z0-9_=%-][a-z0-9._=%-]{{0,{MAX_PART_CHARS - 1}}}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Object:
    """A small object, whole. tag: of this content under this key, for `replace`."""

    data: bytes
    tag: str


@dataclass(frozen=True, slots=True)
class Entry:
    """An object in a listing, which may be stale. modified_ns: by the object store's clock, since 1970."""

    key: str
    size_bytes: int
    modified_ns: int


class Objects(Protocol):
    """The objects under one prefix.

    Every method raises RemoteUnreachable (no answer, or one that says to try again later) and RemoteRefused (no right
    to it, or a request that the object store does not take). Writes raise also RemoteUnclear.
    """

    @property
    def url(self) -> str:
        """The place, for people: without credentials."""

    def place(self) -> object:
        """What is at the URL now: another value once that is another place, which has to be tried anew. An object store
        has one, and is not asked."""

    @property
    def keeps_old(self) -> bool:
        """Whether the object store has said that it keeps what is removed or replaced, as versions. It says so with an
        object that was read or written."""

    def get(self, key: str, most_bytes: int) -> Object | None:
        """A small object. Raises RemoteTooLarge, before more than `most_bytes` are taken in."""

    def size(self, key: str) -> int | None:
        """How many bytes an object has."""

    def get_ranges(self, spans: Sequence[Span]) -> Iterator[Part | None]:
        """Parts of objects in the order asked for, whatever objects they are of: some are on their way while the caller
        looks at one. None: there is no such object. One that ends early gives what there is of it. Nothing is asked
        for before the first part is."""

    def create(self, key: str, data: bytes) -> str | None:
        """Make a small object, and give its tag; None: there is one under the key, which is as it was."""

    def replace(self, key: str, data: bytes, tag: str) -> str | None:
        """Replace the object that has this tag, and give the new one; None: another is there, or none, and it is as it
        was."""

    def put(self, key: str, parts: Iterable[bytes], size_bytes: int) -> None:
        """Write an object of any size, whatever is under the key. Nothing is there before the last part has arrived.
        What the parts raise is raised. Raises ValueError: they are not so many bytes."""

    def remove(self, key: str) -> None:
        """Remove an object, if it is there."""

    def entries(self, prefix: str) -> Iterator[Entry]:
        """The objects whose keys begin so. prefix: whole parts, with a slash behind each; empty: all."""

    def close(self) -> None:
        """Let go of connections. Idempotent."""


class OverObjects:
    """What lies over other objects, and has their place and their end."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects

    @property
    def url(self) -> str:
        return self._objects.url

    def place(self) -> object:
        return self._objects.place()

    @property
    def keeps_old(self) -> bool:
        return self._objects.keeps_old

    def close(self) -> None:
        self._objects.close()


def is_key(text: str) -> bool:
    return all(map(_PART.fullmatch, text.split("/")))


def parts_of(key: str) -> list[str]:
    """The parts of a key. Raises ValueError: it is none."""
    if not is_key(key):
        raise ValueError(f"{key!r} is no key of a remote")
    return key.split("/")
