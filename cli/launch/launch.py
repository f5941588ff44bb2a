"""`torpor launch`: start a coding agent on this daemon."""

from __future__ import annotations

import difflib
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final

from ...daemon.api.process import StatusResult
from ...errors import TorporError
from ...memvid.units import format_count, format_plural
from ...places import user_folder
from ...socket_api.client.client import Client
from ...socket_api.errors import DaemonUnreachable
from ...socket_api.tokens import OWNERS
from ..errors import AgentMissing, InvalidUsage
from ..exit_codes import OK
from ..reach.consent import YesOption, has_consent
from ..reach.daemon_link import connect
from ..reach.options import JsonOption, NamespaceChoice, argument, option, takes
from ..serve.ensure import find_or_start, require_served
from ..serve.serve_parameters import given_of, options_of
from ..view.output import Output, plain, rows_table, typed
from .agents import AGENTS, KEY_COMMAND, Agent
from .filling import (
    EXAMPLE,
    HTTP_PORT,
    LEAST_CONTEXT,
    VARIABLE,
    Facts,
    Start,
    exports_of,
    filled,
    port_of,
    start_of,
    token_of,
)
from .running import run
from .user_settings import change_of

VERSION_TIMEOUT_S: Final = 20.0
_HIDDEN: Final = "…"
_VERSION: Final = re.compile(r"\d+(?:\.\d+)+[\w.+-]*")

AgentArgument = Annotated[str | None, argument("AGENT", f"One of {', '.join(AGENTS)}.")]
OwnArguments = Annotated[list[str] | None, argument("-- ARGS...", "Arguments of the agent's own.")]
ListOption = Annotated[bool, option("--list", "List the agents: which are installed, and what each gets.")]
DryOption = Annotated[bool, option("--dry-run", "Show environment, file and command as a shell would have them.")]
TokenOption = Annotated[bool, option("--show-token", "With --dry-run: show the token, too.")]
WriteOption = Annotated[
    bool, option("--write-config", "Put the settings into the agent's own file, after a look at the change.")
]


@takes(options_of("model", "config", "store", "socket", "http"))
def launch(
    agent: AgentArgument = None,
    arguments: OwnArguments = None,
    list_agents: ListOption = False,
    dry_run: DryOption = False,
    show_token: TokenOption = False,
    write_config: WriteOption = False,
    yes: YesOption = False,
    namespace: NamespaceChoice = None,
    as_json: JsonOption = False,
    **values: Any,
) -> int:
    """The agent gets the daemon's address and token, the model and its context by its environment, its arguments or a
    file of Torpor's own; its user's files stay as they are. A daemon that answers is used as it is. If none does, one
    starts with HTTP on port 8677, and goes on when the agent has ended. Signals go to the agent, and its exit status is
    that of this command. At the end a line on stderr tells what was read meanwhile, and what was not read again.

    [bold]Examples[/]

    [cyan]torpor launch claude[/]
    [cyan]torpor launch codex --model qwen=~/models/Qwen3-4B[/]
    [cyan]torpor launch pi -- -p "What is in this folder?"[/]
    [cyan]torpor launch opencode --dry-run[/]
    """
    output, given, namespace = Output(as_json=as_json), given_of(values), namespace or OWNERS
    if list_agents:
        _tell_agents(output)
        return OK.number
    record = _agent_named(agent)
    folder = user_folder("state") / "launch" / record.name
    if dry_run:
        facts = _facts_now(record, given, namespace)
        if not show_token or "token" in facts.examples:
            facts = replace(facts, token=_HIDDEN)
        _tell_start(output, start_of(record, facts, folder, arguments or ()), facts)
        return OK.number
    program = shutil.which(record.command)
    if program is None and not write_config:
        raise AgentMissing(
            f"{record.title} is not installed, or {record.command} is not on your PATH. Install it with"
            f" `{record.install}`, then run this again.",
            agent=record.name,
        )
    daemon, started = find_or_start(output, given, unless_given={"http": HTTP_PORT})
    with daemon:
        facts = _facts_of(daemon, record, given, namespace)
        if started:
            output.remark(
                f"[dim]torpor serves {plain(facts.model)} on {plain(facts.url)}, until[/] {typed('torpor stop')}"
            )
        if write_config:
            return _write(output, record, facts, yes=yes)
        _remark_on_context(output, record, facts)
        before = _sessions_of(daemon)
    start = start_of(record, facts, folder, arguments or ())
    start.write()
    begun = time.monotonic()
    status = run([str(program), *start.command[1:]], start.environment)
    _tell_end(output, record, given, status, begun, before)
    return status


