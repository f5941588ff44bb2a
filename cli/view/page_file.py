"""The inspector's page as one file, which needs no daemon: its modules, its style, and the answers that they show.

Pure. A browser runs nothing of it but these modules, by their digest, and asks nobody; `asking.js` says what is read.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

FOLDER: Final = Path(__file__).parents[2] / "socket_api" / "http" / "inspector"
_ICON: Final = "/inspector/icon.svg"

_IMPORT: Final = re.compile(r'^import \{([^}]*)\} from "\./([\w.]+)";$', re.MULTILINE)
_EXPORT: Final = re.compile(r"^export (?=(?:async function|function|const) (\w+))", re.MULTILINE)
_EXPORTS: Final = re.compile(r"export\{([^}]*)\};?\s*$")
"""As a bundler writes them: `a as b`."""


def page_with(kept: Mapping[str, Any]) -> bytes:
    """The file, in ASCII but for the modules. kept: what `asking.js` reads, plain values."""
    icon = f"data:image/svg+xml;base64,{base64.b64encode((FOLDER / 'icon.svg').read_bytes()).decode()}"
    style, script = _read("style.css"), script_of("main.js").replace(_ICON, icon)
    policy = "; ".join(
        (
            *("default-src 'none'", f"script-src {_digest(script)}", f"style-src {_digest(style)}", "img-src data:"),
            *("base-uri 'none'", "form-action 'none'", "require-trusted-types-for 'script'", "trusted-types 'none'"),
        )
    )
    # In a script's text `<` could begin its end; JSON has it within strings alone.
    told = json.dumps(kept, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    parts = {
        "charset=": f'<meta charset="utf-8"><meta http-equiv="content-security-policy" content="{policy}">',
        'rel="stylesheet"': f"<style>{style}</style>",
        'rel="modulepreload"': "",
        'type="module"': f'<script type="application/json" id="kept">{told}</script>'
        f'<script type="module">{script}</script>',
    }
    lines = _read("index.html").splitlines()
    whole = [next((part for sign, part in parts.items() if sign in line), line.replace(_ICON, icon)) for line in lines]
    return "\n".join(whole).encode()


def script_of(name: str) -> str:
    """A module and all that it imports as one, in which each has its own names."""
    modules: dict[str, str] = {}
    for each, text in _with_imports(name):
        text = _IMPORT.sub(r'const {\1} = modules["\2"];', text)
        exported = [name.strip().split(" as ") for name in "".join(_EXPORTS.findall(text)).split(",") if name]
        exported += [[name] for name in _EXPORT.findall(text)]
        text = _EXPORT.sub("", _EXPORTS.sub("", text))
        given = ", ".join(f"{names[-1]}: {names[0]}" for names in exported)
        modules[each] = f'modules["{each}"] = await (async () => {{\n{text}\nreturn {{ {given} }};\n}})();\n'
    return f"const modules = {{}};\n{''.join(modules.values())}"


def _with_imports(name: str, above: frozenset[str] = frozenset()) -> Iterator[tuple[str, str]]:
    """The modules that one imports, and behind them itself; a module may come several times."""
    text = _read(name)
    for _, imported in _IMPORT.findall(text):
        if imported not in above:
            yield from _with_imports(imported, above | {name})
    yield name, text


def _read(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
