"""Write the tables of docs/reference/ from the code: commands, settings, errors, events, the Python client. And the
settings of coding agents in docs/how-to/clients.md.

    python scripts/reference.py           write what is stale
    python scripts/reference.py --check   name what is stale, and end with status 1 if anything is

A page keeps its own words. A table stands between `<!-- generated: NAME -->` and `<!-- end of NAME -->`. A command
without a chapter gets one, in the order of the list.
"""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import torpor.daemon.errors
import torpor.memvid.errors
import torpor.snapshot.errors
import torpor.socket_api.errors  # noqa: F401 - imported for their classes, as the three above
from torpor.cli import exit_codes
from torpor.cli.calling import function_of
from torpor.cli.command_list import COMMANDS, Command
from torpor.cli.launch.agents import AGENTS
from torpor.cli.launch.filling import EXAMPLE, exports_of, filled, text_of
from torpor.cli.reach.options import NAMESPACE_PARAMETER, takes_namespace
from torpor.daemon.api.verb import Verb
from torpor.daemon.events import events
from torpor.daemon.options.serve_options import CLUSTER_OPTIONS, MODEL_OPTIONS, SERVE_OPTIONS, Declared
from torpor.errors import TorporError
from torpor.socket_api import Client
from verb_reference import reference

REFERENCE = Path(__file__).resolve().parents[1] / "docs" / "reference"
OF_AGENTS = REFERENCE.parent / "how-to" / "clients.md"
REGION = re.compile(r"<!-- generated: (?P<name>[^>]+?) -->\n.*?<!-- end of (?P=name) -->", re.DOTALL)
LAYERS = {"memvid": "store", "snapshot": "model state", "daemon": "daemon", "socket_api": "socket", "cli": "command"}


def page_with_tables(text: str) -> str:
    """A page with every generated table made anew."""
    return REGION.sub(lambda found: _region(found["name"]), text)


def page_with_chapters(text: str) -> str:
    """The page of the commands with a chapter for each; a new one has no words but those of the code."""
    behind = len(text)
    for command in reversed(COMMANDS):
        at = text.find(f"## `torpor {command.name}`\n")
        if at < 0:
            at, table = behind, f"command {command.name}"
            chapter = f"## `torpor {command.name}`\n\n<!-- generated: {table} -->\n<!-- end of {table} -->\n"
            text = f"{text[:at]}{chapter}\n{text[at:]}" if text[at:] else f"{text}\n{chapter}"
        behind = at
    return text


def stale_pages() -> Iterator[tuple[Path, str]]:
    """Each page whose tables are not those of the code, with what it should be."""
    for page in (*sorted(REFERENCE.glob("*.md")), OF_AGENTS):
        text = page.read_text(encoding="utf-8")
        fresh = page_with_tables(page_with_chapters(text) if page.name == "commands.md" else text)
        if fresh != text:
            yield page, fresh


def _region(name: str) -> str:
    kind, _, rest = name.partition(" ")
    lines = TABLES[kind](*([rest] if rest else []))
    return f"<!-- generated: {name} -->\n" + "\n".join(lines) + f"\n<!-- end of {name} -->"


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    names = list(head)
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    return lines + ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]


def _plain(text: str) -> str:
    return " ".join(_bold_of(text).split())


# --- commands


COMMAND_OF_NAME = {command.name: command for command in COMMANDS}


def _panels() -> list[str]:
    panels: dict[str, list[str]] = {}
    for command in COMMANDS:
        panels.setdefault(command.panel, []).append(f"[`{command.name}`](#torpor-{command.name})")
    return _table(("to", "commands"), ((panel, ", ".join(names)) for panel, names in panels.items()))


