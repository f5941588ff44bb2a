"""The tree of prefixes: the longest run of blocks, never across namespaces or identities, and nothing left behind."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

import pytest
from torpor.daemon.prefixes.prefixes import PrefixTree, tokens_in_common
from torpor.memvid.format.blocks import BLOCK_TOKENS
from torpor.memvid.uri import SessionUri
from torpor.tests.daemon.session_rig import tokens_of

HERE, THERE = b"a" * 32, b"b" * 32


def uri(name: str, namespace: str = "default") -> SessionUri:
    return SessionUri(namespace, name)


def found(
    tree: PrefixTree, tokens: Sequence[int], namespace: str = "default", identity: bytes = HERE
) -> tuple[int, set[str]]:
    match = tree.find(namespace, identity, tokens)
    return (0, set()) if match is None else (match.tokens, {each.name for each in match.sources})


def test_the_longest_run_of_full_blocks_is_found_with_all_sessions_that_have_it() -> None:
    tree, text = PrefixTree(), tokens_of(1, 1500)
    tree.put(uri("short"), HERE, text[:300])
    tree.put(uri("long"), HERE, text[:1400])
    tree.put(uri("turned"), HERE, text[:1024] + tokens_of(2, 300))
    assert found(tree, text) == (1280, {"long"})
    assert found(tree, text[:1279]) == (1024, {"long", "turned"})
    assert found(tree, text[:256]) == (256, {"short", "long", "turned"})
    assert found(tree, text[:255]) == (0, set())
    assert found(tree, tokens_of(3, 1500)) == (0, set())


def test_ms1_never_across_namespaces_nor_identities() -> None:
    tree, text = PrefixTree(), tokens_of(1, 600)
    tree.put(uri("a"), HERE, text)
    assert found(tree, text) == (512, {"a"})
    assert found(tree, text, namespace="other") == (0, set())
    assert found(tree, text, identity=THERE) == (0, set())


def test_ms4_a_token_that_differs_in_a_block_ends_the_run_before_it() -> None:
    tree, text = PrefixTree(), tokens_of(1, 1024)
    tree.put(uri("a"), HERE, text)
    for at in (0, 255, 256, 700, 1023):
        other = [*text[:at], text[at] ^ 1, *text[at + 1 :]]
        assert found(tree, other)[0] == at // BLOCK_TOKENS * BLOCK_TOKENS
        assert tokens_in_common(array("I", text), other) == at


def test_a_session_that_has_gone_on_or_back_is_known_by_what_it_has_now() -> None:
    tree, text = PrefixTree(), tokens_of(1, 1500)
    tree.put(uri("a"), HERE, text)
    tree.put(uri("a"), HERE, text[:300])
    assert (found(tree, text), len(tree), tree.node_count) == ((256, {"a"}), 1, 1)
    tree.put(uri("a"), THERE, text)
    assert found(tree, text) == (0, set())


def test_the_latest_of_sessions_that_end_alike_comes_first() -> None:
    tree, text = PrefixTree(), tokens_of(1, 300)
    for name in "abc":
        tree.put(uri(name), HERE, text)
    match = tree.find("default", HERE, text)
    assert match is not None
    assert [each.name for each in match.sources] == ["c", "b", "a"]


@pytest.mark.parametrize("seed", range(5))
def test_it_finds_what_a_search_through_all_ledgers_finds_and_keeps_nothing_of_those_that_went(seed: int) -> None:
    choices, tree = random.Random(seed), PrefixTree()
    stems = [tokens_of(number, 1024) for number in range(3)]
    ledgers: dict[SessionUri, list[int]] = {}
    for step in range(300):
        name = uri(f"s{choices.randrange(12)}")
        if choices.random() < 0.3:
            tree.remove(name)
            ledgers.pop(name, None)
        else:
            ledger = choices.choice(stems)[: choices.randrange(1025)] + tokens_of(1000 + step, choices.randrange(600))
            tree.put(name, HERE, ledger)
            ledgers[name] = ledger
        asked = choices.choice(stems)
        longest = max((tokens_in_common(ledger, asked) for ledger in ledgers.values()), default=0)
        assert found(tree, asked)[0] == longest // BLOCK_TOKENS * BLOCK_TOKENS
        assert len(tree) == len(ledgers)
    blocks = {tuple(ledger[:end]) for ledger in ledgers.values() for end in range(256, len(ledger) + 1, 256)}
    assert tree.node_count == len(blocks)
    for name in list(ledgers):
        tree.remove(name)
    assert (tree.node_count, len(tree), tree._roots) == (0, 0, {})


def test_a_session_of_the_longest_context_is_no_deep_recursion() -> None:
    tree = PrefixTree()
    tree.put(uri("a"), HERE, array("I", range(2_000_000)))
    assert tree.node_count == 2_000_000 // BLOCK_TOKENS
    tree.remove(uri("a"))
    assert tree.node_count == 0
