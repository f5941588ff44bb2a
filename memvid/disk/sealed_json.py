"""JSON files with their own digest, which shows damage, such as store.json and marks.json.

Owns their form: canonical JSON (keys sorted, no spaces, ASCII, a newline at the end) with a format, a version, and a
digest over all the rest.

Rule: every later version takes the digest in the same way, so that damage is not mistaken for a later version.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from blake3 import blake3

from ..errors import UnsupportedFormat

UNDECODED: Final = (ValueError, TypeError, KeyError, AttributeError, RecursionError)
"""What the reading of a malformed file raises, beside errors of the store."""

_DIGEST: Final = "digest"
_NODE_STARTS: Final = (b"[", b"{", b",")


@dataclass(frozen=True, slots=True)
class SealedFormat:
    """A kind of file: its name, the version that is written and read, and how large it may be."""

    name: str
    version: int
    max_bytes: int
    max_nodes: int

    def encode(self, fields: Mapping[str, Any]) -> bytes:
        """The file's bytes: the same fields give the same bytes."""
        rest = {**fields, "format": self.name, "version": self.version}
        return _canonical({**rest, _DIGEST: _digest(rest)})

    def decode(self, data: bytes, path: str) -> dict[str, Any]:
        """The fields of a file that equals the output of `encode` in every byte.

        Raises:
            UnsupportedFormat: a later version, and undamaged.
            ValueError, TypeError, RecursionError: anything else; `reason_of` puts it in words.
        """
        document = self._parse(data)
        if document.pop(_DIGEST, None) != _digest(document):
            raise ValueError("its digest does not fit its content")
        name, version = document.pop("format", None), document.pop("version", None)
        if name != self.name:
            raise ValueError(f"it does not say that it is a {self.name}")
        if type(version) is int and version > self.version:
            raise UnsupportedFormat(
                f"{path} has version {version}; this program reads version {self.version}. Use the Torpor that wrote "
                "it. Nothing was touched.",
                path=path,
                found=version,
                supported=self.version,
            )
        if self.encode(document) != data:  # another version, spaces, order, a key twice, other numbers
            raise ValueError("it is not in the form in which it is written")
        return document

    def _parse(self, data: bytes) -> dict[str, Any]:
        if len(data) > self.max_bytes:
            raise ValueError(f"it has more than {self.max_bytes} bytes")
        if sum(map(data.count, _NODE_STARTS)) > self.max_nodes:
            raise ValueError(f"it holds more than {self.max_nodes} values")
        document = json.loads(data.decode("ascii"))
        if not isinstance(document, dict):
            raise ValueError("it is not a map")  # noqa: TRY004 - one kind of error for all that is malformed
        return document


def reason_of(error: Exception) -> str:
    """Why a file was not read, as part of a sentence."""
    return "it is nested too deep" if isinstance(error, RecursionError) else str(error).rstrip(".")[:300]


def _canonical(document: Mapping[str, Any]) -> bytes:
    return (json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False) + "\n").encode("ascii")


def _digest(rest: Mapping[str, Any]) -> str:
    return blake3(_canonical(rest)).hexdigest()
