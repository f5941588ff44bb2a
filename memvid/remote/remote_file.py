"""remote.json: whether a remote is sealed, and by which key. The first object of a remote, and never changed.

Rules:
- It is read before anything is written there. A remote that is not as its users were told is refused: by no mistake do
  plain and sealed objects lie in one.
- It lies there plain, and protects from mistakes alone. Whoever holds the remote may write another one: then it is
  refused, and no machine with a key ever writes anything plain.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from ..disk.sealed_json import UNDECODED, SealedFormat, reason_of
from ..errors import CorruptObject, RemoteKeyWrong, RemoteUnclear, StoreError, UnsupportedFormat
from .heads import HEADS, uri_in
from .objects import Objects
from .sealed_objects import SealedObjects

REMOTE_FILE: Final = "remote.json"
_MAX_BYTES: Final = 4096
_FORMAT: Final = SealedFormat("torpor.remote", 1, _MAX_BYTES, 16)


class RemoteFile:
    """The file of one remote. objects: plain, where it lies. sealed: those over them, if the remote is to be sealed."""

    def __init__(self, objects: Objects, sealed: SealedObjects | None) -> None:
        self._objects = objects
        self._sealed = sealed
        self._path = f"{objects.url}/{REMOTE_FILE}"
        self._key_check = None if sealed is None else sealed.key_check

    def is_there(self) -> bool:
        """Whether there is one, which says what it is to say. There is none in a new remote.

        Raises:
            RemoteKeyWrong: the remote is not sealed by this key, or is sealed, and should not be.
            CorruptObject; UnsupportedFormat: of a later version; and as `Objects`.
        """
        found = self._objects.get(REMOTE_FILE, _MAX_BYTES)
        if found is None:
            # A remote of before, or one that lost the file. Heads are the first that a session has there.
            meaning: Callable[[str], object] = uri_in if self._sealed is None else self._sealed.key_of
            if any(meaning(each.key) is None for each in self._objects.entries(HEADS)):
                how = "sealed, and no key is given" if self._sealed is None else "not sealed by this key"
                raise self._wrong(f"has sessions that were {how}")
            return False
        key_check = self._key_check_in(found.data)
        if key_check == self._key_check:
            return True
        if self._key_check is None:
            raise self._wrong("is sealed, and no key is given")
        raise self._wrong("is not sealed, and a key is given" if key_check is None else "is sealed by another key")

    def make(self) -> None:
        """Write it. Raises as `is_there`, if another machine was first, and as `Objects`."""
        unclear: RemoteUnclear | None = None
        try:
            if self._objects.create(REMOTE_FILE, _FORMAT.encode({"key_check": self._key_check})) is not None:
                return
        except RemoteUnclear as error:
            unclear = error
        if not self.is_there():
            raise unclear or RemoteUnclear(f"{self._path} was refused, and is not there. Try again.", key=REMOTE_FILE)

    def _key_check_in(self, data: bytes) -> str | None:
        try:
            fields = _FORMAT.decode(data, self._path)
            key_check = fields["key_check"]
            if fields.keys() != {"key_check"} or not isinstance(key_check, str | None):
                raise ValueError("it has other fields")
        except (*UNDECODED, StoreError) as error:
            if isinstance(error, UnsupportedFormat):
                raise
            raise CorruptObject(
                f"{self._path} is damaged: {reason_of(error)}. Put it back from what the object store keeps of earlier "
                "contents, or remove it: the next daemon makes it anew, with the key that all machines have.",
                path=self._path,
                name=REMOTE_FILE,
            ) from error
        return key_check

    def _wrong(self, how: str) -> RemoteKeyWrong:
        return RemoteKeyWrong(
            f"{self._objects.url} {how}. Serve it as all its machines do: with the same key (--remote-key or "
            "--remote-key-command), or all without; or choose an empty place. Nothing was written there.",
            url=self._objects.url,
        )