def _command(name: str) -> list[str]:
    command = COMMAND_OF_NAME[name]
    told, _, examples = inspect.cleandoc(function_of(command).__doc__ or "").partition("[bold]Example")
    parameters = _parameters_of(command)
    usage = " ".join(["torpor", name, *(each.usage for each in parameters if each.is_argument), "[OPTIONS]"])
    lines = ["", f"    {usage}", ""]
    for paragraph in filter(None, (command.summary, *told.strip().split("\n\n"))):
        lines += [*textwrap.wrap(_code_of(paragraph), 120, break_long_words=False, break_on_hyphens=False), ""]
    lines += _table(
        ("argument or option", "value", "meaning"),
        ((each.name, each.shown_value, each.meaning) for each in parameters),
    )
    shown = [_plain(line) for line in examples.splitlines()[1:] if line.strip()]
    return [*lines, "", "```sh", *shown, "```", ""]


def _code_of(text: str) -> str:
    return _bold_of(re.sub(r"\[cyan\](.*?)\[/(?:cyan)?\]", r"`\1`", " ".join(text.split())))


def _bold_of(text: str) -> str:
    """A text without its markup. `[]` is none: jq has it."""
    return re.sub(r"\\\[|\[/[a-z]*\]|\[[a-z]+\]", lambda found: "[" if found[0] == r"\[" else "", text)


def _parameters_of(command: Command) -> list[_Parameter]:
    signature = inspect.signature(function_of(command), eval_str=True)
    more = [NAMESPACE_PARAMETER] if takes_namespace(signature) else []
    return [_Parameter(each) for each in (*signature.parameters.values(), *more)]


class _Parameter:
    """One argument or option, as its declaration has it."""

    def __init__(self, parameter: inspect.Parameter) -> None:
        if not get_args(parameter.annotation):
            raise TypeError(f"{parameter} of a command is no argument and no option; see cli/reach/options.py")
        self.kind, self.declared = get_args(parameter.annotation)
        self.default = parameter.default
        self.key = parameter.name
        self.is_argument = not self.declared.flags

    @property
    def choices(self) -> tuple[str, ...]:
        kinds = [self.kind, *get_args(self.kind)]
        return next((get_args(each) for each in kinds if get_origin(each) is Literal), ())

    @property
    def value(self) -> str:
        return self.declared.metavar or self.key.upper().strip("_")

    @property
    def usage(self) -> str:
        return self.value if self.default is inspect.Parameter.empty or self.value[0] == "[" else f"[{self.value}]"

    @property
    def name(self) -> str:
        if self.is_argument:
            return f"`{self.value}`"
        return ", ".join(f"`{flag}`" for flag in self.declared.flags)

    @property
    def shown_value(self) -> str:
        if self.is_argument or self.kind is bool:
            return ""
        if self.choices:
            return ", ".join(f"`{choice}`" for choice in self.choices)
        least, most = self.declared.more.get("min"), self.declared.more.get("max")
        if least is None:
            return f"`{self.value}`"
        return f"`{self.value}`, from {least:,}" if most is None else f"`{self.value}`, {least:,} to {most:,}"

    @property
    def meaning(self) -> str:
        return _code_of(self.declared.help)


# --- settings


def _configuration() -> list[str]:
    return _keys(each for each in SERVE_OPTIONS.values() if each.option.changes is not None)


def _model_table() -> list[str]:
    return _keys(MODEL_OPTIONS.values())


def _cluster_table() -> list[str]:
    return _keys(CLUSTER_OPTIONS.values())


def _keys(options: Iterable[Declared]) -> list[str]:
    head = ("key", "value", "option", "left out", "a changed file holds", "meaning")
    return _table(
        head,
        (
            (
                f"`{each.key}`",
                each.kind.in_file,
                "" if each.flag is None else f"`{each.flag}`",
                each.left_out,
                str(each.option.changes),
                _code_of(each.option.help),
            )
            for each in options
        ),
    )


# --- errors and events


def _statuses() -> list[str]:
    return _table(
        ("status", "name", "meaning", "error codes"),
        ((str(status.number), status.name, status.meaning, _codes(status)) for status in exit_codes.STATUSES),
    )


def _codes(status: exit_codes.ExitStatus) -> str:
    codes = sorted(code for code, other in exit_codes.STATUS_OF_CODE.items() if other is status)
    return ", ".join(f"`{code}`" for code in codes) or "–"


