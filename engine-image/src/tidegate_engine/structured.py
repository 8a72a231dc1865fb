"""What a call may ask of its answer's form (a JSON schema, a regex, a grammar, a choice), and the grammar made of it.

Owns the fields' names, OpenAI's and vLLM's, and the check that a grammar can be compiled. Masking tokens by it is in
`grammars`. Called by `openai` and `completions`. llguidance is imported on use: the image without a model has none.
"""

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

MAX_CHARACTERS = 256 * 1024
"""Of a schema or grammar; compiling takes time and memory in proportion."""
MAX_CHOICE_TEXTS = 1000
MAX_JSON_DEPTH = 128
"""Nesting of what a client gives as a JSON object; Python's own JSON goes a few hundred levels deep."""
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,24}"
"""Between two parts of a JSON answer. Without a bound, a small model fills the context with it."""

Kind = Literal["json", "regex", "choice", "grammar"]
Choices = Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICE_TEXTS, fail_fast=True)]


def _refuse_depth(value: object) -> object:
    """One error however many values are too deep, unlike pydantic's JsonValue, which has one for each."""
    level = [value]
    for _ in range(MAX_JSON_DEPTH + 1):
        level = [
            child
            for node in level
            if isinstance(node, dict | list)
            for child in (node.values() if isinstance(node, dict) else node)
        ]
        if not level:
            return value
    raise PydanticCustomError("too_deep", "is nested over {limit} levels deep", {"limit": MAX_JSON_DEPTH})


JsonObject = Annotated[dict[str, Any], BeforeValidator(_refuse_depth)]
"""An object out of a JSON body: it holds JSON already, so that nothing but its depth is to be checked."""
Schema = JsonObject | bool | str


class StructureError(ValueError):
    """The form cannot be asked for. `param` is the field."""

    def __init__(self, message: str, *, param: str) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True, slots=True)
class Structure:
    """The form that a call asks for; `text` is a JSON schema, a regex, a JSON list, or a Lark or GBNF grammar."""

    kind: Kind
    text: str
    param: str


class NamedSchema(BaseModel):
    model_config = ConfigDict(extra="ignore")

    name: str | None = None
    definition: Schema = Field(alias="schema")


class ResponseFormat(BaseModel):
    """OpenAI's field."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


class StructuredOutputs(BaseModel):
    """vLLM's field."""

    model_config = ConfigDict(extra="ignore")

    definition: Schema | None = Field(None, alias="json")
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None


class StructureFields(BaseModel):
    """The fields of a call that say which form the answer must have; one of them at most."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None

    def structure(self) -> Structure | None:
        """The form asked for; raises StructureError when there are several, or half of one."""
        found = [*_from_response_format(self.response_format), *_from_structured_outputs(self.structured_outputs)]
        guided: tuple[tuple[Kind, object], ...] = (
            ("json", self.guided_json),
            ("regex", self.guided_regex),
            ("choice", self.guided_choice),
            ("grammar", self.guided_grammar),
        )
        found += [Structure(kind, _text(value), f"guided_{kind}") for kind, value in guided if value is not None]
        if len(found) > 1:
            names = " and ".join(structure.param for structure in found)
            raise StructureError(f"an answer has one form, and {names} ask for several", param=found[1].param)
        return found[0] if found else None


def compile_grammar(structure: Structure) -> str:
    """llguidance's grammar for `structure`; raises StructureError saying what is wrong. May take seconds."""
    import llguidance

    param = structure.param
    if len(structure.text) > MAX_CHARACTERS:
        raise StructureError(
            f"{param} has {len(structure.text)} characters; at most {MAX_CHARACTERS} are compiled", param=param
        )
    try:
        if structure.kind == "json":
            options: llguidance.JsonCompileOptions = {"whitespace_pattern": WHITESPACE}
            grammar = llguidance.LLMatcher.grammar_from_json_schema(structure.text, defaults=options)
        else:
            grammar = llguidance.grammar_from(structure.kind, structure.text)
    except ValueError as error:
        raise StructureError(f"{param} cannot be read: {_first_line(str(error))}", param=param) from error
    is_error, messages = llguidance.LLMatcher.validate_grammar_with_warnings(grammar)
    if is_error:
        raise StructureError(f"{param} cannot be compiled: {_first_line(messages[0])}", param=param)
    return str(grammar)


def _from_response_format(field: ResponseFormat | None) -> list[Structure]:
    param = "response_format"
    if field is None or field.type == "text":
        return []
    if field.type == "json_object":
        return [Structure("json", '{"type": "object"}', param)]
    if field.json_schema is None:
        raise StructureError("response_format of the type json_schema needs json_schema.schema", param=param)
    return [Structure("json", _text(field.json_schema.definition), param)]


def _from_structured_outputs(field: StructuredOutputs | None) -> list[Structure]:
    if field is None:
        return []
    values: tuple[tuple[Kind, object], ...] = (
        ("json", field.definition),
        ("json", {"type": "object"} if field.json_object else None),
        ("regex", field.regex),
        ("choice", field.choice),
        ("grammar", field.grammar),
    )
    return [Structure(kind, _text(value), f"structured_outputs.{kind}") for kind, value in values if value is not None]


def _text(value: object) -> str:
    """A schema may come as an object or as its text."""
    return value if isinstance(value, str) else json.dumps(value)


def _first_line(message: str) -> str:
    return message.strip().partition("\n")[0][:300]
