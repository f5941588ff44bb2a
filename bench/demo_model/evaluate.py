"""Held-out bits per byte: the model's, and those of compressors and unigram models beside it."""

from __future__ import annotations

import gzip
import lzma
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from tokenizers import Tokenizer

from .data import END_OF_TEXT, SourceFile, total_bytes
from .train import working_streams

Progress = Callable[[int, int], None]
# The position, in tokens, at which each bucket of the report begins.
BUCKETS = (0, 128, 512, 1024, 2048, 4096, 6144)


def file_losses(
    model: Any, ids: Sequence[int], separator: int, window: int, streams: Sequence[mx.Stream]
) -> np.ndarray[Any, Any]:
    """Nats of every token of a file and of the end-of-text token behind it; (len(ids) + 1,).

    The file is read in windows of ``window`` tokens without overlap; each begins with the token before it
    (the first with end-of-text), so that every token is paid for exactly once. The windows are spread over ``streams``.
    """
    tokens = np.array([separator, *ids, separator], dtype=np.int32)
    losses = []
    for index, start in enumerate(range(0, len(tokens) - 1, window)):
        with mx.stream(streams[index % len(streams)]):
            piece = mx.array(tokens[start : start + window + 1])
            logits = model(piece[None, :-1])[0].astype(mx.float32)
            chosen = mx.take_along_axis(logits, piece[1:, None], axis=-1)[:, 0]
            losses.append(mx.logsumexp(logits, axis=-1) - chosen)
    mx.eval(losses)
    return np.concatenate([np.array(part) for part in losses])


def model_bits(
    model: Any, tokenizer: Tokenizer, files: Sequence[SourceFile], window: int, progress: Progress | None = None
) -> dict[str, Any]:
    """Bits per byte over all ``files``, and by the position of the token in its window."""
    separator = int(tokenizer.token_to_id(END_OF_TEXT) or 0)
    streams = working_streams()
    nats, size = 0.0, total_bytes(list(files))
    by_position: list[list[float]] = [[0.0, 0.0] for _ in BUCKETS]
    for index, file in enumerate(files):
        ids = tokenizer.encode(file.text).ids
        losses = file_losses(model, ids, separator, window, streams)
        nats += float(losses.sum())
        lengths = np.array([*token_bytes(tokenizer, ids), 0])
        places = np.searchsorted(BUCKETS, np.arange(len(losses)) % window, side="right") - 1
        for bucket in range(len(BUCKETS)):
            by_position[bucket][0] += float(losses[places == bucket].sum())
            by_position[bucket][1] += float(lengths[places == bucket].sum())
        if progress:
            progress(index + 1, len(files))
    names = [f"{low}-{high}" for low, high in zip(BUCKETS, (*BUCKETS[1:], window), strict=True)]
    return {
        "bits_per_byte": nats / math.log(2) / size,
        "window_tokens": window,
        "by_position": {
            name: round(total / math.log(2) / count, 4)
            for name, (total, count) in zip(names, by_position, strict=True)
            if count > 0
        },
    }


def token_bytes(tokenizer: Tokenizer, ids: Sequence[int]) -> list[int]:
    """How many bytes each token stands for (byte-level BPE writes one character a byte)."""
    return [len(tokenizer.id_to_token(token) or "") for token in ids]


def baselines(
    tokenizer: Tokenizer, files: Sequence[SourceFile], byte_counts: Sequence[int], token_counts: Sequence[int]
) -> dict[str, float]:
    """Bits per byte of the held-out files under gzip, xz, and unigram models fitted on the training text."""
    contents = [file.text.encode() for file in files]
    size = sum(map(len, contents))
    joined = b"".join(contents)
    used_bytes = Counter(joined)
    used_tokens = Counter(token for file in files for token in tokenizer.encode(file.text).ids)
    return {
        "gzip_per_file": 8 * sum(len(gzip.compress(content, 9, mtime=0)) for content in contents) / size,
        "gzip_joined": 8 * len(gzip.compress(joined, 9, mtime=0)) / size,
        "xz_joined": 8 * len(lzma.compress(joined, preset=9 | lzma.PRESET_EXTREME)) / size,
        "unigram_bytes": unigram_bits(byte_counts, used_bytes) / size,
        "unigram_tokens": unigram_bits(token_counts, used_tokens) / size,
    }


def unigram_bits(counts: Sequence[int], used: Counter[int]) -> float:
    """Bits that ``used`` (symbol: how often) costs under ``counts`` of the training text, one added to each."""
    total = sum(counts) + len(counts)
    return sum(times * math.log2(total / (counts[symbol] + 1)) for symbol, times in used.items())