def _errors() -> list[str]:
    found: dict[str, type[TorporError]] = {}
    # By module, as the order of subclasses is that of the imports; of one code the root of its classes is told.
    for kind in sorted(_all_errors(TorporError), key=lambda kind: (len(kind.__mro__), kind.__module__, kind.__name__)):
        found.setdefault(kind.code, kind)
    rows = []
    for code, kind in sorted(found.items()):
        layer = LAYERS.get(kind.__module__.split(".")[1], "all")
        rows.append((f"`{code}`", str(exit_codes.exit_status_of(code)), layer, _first_sentences(kind.__doc__)))
    return _table(("code", "exit status", "of", "meaning"), rows)


def _all_errors(kind: type[TorporError]) -> Iterator[type[TorporError]]:
    yield kind
    for child in kind.__subclasses__():
        place = child.__module__.partition("torpor.")[2].partition(".")[0]
        if place == "errors" or place in LAYERS:  # not one of the tests' own
            yield from _all_errors(child)


def _first_sentences(text: str | None) -> str:
    return " ".join(inspect.cleandoc(text or "").split("\n\n")[0].split())


def _events() -> list[str]:
    rows = []
    for event in events.EVENTS:
        names = [f"`{each.name}`" for each in fields(event) if each.name != "session"]
        rows.append((f"`{event.name}`", ", ".join(names), _first_sentences(event.__doc__)))
    return _table(("event", "facts", "what happened"), rows)


def _causes() -> list[str]:
    kinds = {"sleeps": events.SleepCause, "wakes": events.WakeCause, "unloads of models": events.UnloadCause}
    return _table(
        ("`cause` of", "values"),
        ((name, ", ".join(f"`{one}`" for one in get_args(kind))) for name, kind in kinds.items()),
    )


# --- the Python client


def _client() -> list[str]:
    """What is no verb; those are a page of their own."""
    rows = []
    for name, method in inspect.getmembers(Client, callable):
        if not name.startswith("_") and not isinstance(inspect.getattr_static(Client, name), Verb):
            rows.append((f"`{name}({_parameters(method)})`", _code_of(_first_sentences(method.__doc__))))
    return _table(("call", "what it does"), rows)


def _parameters(method: Callable[..., Any]) -> str:
    """The parameters by name; those with a default are optional and come after a semicolon."""
    each = [one for name, one in inspect.signature(method).parameters.items() if name not in ("self", "cls")]
    needed = [one.name for one in each if one.default is inspect.Parameter.empty]
    optional = [one.name for one in each if one.default is not inspect.Parameter.empty]
    return ", ".join(needed) + (f"[{', ' if needed else ''}{', '.join(optional)}]" if optional else "")


# --- coding agents


def _agent(name: str) -> list[str]:
    """What a user sets by hand."""
    agent = AGENTS[name]
    lines = []
    if agent.settings_path:
        suffix = agent.settings_path.rpartition(".")[2]
        lines += [f"`{agent.settings_path}`:", "", f"```{suffix}", *text_of(agent, EXAMPLE).splitlines(), "```", ""]
    shell = [*exports_of(agent, EXAMPLE), *([filled(agent.usage, EXAMPLE)] if agent.usage else [])]
    return [*lines, "```sh", *shell, "```"] if shell else lines[:-1]


TABLES: dict[str, Callable[..., list[str]]] = {
    "agent": _agent,
    "panels": _panels,
    "command": _command,
    "configuration": _configuration,
    "model-table": _model_table,
    "cluster-table": _cluster_table,
    "statuses": _statuses,
    "errors": _errors,
    "events": _events,
    "causes": _causes,
    "client": _client,
    "verbs": lambda: reference().splitlines(),
}


def main() -> int:
    stale = list(stale_pages())
    for page, fresh in stale:
        if "--check" not in sys.argv:
            page.write_text(fresh, encoding="utf-8")
        print(f"{'stale' if '--check' in sys.argv else 'written'}: {page.relative_to(REFERENCE.parents[1])}")
    return int("--check" in sys.argv and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
