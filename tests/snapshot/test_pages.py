"""Large pages are asked for inside of an array, and not any more once one was slow; nothing else changes."""

from __future__ import annotations

import mmap
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from torpor.snapshot import memory, pages

import mlx.core as mx  # isort: skip  # after torpor, which chooses the BLAS

PAGE = 64 * 1024


class System:
    """In place of the system's calls: what was asked for, and the answers."""

    def __init__(self) -> None:
        self.gives = True
        self.there: set[int] = set()
        self.asked: list[tuple[int, int]] = []

    def is_there(self, address: int) -> bool:
        return address in self.there

    def give(self, address: int, size: int) -> bool:
        self.asked.append((address, size))
        return self.gives


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> System:
    """A system with large pages of 64 KiB that are always quick."""
    size = tmp_path / "hpage_pmd_size"
    size.write_text(f"{PAGE}\n")
    calls = System()
    monkeypatch.setattr(pages, "_SIZE_FILE", size)
    monkeypatch.setattr(pages, "_system", lambda: calls)
    monkeypatch.setattr(time, "thread_time", lambda: 0.0)
    return calls


def filled(size: int) -> mx.array:
    array = memory.unfilled((size,), mx.uint8)
    memory.writable(array)[:] = b"\xa5" * size
    return array


def inside(array: mx.array) -> list[int]:
    """The large pages that lie in an array whole."""
    start = np.asarray(array).ctypes.data
    end = start + array.nbytes
    return [page for page in range(start // PAGE * PAGE, end, PAGE) if start <= page <= end - PAGE]


@pytest.mark.parametrize("size", [1, 100, PAGE - 1, PAGE, 2 * PAGE, 10 * PAGE, 10 * PAGE + 777])
def test_each_large_page_that_lies_in_an_array_whole_is_asked_for(system: System, size: int) -> None:
    array = filled(size)
    pages.LargePages().back(array)
    assert system.asked == [(page, PAGE) for page in inside(array)]
    assert bytes(memory.writable(array)) == b"\xa5" * size


def test_a_slow_page_is_the_last_one_of_the_wake(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    array, other = filled(8 * PAGE), filled(8 * PAGE)
    clock = iter([0.0, pages.SLOW_SECONDS / 2, 1.0, 1.0 + 2 * pages.SLOW_SECONDS])
    monkeypatch.setattr(time, "thread_time", lambda: next(clock))
    large = pages.LargePages()
    large.back(array)
    large.back(other)
    assert len(system.asked) == 2
    assert large.is_slow


def test_a_system_that_refuses_is_left_alone(system: System) -> None:
    system.gives = False
    array = filled(8 * PAGE)
    large = pages.LargePages()
    large.back(array)
    large.back(array)
    assert len(system.asked) == 1


def test_memory_that_was_in_use_before_is_not_asked_for_again(system: System) -> None:
    array, other = filled(8 * PAGE), filled(8 * PAGE)
    system.there = {*inside(array)}
    large = pages.LargePages()
    large.back(array)
    assert not system.asked
    large.back(other)
    assert len(system.asked) == len(inside(other))


@pytest.mark.skipif(sys.platform != "linux", reason="the calls are Linux's")
def test_the_system_knows_memory_that_was_touched_from_memory_that_was_not() -> None:
    calls = pages._system()
    taken = mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = np.frombuffer(taken, dtype="u1").ctypes.data
    assert not calls.is_there(address)
    taken[0] = 1
    assert calls.is_there(address)
    assert not calls.is_there(address + (1 << 19))


@pytest.mark.parametrize("says", [None, "", "many", "0", str(1 << 29)])
def test_where_there_are_no_large_pages_or_only_huge_ones_none_is_asked_for(
    system: System, tmp_path: Path, says: str | None
) -> None:
    file = tmp_path / "hpage_pmd_size"
    file.unlink()
    if says is not None:
        file.write_text(says)
    large = pages.LargePages()
    large.back(filled(8 * PAGE))
    assert large.is_slow
    assert not system.asked


def test_what_is_filled_afterwards_is_there_whatever_this_system_gives() -> None:
    array = memory.unfilled((1, 4, 1 << 20), mx.uint16)
    content = np.random.default_rng(0).bytes(array.nbytes)
    memory.writable(array)[: 4 << 20] = content[: 4 << 20]
    pages.LargePages().back(array)
    assert bytes(memory.writable(array)[: 4 << 20]) == content[: 4 << 20]
    memory.writable(array)[:] = content
    assert bytes(memory.writable(array)) == content
