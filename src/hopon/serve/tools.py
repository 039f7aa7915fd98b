"""Tools: what a client offers, how the model hears of it, and the calls in what it says.

Calls have the form that Hermes and Qwen models are trained on: a JSON object with ``name`` and ``arguments`` between
``<tool_call>`` and ``</tool_call>``. How models hear of tools is in :mod:`hopon.serve.chat`. A forced call is a guide.
This module knows requests and text; nothing of tokens or HTTP.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from hopon.core.types import Guide, GuideKind
from hopon.model.guide import GuideError, bounded_schema
from hopon.serve.chat import CLOSE, OPEN
from hopon.serve.structured import FieldError

MAX_TOOLS = 128
MAX_FORCED_CALLS = 16
"""Most calls that one forced answer makes; a small model may know no end."""

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]


class FunctionTool(BaseModel):
    """What can be called."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="A JSON schema of the arguments. Default: none.")
    strict: bool | None = Field(None, description="Arguments keep to the schema even where the call is not forced.")

    def arguments(self) -> Guide:
        """What its arguments must be.

        Raises:
            FieldError: that is no JSON schema.
        """
        nothing = {"type": "object", "properties": {}, "additionalProperties": False}
        try:
            text = bounded_schema(json.dumps({"type": "object"} | (self.parameters or nothing)))
        except GuideError as error:
            raise FieldError("tools", f"parameters of {self.name!r} in tools: {error}") from error
        return Guide(GuideKind.JSON_SCHEMA, text)


class Tool(BaseModel):
    """One of the tools. Only functions are known."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["function"]
    function: FunctionTool


class FunctionName(BaseModel):
    """The function that must be called."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str


class NamedTool(BaseModel):
    """The tool that must be called."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["function"]
    function: FunctionName


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class CalledFunction(BaseModel):
    """A call in an assistant's message."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str
    arguments: str = Field(description="A JSON object, as text.")
    parsed_arguments: Any = Field(None, description="The openai package's reading of arguments. Has no effect.")


