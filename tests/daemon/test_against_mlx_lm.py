"""The numbers and the text are those of mlx-lm's own generation, which shares nothing with our daemon but the files.

All other tests compare Torpor with Torpor: what is wrong in the same way on both sides shows here alone. The oracle
loads the model by itself, into caches of its own, and reads in calls of the same sizes, because the last bits depend
on them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from torpor.daemon.models.models import DEMO_MODEL_FOLDER
from torpor.tests.daemon.session_rig import Rigged, all_begun, tokens_of, writing

import mlx.core as mx  # isort: skip  # after torpor, which chooses the BLAS
import mlx_lm  # isort: skip
from mlx_lm.generate import generate_step  # isort: skip
from mlx_lm.models.cache import QuantizedKVCache, make_prompt_cache  # isort: skip

ON_CPU = mx.default_device() == mx.Device(mx.cpu)
# Of one prompt a call reads at most so many tokens, the last one is read alone; and where a cache cannot go back, so is
# the last one before a position at which its whole state is kept.
CHUNK, KEPT_AT = 64 if ON_CPU else 2048, 512
# Each with caches that no other one has: rows, latent rows, rows in 8 bits, rows that are concatenated, windows, layers
# that share them, chunks, recurrences, these beside rows and both within a list, pooled rows.
KINDS = (
    "qwen3",
    "deepseek_v3",
    "quantised",
    "afm7",
    "gemma3_text",
    "gemma3n",
    "llama4",
    "mamba2",
    "lfm2",
    "falcon_h1",
    "qwen3_next",
    "deepseek_v41",
)
BATCHED = ("qwen3", "gemma3_text", "lfm2", "deepseek_v3", "falcon_h1")
# Log-probabilities of float32 models, where rows of a batch are added up in another order than alone.
TOLERANCE = 1e-3


class Oracle:
    """A model as mlx-lm loads and runs it. read: the logits, float32, that each drawn token came from, and those
    behind the last one."""

    def __init__(self, folder: Path, *, bits: int | None = None) -> None:
        self.network, self.tokenizer = mlx_lm.load(str(folder))[:2]
        if ON_CPU:
            self.network.set_dtype(mx.float32)  # as the daemon computes there
        made = make_prompt_cache(self.network)
        self.caches = made if bits is None else [QuantizedKVCache(group_size=32, bits=bits) for _ in made]

    def generate(self, prompt: Sequence[int], count: int) -> tuple[list[int], list[np.ndarray]]:
        """Read the prompt, and write so many tokens greedily."""
        seen: list[mx.array] = []

        def look(_tokens: Any, logits: mx.array) -> mx.array:
            seen.append(logits)
            return logits

        steps = generate_step(
            mx.array(list(prompt)),
            self.network,
            max_tokens=count,
            prompt_cache=self.caches,
            prefill_step_size=CHUNK,
            logits_processors=[look],
        )
        tokens = [token for token, _ in steps]
        return tokens, [np.asarray(logits[0].astype(mx.float32)) for logits in seen]


def digests(logits: Sequence[np.ndarray]) -> tuple[str, ...]:
    return tuple(blake3(each.tobytes()).hexdigest() for each in logits)


def log_probabilities(logits: np.ndarray) -> np.ndarray:
    return logits - np.logaddexp.reduce(logits)


@pytest.fixture
def folder_of(models_of_kinds: Callable[[str], Path], quantisable_model: Path) -> Callable[[str], Path]:
    return lambda kind: quantisable_model if kind == "quantised" else models_of_kinds(kind)


@pytest.mark.one_in(12)
@pytest.mark.parametrize("kind", KINDS)
async def test_tokens_and_logits_are_to_the_bit_those_of_mlx_lm_s_own_generation_t11(
    open_kind: Any, folder_of: Callable[[str], Path], kind: str
) -> None:
    """Past windows, past chunks on a CPU, past a position at which whole state is kept, and past a sleep."""
    first, second = tokens_of(1, 300), tokens_of(2, 257)
    oracle = Oracle(folder_of(kind), bits=8 if kind == "quantised" else None)
    async with open_kind(kind) as rig:
        await rig.read("a", first)
        expected, logits = oracle.generate(first, 12)
        assert len(set(expected)) > 1, "a model that repeats one token would prove little"
        assert await rig.write("a", 12) == (tuple(expected), digests(logits[:-1]), digests(logits[-1:])[0])
        await rig.sleep_and_wake("a")
        await rig.service.append("a", tokens=second)
        if not rig.model.layout.by_token:
            before = KEPT_AT - len(first) - 12
            oracle.generate(second[:before], 0)
            second = second[before:]
        expected, logits = oracle.generate(second, 30)
        assert await rig.write("a", 30) == (tuple(expected), digests(logits[:-1]), digests(logits[-1:])[0])


@pytest.mark.one_in(5)
@pytest.mark.parametrize("kind", BATCHED)
async def test_each_row_of_a_batch_is_what_mlx_lm_computes_of_it_alone_qx1(
    open_kind: Any, folder_of: Callable[[str], Path], kind: str
) -> None:
    prompts = {name: tokens_of(at, 300 + 17 * at) for at, name in enumerate("abcd")}
    async with open_kind(kind, batch=4) as rig:
        for name, prompt in prompts.items():
            await rig.read(name, prompt)
        rig.network.reset()
        tasks = await all_begun(rig, [writing(rig, name, 40) for name in prompts])
        await asyncio.gather(*tasks)
        assert rig.network.rows.count(4) >= 38
        for name, prompt in prompts.items():
            assert_greedy(rig, name, Oracle(folder_of(kind)), prompt)


def assert_greedy(rig: Rigged, name: str, oracle: Oracle, prompt: list[int]) -> None:
    """The oracle, which is told each token that was written, finds none more probable, and ends at the same logits."""
    state = rig.live(name).state
    assert list(state.tokens[: len(prompt)]) == prompt
    assert state.last_logits is not None
    _, (logits,) = oracle.generate(prompt, 0)
    for token in state.tokens[len(prompt) :]:
        found = log_probabilities(logits)
        assert found[token] >= found.max() - TOLERANCE
        _, (logits,) = oracle.generate([token], 0)
    mine = log_probabilities(np.asarray(state.last_logits))
    np.testing.assert_allclose(mine, log_probabilities(logits), atol=TOLERANCE, rtol=0)


@pytest.mark.one_in(2)
async def test_a_text_is_read_and_written_as_mlx_lm_does(open_rig: Any) -> None:
    oracle, text = Oracle(DEMO_MODEL_FOLDER), 'def read_lines(path):\n    """Zeilen, ohne Umbrüche: 行 🙂"""\n'
    async with open_rig(DEMO_MODEL_FOLDER, endless=False) as rig:
        await rig.service.create("a")
        result = await rig.service.generate("a", text=text, max_tokens=60)
        assert list(rig.live("a").state.tokens[: -len(result.tokens)]) == oracle.tokenizer.encode(text)
        assert result.text == mlx_lm.generate(
            oracle.network, oracle.tokenizer, text, max_tokens=60, prefill_step_size=CHUNK
        )


@pytest.mark.one_in(5)
async def test_each_turn_of_a_chat_stands_in_the_ledger_as_mlx_lm_renders_the_whole_of_it(open_rig: Any) -> None:
    oracle = Oracle(DEMO_MODEL_FOLDER)
    messages = [{"role": "system", "content": "You answer questions about Python."}]
    async with open_rig(DEMO_MODEL_FOLDER, endless=False) as rig:
        await rig.service.create("a", system=messages[0]["content"])
        for question in ("What does os.path.join do?", "And what does os.path.split do?"):
            messages.append({"role": "user", "content": question})
            prompt = oracle.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
            result = await rig.service.chat("a", message=question, max_tokens=80)
            assert list(rig.live("a").state.tokens[: -len(result.tokens)]) == prompt
            assert result.text == mlx_lm.generate(
                oracle.network, oracle.tokenizer, prompt, max_tokens=80, prefill_step_size=CHUNK
            )
            messages.append({"role": "assistant", "content": result.text})
