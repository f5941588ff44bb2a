"""Places of a user's files: the platform's folder, or one sentence where the system knows no home."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import platformdirs
import pytest
from torpor.errors import NoHome
from torpor.places import expanded, user_folder


def homeless(name: str) -> Path:
    raise RuntimeError("could not determine the home directory")


def test_a_user_without_a_home_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    assert user_folder("state") == platformdirs.user_state_path("torpor")
    monkeypatch.setattr(platformdirs, "user_state_path", homeless)
    with pytest.raises(NoHome, match="Set HOME"):
        user_folder("state")


def test_the_home_of_a_user_that_there_is_not_is_told_with_the_path() -> None:
    with pytest.raises(NoHome, match=r"'~nobody-of-this-name/store'"):
        expanded("~nobody-of-this-name/store")
    assert expanded("models/a~b") == Path("models/a~b")


@pytest.mark.one_in(1)
@pytest.mark.parametrize("command", ["ls", "ensure", "doctor", "du"])
def test_a_command_that_needs_a_home_ends_with_a_sentence(command: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-P", "-m", "torpor.cli.main", command],
        env={"TORPOR_STORE": "~nobody-of-this-name/store", "TORPOR_SOCKET": "/nonexistent/torpor.sock"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stdout) == (1, "")
    assert "error no_home" in ran.stderr
    assert "Traceback" not in ran.stderr