def _agent_named(name: str | None) -> Agent:
    if name is None:
        raise InvalidUsage(f"Name an agent: {', '.join(AGENTS)}. `torpor launch --list` tells which are installed.")
    if name not in AGENTS:
        close = difflib.get_close_matches(name, AGENTS, n=1)
        meant = f" Did you mean {close[0]}?" if close else ""
        raise InvalidUsage(
            f"{name!r} is no agent that Torpor knows.{meant} Known are {', '.join(AGENTS)}; any other is set up by hand"
            " (docs/how-to/clients.md).",
            agent=name,
        )
    return AGENTS[name]


def _facts_now(agent: Agent, given: Mapping[str, Any], namespace: str) -> Facts:
    """As `_facts_of`, without a start or a load; where no daemon answers, an example."""
    with suppress(DaemonUnreachable), connect(given.get("socket"), store=given.get("store")) as daemon:
        require_served(daemon, given.get("model") or {})
        return _facts_in(daemon.status(), daemon.socket_path, agent, given, namespace)
    certain: dict[str, Any] = {"model": next(iter(given.get("model") or {}), "")}
    certain["url"] = f"http://127.0.0.1:{given['http']}" if given.get("http") else ""
    certain = {name: value for name, value in certain.items() if value}
    return replace(EXAMPLE, **certain, examples=tuple(name for name in EXAMPLE.examples if name not in certain))


def _facts_of(daemon: Client, agent: Agent, given: Mapping[str, Any], namespace: str) -> Facts:
    """What the agent is told. Loads the model, of which nothing else is known. Raises HttpNotServed, InvalidUsage, and
    the errors of a load."""
    facts = _facts_in(daemon.status(), daemon.socket_path, agent, given, namespace)
    return replace(facts, context=daemon.load_model(facts.model).context_tokens or facts.context)


def _facts_in(status: StatusResult, socket: Path, agent: Agent, given: Mapping[str, Any], namespace: str) -> Facts:
    url, tokens = port_of(status, socket, agent.title)
    model = status.model_named(next(iter(given.get("model") or {}), "")) or status.models[0]
    return Facts(
        url,
        token_of(tokens, namespace),
        shlex.quote(str(tokens)),
        model.name,
        model.context_tokens or EXAMPLE.context,
        namespace,
        () if model.context_tokens else ("context",),
    )


def _remark_on_context(output: Output, agent: Agent, facts: Facts) -> None:
    if facts.context < LEAST_CONTEXT:
        output.remark(
            f"[yellow]{plain(facts.model)} holds {format_count(facts.context)} tokens, and coding agents need"
            f" {format_count(LEAST_CONTEXT)}[/]: {agent.title} may be refused, or make summaries all the time. Serve a"
            " model with more (--model NAME=PATH, after [cyan]torpor stop[/]), or see docs/how-to/clients.md."
        )


def _sessions_of(daemon: Client) -> int:
    status = daemon.status()
    return status.sessions_awake + status.sessions_asleep


def _tell_end(
    output: Output, agent: Agent, given: Mapping[str, Any], status: int, begun: float, sessions_before: int
) -> None:
    """One line of what the daemon did for programs over HTTP while the agent ran. begun: by the monotonic clock."""
    try:
        with connect(given.get("socket"), store=given.get("store")) as daemon:
            sessions = _sessions_of(daemon) - sessions_before
            costs = daemon.causes(since=f"{max(0.001, time.monotonic() - begun):.3f}s", by="client")
    except TorporError:  # the agent has ended, and its status is this command's
        output.remark(
            "[yellow]the daemon does not answer any more[/]; what it answered is kept, and the next launch starts it"
        )
        return
    over_http = [row for row in costs.rows if row.key]
    tokens = {
        "reused": sum(row.reused_tokens for row in over_http),
        "read": sum(row.read_tokens for row in over_http),
        "read_again": sum(row.read_again_tokens for row in over_http),
        "written": sum(row.written_tokens for row in over_http),
    }
    if output.as_json:
        output.document("launch", {"agent": agent.name, "status": status, "sessions": sessions, **tokens})
    else:
        output.remark(f"[dim]while {agent.title} ran, {_told(tokens, sessions)}[/]")


