"""A verb: one row of the table `Verbs`, and a method of each class that asks.

A row names the records of the request and the answer; the fields of the request are the parameters of the method. The
method blocks or is awaited, as the `ask` of its class. Type checkers infer both from the same row, and `help` shows the
parameters.

Does not know the verbs, or how they are sent and answered.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from functools import cached_property, partial
from typing import Any, Generic, ParamSpec, Self, TypeVar, cast, get_type_hints, overload

from ...records import Result
from ...spellings import by_present_names
from .records import Request

P = ParamSpec("P")
R = TypeVar("R", bound=Result)
T = TypeVar("T")


class Blocking(ABC):
    """A class whose `ask` blocks until the answer."""

    @abstractmethod
    def ask(self, verb: Verb[Any, R], request: Request) -> R:
        """Send the request of a row."""


class Awaiting(ABC):
    """A class whose `ask` is awaited."""

    @abstractmethod
    async def ask(self, verb: Verb[Any, R], request: Request) -> R:
        """Send the request of a row."""


class Verb(Generic[P, R]):
    """One row. As an attribute of a class it is the method of that name.

    name: on the wire, if it is not that of the attribute.
    leaves: a sentence on the work that stays after a cancel. None: it cannot be cancelled; the work is short or must
    not be left half done.
    always: accepted even while the daemon stops, and on reserve connections: an administrator must get through.
    watches: it goes on until it is cancelled or the service has ended, so a stop does not cancel it or wait for it.
    """

    def __init__(
        self,
        request: Callable[P, Request],
        result: type[R],
        *,
        name: str = "",
        leaves: str | None = None,
        always: bool = False,
        watches: bool = False,
    ) -> None:
        self.request = cast("type[Request]", request)
        self.result = result
        self.name = name
        self.leaves = leaves
        self.always = always
        self.watches = watches
        self.attribute = name

    def __set_name__(self, owner: type, name: str) -> None:
        self.attribute = name
        self.name = self.name or name

    @property
    def cancellable(self) -> bool:
        """Whether a request can be stopped."""
        return self.leaves is not None

    @overload
    def __get__(self, caller: None, owner: type) -> Self: ...

    @overload
    def __get__(self, caller: Blocking, owner: type) -> Callable[P, R]: ...

    @overload
    def __get__(self, caller: Awaiting, owner: type) -> Callable[P, Coroutine[Any, Any, R]]: ...

    def __get__(self, caller: Any, owner: type) -> Any:
        """A bound method; for the class, a documented function that takes the caller first."""
        return self._method if caller is None else self._method.__get__(caller)

    @cached_property
    def _method(self) -> Callable[..., Any]:
        def ask(caller: Any, /, *args: Any, **options: Any) -> Any:
            return caller.ask(self, _made(self.request, self.attribute, args, options))

        return documented(ask, self.attribute, self.request, self.result)


class Opened(Generic[P, T]):
    """A second method for a verb: it takes the fields of its request, and returns the answer in pieces.

    opens: makes that answer, for a caller and its request. said: the method's docstring; if empty, the request's.
    """

    def __init__(self, request: Callable[P, Request], opens: Callable[[Any, Any], T], said: str = "") -> None:
        self._request = cast("type[Request]", request)
        self._opens = opens
        self._said = said
        self._attribute = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._attribute = name

    def __get__(self, caller: Any, owner: type) -> Callable[P, T]:
        method: Callable[P, T] = self._method if caller is None else self._method.__get__(caller)
        return method

    @cached_property
    def _method(self) -> Any:
        request, opens = self._request, self._opens

        def ask(caller: Any, /, *args: Any, **options: Any) -> Any:
            return opens(caller, _made(request, self._attribute, args, options))

        found = documented(ask, self._attribute, request, get_type_hints(opens).get("return", Any))
        found.__doc__ = self._said or found.__doc__
        return found


def _made(request: type[Request], method: str, args: Sequence[Any], options: Mapping[str, Any]) -> Request:
    """The request of a call. Raises TypeError: with the name of the method, which is what the caller knows."""
    try:
        return request(*args, **by_present_names(options))
    except TypeError as error:
        told, taken = str(error).replace(f"{request.__name__}.__init__()", f"{method}()"), fields(request)
        positional = sum(not each.kw_only for each in taken)
        if len(args) > positional:
            told += f"; give by name: {', '.join(each.name for each in taken[positional:])}"
        raise TypeError(told) from None


def documented(ask: Callable[..., Any], name: str, request: type[Request], result: object) -> Callable[..., Any]:
    """Give a function its name, parameters and docstring for `help`."""
    caller = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    taken = sorted(map(partial(_parameter, get_type_hints(request)), fields(request)), key=lambda each: each.kind)
    ask.__signature__ = inspect.Signature([caller, *taken], return_annotation=result)  # type: ignore[attr-defined]
    ask.__name__ = ask.__qualname__ = name
    ask.__doc__ = request.__doc__
    return ask


def _parameter(kinds: Mapping[str, Any], of: Field[Any]) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY if of.kw_only else inspect.Parameter.POSITIONAL_OR_KEYWORD
    default = inspect.Parameter.empty if of.default is MISSING else of.default
    return inspect.Parameter(of.name, kind, default=default, annotation=kinds[of.name])
