"""What the page is looked at with: one of all that a store can have, and words that want to be more than words."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from torpor.daemon.api.sampling import Sampling
from torpor.tests.memvid.store_making import flip, frame_in
from torpor.tests.socket_api.http.serving import Served

CANARY: Final = "<img src=x onerror=window.ran=1><script>window.ran=1</script>"
HOSTILE: Final = f"{CANARY} \u202edesrever \u2066 ]]>&quot;'\"`${{1}} \x1b[31m"
"""Markup, a script, marks that turn the direction of reading, ends of quotes, and a command to a terminal."""

SECRET: Final = "a-session-of-nobody-else"
SECRET_WORDS: Final = "secret words "
TEAM: Final = "the-token-of-the-team"
SESSIONS: Final = frozenset({"chat", "fork", "lossy", "stripped", "damaged", "tree", "agent", SECRET})
"""Of the namespace `default`. The other one has team/theirs, and team/broken."""

HEAD_BYTE: Final = 100
"""In the head of a block's frame, which every reader looks at."""

_SYSTEM: Final = "You are careful. " * 40
_DRAWN: Final = Sampling(temperature=0.9, seed=5)


def made(there: Served, client: Any) -> None:
    """Fill a daemon: a chat, a fork with a tail in the journal, kept in fewer bits, stripped, damaged, a tree with
    branches, and an agent whose transcript diverged. client: the branches live as long."""
    client.create("chat", system=_SYSTEM, labels=[HOSTILE[:60]])
    client.chat("chat", message=HOSTILE, max_tokens=4)
    client.sleep("chat")
    client.fork("chat", "fork")
    client.chat("fork", message="Go on.", max_tokens=4)
    client.create(SECRET)
    client.append(SECRET, text=SECRET_WORDS * 300)
    client.sleep(SECRET)
    client.mark(SECRET, tag="before")
    for way, more in (("lossy", {"operation": "quantize", "bits": 8}), ("stripped", {"operation": "strip"})):
        client.fork(SECRET, way)
        client.append(way, text=f"{way} words " * 50)
        client.sleep(way)
        client.maintain(session=way, **more)
    _damaged(client, there.daemon.store, "damaged")
    _tree(client)
    _diverged(client)


def others_made(there: Served, client: Any) -> None:
    """Add another namespace."""
    tokens = there.daemon.folder / "config" / "torpor" / "http-tokens"
    with tokens.open("a") as file:
        file.write(f"team {TEAM}\n")
    _damaged(client, there.daemon.store, "team/broken")
    client.create("team/theirs")
    client.append("team/theirs", text="their words")
    client.save("team/theirs")


def _damaged(client: Any, store: Path, name: str) -> None:
    client.append(name, text=f"words of {name} that are lost " * 60, create=True)
    client.sleep(name)
    block = client.blocks(name).blocks[0]
    (pack,) = (store / "packs").rglob(f"{block.pack}*")
    flip(pack, frame_in(pack, bytes.fromhex(block.block_id)).offset + HEAD_BYTE)


def unreadable_made(there: Served, client: Any) -> str:
    """Add a session of which the manifest is damaged. Its name."""
    client.append("unread", text="words without a manifest " * 30, create=True)
    client.sleep("unread")
    bundle = client.show("unread").info.bundle_id
    (manifest,) = (there.daemon.store / "versions").rglob(f"{bundle}*")
    flip(manifest, HEAD_BYTE)
    return "unread"


def _tree(client: Any) -> None:
    client.create("tree", sampling=_DRAWN)
    client.append("tree", text="It could go on in several ways. " * 10)
    client.save("tree")
    root = client.tree("tree").branch
    ways = [each.branch for each in client.branch(root, count=3, seeds=[1, 2, 3]).branches]
    client.advance(ways, max_tokens=6)
    client.branch(ways[0], count=2, seeds=[4, 5])


def _diverged(client: Any) -> None:
    for clock in ("06:30", "07:45"):
        said = [{"role": "system", "content": f"You are an agent. It is {clock}. {HOSTILE}"}]
        told = [*said, {"role": "user", "content": "Hello!"}]
        client.chat("agent", messages=told, max_tokens=4, on_divergence="rewind", create=True)
