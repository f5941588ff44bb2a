"""LangGraph's checkpoints tied to versions of a session.

LangGraph keeps the state of a graph, and Torpor the model state of its conversation. A checkpoint that tells the
version of its session lets both go back together. Imports nothing of LangGraph: it is put before the class of a saver,
and what it does not change is that saver's own.

    class Checkpoints(SessionCheckpoints, InMemorySaver): ...
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from typing import Any, Final

from ..errors import RemoteError
from .client import Client

VERSION_KEY: Final = "torpor_version"
"""In the metadata of a checkpoint: the version of the session, as `torpor://NAMESPACE/NAME@3`."""

_Saver: Any = object


class SessionCheckpoints(_Saver):  # type: ignore[misc]  # the saver that stands behind it
    """A thread's session is the one of its name. Each checkpoint saves it, if there is one, and tells its version; a
    copy of a thread forks it; with a thread its session is deleted.

    socket_path, namespace: as for `Client`. Every method raises as the saver's, and `RemoteError` and
    `DaemonUnreachable` as a client's.
    """

    socket_path: str | os.PathLike[str] | None = None
    namespace: str | None = None

    def session_of(self, thread_id: str) -> str:
        """The name of a thread's session. A thread's id that is no name needs another one here."""
        return thread_id

    def version_at(self, config: Mapping[str, Any]) -> str | None:
        """The version that belongs to a checkpoint, to be forked or woken; None without one."""
        found = self.get_tuple(config)
        return None if found is None else found.metadata.get(VERSION_KEY)

    def put(self, config: Any, checkpoint: Any, metadata: Any, new_versions: Any) -> Any:
        """As the saver's, behind a save of the session."""
        return super().put(config, checkpoint, self._tied(config, metadata), new_versions)

    def delete_thread(self, thread_id: str) -> None:
        """As the saver's, and then the session's `delete`."""
        super().delete_thread(thread_id)
        self._delete(thread_id)

    def copy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        """As the saver's, and then the session's `fork`."""
        super().copy_thread(source_thread_id, target_thread_id)
        self._fork(source_thread_id, target_thread_id)

    async def aput(self, config: Any, checkpoint: Any, metadata: Any, new_versions: Any) -> Any:
        """As `put`."""
        tied = await asyncio.to_thread(self._tied, config, metadata)
        return await super().aput(config, checkpoint, tied, new_versions)

    async def adelete_thread(self, thread_id: str) -> None:
        """As `delete_thread`."""
        await super().adelete_thread(thread_id)
        await asyncio.to_thread(self._delete, thread_id)

    async def acopy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        """As `copy_thread`."""
        await super().acopy_thread(source_thread_id, target_thread_id)
        await asyncio.to_thread(self._fork, source_thread_id, target_thread_id)

    def _tied(self, config: Any, metadata: Any) -> Any:
        if VERSION_KEY in metadata:  # a saver's `aput` may call its `put`
            return metadata
        saved = self._unless_missing(lambda client: client.save(self.session_of(config["configurable"]["thread_id"])))
        return metadata if saved is None else {**metadata, VERSION_KEY: f"{saved.session}@{saved.version}"}

    def _delete(self, thread_id: str) -> None:
        self._unless_missing(lambda client: client.delete(self.session_of(thread_id)))

    def _fork(self, source: str, target: str) -> None:
        self._unless_missing(lambda client: client.fork(self.session_of(source), self.session_of(target)))

    def _unless_missing(self, ask: Any) -> Any:
        """What a client gets; None where the thread has no session yet. On a connection of its own: a saver may be
        called from any thread."""
        try:
            with Client(self.socket_path, namespace=self.namespace) as client:
                return ask(client)
        except RemoteError as error:
            if error.code in ("session_not_found", "empty_context"):
                return None
            raise
