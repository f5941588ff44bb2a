"""LoRA and DoRA adapters: what they change is part of the identity, and what does not fit is refused (MS1)."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx_lm
import pytest
from mlx.utils import tree_flatten, tree_unflatten
from torpor.daemon.errors import AdapterMismatch, AdapterUnavailable
from torpor.daemon.memory.model_registry import ModelChoice
from torpor.daemon.models import models
from torpor.daemon.models.adapters import AdapterChoice, folder_of
from torpor.daemon.models.models import DEMO_MODEL_FOLDER, LoadedModel, load_model
from torpor.daemon.options.serve_options import ServeOptions
from torpor.daemon.service import Service
from torpor.snapshot.digests import DigestCache
from torpor.snapshot.errors import AdapterFilesMissing, IdentityMismatch, ModelFilesChanging
from torpor.tests.daemon.adapter_making import edit_config, write_adapter
from torpor.tests.daemon.session_rig import tokens_of

import mlx.core as mx  # isort: skip  # after torpor, which chooses the BLAS

PROMPT = [1, 2, 3, 5, 8]


@pytest.fixture
def digests(tmp_path: Path) -> DigestCache:
    return DigestCache(tmp_path / "digests.json")


@pytest.fixture(scope="session", params=["lora", "dora"])
def adapter(request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of each kind for the tiny model; tests must not write into it."""
    return write_adapter(tmp_path_factory.mktemp("adapters") / request.param, tiny_model, kind=request.param)


@pytest.fixture
def own_adapter(adapter: Path, tmp_path: Path) -> Path:
    """A copy of an adapter that a test may change."""
    return Path(shutil.copytree(adapter, tmp_path / "adapter"))


@pytest.fixture
def load(tiny_model: Path, digests: DigestCache) -> Callable[..., LoadedModel]:
    def loading(adapter: Path | str | None, *, fused: bool = False, model: Path = tiny_model) -> LoadedModel:
        return load_model("tiny", str(model), digests, AdapterChoice(str(adapter), fused) if adapter else None)

    return loading


def logits(network: Any) -> mx.array:
    found: mx.array = network(mx.array([PROMPT]))
    mx.eval(found)
    return found


def adapter_part(model: LoadedModel) -> str:
    return dict(model.identity.parts)["adapter"]


def served(adapter: Path, *, fused: bool = False) -> dict[str, Any]:
    return {"adapters": {"tiny": AdapterChoice(str(adapter), fused)}}


def test_a_model_with_an_adapter_computes_what_mlx_lm_computes_with_it(
    tiny_model: Path, adapter: Path, load: Callable[..., LoadedModel]
) -> None:
    expected = logits(mlx_lm.load(str(tiny_model), adapter_path=str(adapter))[0])
    assert mx.array_equal(logits(load(adapter).network), expected).item()
    assert not mx.array_equal(logits(load(None).network), expected).item()


def fused_by_mlx_lm(model: Path, adapter: Path) -> Any:
    network: Any = mlx_lm.load(str(model), adapter_path=str(adapter))[0]
    network.update_modules(
        tree_unflatten([(name, each.fuse()) for name, each in network.named_modules() if hasattr(each, "fuse")])
    )
    return network


def test_a_fused_adapter_is_in_the_weights_as_mlx_lm_fuses_it(
    tiny_model: Path, adapter: Path, load: Callable[..., LoadedModel]
) -> None:
    fused = load(adapter, fused=True)
    expected = fused_by_mlx_lm(tiny_model, adapter)
    assert mx.array_equal(logits(fused.network), logits(expected)).item()
    names = {name for name, _ in tree_flatten(fused.network.parameters())}
    assert names == {name for name, _ in tree_flatten(load(None).network.parameters())}


@pytest.mark.skipif(mx.default_device() != mx.Device(mx.cpu), reason="half precision is widened on a CPU only")
def test_half_precision_weights_are_fused_as_they_are_stored_and_then_widened(
    own_tiny_model: Path, adapter: Path, load: Callable[..., LoadedModel]
) -> None:
    """So a model that is fused on loading has the weights of a checkpoint that was fused beforehand."""
    path = str(own_tiny_model / "model.safetensors")
    weights = mx.load(path)
    mx.eval(weights)
    halves = {name: value.astype(mx.bfloat16) for name, value in weights.items()}
    mx.save_safetensors(path, halves, {"format": "mlx"})  # type: ignore[arg-type]
    fused = dict(tree_flatten(load(adapter, fused=True, model=own_tiny_model).network.parameters()))
    for name, value in tree_flatten(fused_by_mlx_lm(own_tiny_model, adapter).parameters()):
        assert fused[name].dtype == mx.float32
        assert mx.array_equal(fused[name], value.astype(mx.float32)).item(), name


