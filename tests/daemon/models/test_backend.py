"""What computed a snapshot is kept with it, and compared when it wakes."""

from __future__ import annotations

import asyncio
import importlib.metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torpor.daemon.models import backend
from torpor.daemon.models.backend import describe
from torpor.memvid.uri import SessionUri
from torpor.snapshot.errors import IdentityMismatch
from torpor.snapshot.identity import CIRCUMSTANCES, MAX_CIRCUMSTANCE_CHARS
from torpor.tests.daemon.damage_rig import damage, mend
from torpor.tests.daemon.session_rig import Rigged, tokens_of

import mlx.core as mx  # isort: skip  # after torpor, which chooses the BLAS


def test_the_facts_name_versions_device_and_blas() -> None:
    facts = describe()
    assert facts["mlx"] == importlib.metadata.version("mlx")
    assert set(facts) == CIRCUMSTANCES - {"adapter_path"}
    assert all(facts.values())
    assert describe(Path("/adapter")) == {**facts, "adapter_path": "/adapter"}


@pytest.mark.parametrize(
    ("device", "has_metal", "kind"), [(mx.cpu, True, "cpu"), (mx.gpu, True, "metal"), (mx.gpu, False, "cuda")]
)
def test_the_device_is_named_by_its_kind(
    monkeypatch: pytest.MonkeyPatch, device: Any, has_metal: bool, kind: str
) -> None:
    monkeypatch.setattr(backend.mx, "default_device", lambda: mx.Device(device))
    monkeypatch.setattr(backend.mx.metal, "is_available", lambda: has_metal)
    assert describe()["device"] == kind


LIBRARIES = {"nvidia-cublas": "13.1.0.3", "nvidia-cudnn-cu13": "9.15.1.9", "nvidia_cuda_nvrtc_cu12": "12.9.86"}
OTHERS = {"nvidia-nccl-cu13": "2.28", "nvidia-cublas-tools": "1", "numpy": "2"}


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """What tests compute with is not what they tell here."""
    monkeypatch.delenv("MLX_ENABLE_TF32", raising=False)


def on_cuda(monkeypatch: pytest.MonkeyPatch, gpu: str, libraries: dict[str, str]) -> dict[str, str]:
    """The facts on a GPU of that name, with only these packages installed."""
    packages = [SimpleNamespace(metadata={"Name": name}, version=version) for name, version in libraries.items()]
    with monkeypatch.context() as there:
        there.setattr(backend, "_device", lambda: "cuda")
        there.setattr(backend.mx, "device_info", lambda: {"device_name": gpu, "architecture": "sm_90", "uuid": "x"})
        there.setattr(backend.importlib.metadata, "distributions", lambda: packages)
        return describe()


def test_on_cuda_the_facts_name_the_gpu_and_what_computes_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A canary is to give the same bits where all facts are equal, so another GPU must not pass for this one."""
    facts = on_cuda(monkeypatch, "NVIDIA H200", {**OTHERS, **LIBRARIES})
    assert facts["processor"] == "NVIDIA H200, sm_90"
    assert facts["blas"] == "cublas 13.1.0.3, cudnn 9.15.1.9, nvrtc 12.9.86"
    assert set(facts) == CIRCUMSTANCES - {"adapter_path"}
    assert on_cuda(monkeypatch, "NVIDIA L4", LIBRARIES)["processor"] != facts["processor"]
    assert on_cuda(monkeypatch, "NVIDIA H200", OTHERS)["blas"] == "as shipped"


def test_on_a_gpu_the_facts_name_the_settings_that_decide_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu = describe()
    monkeypatch.setenv("MLX_ENABLE_TF32", "0")
    assert on_cuda(monkeypatch, "NVIDIA H200", OTHERS)["blas"] == "as shipped, MLX_ENABLE_TF32=0"
    assert (describe() == on_cpu) == (on_cpu["device"] == "cpu")
    monkeypatch.setenv("MLX_ENABLE_TF32", "0" * 2 * MAX_CIRCUMSTANCE_CHARS)
    assert len(on_cuda(monkeypatch, "NVIDIA H200", OTHERS)["blas"]) == MAX_CIRCUMSTANCE_CHARS


async def test_every_snapshot_says_what_computed_it(rig: Rigged) -> None:
    await rig.asleep("a", tokens_of(1, 10))
    with rig.service._parts.store.disk.open_session(SessionUri.parse("torpor://default/a")) as reader:
        assert reader.manifest.session["backend"] == describe()


async def sleep_elsewhere(open_rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A session that slept on another device with another version of mlx."""
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(backend, "_device", lambda: "metal")
        elsewhere.setattr(backend.importlib.metadata, "version", lambda _: "0.1")
        async with open_rig() as rig:
            await rig.asleep("a", tokens_of(1, 300))


