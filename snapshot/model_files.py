"""The identity of a loaded model, found out from its files and from what loading gave."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from blake3 import blake3

from ..memvid.identity import Identity
from .digests import DigestCache
from .errors import ModelFilesMissing
from .identity import STATE_LAYOUT

# What mlx-lm loads, and nothing else: an adapter or a second form of the weights may lie in the same folder. The
# index of sharded weights is not read by it.
WEIGHT_PATTERN = "model*.safetensors"
# Everything that the tokenizers of transformers read, whatever their kind calls it.
TOKENIZER_PATTERNS = (
    "*.bpe",
    "*.codes",
    "*.model",
    "*.spm",
    "*.tiktoken",
    "added_tokens*.json",
    "dict*.txt",
    "encoder*.json",
    "merges*",
    "special_tokens*.json",
    "tekken*.json",
    "tokenizer*.json",
    "vocab*",
)
# How a quantised checkpoint of another make is to be read; mlx-lm takes it for a section of config.json.
QUANTISATION_FILE = "hf_quant_config.json"
NO_ADAPTER = "none"
NO_ROPE = "none"
# Keys of a configuration that decide how positions become keys. Lengths count: scaled bases are derived from them.
_ROPE_WORDS = ("rope", "rotary", "yarn")
_LENGTH_KEYS = ("max_position_embeddings", "original_max_position_embeddings")
# A longer value is kept as its digest: some models list a factor for each frequency, or lay every layer out otherwise.
_MAX_PLAIN_CHARS = 2048


def identify(
    folder: Path,
    *,
    chat_template: object,
    compute_dtype: str,
    kv_format: str,
    cache_layout: str,
    adapter: str = NO_ADAPTER,
    digests: DigestCache,
) -> Identity:
    """The identity of the model in `folder` as it is loaded.

    Raises:
        ModelFilesMissing: the folder has no weights, no config or no tokenizer.
        ModelFilesChanging: a file is being written to.
    """
    weights = sorted(folder.glob(WEIGHT_PATTERN))
    tokenizer = sorted({file for pattern in TOKENIZER_PATTERNS for file in folder.glob(pattern) if file.is_file()})
    config = folder / "config.json"
    for what, found in (("weights", weights), ("tokenizer files", tokenizer), ("config.json", config.is_file())):
        if not found:
            raise ModelFilesMissing(f"{folder} has no {what}; give the folder of an MLX model.", path=str(folder))
    settings = load_object(config)
    parts = {
        "weights": _digest_of_files(weights, digests),
        "config": _digest_of_config(settings, folder),
        "rope": rope_of(settings),
        "tokenizer": _digest_of_tokenizer(tokenizer, digests),
        "template": digest_of(chat_template),
        "adapter": adapter,
        "compute_dtype": compute_dtype,
        "kv_format": kv_format,
        "cache_layout": _plain_or_digest(cache_layout),
        "state_layout": STATE_LAYOUT,
    }
    return Identity(tuple(sorted(parts.items())))


def rope_of(settings: Mapping[str, Any]) -> str:
    """The settings of the rotary embedding, of the model and of its sections, as canonical JSON, or as a digest of it
    where that is long. They stay in the digest of the whole configuration too: what is not known here to be about
    positions must not fall out of the identity, and so a refusal can name them and show both values.
    """
    found = {name: value for name, value in _settings_in(settings) if _is_of_rope(name.rpartition(".")[2])}
    return _plain_or_digest(canonical(found).decode()) if found else NO_ROPE


def load_object(file: Path) -> dict[str, Any]:
    """The JSON object that a file holds.

    Raises:
        ModelFilesMissing: it holds something else.
    """
    try:
        loaded = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ModelFilesMissing(f"{file} is not JSON: {error}.", path=str(file)) from error
    if not isinstance(loaded, Mapping):
        raise ModelFilesMissing(f"{file} does not hold a JSON object.", path=str(file))
    return dict(loaded)


def canonical(value: object) -> bytes:
    """One text for one value: sorted keys, no white space, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, default=str).encode()


def digest_of(value: object) -> str:
    """BLAKE3-256 of the canonical text, as hex."""
    return blake3(canonical(value)).hexdigest()


def _plain_or_digest(text: str) -> str:
    return text if len(text) <= _MAX_PLAIN_CHARS else blake3(text.encode()).hexdigest()


def _settings_in(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        yield name, value
        if name.endswith("_config") and isinstance(value, Mapping):
            yield from ((f"{name}.{key}", of_section) for key, of_section in value.items())


def _is_of_rope(key: str) -> bool:
    return key in _LENGTH_KEYS or any(word in key for word in _ROPE_WORDS)


def _digest_of_files(files: Iterable[Path], digests: DigestCache) -> str:
    return digest_of([[file.name, digests.digest(file)] for file in files])


def _digest_of_config(settings: Mapping[str, Any], folder: Path) -> str:
    quantisation = folder / QUANTISATION_FILE
    return digest_of([settings, load_object(quantisation)] if quantisation.is_file() else settings)


def _digest_of_tokenizer(files: Iterable[Path], digests: DigestCache) -> str:
    # The chat template is a part of its own, wherever it is kept.
    listed = []
    for file in files:
        if file.name == "tokenizer_config.json":
            settings = load_object(file)
            settings.pop("chat_template", None)
            listed.append([file.name, digest_of(settings)])
        else:
            listed.append([file.name, digests.digest(file)])
    return digest_of(listed)
