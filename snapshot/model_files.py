"""The identity of a loaded model, from its files and from the result of loading."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from blake3 import blake3

from ..memvid.format.identity import Identity
from ..tokenizer_files import SETTINGS_FILE, canonical, digest_of, digest_of_tokenizer, tokenizer_files_in
from .digests import DigestCache
from .errors import ModelFilesMissing
from .identity import STATE_LAYOUT
from .tensor_list import NotWhole, tensor_names

# All that mlx-lm loads: an adapter or a second form of the weights may lie in the same folder. It does not read the
# index of sharded weights.
WEIGHT_PATTERN = "model*.safetensors"
# the chat template's file, unless the tokenizer's settings have it
TEMPLATE_PATTERN = "chat_template*"
# The settings of a quantized checkpoint of another make; mlx-lm takes it for a section of config.json.
QUANTIZATION_FILE = "hf_quant_config.json"
CONFIG_FILE = "config.json"
SHARDS_FILE = "model.safetensors.index.json"
A_MODEL_FOLDER = (
    f"A model folder has {CONFIG_FILE}, weights ({WEIGHT_PATTERN}) and tokenizer files (tokenizer.json, or what its "
    "kind has instead), in the form that mlx-lm reads; `mlx_lm.convert` makes one of a model in another form."
)
# The tokenizer's files with settings only.
_WITHOUT_WORDS = ("added_tokens*.json", "special_tokens*.json", SETTINGS_FILE)
NO_ADAPTER = "none"
NO_ROPE = "none"
# Keys of a configuration that decide how positions become keys. Lengths count: scaled bases are derived from them.
_ROPE_WORDS = ("rope", "rotary", "yarn")
_LENGTH_KEYS = ("max_position_embeddings", "original_max_position_embeddings")
# A longer value is kept as its digest: some models list a factor for each frequency, or each layer's layout.
_MAX_PLAIN_CHARS = 2048
# for a file's name that another file tells
_MAX_NAME_CHARS = 100
# the deepest models have some hundreds
MAX_LAYERS = 4096
# of a file of settings: the longest, the list of shards of a model of 671 billion parameters, has 9 MB
MAX_SETTINGS_BYTES = 32 << 20


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
    weights, _ = files_of(folder)
    settings = load_object(folder / CONFIG_FILE)
    parts = {
        "weights": _digest_of_files(weights, digests),
        "config": _digest_of_config(settings, folder),
        "rope": rope_of(settings),
        "tokenizer": digest_of_tokenizer(folder, digests.digest, load_object),
        "template": digest_of(chat_template),
        "adapter": adapter,
        "compute_dtype": compute_dtype,
        "kv_format": kv_format,
        "cache_layout": _plain_or_digest(cache_layout),
        "state_layout": STATE_LAYOUT,
    }
    return Identity(tuple(sorted(parts.items())))


def parts_of_files(folder: Path, digests: DigestCache) -> dict[str, str]:
    """The parts of a model's identity that its files decide, with nothing loaded, to compare with earlier ones. The
    template here is the one in the files.

    Raises:
        ModelFilesMissing, ModelFilesChanging: as `identify`.
        OSError: a file cannot be read.
    """
    weights, _ = files_of(folder)
    settings = folder / SETTINGS_FILE
    template = load_object(settings).get("chat_template") if settings.is_file() else None
    template_files = [file for file in sorted(folder.glob(TEMPLATE_PATTERN)) if file.is_file()]
    return {
        "weights": _digest_of_files(weights, digests),
        "config": _digest_of_config(load_object(folder / CONFIG_FILE), folder),
        "tokenizer": digest_of_tokenizer(folder, digests.digest, load_object),
        "template": digest_of([template, _digest_of_files(template_files, digests)]),
    }


def require_model_files(folder: Path) -> None:
    """Check before loading that a folder has all files of a model. Reads no weights. Raises ModelFilesMissing: it lacks
    weights, a config or a tokenizer, some weights are missing, or the config is of something else."""
    weights, _ = files_of(folder)
    config = folder / CONFIG_FILE
    try:
        is_of_model = "model_type" in load_object(config)
        for file in weights:
            tensor_names(file)
    except NotWhole as error:
        raise ModelFilesMissing(f"{file} {error}. Copy or download it anew.", path=str(file)) from error
    except OSError as error:
        raise ModelFilesMissing(
            f"{error.filename or folder} cannot be read: {error.strerror or error}.", path=str(error.filename or folder)
        ) from error
    if not is_of_model:
        raise ModelFilesMissing(
            f"{config} names no model_type, so it is of no model. {A_MODEL_FOLDER}", path=str(config)
        )


def require_few_layers(folder: Path) -> None:
    """Raises ModelFilesMissing: a config tells of more layers than MAX_LAYERS. A model is built of as many before its
    weights are looked at, and so would take all memory."""
    config = folder / CONFIG_FILE
    for name, value in _settings_in(load_object(config)):
        if name.endswith(("layers", "n_layer")) and isinstance(value, int) and value > MAX_LAYERS:
            raise ModelFilesMissing(f"{config} tells of more than {MAX_LAYERS} layers, by {name}.", path=str(config))


def files_of(folder: Path) -> tuple[list[Path], list[Path]]:
    """The files of weights and of the tokenizer in a model's folder, by name."""
    weights = sorted(folder.glob(WEIGHT_PATTERN))
    tokenizer = tokenizer_files_in(folder)
    needed = {CONFIG_FILE: (folder / CONFIG_FILE).is_file(), "weights": weights, "tokenizer files": tokenizer}
    missing = [what for what, found in needed.items() if not found]
    if missing:
        raise ModelFilesMissing(
            f"{folder} has no {', no '.join(missing)}. {A_MODEL_FOLDER}", path=str(folder), missing=missing
        )
    return weights, tokenizer