def test_the_part_tells_kind_rank_scale_and_whether_it_is_fused_and_nothing_else_changes(
    adapter: Path, load: Callable[..., LoadedModel]
) -> None:
    plain, unfused, fused = load(None), load(adapter), load(adapter, fused=True)
    assert adapter_part(plain) == "none"
    for model, word in ((unfused, "unfused"), (fused, "fused")):
        kind, rank, scale, fusing, digest = adapter_part(model).split(" ")
        assert (kind, rank, scale, fusing, len(digest)) == (adapter.name, "rank=4", "scale=10.0", word, 64)
        assert {part for part in model.identity.parts if part[0] != "adapter"} == {
            part for part in plain.identity.parts if part[0] != "adapter"
        }
        assert model.backend["adapter_path"] == str(adapter)
    assert "adapter_path" not in plain.backend


@pytest.mark.one_in(2)
async def test_a_session_wakes_exactly_with_the_adapter_that_it_slept_with(open_rig: Any, adapter: Path) -> None:
    async with open_rig(**served(adapter)) as rig:
        await rig.read("a", tokens_of(1, 300))
        await rig.read("control", tokens_of(1, 300))
        await rig.sleep("a")
        expected = await rig.write("control", 20)
    async with open_rig(**served(adapter)) as rig:
        assert (await rig.wake("a")).tokens_prefilled == 0
        assert await rig.write("a", 20) == expected
        assert (await rig.service.status()).models[0].adapter == adapter_part(rig.model)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, "unfused"),
        ("unfused", None),
        ("unfused", "fused"),
        ("fused", "unfused"),
        ("unfused", "other"),
        ("unfused", "rescaled"),
    ],
)
async def test_a_session_is_refused_under_another_adapter_and_both_are_named_ms1_threat_55(
    open_rig: Any, tiny_model: Path, adapter: Path, tmp_path: Path, before: str | None, after: str | None
) -> None:
    other = write_adapter(tmp_path / "other", tiny_model, kind=adapter.name, seed=2)
    rescaled = Path(shutil.copytree(adapter, tmp_path / "rescaled"))
    edit_config(rescaled, scale=11.0)
    options = {
        None: {},
        "unfused": served(adapter),
        "fused": served(adapter, fused=True),
        "other": served(other),
        "rescaled": served(rescaled),
    }
    async with open_rig(**options[before]) as rig:
        await rig.asleep("a", tokens_of(1, 10))
        stored = adapter_part(rig.model)
    async with open_rig(**options[after]) as rig:
        live = adapter_part(rig.model)
        with pytest.raises(IdentityMismatch, match="load the model with the adapter it was slept with") as refusal:
            await rig.wake("a")
        assert not rig.is_awake("a")
    assert refusal.value.mismatched_fields == [
        {"field": "adapter", "stored": stored, "live": live, "policy": "must_match"}
    ]


async def test_an_adapter_that_was_moved_is_the_same_and_the_wake_says_where_it_is(
    open_rig: Any, own_adapter: Path
) -> None:
    async with open_rig(**served(own_adapter)) as rig:
        await rig.asleep("a", tokens_of(1, 10))
    moved = own_adapter.rename(own_adapter.with_name("moved"))
    async with open_rig(**served(moved)) as rig:
        woken = await rig.wake("a")
    assert [(each.field, each.stored, each.live) for each in woken.provenance.differs] == [
        ("adapter_path", str(own_adapter), str(moved))
    ]


@pytest.mark.parametrize("kind", ["lora", "dora"])
async def test_the_demo_model_takes_an_adapter(store: Path, digest_cache: Path, tmp_path: Path, kind: str) -> None:
    adapter = write_adapter(tmp_path / kind, DEMO_MODEL_FOLDER, kind=kind)
    choice = ModelChoice(str(DEMO_MODEL_FOLDER), AdapterChoice(str(adapter), fused=True))
    service = await Service.open(ServeOptions(store=store), models={"demo": choice}, digest_cache=digest_cache)
    try:
        (info,) = (await service.status()).models
    finally:
        await service.close()
    assert info.adapter.startswith(f"{kind} rank=4 scale=10.0 fused ")


def test_whole_weights_are_an_adapter_too_with_nothing_to_fuse(
    tiny_model: Path, tmp_path: Path, load: Callable[..., LoadedModel]
) -> None:
    folder = tmp_path / "full"
    folder.mkdir()
    weights = mx.load(str(tiny_model / "model.safetensors"))
    name = "model.layers.0.self_attn.k_proj.weight"
    mx.save_safetensors(str(folder / "adapters.safetensors"), {name: weights[name] * 2})
    (folder / "adapter_config.json").write_text(json.dumps({"fine_tune_type": "full", "num_layers": 2}))
    model, fused = load(folder), load(folder, fused=True)
    assert adapter_part(model) == adapter_part(fused)
    assert adapter_part(model).split(" ")[0] == "full"
    assert not mx.array_equal(logits(model.network), logits(load(None).network)).item()


