"""The inspector in a browser, on a real daemon: what a person sees of sessions, by keyboard, and what nobody sees."""

from __future__ import annotations

import contextlib
import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
from torpor.socket_api.client.client import Client
from torpor.socket_api.http import page as of_page
from torpor.tests.socket_api.http.http_rig import Begin, HttpThread
from torpor.tests.socket_api.http.inspector import scene
from torpor.tests.socket_api.http.inspector.browser import Browser, Tab, link_of
from torpor.tests.socket_api.http.inspector.scene import CANARY, SECRET, SESSIONS, TEAM
from torpor.tests.socket_api.http.inspector.views import MARK, POISONED, READY, VIEWS, session, signed_in, sound, tab_to
from torpor.tests.socket_api.http.serving import Served
from torpor.tests.socket_api.real_daemon import until

MANY = 10_000

CHOSEN = "document.querySelector('.row[aria-selected=true]').children[1].innerText"


def test_a_link_signs_in_once_and_leaves_no_token_in_any_address(browser: Browser, there: Served) -> None:
    link = link_of(there.url, there.token)
    tab = browser.open(link)
    tab.until("document.querySelectorAll('.height .row').length > 0")
    assert tab.get("location.href") == f"{there.url}/"
    assert not any(there.token in each for each in tab.requests)
    assert tab.get("document.cookie + JSON.stringify(localStorage)") == "{}"
    sound(tab, there)
    tab.click("Sign out")
    tab.until("document.body.innerText.includes('torpor inspect')")
    assert tab.get("sessionStorage.length") == 0
    again = browser.open(link)
    again.until("document.body.innerText.includes('was used already')")


def test_the_overview_has_each_session_and_sums_that_are_the_disk(page: Tab, there: Served) -> None:
    page.until("document.querySelectorAll('.foot .row').length === 4")
    rows = page.get("[...document.querySelectorAll('.height .row')].map(row => row.innerText.split('\\n')[0])")
    assert set(rows) >= SESSIONS
    text = page.text()
    for each in ("on disk", "the rest", "other namespaces", "≈ 8 bits", "changed", "requests waiting"):
        assert each in text
    usage = page.get(
        f"fetch('/v1/usage', {{headers: {{authorization: 'Bearer {there.token}'}}}}).then(answer => answer.json())"
    )
    assert usage["file_bytes"] == usage["alone_bytes"] + usage["shared_bytes"] + usage["rest_bytes"]
    sound(page, there)


def test_the_overview_tells_why_a_session_was_read_again_last(page: Tab, there: Served) -> None:
    rows = "[...document.querySelectorAll('.height .row')].map(row => row.innerText.replaceAll('\\n', ' '))"
    page.until(f"{rows}.some(row => row.startsWith('agent ') && row.includes(': clock'))")
    assert not any(": clock" in row for row in page.get(rows) if not row.startswith("agent "))
    assert "Read again" in page.get("[...document.querySelectorAll('[role=columnheader]')].map(head => head.innerText)")
    sound(page, there)


def test_a_session_is_reached_and_its_blocks_are_read_by_keyboard_alone(page: Tab, there: Served) -> None:
    tab_to(page, "at.getAttribute('role') === 'grid'")
    chosen = "document.querySelector('.row[aria-selected=true] a').innerText"
    page.press("End")
    while page.get(chosen) != "chat":
        page.press("ArrowUp")
    page.press("Enter")
    page.until("document.querySelector('h1').innerText.startsWith('chat') && document.querySelector('.strip')")
    tab_to(page, "at.getAttribute('role') === 'slider'")
    assert page.get("document.activeElement.getAttribute('aria-valuenow')") == "1"
    page.press("End")
    last = page.get("document.activeElement.getAttribute('aria-valuemax')")
    assert page.get("document.activeElement.getAttribute('aria-valuenow')") == last != "1"
    sound(page, there)


CONTROLS = "[...document.querySelectorAll('a[href], button:enabled, input, select, summary, [tabindex=\"0\"]')]"
LEFT = f"{CONTROLS}.filter(each => each.tabIndex >= 0 && each.checkVisibility() && !window.had.has(each))"
"""What can be used on the page and never had the focus."""


