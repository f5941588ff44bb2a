"""Large pages are asked for inside of an array, and not any more once one was slow; nothing else changes."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from torpor.snapshot import memory, pages

import mlx.core as mx  # isort: skip  # after torpor, which chooses the BLAS

PAGE = 64 * 1024


class Advised:
    """In place of the system call: what was asked for, and the answer."""

    def __init__(self, answer: int = 0) -> None:
        self.answer = answer
        self.asked: list[tuple[int, int]] = []

    def __call__(self, address: int, size: int, advice: int) -> int:
        assert advice == 14
        self.asked.append((address, size))
        return self.answer


@pytest.fixture
def advised(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Advised:
    """A system with large pages of 64 KiB that are always quick."""
    size = tmp_path / "hpage_pmd_size"
    size.write_text(f"{PAGE}\n")
    call = Advised()
    monkeypatch.setattr(pages, "_SIZE_FILE", size)
    monkeypatch.setattr(pages, "_madvise", lambda: call)
    monkeypatch.setattr(time, "thread_time", lambda: 0.0)
    return call


def filled(size: int) -> mx.array:
    array = memory.unfilled((size,), mx.uint8)
    memory.writable(array)[:] = b"\xa5" * size
    return array


@pytest.mark.parametrize("size", [1, 100, PAGE - 1, PAGE, 2 * PAGE, 10 * PAGE, 10 * PAGE + 777])
def test_each_large_page_that_lies_in_an_array_whole_is_asked_for_and_touched_once(advised: Advised, size: int) -> None:
    array = filled(size)
    start = np.asarray(array).ctypes.data
    large = pages.LargePages()
    large.back(array)
    expected = [
        (page, PAGE)
        for page in range(start // PAGE * PAGE, start + size, PAGE)
        if page >= start and page + PAGE <= start + size
    ]
    assert advised.asked == expected
    assert large.given == len(expected)
    touched = {page - start for page, _ in expected}
    held = memory.writable(array)
    assert {place for place in range(size) if held[place] != 0xA5} == touched


def test_a_slow_page_is_the_last_one_of_the_wake(advised: Advised, monkeypatch: pytest.MonkeyPatch) -> None:
    array, other = filled(8 * PAGE), filled(8 * PAGE)
    clock = iter([0.0, pages.SLOW_SECONDS / 2, 1.0, 1.0 + 2 * pages.SLOW_SECONDS])
    monkeypatch.setattr(time, "thread_time", lambda: next(clock))
    large = pages.LargePages()
    large.back(array)
    large.back(other)
    assert len(advised.asked) == large.given == 2
    assert large.is_slow


def test_a_system_that_refuses_is_left_alone(advised: Advised) -> None:
    advised.answer = -1
    array = filled(8 * PAGE)
    large = pages.LargePages()
    large.back(array)
    assert len(advised.asked) == 1
    assert large.given == 0
    assert bytes(memory.writable(array)) == b"\xa5" * 8 * PAGE


@pytest.mark.parametrize("says", [None, "", "many", "0", str(1 << 29)])
def test_where_there_are_no_large_pages_or_only_huge_ones_none_is_asked_for(
    advised: Advised, tmp_path: Path, says: str | None
) -> None:
    file = tmp_path / "hpage_pmd_size"
    file.unlink()
    if says is not None:
        file.write_text(says)
    large = pages.LargePages()
    large.back(filled(8 * PAGE))
    assert large.is_slow
    assert not advised.asked


def test_what_is_filled_afterwards_is_there_whatever_this_system_gives() -> None:
    array = memory.unfilled((1, 4, 1 << 20), mx.uint16)
    pages.LargePages().back(array)
    content = np.random.default_rng(0).bytes(array.nbytes)
    memory.writable(array)[:] = content
    assert bytes(memory.writable(array)) == content
