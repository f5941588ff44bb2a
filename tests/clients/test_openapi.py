"""What schemathesis makes of `/openapi.json`: requests that it allows, and requests that it does not. None may be a
failure of the daemon."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from conftest import Stage
from serving import larger_context

EXAMPLES = 20
"""For each route."""


def test_no_request_that_is_made_of_the_description_is_a_fault_of_the_daemon(stage: Stage) -> None:
    """An answer fills the context at once: it has 256 positions."""
    model = larger_context(stage.folder, 256)
    daemon = stage.begin("--model", f"demo={model}").daemon
    options = [*("--checks", "not_a_server_error"), *("--phases", "fuzzing"), *("-n", str(EXAMPLES))]
    options += [*("--header", f"x-api-key: {daemon.token}"), "--continue-on-failure"]
    options += [*("--request-timeout", "60"), *("--suppress-health-check", "all"), *("--warnings", "off")]
    command = [str(Path(sys.executable).with_name("st")), "run", f"{daemon.url}/openapi.json", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=stage.folder)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "Test cases" in done.stdout
    assert daemon.get("/healthz") == {"status": "ok"}
