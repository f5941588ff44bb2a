"""What goes from the door to a replica, and what is remembered of it: which session answered, and where."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar

from .keys import Key
from .placing import Wanted

MOST_REMEMBERED: Final = 200_000
"""Of each kind: some 50 MB. Who is forgotten is found by name, or begins anew."""

REPLICA_HEADER: Final = "x-torpor-replica"
"""Of an answer: the replica that gave it, and why that one."""

K = TypeVar("K")
V = TypeVar("V")


@dataclass(slots=True)
class Order:
    """A request on its way. scope: of ASGI, as plain values. body: whole. wanted: by which it is placed. brings:
    whether its session is woken before it is carried out, wherever that is. why: the wait that was foreseen at each
    replica, as text. at: the replica that is to answer, if it is still there; None: the best one."""

    scope: Mapping[str, Any]
    body: bytes
    wanted: Wanted
    brings: bool
    why: dict[str, str] = field(default_factory=dict)
    at: str | None = None


class _Newest(Generic[K, V]):
    """The values that were set or looked up last."""

    def __init__(self, most: int) -> None:
        self._values: OrderedDict[K, V] = OrderedDict()
        self._most = most

    def get(self, key: K) -> V | None:
        if key in self._values:
            self._values.move_to_end(key)
        return self._values.get(key)

    def set(self, key: K, value: V) -> None:
        self._values[key] = value
        self._values.move_to_end(key)
        if len(self._values) > self._most:
            self._values.popitem(last=False)


class Answered:
    """The sessions that answered requests, and where. In memory alone: who forgets it pays with a hand-over, or with
    reading again where nothing but the dialogue named the session."""

    def __init__(self, most: int = MOST_REMEMBERED) -> None:
        self._sessions: _Newest[bytes | str, str] = _Newest(most)
        self._places: _Newest[str, str] = _Newest(most)
        self._readers: _Newest[bytes, frozenset[str]] = _Newest(most)

    def wanted(self, key: Key) -> Wanted:
        """What a request with a key needs."""
        told: Sequence[bytes | str] = [*key.answers, *key.dialogue]
        session = next((found for each in told if (found := self._sessions.get(each))), key.session)
        place = next((at for each in (session, *key.answers) if each and (at := self._places.get(each))), None)
        return Wanted(session, place, key.head_bytes, self._readers.get(key.head) or frozenset())

    def learn(self, key: Key, *, session: str | None, replica: str, answer: str | None) -> None:
        """A replica has begun to answer. session: in which; None: it did not say. answer: the id of the answer."""
        if key.head:
            self._readers.set(key.head, (self._readers.get(key.head) or frozenset()) | {replica})
        if known := session or answer:
            self._places.set(known, replica)
        if session is not None:
            for each in (*key.dialogue[:1], *([answer] if answer else ())):
                self._sessions.set(each, session)