def _told(tokens: Mapping[str, int], sessions: int) -> str:
    if not any(tokens.values()):
        return "no answer came to its end"
    again = f" ({format_count(tokens['read_again'])} again)" if tokens["read_again"] else ""
    kept = f"; {format_plural(sessions, 'more session')} kept" if sessions > 0 else ""
    return (
        f"{format_count(tokens['reused'])} tokens were reused, {format_count(tokens['read'])} were read{again}"
        f" and {format_count(tokens['written'])} written{kept}"
    )


def _write(output: Output, agent: Agent, facts: Facts, *, yes: bool) -> int:
    """Show a change of the user's file, ask, and make it."""
    change = change_of(agent, facts)
    lines = list(change.lines())
    for line in lines:
        color = {"+": "green", "-": "red"}.get(line[:1], "dim")
        output.whole_line(f"[{color}]{plain(line)}[/]")
    if not lines:
        output.remark(f"{plain(change.path)} has these settings already")
    elif yes or has_consent(f"Write this to {change.path}?", "write it", as_json=output.as_json):
        if change_of(agent, facts) != change:
            raise InvalidUsage(f"{change.path} has changed since it was shown, so nothing was written. Run this again.")
        change.write()
        output.remark(f"written to {plain(change.path)}")
    else:
        return OK.number
    if agent.environment or VARIABLE in change.after:
        output.whole_line(f"export {VARIABLE}=$({plain(filled(KEY_COMMAND, facts))})")
        for line in exports_of(agent, replace(facts, token=EXAMPLE.token)):
            output.whole_line(plain(line))
    output.whole_line(plain(filled(agent.usage or agent.command, replace(facts, model=shlex.quote(facts.model)))))
    return OK.number


def _tell_start(output: Output, start: Start, facts: Facts) -> None:
    """Write a start as lines for a shell, and which of the facts in it are examples."""
    if output.as_json:
        file = {"path": str(start.file), "text": start.text} if start.file else None
        output.document(
            "launch",
            {
                "environment": dict(start.environment),
                "command": list(start.command),
                "file": file,
                "examples": facts.examples,
            },
        )
        return
    if facts.examples:
        words = {"url": f"the address {facts.url}", "token": "the token", "model": f"the model {facts.model}"}
        words["context"] = f"{facts.context} tokens of context"
        why = "No daemon answers" if "token" in facts.examples else f"{facts.model} is not loaded"
        examples = ", ".join(words[each] for each in facts.examples)
        output.whole_line(f"[dim]# {plain(why)}, so these are examples: {plain(examples)}.[/]")
    for name, value in start.environment.items():
        output.whole_line(f"export {name}={plain(shlex.quote(value))}")
    if start.file is not None:
        output.whole_line(f"cat > {plain(shlex.quote(str(start.file)))} <<'END'")
        for line in start.text.splitlines():
            output.whole_line(plain(line))
        output.whole_line("END")
    output.whole_line(plain(shlex.join(start.command)))
    if facts.token == _HIDDEN and "token" not in facts.examples:
        output.remark("[dim]the token is hidden; --show-token shows it[/]")


@dataclass(frozen=True, slots=True)
class _Listed:
    """An agent as a list shows it. path: where its program lies; version: what that says; both None where it is not
    installed."""

    agent: str
    title: str
    path: str | None
    version: str | None
    gets: str
    install: str


def _tell_agents(output: Output) -> None:
    with output.progress("asking for versions"), ThreadPoolExecutor() as pool:
        agents = list(pool.map(_listed, AGENTS.values()))
    if output.as_json:
        output.document("launch", {"agents": [asdict(each) for each in agents]})
        return
    table = rows_table("AGENT", "VERSION", "GETS", "INSTALL WITH", whole=("AGENT", "VERSION"), first_to_go=("GETS",))
    for each in agents:
        version = f"[green]{plain(each.version or 'installed')}[/]" if each.path else "[dim]not installed[/]"
        table.add_row(plain(each.agent), version, each.gets, "" if each.path else plain(each.install))
    output.show(table)


def _listed(agent: Agent) -> _Listed:
    path = shutil.which(agent.command)
    start = start_of(agent, EXAMPLE, Path())
    gets = [format_plural(len(start.environment), "variable")]
    gets += [format_plural(len(start.command) - 1, "argument")] if len(start.command) > 1 else []
    gets += ["a file"] if start.file else []
    return _Listed(agent.name, agent.title, path, _version_of(path) if path else None, ", ".join(gets), agent.install)


def _version_of(program: str) -> str | None:
    """The version that a program tells; None if it tells none in time."""
    command: Sequence[str] = (program, "--version")
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=VERSION_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    version = _VERSION.search((done.stdout + done.stderr).decode("utf-8", "replace"))
    return version[0] if version else None
