"""The base of every record that crosses the wire: strict fields, read from a map and written as one.

The store's answers and the records of the daemon's verbs are such, so that what the store says of a fact is what a
client reads of it. `socket_api` does the reading, where a map crosses the wire. In the process a record is a plain
value, and not checked; pydantic, which checks it, is not imported here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import MISSING, FrozenInstanceError, dataclass, field, fields
from types import GenericAlias
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, dataclass_transform, get_args

if TYPE_CHECKING:
    from pydantic import ConfigDict

FORBIDDING: Final[ConfigDict] = {"strict": True, "extra": "forbid", "allow_inf_nan": False}
IGNORING: Final[ConfigDict] = {"strict": True, "extra": "ignore", "allow_inf_nan": False}


@dataclass(frozen=True, slots=True)
class Bounds:
    """Marks a number that is at least `ge`, and at most `le`."""

    ge: float
    le: float | None = None

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        return {**handler(source), "ge": self.ge, **({} if self.le is None else {"le": self.le})}


Count = Annotated[int, Bounds(0)]


@dataclass(frozen=True, slots=True)
class Listed:
    """Marks a list of any kind; behind the wire it is a tuple. or_one: a single text stands for a list of it. at_once:
    items of a long list that are checked in one piece, about a millisecond. most: items that it may have."""

    or_one: bool = False
    at_once: int | None = None
    most: int | None = None

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic import BeforeValidator, Field

        (item,) = get_args(source)
        of_items: Any = GenericAlias(tuple, (item, ...))
        return handler.generate_schema(Annotated[of_items, Field(max_length=self.most), BeforeValidator(_as_tuple)])


def _as_tuple(value: object) -> object:
    return tuple(value) if type(value) is list else value


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class Record:
    """Base of all, which makes frozen dataclasses of them: no conversion, no NaN, no unknown field.

    What a dataclass does is written once here: to make it for each of two hundred classes took half of a command's time
    to begin."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    __pydantic_config__: ClassVar[Any] = FORBIDDING
    _by_place: ClassVar[Sequence[str]] = ()
    _defaults: ClassVar[dict[str, Any]] = {}
    _needed: ClassVar[Set[str]] = frozenset()

    def __init_subclass__(cls) -> None:
        dataclass(init=False, eq=False, repr=False)(cls)
        of = fields(cls)
        cls._by_place = tuple(each.name for each in of if not each.kw_only)
        cls._defaults = {each.name: each.default for each in of}
        cls._needed = {each.name for each in of if each.default is MISSING}

    def __init__(self, *values: Any, **named: Any) -> None:
        given = dict(zip(self._by_place, values, strict=False))
        given.update(named)
        whole = self._defaults | given
        is_sound = len(given) == len(values) + len(named) and len(whole) == len(self._defaults)
        if not (is_sound and self._needed <= given.keys()):
            whole = self._completed(values, named)
        self.__dict__.update(whole)
        if (check := getattr(self, "__post_init__", None)) is not None:
            check()

    def _completed(self, values: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
        """With the defaults that are made anew each time. Raises TypeError: in the words of a function."""
        given, of = dict(zip(self._by_place, values, strict=False)), f"{type(self).__qualname__}.__init__()"
        if len(values) > len(given):
            raise TypeError(f"{of} takes {len(given) + 1} positional arguments but {len(values) + 1} were given")
        for name in named:
            if name in given or name not in self._defaults:
                fault = "multiple values for argument" if name in given else "an unexpected keyword argument"
                raise TypeError(f"{of} got {fault} {name!r}")
        whole = {**self._defaults, **given, **named}
        for each in fields(self):
            if whole[each.name] is MISSING:
                make: Any = each.default_factory
                if make is MISSING:
                    raise TypeError(f"{of} missing 1 required argument: {each.name!r}")
                whole[each.name] = make()
        return whole

    def __setattr__(self, name: str, value: object) -> None:
        raise FrozenInstanceError(f"cannot assign to field {name!r}")

    def __delattr__(self, name: str) -> None:
        raise FrozenInstanceError(f"cannot delete field {name!r}")

    def __eq__(self, other: object) -> bool:
        return vars(self) == vars(other) if type(other) is type(self) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(vars(self).values()))

    def __repr__(self) -> str:
        told = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__qualname__}({told})"

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        """Read a record from a map: with strict fields pydantic would take only a record."""
        schema = handler(source)
        itself: Any = handler.resolve_ref_schema(schema)
        itself["strict"] = False
        return schema


def as_map(value: Any) -> Any:
    """A record as a map, with all records in it, as `dataclasses.asdict` has it. That copies each value, which took
    half of a listing; here those that cannot change stay themselves."""
    if isinstance(value, Record):
        return {name: each if type(each) in _UNCHANGING else as_map(each) for name, each in vars(value).items()}
    if isinstance(value, list | tuple):
        return [*map(as_map, value)] if isinstance(value, list) else (*map(as_map, value),)
    return {name: as_map(each) for name, each in value.items()} if isinstance(value, dict) else value


_UNCHANGING: Final = frozenset({str, int, bool, float, bytes, type(None)})


class Result(Record):
    """Base of every answer. A reader skips unknown fields, so that an older client works with a newer daemon."""

    __pydantic_config__: ClassVar[Any] = IGNORING
