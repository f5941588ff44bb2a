"""LangGraph's checkpoints tied to versions: the example of docs/how-to/framework.md, with LangGraph itself."""

from __future__ import annotations

import os
import re
import subprocess
import sys

from conftest import Stage
from serving import ROOT


def test_the_example_goes_back_to_the_version_of_an_earlier_checkpoint(stage: Stage) -> None:
    page = (ROOT / "docs" / "how-to" / "framework.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"<!-- langgraph: .*?-->\n```python\n(.*?)```", page, re.DOTALL)
    stage.begin()
    homes = {"PYTHONPATH": str(ROOT / ".venv" / "typing"), "TORPOR_SOCKET": str(stage.folder / "daemon" / "t.sock")}
    done = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, env={**os.environ, **homes})
    assert done.returncode == 0, done.stderr
    whole, again = map(int, re.findall(r"\d+", done.stdout))
    assert 0 < again < whole
