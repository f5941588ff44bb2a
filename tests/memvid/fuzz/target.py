"""What every target is: seeds, a change of an input, and the check of one execution."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import ClassVar, Final, TypeVar
from unittest import mock

from torpor.tests.memvid.fuzz.watch import Broken

SOUND: Final = "sound"
"""The outcome of an input that is accepted in full."""

MAX_SLOT_BYTES: Final = 1 << 24
"""Raw bytes that a check reads whole: what a file declares honestly takes its memory and its time."""

T = TypeVar("T")

SMALL: Final = {"layers": 1, "heads": 1, "dim": 2}


class Target:
    """One kind of input."""

    name: ClassVar[str]
    max_bytes: ClassVar[int] = 1 << 16

    def __init__(self, folder: Path) -> None:
        """`folder` is empty and ours, for as long as the target is used."""
        self.folder = folder

    def seeds(self) -> Iterable[bytes]:
        raise NotImplementedError

    def change(self, data: bytes, rng: Random) -> bytes:
        raise NotImplementedError

    def check(self, data: bytes) -> str:
        raise NotImplementedError


CORPUS: Final = Path(__file__).with_name("corpus")
"""Inputs that were once found, in a folder for each target."""


def corpus_of(target: Target) -> list[Path]:
    return sorted((CORPUS / target.name).glob("*"))


def changed(target: Target, data: bytes, rng: Random, times: Sequence[int]) -> bytes:
    """An input that is one of so many changes away, none of which makes it too long."""
    for _ in range(rng.choice(times)):
        new = target.change(data, rng)
        data = new if len(new) <= target.max_bytes else data
    return data


def require(holds: bool, what: str) -> None:
    if not holds:
        raise Broken(what)


@contextlib.contextmanager
def same_everywhere() -> Iterator[None]:
    """While this lasts, what is put to sleep gets the same bundle ids in every process and on every machine."""
    clock = itertools.count(1_700_000_000_000_000_000, 1_000_000_000)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch("time.time_ns", side_effect=clock))
        for name in ("python_version", "system", "machine"):
            stack.enter_context(mock.patch(f"platform.{name}", return_value="any"))
        yield


def again(encode: Callable[[], T]) -> T:
    """What was accepted must be accepted again: an error of this second step is a fault, whatever its type."""
    try:
        return encode()
    except Exception as error:
        raise Broken(f"what was accepted is not taken back ({type(error).__name__})") from error
