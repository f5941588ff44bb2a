"""LangGraph's checkpoints tied to versions: before a double of a saver, with a server without a model.

`tests/clients/test_langgraph_checkpoints.py` does it with LangGraph itself.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from torpor.socket_api import Client
from torpor.socket_api.client.langgraph import VERSION_KEY, SessionCheckpoints
from torpor.socket_api.errors import DaemonUnreachable
from torpor.tests.socket_api.server_rig import ServerThread


class Saver:
    """Keeps the metadata of each thread's checkpoints; `aput` calls `put`, as LangGraph's in memory does."""

    def __init__(self) -> None:
        self.threads: dict[str, list[dict[str, Any]]] = {}

    def put(self, config: Any, checkpoint: Any, metadata: Any, new_versions: Any) -> Any:
        self.threads.setdefault(config["configurable"]["thread_id"], []).append(metadata)
        return config

    async def aput(self, config: Any, checkpoint: Any, metadata: Any, new_versions: Any) -> Any:
        return self.put(config, checkpoint, metadata, new_versions)

    def get_tuple(self, config: Any) -> Any:
        found = self.threads.get(config["configurable"]["thread_id"])
        return found and SimpleNamespace(metadata=found[-1])

    def delete_thread(self, thread_id: str) -> None:
        self.threads.pop(thread_id, None)

    async def adelete_thread(self, thread_id: str) -> None:
        self.delete_thread(thread_id)

    def copy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        self.threads[target_thread_id] = list(self.threads[source_thread_id])

    async def acopy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        self.copy_thread(source_thread_id, target_thread_id)

    def prune(self) -> str:
        return "the saver's own"


class Checkpoints(SessionCheckpoints, Saver):
    pass


@pytest.fixture
def saver(server_thread: ServerThread) -> Checkpoints:
    made = Checkpoints()
    made.socket_path = server_thread.socket_path
    with Client(made.socket_path) as client:
        client.append("a", text="one two", create=True)
    return made


def config(thread: str) -> Any:
    return {"configurable": {"thread_id": thread}}


def asked(server: ServerThread, name: str) -> int:
    return sum(each == name for each, _ in server.service.calls)


@pytest.mark.parametrize("awaited", [False, True])
def test_a_checkpoint_tells_the_version_that_it_has_saved(
    saver: Checkpoints, server_thread: ServerThread, awaited: bool
) -> None:
    given = {"step": 1}
    if awaited:
        asyncio.run(saver.aput(config("a"), {}, given, {}))
    else:
        saver.put(config("a"), {}, given, {})
    assert saver.threads["a"] == [{"step": 1, VERSION_KEY: "torpor://default/a@1"}]
    assert given == {"step": 1}
    assert saver.version_at(config("a")) == "torpor://default/a@1"
    assert asked(server_thread, "save") == 1


def test_a_thread_without_a_session_has_its_checkpoints_alone(saver: Checkpoints) -> None:
    saver.put(config("b"), {}, {"step": 1}, {})
    assert saver.threads["b"] == [{"step": 1}]
    assert saver.version_at(config("b")) is None
    assert saver.version_at(config("c")) is None
    saver.copy_thread("b", "c")
    saver.delete_thread("b")
    assert saver.threads == {"c": [{"step": 1}]}


@pytest.mark.parametrize("awaited", [False, True])
def test_a_copy_is_a_fork_and_a_deleted_thread_takes_its_session_with_it(
    saver: Checkpoints, server_thread: ServerThread, awaited: bool
) -> None:
    saver.put(config("a"), {}, {}, {})
    if awaited:
        asyncio.run(saver.acopy_thread("a", "b"))
        asyncio.run(saver.adelete_thread("a"))
    else:
        saver.copy_thread("a", "b")
        saver.delete_thread("a")
    assert list(server_thread.service.sessions) == ["b"]
    assert list(saver.threads) == ["b"]


def test_all_else_is_the_savers_own(saver: Checkpoints) -> None:
    assert saver.prune() == "the saver's own"


def test_a_failure_of_the_daemon_is_not_passed_over(saver: Checkpoints) -> None:
    saver.socket_path = "/nowhere/t.sock"
    with pytest.raises(DaemonUnreachable):
        saver.put(config("a"), {}, {}, {})
