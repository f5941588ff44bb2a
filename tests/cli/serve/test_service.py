"""`torpor service`: what is written for systemd and launchd, when, and which commands run."""

from __future__ import annotations

import configparser
import plistlib
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from torpor.cli.errors import InvalidUsage
from torpor.cli.exit_codes import LOCKED, NOT_FOUND, USAGE
from torpor.cli.serve import last_options, service
from torpor.cli.serve.service import unit_of
from torpor.socket_api.wire.address import default_socket_path
from torpor.tests.cli.cli_rig import Torpor

HARD = {"config": Path('/a "b"/50% $HOME\\x.toml'), "store": Path("/store"), "http": 8080}
BEGIN = ["--user daemon-reload", "--user enable --now torpor.socket torpor"]
END = ["--user disable --now torpor.socket torpor", "--user daemon-reload"]


@pytest.fixture(autouse=True)
def systemctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """Stands in for systemd's; gives the calls so far. It fails where a file `fails` is."""
    (tmp_path / "bin").mkdir()
    calls, program = tmp_path / "calls", tmp_path / "bin" / "systemctl"
    program.write_text(
        f'#!/bin/sh\necho "$*" >> {calls}\n[ ! -e {tmp_path}/fails ] || {{ echo no bus >&2; exit 1; }}\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "linux")
    return lambda: calls.read_text().splitlines() if calls.exists() else []


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "systemd" / "user" / "torpor.service"


def section(text: str) -> configparser.SectionProxy:
    read = configparser.ConfigParser(interpolation=None)
    read.optionxform = str  # type: ignore[assignment,method-assign]
    read.read_string(text)
    return read["Service"]


def test_it_is_written_started_and_removed(torpor: Torpor, path: Path, systemctl: Callable[[], list[str]]) -> None:
    installed = torpor("service", "install")
    assert (installed.status, systemctl()) == (0, BEGIN)
    assert path.read_text() in installed.out
    assert f" --socket {default_socket_path()}" in section(path.read_text())["ExecStart"]
    listens = path.with_suffix(".socket")
    assert f"\nListenStream={default_socket_path()}\n" in listens.read_text()
    assert torpor("service", "install").status == 0, "it says the same"
    assert torpor("service", "remove", "--yes").status == 0
    assert (path.exists(), listens.exists(), systemctl()) == (False, False, [*BEGIN, *BEGIN, *END])
    assert torpor("service", "uninstall", "--yes", "--json").error["error"]["code"] == "nothing_to_do"


def test_its_status_tells_of_the_file_the_process_and_the_daemon(
    torpor: Torpor, path: Path, systemctl: Callable[[], list[str]]
) -> None:
    before = torpor("service", "status", "--json").document
    assert (before["installed"], before["up_to_date"], before["pid"], before["answers"]) == (False, False, None, False)
    torpor("service", "install")
    after = torpor("service", "status", "--json").document
    assert (after["path"], after["installed"], after["up_to_date"]) == (str(path), True, True)
    assert systemctl()[-2:] == ["--user is-enabled torpor", "--user show --property MainPID --value torpor"]
    path.write_text("[Service]\n")
    assert "differs from what torpor service install would write" in torpor("service", "status").out


def test_a_dry_run_shows_all_and_does_nothing(torpor: Torpor, path: Path, systemctl: Callable[[], list[str]]) -> None:
    shown = torpor("service", "install", "--dry-run", "--json").document
    assert (shown["path"], shown["done"], shown["problem"]) == (str(path), False, None)
    assert shown["left"] == [f"systemctl {each}" for each in BEGIN]
    assert (path.exists(), systemctl()) == (False, [])


@pytest.mark.parametrize("action", ["install", "uninstall"])
def test_a_changed_file_goes_only_if_one_agrees(
    torpor: Torpor, path: Path, systemctl: Callable[[], list[str]], action: str
) -> None:
    path.parent.mkdir(parents=True)
    path.write_text("[Service]\nExecStart=mine\n")
    refused = torpor("service", action, "--json")
    assert (refused.status, refused.error["error"]["code"]) == (2, "invalid_usage")
    assert (path.read_text(), systemctl()) == ("[Service]\nExecStart=mine\n", [])
    assert "-ExecStart=mine" in torpor("service", "install", "--dry-run").out
    assert torpor("service", action, "--yes").status == 0
    assert path.exists() == (action == "install")


def test_without_its_configuration_nothing_is_installed(
    torpor: Torpor, path: Path, systemctl: Callable[[], list[str]]
) -> None:
    refused = torpor("service", "install", "--config", "nowhere.toml")
    assert (refused.status, "There is no configuration" in refused.err) == (USAGE.number, True)
    assert (path.exists(), systemctl()) == (False, [])


def test_where_systemd_does_not_answer_the_commands_are_said(torpor: Torpor, path: Path, tmp_path: Path) -> None:
    (tmp_path / "fails").touch()
    installed = torpor("service", "install")
    assert (installed.status, path.exists()) == (0, True)
    assert "systemctl --user daemon-reload ended with status 1: no bus" in installed.err
    assert installed.err.endswith(
        "  systemctl --user daemon-reload\n  systemctl --user enable --now torpor.socket torpor\n"
    )
    removed = torpor("service", "uninstall", "--yes", "--json").document
    assert (removed["done"], removed["left"], path.exists()) == (True, [f"systemctl {each}" for each in END], False)


def test_it_takes_over_the_options_of_the_daemon_that_runs_and_leaves_that_to_be_stopped(
    torpor: Torpor, monkeypatch: pytest.MonkeyPatch, systemctl: Callable[[], list[str]]
) -> None:
    monkeypatch.setattr(service, "somebody_is_on", lambda _: True)
    socket = default_socket_path()
    socket.parent.mkdir(parents=True, exist_ok=True)
    last_options.remember(socket, {"http": 8080, "idle_sleep": 60, "store": "/here"})
    try:
        installed = torpor("service", "install", "--store", "/there", "--json").document
    finally:
        last_options.drop(socket)
    assert " serve --store /there --socket" in installed["text"]
    assert " --idle-sleep 60 " in installed["text"]
    assert " --http 8080" in installed["text"]
    assert installed["left"] == ["torpor stop", *(f"systemctl {each}" for each in BEGIN)]
    assert installed["problem"] == f"A daemon answers on {socket} already."
    assert systemctl() == []


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd here")
@pytest.mark.parametrize("options", [{}, HARD])
def test_systemd_takes_the_unit(tmp_path: Path, options: dict[str, object]) -> None:
    for path, text in unit_of(options).files:
        (tmp_path / path.name).write_text(text)
    files = [str(tmp_path / name) for name in ("torpor.service", "torpor.socket")]
    command = ["systemd-analyze", "--user", "verify", *files]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={"XDG_RUNTIME_DIR": str(tmp_path)})
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_words_are_quoted_as_systemd_reads_them() -> None:
    started = section(unit_of(HARD).text)["ExecStart"]
    assert started.endswith(r' serve --config "/a \"b\"/50%% $$HOME\\x.toml" --store /store --http 8080')


