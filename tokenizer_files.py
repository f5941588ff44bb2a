"""Which files of a model's folder are its tokenizer, and the digest of them: the part `tokenizer` of its identity.

Known to what loads models, and to what tells a text where none is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from blake3 import blake3

# All files that the tokenizers of transformers read, by any of their names.
TOKENIZER_PATTERNS: Final = (
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
SETTINGS_FILE: Final = "tokenizer_config.json"


def tokenizer_files_in(folder: Path) -> list[Path]:
    """The files of the tokenizer in a model's folder, by name."""
    return sorted({file for pattern in TOKENIZER_PATTERNS for file in folder.glob(pattern) if file.is_file()})


def digest_of_tokenizer(
    folder: Path, digest: Callable[[Path], str], settings: Callable[[Path], Mapping[str, Any]]
) -> str:
    """The part of the identity. digest: BLAKE3-256 of a file's bytes, as hex. settings: the JSON object in a file.
    Raises as these do."""
    listed = []
    for file in tokenizer_files_in(folder):
        if file.name == SETTINGS_FILE:  # the chat template is a part of its own, in any file
            told = {name: value for name, value in settings(file).items() if name != "chat_template"}
            listed.append([file.name, digest_of(told)])
        else:
            listed.append([file.name, digest(file)])
    return digest_of(listed)


def canonical(value: object) -> bytes:
    """One text for one value: sorted keys, no white space, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, default=str).encode()


def digest_of(value: object) -> str:
    """BLAKE3-256 of the canonical text, as hex."""
    return blake3(canonical(value)).hexdigest()
