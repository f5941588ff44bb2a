"""Looks at this machine that need MLX: each is a program of the daemon's, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from ..errors import DoctorFailed

EXAMINATION_TIMEOUT_S = 120.0  # importing MLX and fifteen small products take seconds even on a slow machine
MAX_STDERR_CHARS = 600  # shown of a failed examination's last output


def examine(program: str, *arguments: str) -> dict[str, Any]:
    """Run a program of the daemon's by its module's name, and give its report. Raises DoctorFailed: it gave none."""
    command = [sys.executable, "-P", "-m", f"torpor.daemon.{program}", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=EXAMINATION_TIMEOUT_S, check=False)
        report = json.loads(done.stdout)
    except subprocess.TimeoutExpired as error:
        raise DoctorFailed(f"The examination took more than {EXAMINATION_TIMEOUT_S:.0f} s and was ended.") from error
    except ValueError as error:
        words = done.stderr.strip()[-MAX_STDERR_CHARS:]
        raise DoctorFailed(
            f"The examination ended with status {done.returncode} and no report: {words}", status=done.returncode
        ) from error
    if not isinstance(report, dict):
        raise DoctorFailed("The examination's report is not one JSON object.")
    return report
