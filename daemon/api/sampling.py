"""How tokens are drawn, as a value. `sampler.py` applies it to logits. Imports no pydantic, as `session.py`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import cache, partial
from typing import Annotated, Any, Final, get_args, get_type_hints

from ...records import Bounds, Listed, Record
from ..errors import InvalidSampling
from .limits import MAX_BIAS, MAX_LOGIT_BIASES, MAX_SEED, MAX_TOKEN_ID

# Below it, log-probabilities divided by the temperature leave the range of float32.
LOWEST_TEMPERATURE = 1e-6

TokenId = Annotated[int, Bounds(0, MAX_TOKEN_ID)]
Temperature = Annotated[float, Bounds(0, 100)]
TopP = Annotated[float, Bounds(1e-6, 1)]
TopK = Annotated[int, Bounds(0, 2**31 - 1)]
MinP = Annotated[float, Bounds(0, 1)]
RepetitionPenalty = Annotated[float, Bounds(1e-3, 100)]
Penalty = Annotated[float, Bounds(-2, 2)]

_NEW_SEED_BITS = 53  # a client in JavaScript can give it back


class TokenBias(Record):
    """What is added to the logit of a token before it is drawn; None: it is never drawn."""

    token: TokenId
    bias: Annotated[float, Bounds(-MAX_BIAS, MAX_BIAS)] | None = None

    def __post_init__(self) -> None:
        """Refuse invalid values. Raises InvalidSampling: naming the field."""
        _require("token", self.token, 0, MAX_TOKEN_ID, kind=int)
        if self.bias is not None:
            _require("bias", self.bias, -MAX_BIAS, MAX_BIAS, kind=float)


LogitBias = Annotated[Sequence[TokenBias], Listed(most=MAX_LOGIT_BIASES)]


class _LeftFraction(float):
    """A default that was not given to the constructor."""


class _LeftWhole(int):
    """As `_LeftFraction`, for a whole number."""


class _LeftList(tuple[Any, ...]):
    """As `_LeftFraction`, for a list."""


class _Naming:
    """Holds the names of the given fields. Not a field itself: two that draw the same are equal."""

    __slots__ = ("_named",)
    _named: frozenset[str]


class Sampling(Record, _Naming):
    """How the next token is drawn from the logits. A request names only the fields given to the constructor; these
    override the session's.

    The defaults are greedy: temperature 0 takes the argmax, and then only those fields matter that change logits. They
    come before all others, in this order: `logit_bias` is added, the last one of a token; `repetition_penalty` is
    applied to the last 64 tokens; a token that the answer has already loses `presence_penalty`, and `frequency_penalty`
    as often as it is there. What was read does not count. The same seed draws the same tokens.
    """

    temperature: Temperature = _LeftFraction(0.0)
    top_p: TopP = _LeftFraction(1.0)
    top_k: TopK = _LeftWhole(0)
    min_p: MinP = _LeftFraction(0.0)
    repetition_penalty: RepetitionPenalty = _LeftFraction(1.0)
    seed: Annotated[int, Bounds(0, MAX_SEED)] = _LeftWhole(0)
    presence_penalty: Penalty = _LeftFraction(0.0)
    frequency_penalty: Penalty = _LeftFraction(0.0)
    logit_bias: LogitBias = _LeftList()

    def __post_init__(self) -> None:
        """Refuse invalid values (threat 48: NaN, negative, beyond 64 bits).

        Raises:
            InvalidSampling: naming the field and the values it takes.
        """
        left = _LeftFraction, _LeftWhole, _LeftList
        given = {name for name, value in vars(self).items() if not isinstance(value, left)}
        object.__setattr__(self, "_named", frozenset(given))
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
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
        return partial(type(self), **self.named()), ()

    def named(self) -> dict[str, Any]:
        """The fields given to the constructor, as plain data."""
        return {name: _plain(value) for name, value in vars(self).items() if name in self._named}

    def changed(self, by: Sampling | None) -> Sampling:
        """These parameters, changed by those that another names."""
        return self if by is None else replace(self, **{name: getattr(by, name) for name in by._named})

    def require_known(self, vocabulary: int) -> None:
        """Raises InvalidSampling: `logit_bias` has a token that is outside a vocabulary of this size."""
        beyond = next((each.token for each in self.logit_bias if each.token >= vocabulary), None)
        if beyond is not None:
            raise InvalidSampling(
                f"logit_bias has token {beyond}, but the model's tokens are 0 to {vocabulary - 1}. Leave it out, or "
                "take its id from the model's own tokenizer.",
                field="logit_bias",
                token=beyond,
                vocabulary=vocabulary,
            )

    def to_map(self) -> dict[str, Any]:
        """The parameters as plain data, as a snapshot keeps them: `_LATER` ones where they are not as before."""
        return {
            name: _plain(value) for name, value in vars(self).items() if name not in _LATER or value != _LATER[name]
        }

    @classmethod
    def from_map(cls, stored: Mapping[str, Any]) -> Sampling:
        """Read the map that `to_map` makes.

        Raises:
            InvalidSampling: a field is unknown, missing or out of range.
        """
        names = {each.name for each in fields(cls)}
        if not names - _LATER.keys() <= stored.keys() <= names:
            raise InvalidSampling(
                f"Sampling parameters must be {sorted(names)}, found {sorted(stored)}.", found=sorted(stored)
            )
        return cls(**{**_LATER, **stored})


_LATER: Final[Mapping[str, Any]] = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "logit_bias": ()}
"""Fields that snapshots of before have not, and what they stand for there."""


def new_seed() -> int:
    """A seed by chance, for an answer that is to be another one each time."""
    return int.from_bytes(os.urandom(8)) >> (64 - _NEW_SEED_BITS)


def _biases(given: Sequence[Any]) -> tuple[TokenBias, ...]:
    """The biases, also of maps. One tuple stays itself: many branches may share it."""
    if type(given) is tuple and all(type(each) is TokenBias for each in given):
        return given
    try:
        return tuple(each if isinstance(each, TokenBias) else TokenBias(**each) for each in given)
    except TypeError as error:
        raise InvalidSampling(
            "logit_bias must be a list of biases, each of a token and what is added to its logit.", field="logit_bias"
        ) from error


def _plain(value: Any) -> Any:
    return [asdict(each) for each in value] if isinstance(value, tuple) else value


@cache
def _ranges() -> Mapping[str, tuple[type, float, float]]:
    """The kind, lowest and highest value of each number, as declared."""
    declared = get_type_hints(Sampling, include_extras=True)
    numbers = {each.name: get_args(declared[each.name]) for each in fields(Sampling) if each.name != "logit_bias"}
    return {name: (kind, bounds.ge, bounds.le) for name, (kind, bounds) in numbers.items()}


def _require(field: str, value: float | int, lowest: float, highest: float, *, kind: type, also: str = "") -> None:
    is_number = isinstance(value, (int, kind)) and not isinstance(value, bool)
    if not is_number or not lowest <= value <= highest:  # so also NaN
        what = "a whole number" if kind is int else "a number"
        raise InvalidSampling(
            f"{field} must be {also}{what} from {lowest:g} to {highest:g}, not {value!r}.",
            field=field,
            value=repr(value),
        )
