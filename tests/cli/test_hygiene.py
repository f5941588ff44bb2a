"""The command line stays light: a command brings in what it uses, and none the model's world or the daemon."""

from __future__ import annotations

import subprocess
import sys

import pytest
from torpor.socket_api import Client
from torpor.socket_api.wire.address import default_socket_path
from torpor.tests.cli.cli_rig import MadeStore
from torpor.tests.socket_api.server_rig import ServerThread

_PROTOCOL = ("pydantic", "torpor.socket_api.client", "torpor.socket_api.wire.checking")
_SERVICE = ("torpor.daemon.engine", "torpor.daemon.models", "torpor.daemon.parts", "torpor.daemon.verbs")
_MODELS = ("mlx", "mlx_lm", "transformers", "numpy", *_SERVICE, "torpor.snapshot")
_HEAVY = (*_MODELS, "torpor.daemon", "asyncio")
_OF_FILES = {"torpor.daemon", "torpor.daemon.errors", "torpor.daemon.views", "torpor.daemon.views.stored"}
"""What a command that reads a store takes of the daemon, beside its records."""
_DRAWING = ("rich",)
_STORE = ("sqlite3", "msgpack", "torpor.memvid.store")

_SCRIPT = """
import sys
from torpor.cli import main
try:
    main.main()
except SystemExit as end:
    assert not end.code, end.code
print(*sys.modules, sep="\\n", file=sys.stderr)
"""


def imported_by(*arguments: object) -> set[str]:
    """The modules that there are at the end of a command line in a process of its own."""
    command = [sys.executable, "-c", _SCRIPT, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return set(done.stderr.split())


def of(barred: tuple[str, ...], modules: set[str]) -> set[str]:
    return {name for name in modules if name in barred or name.startswith(tuple(f"{each}." for each in barred))}


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("arguments", "barred"),
    [
        (("--version",), (*_HEAVY, *_PROTOCOL, *_STORE, *_DRAWING, "torpor.cli.commands")),
        (("--help",), (*_HEAVY, *_PROTOCOL, *_STORE, "torpor.cli.commands")),
        (("ls", "--help"), (*_MODELS, "asyncio", *_PROTOCOL)),
        (("chat", "--help"), _MODELS),
    ],
)
def test_a_command_line_imports_what_it_uses(arguments: tuple[str, ...], barred: tuple[str, ...]) -> None:
    assert of(barred, imported_by(*arguments)) == set()


def test_ls_imports_the_store_and_nothing_that_asks_a_daemon_where_there_is_none(
    made_store: MadeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORPOR_STORE", str(made_store.path))
    modules = imported_by("ls")
    barred = of((*_HEAVY, *_PROTOCOL, "rich.progress"), modules)
    assert {name for name in barred if not name.startswith("torpor.daemon.api")} == _OF_FILES
    assert of(("torpor.cli.commands",), modules) == {"torpor.cli.commands", "torpor.cli.commands.ls"}
    assert "torpor.memvid.store" in modules, "it is the command that ran"


@pytest.mark.parametrize("command", ["ls", "log"])
def test_a_listing_of_a_daemon_needs_no_client_no_pydantic_and_no_typer(daemon: ServerThread, command: str) -> None:
    with Client(default_socket_path()) as client:
        client.create("notes")
    barred = of(("pydantic", "typer", "asyncio", *_DRAWING, *_MODELS), imported_by(command))
    assert barred == set()
