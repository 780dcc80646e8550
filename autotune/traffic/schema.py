"""The JSON schema of `traffic.yaml`, for editors that complete keys and mark mistakes."""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from autotune.traffic.profile import TrafficProfile

FILE_NAME = "traffic.schema.json"
"""What the first line of a shipped profile calls it; it stands beside them."""


def profile_schema() -> dict[str, Any]:
    """Return the schema (draft 2020-12).

    It knows keys, types and bounds. Rules over several keys, such as "exactly one of `file` and
    `builtin`", are told when the profile is read.
    """
    schema = TrafficProfile.model_json_schema(schema_generator=_ForEditors)
    return {"$schema": _ForEditors.schema_dialect, **schema, "title": "traffic.yaml"}


class _ForEditors(GenerateJsonSchema):
    """Leaves out what says nothing to a reader: titles made of keys, and OpenAPI's own keyword."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def tagged_union_schema(self, schema: core_schema.TaggedUnionSchema) -> JsonSchemaValue:
        found = super().tagged_union_schema(schema)
        found.pop("discriminator", None)
        return found
