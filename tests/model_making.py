"""Model folders with random weights, of real architectures, and a tokenizer of bytes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TINY_CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "vocab_size": 259,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}


def write_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer: one token a byte, and the special ones."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_model(folder: Path, *, seed: int = 0, **changes: object) -> Path:
    """A model folder with random weights, which mlx-lm loads like any other."""
    import torpor.snapshot  # noqa: F401  # chooses the BLAS before MLX is imported

    import mlx.core as mx  # isort: skip
    from mlx.utils import tree_flatten
    from mlx_lm.models import qwen3

    folder.mkdir(parents=True)
    config = {**TINY_CONFIG, "eos_token_id": 258, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)
    mx.random.seed(seed)
    network = qwen3.Model(qwen3.ModelArgs.from_dict(config))
    weights = {name: value * 4 if "norm" not in name else value for name, value in tree_flatten(network.parameters())}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    return folder


def write_model_like(folder: Path, name: str) -> Path:
    """A model folder of another architecture of the matrix of cache kinds, with random weights and our tokenizer."""
    import torpor.snapshot  # noqa: F401  # chooses the BLAS before MLX is imported

    import mlx.core as mx  # isort: skip
    from mlx.utils import tree_flatten
    from torpor.tests.snapshot.matrix.architectures import cases

    case = next(case for case in cases() if case.name == name)
    config = {**case.config, "vocab_size": 259, "eos_token_id": 258, "max_position_embeddings": 2048}
    folder.mkdir(parents=True)
    told = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(told))
    write_tokenizer(folder)
    weights = dict(tree_flatten(replace(case, config=config).build("float32").parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    return folder
