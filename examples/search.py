"""A search that greedy decoding fails: name two functions by the comments above them.

    python examples/search.py

Greedy decoding takes the likeliest token at each place. Held to a list of names, it begins one whose first piece is
likely, and must then go on with it, however the rest fits the comment. The search lets each name be a branch that a
grammar holds to it, goes on from the few with the lowest perplexity, and prunes the others. All branches stand on what
the session has read. Its sessions have a namespace of their own. It starts a daemon if none answers.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from torpor.socket_api import Client, RemoteError

READ = '''def add(left, right):
    """Add two numbers."""
    return left + right


def double(value):
    """Double a number."""
    return value * 2


'''
NAMES = ("subtract", "multiply", "divide", "negate", "is_even", "square", "maximum", "minimum", "absolute", "half")
STEPS = (
    ("# Subtract two numbers.\ndef ", "(left, right):\n    return left - right\n\n\n"),
    ("# The square of a number.\ndef ", "(value):\n    return value * value\n"),
)
"""What stands before a name, and behind it."""

EXPECTED = ("subtract", "square")
MOST_TOKENS = 16


@dataclass(frozen=True)
class Path:
    """A branch, the names that led to it, and its perplexity."""

    branch: int
    names: tuple[str, ...]
    perplexity: float


def greedy(torpor: Client, session: str) -> tuple[str, ...]:
    """The names that the session writes where each token is the likeliest that the grammar allows."""
    names: list[str] = []
    for before, behind in STEPS:
        torpor.append(session, text=before)
        left = "|".join(name for name in NAMES if name not in names)
        names.append(torpor.generate(session, max_tokens=MOST_TOKENS, constraint={"regex": left}).text)
        torpor.append(session, text=behind)
    return tuple(names)


def search(torpor: Client, session: str, width: int = 3) -> Path:
    """The path with the lowest perplexity that a beam of this width finds. Its branch alone is left of the tree."""
    root = torpor.tree(session).branch
    beam = [Path(root, (), 1.0)]
    for before, behind in STEPS:
        torpor.prefill([{"branch": path.branch, "text": before} for path in beam])
        found = sorted((child for path in beam for child in expanded(torpor, path)), key=lambda path: path.perplexity)
        torpor.prune([path.branch for path in found[width:]])
        beam = found[:width]
        torpor.prefill([{"branch": path.branch, "text": behind} for path in beam])
    torpor.retain(beam[0].branch)
    return beam[0]


def expanded(torpor: Client, path: Path) -> list[Path]:
    """A child of the path for each name that it has not, which has written that name."""
    names = [name for name in NAMES if name not in path.names]
    children = [each.branch for each in torpor.branch(path.branch, count=len(names)).branches]
    for child, name in zip(children, names, strict=True):
        torpor.guide([child], constraint={"regex": name})
    torpor.advance(children, max_tokens=MOST_TOKENS)
    measured = {each.branch: each.perplexity for each in torpor.branches(path.branch).branches}
    return [Path(child, (*path.names, name), measured[child]) for child, name in zip(children, names, strict=True)]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--socket", help="of the daemon; the default is its own")
    with Client.ensure(parser.parse_args(arguments).socket, namespace="search") as torpor:
        for session in ("greedy", "searched", "found"):
            with suppress(RemoteError):
                torpor.delete(session)
        for session in ("greedy", "searched"):
            torpor.append(session, text=READ, create=True)
        print(f"greedy:  {', '.join(greedy(torpor, 'greedy'))}")
        best = search(torpor, "searched")
        print(f"search:  {', '.join(best.names)} (perplexity {best.perplexity:.1f})")
        torpor.keep(best.branch, "found")
        for session in ("greedy", "searched"):
            torpor.delete(session)
        print("kept as the session `found`: look with torpor show search/found, delete it with torpor rm search/found")


if __name__ == "__main__":
    main()
