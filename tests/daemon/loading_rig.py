"""A service of two models that are loaded on use."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from session_rig import Rigged
from torpor.daemon.memory.model_registry import ModelChoice
from torpor.daemon.service import Service

Opened = Callable[..., Any]


@pytest.fixture
def opened(store: Path, tiny_model: Path, another_model: Path, digest_cache: Path) -> Opened:
    """Opens a service with the models `one` and `two`, loaded on use; what is given changes how they are served."""

    @asynccontextmanager
    async def opener(
        one: dict[str, Any] | None = None, two: dict[str, Any] | None = None, **options: Any
    ) -> AsyncIterator[Rigged]:
        models = {
            "one": ModelChoice(**{"source": str(tiny_model), "at_start": False, **(one or {})}),
            "two": ModelChoice(**{"source": str(another_model), "at_start": False, **(two or {})}),
        }
        service = await Service.open(
            store_path=store,
            models=models,
            digest_cache=digest_cache,
            **{"prefix_reuse": "off", "batch_rows": 1, **options},
        )
        try:
            yield Rigged(service, {})
        finally:
            await service.close()

    return opener
