"""The inspector in a browser, on a real daemon: what a person sees of sessions, by keyboard, and what nobody sees."""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from torpor.socket_api.client.client import Client
from torpor.socket_api.http.sessions import ROUTES
from torpor.tests.socket_api.http.http_rig import Begin
from torpor.tests.socket_api.http.inspector.browser import Browser, Tab, link_of
from torpor.tests.socket_api.http.serving import Served, serving
from torpor.tests.socket_api.real_daemon import until

CANARY = "<img src=x onerror=window.ran=1><script>window.ran=1</script>"
HOSTILE = f"{CANARY} \u202edesrever \u2066 ]]>&quot;'\"`${{1}} \x1b[31m"
TEAM = "the-token-of-the-team"
SECRET = "a-session-of-nobody-else"
MANY = 10_000
SLOWER = 4
"""Than alone: other tests run beside this one."""

CHOSEN = "document.querySelector('.row[aria-selected=true] .pick').innerText"
SYSTEM = "You are careful. " * 40


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A daemon with forks, a lossy session, a stripped one, a tail in the journal, and hostile words."""
    with serving(tmp_path_factory.mktemp("i"), "--keep-free", "0") as found:
        tokens = found.daemon.folder / "config" / "torpor" / "http-tokens"
        with tokens.open("a") as file:
            file.write(f"team {TEAM}\n")
        with Client(found.daemon.socket) as client:
            client.create("chat", system=SYSTEM, labels=[HOSTILE[:60]])
            client.chat("chat", message=HOSTILE, max_tokens=4)
            client.sleep("chat")
            client.fork("chat", "fork")
            client.chat("fork", message="Go on.", max_tokens=4)
            client.create(SECRET)
            client.append(SECRET, text="secret words " * 300)
            client.sleep(SECRET)
            client.fork(SECRET, "lossy")
            client.maintain("quantize", session="lossy", bits=8)
            client.create("team/theirs")
            client.append("team/theirs", text="their words")
            client.save("team/theirs")
            client.mark(SECRET, tag="before")
        yield found


@pytest.fixture
def page(browser: Browser, there: Served) -> Tab:
    return signed_in(browser, there)


def signed_in(browser: Browser, there: Served, token: str = "", **how: object) -> Tab:
    tab = browser.open(link_of(there.url, token or there.token), **how)  # type: ignore[arg-type]
    tab.until("document.querySelectorAll('.height .row').length > 0")
    return tab


def sound(tab: Tab, there: Served) -> None:
    """Nothing was told on the console, nothing came from elsewhere, and no text has become a script."""
    assert tab.faults == []
    assert {urllib.parse.urlsplit(each).netloc for each in tab.requests} == {urllib.parse.urlsplit(there.url).netloc}
    assert tab.get("window.ran") is None


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
    page.until("document.querySelectorAll('.foot .row').length === 3")
    rows = page.get("[...document.querySelectorAll('.height .row')].map(row => row.innerText.split('\\n')[0])")
    assert sorted(rows) == sorted(["chat", "fork", "lossy", SECRET])
    text = page.text()
    for each in ("on disk", "the rest", "≈ 8 bits", "changed", "In the queue".lower()):
        assert each in text
    usage = page.get(
        f"fetch('/v1/usage', {{headers: {{authorization: 'Bearer {there.token}'}}}}).then(answer => answer.json())"
    )
    assert usage["file_bytes"] == usage["alone_bytes"] + usage["shared_bytes"] + usage["rest_bytes"]
    sound(page, there)


def test_a_session_is_reached_and_its_blocks_are_read_by_keyboard_alone(page: Tab, there: Served) -> None:
    for _ in range(40):
        page.press("Tab")
        if page.get("document.activeElement.getAttribute('role')") == "grid":
            break
    page.press("End")
    page.press("ArrowUp")
    chosen = page.get("document.querySelector('.row[aria-selected=true] a').innerText")
    page.press("Enter")
    page.until(f"document.querySelector('h1').innerText.startsWith({json.dumps(chosen)})")
    page.get("location.hash = '#/session/default%2Fchat'")
    page.until("document.querySelector('.strip')")
    for _ in range(60):
        page.press("Tab")
        if page.get("document.activeElement.getAttribute('role')") == "slider":
            break
    assert page.get("document.activeElement.getAttribute('aria-valuenow')") == "1"
    page.press("End")
    last = page.get("document.activeElement.getAttribute('aria-valuemax')")
    assert page.get("document.activeElement.getAttribute('aria-valuenow')") == last != "1"
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


def test_two_points_of_the_history_are_chosen_by_keyboard_and_compared(page: Tab, there: Served) -> None:
    page.get("location.hash = '#/history'")
    page.until("document.querySelectorAll('.lanes').length > 3")
    of = "[...document.querySelectorAll('.height .row')].map(row => row.querySelector('.pick').innerText)"
    names = page.get(of)
    assert {"fork", "chat", "lossy", SECRET} <= {name.partition("@")[0] for name in names}
    version = next(name for name in names if name.startswith("chat@"))
    page.get("document.querySelector('[role=grid]').focus()")
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
    assert "a new session" in page.text()
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
    events = "document.querySelectorAll('.events li').length"
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


def test_the_matrix_tells_whose_blocks_two_sessions_share(page: Tab, there: Served) -> None:
    page.get("location.hash = '#/sharing'")
    page.until("document.querySelectorAll('.cell').length > 3")
    names = page.get("[...document.querySelectorAll('[role=rowheader] a')].map(a => a.innerText)")
    assert {"chat", "fork", SECRET} <= set(names)
    page.get("document.querySelector('.matrix').focus()")
    for _ in range(names.index("chat")):
        page.press("ArrowDown")
    for key, far in (("ArrowRight", names.index("fork") - 1), ("ArrowLeft", 1 - names.index("fork"))):
        for _ in range(far):
            page.press(key)
    page.until("document.querySelectorAll('.holders li').length > 0")
    assert "held by chat, fork" in page.get("document.querySelector('.holders li').innerText").replace("\n", " ")
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
        page.click("Fork behind this block …")
        page.until("document.activeElement.name === 'name'")
        assert "was at token 256" in page.text()
        page.press("Escape")
        page.until("!document.querySelector('.consent')")
        page.click("Fork behind this block …")
        page.until("document.activeElement.name === 'name'")
        page.press("n")
        page.press("Enter")
        page.until("document.body.innerText.includes('Made n with 256 tokens')")
        page.click("Wake …")
        page.until("document.activeElement.className === 'go'")
        assert client.show("acted").info.state == "asleep", "it has only said what it would do"
        page.press("Enter")
        page.until("document.body.innerText.includes('It is awake with')")
        page.click("Forget …")
        page.until("document.querySelector('.consent li') && !document.querySelector('.go').disabled")
        assert client.show("acted").info.version is not None
        page.click("Forget")
        page.until("document.querySelector('h1').innerText === 'Overview' || location.hash === '#/'")
        assert "torpor://default/acted" not in [each.session for each in client.list_sessions()]
        client.delete("n")
    sound(page, there)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("width", [375, 1280, 2560])
def test_nothing_sticks_out_at_any_width(browser: Browser, there: Served, width: int) -> None:
    tab = signed_in(browser, there, width=width, dark=width == 375)
    for where in ("#/", "#/session/default%2Fchat", "#/history", "#/sharing", "#/why", "#/live"):
        tab.get(f"location.hash = {json.dumps(where)}")
        tab.until("document.querySelectorAll('.panel').length > 0 && !document.querySelector('[aria-busy=true]')")
        assert tab.get("document.documentElement.scrollWidth <= window.innerWidth"), where
    sound(tab, there)


@pytest.mark.one_in(2)
def test_a_lost_daemon_is_told_and_what_was_seen_stays(browser: Browser, tmp_path: Path) -> None:
    with serving(tmp_path) as there:
        with Client(there.daemon.socket) as client:
            client.append("notes", text="some words", create=True)
        tab = signed_in(browser, there)
    tab.until("document.body.innerText.includes('does not answer')")
    assert "notes" in tab.text()


@pytest.mark.one_in(2)
def test_an_empty_store_says_how_to_begin(browser: Browser, tmp_path: Path) -> None:
    with serving(tmp_path) as there:
        tab = browser.open(link_of(there.url, there.token))
        tab.until("document.body.innerText.includes('There is no session yet')")
        sound(tab, there)


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
    first_ms, listed_ms, drawn_ms = tab.get(
        "[performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? 0,"
        " performance.getEntriesByType('resource').find(each => each.name.endsWith('/sessions')).responseEnd,"
        " performance.now()]"
    )
    assert first_ms < 1000 * SLOWER
    assert drawn_ms - listed_ms < 500 * SLOWER, "the list itself takes the daemon seconds; to draw it takes little"
    assert f"{MANY:,}" in tab.text()
    tab.get("document.querySelector('[role=grid]').focus()")
    tab.press("End")
    tab.until("document.querySelector('.row[aria-selected=true]').getAttribute('aria-rowindex') === '10001'")
    assert tab.get("document.querySelectorAll('.height .row').length") < 50
    assert tab.faults == []


# --- namespaces


def test_another_namespace_sees_its_own_sessions_alone(browser: Browser, there: Served) -> None:
    tab = signed_in(browser, there, TEAM)
    assert tab.get("[...document.querySelectorAll('.height .row a')].map(a => a.innerText)") == ["team/theirs"]
    tab.get("location.hash = '#/session/team%2Ftheirs'")
    tab.until("document.querySelector('.strip')")
    sound(tab, there)
    assert SECRET not in tab.text()


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method} {route.path}")
def test_no_route_tells_another_namespace_of_a_session(there: Served, route: object) -> None:
    from torpor.socket_api.http.sessions import SessionRoute

    assert isinstance(route, SessionRoute)
    names = [f"default%2F{SECRET}", f"torpor:%2F%2Fdefault%2F{SECRET}@1"] if route.names_session else [""]
    for name in names:
        path = route.path.replace("{session}", name)
        more = f"?other=default%2F{SECRET}" if path.endswith("difference") else ""
        body = json.dumps({"name": "mine"}).encode() if route.method == "POST" else None
        if route.path == "/v1/sessions" and route.method == "POST":
            body = json.dumps({"session": f"default/{SECRET}"}).encode()
        asked = urllib.request.Request(f"{there.url}{path}{more}", body, {"x-api-key": TEAM}, method=route.method)
        try:
            with urllib.request.urlopen(asked) as answer:
                status, told = answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            status, told = error.code, error.read().decode()
        assert SECRET not in told
        assert "secret words" not in told
        assert status == 403 if route.names_session or route.of_all or body else status == 200
