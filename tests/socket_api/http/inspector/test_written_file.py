"""The file of `torpor inspect --html` in a browser, which asks no daemon: its views, its text, its policy."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from torpor.tests.socket_api.http.inspector.browser import Browser, Tab
from torpor.tests.socket_api.http.inspector.scene import CANARY, SECRET_WORDS
from torpor.tests.socket_api.http.inspector.views import session
from torpor.tests.socket_api.http.serving import Served

TOLD, READ = "told.html", "read.html"
"""Of the daemon, with text; and of the files of its store, without."""

VIEWS = {
    "#/": "on disk",
    session("chat"): "Versions",
    session("damaged"): "Blocks",
    "#/history": "tree@1",
    "#/sharing": "A cell says how many",
    "#/why": "What requests cost",
}
"""The views of a file, and what is seen there."""


@pytest.fixture(scope="module")
def files(there: Served, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of both."""
    folder = tmp_path_factory.mktemp("f")
    for name, options in (
        (TOLD, ("--socket", there.daemon.socket, "--with-text")),
        (READ, ("--store", there.daemon.store)),
    ):
        command = [sys.executable, "-m", "torpor.cli.main", "inspect", "--html", folder / name, *options]
        subprocess.run(list(map(str, command)), check=True, capture_output=True, timeout=120)
    return folder


def opened(browser: Browser, file: Path, **how: object) -> Tab:
    tab = browser.open(file.as_uri(), **how)  # type: ignore[arg-type]
    tab.until("document.querySelectorAll('.height .row').length > 0")
    return tab


def see(tab: Tab, where: str) -> None:
    """Go to a view; what a narrow window leaves out is not waited for."""
    tab.get(f"location.hash = {json.dumps(where)}")
    shown = f"document.body.innerText.includes({json.dumps(VIEWS[where])})"
    tab.until(f"{shown} && !document.querySelector('[aria-busy=true]')")
    assert tab.get("document.documentElement.scrollWidth <= window.innerWidth"), where


def sound(tab: Tab, file: Path) -> None:
    """Nothing was told on the console, nothing was asked for but the file, and no text has become a script."""
    assert tab.faults == []
    assert {each for each in tab.requests if not each.startswith("data:image/")} == {file.as_uri()}
    assert tab.get("window.ran") is None
    assert "This view failed" not in tab.text()


@pytest.mark.parametrize("name", [TOLD, READ])
def test_each_view_is_there_without_a_daemon_and_without_acts(browser: Browser, files: Path, name: str) -> None:
    tab = opened(browser, files / name)
    assert CANARY[:20] in tab.text(), "a label"
    for where in VIEWS:
        see(tab, where)
    see(tab, session("chat"))
    tab.until("document.querySelector('[role=radiogroup]')")  # the ribbon comes behind what is waited for
    for absent in ("Acts", "Live", "Sign out", "Fork from here", "Compute them"):
        assert absent not in tab.text()
    assert ("Show text" in tab.text()) == (name == TOLD)
    sound(tab, files / name)


def test_its_text_is_shown_as_text_and_one_without_text_has_none(browser: Browser, files: Path) -> None:
    tab = opened(browser, files / TOLD, dark=True)
    see(tab, session("chat"))
    tab.click("Show text")
    tab.get("document.querySelector('.strip').focus()")
    tab.press("End")
    tab.until(f"document.querySelector('.texts')?.innerText.includes({json.dumps(CANARY)})")
    sound(tab, files / TOLD)
    assert SECRET_WORDS in (files / TOLD).read_text()
    assert SECRET_WORDS not in (files / READ).read_text()


def test_what_a_file_does_not_have_names_the_command_that_prints_it(browser: Browser, files: Path) -> None:
    tab = opened(browser, files / READ)
    see(tab, "#/history")
    for name in ("chat@1", "fork@1"):
        tab.click(name)
    tab.until("document.querySelector('.failure')")
    assert "This file does not have it" in tab.text()
    assert "torpor diff chat@1 fork@1" in tab.text()
    sound(tab, files / READ)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("width", [375, 2560])
def test_nothing_sticks_out_at_any_width(browser: Browser, files: Path, width: int) -> None:
    tab = opened(browser, files / READ, width=width)
    for where in VIEWS:
        see(tab, where)
