"""Files of a loaded model change: it stays what it was, and nobody takes the files for it."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torpor.daemon.errors import ModelChanged
from torpor.daemon.memory.model_registry import ModelChoice
from torpor.daemon.models.adapters import AdapterChoice
from torpor.daemon.models.loaded_files import LoadedFiles
from torpor.daemon.options.serve_options import ServeOptions
from torpor.daemon.service import Service
from torpor.daemon.upkeep import watching
from torpor.snapshot.digests import DigestCache
from torpor.snapshot.errors import IdentityMismatch
from torpor.tests.daemon.adapter_making import write_adapter
from torpor.tests.daemon.session_rig import SAMPLED, Gate, Rigged, tokens_of, until

OpenRig = Callable[..., Any]


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "CHECK_EVERY_S", 0.05)
    monkeypatch.setattr(watching, "IDLE_CHECK_S", 0.05)


def changed(rig: Rigged) -> tuple[str, ...]:
    return rig.service._parts.models.shelf.places["tiny"].changed


def edit_config(folder: Path, **settings: object) -> None:
    """Replace the configuration by one stroke, as a copy tool does."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "new").write_text(json.dumps({**config, **settings}))
    os.replace(folder / "new", folder / "config.json")


async def test_a_changed_file_refuses_new_wakes_and_sessions_and_serves_what_is_awake(
    open_rig: OpenRig, own_tiny_model: Path
) -> None:
    weights = own_tiny_model / "model.safetensors"
    before = weights.read_bytes()
    async with open_rig(own_tiny_model) as rig:
        await rig.read_each(("awake", "asleep"), tokens_of(1, 50), sampling=SAMPLED)
        await rig.service.create("empty")
        await rig.sleep("asleep")
        weights.write_bytes(before[:-4] + bytes(4))
        await until(lambda: changed(rig) == ("weights",))
        with pytest.raises(ModelChanged, match="weights"):
            await rig.wake("asleep")
        with pytest.raises(ModelChanged) as refusal:
            await rig.service.create("new")
        assert (refusal.value.model, refusal.value.changed) == ("tiny", ["weights"])
        said = await rig.write("awake", 5)
        await rig.service.append("empty", tokens=tokens_of(1, 50))
        (info,) = (await rig.service.status()).models
        assert (info.changed, info.resident) == (("weights",), True)
        weights.write_bytes(before)
        await until(lambda: changed(rig) == ())
        await rig.wake("asleep")
        assert await rig.write("asleep", 5) == said, "the model is what it was"


async def test_whoever_unloads_a_changed_model_takes_the_new_files_and_what_slept_is_refused_by_identity(
    open_rig: OpenRig, own_tiny_model: Path
) -> None:
    async with open_rig(own_tiny_model) as rig:
        await rig.read("old", tokens_of(1, 50))
        edit_config(own_tiny_model, rope_theta=20000.0)
        await until(lambda: changed(rig) == ("config",))
        await rig.service.unload_model(model="tiny")
        assert changed(rig) == ()
        with pytest.raises(IdentityMismatch, match="rope"):
            await rig.wake("old")
        await rig.service.create("new")


async def test_a_changed_model_that_made_room_is_not_loaded_anew_by_itself(
    open_rig: OpenRig, own_tiny_model: Path
) -> None:
    async with open_rig(own_tiny_model) as rig:
        await rig.read("old", tokens_of(1, 50))
        edit_config(own_tiny_model, rope_theta=20000.0)
        await until(lambda: changed(rig) == ("config",))
        await rig.sleep("old")
        memory = rig.service._parts.models.memory
        await memory._unload("tiny", "pressure", memory.look_again)
        with pytest.raises(ModelChanged):
            await rig.wake("old")
        edit_config(own_tiny_model, rope_theta=10000.0)
        await until(lambda: changed(rig) == ())
        await rig.wake("old")


