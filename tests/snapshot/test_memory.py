"""Views of MLX memory: the bytes themselves, for reading and for filling."""

from __future__ import annotations

import gc
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from torpor.memvid.units import format_bytes
from torpor.snapshot import memory
from torpor.snapshot.errors import NotEnoughMemory

import mlx.core as mx  # isort: skip  # after torpor, which chooses the BLAS

DTYPES = [mx.float32, mx.float16, mx.bfloat16, mx.uint32, mx.int8, mx.int64]


def viewed(array: mx.array) -> memoryview:
    plain = memory.contiguous(array)
    mx.eval(plain)
    return memory.readable(plain)


def bytes_of(array: mx.array) -> bytes:
    return bytes(viewed(array))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bytes_of_an_array_are_its_elements_in_order(dtype: mx.Dtype) -> None:
    array = mx.arange(24).reshape(2, 3, 4).astype(dtype)
    assert len(bytes_of(array)) == 24 * dtype.size
    again = memory.allocate((2, 3, 4), dtype)
    memory.writable(again)[:] = bytes_of(array)
    restored = memory.as_dtype(again, dtype)
    assert restored.dtype == dtype
    assert mx.array_equal(restored, array).item()


def test_an_array_that_is_not_in_row_major_order_is_brought_into_it() -> None:
    array = mx.arange(12, dtype=mx.uint32).reshape(3, 4)
    expected = np.arange(12, dtype=np.uint32).reshape(3, 4)
    assert bytes_of(array.T) == expected.T.tobytes()
    assert bytes_of(array[:, 1:3]) == expected[:, 1:3].tobytes()
    assert bytes_of(mx.broadcast_to(array[0], (2, 4))) == np.broadcast_to(expected[0], (2, 4)).tobytes()


def test_an_array_in_row_major_order_is_not_copied() -> None:
    array = mx.arange(1000, dtype=mx.float32)
    seen = np.frombuffer(viewed(array), dtype=np.uint8)
    assert seen.ctypes.data == np.asarray(array).ctypes.data


def test_what_is_written_into_allocated_memory_is_seen_by_mlx() -> None:
    array = memory.allocate((4,), mx.float32)
    typed = memory.as_dtype(array, mx.float32)
    memory.writable(array)[4:8] = np.float32(2.5).tobytes()
    assert typed.tolist() == [0.0, 2.5, 0.0, 0.0]


def test_allocated_memory_is_zero() -> None:
    for _ in range(5):
        array = memory.allocate((1000,), mx.float16)
        assert not any(memory.writable(array))
        memory.writable(array)[:] = b"\xff" * 2000
        del array


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1,), (3, 5), (1, 2, 300, 64), (0,), (2, 0, 3), (1, 12, 100_000, 1)])
def test_unfilled_memory_is_an_array_like_any_other(shape: tuple[int, ...], dtype: mx.Dtype) -> None:
    array = memory.unfilled(shape, dtype)
    view = memory.writable(array)
    assert array.shape == shape
    assert view.nbytes == array.nbytes == math.prod(shape) * dtype.size
    content = np.random.default_rng(0).bytes(view.nbytes)
    view[:] = content
    typed = memory.as_dtype(array, dtype)
    assert (typed.shape, typed.dtype) == (shape, dtype)
    if not content:
        return
    assert bytes_of(typed) == content
    grown = mx.concatenate([array, array])
    assert bytes_of(grown) == 2 * content


@pytest.mark.one_in(1)
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the system does not say what is resident")
def test_unfilled_memory_takes_no_pages_before_it_is_filled() -> None:
    """In a process of its own: this one may have so much at hand, with its pages."""
    script = """
import os
from pathlib import Path
from torpor.snapshot import memory
import mlx.core as mx
def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
size, before = 64 << 20, resident()
array = memory.unfilled((size,), mx.uint8)
assert resident() - before < size // 16
memory.writable(array)[:] = bytes(size)
assert resident() - before > size // 2
"""
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.one_in(1)
@pytest.mark.parametrize("freeing", ["memory.hand_back_cache()", "memory.limit_cache(1_000_000 + number)"])
def test_two_engines_of_a_process_do_not_wait_for_each_other(freeing: str) -> None:
    """In a process of its own, which ends: one hands memory back while the other takes some."""
    script = f"""
import threading
from torpor.snapshot import memory
import mlx.core as mx
def take() -> None:
    for number in range(1000):
        mx.eval([memory.unfilled((64, 1024), mx.float16) for _ in range(8)])
taker = threading.Thread(target=take)
taker.start()
number = 0
while taker.is_alive():
    {freeing}
    number += 1
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_what_fits_one_by_one_is_not_granted_all_at_once_threat_59(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that nobody has touched is still called available, so what was granted of it is counted here."""
    monkeypatch.setattr(memory, "_available", lambda: 100_000)
    first = memory.grant(60_000)
    with pytest.raises(NotEnoughMemory) as refusal:
        memory.grant(50_000)
    assert f"{format_bytes(60_000)} of it for states that are just being read" in refusal.value.message
    assert "try again in a moment" in refusal.value.message
    assert refusal.value.promised_bytes == memory.granted_bytes() == 60_000, "the one that was refused is not counted"
    second = memory.grant(40_000)
    assert memory.granted_bytes() == 100_000
    first.filled(59_000)  # the system would now say so itself
    third = memory.grant(59_000)
    assert memory.granted_bytes() == 1_000 + second.unfilled_bytes + third.unfilled_bytes == 100_000
    for each in (first, second, third):
        each.done()
    assert memory.granted_bytes() == 0, "whoever fails lets go, even while its error is looked at"