def test_each_view_is_reached_by_keyboard_alone_and_so_is_all_that_is_in_it(page: Tab, there: Served) -> None:
    for name in page.get("[...document.querySelectorAll('nav[aria-label=Views] a')].map(a => a.innerText)"):
        tab_to(page, f"at.innerText === {json.dumps(name)} && at.closest('nav')")
        page.press("Enter")
        page.until(f"document.querySelector('nav [aria-current]').innerText === {json.dumps(name)} && {READY}")
        page.get("(window.had = new Set(), 0)")
        tab_to(page, f"(window.had.add(at), at === document.body || at.matches(':focus-visible')) && !{LEFT}.length")
    sound(page, there)


def test_text_is_told_once_it_is_revealed_and_hostile_words_stay_words(page: Tab, there: Served) -> None:
    page.get("location.hash = '#/session/default%2Fchat'")
    page.until("document.querySelector('.strip')")
    assert "contents" not in "".join(page.requests)
    assert "onerror" in page.text(), "the label"
    page.click("Show text")
    seen = ""
    for key in ("Home", "ArrowRight"):
        page.get("document.querySelector('.strip').focus()")
        page.press(key)
        page.until("document.querySelector('.texts:not(.old) pre')")
        seen += page.get("document.querySelector('.texts').innerText")
    assert CANARY in seen
    assert "\\u202e" in page.text()
    assert "\u202e" not in page.text()
    sound(page, there)


def test_a_session_that_never_slept_and_one_that_is_gone_are_told_in_words(page: Tab, there: Served) -> None:
    page.get("location.hash = '#/session/default%2Ffork'")
    page.until("document.body.innerText.includes('forked from')")
    page.until("document.querySelector('.strip')")
    sound(page, there)
    page.get("location.hash = '#/session/default%2Fnobody'")
    page.until("document.querySelector('.failure')")
    assert "nobody" in page.get("document.querySelector('.failure').innerText")


@pytest.mark.parametrize("whose", ["owner", "team"])
def test_a_damaged_session_is_looked_at_like_any_other(browser: Browser, there: Served, whose: str) -> None:
    tab = signed_in(browser, there, TEAM if whose == "team" else "")
    name = "team%2Fbroken" if whose == "team" else "default%2Fdamaged"
    tab.get(f"location.hash = '#/session/{name}'")
    tab.until(f"document.querySelector('.strip .k-damaged') && {READY}")
    text = tab.text()
    assert "A part of it is damaged or missing" in text
    assert "torpor verify" in text
    assert ("digest differs" in text) == (whose == "owner"), "a namespace is told no file of the store"
    sound(tab, there)


def test_a_session_without_a_manifest_is_looked_at_like_any_other(page: Tab, there: Served) -> None:
    with Client(there.daemon.socket) as client:
        name = scene.unreadable_made(there, client)
        page.get(f"location.hash = {json.dumps(session(name))}")
        page.until(f"document.body.innerText.includes('Its blocks cannot be read.') && {READY}")
        assert "A part of it is damaged or missing" in page.text()
        VIEWS["sharing"](page)
        VIEWS["history"](page)
        assert f"{name}@1" in page.text()
        picks = page.get("[...document.querySelectorAll('.pick')].map(each => each.innerText)")
        assert f"{name}@1" not in picks, "it is compared with nothing"
        client.delete(name)
    sound(page, there)


def test_two_points_of_the_history_are_chosen_by_keyboard_and_compared(page: Tab, there: Served) -> None:
    page.get("location.hash = '#/history'")
    page.until("document.querySelectorAll('.lanes').length > 3")
    of = "[...document.querySelectorAll('.height .row')].map(row => row.children[1].innerText)"
    names = page.get(of)
    assert {"fork", "chat", "lossy", SECRET} <= {name.partition("@")[0] for name in names}
    version = next(name for name in names if name.startswith("chat@"))
    tab_to(page, "at.getAttribute('role') === 'grid'")
    page.press("Home")
    for name in ("fork", version):
        for _ in range(names.index(name) - page.get(f"{of}.indexOf({CHOSEN})")):
            page.press("ArrowDown")
        for _ in range(page.get(f"{of}.indexOf({CHOSEN})") - names.index(name)):
            page.press("ArrowUp")
        page.press("Enter")
    page.until("document.querySelectorAll('.sides h3').length === 2")
    assert page.get("[...document.querySelectorAll('.sides h3 a')].map(a => a.innerText)")[1] == version
    assert "tokens in common" in page.text()
    sound(page, there)


