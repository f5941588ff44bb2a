"""The inspector as one file: it holds the page's own modules, runs nothing else, and no text of it becomes a script."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from typing import Any

from torpor.cli.view.page_file import FOLDER, page_with, script_of

HOSTILE = "</script><script>window.ran=1</script><!-- \u2028 \ud800 ]]>"


class Read(HTMLParser):
    """A file as a browser takes it apart: the text of each element, with the attributes."""

    def __init__(self, page: bytes) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None], str]] = []
        self.feed(page.decode())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs), ""))

    def handle_endtag(self, tag: str) -> None:
        self.found.append((f"/{tag}", {}, ""))

    def handle_data(self, data: str) -> None:
        if self.found:
            tag, attributes, text = self.found[-1]
            self.found[-1] = (tag, attributes, text + data)

    def of(self, tag: str, **attributes: str) -> tuple[dict[str, str | None], str]:
        ((found, text),) = [each[1:] for each in self.found if each[0] == tag and attributes.items() <= each[1].items()]
        return found, text


def kept(**more: Any) -> dict[str, Any]:
    return {"written_ns": 1, "with_text": False, "left_out": [], "answers": {}, **more}


def digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def test_what_it_shows_is_data_whatever_is_in_it() -> None:
    told = kept(answers={HOSTILE: {"name": HOSTILE, "time_ns": 2**62}})
    read = Read(page_with(told))
    assert json.loads(read.of("script", id="kept")[1]) == told
    assert len([tag for tag, *_ in read.found if tag == "script"]) == 2


def test_its_policy_lets_its_own_script_and_style_be_and_nothing_else() -> None:
    read = Read(page_with(kept()))
    policy = read.of("meta", **{"http-equiv": "content-security-policy"})[0]["content"] or ""
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules == {
        "default-src": "'none'",
        "script-src": digest(read.of("script", type="module")[1]),
        "style-src": digest(read.of("style")[1]),
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    order = [tag for tag, *_ in read.found]
    assert order.index("meta") < order.index("style") < order.index("script"), "the policy holds for what is behind it"


def test_it_has_each_module_once_before_those_that_import_it_and_reads_no_other_file() -> None:
    script = script_of("main.js")
    made = re.findall(r'^modules\["([\w.]+)"\] = ', script, re.MULTILINE)
    assert sorted(made) == sorted(path.name for path in FOLDER.glob("*.js"))
    for place, name in enumerate(made):
        body = script.split(f'modules["{name}"] = ')[1].split("\n})();")[0]
        assert set(re.findall(r'= modules\["([\w.]+)"\];', body)) <= set(made[:place]), name
    assert not re.findall(r"^(?:import|export)\b", script, re.MULTILINE)
    page = page_with(kept()).decode()
    assert "/inspector/icon" not in page
    for _, attributes, _ in Read(page.encode()).found:
        for name in ("src", "href"):
            assert (attributes.get(name) or "data:").startswith("data:"), attributes


def test_each_import_and_export_of_the_modules_is_of_a_form_that_is_known() -> None:
    """Else it would stay in the script, which a browser would refuse."""
    for path in FOLDER.glob("*.js"):
        for line in path.read_text().splitlines():
            if line.startswith("import "):
                assert re.fullmatch(r'import \{ [\w, ]+ \} from "\./\w+\.js";', line), f"{path.name}: {line}"
            if line.startswith("export "):
                assert re.match(r"export (?:async function|function|const) \w+", line), f"{path.name}: {line}"