def missing_weights(folder: Path) -> str | None:
    """What a model's list of shards names and its folder lacks; None if nothing is missing, or there is no list."""
    try:
        named = load_object(folder / SHARDS_FILE).get("weight_map")
    except (OSError, ModelFilesMissing):
        named = None
    shards = {str(name) for name in named.values()} if isinstance(named, Mapping) else set()
    missing = sorted(name for name in shards if not (folder / name).is_file())
    if not missing:
        return None
    return f"{len(missing)} of its {len(shards)} files of weights, the first being {missing[0][:_MAX_NAME_CHARS]}"


def lacks(folder: Path) -> str | None:
    """The missing files of a model that could not be loaded: shards in its list, or the tokenizer's files. None if none
    is missing: that alone proves nothing, for some models need none of them."""
    if weights := missing_weights(folder):
        return weights
    found = set(tokenizer_files_in(folder))
    if not found - {file for pattern in _WITHOUT_WORDS for file in folder.glob(pattern)}:
        return "a file of the tokenizer's words, which is tokenizer.json for most models"
    return None


def rope_of(settings: Mapping[str, Any]) -> str:
    """The settings of the rotary embedding, of the model and of its sections, as canonical JSON, or as its digest if
    that is long. They stay in the digest of the whole configuration too, so that an unknown key about positions still
    counts. As a part of their own, a refusal can name them and show both values."""
    found = {name: value for name, value in _settings_in(settings) if _is_of_rope(name.rpartition(".")[2])}
    return _plain_or_digest(canonical(found).decode()) if found else NO_ROPE


def load_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises ModelFilesMissing: it holds something else, or more than MAX_SETTINGS_BYTES."""
    with file.open("rb") as opened:
        text = opened.read(MAX_SETTINGS_BYTES + 1)
    if len(text) > MAX_SETTINGS_BYTES:
        raise ModelFilesMissing(f"{file} has more than {MAX_SETTINGS_BYTES >> 20} MiB.", path=str(file))
    try:
        loaded = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelFilesMissing(f"{file} is not JSON: {error}.", path=str(file)) from error
    if not isinstance(loaded, Mapping):
        raise ModelFilesMissing(f"{file} does not hold a JSON object.", path=str(file))
    return dict(loaded)


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
    quantization = folder / QUANTIZATION_FILE
    return digest_of([settings, load_object(quantization)] if quantization.is_file() else settings)