@pytest.mark.one_in(2)
def test_why_tells_what_requests_cost_by_each_of_its_orders(page: Tab, there: Served) -> None:
    page.get("location.hash = '#/why'")
    page.until("document.querySelector('.hours rect')")
    assert "new" in page.get("[...document.querySelectorAll('.height .row')].map(row => row.innerText.split('\\n')[0])")
    for by in ("session", "client", "hour"):
        page.get(
            "(() => { const by = document.querySelectorAll('select')[1];"
            f" by.value = '{by}'; by.dispatchEvent(new Event('change')); }})()"
        )
        page.until(f"document.querySelector('.head').innerText.toLowerCase().startsWith('{by}')")
    sound(page, there)


def test_live_tells_events_at_once_and_does_nothing_while_it_is_hidden(page: Tab, there: Served) -> None:
    page.get("location.hash = '#/live'")
    page.until("document.body.innerText.includes('following')")
    events = "document.querySelectorAll('.height .row').length"
    with Client(there.daemon.socket) as client:

        def seen() -> bool:
            client.append("chat", text="x")
            client.save("chat")
            return bool(page.get(events))

        until(seen)
        hide = "Object.defineProperty(document, 'hidden', {value: %s, configurable: true});"
        page.get(hide % "true" + "document.dispatchEvent(new Event('visibilitychange'))")
        asked = len(page.requests)
        before = page.get(events)
        client.append("chat", text="x")
        client.save("chat")
        assert (len(page.requests), page.get(events)) == (asked, before)
        page.get(hide % "false" + "document.dispatchEvent(new Event('visibilitychange'))")
        page.until(f"{events} > {before}")
    sound(page, there)


def test_a_page_that_comes_back_into_sight_while_the_daemon_is_gone_follows_it_once(page: Tab, there: Served) -> None:
    """Else each look leaves one more reader behind, of the few that there may be."""
    page.get("location.hash = '#/live'")
    page.until("document.body.innerText.includes('following')")
    page.get(
        "window.waits = 0; const [ask, later] = [window.fetch, window.setTimeout];"
        "const gone = () => Promise.reject(new TypeError('gone'));"
        "window.fetch = (path, more) => path === '/v1/events' ? gone() : ask(path, more);"
        "window.setTimeout = (call, ms) => (window.waits += ms === 2000, later(call, ms)); null"
    )
    for _ in range(4):
        for hidden in ("true", "false"):
            page.get(
                f"Object.defineProperty(document, 'hidden', {{value: {hidden}, configurable: true}});"
                "document.dispatchEvent(new Event('visibilitychange'))"
            )
    page.until("document.body.innerText.includes('lost')")
    assert page.get("window.waits") == 1
    sound(page, there)


def test_a_live_view_that_the_daemon_refuses_says_why_and_follows_once_it_may(page: Tab, there: Served) -> None:
    asked = urllib.request.Request(f"{there.url}/v1/events", headers={"x-api-key": there.token})
    with contextlib.ExitStack() as others:

        def follow() -> None:
            while True:
                others.enter_context(urllib.request.urlopen(asked))

        with pytest.raises(urllib.error.HTTPError, match="429"):
            follow()
        page.get("location.hash = '#/live'")
        page.until("document.body.innerText.includes('subscribers are told of events already')")
    page.until("document.body.innerText.includes('following')")


def test_the_matrix_tells_whose_blocks_two_sessions_share(page: Tab, there: Served) -> None:
    page.get("location.hash = '#/sharing'")
    page.until("document.querySelectorAll('.cell').length > 3")
    names = page.get("[...document.querySelectorAll('[role=rowheader] a')].map(a => a.innerText)")
    assert {"chat", "fork", SECRET} <= set(names)
    tab_to(page, "at.matches('.matrix')")
    for _ in range(names.index("chat")):
        page.press("ArrowDown")
    for key, far in (("ArrowRight", names.index("fork") - 1), ("ArrowLeft", 1 - names.index("fork"))):
        for _ in range(far):
            page.press(key)
    page.until("document.querySelectorAll('.height .row').length > 0")
    assert "chat, fork" in page.get("document.querySelector('.height .row').innerText").replace("\n", " ")
    sound(page, there)


