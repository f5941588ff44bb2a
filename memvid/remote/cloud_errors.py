"""What an error of obstore means.

Never repeats what such an error says: it may hold a signed address, or the id of a key. So an error of ours has none
for its cause, and tells the status of HTTP and the object store's own word for it, which is one word.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from ..errors import RemoteError, RemoteRefused, RemoteUnclear, RemoteUnreachable

_STATUS: Final = re.compile(r"status code: (\d{3})")
_REASON: Final = re.compile(r"<Code>([A-Za-z]{1,64})</Code>")
_RETRIED: Final = re.compile(r"after \d+ retr")
_NO_BUCKET: Final = frozenset({"NoSuchBucket", "ContainerNotFound"})
_BEHIND_THE_END: Final = re.compile(r"status code: 416|StartTooLarge")
_ASKED_THE_MACHINE: Final = re.compile(r"/latest/(?:api/token|meta-data)|metadata\.google\.|/metadata/identity")
"""Where a machine of a cloud has credentials, asked where the environment has none."""
_LATER: Final = frozenset({408, 409, 425, 429})
"""Statuses that blame the client, and yet mean that it may try again."""


@dataclass(frozen=True, slots=True)
class Asking:
    """A block that asks the object store at `url`: to `action` what is under `key`. writing: it changes something.

    What obstore raises within is raised as RemoteUnreachable, RemoteRefused or RemoteUnclear. That there is no such
    object ends the block, and no more.
    """

    url: str
    action: str
    key: str
    writing: bool = False

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        from obstore.exceptions import BaseError

        if not isinstance(error, BaseError | FileNotFoundError):
            return False
        refused = self._meaning(error)
        if refused is not None:
            raise refused from None
        return True

    def refused(self, status: int | None, reason: str | None) -> RemoteError:
        """The object store takes no such request. reason: its own word."""
        told = reason or ("no right to it" if status is None else f"status {status}")
        return RemoteRefused(
            f"{self.url} refuses to {self.action} {self._what}: {told}. See that the bucket is there, and that the "
            "credentials in the environment may read, write, list and remove in it.",
            **self._facts(status, reason),
        )

    @property
    def _what(self) -> str:
        return self.key or "objects"

    def _facts(self, status: int | None, reason: str | None) -> dict[str, str | int | None]:
        return {"url": self.url, "key": self.key, "action": self.action, "status": status, "reason": reason}

    def unclear(self, status: int | None = None, reason: str | None = None) -> RemoteError:
        """It may have been done."""
        return RemoteUnclear(
            f"{self.url} did not say whether it could {self.action} {self._what}{_told(status, reason)}. What it has "
            "now must be read back.",
            **self._facts(status, reason),
        )

    def _meaning(self, error: Exception) -> RemoteError | None:
        """None: there is no such object."""
        from obstore import exceptions

        text = str(error)
        status = int(found[1]) if (found := _STATUS.search(text)) else None
        reason = found[1] if (found := _REASON.search(text)) else None
        # What refuses the last try says nothing of those before it.
        if self.writing and _RETRIED.search(text):
            return self.unclear(status, reason)
        if isinstance(error, FileNotFoundError) and reason not in _NO_BUCKET:
            return None
        if _ASKED_THE_MACHINE.search(text):
            return self.refused(None, "there are no credentials in the environment")
        forbidden = (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError, exceptions.NotSupportedError)
        blamed = status is not None and 400 <= status < 500 and status not in _LATER
        if blamed or isinstance(error, (*forbidden, FileNotFoundError)):
            return self.refused(status, reason)
        if self.writing:
            return self.unclear(status, reason)
        return RemoteUnreachable(
            f"{self.url} could not {self.action} {self._what}{_told(status, reason)}. Look at the network, and at the "
            "endpoint that the environment names. Nothing is lost here; try again later.",
            **self._facts(status, reason),
        )


def asked_behind_the_end(error: Exception) -> bool:
    """Whether a part was asked for that begins behind the end of its object."""
    return _BEHIND_THE_END.search(str(error)) is not None


def _told(status: int | None, reason: str | None) -> str:
    return f" (it said {reason or status})" if status is not None else ""
