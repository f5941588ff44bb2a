"""A verb without a domain of its own costs a record, a handler and a command, each with its row: then both clients have
it, the wire, the help and the reference. A field of a verb costs a line in each of the three."""

from __future__ import annotations

from pathlib import Path

import pytest
from torpor.tests.changed_copy import ROOT, copy_package, put, put_import, put_into_class, require_sound, serving

RECORD = '''

class EchoResult(Result):
    """What was said."""

    said: str


class EchoRequest(Request):
    """Say a text again, some times over."""

    text: ModelName
    _: KW_ONLY
    times: Annotated[int, Field(ge=1, le=3)] = 1
'''
ROW = "    echo = Verb(process.EchoRequest, process.EchoResult)\n"
HANDLER = '''

@answers(EchoRequest)
async def echo(parts: Parts, request: EchoRequest) -> EchoResult:
    """See `EchoRequest`."""
    return EchoResult(request.text * request.times)
'''
COMMAND = '''"""`torpor echo`: say a text again."""

from __future__ import annotations

from typing import Annotated

from ..reach.daemon_link import connect
from ..reach.options import JsonOption, SocketOption, argument
from ..view.output import Output, plain

TextArgument = Annotated[str, argument("TEXT", "What to say.")]


def echo(text: TextArgument, socket: SocketOption = None, as_json: JsonOption = False) -> None:
    """Nobody needs it.

    [bold]Examples[/]

    [cyan]torpor echo hi[/]
    """
    output = Output(as_json=as_json)
    with connect(socket) as client:
        result = client.echo(text, times=2)
    if not output.told("echo", result):
        output.line(plain(result.said))
'''
FIELD = "    remark: Label | None = None\n"
READ = """    if request.remark is not None:
        from ...snapshot.errors import NoSuchPosition

        raise NoSuchPosition(request.remark, session=request.session)
"""
OPTION = '    remark: Annotated[str | None, option("--remark", "Refuse it with these words.")] = None,\n'
PROGRAM = """
import asyncio, pydoc, subprocess, sys
from torpor.socket_api.client.blocking import blocking_link, wait
from torpor.socket_api import ApiError, AsyncClient, Client, InvalidRequest
from torpor.socket_api.wire.asking import Call
from torpor.daemon.api.verbs import VERBS
from pathlib import Path

socket = Path(sys.argv[1])
sys.path.insert(0, sys.argv[2])
from verb_reference import reference
import reference as tables
with Client(socket) as client:
    assert client.echo("hi", times=3).said == "hihihi"
    try:
        client.echo("hi", times=4)
    except InvalidRequest as refusal:
        assert refusal.message == "times: it must be less than or equal to 3.", refusal.message

async def awaited():
    async with AsyncClient(socket) as client:
        return await client.echo("hi")

assert asyncio.run(awaited()).said == "hi"
link = blocking_link(socket, timeout_s=20)
said, refused = (
    wait(link.wait_for(wait(link.begin(Call(VERBS["echo"], {"text": "raw", **more}))))) for more in ({}, {"more": 1})
)
assert (said.result, refused.error.code) == ({"said": "raw"}, "invalid_request")
wait(link.close())
help_text = pydoc.render_doc(Client.echo, renderer=pydoc.plaintext)
assert "echo(self, text: str, *, times: int = 1)" in help_text and "some times over" in help_text, help_text
assert "## `echo`" in reference() and "| `times` | whole number (1 to 3) | `1` |" in reference()
commands = tables.page_with_tables(tables.page_with_chapters("# Commands\\n"))
assert "    torpor echo TEXT [OPTIONS]\\n\\nSay a text twice.\\n\\nNobody needs it.\\n" in commands, commands
said = subprocess.run([sys.executable, "-m", "torpor.cli.main", "echo", "hi", "--socket", socket], capture_output=True)
assert said.stdout == b"hihi\\n", said
with Client(socket) as client:
    try:
        client.wake("notes", remark="busy")
    except ApiError as refusal:
        assert refusal.message == "busy"
help_text = pydoc.render_doc(AsyncClient.wake, renderer=pydoc.plaintext)
assert "remark: Optional[str] = None" in help_text, help_text
assert "| `remark` |" in reference()
command = [sys.executable, "-m", "torpor.cli.main", "wake", "notes", "--remark", "busy", "--socket", socket]
said = subprocess.run(command, capture_output=True)
assert b"busy" in said.stderr, said
print("a verb once")
"""


def put_verb(package: Path) -> None:
    daemon, cli = package / "daemon", package / "cli"
    put(daemon / "api" / "process.py", RECORD)
    put(daemon / "api" / "verbs.py", ROW, behind='    """The verbs of a service."""\n')
    put_import(daemon / "verbs" / "process.py", "from ..api.process import EchoRequest, EchoResult")
    put(daemon / "verbs" / "process.py", HANDLER)
    (cli / "commands" / "echo.py").write_text(COMMAND)
    row = '    Command(_SYSTEM, "echo", "commands.echo.echo", "Say a text twice."),\n'
    put(cli / "command_list.py", row, behind="COMMANDS = (\n")


def put_field(package: Path) -> None:
    put_into_class(package / "daemon" / "api" / "waking.py", "WakeRequest", FIELD)
    handler = "async def wake(parts: Parts, request: api.WakeRequest) -> api.WakeResult:\n"
    put(package / "daemon" / "verbs" / "waking.py", READ, behind=handler)
    command = package / "cli" / "commands" / "wake.py"
    put(command, OPTION, before="    socket: SocketOption = None,")
    put(command, "remark=remark, ", before="on_event=telling")


def test_what_a_verb_and_a_field_cost_has_its_place_in_the_code(tmp_path: Path) -> None:
    """Each commit checks this, though few try the verb and the field."""
    package = copy_package(tmp_path)
    put_verb(package)
    put_field(package)
    require_sound(package)


@pytest.mark.one_in(3)
def test_a_verb_is_added_by_a_record_a_handler_and_a_command_and_answers_everywhere(tmp_path: Path) -> None:
    package = copy_package(tmp_path)
    put_verb(package)
    put_field(package)

    with serving(tmp_path) as (_, ask):
        asked = ask(PROGRAM, tmp_path / "t.sock", ROOT / "scripts")
    assert asked.stdout == "a verb once\n", asked.stderr
