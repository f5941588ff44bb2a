"""An option costs one declaration, and the code that uses it: then the command line has it, its help, a daemon in the
background, the configuration file, a change of that while the daemon runs, and the reference."""

from __future__ import annotations

from pathlib import Path

import pytest
from torpor.tests.changed_copy import ROOT, copy_package, put, require_sound, serving

DECLARATION = """    tone: Annotated[
        Literal["plain", "warm"], Option("How the daemon tells its version.", "Options", changes="CHANGES")
    ] = "plain"
"""
BEFORE = "version=__version__"
USE = "version=f'{parts.options.tone} {__version__}'"

PROGRAM = """
import os, signal, subprocess, sys, time
from pathlib import Path
from torpor.cli.serve.serve_parameters import arguments_of, given_of
from torpor.daemon.options.configuration import read_configuration
from torpor.daemon.errors import InvalidConfiguration
from torpor.socket_api import Client

socket, file, changes = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]

shown = subprocess.run([sys.executable, "-m", "torpor.cli.main", "serve", "--help"], capture_output=True, text=True)
assert "--tone" in shown.stdout and "How the daemon tells its version." in shown.stdout, shown
assert "Default: plain." in shown.stdout and "<plain|warm>" in shown.stdout, shown.stdout
wrong = [sys.executable, "-m", "torpor.cli.main", "serve", "--tone", "cold"]
refused = subprocess.run(wrong, capture_output=True, text=True)
assert refused.returncode == 2 and "'cold' is not one of 'plain', 'warm'" in refused.stderr, refused
assert arguments_of(given_of({"tone": "warm"})) == ["--tone", "warm"]

other = file.with_name("other.toml")
for text, told in (
    ("tone = 'cold'", "tone: it must be 'plain' or 'warm'"),
    ("tune = 'warm'", "tune: this key is not known; tone is, if that was meant"),
):
    other.write_text(text)
    try:
        read_configuration(other)
        raise AssertionError(text)
    except InvalidConfiguration as refusal:
        assert told in refusal.message, refusal.message

with Client(socket) as client:
    assert client.status().version.startswith("warm "), "as the file says at the start"
    file.write_text("tone = 'plain'\\n")
    os.kill(client.status().pid, signal.SIGHUP)
    while client.status().config.reloads == 0:
        assert client.status().config.problem is None, client.status().config
        time.sleep(0.01)
    status = client.status()
    if changes == "at once":
        assert status.version.startswith("plain ") and status.config.waits_for_restart == ()
    else:
        assert status.version.startswith("warm ") and status.config.waits_for_restart == ("tone",)

sys.path.insert(0, sys.argv[4])
import reference
(row,) = [line for line in reference.TABLES["configuration"]() if "`tone`" in line]
said = f'| `tone` | `"plain"`, `"warm"` | `--tone` | plain | {changes} | How the daemon tells its version. |'
assert row == said, row
assert any("`--tone` | `plain`, `warm` |" in line for line in reference.TABLES["command"]("serve"))
print("an option once")
"""


def put_option(package: Path, changes: str) -> None:
    declaration = DECLARATION.replace("CHANGES", changes)
    put(package / "daemon" / "options" / "serve_options.py", declaration, before="    scrub_rate: ")
    put(package / "daemon" / "verbs" / "process.py", USE, instead_of=BEFORE)


def test_what_an_option_costs_has_its_place_in_the_code(tmp_path: Path) -> None:
    """Each commit checks this, though few try the option."""
    put_option(package := copy_package(tmp_path), "at once")
    require_sound(package)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("changes", ["at once", "at the next start"])
def test_an_option_is_added_by_its_declaration_and_the_code_that_uses_it(tmp_path: Path, changes: str) -> None:
    put_option(copy_package(tmp_path), changes)

    file = tmp_path / "torpor.toml"
    file.write_text("tone = 'warm'\n")
    with serving(tmp_path, "--config", str(file), COLUMNS="200") as (_, ask):
        asked = ask(PROGRAM, tmp_path / "t.sock", file, changes, ROOT / "scripts")
    assert asked.stdout == "an option once\n", asked.stderr
