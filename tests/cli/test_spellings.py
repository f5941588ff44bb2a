"""Public names have American spelling. The earlier spelling of a name works wherever the name does, and is nowhere
listed."""

from __future__ import annotations

import ast
import asyncio
import re
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from torpor.cli.command_list import COMMANDS
from torpor.cli.program import load_command
from torpor.daemon.api.store import MaintainRequest
from torpor.daemon.api.verbs import VERBS
from torpor.daemon.events.events import EVENTS
from torpor.daemon.options.serve_options import SERVE_OPTIONS
from torpor.socket_api import AsyncClient, Client
from torpor.socket_api.limits import REPLY_LIMITS
from torpor.socket_api.wire.checking import load_request
from torpor.socket_api.wire.connection import AcceptedRequest, ClientConnection, ServerConnection
from torpor.socket_api.wire.framing import FrameDecoder
from torpor.spellings import EARLIER, by_present_names, present
from torpor.tests.cli.cli_rig import Torpor
from torpor.tests.socket_api.server_rig import ServerThread

ROOT = Path(__file__).parents[2]
BRITISH = re.compile(
    r"(quant|summar|token|recogn|normal|organ|optim|initial|serial|minim|maxim|general|special|custom|material|vector)"
    r"is(e[sd]?|ing|ation)\b|analys(e|ed|ing)\b|colour|behaviour|neighbour|honour|favour|labell|modell|signall|centred",
    re.IGNORECASE,
)
"""Not `cancelled`: Python and its libraries spell it so."""


def test_the_table_names_what_is_there() -> None:
    options = {option for command in COMMANDS for each in load_command(command.name).params for option in each.opts}
    names = {*VERBS, *(command.name for command in COMMANDS), *(option.removeprefix("--") for option in options)}
    assert names >= set(EARLIER.values())
    assert not names & EARLIER.keys()
    assert [present(name) for name in ("analyse", "analyze", "notes", 7)] == ["analyze", "analyze", "notes", 7]
    assert by_present_names({"summarise": 3, "name": "analyse"}) == {"summarize": 3, "name": "analyse"}


def test_public_names_and_help_have_american_spelling() -> None:
    texts = [command.name + command.summary + load_command(command.name).help for command in COMMANDS]
    texts += [
        " ".join(each.opts) + (each.help or "") for command in COMMANDS for each in load_command(command.name).params
    ]
    texts += [str(option) for option in SERVE_OPTIONS.values()]
    for verb in VERBS.values():
        hints = get_type_hints(verb.request, include_extras=True) | get_type_hints(verb.result, include_extras=True)
        texts += [verb.name, verb.request.__doc__ or "", verb.result.__doc__ or "", *hints, *map(str, hints.values())]
    texts += [f"{event.name} {event.__doc__} {get_type_hints(event, include_extras=True)}" for event in EVENTS]
    assert [text for text in texts if BRITISH.search(text)] == []


@pytest.mark.one_in(1)
@pytest.mark.parametrize(
    "page", [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))], ids=lambda p: p.name
)
def test_documents_have_american_spelling(page: Path) -> None:
    """What tests and files of the code are called is their own. The changes name what there was."""
    text = re.sub(
        r"test_\w+|\w+\.py\b|`--quantise-\w+`|^.*earlier spelling.*$", "", page.read_text(), flags=re.MULTILINE
    )
    assert [found[0] for found in BRITISH.finditer(text)] == []


REQUEST_OF_A_FOLD = "Summarise our conversation so far."
"""The model is asked so: in other words it would answer otherwise."""


@pytest.mark.one_in(1)
def test_what_the_code_says_has_american_spelling() -> None:
    """Messages, and what is said of modules, classes and functions."""
    found = []
    for folder in ("cli", "daemon", "memvid", "snapshot", "socket_api"):
        for path in (ROOT / folder).rglob("*.py"):
            texts = [node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
            texts = [re.sub(r"\w+\.py\b", "", text) for text in texts if isinstance(text, str)]
            found += [text for text in texts if BRITISH.search(text) and text != REQUEST_OF_A_FOLD]
    assert found == []


@pytest.mark.parametrize("name", ["analyse", "quantise"])
def test_a_command_by_its_earlier_name_is_that_command(torpor: Torpor, name: str) -> None:
    assert torpor(name, "--help") == torpor(present(name), "--help")
    listed = torpor("--help").out
    assert present(name) in listed
    assert name not in listed


def test_an_option_by_its_earlier_name_is_that_option(torpor: Torpor, daemon: ServerThread) -> None:
    for written in (("--summarise", "20"), ("--summarise=20",)):
        with Client() as client:
            client.append("long", text="a text", create=True)
        assert torpor("fold", "long", f"short{len(written)}", *written).status == 0
        verb, given = daemon.service.calls[-1]
        assert (verb, given["summarize"]) == ("fold", 20)
    assert "--summarise" not in torpor("fold", "--help").out
    assert torpor("append", "long", "--", "--summarise").status == 0
    assert daemon.service.calls[-1][1]["text"] == "--summarise", "what stands behind -- is no option"


def test_methods_parameters_and_operations_by_their_earlier_names(daemon: ServerThread) -> None:
    with Client() as client:
        client.append("notes", text="a text", create=True)
        client.sleep("notes")
        assert client.analyse("notes") == client.analyze("notes")
        client.fold("notes", name="less", summarise=20)
        client.maintain("quantise", session="less", bits=8)
        with pytest.raises(AttributeError, match="nonsense"):
            client.nonsense("notes")
        assert not {*dir(client)} & EARLIER.keys()

    async def awaited() -> None:
        async with AsyncClient() as other:
            await other.analyse("notes")

    asyncio.run(awaited())
    asked = [(verb, given.get("summarize", given.get("operation"))) for verb, given in daemon.service.calls[2:]]
    assert asked == [("analyze", None), ("analyze", None), ("fold", 20), ("maintain", "quantize"), ("analyze", None)]


def test_the_wire_takes_earlier_names() -> None:
    client, server = ClientConnection(client_name="test"), ServerConnection(max_in_flight=1)
    server.feed(client.send_hello())
    assert server.next_message() is not None
    client.feed(server.send_hello(server="torpor", pid=7))
    assert client.next_message() is not None
    server.feed(client.send_request("analyse", {"session": "notes"})[1])
    accepted = server.next_message()
    assert isinstance(accepted, AcceptedRequest)
    assert accepted.verb is VERBS["analyze"]
    stages = {"analyze": "analyse", "wake": "wake"}
    for stage, told in stages.items():
        decoder = FrameDecoder(REPLY_LIMITS)
        decoder.feed(server.send_event(accepted.id, {"kind": "progress", "stage": stage, "done": 0, "total": 1}))
        sent: Any = decoder.next_frame()
        assert sent["event"]["stage"] == told, "a client of then knows no other"
    fold = load_request(VERBS["fold"], {"session": "notes", "name": "less", "summarise": 20})
    assert {each.name: getattr(fold, each.name) for each in fields(fold)}["summarize"] == 20
    assert MaintainRequest("quantise", session="less", bits=8).operation == "quantize", "also where no wire checks it"
    operation = load_request(VERBS["maintain"], {"operation": "quantise", "session": "less", "bits": 8})
    assert operation == load_request(VERBS["maintain"], {"operation": "quantize", "session": "less", "bits": 8})
