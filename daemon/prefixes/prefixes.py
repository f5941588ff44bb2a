"""Which sessions begin with the same tokens, so that a new session need not read them again.

A tree of full blocks for each namespace and identity. The way from the root spells the tokens, block by block: sessions
that begin alike share nodes, and a walk down finds the longest prefix of a new text. It is derived from ledgers and
holds no state: a source that it names may be gone.

Prefixes are never found across namespaces or identities. Model, adapter, tokenizer, template and precision are part of
the identity; tools and template arguments are tokens (MS1).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from blake3 import blake3

from ...memvid.format.blocks import BLOCK_TOKENS
from ...memvid.uri import SessionUri

_KEY_BYTES: Final = 16
Root = tuple[str, bytes]


@dataclass(slots=True)
class _Node:
    """The tokens up to the end of one block. sources: sessions whose last full block this is."""

    parent: _Node | None
    key: bytes
    children: dict[bytes, _Node] = field(default_factory=dict)
    sources: dict[SessionUri, None] = field(default_factory=dict)

    def nodes(self) -> Iterator[_Node]:
        """This one and all below it, this one first."""
        waiting = [self]
        while waiting:
            node = waiting.pop()
            yield node
            waiting += node.children.values()

    def sessions(self) -> Iterator[SessionUri]:
        """The sessions that pass this node; at each end, the latest first."""
        for node in self.nodes():
            yield from reversed(node.sources)


@dataclass(frozen=True, slots=True)
class Match:
    """Full blocks that a text shares with sessions. tokens: how many tokens they have. sources: those sessions,
    lazily."""

    tokens: int
    sources: Iterator[SessionUri]


class PrefixTree:
    """The ledgers of sessions by their blocks. Not thread-safe: the event loop's."""

    def __init__(self) -> None:
        self._roots: dict[Root, _Node] = {}
        self._ends: dict[SessionUri, tuple[Root, _Node, int]] = {}

    def __len__(self) -> int:
        return len(self._ends)

    def __contains__(self, uri: SessionUri) -> bool:
        return uri in self._ends

    @property
    def node_count(self) -> int:
        """The number of blocks; sessions that begin alike share theirs."""
        return sum(sum(1 for _ in root.nodes()) - 1 for root in self._roots.values())

    def put(self, uri: SessionUri, identity: bytes, ledger: Sequence[int]) -> None:
        """Add a session by its ledger, or replace it."""
        self.remove(uri)
        root = (uri.namespace, identity)
        node = self._roots.setdefault(root, _Node(None, b""))
        for key in _keys(ledger):
            node = node.children.setdefault(key, _Node(node, key))
        node.sources[uri] = None
        self._ends[uri] = (root, node, len(ledger))

    def remove(self, uri: SessionUri) -> None:
        """Forget a session, with the blocks that no other has."""
        if uri not in self._ends:
            return
        root, node, _ = self._ends.pop(uri)
        del node.sources[uri]
        while node.parent is not None and not node.sources and not node.children:
            del node.parent.children[node.key]
            node = node.parent
        if node.parent is None and not node.sources and not node.children:
            del self._roots[root]

    def sessions(self, namespace: str, identity: bytes) -> Iterator[SessionUri]:
        """Sessions of a namespace and identity, lazily and in no order."""
        root = self._roots.get((namespace, identity))
        return iter(()) if root is None else root.sessions()

    def find(self, namespace: str, identity: bytes, tokens: Sequence[int]) -> Match | None:
        """The longest run of full blocks at the beginning of `tokens` that a session has; None if there is none."""
        node, count = self._roots.get((namespace, identity)), 0
        if node is None:
            return None
        for key in _keys(tokens):
            below = node.children.get(key)
            if below is None:
                break
            node, count = below, count + BLOCK_TOKENS
        return Match(count, node.sessions()) if count else None


def tokens_in_common(ledger: Sequence[int], tokens: Sequence[int]) -> int:
    one, other = packed(ledger), packed(tokens)
    most = min(len(one), len(other))
    for start in range(0, most, BLOCK_TOKENS):
        end = min(start + BLOCK_TOKENS, most)
        if one[start:end] != other[start:end]:
            return next(at for at in range(start, end) if one[at] != other[at])
    return most


def packed(tokens: Sequence[int]) -> array[int]:
    """Tokens as an array: to compare or cut it takes a hundredth of the time that a list takes."""
    return tokens if isinstance(tokens, array) else array("I", tokens)


def _keys(tokens: Sequence[int]) -> Iterator[bytes]:
    """A key for each full block. 128 bits of BLAKE3 are enough: a match is compared with the ledger anyway."""
    found = packed(tokens)
    for start in range(0, len(found) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        yield blake3(found[start : start + BLOCK_TOKENS].tobytes()).digest(_KEY_BYTES)
