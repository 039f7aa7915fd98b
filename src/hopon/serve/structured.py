"""Request fields that say what an output must look like, and the guide that they come to.

``response_format`` is OpenAI's, ``structured_outputs`` and the older ``guided_...`` fields are vLLM's. At most one of
them may ask for something. Whether a guide can be followed is for :mod:`hopon.model.guide` to say.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from hopon.core.types import Guide, GuideKind

Schema = dict[str, Any] | bool
Choices = list[str]


class FieldError(ValueError):
    """A request that cannot be served as it stands; ``param`` names the field."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


class SchemaFormat(BaseModel):
    """A named JSON schema. Outputs keep to it whether ``strict`` or not."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str | None = Field(None, description="Has no effect.")
    description: str | None = Field(None, description="Has no effect.")
    strict: bool | None = Field(None, description="Has no effect: schemas are always kept to.")
    json_schema: Schema | None = Field(None, alias="schema", description="Default: any JSON object.")


class ResponseFormat(BaseModel):
    """What the text is to be."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaFormat | None = Field(None, description="For type json_schema.")


class StructuredOutputs(BaseModel):
    """What the text must be: one of ``json``, ``json_object``, ``regex``, ``choice`` and ``grammar``."""

    model_config = ConfigDict(extra="forbid", strict=True)

    json_schema: Schema | str | None = Field(None, alias="json", description="A JSON schema, or one as text.")
    json_object: bool | None = Field(None, description="Any JSON object.")
    regex: str | None = Field(None, description="A regular expression that the whole text matches.")
    choice: Choices | None = Field(None, description="Texts, one of which it must be.")
    grammar: str | None = Field(None, description="A grammar, Lark-like or GBNF.")
    disable_any_whitespace: bool | None = Field(None, description="No blanks between the parts of JSON.")
    whitespace_pattern: str | None = Field(None, description="Blanks between the parts of JSON match it.")
    disable_fallback: bool | None = Field(None, description="Has no effect: there is no fallback.")
    disable_additional_properties: Literal[False] | None = Field(None, description="Not supported.")
    structural_tag: None = Field(None, description="Not supported.")


class StructuredRequest(BaseModel):
    """The fields of a request that say what its output must look like."""

    model_config = ConfigDict(extra="forbid", strict=True)

    response_format: ResponseFormat | None = Field(None, description="Text, JSON, or JSON that keeps to a schema.")
    structured_outputs: StructuredOutputs | None = Field(None, description="As vLLM has it.")
    guided_json: Schema | str | None = Field(None, description="structured_outputs.json by its older name.")
    guided_regex: str | None = Field(None, description="structured_outputs.regex by its older name.")
    guided_choice: Choices | None = Field(None, description="structured_outputs.choice by its older name.")
    guided_grammar: str | None = Field(None, description="structured_outputs.grammar by its older name.")
    guided_whitespace_pattern: str | None = Field(
        None, description="structured_outputs.whitespace_pattern by its older name."
    )

    def guide(self) -> tuple[str, Guide] | None:
        """What the output must keep to and the field that says so, or None for anything.

        Raises:
            FieldError: several fields ask for something.
        """
        found = list(self._guides())
        if len(found) > 1:
            names = " and ".join(name for name, _ in found)
            raise FieldError(found[1][0].partition(".")[0], f"{names} exclude each other: at most one may be given")
        return found[0] if found else None

    def _guides(self) -> Iterator[tuple[str, Guide]]:
        form = self.response_format
        if form is not None and form.type == "json_object":
            yield "response_format", json_guide(None)
        if form is not None and form.type == "json_schema":
            if form.json_schema is None:
                raise FieldError("response_format", "response_format.json_schema is missing")
            yield "response_format", json_guide(form.json_schema.json_schema)
        asked = self.structured_outputs or StructuredOutputs.model_validate({})
        blanks = _blanks(asked.disable_any_whitespace, asked.whitespace_pattern)
        old_blanks = _blanks(None, self.guided_whitespace_pattern)
        for name, schema, options in (
            ("structured_outputs.json", asked.json_schema, blanks),
            ("guided_json", self.guided_json, old_blanks),
        ):
            if schema is not None:
                yield name, json_guide(schema, options)
        if asked.json_object:
            yield "structured_outputs.json_object", json_guide(None, blanks)
        for name, regex in (("structured_outputs.regex", asked.regex), ("guided_regex", self.guided_regex)):
            if regex is not None:
                yield name, Guide(GuideKind.REGEX, regex)
        for name, choice in (("structured_outputs.choice", asked.choice), ("guided_choice", self.guided_choice)):
            if choice is not None:
                yield name, Guide(GuideKind.CHOICE, json.dumps(choice, ensure_ascii=False))
        for name, grammar in (("structured_outputs.grammar", asked.grammar), ("guided_grammar", self.guided_grammar)):
            if grammar is not None:
                yield name, Guide(GuideKind.GRAMMAR, grammar)


def json_guide(schema: Schema | str | None, options: dict[str, Any] | None = None) -> Guide:
    """JSON that keeps to a schema, or any JSON object; ``options`` are those that a schema has as "x-guidance"."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise FieldError("structured_outputs", f"the JSON schema is not valid JSON: {error}") from error
    if schema is None:
        return Guide(GuideKind.JSON_OBJECT, json.dumps({"x-guidance": options}) if options else "")
    if options and isinstance(schema, dict):
        schema = schema | {"x-guidance": options}
    return Guide(GuideKind.JSON_SCHEMA, json.dumps(schema))


def _blanks(none: bool | None, pattern: str | None) -> dict[str, Any]:
    """What a request says of the blanks between the parts of JSON, in llguidance's words."""
    if none:
        return {"whitespace_flexible": False}
    return {} if pattern is None else {"whitespace_pattern": pattern}
