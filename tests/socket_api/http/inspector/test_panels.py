"""Each panel of each view names commands that are there and print its figures, and leads to them as JSON."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shlex
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from typing import Final

import pytest
from torpor.cli.command_list import COMMANDS
from torpor.socket_api.client.client import Client
from torpor.tests.socket_api.http.inspector import scene
from torpor.tests.socket_api.http.inspector.browser import Browser
from torpor.tests.socket_api.http.inspector.views import VIEWS, signed_in
from torpor.tests.socket_api.http.serving import Served, serving
from torpor.tests.socket_api.real_daemon import until

PANELS: Final = """[...document.querySelectorAll('.panel')].map(panel => ({
  title: panel.querySelector('h2').innerText,
  commands: [...panel.querySelectorAll('footer code')].map(each => each.innerText),
  told: [...panel.querySelectorAll('footer button')].filter(each => each.innerText === 'JSON').length,
  text: [...panel.children].filter(each => each.tagName !== 'FOOTER').map(each => each.innerText).join('\\n'),
}))"""

FIGURE: Final = re.compile(
    r"(?<![\w.,:@-])(?:\d[\d.,]* [KMGT]iB|\d{1,3}(?:,\d{3})+|\d{3,}|[0-9a-f]{12})(?![\w.]| %| m?s\b| ago)"
)
"""A size, a count of three digits or more, or an id: fewer digits could stand anywhere."""

FEW: Final = 3

FOLLOWING: Final = ("torpor top", "torpor events")
"""Commands that go on until they are ended."""

ESCAPE: Final = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07]*\x07|[ -~])")
WIDE: Final = struct.pack("HHHH", 60, 220, 0, 0)


def words_of(command: str) -> list[str]:
    return [sys.executable, "-m", "torpor.cli.main", *shlex.split(command)[1:]]


def printed(command: str, env: dict[str, str]) -> str:
    """What a command prints; numbers of JSON as a page writes them."""
    done = subprocess.run(words_of(command), env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode in (0, 6), (command, done.stderr)
    if "--json" in command:
        return re.sub(r"\d{4,}", lambda found: f"{int(found[0]):,}", done.stdout)
    return done.stdout + done.stderr


@contextlib.contextmanager
def followed(command: str, env: dict[str, str]) -> Iterator[Callable[[], str]]:
    """A command on a wide terminal. Gives what tells all that it has printed so far."""
    ours, its = os.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, WIDE)
    os.set_blocking(ours, False)
    process = subprocess.Popen(words_of(command), env={**env, "TERM": "xterm"}, stdin=its, stdout=its, stderr=its)
    os.close(its)
    read = bytearray()

    def text() -> str:
        with contextlib.suppress(OSError):  # there is no more to read now
            while piece := os.read(ours, 1 << 16):
                read.extend(piece)
        return ESCAPE.sub("", read.decode(errors="replace"))

    try:
        yield text
    finally:
        process.terminate()
        process.wait()
        os.close(ours)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A daemon of one namespace: commands tell of all, and the page of its own."""
    with serving(tmp_path_factory.mktemp("i"), "--keep-free", "0") as found, Client(found.daemon.socket) as client:
        scene.made(found, client)
        yield found


@pytest.mark.one_in(2)
@pytest.mark.parametrize("view", VIEWS)
def test_each_panel_names_what_prints_its_figures(browser: Browser, alone: Served, view: str) -> None:
    """A few of each: a page also adds up what it is told."""
    env = {**os.environ, "TORPOR_SOCKET": alone.daemon.socket}
    names = {command.name for command in COMMANDS}
    tab = signed_in(browser, alone)
    with contextlib.ExitStack() as stack:
        following = {each: stack.enter_context(followed(each, env)) for each in FOLLOWING}
        for text in following.values():
            until(text)
        VIEWS[view](tab)
        for panel in tab.get(PANELS):
            where, commands = f"{view}: {panel['title']}", panel["commands"]
            assert {shlex.split(each)[1] for each in commands} <= names, where
            figures = set(FIGURE.findall(panel["text"]))
            if panel["title"] == "Acts" or not figures:
                continue  # an act changes what it names
            assert panel["told"] == len(commands) > 0, where
            quick = "".join(printed(each, env) for each in commands if each not in following)
            slow = [following[each] for each in commands if each in following]
            few = min(FEW, (len(figures) + 1) // 2)
            until(lambda: sum(each in quick + "".join(text() for text in slow) for each in figures) >= few)  # noqa: B023