@pytest.mark.parametrize("platform", ["linux", "darwin"])
@pytest.mark.parametrize("path", ["/a\nExecStartPost=/bin/b", "/a\rExecStartPost=/bin/b", "/a\udcff", "/a\x1b"])
def test_what_could_be_another_line_is_refused(monkeypatch: pytest.MonkeyPatch, platform: str, path: str) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    with pytest.raises(InvalidUsage, match=r"takes no '/a\\"):
        unit_of({"store": Path(path)})


def test_launchd_gets_the_same_command(monkeypatch: pytest.MonkeyPatch) -> None:
    stop_s = int(section(unit_of({}).text)["TimeoutStopSec"])
    monkeypatch.setattr(sys, "platform", "darwin")
    unit = unit_of(HARD)
    job = plistlib.loads(unit.text.encode())
    assert job["ProgramArguments"][-7:] == [
        "serve",
        "--config",
        str(HARD["config"]),
        "--store",
        "/store",
        "--http",
        "8080",
    ]
    assert job["ExitTimeOut"] == stop_s == 120 > 60, "--stop-within, and what it waits for"
    assert (unit.path.name, unit.begin[0][:2]) == ("torpor.plist", ("launchctl", "bootstrap"))


def test_another_system_is_refused(torpor: Torpor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "freebsd")
    assert torpor("service", "install", "--json").error["error"]["code"] == "invalid_usage"


def test_without_a_file_there_is_nothing_to_reload() -> None:
    assert "ExecReload" in section(unit_of(HARD).text)
    assert "ExecReload" not in section(unit_of({}).text)


def test_a_fault_that_a_new_start_would_not_mend_starts_no_new_one() -> None:
    statuses = {int(each) for each in section(unit_of({}).text)["RestartPreventExitStatus"].split()}
    assert statuses == {USAGE.number, NOT_FOUND.number, LOCKED.number}
