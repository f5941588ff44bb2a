"""Objects of a remote that others hold, sealed: their names and contents are encrypted, and nothing else is believed.

Lies over any other objects, so that all above is as with a plain remote.

    heads/<base32>              a name: the first part of the key, then the rest by AES-256-SIV, in parts of NAME_CHARS
    salt, segment, segment, …   a content: SEGMENT_BYTES a segment by AES-256-GCM, the last one shorter, or as long

Rules:
- A key has one name, so that an object is found without a listing. The first part is proven with the rest.
- A content has a key of its own, by HKDF-SHA256 from its salt and the key that it lies under: what lies under the name
  of another, and a segment of another content, is refused. The salt is random, so no key encrypts twice.
- A segment is encrypted under its number, and under whether it is the last: none is moved, left out or cut off.
- A name that is none under this key is nobody's: no listing has it.
- What an object held earlier is as good as what it holds now. Who needs the newest finds that out: heads do.
"""

from __future__ import annotations

import base64
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from ..errors import CorruptObject, InvalidRemote, RemoteTooLarge
from ..limits import KIB
from .objects import Entry, Object, Objects, OverObjects, Part, Span, parts_of

KEY_BYTES: Final = 32
SALT_BYTES: Final = 32
SEGMENT_BYTES: Final = 256 * KIB
"""Of a content: a range needs the segments that it lies in."""
TAG_BYTES: Final = 16
NAME_CHARS: Final = 200
"""Of a part of a name: `objects.MAX_PART_CHARS` and file systems take more."""

_SEALED_SEGMENT: Final = SEGMENT_BYTES + TAG_BYTES
_NONCE_BYTES: Final = 12
_NAMES, _CONTENTS, _CHECK = "names", "contents", "check"


