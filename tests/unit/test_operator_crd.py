"""The generator: what it makes of pydantic models, and which models it refuses."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import yaml
from pydantic import Field

from tidegate_operator import api, crd

RULE: dict[str, Any] = {"x-kubernetes-validations": [{"rule": "true", "message": "never"}]}
FORBIDDEN = {
    "$ref", "$defs", "definitions", "anyOf", "oneOf", "allOf", "const", "title", "id", "patternProperties",
    "additionalItems", "dependencies", "uniqueItems", "prefixItems", "discriminator", "examples",
    "exclusiveMinimum", "exclusiveMaximum",
}  # fmt: skip


def schemas(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The schema and every one inside it."""
    yield schema
    for part in (*schema.get("properties", {}).values(), schema.get("items"), schema.get("additionalProperties")):
        if isinstance(part, dict):
            yield from schemas(part)


def root() -> dict[str, Any]:
    schema: dict[str, Any] = crd.custom_resource_definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return schema


def test_no_schema_holds_a_word_that_a_structural_one_may_not() -> None:
    for schema in schemas(root()):
        assert not FORBIDDEN & schema.keys()
        assert not ("properties" in schema and "additionalProperties" in schema)


def test_every_schema_has_a_type_or_is_an_int_or_string() -> None:
    for schema in schemas(root()):
        assert "type" in schema or schema.get("x-kubernetes-int-or-string")


def test_every_field_is_described() -> None:
    for schema in schemas(root()):
        for name, part in schema.get("properties", {}).items():
            assert part.get("description") or name == "metadata", name


def test_every_list_map_has_keys_that_are_required() -> None:
    for schema in schemas(root()):
        if schema.get("x-kubernetes-list-type") == "map":
            keys = schema["x-kubernetes-list-map-keys"]
            assert set(keys) <= set(schema["items"]["required"])


def test_the_definition_stays_below_64_kib() -> None:
    assert len(json.dumps(crd.custom_resource_definition(), separators=(",", ":"))) < 64 * 1024
    assert len(crd.plain_file().encode()) < 64 * 1024


def test_replicas_have_no_default_so_that_an_autoscaler_can_own_them() -> None:
    assert "default" not in root()["properties"]["spec"]["properties"]["replicas"]


class Inner(api.Part):
    size: int = Field(default=3, ge=1, description="Size.")


class Outer(api.Part):
    plain_name: Inner | None = Field(default=None, description="The field's words.")
    names: tuple[str, ...] = Field(default=(), max_length=3, description="Names.")
    anything: dict[str, Any] = Field(default_factory=dict, description="Anything.")


def test_a_named_model_is_inlined_under_its_camel_case_name_with_the_fields_words() -> None:
    made = crd.structural(Outer)["properties"]["plainName"]
    assert made == {
        "type": "object",
        "description": "The field's words.",
        "properties": {"size": {"type": "integer", "default": 3, "minimum": 1, "description": "Size."}},
    }


def test_an_open_map_keeps_what_it_does_not_know() -> None:
    made = crd.structural(Outer)["properties"]["anything"]
    assert made == {"type": "object", "description": "Anything.", "x-kubernetes-preserve-unknown-fields": True}


class Endless(api.Part):
    names: tuple[str, ...] = ()


class LongText(api.Part):
    text: str = Field(default="", json_schema_extra=RULE)


class WideMap(api.Part):
    texts: Mapping[str, int] = Field(default_factory=dict, json_schema_extra=RULE)


class Either(api.Part):
    value: int | tuple[int, ...] = 0


class Exclusive(api.Part):
    value: int = Field(default=1, gt=0)


class Endlessly(api.Part):
    deeper: "Endlessly | None" = None


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Endless, "Endless.names: a list needs max_length"),
        (LongText, "LongText.text: a string under a rule needs max_length"),
        (WideMap, "WideMap.texts: a map under a rule needs max_length"),
        (Either, "Either.value: a union of 2 types is not structural"),
        (Exclusive, "Exclusive.value: exclusiveMinimum has no structural form here"),
        (Endlessly, "Endlessly contains itself"),
    ],
)
def test_a_model_that_has_no_structural_form_is_refused_by_its_path(model: type[api.Part], message: str) -> None:
    with pytest.raises(crd.SchemaError, match=message.replace(".", r"\.")):
        crd.structural(model)


@pytest.mark.parametrize(
    "text",
    ["yes", "n", "null", "1.5", "a: b", "# a", "", "- x", "{x}", "a, b", "it's", 'a "b"', "é…", 40 * "long, text "],
)
def test_the_yaml_writer_never_changes_a_text(text: str) -> None:
    value = {"spec": [{"n": text, "list": [text, text], "empty": [], "none": {}}], text: True}
    assert yaml.safe_load(crd._yaml(value, "")) == value
