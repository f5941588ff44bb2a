"""`torpor service`: a daemon that starts with the user's login and comes back after a crash, by systemd or launchd."""

from __future__ import annotations

import difflib
import os
import plistlib
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from ...memvid.disk.location import default_store_path
from ...places import expanded
from ...socket_api.errors import DaemonUnreachable
from ...socket_api.wire.address import default_socket_path
from ..errors import DaemonStartFailed, InvalidUsage, NothingToDo
from ..exit_codes import OK
from ..reach import background
from ..reach.consent import YesOption, has_consent
from ..reach.daemon_link import connect, nobody_is_there
from ..reach.options import JsonOption, argument, option
from ..reach.writing import write_whole
from ..view.output import Output, plain, typed
from ..view.table import facts_table
from . import last_options
from .serve_parameters import arguments_of, given_of, takes

_UNITS: Final = Path(__file__).parent / "units"
_NAME: Final = "torpor"
_MOST_CHARS: Final = 600
_BARE: Final = re.compile(r"[A-Za-z0-9_@+=:,./-]+")
_UNPRINTABLE: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
"""systemd begins a line at some of these, launchd reads others as something else, and the last ones are no text."""

Words = tuple[str, ...]
"""A command."""

ActionArgument = Annotated[
    Literal["install", "status", "remove", "uninstall"],
    argument("install|status|remove", "Write and enable, show, or undo; uninstall is remove."),
]
DryRunOption = Annotated[bool, option("--dry-run", "Show the file and the commands, and do nothing.")]


@dataclass(frozen=True, slots=True)
class Unit:
    """What a supervisor reads of a service. begin, end: the commands that enable and start it, and that undo all."""

    path: Path
    text: str
    begin: tuple[Words, ...]
    end: tuple[Words, ...]


@takes("model", "config", "http", "store", "socket")
def service(
    action: ActionArgument,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    as_json: JsonOption = False,
    **values: Any,
) -> int:
    """Install shows and writes a unit of systemd for this user, or a job of launchd, and starts it. The service has the
    options of the daemon that runs now, and those given here; other settings can stand in the file of --config. A file
    that is there and says something else is replaced only if you agree. Status shows whether there is one, whether it
    runs, and whether its file is what an install would write. Remove stops the service and removes the file.

    [bold]Examples[/]

    [cyan]torpor service install --dry-run[/]
    [cyan]torpor service install --config ~/agents/torpor.toml[/]
    [cyan]torpor service status[/]
    [cyan]torpor service remove[/]
    """
    output, given, installs = Output(as_json=as_json), given_of(values), action == "install"
    socket = given.get("socket") or default_socket_path()
    options = {"store": default_store_path(), **last_options.recall(socket), **given, "socket": socket}
    if action == "status":
        _status(output, unit_of(options), socket)
        return OK.number
    config = options.get("config")
    if installs and config is not None and not Path(config).is_file():
        raise InvalidUsage(f"There is no configuration {config}, so the service would not start. Write it first.")
    unit = unit_of(options)
    before = unit.path.read_text(encoding="utf-8", errors="replace") if unit.path.exists() else None
    if before is None and not installs:
        raise NothingToDo(f"There is no service to remove: {unit.path} is not there.", path=str(unit.path))
    if installs and not as_json:
        _show(output, unit, before)
    is_running = installs and _is_running(socket)
    left = list(unit.begin if installs else unit.end)
    question = f"Replace {unit.path}?" if installs else f"Stop the service and remove {unit.path}?"
    agreed = not dry_run and (
        yes
        or (installs and before in (None, unit.text))
        or has_consent(question, f"change {unit.path}", as_json=as_json)
    )
    problem = f"A daemon answers on {socket} already." if is_running else None
    if agreed and installs:
        _write(unit)
    if is_running:
        left.insert(0, ("torpor", "stop"))
    elif agreed:
        left, problem = _run(left)
    if as_json:
        facts = {"action": action, "path": str(unit.path), "text": unit.text, "done": agreed, "problem": problem}
        output.document("service", facts | {"left": [shlex.join(each) for each in left]})
    else:
        _tell(output, action, left, problem, agreed=agreed)
    return OK.number


def _status(output: Output, unit: Unit, socket: Path) -> None:
    """What there is of the service, and of the daemon on its socket."""
    there = unit.path.read_text(encoding="utf-8", errors="replace") if unit.path.exists() else None
    facts = {
        "path": str(unit.path),
        "installed": there is not None,
        "up_to_date": there == unit.text,
        "starts_with_login": {"enabled": True, "disabled": False}.get(_asked_of_systemd("is-enabled")),
        "pid": main_pid(),
        "socket": str(socket),
        "answers": _is_running(socket),
    }
    if output.as_json:
        output.document("service", {"action": "status", **facts})
        return
    table = facts_table()
    table.add_row("file", plain(unit.path) + ("" if there is not None else ", which is not there: no service"))
    if there is not None and there != unit.text:
        table.add_row("", f"differs from what {typed('torpor service install')} would write: --dry-run shows how")
    if there is not None and facts["starts_with_login"] is not None:
        table.add_row("login", "starts it" if facts["starts_with_login"] else "does not start it")
    if there is not None:
        table.add_row("process", str(facts["pid"] or "none: it does not run"))
    table.add_row("daemon", f"{'answers' if facts['answers'] else 'none answers'} on {plain(socket)}")
    output.show(table)