def test_acts_say_what_they_will_do_and_do_it(page: Tab, there: Served) -> None:
    with Client(there.daemon.socket) as client:
        client.append("acted", text="some words " * 200, create=True)
        client.sleep("acted")
        page.get("location.hash = '#/session/default%2Facted'")
        page.click("Tag …")
        page.until("document.activeElement.name === 'tag'")
        for letter in "kept":
            page.press(letter)
        page.press("Enter")
        page.until("document.body.innerText.includes('Tagged.')")
        assert client.show("acted").versions[-1].tags == ("kept",)
        page.click("Fork from here …")
        page.until("document.activeElement.name === 'name'")
        assert "torpor fork acted NAME --at 256" in page.text()
        page.press("Escape")
        page.until("!document.querySelector('.consent')")
        page.click("Fork from here …")
        page.until("document.activeElement.name === 'name'")
        page.press("n")
        tab_to(page, "at.name === 'at'")
        page.press("ArrowUp")  # the place is any token, not only the end of a block
        page.until("document.body.innerText.includes('torpor fork acted n --at 257')")
        page.press("Enter")
        page.until("document.body.innerText.includes('Made n with 257 tokens')")
        page.click("Wake …")
        page.until("document.activeElement.className === 'go'")
        assert client.show("acted").info.state == "asleep", "it has only said what it would do"
        page.press("Enter")
        page.until("document.body.innerText.includes('It is awake with')")
        page.click("Fork …")
        page.until("document.activeElement.name === 'name'")
        page.press("m")
        page.press("Enter")
        page.until("document.body.innerText.includes('Made m with 402 tokens')")
        page.click("Forget …")
        page.until("document.querySelector('.consent li') && !document.querySelector('.go').disabled")
        assert client.show("acted").info.version is not None
        steps = page.get("[...document.querySelectorAll('.consent li')].map(each => each.innerText)")
        assert "remove acted@1: It is a version of the session." in steps
        assert any(each.startswith("keep m@1: It names torpor://default/acted") for each in steps), (
            "whose version stays"
        )
        page.click("Forget")
        page.until("document.querySelector('h1').innerText === 'Overview' || location.hash === '#/'")
        assert "torpor://default/acted" not in [each.session for each in client.list_sessions()]
        for name in "mn":
            client.delete(name)
    sound(page, there)


def test_a_plan_without_a_step_says_so_and_cannot_be_carried_out(page: Tab, there: Served) -> None:
    page.get("location.hash = '#/session/default%2Fstripped'")
    page.click("Strip …")
    page.until("document.querySelector('.consent').innerText.includes('There is nothing to do.')")
    assert page.get("document.querySelector('.go').disabled")
    page.click("Wake …")
    page.until("document.querySelector('.consent').innerText.includes('What went is read again.')")
    sound(page, there)


def test_the_disk_is_told_against_its_budget(page: Tab, there: Served) -> None:
    page.get(
        "{ const ask = window.fetch; window.fetch = async (path, given) => {"
        "const real = await ask(path, given); if (path !== '/v1/status') return real;"
        "const told = await real.json(); Object.assign(told.disk, {store_budget_bytes: 2 ** 32, held_bytes: 2 ** 30});"
        "return new Response(JSON.stringify(told), {headers: real.headers}); }; }"
    )
    page.until("document.querySelector('.bar[aria-label^=Disk]')?.ariaLabel.endsWith('free 3.00 GiB')")
    sound(page, there)


# --- three questions, in as many clicks as docs/how-to/look-into-memory.md says


def test_the_first_row_is_the_agent_that_takes_the_most_disk(page: Tab, there: Served) -> None:
    page.until("document.querySelectorAll('.foot .row').length > 2")
    with Client(there.daemon.socket) as client:
        most = max(client.usage().sessions, key=lambda each: each.stored_bytes).session
    page.until(f"document.querySelector('.height .row a').innerText === {json.dumps(most.rpartition('/')[2])}")


def test_why_an_agent_was_slow_takes_two_clicks(page: Tab, there: Served) -> None:
    page.click("agent")
    page.until(f"document.querySelector('.miss summary') && {READY}")
    page.get("document.querySelector('.miss summary').click()")
    told = page.get("document.querySelector('.miss').innerText")
    for each in ("06:30", "07:45", "Say it in the newest message"):
        assert each in told


