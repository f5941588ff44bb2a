"""The models of the hub's cache, and their memory, told before one is loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torpor.daemon import available
from torpor.daemon.engine.generation import PREFILL_CHUNK_TOKENS
from torpor.daemon.models import hub
from torpor.daemon.models.models import foresee, load_model
from torpor.snapshot.digests import DigestCache
from torpor.snapshot.errors import ModelFilesMissing
from torpor.snapshot.model_files import MAX_LAYERS
from torpor.tests.hub_rig import serving
from torpor.tests.model_making import write_model, write_model_like

import mlx.core as mx  # isort: skip  # after torpor, which chooses the BLAS


@pytest.mark.one_in(1)
@pytest.mark.parametrize("kind", ["gemma3_text", "mamba2", "qwen3_next"])
def test_what_a_model_will_take_is_foreseen_without_reading_its_weights(tmp_path: Path, kind: str) -> None:
    folder = write_model_like(tmp_path / "model", kind)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    prospect = foresee(folder)
    assert mx.get_peak_memory() - before < prospect.weights_bytes // 4
    model = load_model("m", str(folder), DigestCache(tmp_path / "digests.json"))
    assert prospect.layout == model.layout
    assert (prospect.weights_bytes, prospect.context_tokens) == (model.weights_bytes, model.context_tokens)
    for count in (1, 100, 2048):
        assert prospect.layout.most_bytes(count, 64) == model.layout.most_bytes(count, 64)


def test_a_model_of_too_many_layers_is_not_built(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "num_hidden_layers": MAX_LAYERS + 1}))
    with pytest.raises(ModelFilesMissing):
        foresee(folder)
    with pytest.raises(ModelFilesMissing):
        load_model("m", str(folder), DigestCache(tmp_path / "digests.json"))


def test_the_cache_s_models_are_told_with_what_fits_and_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = write_model(tmp_path / "whole", max_position_embeddings=40_960)
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text('{"model_type": "bert"}')
    cache = tmp_path / "cache"
    with serving({"owner/whole": whole}) as served:
        served.used_here(monkeypatch, cache)
        assert available.look(None)["models"] == [], "there is no cache"
        folder = hub.fetch("owner/whole", hub.untold)
    for name, content in (("owner--other", other), ("owner--broken", tmp_path / "none")):
        made = cache / f"models--{name}"
        (made / "refs").mkdir(parents=True)
        (made / "refs" / "main").write_text("c" * 40)
        (made / "snapshots" / ("c" * 40)).mkdir(parents=True)
        if content.exists():
            (made / "snapshots" / ("c" * 40) / "config.json").symlink_to(content / "config.json")
    part = cache / "models--owner--part" / "blobs" / f"{'d' * 64}.incomplete"
    part.parent.mkdir(parents=True)
    part.write_bytes(b"half")

    prospect = foresee(folder)
    budget = prospect.weights_bytes + prospect.layout.most_bytes(20_000, PREFILL_CHUNK_TOKENS)
    part_of, whole_of = json.loads(json.dumps(available.look(budget)))["models"]
    assert (part_of["name"], part_of["disk_bytes"], "it is not whole" in part_of["problem"]) == ("owner/part", 4, True)
    assert (whole_of["name"], whole_of["problem"], whole_of["context_tokens"]) == ("owner/whole", None, 40_960)
    assert whole_of["disk_bytes"] == sum(file.stat().st_size for file in folder.iterdir())
    assert whole_of["memory"] == {
        str(count): prospect.weights_bytes + prospect.layout.most_bytes(count, PREFILL_CHUNK_TOKENS)
        for count in (8192, 32768)
    }
    assert 20_000 <= whole_of["fitting_tokens"] < 20_000 + 512, "memory is taken by steps"
    (whole_of,) = [each for each in available.look(None)["models"] if each["problem"] is None]
    assert whole_of["fitting_tokens"] == 40_960
    assert available.look(1)["models"][1]["fitting_tokens"] == 0