class ToolCall(BaseModel):
    """One of the calls in an assistant's message."""

    model_config = ConfigDict(extra="forbid", strict=True)

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = Field(None, description="Has no effect.")

    def described(self, where: str) -> dict[str, Any]:
        """As templates want it, with the arguments as an object.

        Raises:
            FieldError: the arguments are no JSON object.
        """
        try:
            arguments = json.loads(self.function.arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise FieldError("messages", f"{where}.function.arguments is not valid JSON: {error}") from error
        if not isinstance(arguments, dict):
            raise FieldError("messages", f"{where}.function.arguments must be a JSON object")
        return {"id": self.id, "type": "function", "function": {"name": self.function.name, "arguments": arguments}}


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolUse:
    """What a request says of tools, in the end.

    Args:
        tools: those that the model may call.
        guide: keeps the output to calls, or the calls in it to their schemas; None: anything goes.
        is_forced: the output is nothing but calls.
        most: calls that are wanted at most; None: any number.
        schemas: of the parameters that the guide knows, by function, as guides of their own.
    """

    tools: tuple[FunctionTool, ...]
    guide: Guide | None
    schemas: Mapping[str, Guide]
    is_forced: bool
    most: int | None

    @property
    def names(self) -> frozenset[str]:
        """What may be called."""
        return frozenset(tool.name for tool in self.tools)

    def described(self) -> list[dict[str, Any]]:
        """The tools as templates want them."""
        return [
            {"type": "function", "function": tool.model_dump(exclude_none=True, exclude={"strict"})}
            for tool in self.tools
        ]


def tool_use(tools: Sequence[Tool] | None, choice: ToolChoice | None, parallel: bool | None) -> ToolUse | None:
    """What the three fields come to; None: no tools are used.

    Raises:
        FieldError: they contradict each other, or a schema cannot be followed.
    """
    functions = {tool.function.name: tool.function for tool in tools or ()}
    if len(functions) < len(tools or ()):
        raise FieldError("tools", "tools must have different names")
    if not functions and choice not in (None, "none", "auto"):
        raise FieldError("tool_choice", "tool_choice needs tools: there are none to choose from")
    if not functions or choice == "none":
        return None
    most = 1 if parallel is False else None
    callable_functions = list(functions.values())
    if isinstance(choice, NamedTool):
        if choice.function.name not in functions:
            raise FieldError("tool_choice", f"tool_choice {choice.function.name[:64]!r} is none of the tools")
        callable_functions, most = [functions[choice.function.name]], 1
    is_forced = choice not in (None, "auto")
    schemas = {f.name: f.arguments() for f in callable_functions if is_forced or f.strict}
    guide = None
    if schemas:
        guide = Guide(GuideKind.GRAMMAR, _grammar([f.name for f in callable_functions], schemas, is_forced, most))
    return ToolUse(tools=tuple(functions.values()), guide=guide, is_forced=is_forced, most=most, schemas=schemas)


def _grammar(names: Sequence[str], schemas: Mapping[str, Guide], is_forced: bool, most: int | None) -> str:
    """Calls as a Lark-like grammar: nothing else if they are forced, else any text around them."""
    rules = []
    for i, name in enumerate(names):
        schema = schemas[name].text if name in schemas else bounded_schema('{"type": "object"}')
        opening = json.dumps(f'{{"name": "{name}", "arguments": ')
        rules.append(f'call_{i}: {opening} arguments_{i} "}}"\narguments_{i}: %json {schema}')
    body = f'"\\n" ({" | ".join(f"call_{i}" for i in range(len(names)))}) "\\n{CLOSE}"'
    if is_forced:
        start = "start: call" if most == 1 else f'start: call ("\\n" call){{0,{MAX_FORCED_CALLS - 1}}}'
        return "\n".join((start, f'call: "{OPEN}" {body}', *rules))
    start = "start: opening call TEXT | TEXT" if most == 1 else "start: (opening call)* TEXT"
    opening = f"opening[lazy]: /(?s:.*){OPEN}/\nTEXT: /(?s:.*)/ & ~/(?s:.*){OPEN}(?s:.*)/"
    return "\n".join((start, f"call: {body}", *rules, opening))


# ---- what the model says ----


@dataclass(frozen=True, slots=True)
class Content:
    """Ordinary text."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A call of a known function begins."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments: JSON text as the model writes it."""

    index: int
    text: str


Piece = Content | CallBegin | CallArguments

_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')


class CallParser:
    """Finds the calls in a growing text.

    A call is told as soon as its name is known and its arguments have begun; its arguments follow as they come. What
    only looks like the beginning of a call, and calls that are malformed or name no known function, are content. A text
    is held back only while it could still be a mark or the head of a call. Blanks around calls are left out.

    Args:
        names: known functions.
        most: calls at most; what follows is content. None: any number.
    """

    def __init__(self, names: frozenset[str], most: int | None = None) -> None:
        self.num_calls = 0
        self._names = names
        self._most = most
        self._held = ""
        self._read = self._read_text
        self._is_blank = True  # no content yet since the beginning or the last call
        self._depth = 0
        self._in_string = self._is_escaped = False

    def push(self, text: str) -> list[Piece]:
        """What more text makes certain."""
        self._held += text
        pieces: list[Piece] = []
        while self._read(pieces):
            pass
        return pieces

    def finish(self) -> list[Piece]:
        """What was held back; no text may follow."""
        pieces: list[Piece] = []
        held, self._held = self._held, ""
        if self._read == self._read_head:
            if not self._take_whole(held, pieces):
                self._say(OPEN + held, pieces)
        elif self._read == self._read_tail:
            rest = re.sub(r"^[\s}]*", "", held)
            if not CLOSE.startswith(rest):
                self._say(rest, pieces)
        elif held.strip() or (held and self.num_calls == 0):
            pieces.append(Content(held))
        return pieces

    # Each reader takes what it can from the front of what is held; True when another reader is to go on.

    def _read_text(self, pieces: list[Piece]) -> bool:
        before, mark, rest = self._held.partition(OPEN)
        if mark:
            self._held = rest
            self._say(before, pieces)
            if self._most is not None and self.num_calls >= self._most:
                self._say(OPEN, pieces)
            else:
                self._read = self._read_head
            return True
        keep = _overlap(self._held, OPEN)
        certain = self._held[: len(self._held) - keep]
        if self._is_blank and not certain.strip():
            return False
        self._held = self._held[len(certain) :]
        self._say(certain, pieces)
        return False

    def _read_head(self, pieces: list[Piece]) -> bool:
        held = self._held
        if head := _HEAD.match(held):
            name = _unquoted(head[1])
            if name in self._names:
                self._begin(name, pieces)
                self._held = held[head.end() :]
                self._depth, self._in_string, self._is_escaped = 0, False, False
                self._read = self._read_arguments
                return True
        elif CLOSE in held:
            body, _, rest = held.partition(CLOSE)
            if self._take_whole(body, pieces):
                self._held, self._read = rest, self._read_text
                return True
        elif "{".startswith(held.strip()[:1]):
            return False
        self._read = self._read_text
        self._say(OPEN, pieces)
        return True

    def _read_arguments(self, pieces: list[Piece]) -> bool:
        end = len(self._held)
        for i, char in enumerate(self._held):
            if self._in_string:
                if self._is_escaped:
                    self._is_escaped = False
                elif char == "\\":
                    self._is_escaped = True
                else:
                    self._in_string = char != '"'
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    end, self._read = i + 1, self._read_tail
                    break
            elif char == "<":  # no JSON: a mark without the braces before it
                end, self._read = i, self._read_tail
                break
        if end:
            pieces.append(CallArguments(self.num_calls - 1, self._held[:end]))
        self._held = self._held[end:]
        return self._read == self._read_tail

    def _read_tail(self, pieces: list[Piece]) -> bool:
        places = [place for mark in (CLOSE, OPEN) if (place := self._held.find(mark)) >= 0]
        if not places:
            return False
        self._held = self._held[min(places) :].removeprefix(CLOSE)
        self._read = self._read_text
        return True

    def _take_whole(self, body: str, pieces: list[Piece]) -> bool:
        """A call in any order of keys, complete; False when it is none."""
        try:
            call = json.loads(body)
        except (ValueError, RecursionError):
            return False
        if not isinstance(call, dict) or call.get("name") not in self._names:
            return False
        arguments = call.get("arguments", call.get("parameters", {}))
        if isinstance(arguments, str):
            arguments = _object(arguments)
        if not isinstance(arguments, dict):
            return False
        self._begin(call["name"], pieces)
        pieces.append(CallArguments(self.num_calls - 1, json.dumps(arguments, ensure_ascii=False)))
        return True

    def _begin(self, name: str, pieces: list[Piece]) -> None:
        pieces.append(CallBegin(self.num_calls, name))
        self.num_calls += 1
        self._is_blank = True

    def _say(self, text: str, pieces: list[Piece]) -> None:
        if not text or (self._is_blank and not text.strip()):
            return
        self._is_blank = False
        pieces.append(Content(text))


def _overlap(text: str, mark: str) -> int:
    """Length of the longest end of a text that begins a mark."""
    return next((size for size in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:size])), 0)


def _unquoted(text: str) -> str | None:
    value = None
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, str) else None


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
