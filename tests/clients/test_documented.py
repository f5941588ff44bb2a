"""docs/how-to/clients.md: each example gets an answer. The settings of coding agents are those that their tests run."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from conftest import Stage
from serving import ROOT

PAGE = (ROOT / "docs" / "how-to" / "clients.md").read_text(encoding="utf-8")
EXAMPLES = dict(re.findall(r"<!-- framework: (.*?) -->\n```python\n(.*?)```", PAGE, re.DOTALL))


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_gets_an_answer(stage: Stage, name: str) -> None:
    front = stage.begin()
    example = EXAMPLES[name].replace("http://127.0.0.1:8080", front.url)
    known = {**os.environ, "TORPOR_TOKEN": front.token}
    done = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, env=known, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    (exchange,) = front.exchanges
    assert exchange.status == 200
