"""What a mutant is: a fault that is planted in the code, and must be found. Must not import torpor."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Edit:
    """In one function: take out the statement that holds `take_out`; put `put_in` in its place, or before or after
    another one. A module is named as `modules` names it."""

    module: str
    function: str
    take_out: str | None = None
    put_in: str | None = None  # None, beside another statement: what was taken out
    after: str | None = None
    before: str | None = None


@dataclass(frozen=True, slots=True)
class Mutant:
    """test: by which it must be found, as pytest names it from the root of the repository; empty: by the replay of
    power cuts."""

    name: str
    edits: tuple[Edit, ...] = ()
    flush: tuple[str, str, int] | None = None  # module, function, the how-manieth flush in it: left out
    test: str = ""
