"""The tokenizer of a stored version without its model: found among the model folders of this machine by the digest of
its files, which the version's identity has. So no other tokenizer ever tells a version's text.

Knows neither MLX nor mlx-lm. `tokenizers` comes with them; it is imported where a text is asked for, and where it is
missing there is none.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, islice
from pathlib import Path
from typing import Any, Final

from blake3 import blake3

from ...errors import TorporError
from ...places import user_folder
from ...tokenizer_files import SETTINGS_FILE, digest_of_tokenizer, tokenizer_files_in

TOKENIZER: Final = "tokenizer"
"""The part of an identity."""

_FILE: Final = "tokenizer.json"
_DEMO_FOLDER: Final = Path(__file__).parents[1] / "demo_model"
_DIGESTS: Final = "digests.json"
"""Of the model files that daemons of this user have loaded, by their paths (`snapshot/digests.py`)."""

_MOST_FOLDERS: Final = 256
_MOST_BYTES: Final = 128 << 20
"""Of one tokenizer's files; the largest in use has 40 MB."""

_UNKNOWN: Final = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True, eq=False)
class Words:
    """A tokenizer. controls: the ids of control tokens, with their names. more: names of tokens that are in the
    tokenizer's settings alone."""

    tokenizer: Any
    controls: Mapping[int, str]
    more: Mapping[int, str]
    size: int

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, with control tokens written out. What the tokenizer does not know is U+FFFD."""
        parts = []
        for known, run in groupby(tokens, key=lambda token: token < self.size and token not in self.more):
            ids = list(run)
            more = (self.more.get(token, _UNKNOWN) for token in ids)
            parts.append(str(self.tokenizer.decode(ids, skip_special_tokens=False)) if known else "".join(more))
        return "".join(parts)


def is_control(text: str) -> bool:
    """Whether an added token that no file flags as special is a control token: its text has letters or digits and other
    signs, as `<think>` does, or stands between bars, as Gemma's `<|"|>`. Blanks, words and rows of signs are plain
    text."""
    kinds = {each.isalnum() for each in text if not each.isspace() and each != "\N{LOWER ONE EIGHTH BLOCK}"}
    return len(kinds) == 2 or (text.startswith("<|") and text.endswith("|>"))


def words_for(part: str | None, model: str, folders: Iterable[Path] = ()) -> Words | None:
    """The tokenizer whose part of an identity this is; None if it is not at hand. model: the name that it was served
    under, to look there first. folders: of models, to look at before those that this user has."""
    known = [*folders, _DEMO_FOLDER, *islice(_folders_of_user(), _MOST_FOLDERS)]
    name = model.replace("/", "--")
    for folder in sorted(dict.fromkeys(known), key=lambda each: name not in str(each)):  # stable
        with suppress(OSError, ValueError, RecursionError):
            stamps = tuple(_stamp(file) for file in tokenizer_files_in(folder))
            if _digest(folder, stamps) == part:
                return _load(folder, stamps)
    return None


def why_no_words(model: str) -> str:
    """Why tokens are told without text."""
    try:
        import tokenizers as tokenizers
    except ImportError:
        return "The package `tokenizers` is not installed here, so tokens are told without their text."
    return (
        f"The tokenizer of the model {model!r} is not at hand: no folder of a model that this user has loaded or "
        "downloaded has files of its digest. So tokens are told without their text."
    )


def _folders_of_user() -> Iterator[Path]:
    """Folders of models that daemons of this user have loaded, and those in the hub's cache."""
    with suppress(OSError, ValueError, RecursionError, TorporError):
        told = json.loads((user_folder("cache") / _DIGESTS).read_bytes())
        files = told.get("files") if isinstance(told, dict) else None
        for path in files if isinstance(files, dict) else ():
            if os.path.basename(path) == _FILE:
                yield Path(path).parent
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub"))
    with suppress(OSError, RuntimeError):
        yield from (file.parent for file in cache.expanduser().glob(f"models--*/snapshots/*/{_FILE}"))


def _stamp(file: Path) -> tuple[str, int, int]:
    status = file.stat()
    return file.name, status.st_size, status.st_mtime_ns


@lru_cache(maxsize=_MOST_FOLDERS)
def _digest(folder: Path, stamps: tuple[tuple[str, int, int], ...]) -> str | None:
    """The part of the identity; None for a folder without a tokenizer that can be read here. stamps: of its files."""
    if _FILE not in {name for name, _, _ in stamps} or sum(size for _, size, _ in stamps) > _MOST_BYTES:
        return None
    return digest_of_tokenizer(folder, lambda file: blake3(file.read_bytes()).hexdigest(), _object_in)


@lru_cache(maxsize=4)
def _load(folder: Path, _stamps: tuple[tuple[str, int, int], ...]) -> Words | None:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return None
    try:
        tokenizer = Tokenizer.from_file(str(folder / _FILE))
    except Exception:  # noqa: BLE001 - the library raises no other kind
        return None
    added = tokenizer.get_added_tokens_decoder()
    controls = {token: each.content for token, each in added.items() if each.special or is_control(each.content)}
    settings = _object_in(folder / SETTINGS_FILE) if (folder / SETTINGS_FILE).is_file() else {}
    told = settings.get("added_tokens_decoder")
    size = max(tokenizer.get_vocab_size(with_added_tokens=False), *(token + 1 for token in added), 0)
    more = {
        int(token): str(each["content"])
        for token, each in (told if isinstance(told, dict) else {}).items()
        if tokenizer.id_to_token(int(token)) is None
    }
    return Words(tokenizer, controls | more, more, size)


def _object_in(file: Path) -> Mapping[str, Any]:
    loaded = json.loads(file.read_bytes())
    if not isinstance(loaded, dict):
        raise ValueError(f"{file} does not hold a JSON object")  # noqa: TRY004 - as what is no JSON
    return loaded
