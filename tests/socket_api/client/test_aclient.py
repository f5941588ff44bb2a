"""What the asyncio client alone has: requests at once, the cancelling of a task, a life from connect to close."""

from __future__ import annotations

import asyncio

import pytest
from torpor.socket_api import AsyncClient
from torpor.socket_api.errors import ClientClosed, LocalProtocolError
from torpor.tests.socket_api.server_rig import Running, poll


async def test_many_requests_share_one_connection(state: Running) -> None:
    async with AsyncClient(state.path) as client:
        for name in "abc":
            await client.create(name)
        results = await asyncio.gather(*(client.generate(name, max_tokens=20) for name in "abc"))
        assert [len(result.tokens) for result in results] == [20, 20, 20]
        assert state.server.connections == 1


@pytest.mark.parametrize("streamed", [True, False])
async def test_cancelling_the_waiting_task_cancels_in_the_daemon(state: Running, streamed: bool) -> None:
    async with AsyncClient(state.path) as client:
        await client.create("s")
        stream = client.stream_generate("s", max_tokens=10**6)

        async def consume() -> None:
            if streamed:
                async for _ in stream:
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


async def test_a_client_is_used_between_connect_and_close(state: Running) -> None:
    client = AsyncClient(state.path)
    with pytest.raises(LocalProtocolError, match="not connected"):
        await client.status()
    await client.connect()
    with pytest.raises(LocalProtocolError, match="already"):
        await client.connect()
    await client.create("s")
    waiting = asyncio.create_task(client.generate("s", max_tokens=10**6))
    await poll(lambda: state.service.running == 1)
    await client.close()
    with pytest.raises(ClientClosed):
        await waiting
    await poll(lambda: state.service.running == 0)
