"""Names that are spelled otherwise than they were: the earlier spelling works, and stands in no help and no list.

The table holds for each front: commands and their options, methods and their parameters, verbs and fields on the wire
and over HTTP, and operations on the store.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

EARLIER: Final[Mapping[str, str]] = MappingProxyType(
    {"analyse": "analyze", "quantise": "quantize", "summarise": "summarize"}
)
"""Each earlier spelling, with the present one."""


def present(name: Any) -> Any:
    """The present spelling of a name; anything else as it is."""
    return EARLIER.get(name, name) if isinstance(name, str) else name


def by_present_names(given: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters by the present spelling of their names."""
    return {present(name): value for name, value in given.items()}
