"""Who may ask over HTTP, and about which sessions.

On the Unix socket the kernel names the user who connects (`connections.py`). On the loopback port every user of the
machine could connect, and so could a page in a browser. There a request needs a token, and a `Host` that is this
machine. A request with an `Origin` comes from a page. It is refused on both, but for the inspector's own page, whose
origin is the very address that it asks; there are no CORS headers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from ...daemon.api.records import Request
from ...daemon.api.verb import Verb
from ...daemon.tasks.pieces import in_pieces
from ..errors import HttpRefused, UnsafeTokenFile
from ..tokens import OWNERS, Tokens
from ..wire.checking import load_request_in_pieces
from ..wire.naming import NAMING, name_in

NOBODYS: Final = ""
"""The namespace of a caller without a token, where none is needed: no session is in it."""

_HOSTS: Final = ("127.0.0.1", "localhost", "[::1]")


@dataclass(frozen=True, slots=True)
class Caller:
    """The client of a request. namespace: the only one whose sessions it may name; None on the Unix socket, whose user
    may name any."""

    namespace: str | None = None

    @property
    def is_owner(self) -> bool:
        """Whether it may be told of all namespaces: on the Unix socket, and with a token of `default`."""
        return self.namespace in (None, OWNERS)

    @property
    def bound_to(self) -> str | None:
        """The only namespace that it may be told of; None for the owner."""
        return None if self.is_owner else self.namespace

    def require_owner(self) -> None:
        """Raises HttpRefused: it may not be told of all namespaces."""
        if not self.is_owner:
            raise HttpRefused(
                "These figures are of all namespaces. Ask for them with a token of the namespace default, or on the"
                " Unix socket (--http-socket).",
                status=403,
            )

    async def request_of(self, verb: Verb[Any, Any], params: Mapping[str, Any]) -> Request:
        """The checked request of a verb; bare names are names in the namespace.

        Raises:
            InvalidRequest, InvalidSampling: a field is at fault.
            HttpRefused: a session is of another namespace.
        """
        values = dict(params)
        if self.namespace is not None:
            for field in NAMING:
                if isinstance(values.get(field), str):
                    values[field] = self._own(values[field])
            if "sessions" in values:
                values["sessions"] = self._all_own(values["sessions"])
            if any(each.name == "namespace" for each in fields(verb.request)):
                values["namespace"] = self.namespace
        return await in_pieces(load_request_in_pieces(verb, values))

    def _all_own(self, sessions: Any) -> Any:
        """One name, or several; what is no name is refused with the request."""
        if isinstance(sessions, str):
            return self._own(sessions)
        return tuple(self._own(each) if isinstance(each, str) else each for each in sessions)

    def _own(self, session: str) -> str:
        named = name_in(self.namespace or "", session)
        if not named.removeprefix("torpor://").startswith(f"{self.namespace}/"):
            raise HttpRefused(
                f"This token is for the sessions of {self.namespace} alone. Name one of them, or use the token of the"
                " other namespace.",
                status=403,
            )
        return named


class Access:
    """Finds the caller of a request, or refuses it. tokens, port: of the loopback address, None without one. has_page:
    whether the inspector is served there. passed_on: requests come through another server, which has the address; then
    any `Host` will do, for a page that was led here by one has no token."""

    def __init__(
        self,
        tokens: Tokens | None = None,
        port: int | None = None,
        *,
        has_page: bool = False,
        passed_on: bool = False,
    ) -> None:
        self._tokens = tokens
        self._has_page = has_page
        self._passed_on = passed_on
        self._hosts = {f"{host}:{port}" for host in _HOSTS} | ({*_HOSTS} if port == 80 else set())

    def require_no_page(self, headers: Mapping[str, str], *, on_unix: bool) -> None:
        """Refuse what a page in a browser may have sent, also through a name that leads here (DNS rebinding). Raises
        HttpRefused."""
        host = headers.get("host", "").lower()
        is_own = self._has_page and not on_unix and headers.get("origin") == f"http://{host}"
        if "origin" in headers and not is_own:
            raise HttpRefused(
                "This request comes from a page in a browser (it has an Origin), and no page may ask this daemon. Let"
                " a program of your own ask it.",
                status=403,
            )
        if not on_unix and not self._passed_on and host not in self._hosts:
            raise HttpRefused(
                f"The Host of this request is not this machine. Use one of {', '.join(sorted(self._hosts))}.",
                status=403,
            )

    def caller_of(self, headers: Mapping[str, str], *, on_unix: bool) -> Caller:
        """The caller, by its token; on the Unix socket its user. Raises HttpRefused: no token, or an unknown one."""
        if on_unix:
            return Caller()
        token = token_in(headers)
        namespace = self._tokens.namespace_of(token) if self._tokens is not None and token else None
        if namespace is None:
            where = self._tokens.path if self._tokens is not None else "of tokens"
            raise HttpRefused(
                f"{'This token is not known' if token else 'A token is missing'}. Send one of the file {where}, as"
                " Authorization: Bearer TOKEN or as x-api-key: TOKEN.",
                status=401,
            )
        return Caller(namespace)

    def with_digest(self, digest: bytes) -> tuple[str, str] | None:
        """The namespace and the token with a digest; None if it is gone, or the file is not to be used."""
        try:
            return None if self._tokens is None else self._tokens.with_digest(digest)
        except UnsafeTokenFile:
            return None


def token_in(headers: Mapping[str, str]) -> str:
    """The token of a request; empty without one."""
    kind, _, bearer = headers.get("authorization", "").partition(" ")
    return headers.get("x-api-key", "") or (bearer.strip() if kind.lower() == "bearer" else "")
