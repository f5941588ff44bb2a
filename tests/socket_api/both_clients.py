"""The two clients as one: a test that takes `kind` is told twice."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torpor.socket_api import AsyncClient, Client

both = pytest.mark.parametrize("kind", ["blocking", "awaited"])


class _Waiting:
    """Something asynchronous with the blocking one's manners: each method waits for its answer."""

    def __init__(self, awaited: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._awaited, self._loop = awaited, loop

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._awaited, name)
        return self._waiting(found) if inspect.ismethod(found) else found

    def _waiting(self, method: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            made = method(*args, **options)
            if inspect.isawaitable(made):
                return self._loop.run_until_complete(made)
            return _Pieces(made, self._loop) if hasattr(made, "__anext__") else made

        return call

    def close(self) -> None:
        self._loop.run_until_complete(self._awaited.close())


class _Pieces(_Waiting):
    """A stream, or a subscription."""

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return self._loop.run_until_complete(anext(self._awaited))
        except StopAsyncIteration:
            raise StopIteration from None

    def __enter__(self) -> Any:
        self._loop.run_until_complete(self._awaited.__aenter__())
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


@contextmanager
def connected(socket: Path, kind: str = "blocking", **options: Any) -> Iterator[Any]:
    """One of the two clients."""
    if kind == "blocking":
        with Client(socket, **options) as client:
            yield client
        return
    loop = asyncio.new_event_loop()
    try:
        waiting = _Waiting(AsyncClient(socket, **options), loop)
        waiting.connect()
        try:
            yield waiting
        finally:
            waiting.close()
    finally:
        loop.close()
