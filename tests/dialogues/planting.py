"""Copies of the package with a fault put back, and sweeps that run with them in a process of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from torpor.tests.changed_copy import ROOT, copy_package, put

_TESTS: Final = (
    *("daemon/models/template_families.py", "model_making.py"),
    *("socket_api/real_daemon.py", "socket_api/loop_gaps.py"),
)
"""What the sweeps import beside their own folder."""


def planted(folder: Path, file: str, what: str, instead: str) -> Path:
    """A copy of the package in a folder, with something in place of a text that stands once in one of its files."""
    package = copy_package(folder)
    shutil.copytree(ROOT / "tests" / "dialogues", package / "tests" / "dialogues")
    for name in _TESTS:
        (package / "tests" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "tests" / name, package / "tests" / name)
    put(package / file, instead, instead_of=what)
    return package


def printed(package: Path, script: str, *arguments: str) -> str:
    """What a script of this folder prints, with the package in a folder."""
    environment = dict(os.environ) if package == ROOT else {**os.environ, "PYTHONPATH": str(package.parent)}
    command = [sys.executable, "-P", str(package / "tests" / "dialogues" / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
