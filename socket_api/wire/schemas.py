"""JSON schemas of the records that cross the wire, for what describes verbs to others.

Owns where shared definitions stand: beside the schemas, under a place that the caller chooses.
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any, Literal, get_type_hints

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

from ...daemon.api.events import NEVER_SENT
from ...records import Record


class _Generator(GenerateJsonSchema):
    # The defaults of a sampling are numbers of classes of their own, and are left out of its schema.
    ignored_warning_kinds = {"non-serializable-default"}  # noqa: RUF012 - as pydantic declares it


class Schemas:
    """Makes schemas. place: the path of the shared definitions. shared: these definitions, so far."""

    def __init__(self, place: str) -> None:
        self._reference = f"#/{place}/{{model}}"
        self.shared: dict[str, Any] = {}

    def schema_of(self, declared: Any, mode: Literal["validation", "serialization"]) -> dict[str, Any]:
        """The schema of a type."""
        adapter = TypeAdapter(declared)
        schema = adapter.json_schema(ref_template=self._reference, mode=mode, schema_generator=_Generator)
        self.shared.update(schema.pop("$defs", {}))
        return schema

    def fields_of(self, record: type[Record]) -> dict[str, tuple[dict[str, Any], bool]]:
        """The schema of each field of a request that crosses the wire, and whether it must be given."""
        hints = get_type_hints(record, include_extras=True)
        return {
            each.name: (self.schema_of(hints[each.name], "validation"), each.default is MISSING)
            for each in fields(record)
            if each.name not in NEVER_SENT
        }


def object_of(taken: dict[str, tuple[dict[str, Any], bool]]) -> dict[str, Any]:
    """The schema of an object with these fields, and no others."""
    return {
        "type": "object",
        "properties": {name: schema for name, (schema, _) in taken.items()},
        "required": [name for name, (_, needed) in taken.items() if needed],
        "additionalProperties": False,
    }
