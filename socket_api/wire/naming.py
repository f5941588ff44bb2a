"""Names of sessions in a client's namespace. Imports nothing of the protocol, so that a command line can be parsed
without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ...daemon.api.records import Request

NAMING = frozenset({"session", "name", "other", "fork"})  # the fields of requests that name a session


def within(namespace: str, request: type[Request], params: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a request, with names completed by a namespace."""
    named = dict(params)
    for field in NAMING & named.keys():
        named[field] = named[field] and name_in(namespace, named[field])
    if "sessions" in named:
        named["sessions"] = tuple(name_in(namespace, each) for each in named["sessions"])
    known = {each.name for each in fields(request)}
    if "namespace" in known and not named.keys() & {"session", "sessions"}:
        named.setdefault("namespace", namespace)
    return named


def name_in(namespace: str, session: str) -> str:
    """The full name of a session: a bare name (perhaps with a version) is in the namespace."""
    return session if "/" in session else f"{namespace}/{session}"
