"""Each view of the page in full: nothing is in the way of anybody, a picture of it is kept, and it bears a crowd."""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path

import pytest
from torpor.socket_api.client.client import Client
from torpor.tests.socket_api.http.inspector.browser import Browser, Tab
from torpor.tests.socket_api.http.inspector.views import VIEWS, session, signed_in, sound
from torpor.tests.socket_api.http.serving import Served

ROOT = Path(__file__).resolve().parents[4]
PICTURES = ROOT / "build" / "inspector"
AXE = ROOT / ".venv-clients" / "node_modules" / "axe-core" / "axe.min.js"
AXE_SHA256 = "29348999450cdf2849a8e70b7912fc2da85a849da39c0d0d5394f51d4a9ed95c"
"""Of axe-core 4.14.1, which `make clients` installs."""

BUSY = 1000
ROUNDS = 5
EVENTS_A_ROUND = 600
FLAT = 1.15

each_view = pytest.mark.parametrize("view", VIEWS)


# --- for everybody


@pytest.fixture(scope="session")
def axe() -> str:
    content = AXE.read_bytes() if AXE.exists() else pytest.fail("axe-core is not installed: make clients")
    assert hashlib.sha256(content).hexdigest() == AXE_SHA256
    return content.decode()


@pytest.mark.heavy
@pytest.mark.parametrize("width", [1280, 375])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@each_view
def test_axe_finds_nothing_and_a_picture_is_kept(
    browser: Browser, there: Served, view: str, dark: bool, width: int, axe: str
) -> None:
    tab = signed_in(browser, there, dark=dark, width=width)
    VIEWS[view](tab)
    PICTURES.mkdir(parents=True, exist_ok=True)
    tab.shot(PICTURES / f"{view}-{'dark' if dark else 'light'}-{width}.png")
    tab.get(axe)
    assert violations(tab) == []
    sound(tab, there)


@pytest.mark.heavy
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_axe_finds_nothing_where_nobody_is_signed_in(browser: Browser, there: Served, dark: bool, axe: str) -> None:
    tab = browser.open(there.url, dark=dark)
    tab.until("document.body.innerText.includes('torpor inspect')")
    PICTURES.mkdir(parents=True, exist_ok=True)
    tab.shot(PICTURES / f"signed-out-{'dark' if dark else 'light'}-1280.png")
    tab.get(axe)
    assert violations(tab) == []


def violations(tab: Tab) -> list[str]:
    """What axe finds: its rule, and where."""
    told = tab.get("axe.run(document).then(found => JSON.stringify(found.violations))")
    return [f"{each['id']}: {[node['html'][:200] for node in each['nodes']][:3]}" for each in json.loads(told)]


# --- many sessions, and for long


@pytest.mark.heavy
def test_a_thousand_sessions_are_shown_while_others_work(browser: Browser, there: Served) -> None:
    names = [f"many-{number}" for number in range(BUSY)]
    with Client(there.daemon.socket) as client, contextlib.ExitStack() as gone:
        client.append("seed", text="some words", create=True)
        client.sleep("seed")
        gone.callback(client.delete, "seed")
        for name in names:
            client.fork("seed", name)
            gone.callback(client.delete, name)
        tab = signed_in(browser, there)
        for number in range(ROUNDS):
            stream = client.stream_generate(names[number], max_tokens=40)
            with stream:
                for view in ("overview", "history", "sharing", "live"):
                    VIEWS[view](tab)
                assert list(stream)
        VIEWS["overview"](tab)
        assert f"{BUSY:,}"[:2] in tab.get("document.querySelector('.panel.wide .note').innerText")
        tab.get(f"location.hash = {json.dumps(session(names[-1]))}")
        tab.until("document.querySelector('.strip')")
        sound(tab, there)


@pytest.mark.heavy
def test_a_live_view_holds_as_much_after_thousands_of_events_as_after_hundreds(browser: Browser, there: Served) -> None:
    tab = signed_in(browser, there)
    VIEWS["live"](tab)
    with Client(there.daemon.socket) as client:
        client.create("steady")
        held = []
        for _ in range(ROUNDS):
            for _ in range(EVENTS_A_ROUND // 2):  # a reading, and a version
                client.append("steady", text="x")
                client.save("steady")
            client.create(f"round-{len(held)}")  # what came before has come
            tab.until(f"document.body.innerText.includes('round-{len(held)}')")
            held.append(tab.heap_bytes())
        for name in ("steady", *(f"round-{number}" for number in range(ROUNDS))):
            client.delete(name)
    assert max(held[1:]) <= FLAT * held[1], held
    sound(tab, there)
