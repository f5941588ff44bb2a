"""The identity of a loaded model: all that decides what a KV value means, part by part.

Each part is named, so that a refusal can say which one differs. Meaning: weights, config, tokenizer, template,
adapter. Representation: compute_dtype, cache_layout.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from blake3 import blake3

from ..memvid.identity import Identity
from .digests import DigestCache
from .errors import IdentityMismatch, ModelFilesMissing

WEIGHT_PATTERN = "*.safetensors"
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
NO_ADAPTER = "none"

_REMEDIES = {
    "weights": "point the model at the weights it was slept with",
    "config": "restore the model's config.json",
    "tokenizer": "restore the model's tokenizer files",
    "template": "restore the model's chat template",
    "adapter": "load the model with the adapter it was slept with",
    "compute_dtype": "run the daemon on a device that computes in the stored type",
    "cache_layout": "use a version of mlx-lm that lays the cache out in the stored way",
}


def identify(
    folder: Path,
    *,
    chat_template: object,
    compute_dtype: str,
    cache_layout: str,
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
    parts = {
        "weights": _digest_of_files(weights, digests),
        "config": _digest_of_json(config),
        "tokenizer": _digest_of_tokenizer(tokenizer, digests),
        "template": _hex(_canonical(chat_template)),
        "adapter": NO_ADAPTER,
        "compute_dtype": compute_dtype,
        "cache_layout": cache_layout,
    }
    return Identity(tuple(sorted(parts.items())))


def require_same(stored: Identity, live: Identity, *, model: str) -> None:
    """Refuse a snapshot of another identity than the resident model's.

    Raises:
        IdentityMismatch: `mismatched_fields` lists every part that differs, with both values.
    """
    if stored.digest == live.digest:
        return
    differing = stored.mismatched_fields(live)
    names = [str(part["field"]) for part in differing]
    remedies = "; ".join(_REMEDIES[name] for name in names if name in _REMEDIES)
    raise IdentityMismatch(
        f"The snapshot was made with another {' and '.join(names)} than model {model!r} has now. "
        f"To wake it, {remedies or 'use the model it was made with'}.",
        mismatched_fields=differing,
        model=model,
    )


def _digest_of_files(files: Iterable[Path], digests: DigestCache) -> str:
    return _hex(_canonical([[file.name, digests.digest(file)] for file in files]))


def _digest_of_tokenizer(files: Iterable[Path], digests: DigestCache) -> str:
    # The chat template is a part of its own, wherever it is kept.
    listed = []
    for file in files:
        if file.name == "tokenizer_config.json":
            settings = _load_json(file)
            settings.pop("chat_template", None)
            listed.append([file.name, _hex(_canonical(settings))])
        else:
            listed.append([file.name, digests.digest(file)])
    return _hex(_canonical(listed))


def _digest_of_json(file: Path) -> str:
    return _hex(_canonical(_load_json(file)))


def _load_json(file: Path) -> dict[str, Any]:
    try:
        loaded = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ModelFilesMissing(f"{file} is not JSON: {error}.", path=str(file)) from error
    if not isinstance(loaded, Mapping):
        raise ModelFilesMissing(f"{file} does not hold a JSON object.", path=str(file))
    return dict(loaded)


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, default=str).encode()


def _hex(data: bytes) -> str:
    return blake3(data).hexdigest()