def test_the_ribbon_of_a_session_that_went_back_is_what_it_holds_now(page: Tab, there: Served) -> None:
    with Client(there.daemon.socket) as client:
        held, found = client.contents("agent"), client.blocks("agent")
        back = next(each for each in client.history(["agent"]).in_memory)
    assert found.common_tokens == back.back_at < found.token_count
    page.click("agent")
    page.until(f"document.querySelector('.strip') && {READY}")
    assert page.get("document.querySelector('.scale').innerText").endswith(f"{held.token_count} tokens")
    assert f"It has the first {found.common_tokens} tokens of @{found.version}." in page.text()
    assert f"0 to {found.common_tokens}, of a block to {found.blocks[0].tokens}" in page.text()
    page.click("Show text")
    page.get("document.querySelector('.strip').focus()")
    page.press("End")
    page.until("document.querySelector('.texts:not(.old) pre')")
    text = page.get("document.querySelector('.texts').innerText")
    assert "7:45" in text
    assert "6:30" not in text
    page.click("@1")
    page.until(f"document.querySelector('.picked')?.innerText === '@1' && document.querySelector('.strip') && {READY}")
    assert page.get("document.querySelector('.scale').innerText").endswith(f"{found.token_count} tokens")
    assert "It has the first" not in page.text()
    sound(page, there)


def test_the_last_version_is_the_newest_also_of_a_session_that_goes_on_from_another(page: Tab, there: Served) -> None:
    with Client(there.daemon.socket) as client:
        client.fork("agent@1", "older")
        client.append("older", text=" more")
        client.sleep("older")
        client.wake("older@1")
        newest, own = client.show("older").versions[-1].version, client.show("older").info.version
        assert newest == own + 1
        page.get("location.hash = '#/session/default%2Folder'")
        page.until(
            f"document.querySelector('h1').innerText.startsWith('older') && document.querySelector('.strip') && {READY}"
        )
        assert f"@{newest}, " in page.text()
        client.delete("older")


def test_what_an_agent_knew_and_the_way_back_there_take_five_clicks(page: Tab, there: Served) -> None:
    page.click("agent")
    page.until(f"document.querySelector('.strip') && {READY}")
    page.click("@1")
    page.until("document.activeElement.matches('.strip')")
    assert page.get("document.querySelector('.picked').innerText") == "@1"
    assert page.get("getComputedStyle(document.activeElement).outlineStyle") == "solid", "a click changes what is seen"
    page.click("Show text")
    page.until("document.querySelector('.texts:not(.old) pre')")
    assert "It is 06:30" in page.get("document.querySelector('.texts').innerText")
    page.click("Fork from here …")
    page.until("document.activeElement.name === 'name'")
    for letter in "back":
        page.press(letter)
    page.click("Fork")
    page.until("document.body.innerText.includes('Made back with')")
    with Client(there.daemon.socket) as client:
        assert client.show("back").provenance.forked_from.session == "torpor://default/agent"
        client.delete("back")
    sound(page, there)


# --- keys and values


CELLS = "[...document.querySelectorAll('.cell')].map(cell => cell.getAttribute('aria-label'))"


@pytest.fixture(scope="module")
def notes(there: Served) -> Iterator[str]:
    """The address of a session of two versions."""
    with Client(there.daemon.socket) as client:
        client.append("notes", text="one two three " * 40, create=True)
        client.save("notes")
        client.append("notes", text="four five six " * 40)
        client.save("notes")
        yield session("notes")
        client.delete("notes")


