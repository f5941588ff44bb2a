"""The training script of the demo model, in small, and the model folder that it left in the package."""

from __future__ import annotations

import dataclasses
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


def test_the_split_follows_from_the_module_name_and_the_seed_alone() -> None:
    one, other = data.SourceFile("a.b", "a/b.py", "x = 1\n"), data.SourceFile("a.b", "elsewhere/b.py", "y = 2\n")
    assert all(data.is_held_out(one, seed) == data.is_held_out(other, seed) for seed in range(50))
    assert len({data.is_held_out(one, seed) for seed in range(200)}) == 2


@pytest.mark.one_in(6)
def test_conversations_come_from_training_files_only(corpus: Any) -> None:
    names = {name for file in corpus.held_out for name, _ in data.docstring_pairs(file)}
    assert names
    trained = {name for file in corpus.training for name, _ in data.docstring_pairs(file)}
    assert names.isdisjoint(trained)


def test_equal_files_are_read_once_and_test_suites_not_at_all(tmp_path: Path) -> None:
    (tmp_path / "test").mkdir()
    for name, text in (("a.py", "x = 1\n"), ("b.py", "x = 1\n"), ("c.py", "y = 1\n"), ("test/d.py", "z = 1\n")):
        (tmp_path / name).write_text(text)
    assert [file.module for file in data.read_files(tmp_path)] == ["a", "c"]


def test_a_near_copy_of_a_training_file_is_not_held_out() -> None:
    lines = [f"the line with the number {number} and some words" for number in range(10)]
    original = data.SourceFile("a", "a.py", "\n".join(lines))
    copy = data.SourceFile("b", "b.py", "\n".join([*lines[:6], "another line of at least thirty characters"]))
    fresh = data.SourceFile("c", "c.py", "nothing that the training files hold, in one line")
    assert data.without_doubles([copy, fresh], [original]) == ([fresh], [copy])


def test_a_docstring_becomes_a_conversation_in_the_chat_template() -> None:
    file = data.SourceFile("mod", "mod.py", 'def double(x, times=2):\n    """Give x so many times over."""\n')
    (text,) = data.render_conversations(data.docstring_pairs(file), seed=0)
    assert "mod.double" in text
    assert text.endswith("`mod.double(x, times=2)`\n\nGive x so many times over.<|im_end|>\n")


def test_prepared_data_is_used_again_but_not_for_another_seed(tmp_path: Path) -> None:
    (tmp_path / "library").mkdir()
    for index in range(30):
        (tmp_path / "library" / f"module{index}.py").write_text(f"def f{index}(x):\n    return x + {index}\n")
    first = data.prepare(tmp_path / "data", 3, 300, library=tmp_path / "library")
    assert data.prepare(tmp_path / "data", 3, 300) == first
    assert data.load_documents(tmp_path / "data").tokens == first["training_tokens"]
    assert len(data.load_held_out(tmp_path / "data")) == first["held_out_files"]
    with pytest.raises(ValueError, match="another seed"):
        data.prepare(tmp_path / "data", 4, 300)


# The steps


def test_a_batch_is_a_function_of_its_step() -> None:
    first, again = documents(), documents()
    for step in range(12):
        batch = train.batch_at(TINY, first, step)
        assert batch.shape == tuple(np.add(train.batch_shape(TINY, step), (0, 1)))
        assert np.array_equal(batch, train.batch_at(TINY, again, step))


def test_an_epoch_reads_every_sequence_once() -> None:
    recipe = dataclasses.replace(TINY, decay=0.0, steps=1000)
    found = documents()
    per_epoch = found.tokens // (recipe.rows * recipe.length)
    rows = np.concatenate([train.batch_at(recipe, found, step) for step in range(per_epoch)])
    assert len(np.unique(rows, axis=0)) == len(rows)


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


def test_a_run_may_be_given_more_steps_before_its_rate_falls(tmp_path: Path) -> None:
    longer = dataclasses.replace(TINY, steps=12)
    straight = train.Trainer(longer)
    losses = run(straight, 5)
    first = train.Trainer(TINY)
    begun = run(first, 2)
    first.save(tmp_path, {})
    second = train.Trainer(longer)
    second.restore(tmp_path)
    assert begun + run(second, 3) == losses


def test_a_checkpoint_of_other_settings_is_refused(tmp_path: Path) -> None:
    trainer = train.Trainer(TINY)
    run(trainer, 5)
    trainer.save(tmp_path, {})
    for changes in ({"seed": 1}, {"steps": 12}):
        with pytest.raises(ValueError, match=next(iter(changes))):
            train.Trainer(dataclasses.replace(TINY, **changes)).restore(tmp_path)


def test_a_half_written_checkpoint_is_not_taken_up(tmp_path: Path) -> None:
    trainer = train.Trainer(TINY)
    run(trainer, 1)
    trainer.save(tmp_path, {})
    (tmp_path / "checkpoint-0000009.partial").mkdir()
    assert [path.name for path in train.checkpoints(tmp_path)] == ["checkpoint-0000001"]


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
