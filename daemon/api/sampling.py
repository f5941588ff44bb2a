"""The sampling parameters of a session, as a value. How they are applied to logits is `sampler.py`'s affair."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..errors import InvalidSampling

MAX_SEED = 2**64 - 1
# Below it, log-probabilities divided by the temperature leave the range of float32, and the draw is garbage.
LOWEST_TEMPERATURE = 1e-6


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is drawn from the logits.

    The defaults are greedy: temperature 0 takes the argmax, and the other fields then matter only through
    `repetition_penalty`, which is applied to the logits of the last 64 tokens before anything else.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what cannot be sampled from (threat 48: NaN, negative, beyond 64 bits).

        Raises:
            InvalidSampling: naming the field and the values it takes.
        """
        if self.temperature != 0 or isinstance(self.temperature, bool):
            _require("temperature", self.temperature, LOWEST_TEMPERATURE, 100.0, also="0 or ")
        _require("top_p", self.top_p, 1e-6, 1.0)
        _require("top_k", self.top_k, 0, 2**31 - 1, kind=int)
        _require("min_p", self.min_p, 0.0, 1.0)
        _require("repetition_penalty", self.repetition_penalty, 1e-3, 100.0)
        _require("seed", self.seed, 0, MAX_SEED, kind=int)

    def changed(self, named: Mapping[str, float | int] | None) -> Sampling:
        """These parameters, but for those that are named.

        Raises:
            InvalidSampling: a value is out of range.
        """
        return Sampling.from_map({**self.to_map(), **named}) if named else self

    def to_map(self) -> dict[str, float | int]:
        """The parameters as plain data, in the form that a snapshot keeps."""
        return asdict(self)

    @classmethod
    def from_map(cls, stored: Mapping[str, Any]) -> Sampling:
        """Read back what `to_map` gave.

        Raises:
            InvalidSampling: a field is unknown, missing or out of range.
        """
        names = set(cls.__dataclass_fields__)
        if set(stored) != names:
            raise InvalidSampling(
                f"Sampling parameters must be exactly {sorted(names)}, found {sorted(stored)}.",
                found=sorted(stored),
            )
        return cls(**stored)


def _require(
    field: str,
    value: float | int,
    lowest: float,
    highest: float,
    *,
    kind: type | tuple[type, ...] = (int, float),
    also: str = "",
) -> None:
    is_number = isinstance(value, kind) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not lowest <= value <= highest:
        what = "a whole number" if kind is int else "a number"
        raise InvalidSampling(
            f"{field} must be {also}{what} from {lowest:g} to {highest:g}, not {value!r}.",
            field=field,
            value=repr(value),
        )
