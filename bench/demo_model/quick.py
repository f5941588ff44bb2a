"""The slow pieces of a training step, written so that mlx's CPU compiler can fuse and vectorise them.

mlx's portable CPU build evaluates ``exp`` one element at a time (about 10 ns each), which makes softmax
and SiLU cost more than the matrix products of a small model. The functions here compute the same things
through a polynomial (relative error under 1e-4 for arguments between -20 and 20) and skip the half of
the attention scores that causality discards. They are used for training on the CPU only: evaluation and
every other backend run mlx-lm's own code, and a test holds the two to the same loss and gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.models import qwen3

# Queries taken at once: the smaller, the fewer masked scores are computed; the larger, the better the products.
QUERY_BLOCK = 128


@partial(mx.compile, shapeless=True)
def exponential(x: mx.array) -> mx.array:
    """``exp(x)`` for float32 of any shape, by a quartic at ``x / 128`` squared seven times.

    For arguments between -80 and 80; nothing is clipped, since a minimum keeps the compiler from vectorising.
    """
    y = x * (1.0 / 128.0)
    power = 1.0 + y * (1.0 + y * (0.5 + y * (1.0 / 6.0 + y * (1.0 / 24.0))))
    for _ in range(7):
        power = power * power
    return power


def attention(
    queries: mx.array, keys: mx.array, values: mx.array, cache: Any, scale: float, mask: Any, sinks: Any = None
) -> mx.array:
    """Causal attention without a cache; its arguments are those of mlx-lm's function of this purpose.

    ``queries`` is (rows, heads, length, head_dim), ``keys`` and ``values`` (rows, kv_heads, length, head_dim);
    the answer has the shape of ``queries``.
    """
    rows, heads, length, width = queries.shape
    groups = keys.shape[1]
    grouped = (queries * scale).reshape(rows, groups, heads // groups, length, width)
    attend: Any = _attend
    out: mx.array = attend(grouped, mx.contiguous(keys), mx.contiguous(values))[0]
    return out.reshape(rows, heads, length, width)


def _blocks(length: int) -> list[tuple[int, int]]:
    return [(start, min(start + QUERY_BLOCK, length)) for start in range(0, length, QUERY_BLOCK)]


def _rows_of(x: mx.array, start: int, stop: int) -> mx.array:
    """(rows, groups, repeats, length, width) to (rows, groups, repeats * (stop - start), width)."""
    return x[:, :, :, start:stop].reshape(x.shape[0], x.shape[1], -1, x.shape[-1])


@mx.custom_function
def _attend(queries: mx.array, keys: mx.array, values: mx.array) -> tuple[mx.array, ...]:
    """Attention block by block; answers the output, then each block's sums and unnormalised weights.

    No maximum is taken off before the exponential: q and k are normalised per head, which bounds the scores.
    """
    rows, groups, repeats, length, width = queries.shape
    outputs, kept = [], []
    for start, stop in _blocks(length):
        block = _rows_of(queries, start, stop)
        size = stop - start
        near = exponential(block @ keys[:, :, start:stop].swapaxes(-1, -2))
        past = mx.tril(mx.ones((size, size)))
        near = (near.reshape(rows, groups, repeats, size, size) * past).reshape(rows, groups, -1, size)
        total, mixed = near.sum(axis=-1, keepdims=True), near @ values[:, :, start:stop]
        far = near[..., :0]
        if start:
            far = exponential(block @ keys[:, :, :start].swapaxes(-1, -2))
            total, mixed = total + far.sum(axis=-1, keepdims=True), mixed + far @ values[:, :, :start]
        outputs.append((mixed / total).reshape(rows, groups, repeats, size, width))
        kept += [total, near, far]
    return mx.concatenate(outputs, axis=3), *kept


@_attend.vjp
def _attend_vjp(
    primals: tuple[mx.array, ...], cotangents: tuple[mx.array, ...], outputs: tuple[mx.array, ...]
) -> tuple[mx.array, ...]:
    queries, keys, values = primals
    rows, groups, repeats, length, width = queries.shape
    # A column of ones beside the values lets one product also take off each row's mean gradient.
    widened = mx.concatenate([values, mx.ones_like(values[..., :1])], axis=-1)
    dq, dk, dv = [], mx.zeros_like(keys), mx.zeros_like(values)
    for index, (start, stop) in enumerate(_blocks(length)):
        total, near, far = outputs[1 + 3 * index : 4 + 3 * index]
        block = _rows_of(queries, start, stop)
        given = _rows_of(cotangents[0], start, stop) / total
        mean = (given * _rows_of(outputs[0], start, stop)).sum(axis=-1, keepdims=True)
        given_and_mean = mx.concatenate([given, -mean], axis=-1)
        block_dq = mx.zeros_like(block)
        for weights, low, high in ((near, start, stop), (far, 0, start)):
            if high > low:
                ds = weights * (given_and_mean @ widened[:, :, low:high].swapaxes(-1, -2))
                block_dq = block_dq + ds @ keys[:, :, low:high]
                dk = dk.at[:, :, low:high].add(ds.swapaxes(-1, -2) @ block)
                dv = dv.at[:, :, low:high].add(weights.swapaxes(-1, -2) @ given)
        dq.append(block_dq.reshape(rows, groups, repeats, stop - start, width))
    return mx.concatenate(dq, axis=3), dk, dv


def swiglu(gate: mx.array, x: mx.array) -> mx.array:
    """``silu(gate) * x``, elementwise."""
    gated: Any = _swiglu
    out: mx.array = gated(gate, x)[0]
    return out


@mx.custom_function
def _swiglu(gate: mx.array, x: mx.array) -> tuple[mx.array, mx.array]:
    share = 1.0 / (1.0 + exponential(-gate))
    return gate * share * x, share


@_swiglu.vjp
def _swiglu_vjp(
    primals: tuple[mx.array, mx.array], cotangents: tuple[mx.array, ...], outputs: tuple[mx.array, mx.array]
) -> tuple[mx.array, ...]:
    gate, x = primals
    share, given = outputs[1], cotangents[0]
    silu = gate * share
    return given * x * (share + silu * (1.0 - share)), given * silu


def token_losses(hidden: mx.array, table: mx.array, targets: mx.array) -> mx.array:
    """Cross-entropy in nats, (tokens,), of ``hidden`` (tokens, width) under the tied embedding ``table``.

    ``table`` is (vocabulary, width) and ``targets`` (tokens,). The weights of the softmax are never
    normalised: each row's sum is divided out of the narrow side of the products instead.
    """
    fused: Any = _token_losses
    losses: mx.array = fused(hidden, table, targets)[0]
    return losses


@mx.custom_function
def _token_losses(hidden: mx.array, table: mx.array, targets: mx.array) -> tuple[mx.array, ...]:
    weights = exponential(hidden @ table.T)
    total = weights.sum(axis=-1)
    return mx.log(total) - (hidden * table[targets]).sum(axis=-1), weights, total


@_token_losses.vjp
def _token_losses_vjp(
    primals: tuple[mx.array, ...], cotangents: tuple[mx.array, ...], outputs: tuple[mx.array, ...]
) -> tuple[mx.array, ...]:
    hidden, table, targets = primals
    _, weights, total = outputs
    given = cotangents[0][:, None]
    scaled = given / total[:, None]
    d_hidden = scaled * (weights @ table) - given * table[targets]
    d_table = (weights.T @ (hidden * scaled)).at[targets].add(-given * hidden)
    return d_hidden, d_table, mx.zeros_like(targets)


@contextlib.contextmanager
def installed(enabled: bool) -> Iterator[None]:
    """Within the block, mlx-lm's Qwen3 layers call the functions above (where ``enabled``)."""
    before = qwen3.scaled_dot_product_attention, qwen3.swiglu
    if enabled:
        qwen3.scaled_dot_product_attention, qwen3.swiglu = attention, swiglu
    try:
        yield
    finally:
        qwen3.scaled_dot_product_attention, qwen3.swiglu = before