def test_maps_are_computed_when_asked_for_with_the_figures_of_the_command(page: Tab, there: Served, notes: str) -> None:
    page.get(f"location.hash = {json.dumps(notes)}")
    page.until("document.body.innerText.includes('Compute them')")
    assert not any(each.endswith("/analysis") for each in page.requests)
    page.click("Compute them")
    page.until("document.querySelector('.matrix')")
    with Client(there.daemon.socket) as client:
        document: dict[str, Any] = json.loads(client.analyze("notes").artifact)
    names = [array["name"] for array in document["layers"][0]["arrays"]]
    heads = len(document["layers"][0]["arrays"][0]["rms"]["mean"])
    cells = page.get(CELLS)
    assert len(cells) == len(document["layers"]) * len(names) * heads
    norms = [
        f"layer {layer['path']}, {array['name']}, head {head}: "
        for layer in document["layers"]
        for array in layer["arrays"]
        for head in range(heads)
    ]
    assert [cell[: len(norm)] for cell, norm in zip(cells, norms, strict=True)] == norms
    figures = [mean for layer in document["layers"] for array in layer["arrays"] for mean in array["rms"]["mean"]]
    shown = [float(cell.rpartition(": ")[2]) for cell in cells]
    assert shown == pytest.approx(figures, rel=0.06)
    page.click("drift from its parent, of the length")
    page.until(f"document.querySelectorAll('.cell').length === {len(document['layers']) * len(names)}")
    assert f"Drift is from @{document['drift']['parent']['version']}" in page.text()
    page.click("outliers beyond 6 sigma")
    page.until(f"document.querySelectorAll('.cell').length === {len(norms)}")
    assert page.faults == []


def test_a_cell_is_reached_by_keyboard_and_its_figure_is_told_in_words(page: Tab, there: Served, notes: str) -> None:
    page.get(f"location.hash = {json.dumps(notes)}")
    page.click("Compute them")
    page.until("document.querySelector('.matrix')")
    page.get("document.querySelector('.matrix').focus()")
    for key in ("ArrowDown", "ArrowRight"):
        page.press(key)
    page.until("document.querySelector('.cell[aria-selected=true]').id === 'cell-1-1'")
    says = page.get("document.querySelector('.cell[aria-selected=true]').getAttribute('aria-label')")
    assert says in page.text()


def test_the_branches_of_a_tree_hang_on_its_version_in_the_history(page: Tab, there: Served, notes: str) -> None:
    with Client(there.daemon.socket) as client:
        root = client.tree("notes").branch
        client.diverge(root, count=1, max_tokens=2)
        branches = [
            state.branch
            for state in client.history().in_memory
            if state.branch is not None and "notes" in state.session
        ]
        page.get("location.hash = '#/history'")
        page.until(f"document.body.innerText.includes('branch {branches[0]}')")
        rows = page.get(
            "[...document.querySelectorAll('.height .row')].map(row => row.innerText.replaceAll('\\n', ' '))"
        )
        for branch in branches:
            assert any(row.startswith(f"branch {branch} a branch of notes ") for row in rows)
        cells = "[...document.querySelectorAll('.height .row > div')].filter(each => /^branch/.test(each.innerText))"
        assert page.get(f"{cells}.every(each => each.scrollWidth <= each.clientWidth)"), "their ends tell them apart"
        picks = page.get("[...document.querySelectorAll('.pick')].map(each => each.innerText)")
        assert not any("branch" in each for each in picks), "what has no reference is compared with nothing"
        assert {"notes@1", "notes@2"} <= set(picks)
        assert page.faults == []


# --- hostile answers, and every width


def test_each_view_that_the_page_leads_to_is_tried(page: Tab) -> None:
    named = page.get("[...document.querySelectorAll('nav[aria-label=Views] a')].map(a => a.innerText.toLowerCase())")
    assert len(named) > 3
    assert set(named) <= set(VIEWS)


def poisoned(browser: Browser, url: str, token: str) -> Tab:
    """A tab in which all that routes tell is hostile. The policy is off: the page alone has to keep text text."""
    tab = browser.open("about:blank")
    tab.call("Page.setBypassCSP", enabled=True)
    tab.call("Page.addScriptToEvaluateOnNewDocument", source=POISONED)
    tab.go(link_of(url, token))
    tab.until("document.querySelectorAll('.height .row').length > 0")
    return tab


@pytest.mark.one_in(1)
@pytest.mark.parametrize("view", VIEWS)
def test_what_a_route_tells_stays_text(browser: Browser, there: Served, view: str) -> None:
    tab = poisoned(browser, there.url, there.token)
    VIEWS[view](tab)
    sound(tab, there)
    text = tab.text()
    assert CANARY in text
    assert MARK not in text
    assert f"\\u{ord(MARK):04x}" in text
    assert tab.get("document.documentElement.scrollWidth <= window.innerWidth")


