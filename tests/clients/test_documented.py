"""docs/how-to/clients.md: each example gets an answer. The settings of coding agents are those of `torpor launch`,
which their tests run."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest
from conftest import Stage
from front import require_nothing_read_twice
from pages import FRAMEWORKS, documented
from serving import INSTALLED, NODE, OLDER, ROOT, TORPOR

RUNS = {
    "js": [NODE / "node", "--input-type=module", "--eval"],
    "python": [sys.executable, "-c"],
    "llama-index": [OLDER / "python", "-c"],
}
"""How an example runs, by its framework or its language."""


@pytest.mark.parametrize(("name", "language"), FRAMEWORKS)
def test_an_example_gets_an_answer(stage: Stage, name: str, language: str) -> None:
    front = stage.begin()
    command = [*(RUNS.get(name) or RUNS[language]), documented(name, front)]
    known = {**os.environ, "TORPOR_TOKEN": front.token}
    done = subprocess.run(command, cwd=INSTALLED, capture_output=True, text=True, env=known, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    (exchange,) = front.exchanges
    assert exchange.status == 200


def test_the_commands_of_llm_get_two_answers_of_one_session(stage: Stage) -> None:
    front = stage.begin()
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    known = {"PATH": path, "HOME": str(stage.folder), "TORPOR_TOKEN": front.token}
    commands = documented("llm", front)
    done = subprocess.run(["sh", "-euc", commands], capture_output=True, text=True, env=known, check=False)
    assert done.returncode == 0, done.stderr
    assert len(front.exchanges) == 2
    require_nothing_read_twice(front.exchanges)


@pytest.mark.parametrize("page", ["http.md", "clients.md"])
def test_the_lines_of_a_page_start_a_daemon_and_name_its_token(folder: Path, page: str) -> None:
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "docs" / "how-to" / page).read_text(encoding="utf-8"), re.DOTALL)
    lines = next(block for block in blocks if "torpor serve" in block)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    known = {"PATH": f"{Path(TORPOR).parent}:{os.environ['PATH']}", "HOME": str(folder)}
    commands = lines.replace("8677", str(port)) + 'printf "token %s" "${TORPOR_TOKEN-$TOKEN}"'
    done = subprocess.run(["sh", "-c", commands], capture_output=True, text=True, env=known, check=False)
    try:
        headers = {"authorization": f"Bearer {done.stdout.rpartition('token ')[2]}"}
        assert httpx2.get(f"http://127.0.0.1:{port}/v1/models", headers=headers, timeout=60).status_code == 200, done
    finally:
        subprocess.run([TORPOR, "stop"], env=known, check=False, capture_output=True)
