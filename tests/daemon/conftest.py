"""A service on a tiny model for each test."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torpor.daemon.engine import generation
from torpor.daemon.memory import loading
from torpor.daemon.memory.model_registry import ModelChoice
from torpor.daemon.models.company import Company
from torpor.daemon.models.grammars import Grammars
from torpor.daemon.models.models import KvChoice, LoadedModel, estimate_bytes
from torpor.daemon.models.sharing import Sharing
from torpor.daemon.upkeep import loop, writing_behind
from torpor.snapshot.digests import DigestCache
from torpor.tests.daemon.machines import OpenMachine
from torpor.tests.daemon.session_rig import MODEL, FullDisk, Rigged, open_rigged, open_service

TINY = {"num_hidden_layers": 2, "head_dim": 24, "intermediate_size": 144}
"""A layer less than elsewhere: a test spends much of its time on the tokens that it has written. A token takes as many
bytes as elsewhere."""


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory, model_writer: Callable[..., Path]) -> Path:
    return model_writer(tmp_path_factory.mktemp("models") / "tiny", **TINY)


@pytest.fixture(scope="session")
def another_model(tmp_path_factory: pytest.TempPathFactory, model_writer: Callable[..., Path]) -> Path:
    return model_writer(tmp_path_factory.mktemp("models") / "another", seed=9, **TINY)


_LOADED: dict[tuple[str, KvChoice | None], LoadedModel] = {}


@pytest.fixture(autouse=True)
def _loaded_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models that no test may change are read from the disk once in a process, but where loading is what is tested."""
    if request.path.parent.name in ("memory", "models"):
        return
    load = loading.load_model

    def load_once(
        name: str, source: str, digests: DigestCache, adapter: Any = None, kv: KvChoice | None = None
    ) -> LoadedModel:
        if adapter or digests.full or not Path(source).parent.name.startswith(("models", "kinds")):
            return load(name, source, digests, adapter, kv)
        if (source, kv) not in _LOADED:
            _LOADED[source, kv] = load(name, source, digests, adapter, kv)
        model = _LOADED[source, kv]
        return replace(
            model,
            name=name,
            network=copy.copy(model.network),
            grammars=Grammars(model.tokenizer, model.layout.vocabulary, model.end_tokens),
            sharing=Sharing(),
            company=Company(),
        )

    monkeypatch.setattr(loading, "load_model", load_once)


OpenRig = Callable[..., AbstractAsyncContextManager[Rigged]]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture(scope="session")
def digest_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("digests") / "digests.json"


@pytest.fixture(scope="session")
def weights(tiny_model: Path) -> int:
    """Bytes that the tiny model takes, without sessions."""
    return estimate_bytes(MODEL, str(tiny_model))


@pytest.fixture
def full_disk() -> Iterator[Callable[..., FullDisk]]:
    """Makes a `FullDisk` for sessions of these names."""
    with pytest.MonkeyPatch.context() as patch:  # of its own: a test may undo what it has patched
        yield lambda *names: FullDisk(patch, *names)


@pytest.fixture
def open_rig(store: Path, tiny_model: Path, digest_cache: Path) -> OpenRig:
    """Opens a service on this test's store: `async with open_rig() as rig`. model: another folder for the model."""

    def opener(model: Path = tiny_model, store: Path = store, **options: Any) -> AbstractAsyncContextManager[Rigged]:
        return open_rigged(store, {MODEL: str(model)}, digest_cache, **options)

    return opener


@pytest.fixture
def rig(open_rig: OpenRig) -> AbstractAsyncContextManager[Rigged]:
    """A service on this test's store. A test gets it open, in its own event loop, and leaves it to be closed."""
    return open_rig()


@pytest.fixture
def short_calls() -> Iterator[None]:
    """Texts are read in calls of 64 tokens as on a CPU, whatever computes here."""
    with pytest.MonkeyPatch.context() as patch:  # of its own: a test may undo what it has patched
        patch.setattr(generation, "PREFILL_CHUNK_TOKENS", 64)
        yield


@pytest.fixture
def open_kind(open_rig: OpenRig, models_of_kinds: Callable[[str], Path], quantisable_model: Path) -> OpenRig:
    """As `open_rig`, with a tiny model of that architecture; `plain` is the usual one, `quantized` has KV in 8 bits."""

    def opener(kind: str, **options: Any) -> AbstractAsyncContextManager[Rigged]:
        if kind == "plain":
            return open_rig(**options)
        if kind == "quantised":
            return open_rig(quantisable_model, kv=KvChoice(8, 32), **options)
        return open_rig(models_of_kinds(kind), **options)

    return opener


@pytest.fixture
def opened(store: Path, tiny_model: Path, another_model: Path, digest_cache: Path) -> Callable[..., Any]:
    """Opens a service with the models `one` and `two`, loaded on use; what is given changes how they are served."""

    @asynccontextmanager
    async def opener(
        one: dict[str, Any] | None = None, two: dict[str, Any] | None = None, **options: Any
    ) -> AsyncIterator[Rigged]:
        models = {
            "one": ModelChoice(**{"source": str(tiny_model), "at_start": False, **(one or {})}),
            "two": ModelChoice(**{"source": str(another_model), "at_start": False, **(two or {})}),
        }
        service = await open_service(store, models=models, digest_cache=digest_cache, **options)
        try:
            yield Rigged(service, {})
        finally:
            await service.close()

    return opener


@pytest.fixture(autouse=True)
def _not_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is, no test has versions that it does not ask for."""
    monkeypatch.setattr(writing_behind, "BLOCKS_DUE", 1 << 20)
    monkeypatch.setattr(loop, "AGAIN_S", 0.05)


@pytest.fixture
def machine(tmp_path: Path, tiny_model: Path, digest_cache: Path) -> OpenMachine:
    """The fixture: opens a daemon with a store of its own, and the remote of all."""
    (tmp_path / "shared").mkdir()

    @asynccontextmanager
    async def opened(name: str, **options: Any) -> AsyncIterator[Rigged]:
        options = {"remote": f"file://{tmp_path / 'shared'}"} | options
        async with open_rigged(tmp_path / name, {MODEL: str(tiny_model)}, digest_cache, **options) as rig:
            yield rig

    return opened
