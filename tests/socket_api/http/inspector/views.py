"""The views of the page, and how a person comes to each; what holds of all of them; and answers that are hostile."""

from __future__ import annotations

import json
import urllib.parse
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from torpor.tests.socket_api.http.inspector.browser import Browser, Tab, link_of
from torpor.tests.socket_api.http.inspector.scene import CANARY, SECRET
from torpor.tests.socket_api.http.serving import Served

READY: Final = (
    "document.querySelector('.panel') && !document.querySelector('[aria-busy=true], .loading')"
    " && !/reading (their blocks )?…|working out/.test(document.body.innerText)"
)
"""Whether nothing of a view is still to come."""


def _at(address: str, seen: str) -> Callable[[Tab], None]:
    def go(tab: Tab) -> None:
        tab.get(f"location.hash = {json.dumps(address)}")
        tab.until(f"({seen}) && {READY}")

    return go


def session(name: str) -> str:
    """The address of a session's view."""
    return f"#/session/default%2F{name}"


def _text(tab: Tab) -> None:
    _at(session("chat"), "document.querySelector('.strip')")(tab)
    tab.click("Show text")
    tab.until("document.querySelector('.texts:not(.old) pre')")


def _misses(tab: Tab) -> None:
    _at(session("agent"), "document.querySelector('.miss summary')")(tab)
    tab.get("document.querySelectorAll('.panel details').forEach(each => (each.open = true))")


def _difference(tab: Tab) -> None:
    _at("#/history", "document.querySelectorAll('.lanes').length > 3")(tab)
    picks = "[...document.querySelectorAll('.pick')]"
    for name in ("^fork", "^chat.*@"):
        tab.get(f"{picks}.find(each => /{name}/.test(each.innerText)).click()")
    tab.until(f"document.querySelectorAll('.sides h3').length === 2 && {READY}")
    tab.get("document.querySelectorAll('.panel details').forEach(each => (each.open = true))")


def _sharing(tab: Tab) -> None:
    _at("#/sharing", "document.querySelectorAll('.cell').length > 3")(tab)
    of_two = "(([, row, column]) => row !== column)(each.id.split('-'))"
    tab.get(f"[...document.querySelectorAll('.cell.full')].find(each => {of_two}).click()")
    tab.until("document.querySelectorAll('.height .row').length > 0")


def _values(tab: Tab) -> None:
    _at(session("lossy"), "document.querySelector('.strip')")(tab)
    tab.click("Compute them")
    tab.until("document.querySelector('.matrix .cell')")


def _live(tab: Tab) -> None:
    _at("#/live", "document.body.innerText.includes('following')")(tab)
    headers = "{authorization: `Bearer ${sessionStorage.getItem('torpor-token')}`}"
    for verb in ("wake", "sleep"):
        path = f"/v1/sessions/default%2F{SECRET}/{verb}"
        tab.get(f"fetch('{path}', {{method: 'POST', body: '{{}}', headers: {headers}}}).then(told => told.status)")
    tab.until("document.querySelectorAll('.height .row').length > 1")


def _plan(tab: Tab) -> None:
    _at(session("lossy"), "document.querySelector('.strip')")(tab)
    tab.click("Forget …")
    tab.until("document.querySelector('.consent li')")


VIEWS: Final[Mapping[str, Callable[[Tab], None]]] = MappingProxyType(
    {
        "overview": _at("#/", "document.querySelectorAll('.foot .row').length > 2"),
        "values": _values,
        "session": _at(session("tree"), "document.querySelector('.strip')"),
        "text": _text,
        "damaged": _at(session("damaged"), "document.querySelector('.strip .k-damaged')"),
        "misses": _misses,
        "plan": _plan,
        "history": _at("#/history", "document.querySelectorAll('.lanes').length > 3"),
        "difference": _difference,
        "sharing": _sharing,
        "why": _at("#/why", "document.querySelector('.hours rect')"),
        "live": _live,
    }
)
"""By name: what brings a tab that is signed in to the view, and waits until all of it is there."""


def signed_in(browser: Browser, there: Served, token: str = "", **how: object) -> Tab:
    """A tab with the overview. how: as of `Browser.open`."""
    tab = browser.open(link_of(there.url, token or there.token), **how)  # type: ignore[arg-type]
    tab.until("document.querySelectorAll('.height .row').length > 0")
    return tab


def sound(tab: Tab, there: Served) -> None:
    """Nothing was told on the console, nothing came from elsewhere, and no text has become a script."""
    assert tab.faults == []
    assert {urllib.parse.urlsplit(each).netloc for each in tab.requests} == {urllib.parse.urlsplit(there.url).netloc}
    assert tab.get("window.ran") is None
    assert "This view failed" not in tab.text()


def tab_to(tab: Tab, wanted: str, most: int = 80) -> None:
    """Press Tab until an expression is true of `at`, what has the focus."""
    for _ in range(most):
        tab.press("Tab")
        if tab.get(f"(at => !!({wanted}))(document.activeElement)"):
            return
    raise AssertionError(f"no Tab leads to {wanted}")


MARK: Final = "\u202e"
LONG: Final = 1_000_000
_POISON: Final = f"{CANARY}{MARK}'\"`"

POISONED: Final = f"""(() => {{
  const [poison, long] = [{json.dumps(_POISON)}, "x".repeat({LONG})];
  const kept = new Set(["state", "condition", "kind", "codec", "way", "outcome", "cause", "by", "role"]);
  const texts = new Set(["text", "expected_text", "found_text", "lines"]);
  let left = long;
  const line = () => [left, (left = "")][0];
  const stays = (value, key) => kept.has(key) || /^[0-9]*$/.test(value);
  const spoilt = (value, key) =>
    typeof value === "string" ? (stays(value, key) ? value : value + poison + (texts.has(key) ? line() : "")) :
    Array.isArray(value) ? value.map(each => spoilt(each, key)) :
    value !== null && typeof value === "object" ?
      Object.fromEntries(Object.entries(value).map(([name, each]) => [name, spoilt(each, name)])) : value;
  const asked = window.fetch;
  window.fetch = async (path, given) => {{
    const real = await asked(String(path).replaceAll(encodeURIComponent(poison), ""), given);
    if (!String(path).startsWith("/v1/")) return real;
    let rest = "";
    if (real.headers.get("content-type").startsWith("text/event-stream")) return new Response(
      real.body.pipeThrough(new TextDecoderStream()).pipeThrough(new TransformStream({{
        transform: (piece, to) => {{
          const events = (rest + piece).split("\\n\\n");
          rest = events.pop();
          for (const event of events) to.enqueue(event.replace(/^data: (.*)$/m, (_, data) => {{
            const told = JSON.parse(data);
            if (told.facts) told.facts = spoilt(told.facts, "");
            if (told.result) told.result.artifact = JSON.stringify(spoilt(JSON.parse(told.result.artifact), ""));
            return `data: ${{JSON.stringify(told)}}`;
          }}) + "\\n\\n");
        }},
      }})).pipeThrough(new TextEncoderStream()), {{ headers: real.headers }});
    left = long;
    const told = JSON.stringify(spoilt(await real.json(), ""));
    return new Response(told, {{ status: real.status, headers: real.headers }});
  }};
}})()"""
"""A script for a page before its own: each text that a route tells ends in markup, a script and a mark that turns the
direction of reading, and one text of each answer in a line of a million letters. The daemon's own words stay."""
