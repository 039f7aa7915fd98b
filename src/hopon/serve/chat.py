"""Chat templates: a list of messages becomes the text that the model was trained on.

Templates are programs that come with a model file, so they run in jinja2's immutable sandbox, with the same extras that
Hugging Face's template engine offers. This module knows messages and text, nothing of token ids.

What users write must not become control tokens. A chat text is spoilt by a message that contains, say, "<|im_end|>" and
a forged next turn. So before rendering every string of a message is *guarded*: a mark is put inside each spelling of a
control token. Templates may trim, split and quote as they like; afterwards the marks tell the template's own control
tokens from the user's text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = Mapping[str, Any]

OPEN, CLOSE = "<tool_call>", "</tool_call>"
"""Marks around a call of a function, as Hermes and Qwen models write it."""


class ChatTemplate:
    """The templates of one model.

    Args:
        sources: template texts by name; "default" is the ordinary one, "tool_use" (if any) the one for tools.
        tokens: names (``bos_token``, ...) to texts, visible to the template.

    Raises:
        ValueError: a template is not valid.
    """

    def __init__(self, sources: Mapping[str, str], tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self.sources = dict(sources)
        self._tokens = dict(tokens)
        self._templates: dict[str, Template] = {}
        for name, source in sources.items():
            try:
                self._templates[name] = environment.from_string(source)
            except TemplateError as error:
                raise ValueError(f"the chat template {name!r} of the model is not valid: {error}") from error

    def mentions(self, word: str) -> bool:
        """Whether any of the templates looks at something of that name."""
        return any(word in source for source in self.sources.values())

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a conversation.

        Args:
            messages: ``{"role": ..., "content": ...}`` each; content a string, a list of text parts or None.
            add_generation_prompt: end with the opening of the assistant's turn.
            continue_final_message: end with the text of the last message instead, which the answer goes on with.
            tools: function descriptions. A template that does not know calls in the form of Hermes and Qwen models gets
                a conversation that is all words; see :func:`describe`.
            kwargs: more variables for the template.

        Raises:
            ValueError: the model has no template, a message is not usable, or the template refuses the conversation.
        """
        template = self._templates.get("tool_use" if tools and "tool_use" in self._templates else "default")
        if template is None:
            raise ValueError(
                "this model has no chat template, so there is no telling how it wants conversations: use "
                "/v1/completions, or give the model's folder a chat_template.jinja"
            )
        messages = [flatten(message, i) for i, message in enumerate(messages)]
        if not (self.mentions(OPEN) and self.mentions("tools")):
            messages, tools = describe(messages, tools or ()), None
        variables: dict[str, Any] = {
            **self._tokens,
            "messages": messages,
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
        }
        for name, value in (kwargs or {}).items():
            if name in variables:
                raise ValueError(f"chat_template_kwargs must not set {name!r}, which has a field or meaning of its own")
            variables[name] = value
        variables.setdefault("documents", None)
        try:
            text = template.render(variables)
        except SecurityError as error:
            raise ValueError(f"the chat template tried something that is not allowed: {error}") from error
        except (TemplateError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
            raise ValueError(f"the chat template refuses this conversation: {error}") from error
        return _up_to_the_end_of(variables["messages"][-1]["content"], text) if continue_final_message else text


def _up_to_the_end_of(content: str, text: str) -> str:
    """A conversation without what the template puts behind its last message.

    Templates may trim a message: then its own blanks at the end are gone, else they stay.
    """
    bare = content.strip()
    at = text.rfind(bare)
    if not bare or at < 0:
        raise ValueError("continue_final_message needs a last message with text that the chat template shows")
    whole = content.lstrip()
    return text[: at + len(whole if text.startswith(whole, at) else bare)]


def flatten(message: Message, index: int) -> dict[str, Any]:
    """A message whose content is one string: text parts are joined with line feeds, null becomes the empty string.

    Raises:
        ValueError: names the part that is not text.
    """
    content = message.get("content")
    if content is None:
        content = ""
    elif not isinstance(content, str):
        texts = []
        for i, part in enumerate(content):
            if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
                where = f"messages[{index}].content[{i}]"
                raise ValueError(f"{where}: only parts of type 'text' are supported, got {kind!r}")
            texts.append(part["text"])
        content = "\n".join(texts)
    return {**message, "content": content}


def describe(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A conversation for a template that knows no tools: all of it in words.

    The tools join the system prompt, calls the assistant's text, and results become what the user says.
    """
    said: list[dict[str, Any]] = []
    for message in messages:
        match message["role"]:
            case "assistant" if message.get("tool_calls"):
                calls = [_call_text(call["function"]) for call in message["tool_calls"]]
                content = "\n".join(filter(None, (message.get("content"), *calls)))
                said.append({"role": "assistant", "content": content})
            case "tool":
                result = f"<tool_response>\n{message['content']}\n</tool_response>"
                if said and said[-1].get("results"):
                    said[-1]["content"] += "\n" + result
                else:
                    said.append({"role": "user", "content": result, "results": True})
            case _:
                said.append(dict(message))
    for message in said:
        message.pop("results", None)
    if not tools:
        return said
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    call = _call_text({"name": "NAME", "arguments": {"ARGUMENT": "VALUE"}})
    manual = (
        f"You can call functions. Here they are, one a line, with JSON schemas of their parameters:\n<tools>\n{lines}\n"
        f"</tools>\nTo call a function, write its name and arguments in this form, once for every call:\n{call}"
    )
    if said and said[0]["role"] == "system":
        return [{**said[0], "content": f"{said[0].get('content') or ''}\n\n{manual}".strip()}, *said[1:]]
    return [{"role": "system", "content": manual}, *said]


def _call_text(function: Mapping[str, Any]) -> str:
    body = {"name": function["name"], "arguments": function["arguments"]}
    return f"{OPEN}\n{json.dumps(body, ensure_ascii=False)}\n{CLOSE}"


class Guard:
    """Keeps spellings of control tokens in users' text apart from those that a template writes.

    Args:
        specials: spellings of the control tokens.
    """

    _MARKS = ("\x7f", *map(chr, range(0xE000, 0xF900)))  # DEL, then the private use area; JSON writes DEL as it is

    def __init__(self, specials: Iterable[str]) -> None:
        spellings = sorted(specials, key=len, reverse=True)
        either = "|".join(map(re.escape, spellings)) or r"(?!)"
        self._split = re.compile(f"({either})")
        self._first = re.compile(f"(?=(?:{either}))(?s:.)")  # every position at which one begins, overlapping ones too

    def protect(self, values: Sequence[Any]) -> tuple[list[Any], str]:
        """Marked copies of nested JSON values, and the mark; the mark is empty when nothing needed one.

        Raises:
            ValueError: the text uses every character that could serve as a mark.
        """
        strings = list(_strings(values))
        if not any(self._split.search(text) for text in strings):
            return list(values), ""
        used = set().union(*strings)
        mark = next((mark for mark in self._MARKS if mark not in used), None)
        if mark is None:
            raise ValueError("the messages use the whole private use area of Unicode")
        return _visit(list(values), lambda text: self._first.sub(lambda match: match[0] + mark, text)), mark

    def split(self, text: str) -> list[str]:
        """Cut at the control tokens: ordinary text at even places, spellings at odd ones."""
        return self._split.split(text)


def _strings(value: Any) -> Iterator[str]:
    """Every string of nested JSON values, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield key
            yield from _strings(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _strings(item)


def _visit(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of nested JSON values with every string changed, keys too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key): _visit(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_visit(item, change) for item in value]
    return value


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes for HTML, which models have never seen.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise TemplateError(message)


class _Generation(Extension):
    """``{% generation %}`` marks what an assistant says, for training; in rendering it is nothing."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