@pytest.fixture
def broken(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> HttpThread:
    """A server whose page has one line too many: it gives a name to the parser of HTML."""
    whole = of_page.files()
    file = whole["words.js"]
    name = b"export const plain = (text) => "
    assert name in file.content
    parsed = b"(document.body.appendChild(document.createElement('p')).innerHTML = text) && "
    content = file.content.replace(name, name + parsed)
    changed: Mapping[str, of_page.File] = {**whole, "words.js": of_page.File(content, file.kind, '"planted"')}
    monkeypatch.setattr(of_page, "files", lambda: changed)
    server = begin()
    server.ask("POST", "/v1/sessions", {"session": "one", "labels": ["a label"]})
    return server


@pytest.mark.one_in(1)
def test_a_page_that_makes_markup_of_a_text_is_caught(browser: Browser, broken: HttpThread) -> None:
    """Without the policy the canary runs; with it, the browser refuses to and says so."""
    url = f"http://127.0.0.1:{broken.port}"
    poisoned(browser, url, broken.token).until("window.ran === 1")
    tab = browser.open(link_of(url, broken.token))
    until(lambda: any("TrustedHTML" in each for each in tab.faults))
    assert tab.get("window.ran") is None


@pytest.mark.one_in(3)
@pytest.mark.parametrize("width", [375, 1280, 2560])
def test_nothing_sticks_out_at_any_width(browser: Browser, there: Served, width: int) -> None:
    tab = signed_in(browser, there, width=width, dark=width == 375)
    for where in ("#/", "#/session/default%2Fchat", "#/history", "#/sharing", "#/why", "#/live"):
        tab.get(f"location.hash = {json.dumps(where)}")
        tab.until("document.querySelectorAll('.panel').length > 0 && !document.querySelector('[aria-busy=true]')")
        assert tab.get("document.documentElement.scrollWidth <= window.innerWidth"), where
    sound(tab, there)


def test_a_lost_daemon_is_told_and_what_was_seen_stays(browser: Browser, begin: Begin) -> None:
    server = begin()
    server.ask("POST", "/v1/sessions", {"session": "notes"})
    tab = browser.open(link_of(f"http://127.0.0.1:{server.port}", server.token))
    tab.until("document.querySelectorAll('.height .row').length > 0")
    server.do(server.server.stop)
    tab.get("document.dispatchEvent(new Event('visibilitychange'))")
    tab.until("document.body.innerText.includes('does not answer')")
    assert "notes" in tab.text()


def test_an_empty_store_says_how_to_begin(browser: Browser, begin: Begin) -> None:
    server = begin()
    tab = browser.open(link_of(f"http://127.0.0.1:{server.port}", server.token))
    tab.until("document.body.innerText.includes('There is no session yet')")
    assert tab.faults == []


@pytest.mark.one_in(2)
def test_ten_thousand_sessions_are_there_at_once_and_only_those_in_sight_are_drawn(
    browser: Browser, begin: Begin
) -> None:
    server = begin()
    server.ask("POST", "/v1/sessions", {"session": "one"})
    first = server.service.sessions["one"]
    for number in range(MANY - 1):
        name = f"s{number:05}"
        info = replace(first.info, session=f"torpor://default/{name}", name=name, token_count=number)
        server.service.sessions[name] = replace(first, info=info)
    tab = browser.open(link_of(f"http://127.0.0.1:{server.port}", server.token))
    tab.until("document.querySelectorAll('.height .row').length > 0")
    assert f"{MANY:,}" in tab.text()
    tab.get("document.querySelector('[role=grid]').focus()")
    tab.press("End")
    tab.until("document.querySelector('.row[aria-selected=true]').getAttribute('aria-rowindex') === '10001'")
    assert tab.get("document.querySelectorAll('.height .row').length") < 50
    assert tab.faults == []


# --- namespaces


def test_another_namespace_sees_its_own_sessions_alone(browser: Browser, there: Served) -> None:
    tab = signed_in(browser, there, TEAM)
    names = tab.get("[...document.querySelectorAll('.height .row a')].map(a => a.innerText)")
    assert set(names) == {"team/broken", "team/theirs"}
    tab.get("location.hash = '#/session/team%2Ftheirs'")
    tab.until("document.querySelector('.strip')")
    sound(tab, there)
    assert SECRET not in tab.text()
