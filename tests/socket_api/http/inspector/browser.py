"""A headless Chromium, driven over its DevTools protocol by a pipe: no package and no port for it."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any, Final

DEADLINE_S: Final = 60.0
NAMES: Final = ("chromium", "chromium-browser", "google-chrome")
_ARGUMENTS: Final = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars"),
)
_CODES: Final = {"Enter": 13, "Tab": 9, "Escape": 27, "End": 35, "Home": 36} | {
    "ArrowDown": 40,
    "ArrowUp": 38,
    "ArrowLeft": 37,
    "ArrowRight": 39,
}


def program() -> str | None:
    """The Chromium of this machine."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Refused(Exception):
    """The browser did not do what it was asked: the page has just gone to another address."""


class Browser:
    """A process of Chromium."""

    def __init__(self, folder: Path) -> None:
        found = program()
        assert found is not None
        to_it, from_it = os.pipe(), os.pipe()
        # Above 4, so that neither is closed by the other's place.
        ends = [os.dup2(end, 100 + at, inheritable=True) for at, end in enumerate((to_it[0], from_it[1]))]

        def place() -> None:
            os.dup2(ends[0], 3)
            os.dup2(ends[1], 4)

        self._process = subprocess.Popen(
            [found, *_ARGUMENTS, f"--user-data-dir={folder}", "about:blank"],
            preexec_fn=place,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for end in (*ends, to_it[0], from_it[1]):
            os.close(end)
        self._to, self._from = to_it[1], from_it[0]
        self._number = 0
        self._told = threading.Condition()
        self._answers: dict[int, dict[str, Any]] = {}
        self.events: list[dict[str, Any]] = []
        self._contexts: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        rest = b""
        # Small, for each read takes memory of this size at once, and other tests of the process measure memory.
        while piece := os.read(self._from, 1 << 14):
            *messages, rest = (rest + piece).split(b"\0")
            with self._told:
                for message in map(json.loads, messages):
                    if "id" in message:
                        self._answers[message["id"]] = message
                    else:
                        self.events.append(message)
                self._told.notify_all()

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """Ask, and wait for the answer."""
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": params} | ({"sessionId": session} if session else {})
        os.write(self._to, json.dumps(message).encode() + b"\0")
        with self._told:
            assert self._told.wait_for(lambda: number in self._answers, DEADLINE_S), f"{method}: no answer"
            answer = self._answers.pop(number)
        if "error" in answer:
            raise Refused(f"{method}: {answer['error']}")
        result: dict[str, Any] = answer["result"]
        return result

    def open(self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> Tab:
        """A new tab."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        self._contexts.append(context)
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        tab = Tab(self, target, self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"])
        for domain in ("Page", "Runtime", "Network", "Log"):
            tab.call(f"{domain}.enable")
        tab.size(width, height)
        tab.scheme(dark)
        tab.go(url)
        return tab

    def close_tabs(self) -> None:
        """Close what was opened, and forget what it told."""
        while self._contexts:
            self.call("Target.disposeBrowserContext", browserContextId=self._contexts.pop())
        self.events.clear()

    def end(self) -> None:
        """Close it."""
        self._process.terminate()
        self._process.wait()
        os.close(self._to)


class Tab:
    """A page of the browser."""

    def __init__(self, browser: Browser, target: str, session: str) -> None:
        self._browser = browser
        self._target = target
        self._session = session

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **params)

    def close(self) -> None:
        self._browser.call("Target.closeTarget", targetId=self._target)

    def size(self, width: int, height: int) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )

    def scheme(self, dark: bool, *, still: bool = False) -> None:
        """Light or dark, and whether little is to move."""
        features = {"prefers-color-scheme": "dark" if dark else "light"} | (
            {"prefers-reduced-motion": "reduce"} if still else {}
        )
        self.call(
            "Emulation.setEmulatedMedia", features=[{"name": name, "value": value} for name, value in features.items()]
        )

    def go(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def get(self, script: str) -> Any:
        """The value of an expression."""
        told = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    def until(self, script: str) -> None:
        """Wait for an expression to be true."""
        deadline = time.monotonic() + DEADLINE_S
        while not self._seen(script):
            assert time.monotonic() < deadline, f"never: {script}\n{self.text()[:2000]}"
            time.sleep(0.02)

    def _seen(self, script: str) -> bool:
        """Whether an expression is true; not so where the page is not there yet."""
        try:
            return bool(self.get(f"(() => {{ try {{ return !!({script}) }} catch {{ return false }} }})()"))
        except Refused:
            return False

    def text(self) -> str:
        return str(self.get("document.body.innerText"))

    def click(self, name: str) -> None:
        """Click the button or link of this text."""
        every = "[...document.querySelectorAll('button, a, label, summary')]"
        found = f"{every}.find(each => each.innerText.trim() === {json.dumps(name)})"
        self.until(f"!!{found}")
        self.get(f"{found}.click()")

    def press(self, key: str, *, shift: bool = False) -> None:
        """Press a key of the keyboard."""
        code = _CODES.get(key, ord(key[0].upper()))
        more = {"text": "\r" if key == "Enter" else key} if len(key) == 1 or key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=code,
                modifiers=8 if shift else 0,
                **(more if kind == "keyDown" else {}),
            )

    def heap_bytes(self) -> int:
        """What the scripts of the page hold, without what nothing refers to any more."""
        self.call("HeapProfiler.collectGarbage")
        return int(self.call("Runtime.getHeapUsage")["usedSize"])

    def shot(self, path: Path) -> None:
        """A picture of the whole page, as tall as it is now: the browser itself takes the height of its last frame."""
        size = self.get("({ x: 0, y: 0, scale: 1, width: innerWidth, height: document.documentElement.scrollHeight })")
        told = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=size)
        path.write_bytes(base64.b64decode(told["data"]))

    @property
    def faults(self) -> list[str]:
        """What the console told as an error, and what no code caught."""
        found = []
        for event in self._events():
            params = event["params"]
            if event["method"] == "Runtime.exceptionThrown":
                found.append(str(params["exceptionDetails"]))
            elif event["method"] == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
                found.append(str(params["args"]))
            elif event["method"] == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                found.append(str(params["entry"]))
        return found

    @property
    def requests(self) -> list[str]:
        """The addresses that were asked for."""
        return [e["params"]["request"]["url"] for e in self._events() if e["method"] == "Network.requestWillBeSent"]

    def _events(self) -> list[dict[str, Any]]:
        return [event for event in list(self._browser.events) if event.get("sessionId") == self._session]


def link_of(url: str, token: str) -> str:
    """A link that signs a browser in once."""
    asked = urllib.request.Request(f"{url}/inspector/link", data=b"{}", headers={"x-api-key": token})
    with urllib.request.urlopen(asked) as answer:
        return f"{url}/#sign-in={json.load(answer)['code']}"