def test_what_was_granted_and_let_go_of_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_available", lambda: 100_000)
    granted = memory.grant(100_000)
    assert granted.unfilled_bytes == memory.granted_bytes()
    del granted
    assert memory.granted_bytes() == 0
    with pytest.raises(NotEnoughMemory) as refusal:
        memory.grant(100_001)
    assert refusal.value.message.endswith("are available. Put other sessions to sleep.")


@pytest.mark.parametrize(
    ("info", "bound"),
    [
        ({"device_name": "NVIDIA L4", "free_memory": 1000, "total_memory": 1 << 60}, 1000),
        ({"device_name": "NVIDIA H200", "free_memory": 1 << 60}, None),
        ({"device_name": "Apple M3", "memory_size": 1000}, None),
    ],
)
def test_what_is_available_is_what_the_gpu_has_if_that_is_less(
    monkeypatch: pytest.MonkeyPatch, info: dict[str, str | int], bound: int | None
) -> None:
    """MLX says of CUDA what is free there; on Metal the memory is the system's."""
    monkeypatch.setattr(memory.mx, "default_device", lambda: mx.Device(mx.cpu))
    monkeypatch.setattr(memory.mx, "device_info", lambda: info)
    monkeypatch.setattr(memory, "_available_in_system", lambda: 50_000)
    assert memory.available_bytes() == 50_000, "computing on a CPU"
    monkeypatch.setattr(memory.mx, "default_device", lambda: mx.Device(mx.gpu))
    assert memory.available_bytes() == (bound or 50_000)
    if bound:
        with pytest.raises(NotEnoughMemory):
            memory.grant(bound + 1)


def test_growing_a_cache_in_unfilled_memory_writes_in_place() -> None:
    array = memory.as_dtype(memory.unfilled((1, 2, 8, 4), mx.float32), mx.float32)
    memory.writable(array.view(mx.uint32))[:] = bytes(array.nbytes)
    place = np.asarray(array).ctypes.data
    array[:, :, 3:4] = mx.ones((1, 2, 1, 4))
    mx.eval(array)
    assert np.asarray(array).ctypes.data == place
    assert array.sum().item() == 8


def test_two_allocations_share_no_memory_br8() -> None:
    first, second = memory.allocate((4,), mx.uint8), memory.allocate((4,), mx.uint8)
    memory.writable(first)[:] = b"abcd"
    assert bytes(memory.writable(second)) == bytes(4)


def test_a_view_stays_what_it_was_when_its_array_is_written_to_br8_gm12() -> None:
    array = mx.zeros((2, 4))
    view = viewed(array)
    array[0, :2] = 7.0
    mx.eval(array)
    assert bytes(view) == bytes(32)
    assert array.tolist()[0] == [7.0, 7.0, 0.0, 0.0]


def test_a_view_outlives_its_array_gm13() -> None:
    view = viewed(mx.full((1000,), 3.0))
    before = bytes(view)
    gc.collect()
    mx.clear_cache()
    mx.eval([mx.full((1000,), 4.0) for _ in range(10)])
    assert bytes(view) == before


@pytest.mark.parametrize(("start", "count"), [(0, 1), (0, 10), (3, 4), (9, 1)])
def test_the_runs_of_a_span_are_one_for_each_head(start: int, count: int) -> None:
    array = np.arange(2 * 10 * 3, dtype=np.uint16).reshape(1, 2, 10, 3)
    runs = memory.SpanSource(memoryview(array).cast("B"), 2, 10, 6).runs(start, count)
    assert len(runs) == 2
    assert b"".join(runs) == array[:, :, start : start + count].tobytes()
