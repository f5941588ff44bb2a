"""The blocks of docs/how-to/clients.md, as a reader has them who changed the address."""

from __future__ import annotations

import re

from front import Front
from serving import ROOT

_PAGE = (ROOT / "docs" / "how-to" / "clients.md").read_text(encoding="utf-8")
_BLOCKS = re.compile(r"<!-- (client|framework): (.*?) -->\n```(\w+)\n(.*?)```", re.DOTALL)

FRAMEWORKS = tuple((name, language) for kind, name, language, _ in _BLOCKS.findall(_PAGE) if kind == "framework")
"""Those with an example, and its language."""


def documented(name: str, front: Front) -> str:
    """What the page says for a client or a framework."""
    (block,) = (block for _, its_name, _, block in _BLOCKS.findall(_PAGE) if its_name == name)
    return str(block).replace("http://127.0.0.1:8677", front.url).replace("$TORPOR_TOKEN", front.token)
