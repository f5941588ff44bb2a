"""Runs rows of the matrix, each check of a row in two processes: one that sleeps, and a new one that wakes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torpor.tests.snapshot.matrix.architectures import Case

CHILD = Path(__file__).with_name("child.py")
TIMEOUT_SECONDS = 600
OK = "ok"
BRANCHES = "branches"
"""The check of branches. Behind its `ok` stand the ways that their caches go."""


@dataclass(frozen=True, slots=True)
class Row:
    """What came of an architecture in one dtype.

    cannot_run: why mlx-lm cannot run it here, empty where it can; failed: what ended one of the processes, empty where
    nothing did; checks: what each came to, `ok` first where it is as it should be.
    """

    name: str
    module: str
    dtype: str
    cannot_run: str = ""
    failed: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    checks: dict[str, str] = field(default_factory=dict)

    @property
    def is_right(self) -> bool:
        """Whether every check was made and came to what it should."""
        return bool(self.checks) and not self.failed and all(is_ok(found) for found in self.checks.values())


def is_ok(found: str) -> bool:
    """Whether a check came to what it should."""
    return found.split(",", 1)[0] == OK


def run_row(case: Case, dtype: str) -> Row:
    """Run one row in a folder of its own, which is gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="torpor-matrix-"))
    try:
        return _run_in(folder, case, dtype)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run_in(folder: Path, case: Case, dtype: str) -> Row:
    for role in ("sleep", "wake"):
        try:
            done = subprocess.run(
                [sys.executable, str(CHILD), role, case.name, dtype, str(folder)],
                capture_output=True,
                text=True,
                timeout=TIMEOUT_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Row(case.name, case.module, dtype, failed=f"{role}: not done after {TIMEOUT_SECONDS} s")
        if (folder / "cannot_run.json").exists():
            found = _load(folder / "cannot_run.json")
            facts = {"classes": found["classes"]}
            return Row(case.name, case.module, dtype, cannot_run=found["why"], facts=facts)
        if done.returncode:
            lines = done.stderr.strip().splitlines()
            why = lines[-1] if lines else "it said nothing"
            return Row(case.name, case.module, dtype, failed=f"{role} ended with {done.returncode}: {why}")
    found = _load(folder / "woken.json")
    checks = found.pop("checks")
    return Row(case.name, case.module, dtype, facts=found, checks=checks)


def _load(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
