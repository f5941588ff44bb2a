"""The two pictures of the inspector in the README, taken in a headless Chromium from a daemon with a small team.

.venv/bin/python scripts/pictures.py docs/images
"""

from __future__ import annotations

import io
import sys
import tempfile
from pathlib import Path

from PIL import Image
from torpor.socket_api.client.client import Client
from torpor.tests.socket_api.http.inspector.browser import Browser, Tab, link_of
from torpor.tests.socket_api.http.inspector.views import READY
from torpor.tests.socket_api.http.serving import serving

ROOT = Path(__file__).resolve().parent.parent
SYSTEM = "You are a careful engineer. Read before you write, and say what you did not try. " * 12
PAGES = {"reviewer": "AGENTS.md", "researcher": "ARCHITECTURE.md", "scribe": "README.md"}
COLORS = 256
SIZE = {"width": 1280, "height": 800}


def made(client: Client) -> None:
    """A team of agents with one system text: each reads a page; one is forked, one is kept in fewer bits, one has told
    its time at the beginning of each request."""
    for name, page in PAGES.items():
        text = (ROOT / page).read_text(encoding="utf-8")[:7000]
        client.create(name, system=SYSTEM, labels=["team"])
        client.chat(name, message=f"Read this page.\n\n{text}", max_tokens=24)
        client.sleep(name)
    client.mark("researcher", tag="read")
    for name in ("try-1", "try-2"):
        client.fork("researcher", name)
        client.chat(name, message=f"What would you change in {name}?", max_tokens=48)
    client.sleep("try-1")
    client.fork("scribe", "archive")
    client.maintain("quantize", session="archive", bits=4)
    for clock in ("09:58", "10:02"):
        said = [{"role": "system", "content": f"It is {clock}. {SYSTEM}"}, {"role": "user", "content": "What is next?"}]
        client.chat("planner", messages=said, max_tokens=24, on_divergence="rewind", create=True)


def taken(tab: Tab, path: Path) -> None:
    """The part of the page that is in sight, in few colors."""
    whole = path.with_suffix(".all.png")
    tab.shot(whole)
    with Image.open(whole) as image:
        seen = image.convert("RGB").crop((0, 0, SIZE["width"], min(SIZE["height"], image.height)))
    whole.unlink()
    data = io.BytesIO()
    seen.quantize(COLORS, Image.Quantize.MAXCOVERAGE).save(data, "PNG", optimize=True)
    path.write_bytes(data.getvalue())
    print(f"{path}: {path.stat().st_size:,} bytes")


def main() -> None:
    """Take both."""
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="tp") as folder, serving(Path(folder) / "d", "--keep-free", "0") as there:
        with Client(there.daemon.socket) as client:
            made(client)
        browser = Browser(Path(folder) / "b")
        tab = browser.open(link_of(there.url, there.token), **SIZE)
        tab.until(f"document.querySelectorAll('.foot .row').length > 2 && {READY}")
        taken(tab, out / "inspector.png")
        tab.scheme(True)
        tab.get("location.hash = '#/session/default%2Ftry-2'")
        tab.until(f"document.querySelector('.strip') && {READY}")
        tab.click("by role")
        tab.click("Show text")
        tab.until("document.querySelector('.texts:not(.old) pre')")
        taken(tab, out / "inspector-session.png")
        browser.end()


if __name__ == "__main__":
    main()
