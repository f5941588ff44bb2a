"""The training script of the demo model, in small, and the model folder that it left in the package."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torpor.snapshot  # noqa: F401  # chooses the BLAS before MLX is imported

import mlx.core as mx  # isort: skip
from mlx.utils import tree_flatten, tree_map

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ROOT / "daemon" / "demo_model"

sys.path.insert(0, str(ROOT / "bench"))
try:
    from demo_model import data, evaluate, export, quick, train
finally:
    sys.path.remove(str(ROOT / "bench"))

TINY = train.Recipe(
    vocab_size=300,
    hidden_size=32,
    layers=2,
    intermediate_size=48,
    heads=4,
    kv_heads=2,
    head_dim=16,
    context=256,
    steps=6,
    horizon=0,
    cooldown=0,
    warmup=1,
    decay=0.5,
    rows=4,
    length=24,
    long_lengths=((2, 48),),
)


@pytest.fixture(autouse=True)
def interpreted() -> Iterator[None]:
    """Nothing is compiled: kernels for these shapes would take longer to build than to run."""
    mx.disable_compile()
    yield
    mx.enable_compile()


@pytest.fixture(scope="module")
def corpus() -> Any:
    return data.collect(seed=train.Recipe.seed)


@pytest.fixture(scope="module")
def shipped() -> Any:
    from mlx_lm import load

    model, tokenizer = load(str(SHIPPED))[:2]
    model.set_dtype(mx.float32)
    return model, tokenizer


@pytest.fixture
def told() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((SHIPPED / "training.json").read_text(encoding="utf-8"))
    return found


def documents(count: int = 40) -> Any:
    """Documents of random tokens, of unequal lengths."""
    random = np.random.default_rng(0)
    parts = [random.integers(0, TINY.vocab_size, random.integers(20, 120)).astype(np.uint16) for _ in range(count)]
    return train.Documents(np.concatenate(parts), np.cumsum([len(part) for part in parts]))


def parameters(trainer: Any) -> dict[str, Any]:
    return {name: np.array(value) for name, value in tree_flatten(trainer.model.parameters())}


def run(trainer: Any, steps: int) -> list[float]:
    found = documents()
    return [trainer.step(train.batch_at(trainer.recipe, found, trainer.done))[0] for _ in range(steps)]


# The data


@pytest.mark.one_in(3)
def test_no_file_is_on_both_sides_of_the_split(corpus: Any) -> None:
    training, held_out = ({file.path for file in side} for side in (corpus.training, corpus.held_out))
    assert training.isdisjoint(held_out)
    texts = {file.text for file in corpus.training}
    assert not any(file.text in texts for file in corpus.held_out)
    assert len(held_out) >= 0.05 * (len(training) + len(held_out))


@pytest.mark.one_in(6)
def test_conversations_come_from_training_files_only(corpus: Any) -> None:
    names = {name for file in corpus.held_out for name, _ in data.docstring_pairs(file)}
    assert names
    trained = {name for file in corpus.training for name, _ in data.docstring_pairs(file)}
    assert names.isdisjoint(trained)


# The steps


def test_a_batch_is_a_function_of_its_step() -> None:
    first, again = documents(), documents()
    for step in range(12):
        batch = train.batch_at(TINY, first, step)
        assert batch.shape == tuple(np.add(train.batch_shape(TINY, step), (0, 1)))
        assert np.array_equal(batch, train.batch_at(TINY, again, step))


def test_a_resumed_run_ends_with_the_same_parameters(tmp_path: Path) -> None:
    straight = train.Trainer(TINY)
    losses = run(straight, 6)
    first = train.Trainer(TINY)
    begun = run(first, 4)
    first.save(tmp_path, {"note": "kept"})
    second = train.Trainer(TINY)
    assert second.restore(tmp_path) == {"note": "kept"}
    assert begun + run(second, 2) == losses
    ours, theirs = parameters(second), parameters(straight)
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)


def test_the_quick_arithmetic_gives_the_loss_and_gradients_of_mlx_lm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quick, "QUERY_BLOCK", 16)
    trainer = train.Trainer(TINY)
    trainer.model.update(tree_map(lambda p: p + 0.1 * mx.random.normal(p.shape), trainer.model.parameters()))
    batch = mx.array(train.batch_at(TINY, documents(), 0))
    results = []
    for on_cpu in (True, False):
        trainer.on_cpu = on_cpu
        with quick.installed(on_cpu):
            results.append(train.nn.value_and_grad(trainer.model, trainer._loss)(batch))
    (loss, gradients), (reference, expected) = results
    assert abs(loss.item() - reference.item()) < 1e-4
    for (name, ours), (_, theirs) in zip(tree_flatten(gradients), tree_flatten(expected), strict=True):
        error = float(mx.linalg.norm((ours - theirs).reshape(-1)) / mx.linalg.norm(theirs.reshape(-1)))
        assert error < 1e-3, name


# The model that ships


def test_the_shipped_weights_are_small_enough() -> None:
    assert (SHIPPED / "model.safetensors").stat().st_size <= 12_000_000


def test_the_shipped_model_has_a_long_context_and_end_tokens(shipped: Any) -> None:
    model, tokenizer = shipped
    config = json.loads((SHIPPED / "config.json").read_text(encoding="utf-8"))
    assert config["max_position_embeddings"] >= 8192
    assert tokenizer.model_max_length >= 8192
    ends = {tokenizer.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|endoftext|>")}
    assert tokenizer.eos_token == "<|im_end|>"
    assert set(tokenizer.eos_token_ids) == ends
    assert model(mx.array([[5, 6, 7]])).shape == (1, 3, config["vocab_size"])


def test_the_shipped_template_renders_what_was_trained_on(shipped: Any) -> None:
    _, tokenizer = shipped
    messages = [{"role": "user", "content": "What does os.path.join do?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    assert tokenizer.decode(prompt) == data.render_chat(messages) + "<|im_start|>assistant\n"


def test_the_shipped_tokenizer_gives_back_any_text(shipped: Any) -> None:
    _, tokenizer = shipped
    text = "def f(x):\n\treturn  x + 1234567  # é, 日本, \U0001f600\n\n\n    end  "
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_card_says_what_training_json_says(told: dict[str, Any]) -> None:
    assert (SHIPPED / "README.md").read_text(encoding="utf-8") == export.card(told)
    assert told["weights_bytes"] == (SHIPPED / "model.safetensors").stat().st_size


def test_the_model_beats_gzip_by_its_figures(told: dict[str, Any]) -> None:
    model, base = told["figures"]["model"]["bits_per_byte"], told["figures"]["baselines"]
    assert model < min(base["gzip_joined"], base["gzip_per_file"])
    assert base["gzip_joined"] < base["unigram_tokens"] < base["unigram_bytes"]


@pytest.mark.one_in(3)
def test_the_model_beats_gzip_on_held_out_files(shipped: Any, corpus: Any) -> None:
    model, _ = shipped
    tokenizer = data.Tokenizer.from_file(str(SHIPPED / "tokenizer.json"))
    files = sorted((file for file in corpus.held_out if len(file.text) > 2000), key=lambda file: len(file.text))[:3]
    found = evaluate.model_bits(model, tokenizer, files, window=512)["bits_per_byte"]
    contents = [file.text.encode() for file in files]
    compressed = 8 * sum(len(gzip.compress(content, 9)) for content in contents) / sum(map(len, contents))
    assert found < compressed