# --- what is no adapter, or another model's


def test_a_folder_that_is_not_there_is_named(load: Callable[..., LoadedModel]) -> None:
    with pytest.raises(AdapterUnavailable, match="'/no/adapter' for model 'tiny'"):
        load("/no/adapter")


@pytest.mark.parametrize("name", ["adapters.safetensors", "adapter_config.json"])
def test_a_folder_that_is_not_whole_is_refused_by_the_file_that_it_lacks(
    own_adapter: Path, load: Callable[..., LoadedModel], name: str
) -> None:
    (own_adapter / name).unlink()
    with pytest.raises(AdapterFilesMissing, match=f"has no {name}"):
        load(own_adapter)


@pytest.mark.parametrize(
    ("size", "words"), [(0.5, "has [0-9]+ of its [0-9]+ bytes, as"), (0.01, "does not begin as"), (0, "does not")]
)
def test_weights_that_were_cut_off_are_told_by_their_path_and_not_taken_for_another_models(
    own_adapter: Path, load: Callable[..., LoadedModel], size: float, words: str
) -> None:
    file = own_adapter / "adapters.safetensors"
    os.truncate(file, int(file.stat().st_size * size))
    with pytest.raises(AdapterFilesMissing, match=f"{file} {words}.* Copy the adapter anew") as refusal:
        load(own_adapter)
    assert refusal.value.details["path"] == str(file)


def change_weights(folder: Path, change: Callable[[dict[str, mx.array]], object]) -> None:
    path = str(folder / "adapters.safetensors")
    weights: Any = mx.load(path)
    mx.eval(weights)
    change(weights)
    mx.save_safetensors(path, weights)


FACTOR = "model.layers.1.self_attn.k_proj.lora_a"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda it: it.update({"model.layers.9.self_attn.k_proj.lora_a": it[FACTOR]}), "layers.9"),
        (lambda it: it.update({"model.embed_tokens.weight": it[FACTOR]}), "not an adapter parameter"),
        (lambda it: it.update({FACTOR: it[FACTOR][:-1]}), "shape"),
        (lambda it: it.pop(FACTOR), f"no weights for 1 of the .* the first is {FACTOR}"),
    ],
    ids=["of a layer that is not there", "of no factor", "of another shape", "not whole"],
)
def test_an_adapter_that_does_not_fit_is_refused_and_the_tensor_named(
    own_adapter: Path, load: Callable[..., LoadedModel], change: Any, words: str
) -> None:
    change_weights(own_adapter, change)
    with pytest.raises(AdapterMismatch, match=words) as refusal:
        load(own_adapter)
    assert refusal.value.details["model"] == "tiny"


def test_more_modules_in_the_configuration_than_in_the_weights_are_refused(
    own_adapter: Path, load: Callable[..., LoadedModel]
) -> None:
    """mlx-lm would leave random factors there: nobody could load the same model again."""
    edit_config(own_adapter, keys=["self_attn.k_proj", "mlp.up_proj", "mlp.down_proj"])
    with pytest.raises(AdapterMismatch, match=r"mlp\.down_proj"):
        load(own_adapter)


@pytest.mark.parametrize("changes", [{"keys": ["mlp.no_such"]}, {"rank": 5}, {"num_layers": 1}])
def test_a_configuration_of_another_adapter_is_refused(
    own_adapter: Path, load: Callable[..., LoadedModel], changes: dict[str, Any]
) -> None:
    edit_config(own_adapter, **changes)
    with pytest.raises(AdapterMismatch):
        load(own_adapter)


def test_an_adapter_that_changes_while_it_is_loaded_is_refused_threat_53(
    own_adapter: Path, load: Callable[..., LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    probe = models._probe_layout

    def change_meanwhile(network: Any, *given: Any) -> Any:
        path = own_adapter / "adapters.safetensors"
        path.write_bytes(path.read_bytes() + b" ")
        return probe(network, *given)

    monkeypatch.setattr(models, "_probe_layout", change_meanwhile)
    with pytest.raises(ModelFilesChanging, match=str(own_adapter)):
        load(own_adapter)


def test_an_adapter_that_is_a_file_is_refused_as_that(tmp_path: Path) -> None:
    (tmp_path / "README.md").touch()
    with pytest.raises(AdapterUnavailable, match=r"README.md' is a file, and the adapter of model 'tiny' is a folder"):
        folder_of(AdapterChoice(str(tmp_path / "README.md")), "tiny")