def main_pid() -> int | None:
    """The process that the service runs; None if there is none, or the supervisor does not tell."""
    if sys.platform == "darwin":
        told = re.search(r"^\s*pid = (\d+)", _asked("launchctl", "print", f"gui/{os.getuid()}/{_NAME}"), re.MULTILINE)
        return int(told[1]) if told else None
    told_pid = _asked_of_systemd("show", "--property", "MainPID", "--value")
    return int(told_pid) or None if told_pid.isdecimal() else None


def start_again() -> None:
    """Have the supervisor start the service that it has. Raises DaemonStartFailed."""
    of_launchd = ("launchctl", "kickstart", "-k", f"gui/{os.getuid()}/{_NAME}")
    _, why = _run([of_launchd if sys.platform == "darwin" else ("systemctl", "--user", "restart", _NAME)])
    if why is not None:
        raise DaemonStartFailed(f"{why}.")


def _asked_of_systemd(*words: str) -> str:
    return _asked("systemctl", "--user", *words, _NAME)


def _asked(*command: str) -> str:
    """What a command says; nothing where it is not there or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip()


def unit_of(options: Mapping[str, Any]) -> Unit:
    """The unit of a daemon with these options, for the supervisor of this system. Raises InvalidUsage: there is none
    that Torpor knows, or an option has characters that its file cannot have."""
    command = [sys.executable, "-P", "-m", "torpor.cli.main", "serve", *arguments_of(options)]
    if (odd := next(filter(_UNPRINTABLE.search, command), None)) is not None:
        raise InvalidUsage(f"The file of a service takes no {odd!r}: it has a character that cannot be printed.")
    if sys.platform == "darwin":
        path = expanded("~/Library/LaunchAgents") / f"{_NAME}.plist"
        document = plistlib.loads((_UNITS / "torpor.plist").read_bytes())
        document |= {"ProgramArguments": command, "StandardErrorPath": str(background.default_log_path())}
        domain = f"gui/{os.getuid()}"
        begin = (("launchctl", "bootstrap", domain, str(path)),)
        end = (("launchctl", "bootout", f"{domain}/{_NAME}"), ("rm", str(path)))
        return Unit(path, plistlib.dumps(document).decode(), begin, end)
    if sys.platform != "linux":
        raise InvalidUsage(f"torpor service knows systemd and launchd, and no supervisor of {sys.platform}.")
    lines = (_UNITS / "torpor.service").read_text(encoding="utf-8").splitlines()
    if "config" not in options:  # without a file, the signal of a reload stops the daemon
        lines = [line for line in lines if not line.startswith("ExecReload=")]
    started = f"ExecStart={' '.join(map(_systemd_word, command))}"
    text = "\n".join(started if line.startswith("ExecStart=") else line for line in lines)
    path = expanded(os.environ.get("XDG_CONFIG_HOME") or "~/.config") / "systemd" / "user" / f"{_NAME}.service"
    reload = ("systemctl", "--user", "daemon-reload")
    begin = (reload, ("systemctl", "--user", "enable", "--now", _NAME))
    end = (("systemctl", "--user", "disable", "--now", _NAME), ("rm", str(path)), reload)
    return Unit(path, f"{text}\n", begin, end)


def _systemd_word(word: str) -> str:
    """A word of a command line as systemd reads it."""
    if _BARE.fullmatch(word):
        return word
    escaped = word.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'.replace("%", "%%").replace("$", "$$")


def _show(output: Output, unit: Unit, before: str | None) -> None:
    """The file, or how it differs from the one that is there."""
    path, lines = str(unit.path), unit.text.splitlines()
    output.line(f"[bold]{plain(path)}[/]")
    if before not in (None, unit.text):
        lines = list(difflib.unified_diff((before or "").splitlines(), lines, "there", "new", lineterm=""))
    for line in lines:
        output.line(plain(line))


def _tell(output: Output, action: str, left: Sequence[Words], problem: str | None, *, agreed: bool) -> None:
    if agreed and not left:
        output.line("The service runs, and starts with your login." if action == "install" else "The service is gone.")
        if action == "install" and sys.platform == "linux":
            output.remark('Without a login it ends, unless you run this once: [cyan]loginctl enable-linger "$USER"[/]')
        return
    if problem is not None:
        output.remark(f"[yellow]{plain(problem)}[/]")
    output.remark("These commands are left to run:" if agreed else "Nothing was changed. It takes these commands:")
    for command in left:
        output.remark(f"  [cyan]{plain(shlex.join(command))}[/]")


def _write(unit: Unit) -> None:
    unit.path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(unit.path, unit.text)


def _is_running(socket: Path) -> bool:
    try:
        connect(socket).close()
    except DaemonUnreachable as error:
        return not nobody_is_there(error)
    return True


def _run(commands: Sequence[Words]) -> tuple[list[Words], str | None]:
    """Run one command after the other: those that failed, and why the first of them did."""
    failed, why = [], None
    for command in commands:
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            last_words = done.stderr.strip().rpartition("\n")[2]
            problem = f"ended with status {done.returncode}: {last_words[:_MOST_CHARS]}"
        except OSError as error:
            done, problem = None, f"cannot be run: {error.strerror}"
        if done is None or done.returncode:
            failed.append(command)
            why = why or f"{shlex.join(command)} {problem}"
    return failed, why
