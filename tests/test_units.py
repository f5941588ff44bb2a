"""The unit files for systemd and launchd: well formed, and they start `torpor serve` with options that it has."""

from __future__ import annotations

import configparser
import plistlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from torpor.cli.exit_codes import LOCKED, NOT_FOUND, USAGE
from torpor.cli.registry import load_command

UNITS = Path(__file__).parents[1] / "docs" / "how-to" / "units"
OPTIONS = {option for parameter in load_command("serve").params for option in parameter.opts}


def service() -> configparser.SectionProxy:
    read = configparser.ConfigParser(interpolation=None)
    read.optionxform = str  # type: ignore[assignment,method-assign]
    read.read(UNITS / "torpor.service")
    return read["Service"]


def test_both_serve_with_options_that_there_are() -> None:
    launched = plistlib.loads((UNITS / "torpor.plist").read_bytes())["ProgramArguments"]
    for _, command, *arguments in (service()["ExecStart"].split(), launched):
        assert command == "serve"
        assert {each for each in arguments if each.startswith("--")} <= OPTIONS


def test_a_stop_may_take_as_long_as_the_daemon_does() -> None:
    kept = plistlib.loads((UNITS / "torpor.plist").read_bytes())
    assert int(service()["TimeoutStopSec"]) == kept["ExitTimeOut"] == 120 > 60, "--stop-within, and what it waits for"


def test_a_fault_that_a_new_start_would_not_mend_starts_no_new_one() -> None:
    statuses = {int(each) for each in service()["RestartPreventExitStatus"].split()}
    assert statuses == {USAGE.number, NOT_FOUND.number, LOCKED.number}


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd here")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    unit = (UNITS / "torpor.service").read_text().replace("%h/.venv/bin/torpor", sys.executable)
    (tmp_path / "torpor.service").write_text(unit)
    command = ["systemd-analyze", "--user", "verify", str(tmp_path / "torpor.service")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={"XDG_RUNTIME_DIR": str(tmp_path)})
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
