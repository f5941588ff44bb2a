"""What an agent gets: its record, filled in with what is true of a daemon."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any, Final
from urllib.parse import urlsplit

from ...daemon.api.process import StatusResult
from ...socket_api.tokens import MIN_TOKEN_CHARS, OWNERS, Tokens
from ..errors import HttpNotServed, InvalidUsage
from ..reach.writing import write_whole
from .agents import Agent

VARIABLE: Final = "TORPOR_TOKEN"
"""Where each agent finds the token, whatever else it is told."""

HTTP_PORT: Final = 8677
"""Of a daemon that a launch starts, unless an option names another: "TORP" on the keys of a telephone."""


_PROXIES: Final = frozenset({"http_proxy", "https_proxy", "all_proxy"})


@dataclass(frozen=True, slots=True)
class Facts:
    """What agents are told of a daemon: its base URL without `/v1`, a token, the file that has it as a word for a
    shell, the name of a model, how many tokens its context holds, and the token's namespace. examples: the names of
    those that may turn out otherwise, as no daemon told them."""

    url: str
    token: str
    tokens: str
    model: str
    context: int
    namespace: str = OWNERS
    examples: tuple[str, ...] = ()

    @property
    def answer(self) -> int:
        """The most tokens of an answer: a quarter of the context."""
        return self.context // 4


LEAST_CONTEXT: Final = 32_768
"""The tokens of a context in which each agent has room for its prompt and for work."""
EXAMPLE: Final = Facts(
    f"http://127.0.0.1:{HTTP_PORT}",
    f"${VARIABLE}",
    '"$HOME/.config/torpor/http-tokens"',
    "demo",
    LEAST_CONTEXT,
    examples=("url", "token", "model", "context"),
)
"""What documents show, and a dry run where no daemon is."""


@dataclass(frozen=True, slots=True)
class Start:
    """How an agent is started: its command, what is added to the environment, and the file that it reads, if any."""

    command: Sequence[str]
    environment: Mapping[str, str]
    file: Path | None
    text: str

    def write(self) -> None:
        """Write the file, for this user alone."""
        if self.file is not None:
            self.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_whole(self.file, self.text, 0o600)


def port_of(status: StatusResult, socket: Path, title: str) -> tuple[str, Path]:
    """Where a daemon serves HTTP on its port, and its file of tokens. title: who needs it. Raises HttpNotServed."""
    http = status.http
    if http is None or http.url is None or http.tokens is None:
        first = f"put `http = {HTTP_PORT}` into {status.config.path}, and " if status.config else ""
        raise HttpNotServed(
            f"The daemon on {socket} does not serve HTTP, which {title} needs. To have it, {first}stop the daemon"
            " (`torpor stop`: its sessions sleep, and wake at their next use), then"
            f" `torpor serve{'' if first else f' --http {HTTP_PORT}'} --detach`.",
            socket=str(socket),
        )
    return http.url, Path(http.tokens)


def token_of(tokens: Path, namespace: str) -> str:
    """The token of a namespace in a file of tokens. Raises InvalidUsage: it has none."""
    token = Tokens(tokens).token_of(namespace)
    if token is None:
        raise InvalidUsage(
            f"{tokens} has no token of the namespace {namespace}. Add a line `{namespace} TOKEN`, with a token of"
            f" {MIN_TOKEN_CHARS} characters or more that nobody can guess; the daemon takes it at once."
        )
    return token


def start_of(agent: Agent, facts: Facts, folder: Path, more: Sequence[str] = ()) -> Start:
    """How an agent is started. folder: for its file. more: arguments that its user gives."""
    settings = settings_of(agent, facts)
    text = text_of(agent, facts)
    file = folder / ("torpor.js" if agent.script else Path(agent.settings_path or "none").name)
    values = {**_values(facts), "settings": text.rstrip(), "file": str(file), "folder": str(folder)}
    given = {**agent.environment, **agent.launch_environment}
    reads_file = any(place in each for each in (*given.values(), *agent.arguments) for place in ("$file", "$folder"))
    arguments = [Template(each).substitute(values) for each in agent.arguments]
    if agent.each_setting:
        arguments += [part for each in _leaves(settings) for part in (agent.each_setting, each)]
    return Start(
        [agent.command, *arguments, *more],
        {
            VARIABLE: facts.token,
            **_past_proxies(facts.url),
            **{name: Template(each).substitute(values) for name, each in given.items()},
        },
        file if reads_file else None,
        Template(agent.script).substitute(values) if agent.script else text,
    )


def _past_proxies(url: str) -> dict[str, str]:
    """For an agent whose user has a proxy, which would get the token and the dialogue, and reach no daemon."""
    if not any(name.lower() in _PROXIES and value for name, value in os.environ.items()):
        return {}
    hosts = [os.environ.get("no_proxy") or os.environ.get("NO_PROXY"), urlsplit(url).hostname]
    return dict.fromkeys(("no_proxy", "NO_PROXY"), ",".join(filter(None, hosts)))


def settings_of(agent: Agent, facts: Facts) -> dict[str, Any]:
    """An agent's settings, as its file would have them."""
    filled: dict[str, Any] = _filled(agent.settings, _values(facts))
    return filled


def text_of(agent: Agent, facts: Facts) -> str:
    """An agent's settings as the text of its file. JSON is YAML, too."""
    settings = settings_of(agent, facts)
    if (agent.settings_path or "").endswith(".toml"):
        return "\n".join(_toml(settings)).lstrip() + "\n"
    return json.dumps(settings, indent=2, ensure_ascii=False) + "\n"


def exports_of(agent: Agent, facts: Facts) -> list[str]:
    """What its user types into a shell, beside the settings."""
    return [f"export {name}={_quoted(filled(each, facts))}" for name, each in agent.environment.items()]


def filled(text: str, facts: Facts) -> str:
    """A text of the table with the facts in it."""
    return Template(text).substitute(_values(facts))


def _values(facts: Facts) -> dict[str, str]:
    return {
        "url": facts.url,
        "token": facts.token,
        "tokens": facts.tokens,
        "namespace": facts.namespace,
        "model": facts.model,
        "context": str(facts.context),
        "answer": str(facts.answer),
    }


def _filled(value: Any, values: Mapping[str, str]) -> Any:
    """A value of settings with each text filled in; one that is a number alone is a number."""
    if isinstance(value, Mapping):
        return {_filled(name, values): _filled(each, values) for name, each in value.items()}
    if isinstance(value, list):
        return [_filled(each, values) for each in value]
    if value in ("$context", "$answer"):
        return int(values[value[1:]])
    return Template(value).substitute(values) if isinstance(value, str) else value


def _leaves(settings: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Each value with its dotted key, as `a.b="c"`."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{path}{name}.")
        else:
            yield f"{path}{name}={_toml_word(value)}"


def _toml(settings: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Lines of TOML: the values of a table, then the tables in it."""
    tables = {name: value for name, value in settings.items() if isinstance(value, Mapping)}
    values = [f"{name} = {_toml_word(value)}" for name, value in settings.items() if name not in tables]
    if values and path:
        yield from ("", f"[{path}]")
    yield from values
    for name, value in tables.items():
        yield from _toml(value, f"{path}.{name}".lstrip("."))


def _toml_word(value: Any) -> str:
    """TOML knows no pairs of surrogates, by which JSON in ASCII tells a character beyond the first 65,536."""
    return json.dumps(value, ensure_ascii=False)


def _quoted(text: str) -> str:
    """A word for a shell, in which a variable stays one."""
    return text if text == f"${VARIABLE}" else shlex.quote(text)