DIFFERING = [
    ("device", "metal", "cpu"),
    *((library, "0.1", describe()[library]) for library in ("mlx", "mlx_lm", "numpy")),
]


@pytest.mark.skipif(describe()["device"] != "cpu", reason="what differs is told for a CPU")
async def test_what_another_backend_computed_wakes_and_the_wake_says_what_differs(
    open_rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await sleep_elsewhere(open_rig, monkeypatch)
    async with open_rig() as rig:
        asleep = (await rig.service.show("a")).backend
        woken = await rig.wake("a")
        again = await rig.wake("a")
        awake = (await rig.service.show("a")).backend
    assert (asleep["device"], asleep["mlx"]) == ("metal", "0.1")
    assert [(each.field, each.stored, each.live) for each in woken.provenance.differs] == DIFFERING
    assert (again.already_awake, again.provenance.differs) == (True, woken.provenance.differs)
    assert awake == describe()


@pytest.mark.skipif(describe()["device"] != "cpu", reason="what differs is told for a CPU")
async def test_whoever_is_strict_is_refused_what_another_backend_computed(
    open_rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await sleep_elsewhere(open_rig, monkeypatch)
    async with open_rig() as rig:
        with pytest.raises(IdentityMismatch, match="device was metal and is cpu") as refusal:
            await rig.service.wake("a", strict=True)
        assert not rig.is_awake("a")
        assert [(each["field"], each["stored"], each["live"]) for each in refusal.value.mismatched_fields] == DIFFERING
        await rig.wake("a")
        with pytest.raises(IdentityMismatch):
            await rig.service.wake("a", strict=True)
        await rig.write("a", 1)
        await rig.sleep("a")
        woken = await rig.service.wake("a", strict=True)
    assert woken.provenance.differs == (), "it has slept here since"


@pytest.mark.one_in(3)
@pytest.mark.parametrize("goes_on", ["awake", "asleep", "woken again", "forked", "cut at a look", "healed"])
async def test_what_another_backend_began_is_nobodys_prefix_however_it_goes_on(
    open_rig: Any, store: Path, monkeypatch: pytest.MonkeyPatch, goes_on: str
) -> None:
    """One token that is computed here does not make the others so."""
    text = tokens_of(1, 300)
    await sleep_elsewhere(open_rig, monkeypatch)
    async with open_rig(prefix_reuse="exact") as rig:
        await rig.service._parts.sessions.reuse.learned()
        await rig.wake("a")
        await rig.service.append("a", tokens=[5, *tokens_of(2, 300)])
        if goes_on != "awake":
            await rig.sleep("a")
        if goes_on == "woken again":
            assert (await rig.wake("a")).provenance.differs == ()
        if goes_on == "forked":
            await rig.service.fork("a", name="b")
            await rig.service.delete("a")
            await rig.wake("b")
        if goes_on == "cut at a look":
            await rig.wake("a", at_token=280)
            await rig.service.append("a", tokens=[6])
            await rig.sleep("a")
        if goes_on == "healed":
            await asyncio.to_thread(damage, store, "a", span=-1)
            await mend(rig)
            assert (await rig.service.show("a")).info.version == 3
        await rig.service.create("late")
        read = await rig.service.append("late", tokens=[*text, 1, 2, 3])
        assert read.cached_tokens == 0


@pytest.mark.usefixtures("short_calls")
async def test_what_is_computed_here_from_its_first_token_is_a_prefix_again(
    open_rig: Any, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first block is damaged, so all of it is computed again."""
    await sleep_elsewhere(open_rig, monkeypatch)
    damage(store, "a", span=0)
    async with open_rig(prefix_reuse="exact") as rig:
        await mend(rig)
        await rig.wake("a")
        assert rig.live("a").provenance.elsewhere_tokens == 0
        await rig.service.create("late")
        read = await rig.service.append("late", tokens=[*tokens_of(1, 300), 1])
        assert read.cached_tokens == 256


async def test_blocks_are_shared_whatever_computed_them(open_rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What may differ is no part of the digest that names blocks."""
    await sleep_elsewhere(open_rig, monkeypatch)
    async with open_rig() as rig:
        await rig.wake("a")
        await rig.write("a", 1)
        assert (await rig.sleep("a")).blocks_reused == 1
