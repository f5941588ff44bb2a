"""The logits of a branch, lent out: a read-only view for each step, which dies before anything overwrites it.

A view has no memory of its own: a slice is a view of the same loan, and what becomes an array of numpy is a copy. So a
reader that keeps a view past its step gets an error, and never the numbers of another step. Only an answer gets the
memory itself, to read: it tells of its step, and is sent when the branch may have gone on.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, overload

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ..errors import LogitsLent, StaleLogits

Result = TypeVar("Result")


class Loan:
    """The logits of one branch at one step, until they are taken back. It keeps them alive, and nothing else."""

    def __init__(self, branch: int, step: int, logits: mx.array) -> None:
        self.branch = branch
        self.step = step
        self._values: NDArray[np.float32] | None = np.asarray(logits)

    def end(self) -> None:
        """Take them back: every view of them is stale from now on."""
        self._values = None

    def values(self) -> NDArray[np.float32]:
        """Float32 `[vocabulary]`, not to be written to or given away. Raises StaleLogits."""
        if self._values is None:
            raise StaleLogits(
                f"Branch {self.branch} has gone on since step {self.step}, so these logits are gone. Ask for the "
                "present ones, and copy what you want to keep.",
                branch=self.branch,
                step=self.step,
            )
        return self._values


class LogitsView:
    """Logits to look at: a number by its token, a view by a slice, a copy by `numpy.array`. Every use raises
    StaleLogits once the branch goes on."""

    __slots__ = ("_loan", "_span")

    def __init__(self, loan: Loan, span: slice = slice(None)) -> None:
        self._loan = loan
        self._span = span

    @property
    def step(self) -> int:
        """The step of the branch that they belong to."""
        return self._loan.step

    def __len__(self) -> int:
        return len(self._mine())

    @overload
    def __getitem__(self, at: int) -> float: ...

    @overload
    def __getitem__(self, at: slice) -> LogitsView: ...

    def __getitem__(self, at: int | slice) -> float | LogitsView:
        """The logit of a token, or a view of some. Raises IndexError, StaleLogits."""
        mine = self._mine()
        if not isinstance(at, slice):
            return float(mine[at])
        whole = range(len(self._loan.values()))[self._span][at]
        return LogitsView(self._loan, slice(whole.start, whole.stop if whole.stop >= 0 else None, whole.step))

    def __iter__(self) -> Iterator[float]:
        for at in range(len(self)):
            yield self[at]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """A copy, for `numpy.array` and all that takes arrays."""
        return np.array(self._mine(), dtype=dtype)

    def to_send(self) -> memoryview:
        """The memory itself, float32 in the machine's order, to read alone. It stays what it is when the view ends, and
        is freed when this is let go."""
        return np.ascontiguousarray(self._mine()).data.toreadonly().cast("B")

    def tobytes(self) -> bytes:
        """A copy, as float32 in the machine's order."""
        return self._mine().tobytes()

    def _mine(self) -> NDArray[np.float32]:
        return self._loan.values()[self._span]


class Lending:
    """Lends the logits of one branch, once for each step."""

    def __init__(self) -> None:
        self._view: LogitsView | None = None
        self._loan: Loan | None = None
        self._borrowers = 0

    def view(self, branch: int, step: int, logits: mx.array) -> LogitsView:
        """The view of this step: the same one until the branch goes on."""
        if self._view is None:
            self._loan = Loan(branch, step, logits)
            self._view = LogitsView(self._loan)
        return self._view

    def borrowed(self, view: LogitsView, look: Callable[[LogitsView], Result]) -> Result:
        """What a function finds in the logits; meanwhile the branch cannot go on.

        Raises TypeError: the function would look later: it is, or gives, a coroutine or a generator."""
        if _looks_later(look):
            raise TypeError("a function that waits cannot borrow logits: copy them with numpy.array, and pass the copy")
        self._borrowers += 1
        try:
            result = look(view)
        finally:
            self._borrowers -= 1
        if inspect.isawaitable(result) or inspect.isgenerator(result) or inspect.isasyncgen(result):
            if inspect.iscoroutine(result) or inspect.isgenerator(result):
                result.close()
            raise TypeError("the function gave what looks at the logits later: let it return its result")
        return result

    def revoke(self, branch: int) -> None:
        """Take all views back, before anything overwrites what they show. Raises LogitsLent: a function looks at
        them right now."""
        if self._borrowers:
            raise LogitsLent(
                f"The logits of branch {branch} are being looked at; let that function return first.", branch=branch
            )
        if self._loan is not None:
            self._loan.end()
        self._loan = self._view = None


def _looks_later(look: Callable[..., Any]) -> bool:
    kinds = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    return any(is_kind(look) for is_kind in kinds)
