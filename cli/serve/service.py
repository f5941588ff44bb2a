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
from ...places import default_log_path, expanded
from ...socket_api.errors import DaemonUnreachable
from ...socket_api.wire.address import default_socket_path
from ..errors import DaemonStartFailed, InvalidUsage, NothingToDo
from ..exit_codes import OK
from ..reach.consent import YesOption, has_consent
from ..reach.daemon_link import connect, somebody_is_on
from ..reach.options import JsonOption, argument, option, takes
from ..reach.writing import write_whole
from ..view.output import Output, plain, typed
from ..view.table import facts_table
from . import last_options
from .serve_parameters import arguments_of, given_of, options_of

_UNITS: Final = Path(__file__).parent / "units"
_NAME: Final = "torpor"
_SOCKET: Final = f"{_NAME}.socket"
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
    """What a supervisor reads of a service. files: paths and texts, that of the service first. begin, end: the commands
    that enable and start it, and that undo all."""

    files: tuple[tuple[Path, str], ...]
    begin: tuple[Words, ...]
    end: tuple[Words, ...]

    @property
    def path(self) -> Path:
        """Of the service."""
        return self.files[0][0]

    @property
    def text(self) -> str:
        """Of the service."""
        return self.files[0][1]

    def changed(self) -> list[tuple[Path, str, str]]:
        """The files that are there and say something else, with what they say and what they would."""
        there = ((path, _text_at(path), text) for path, text in self.files)
        return [(path, before, text) for path, before, text in there if before not in (None, text)]


def _text_at(path: Path) -> str | None:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else None


@takes(options_of("model", "config", "http", "store", "socket"))
def service(
    action: ActionArgument,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    as_json: JsonOption = False,
    **values: Any,
) -> int:
    """Install shows and writes a unit of systemd for this user, with one of its socket, or a job of launchd, and starts
    it. The service has the options of the daemon that runs now, and those given here; other settings can stand in the
    file of --config. A file that is there and says something else is replaced only if you agree. Status shows whether
    there is one, whether it runs, and whether its files are what an install would write. Remove stops the service and
    removes the files. systemd listens on the socket: a client that comes while the daemon starts waits for it, and one
    that comes when it has crashed has it started. After [cyan]torpor stop[/] nobody listens.

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
    if not installs and not unit.path.exists():
        raise NothingToDo(f"There is no service to remove: {unit.path} is not there.", path=str(unit.path))
    if installs and not as_json:
        _show(output, unit)
    is_running = installs and somebody_is_on(socket)
    left = list(unit.begin if installs else unit.end)
    changed = unit.changed()
    names = ", ".join(str(path) for path, *_ in (changed if installs else unit.files))
    question = f"Replace {names}?" if installs else f"Stop the service and remove {names}?"
    agreed = not dry_run and (
        yes or (installs and not changed) or has_consent(question, f"change {names}", as_json=as_json)
    )
    problem = f"A daemon answers on {socket} already." if is_running else None
    if agreed and installs:
        for path, text in unit.files:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, text)
    if is_running:
        left.insert(0, ("torpor", "stop"))
    elif agreed:
        left, problem = _run(left)
    if as_json:
        facts = {"action": action, "path": str(unit.path), "text": unit.text, "done": agreed, "problem": problem}
        files = {str(path): text for path, text in unit.files}
        output.document("service", facts | {"files": files, "left": [shlex.join(each) for each in left]})
    else:
        _tell(output, action, left, problem, agreed=agreed)
    return OK.number


def _status(output: Output, unit: Unit, socket: Path) -> None:
    """What there is of the service, and of the daemon on its socket."""
    there = unit.path.exists()
    differing = there and any(_text_at(path) != text for path, text in unit.files)
    facts = {
        "path": str(unit.path),
        "installed": there,
        "up_to_date": there and not differing,
        "starts_with_login": {"enabled": True, "disabled": False}.get(_asked_of_systemd("is-enabled")),
        "pid": main_pid(),
        "socket": str(socket),
        "answers": (silence := _silence_of(socket)) is None,
    }
    if output.as_json:
        output.document("service", {"action": "status", **facts})
        return
    table = facts_table()
    table.add_row("file", plain(unit.path) + ("" if there else ", which is not there: no service"))
    if differing:
        table.add_row("", f"differs from what {typed('torpor service install')} would write: --dry-run shows how")
    if there and facts["starts_with_login"] is not None:
        table.add_row("login", "starts it" if facts["starts_with_login"] else "does not start it")
    if there:
        table.add_row("process", str(facts["pid"] or "none: it does not run"))
    table.add_row("daemon", f"answers on {plain(socket)}" if silence is None else plain(silence.message))
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


def listen_no_more() -> None:
    """Have systemd start no daemon of the service for the next client: it was stopped."""
    _asked("systemctl", "--user", "stop", _SOCKET)


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
        document |= {"ProgramArguments": command, "StandardErrorPath": str(default_log_path())}
        domain = f"gui/{os.getuid()}"
        begin = (("launchctl", "bootstrap", domain, str(path)),)
        end = (("launchctl", "bootout", f"{domain}/{_NAME}"), ("rm", str(path)))
        return Unit(((path, plistlib.dumps(document).decode()),), begin, end)
    if sys.platform != "linux":
        raise InvalidUsage(f"torpor service knows systemd and launchd, and no supervisor of {sys.platform}.")
    lines = (_UNITS / "torpor.service").read_text(encoding="utf-8").splitlines()
    if "config" not in options:  # without a file, the signal of a reload stops the daemon
        lines = [line for line in lines if not line.startswith("ExecReload=")]
    started = f"ExecStart={' '.join(map(_systemd_word, command))}"
    text = "\n".join(started if line.startswith("ExecStart=") else line for line in lines)
    listened = str(Path(options.get("socket") or default_socket_path()).absolute()).replace("%", "%%")
    socket = (_UNITS / "torpor.socket").read_text(encoding="utf-8")
    socket = re.sub("^ListenStream=.*", lambda _: f"ListenStream={listened}", socket, flags=re.MULTILINE)
    folder = expanded(os.environ.get("XDG_CONFIG_HOME") or "~/.config") / "systemd" / "user"
    files = ((folder / f"{_NAME}.service", f"{text}\n"), (folder / _SOCKET, socket))
    reload = ("systemctl", "--user", "daemon-reload")
    begin = (reload, ("systemctl", "--user", "enable", "--now", _SOCKET, _NAME))
    removed = ("rm", "-f", *(str(path) for path, _ in files))
    return Unit(files, begin, (("systemctl", "--user", "disable", "--now", _SOCKET, _NAME), removed, reload))


def _systemd_word(word: str) -> str:
    """A word of a command line as systemd reads it."""
    if _BARE.fullmatch(word):
        return word
    escaped = word.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'.replace("%", "%%").replace("$", "$$")


def _show(output: Output, unit: Unit) -> None:
    """The files, each as it will be, or how it differs from the one that is there."""
    changed = {path: before for path, before, _ in unit.changed()}
    for path, text in unit.files:
        output.whole_line(f"[bold]{plain(path)}[/]")
        lines = text.splitlines()
        if path in changed:
            lines = list(difflib.unified_diff(changed[path].splitlines(), lines, "there", "new", lineterm=""))
        for line in lines:
            output.whole_line(plain(line))


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


def _silence_of(socket: Path) -> DaemonUnreachable | None:
    """Why no daemon answers there; None if one does."""
    try:
        connect(socket).close()
    except DaemonUnreachable as error:
        return error
    return None


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
