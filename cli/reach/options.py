"""The arguments and options that several commands share."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Protocol, TypeVar, get_args

from ...memvid.uri import DEFAULT_NAMESPACE, SessionUri, parse_reference, parse_version_reference, session_in
from ...socket_api.wire.naming import name_in
from ..errors import InvalidUsage


class CommandLine(Protocol):
    """What a callback is told of the command line: the command's name, and what callbacks before it have left."""

    @property
    def info_name(self) -> str | None:
        """The command's name."""

    @property
    def meta(self) -> dict[str, Any]:
        """What callbacks have left for others."""


@dataclass(frozen=True, slots=True)
class Declared:
    """An option or an argument as its command declares it. words: its flags, none for an argument, then its metavar.
    more: as of `typer.Option` and `typer.Argument`, which typer makes of it if it reads the command line."""

    flags: tuple[str, ...]
    metavar: str | None
    help: str
    more: Mapping[str, Any]

    @property
    def callback(self) -> Callable[..., Any] | None:
        """What makes the command's value of the one that was given."""
        return self.more.get("callback")

    def for_typer(self) -> Any:
        """The same for typer."""
        import typer

        make: Any = typer.Option if self.flags else typer.Argument
        more = dict(self.more)
        if (read := more.get("parser")) is not None:

            def parse(text: str) -> Any:
                try:
                    return read(text)
                except ValueError as error:
                    raise typer.BadParameter(f"{error}.") from error

            more["parser"] = parse
        return make(*self.flags, metavar=self.metavar, show_default=False, help=self.help, **more)


def option(words: str, help: str, **more: Any) -> Declared:
    """Declare an option. words: its flags, then its metavar in capitals. No default is shown: where it matters, the
    help says it. more: as of `typer.Option`; what a `parser` raises as ValueError is told."""
    flags = tuple(word for word in words.split() if word.startswith("-"))
    return Declared(flags, " ".join(words.split()[len(flags) :]) or None, help, more)


def argument(metavar: str, help: str, **more: Any) -> Declared:
    """Declare an argument, as `option` does an option."""
    return Declared((), metavar, help, more)


Command = TypeVar("Command", bound=Callable[..., Any])


def takes(options: Mapping[str, Any]) -> Callable[[Command], Command]:
    """Give a command options between its arguments and its own options, as `**values`. options: their annotations, by
    parameter; one that is not given is None, a flag False."""

    def change(command: Command) -> Command:
        signature, keyword = inspect.signature(command, eval_str=True), inspect.Parameter.KEYWORD_ONLY
        own = [each.replace(kind=keyword) for each in list(signature.parameters.values())[:-1]]
        given = [
            inspect.Parameter(
                name, keyword, default=False if get_args(annotation)[0] is bool else None, annotation=annotation
            )
            for name, annotation in options.items()
        ]
        arguments = [each for each in own if not get_args(each.annotation)[1].flags]
        parameters = [*arguments, *given, *(each for each in own if each not in arguments)]
        command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return command

    return change


_HINTS = {
    "forget": "torpor rm deletes a version.",
    "prune": "The options say which versions stay.",
    "verify": "Name the session alone: all its versions are checked.",
    "untag": "The tag says which version has it.",
}


_NAMESPACE_KEY = f"{__name__}.namespace"

NAMESPACE_VARIABLE: Final = "TORPOR_NAMESPACE"
"""The environment's; empty is as unset."""


def enter_namespace(context: CommandLine, value: str | None) -> str | None:
    """Set the namespace of this command line, and give the one in force; None if none was set.

    Runs before all other options: names are read in it. The option behind the command wins over the one before it, and
    that over the environment.
    """
    if value is not None:
        context.meta[_NAMESPACE_KEY] = SessionUri(value, DEFAULT_NAMESPACE).namespace
    return namespace_of(context)


def namespace_of(context: CommandLine) -> str | None:
    """The namespace of this command line; None if none was set."""
    return context.meta.get(_NAMESPACE_KEY)


def require_sessions(context: CommandLine, value: str | list[str] | None) -> str | list[str] | None:
    """Complete names of sessions with the namespace. Refuses, before a daemon is asked, what is no such name or names a
    version."""
    if isinstance(value, str):
        return _require_session(context, value)
    return None if value is None else [_require_session(context, text) for text in value]


