"""docs/how-to/clients.md: each example gets an answer. The settings of coding agents are those that their tests run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Stage
from front import require_nothing_read_twice
from pages import FRAMEWORKS, documented


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_an_example_gets_an_answer(stage: Stage, name: str) -> None:
    front = stage.begin()
    example = documented(name, front)
    known = {**os.environ, "TORPOR_TOKEN": front.token}
    done = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, env=known, check=False)
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