async def test_reloading_puts_the_sessions_to_sleep_and_takes_the_new_files(
    open_rig: OpenRig, own_tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_rig(own_tiny_model, on_model_change="reload") as rig:
        first = rig.model.identity
        await rig.read("old", tokens_of(1, 50))
        async with rig.service._parts.sessions.residency.turn(rig.live("old").uri):
            edit_config(own_tiny_model, rope_theta=20000.0)
            await until(lambda: changed(rig) == ("config",))
            assert rig.is_awake("old"), "it is in use"
        await until(lambda: rig.service._parts.models.shelf.places["tiny"].model is None)
        assert not rig.is_awake("old")
        await until(lambda: changed(rig) == ())
        await rig.service.create("new")
        assert rig.model.identity != first
        with pytest.raises(IdentityMismatch):
            await rig.wake("old")


async def test_files_that_are_touched_and_say_the_same_are_no_change(
    open_rig: OpenRig, own_tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = []
    differences = LoadedFiles.differences

    def counted(files: LoadedFiles, digests: DigestCache) -> tuple[str, ...]:
        looked.append(differences(files, digests))
        return looked[-1]

    monkeypatch.setattr(LoadedFiles, "differences", counted)
    async with open_rig(own_tiny_model) as rig:
        await until(lambda: bool(looked))
        seen = len(looked)
        for file in own_tiny_model.iterdir():
            os.utime(file)
        (own_tiny_model / "README.md").write_text("of no concern")
        await until(lambda: len(looked) > seen + 1)
        assert set(looked) == {()}
        await rig.service.create("a")


async def test_while_nobody_uses_the_daemon_it_looks_less_often(
    open_rig: OpenRig, own_tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "IDLE_CHECK_S", 10.0)
    async with open_rig(own_tiny_model) as rig:
        for quiet_s, pause_s in ((0.0, 0.05), (3.0, 3.0), (3600.0, 10.0)):
            monkeypatch.setattr(rig.service._parts.bus, "quiet_s", lambda quiet_s=quiet_s: quiet_s)
            assert rig.service._parts.upkeep.watching.uses() == {"tiny": (0.0, pause_s)}


async def test_a_folder_that_goes_and_comes_back_is_noticed_both_ways(
    open_rig: OpenRig, own_tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    aside = own_tiny_model.with_name("aside")
    async with open_rig(own_tiny_model) as rig:
        own_tiny_model.rename(aside)
        await until(lambda: bool(changed(rig)))
        with pytest.raises(ModelChanged):
            await rig.service.create("a")
        aside.rename(own_tiny_model)
        await until(lambda: not changed(rig))
        await rig.service.create("a")


async def test_a_changed_adapter_is_named(
    store: Path, tiny_model: Path, digest_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = write_adapter(tmp_path / "adapter", tiny_model)
    models = {"tiny": ModelChoice(str(tiny_model), AdapterChoice(str(adapter)))}
    service = await Service.open(ServeOptions(store=store), models=models, digest_cache=digest_cache)
    rig = Rigged(service, {})
    try:
        other = write_adapter(tmp_path / "other", tiny_model, seed=5)
        shutil.copy(other / "adapters.safetensors", adapter)
        await until(lambda: changed(rig) == ("adapter",))
    finally:
        await service.close()


@pytest.mark.parametrize(
    ("file", "change", "part"),
    [
        (
            "tokenizer.json",
            lambda text: text.replace('"merges":[]', '"merges": []').replace("endoftext", "endoftexx"),
            "tokenizer",
        ),
        ("tokenizer_config.json", lambda text: text.replace("assistant", "model"), "template"),
        ("chat_template.jinja", lambda _: "{{ messages }}", "template"),
        ("config.json", lambda text: text.replace("1e-06", "1e-05"), "config"),
        ("config.json", lambda text: text + "\n", None),
    ],
)
def test_what_changed_is_told_part_by_part(
    own_tiny_model: Path, tmp_path: Path, file: str, change: Callable[[str], str], part: str | None
) -> None:
    digests = DigestCache(tmp_path / "digests.json")
    files = LoadedFiles.of(own_tiny_model, None, digests)
    assert files.differences(digests) == ()
    path = own_tiny_model / file
    path.write_text(change(path.read_text() if path.exists() else ""))
    assert files.differences(digests) == (() if part is None else (part,))


def test_files_that_cannot_be_read_are_a_change_with_a_reason(own_tiny_model: Path, tmp_path: Path) -> None:
    digests = DigestCache(tmp_path / "digests.json")
    files = LoadedFiles.of(own_tiny_model, None, digests)
    (own_tiny_model / "config.json").unlink()
    (why,) = files.differences(digests)
    assert "config.json" in why


def test_files_that_nobody_touched_are_not_read(own_tiny_model: Path, tmp_path: Path) -> None:
    files = LoadedFiles.of(own_tiny_model, None, DigestCache(tmp_path / "digests.json"))

    class Unread(DigestCache):
        def digest(self, file: Path) -> str:
            raise AssertionError(f"{file} is read")

    assert files.differences(Unread(tmp_path / "none.json")) == ()


async def test_a_look_at_files_that_ends_after_their_model_was_unloaded_says_nothing(
    open_rig: OpenRig, own_tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, looks = Gate(), []

    def held(*_: object) -> tuple[str, ...]:
        looks.append("weights")
        gate.pass_through()
        return ("weights",)

    monkeypatch.setattr(LoadedFiles, "differences", held)
    async with open_rig(own_tiny_model) as rig:
        looking = asyncio.ensure_future(
            rig.service._parts.upkeep.watching._check(rig.service._parts.models.shelf.places["tiny"])
        )
        await until(lambda: len(looks) == 2)  # the daemon's own, and this one
        await rig.service.unload_model(model="tiny")
        gate.open()
        await looking
        assert changed(rig) == ()
        await rig.service.create("a")