def _require_session(context: CommandLine, text: str) -> str:
    name = session_in(text)
    if name != text:
        command = context.info_name or "torpor"
        hint = f" {_HINTS[command]}" if command in _HINTS else ""
        raise InvalidUsage(f"{command} takes a session without a version: {name}.{hint}", session=name)
    parse_reference(text)
    return _name_in(context, text)


def _require_version(context: CommandLine, value: str) -> str:
    """As `require_sessions`, for a name that may have a version."""
    parse_version_reference(value)
    return _name_in(context, value)


def require_versions(context: CommandLine, value: list[str] | None) -> list[str] | None:
    """As `require_sessions`, for names that may have versions."""
    return None if value is None else [_require_version(context, text) for text in value]


def _name_in(context: CommandLine, text: str) -> str:
    namespace = namespace_of(context)
    return text if namespace is None else name_in(namespace, text)


JsonOption = Annotated[bool, option("--json", "Write one JSON document (with schema_version) to stdout.")]
SocketOption = Annotated[Path | None, option("--socket PATH", "The daemon's Unix socket, if not $TORPOR_SOCKET.")]
StoreOption = Annotated[
    Path | None, option("--store PATH", "Read this store's files directly, whether or not a daemon runs.")
]
WrittenStoreOption = Annotated[
    Path | None, option("--store PATH", "Work on this store's files directly; no daemon may have it.")
]
DryRunOption = Annotated[bool, option("--dry-run", "Say what would be done, and change nothing.")]
SessionArgument = Annotated[
    str, argument("SESSION", "NAME, NAMESPACE/NAME or torpor://NAMESPACE/NAME.", callback=require_sessions)
]
OnlySessionArgument = Annotated[
    str | None, argument("SESSION", "Only this session; otherwise all.", callback=require_sessions)
]
OnlySessionsArgument = Annotated[
    list[str] | None, argument("[SESSION]...", "Only these sessions; otherwise all.", callback=require_sessions)
]
SessionsArgument = Annotated[
    list[str], argument("SESSION...", "NAME, NAMESPACE/NAME or torpor://NAMESPACE/NAME.", callback=require_sessions)
]
VersionArgument = Annotated[
    str,
    argument(
        "SESSION[@VERSION]",
        "A session, and which version of it: @ and its number, a tag, or 8 digits of its id; ~2 for two before.",
        callback=_require_version,
    ),
]
OtherArgument = Annotated[
    str, argument("OTHER[@VERSION]", "What it is compared with, named in the same ways.", callback=_require_version)
]
VersionsArgument = Annotated[
    list[str],
    argument(
        "SESSION[@VERSION]...",
        "A session whole, or one version of it: @ and its number, a tag, or 8 digits of its id; ~2 for two before.",
        callback=require_versions,
    ),
]
LabelChoice = Annotated[str | None, option("--label TEXT", "The sessions that have this label.")]
NamespaceChoice = Annotated[
    str | None,
    option(
        "--namespace NAME",
        "Only the sessions of this namespace, and bare names in it.",
        is_eager=True,
        callback=enter_namespace,
    ),
]
NamespaceOption = Annotated[
    str | None,
    option(
        "--namespace NAME",
        f"Where a bare name is looked for, if not in ${NAMESPACE_VARIABLE} or {DEFAULT_NAMESPACE}.",
        is_eager=True,
        callback=enter_namespace,
    ),
]
NAMESPACE_PARAMETER = inspect.Parameter(
    "in_namespace", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=NamespaceOption
)


READS_VERSIONS: Final = (_require_version, require_versions)
"""The callbacks of arguments that name a session, and maybe a version of it."""

_READS_NAMES = (require_sessions, *READS_VERSIONS, enter_namespace)


def takes_namespace(signature: inspect.Signature) -> bool:
    """Whether a command reads names in a namespace and has no such option of its own."""
    infos = [info for each in signature.parameters.values() for info in getattr(each.annotation, "__metadata__", ())]
    reads = any(getattr(info, "callback", None) in _READS_NAMES for info in infos)
    return reads and all(each.annotation != NamespaceChoice for each in signature.parameters.values())


NewNameArgument = Annotated[str, argument("NAME", "What the new session is to be called.", callback=require_sessions)]
ModelOption = Annotated[str | None, option("--model NAME", "The model of a session that does not exist yet.")]
NewLabelOption = Annotated[
    list[str] | None, option("--label TEXT", "A label of a session that does not exist yet. Can be repeated.")
]
OwnLabelOption = Annotated[
    list[str] | None, option("--label TEXT", "A label of its own instead of the other's. Can be repeated.")
]