class SealedObjects(OverObjects):
    """The sealed ones among other objects. Sizes are those of the contents, without what sealing adds.

    objects: where they lie. key: KEY_BYTES of them, of this remote alone. Raises InvalidRemote: a package is missing.

    Methods raise as `Objects`, and those that read also CorruptObject. A key of one part is none here.
    """

    def __init__(self, objects: Objects, key: bytes) -> None:
        try:
            from cryptography.hazmat.primitives.ciphers.aead import AESSIV
        except ModuleNotFoundError:
            raise InvalidRemote(
                f"To seal {objects.url} a package is needed that is not installed: pip install 'torpor[remote]'.",
                url=objects.url,
            ) from None
        super().__init__(objects)
        self._names = AESSIV(_derived(key, b"", _NAMES, 2 * KEY_BYTES))
        self._contents = _derived(key, b"", _CONTENTS, KEY_BYTES)
        self.key_check: str = _derived(key, b"", _CHECK, KEY_BYTES).hex()
        """Tells this key from others, and nothing of it."""

    def get(self, key: str, most_bytes: int) -> Object | None:
        try:
            found = self._objects.get(self.name_of(key), sealed_bytes(most_bytes))
        except RemoteTooLarge as error:
            raise RemoteTooLarge(error.message, **{**error.details, "key": key, "limit": most_bytes}) from error
        return None if found is None else Object(self._opened(key, found.data), found.tag)

    def size(self, key: str) -> int | None:
        size = self._objects.size(self.name_of(key))
        return None if size is None else content_bytes(size)

    def get_ranges(self, spans: Sequence[Span]) -> Iterator[Part | None]:
        runs = [(key, list(of_key)) for key, of_key in itertools.groupby(spans, key=lambda span: span[0])]
        wanted = [self._wanted(key, of_key) for key, of_key in runs]
        parts = self._objects.get_ranges(list(itertools.chain.from_iterable(wanted)))
        for (key, of_key), its in zip(runs, wanted, strict=True):
            yield from self._ranges(key, of_key, itertools.islice(parts, len(its)))

    def _wanted(self, key: str, spans: Sequence[Span]) -> list[Span]:
        """What is asked for of one object: its salt, then the segments that the spans lie in, one that two neighbors
        share once."""
        name = self.name_of(key)
        numbers = itertools.groupby(number for _, first, size in spans for number in _segments_of(first, size))
        wanted = [(name, SALT_BYTES + each * _SEALED_SEGMENT, _SEALED_SEGMENT) for each, _ in numbers]
        return [(name, 0, SALT_BYTES), *wanted] if wanted else []

    def create(self, key: str, data: bytes) -> str | None:
        return self._objects.create(self.name_of(key), b"".join(self._sealed(key, [data], len(data))))

    def replace(self, key: str, data: bytes, tag: str) -> str | None:
        return self._objects.replace(self.name_of(key), b"".join(self._sealed(key, [data], len(data))), tag)

    def put(self, key: str, parts: Iterable[bytes], size_bytes: int) -> None:
        self._objects.put(self.name_of(key), self._sealed(key, parts, size_bytes), sealed_bytes(size_bytes))

    def remove(self, key: str) -> None:
        self._objects.remove(self.name_of(key))

    def entries(self, prefix: str) -> Iterator[Entry]:
        first, slash, _ = prefix.partition("/")
        for entry in self._objects.entries(first + slash):
            key = self.key_of(entry.key)
            if key is not None and key.startswith(prefix):
                yield Entry(key, content_bytes(entry.size_bytes), entry.modified_ns)

    # --- names

    def name_of(self, key: str) -> str:
        """Under which name an object lies. Raises ValueError: that is no key, or one of one part."""
        first, *rest = parts_of(key)
        if not rest:
            raise ValueError(f"{key!r} is no key of a sealed remote: it has one part")
        sealed = self._names.encrypt("/".join(rest).encode("ascii"), [first.encode("ascii")])
        text = base64.b32encode(sealed).decode("ascii").rstrip("=").lower()
        return "/".join([first, *(text[at : at + NAME_CHARS] for at in range(0, len(text), NAME_CHARS))])

    def key_of(self, name: str) -> str | None:
        """The key of an object that lies under this name; None: it is none of ours."""
        from cryptography.exceptions import InvalidTag

        first, _, rest = name.partition("/")
        text = rest.replace("/", "").upper()
        try:
            sealed = base64.b32decode(text + "=" * (-len(text) % 8))
            key = f"{first}/{self._names.decrypt(sealed, [first.encode('ascii')]).decode('ascii')}"
            return key if self.name_of(key) == name else None
        except (InvalidTag, ValueError):
            return None

    # --- contents

    def _sealed(self, key: str, parts: Iterable[bytes], size_bytes: int) -> Iterator[bytes]:
        """A content as it is written, one segment at a time. Raises what the parts raise, and ValueError: they are not
        so many bytes."""
        salt = os.urandom(SALT_BYTES)
        cipher = _Cipher(self._contents, key, salt)
        yield salt
        for number, segment in enumerate(_segments(parts, size_bytes)):
            yield cipher.seal(number, segment, is_last=(number + 1) * SEGMENT_BYTES >= size_bytes)

    def _opened(self, key: str, data: bytes) -> bytes:
        """A whole content."""
        cipher = _Cipher(self._contents, key, data[:SALT_BYTES])
        count = max(-(-(len(data) - SALT_BYTES) // _SEALED_SEGMENT), 1)
        parts = []
        for number in range(count):
            at = SALT_BYTES + number * _SEALED_SEGMENT
            part = cipher.open(number, data[at : at + _SEALED_SEGMENT], is_last=number == count - 1)
            if part is None:
                raise self._corrupt(key)
            parts.append(part)
        return b"".join(parts)

    def _ranges(self, key: str, spans: Sequence[Span], parts: Iterator[Part | None]) -> Iterator[Part | None]:
        """The spans of one object. parts: as `_wanted`."""
        salt = next(parts, ())
        cipher = None if salt is None else _Cipher(self._contents, key, b"".join(salt))
        held, data, is_last = -1, memoryview(b""), False
        for _, first, size in spans:
            pieces: list[memoryview] = []
            for number in _segments_of(first, size):
                if number != held:
                    sealed = next(parts, ())
                    if cipher is None or sealed is None:
                        cipher = None  # it is not there, or went meanwhile
                        continue
                    if not any(sealed) and (not number or (pieces and not is_last)):
                        raise self._corrupt(key)  # cut off behind a segment that is not the last
                    held, (data, is_last) = number, self._segment(cipher, key, number, sealed)
                start = number * SEGMENT_BYTES
                pieces.append(data[max(first - start, 0) : first + size - start])
            yield None if cipher is None else pieces

    def _segment(self, cipher: _Cipher, key: str, number: int, part: Part) -> tuple[memoryview, bool]:
        """A segment, and whether it is the last. One that is not there lies behind the end, as far as is known."""
        sealed = part[0] if len(part) == 1 else b"".join(part)
        if not sealed:
            return memoryview(b""), True
        # A full one may be the last all the same.
        for is_last in (False, True) if len(sealed) == _SEALED_SEGMENT else (True,):
            if (data := cipher.open(number, sealed, is_last=is_last)) is not None:
                return memoryview(data), is_last
        raise self._corrupt(key)

    def _corrupt(self, key: str) -> CorruptObject:
        path, name = f"{self.url}/{key}", self.name_of(key)
        return CorruptObject(
            f"{path}, there as {name}, is not what was written under this name: it was damaged or replaced. Put it "
            "back as it was, from what the object store keeps of earlier contents; of a version, `torpor push` at a "
            "machine that has it writes it again.",
            path=path,
            name=name,
        )


class _Cipher:
    """Encrypts the segments of one content."""

    def __init__(self, contents_key: bytes, key: str, salt: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._aead = AESGCM(_derived(contents_key, salt, f"{_CONTENTS} {key}", KEY_BYTES))

    def seal(self, number: int, data: bytearray, *, is_last: bool) -> bytes:
        return self._aead.encrypt(_nonce(number, is_last=is_last), data, None)

    def open(self, number: int, sealed: bytes | memoryview, *, is_last: bool) -> bytes | None:
        """None: it is no such segment of this content."""
        from cryptography.exceptions import InvalidTag

        try:
            return self._aead.decrypt(_nonce(number, is_last=is_last), sealed, None)
        except InvalidTag:
            return None


def sealed_bytes(size_bytes: int) -> int:
    """How long a content of this length is as it lies there."""
    return SALT_BYTES + size_bytes + TAG_BYTES * max(-(-size_bytes // SEGMENT_BYTES), 1)


def content_bytes(size_bytes: int) -> int:
    """How long the content is of what is so long there; 0 also if no content is."""
    segments = -(-(size_bytes - SALT_BYTES) // _SEALED_SEGMENT)
    size = max(size_bytes - SALT_BYTES - TAG_BYTES * segments, 0)
    return size if sealed_bytes(size) == size_bytes else 0


def _segments_of(first: int, size_bytes: int) -> range:
    """The numbers of the segments that a part lies in."""
    return range(first // SEGMENT_BYTES, -(-(first + size_bytes) // SEGMENT_BYTES) if size_bytes else 0)


def _segments(parts: Iterable[bytes], size_bytes: int) -> Iterator[bytearray]:
    """Parts anew as segments, one at least. Raises ValueError: they are not so many bytes."""
    held, came = bytearray(), 0
    for part in parts:
        came += len(part)
        if came > size_bytes:
            break
        held += part
        while len(held) >= SEGMENT_BYTES:
            yield held[:SEGMENT_BYTES]
            del held[:SEGMENT_BYTES]
    if came != size_bytes:
        raise ValueError(f"{size_bytes} bytes were to come, and not {came}")
    if held or not size_bytes:
        yield held


def _nonce(number: int, *, is_last: bool) -> bytes:
    return (2 * number + is_last).to_bytes(_NONCE_BYTES, "big")


def _derived(key: bytes, salt: bytes, what: str, size_bytes: int) -> bytes:
    """A key of its own for each use and salt."""
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(SHA256(), size_bytes, salt, f"torpor.sealed/1 {what}".encode("ascii")).derive(key)
