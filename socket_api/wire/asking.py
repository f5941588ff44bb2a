"""A request of a client: its message, and the meaning of its answer.

Shared by both clients, which differ only in how they wait. Does no I/O.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar

from ...daemon.api.events import NEVER_SENT
from ...daemon.api.records import Request
from ...daemon.api.sampling import Sampling
from ...daemon.api.verb import Verb
from ...records import Result
from ..errors import RemoteError
from .checking import listed, load_request, load_result
from .messages import ErrorBody
from .naming import within

R = TypeVar("R", bound=Result)


@dataclass(frozen=True, slots=True)
class Call(Generic[R]):
    """A request that is ready to be sent: its verb, and the fields that differ from their defaults."""

    verb: Verb[Any, R]
    params: Mapping[str, Any]

    def load_result(self, raw: Mapping[str, Any]) -> R:
        """Type the answer. Raises MalformedMessage if this client does not know it."""
        return load_result(self.verb, raw)


def call_of(verb: Verb[Any, R], request: Request, namespace: str | None) -> Call[R]:
    """Check a request by the daemon's own rules, before it is sent.

    namespace: bare names are names in it, and a request about many sessions is about its own. None: in none.

    Raises:
        InvalidRequest, InvalidSampling: a field is at fault.
    """
    lists = listed(verb)
    params: dict[str, Any] = {}
    for each in fields(request):
        value = getattr(request, each.name)
        if each.name in lists:
            value = (value,) if isinstance(value, str) and lists[each.name].or_one else _plain(value)
        if each.name not in NEVER_SENT and value != each.default:
            params[each.name] = value.named() if isinstance(value, Sampling) else value
    load_request(verb, params)
    return Call(verb, params if namespace is None else within(namespace, type(request), params))


def remote_error(body: ErrorBody) -> RemoteError:
    """The daemon's failure as an exception of this side."""
    return RemoteError(body.code, body.message, **body.details)


def _plain(value: object) -> object:
    """As it arrives: each list is a tuple, also within maps."""
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    is_list = isinstance(value, Sequence) and not isinstance(value, (str, bytes))
    return tuple(map(_plain, value)) if is_list else value  # type: ignore[call-overload]
