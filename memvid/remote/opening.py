"""Opens a remote by its URL.

Credentials and endpoints come from the environment, as the clouds' own tools find them: AWS_ACCESS_KEY_ID,
AWS_ENDPOINT_URL, GOOGLE_APPLICATION_CREDENTIALS, AZURE_STORAGE_ACCOUNT_NAME and their kin. A URL that has some in it is
refused, and what it has is not repeated.

A remote has one URL, however it is spelled: what a store remembers of one is remembered by it.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import SplitResult, unquote, urlsplit

from ..errors import InvalidRemote
from ..folder.store_file import STORE_FILE
from .cloud_objects import CloudObjects
from .folder_objects import FolderObjects
from .objects import MAX_PART_CHARS, Objects

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

_FORMS: Final = "write s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://CONTAINER/PREFIX or file:///FOLDER"
_BUCKET: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,221}[A-Za-z0-9]", re.ASCII)
_PART: Final = re.compile(rf"[A-Za-z0-9_=-][A-Za-z0-9._=-]{{0,{MAX_PART_CHARS - 1}}}", re.ASCII)
_MAX_PARTS: Final = 16
_MAX_SHOWN_CHARS: Final = 160
_ENDPOINTS: Final = (
    *("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT", "GOOGLE_BASE_URL"),
    *("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
)
_OWN: Final = {"s3": "AWS_", "gs": "GOOGLE_", "az": "AZURE_"}
_IN_PLACE_OF_A_PROFILE: Final = ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE")

_VARIABLES: Final = {  # the kinds of object store, and what the environment says of each
    "s3": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION, AWS_ENDPOINT_URL",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, which names a file",
    "az": "AZURE_STORAGE_ACCOUNT_NAME, and AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN",
}


def open_objects(url: str, store_path: str | None = None) -> Objects:
    """The objects at a URL. Of an object store nothing is asked yet. store_path: of the store that has it as its
    remote; a folder of a store is none, as neither would find its own files whole. The `url` of the objects is in the
    one form that all spellings of a place have: without what is doubled, and a folder by its path without links.

    Raises:
        InvalidRemote: the URL means nothing here, or the environment and what is installed are not enough to open it.
        RemoteUnreachable, RemoteRefused: the folder is not there, or cannot be used.
    """
    place = _Place(url)
    split = place.split
    if split.scheme == "file":
        folder = _folder(place, store_path)
        return FolderObjects(folder, Path(folder).as_uri())
    if split.scheme not in _VARIABLES:
        raise place.invalid(f"there is no remote of that kind: {_FORMS}.")
    if not _BUCKET.fullmatch(split.netloc):
        raise place.invalid(f"it names no bucket and no container: {_FORMS}.")
    parts = [part for part in split.path.split("/") if part]
    if len(parts) > _MAX_PARTS or not all(map(_PART.fullmatch, parts)):
        raise place.invalid(
            f"a prefix has up to {_MAX_PARTS} parts of letters, digits and '. _ = -' with a slash between, and none "
            "begins with a dot."
        )
    one_form = "/".join([f"{split.scheme}://{split.netloc}", *parts])
    return CloudObjects(lambda client, retries: _store(place, "/".join(parts), client, retries), one_form)


@dataclass(frozen=True, slots=True)
class _Place:
    """A URL that may be wrong, or have a secret in it."""

    url: str

    @property
    def split(self) -> SplitResult:
        """Raises InvalidRemote for all that no URL of a remote has."""
        try:
            split = urlsplit(self.url)
        except ValueError:
            raise self.invalid(f"that is no URL: {_FORMS}.") from None
        if not split.scheme:
            hint = f"write file://{self.shown}." if self.url.startswith("/") else f"{_FORMS}."
            raise self.invalid(f"it does not say what kind of place that is: {hint}")
        if "@" in self.url or split.query or split.fragment:
            raise self.invalid("it has more than a place in it. Credentials and endpoints belong in the environment.")
        return split

    @property
    def shown(self) -> str:
        """For people: without what may be a secret."""
        scheme, _, rest = self.url.partition(":")
        if "@" in self.url or (scheme != "file" and re.search("[:;%]", rest)):  # no place has these
            return "The URL"
        place = re.split(r"[?#]", self.url)[0].rstrip("/")
        return place if place.isprintable() and len(place) <= _MAX_SHOWN_CHARS else ascii(place[:_MAX_SHOWN_CHARS])

    def invalid(self, why: str) -> InvalidRemote:
        return InvalidRemote(f"{self.shown} is no remote: {why}", url=self.shown)


def _folder(place: _Place, store_path: str | None) -> str:
    """The path that a file URL names, in the one form that all its spellings have. It is apart from every store."""
    if place.split.netloc not in ("", "localhost"):
        raise place.invalid("another machine's folder has to be mounted here: write file:///FOLDER.")
    path = unquote(place.split.path)
    if not path.startswith("/") or "\0" in path:
        raise place.invalid("a folder is named from the root on: write file:///FOLDER.")
    if os.path.lexists(os.path.join(path, STORE_FILE)):
        raise place.invalid("a store is there. Choose an empty folder outside of every store.")
    path = os.path.realpath(path)
    if store_path is not None:
        both = [path, os.path.realpath(store_path)]
        if os.path.commonpath(both) in both:
            raise place.invalid(
                f"it and the store at {store_path} lie one in the other. Choose a folder apart from it."
            )
    return path


def _store(place: _Place, prefix: str, client: ClientConfig, retries: RetryConfig) -> ObjectStore:
    try:
        from obstore.exceptions import BaseError
        from obstore.store import AzureStore, GCSStore, S3Store
    except ModuleNotFoundError:
        raise InvalidRemote(
            f"{place.shown} needs a package that is not installed: pip install 'torpor[remote]'.", url=place.shown
        ) from None
    scheme, name = place.split.scheme, place.split.netloc
    if scheme == "s3" and os.environ.get("AWS_PROFILE") and not any(map(os.environ.get, _IN_PLACE_OF_A_PROFILE)):
        raise InvalidRemote(
            f"{place.shown} cannot be opened with AWS_PROFILE, for profiles are not read. This puts its "
            'credentials into the environment: eval "$(aws configure export-credentials --format env)"',
            url=place.shown,
        )
    for each in _ENDPOINTS:
        endpoint = os.environ.get(each, "")
        if endpoint and _OWN[scheme] in each and not endpoint.startswith(("http://", "https://")):
            raise InvalidRemote(
                f"{place.shown} cannot be opened: {each} must begin with http:// or https://.", url=place.shown
            )
        if endpoint.startswith("http://"):
            client["allow_http"] = True
    options: dict[str, Any] = {"prefix": prefix or None, "client_options": client, "retry_config": retries}
    try:
        if scheme == "s3":
            # One object needs no request for many, which some that speak like S3 do not know.
            return S3Store(name, disable_bulk_delete=True, **options)
        return GCSStore(name, **options) if scheme == "gs" else AzureStore(name, **options)
    except (BaseError, ValueError, OSError):  # whose text may have a secret in it
        raise InvalidRemote(
            f"{place.shown} cannot be opened with what the environment says of it. See its variables for this object "
            f"store: {_VARIABLES[scheme]}.",
            url=place.shown,
        ) from None
