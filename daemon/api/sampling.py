"""How tokens are drawn, as a value. `sampler.py` applies it to logits."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import cache, partial
from typing import Annotated, Any, get_args, get_type_hints

from ...records import Bounds, Record
from ..errors import InvalidSampling
from .limits import MAX_SEED

# Below it, log-probabilities divided by the temperature leave the range of float32.
LOWEST_TEMPERATURE = 1e-6

Temperature = Annotated[float, Bounds(0, 100)]
TopP = Annotated[float, Bounds(1e-6, 1)]
TopK = Annotated[int, Bounds(0, 2**31 - 1)]
MinP = Annotated[float, Bounds(0, 1)]
RepetitionPenalty = Annotated[float, Bounds(1e-3, 100)]

_NEW_SEED_BITS = 53  # a client in JavaScript can give it back


class _LeftFraction(float):
    """A default that was not given to the constructor."""


class _LeftWhole(int):
    """As `_LeftFraction`, for a whole number."""


class _Naming:
    """Holds the names of the given fields. Not a field itself: two that draw the same are equal."""

    __slots__ = ("_named",)
    _named: frozenset[str]


class Sampling(Record, _Naming):
    """How the next token is drawn from the logits. A request names only the fields given to the constructor; these
    override the session's.

    The defaults are greedy: temperature 0 takes the argmax, and the other fields then matter only through
    `repetition_penalty`, which is applied to the logits of the last 64 tokens before anything else. The same seed draws
    the same tokens.
    """

    temperature: Temperature = _LeftFraction(0.0)
    top_p: TopP = _LeftFraction(1.0)
    top_k: TopK = _LeftWhole(0)
    min_p: MinP = _LeftFraction(0.0)
    repetition_penalty: RepetitionPenalty = _LeftFraction(1.0)
    seed: Annotated[int, Bounds(0, MAX_SEED)] = _LeftWhole(0)

    def __post_init__(self) -> None:
        """Refuse invalid values (threat 48: NaN, negative, beyond 64 bits).

        Raises:
            InvalidSampling: naming the field and the values it takes.
        """
        given = {name for name, value in vars(self).items() if not isinstance(value, (_LeftFraction, _LeftWhole))}
        object.__setattr__(self, "_named", frozenset(given))
        for name, (kind, lowest, highest) in _ranges().items():
            value = getattr(self, name)
            if name not in given:
                object.__setattr__(self, name, kind(value))  # a default in another record counts as given
                continue
            if name != "temperature":
                _require(name, value, lowest, highest, kind=kind)
            elif value != 0 or isinstance(value, bool):
                _require(name, value, LOWEST_TEMPERATURE, highest, kind=kind, also="0 or ")

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, also a pickled one, names the same fields."""
        return partial(type(self), **self.named()), ()  # type: ignore[arg-type]

    def named(self) -> dict[str, float | int]:
        """The fields given to the constructor."""
        return {name: value for name, value in vars(self).items() if name in self._named}

    def changed(self, by: Sampling | None) -> Sampling:
        """These parameters, changed by those that another names."""
        return self if by is None else replace(self, **by.named())  # type: ignore[arg-type]

    def to_map(self) -> dict[str, float | int]:
        """The parameters as plain data, as a snapshot keeps them."""
        return dict(vars(self))

    @classmethod
    def from_map(cls, stored: Mapping[str, Any]) -> Sampling:
        """Read the map that `to_map` makes.

        Raises:
            InvalidSampling: a field is unknown, missing or out of range.
        """
        names = {each.name for each in fields(cls)}
        if set(stored) != names:
            raise InvalidSampling(
                f"Sampling parameters must be exactly {sorted(names)}, found {sorted(stored)}.", found=sorted(stored)
            )
        return cls(**stored)


def new_seed() -> int:
    """A seed by chance, for an answer that is to be another one each time."""
    return secrets.randbits(_NEW_SEED_BITS)


@cache
def _ranges() -> Mapping[str, tuple[type, float, float]]:
    """The kind, lowest and highest value of each field, as declared."""
    declared, found = get_type_hints(Sampling, include_extras=True), {}
    for each in fields(Sampling):
        kind, bounds = get_args(declared[each.name])
        found[each.name] = (kind, bounds.ge, bounds.le)
    return found


def _require(field: str, value: float | int, lowest: float, highest: float, *, kind: type, also: str = "") -> None:
    is_number = isinstance(value, (int, kind)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not lowest <= value <= highest:
        what = "a whole number" if kind is int else "a number"
        raise InvalidSampling(
            f"{field} must be {also}{what} from {lowest:g} to {highest:g}, not {value!r}.",
            field=field,
            value=repr(value),
        )
