"""The asyncio client against a real server over a real socket."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from torpor.socket_api import AsyncClient, AsyncTextStream, Client, Sampling, TextStream
from torpor.socket_api.errors import (
    ApiError,
    ClientClosed,
    ConnectionLost,
    DaemonUnreachable,
    InvalidRequest,
    LocalProtocolError,
    PeerRefused,
    RemoteError,
    RequestTimeout,
)
from torpor.socket_api.wire.framing import encode_frame

from ..conftest import poll
from ..server.test_server import Running, running
from .test_client import HELLO

Story = Callable[[AsyncClient, Running], Awaitable[None]]


def play(path: Path, story: Story, *, timeout_s: float = 20.0) -> None:
    async def run() -> None:
        async with (
            asyncio.timeout(30),
            running(path) as state,
            AsyncClient(state.path, timeout_s=timeout_s) as client,
        ):
            await story(client, state)

    asyncio.run(run())


def test_every_verb_works(short_path: Path) -> None:
    async def story(client: AsyncClient, state: Running) -> None:
        assert (await client.create("notes", labels=["x"])).labels == ("x",)
        assert (await client.append("notes", text="a bb")).tokens_added == 2
        assert (await client.generate("notes", max_tokens=1, prove=True)).final_logits_blake3
        assert (await client.chat("notes", "hello", max_tokens=1)).tokens == (4,)
        said = [{"role": "user", "content": "hi"}]
        assert [piece async for piece in client.stream_chat("notes", messages=said, max_tokens=1)] == ["t6 "]
        assert (await client.chat("made", "hello", stop=["END"], create=True)).tokens
        assert [piece async for piece in client.stream_generate("made", text="x", create=True)]
        assert (await client.append("also", text="a", create=True)).tokens_added == 1
        assert (await client.set("notes", sampling=Sampling(seed=7))).sampling == Sampling(seed=7)
        assert (await client.sleep("notes")).version == 1
        assert (await client.plan_wake("notes", version=1)).way == "restore"
        assert (await client.wake("notes", version=1)).tokens_prefilled == 0
        assert (await client.list_sessions())[0].name == "notes"
        assert (await client.show("notes")).info.version == 1
        assert (await client.status()).sessions_awake == 3
        assert (await client.maintain("gc", dry_run=True)).dry_run
        assert (await client.mark("notes", tag="first")).tags == ("first",)
        assert (await client.import_bundle("ab" * 32)).version == 1
        assert (await client.analyse("notes@1", labels=["x"])).artifact == "{}\n"
        assert (await client.stats("none", "default")).total.sessions == 0
        assert (await client.warm("notes")).sessions[0].hits == 3
        assert (await client.clear("none", dry_run=True)).sessions == ()
        assert (await client.why("notes")).requests == ()
        assert (await client.fold("notes", "shorter", summary="so far", tail=1)).tail_tokens == 1
        assert (await client.fork("notes@1", "try", at_token=2, labels=["y"])).forked_from.tokens == 2
        assert (await client.load_model("fake")).loads == 1
        assert not (await client.unload_model("fake")).resident
        assert (await client.delete("notes")).versions_deleted == 1
        assert client.hello.protocol == 1

    play(short_path, story)


def test_many_requests_share_one_connection(short_path: Path) -> None:
    async def story(client: AsyncClient, state: Running) -> None:
        for name in "abc":
            await client.create(name)
        results = await asyncio.gather(*(client.generate(name, max_tokens=20) for name in "abc"))
        assert [len(result.tokens) for result in results] == [20, 20, 20]
        assert state.server.connections == 1

    play(short_path, story)


def test_a_stream_gives_pieces_and_keeps_its_result(short_path: Path) -> None:
    async def story(client: AsyncClient, state: Running) -> None:
        await client.create("s")
        seen: list[Any] = []
        stream = client.stream_chat("s", "hi", max_tokens=3, on_event=seen.append)
        pieces = [piece async for piece in stream]
        assert "".join(pieces) == stream.result.text
        assert [event.kind for event in seen] == ["progress", "token", "token", "token"]
        assert [piece async for piece in stream] == []

    play(short_path, story)


def test_a_stream_left_early_is_cancelled(short_path: Path) -> None:
    """Threat 45."""

    async def story(client: AsyncClient, state: Running) -> None:
        await client.create("s")
        async with client.stream_generate("s", max_tokens=10**6) as stream:
            async for _ in stream:
                break
        assert (state.service.running, state.service.cancelled) == (0, 1)
        with pytest.raises(LocalProtocolError, match="cancelled") as caught:
            _ = stream.result
        assert caught.value.details["text"].startswith("t0 ")
        assert caught.value.details["tokens"][0] == 0
        await client.status()

    play(short_path, story)


@pytest.mark.parametrize("streamed", [True, False])
def test_cancelling_the_waiting_task_cancels_in_the_daemon(short_path: Path, streamed: bool) -> None:
    async def story(client: AsyncClient, state: Running) -> None:
        await client.create("s")

        async def consume() -> None:
            if streamed:
                async for _ in client.stream_generate("s", max_tokens=10**6):
                    pass
            else:
                await client.generate("s", max_tokens=10**6)

        task = asyncio.create_task(consume())
        await poll(lambda: state.service.running == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await poll(lambda: state.service.cancelled == 1)
        assert (await client.status()).sessions_awake == 1

    play(short_path, story)


def test_silence_beyond_the_timeout_is_an_error_and_cancels(short_path: Path) -> None:
    async def story(client: AsyncClient, state: Running) -> None:
        await client.create("s")
        state.service.hold()
        with pytest.raises(RequestTimeout):
            await client.generate("s", max_tokens=1)
        await poll(lambda: state.service.cancelled == 1)
        state.service.release()
        assert (await client.generate("s", max_tokens=1)).text == "t0 "

    play(short_path, story, timeout_s=0.05)


def test_the_daemons_failure_is_a_remote_error_with_its_code(short_path: Path) -> None:
    async def story(client: AsyncClient, state: Running) -> None:
        with pytest.raises(RemoteError) as caught:
            await client.show("ghost")
        assert caught.value.code == "session_not_found"
        with pytest.raises(InvalidRequest):
            await client.generate("s", max_tokens=0)

    play(short_path, story)


def test_a_daemon_that_stops_ends_every_request_with_its_reason(short_path: Path) -> None:
    async def story(client: AsyncClient, state: Running) -> None:
        for name in "ab":
            await client.create(name)
        tasks = [asyncio.create_task(client.generate(name, max_tokens=10**6)) for name in "ab"]
        await poll(lambda: state.service.running == 2)
        await state.server.stop()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(outcome, RemoteError)
            assert outcome.code == "shutting_down"
        await poll(lambda: client._link._failure is not None)
        with pytest.raises(ConnectionLost, match="new client"):
            await client.status()

    play(short_path, story)


def test_a_client_is_used_between_connect_and_close(short_path: Path) -> None:
    async def story(client: AsyncClient, state: Running) -> None:
        early = AsyncClient(state.path)
        with pytest.raises(LocalProtocolError, match="not connected"):
            await early.status()
        with pytest.raises(LocalProtocolError, match="already"):
            await client.connect()
        waiting = asyncio.create_task(_create_and_hang(client, state))
        await poll(lambda: state.service.running == 1)
        await client.close()
        await client.close()
        with pytest.raises(ClientClosed):
            await waiting
        with pytest.raises(ClientClosed):
            await client.status()
        await poll(lambda: state.service.running == 0)

    play(short_path, story)


async def _create_and_hang(client: AsyncClient, state: Running) -> None:
    await client.create("s")
    await client.generate("s", max_tokens=10**6)


def test_nobody_there_is_unreachable(short_path: Path) -> None:
    async def run() -> None:
        with pytest.raises(DaemonUnreachable, match="torpor ensure"):
            await AsyncClient(short_path / "none").connect()

    asyncio.run(run())


def test_a_daemon_of_another_user_is_not_talked_to(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torpor.socket_api.client.reaching.peer_uid", lambda connected: 4_000_000)

    async def run() -> None:
        async with running(short_path) as state:
            with pytest.raises(PeerRefused):
                await AsyncClient(state.path).connect()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (b"", "connection_lost"),
        (b"\x10\x00\x00\x00half", "truncated_frame"),
        (b"\xff\xff\xff\xff", "frame_too_large"),
        (b"\x01\x00\x00\x00\xc1", "malformed_frame"),
        (encode_frame({"type": "result", "id": 1, "result": {}}, max_frame_bytes=99), "malformed_message"),
    ],
)
def test_a_connection_that_dies_or_lies_mid_request_is_a_typed_error(
    short_path: Path, answer: bytes, code: str
) -> None:
    async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(65536)
        writer.write(encode_frame(HELLO, max_frame_bytes=9999))
        await reader.read(65536)
        writer.write(answer)
        writer.close()

    async def run() -> None:
        server = await asyncio.start_unix_server(impostor, str(short_path / "i.sock"))
        async with server, AsyncClient(short_path / "i.sock", timeout_s=10) as client:
            with pytest.raises(ApiError) as caught:
                await client.status()
            assert caught.value.code == code

    asyncio.run(run())


def test_both_clients_offer_the_same_verbs_with_the_same_arguments() -> None:
    for one, other in ((Client, AsyncClient), (TextStream, AsyncTextStream)):
        verbs = {name for name in vars(one) if not name.startswith("_")}
        assert verbs == {name for name in vars(other) if not name.startswith("_")} - {"connect"}
        for name in verbs:
            member = inspect.getattr_static(one, name)
            if inspect.isfunction(member):
                theirs = inspect.signature(getattr(other, name)).parameters
                assert list(inspect.signature(member).parameters) == list(theirs)
